"""Lesson 08's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
import threading
from typing import ClassVar

import pytest
import torch
from exercises import Exercises, exercises_of
from support import checks_08
from support.distributed_run import rows_held

A, B = exercises_of("08_distributed_run")


# --- A ---------------------------------------------------------------------------------------------------------


def numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


@pytest.mark.parametrize("ranks", [1, 3, 4, 5])
def test_the_right_bytes_are_those_of_the_lessons_rule_and_add_up(ranks: int) -> None:
    shapes = [(97, 32), (10, 3, 2), (5,)]
    right = [checks_08.right_bytes(shapes, ranks, rank) for rank in range(ranks)]
    by_rule = [12 * sum(rows_held(n, ranks)[rank] * numel(rest) for n, *rest in shapes) for rank in range(ranks)]
    assert right == by_rule
    assert sum(right) == 12 * sum(map(numel, shapes))


# --- B ---------------------------------------------------------------------------------------------------------

AGREE = "        all_reduce(bad)\n"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
BACKWARD = "        loss.backward()\n"
SKIP = '        if bad > 0:\n            rows.append("SKIP")\n            continue\n'
STEP = "        optimizer.step()\n"
STEP_ALONE = "        if not bad:\n            optimizer.step()\n"
NO_NAN = BACKWARD + "        [p.grad.nan_to_num_() for p in model.parameters()]\n"


def test_the_threads_all_reduce_is_a_sum_and_a_rank_that_has_gone_is_told_at_once() -> None:
    meeting, sums, hung = checks_08.Meeting(3), {}, []

    def work(rank: int) -> None:
        for _ in range(50):
            tensor = torch.tensor([1.0, rank])
            meeting.all_reduce(rank, tensor)
            sums.setdefault(rank, []).append(tensor.tolist())
        try:
            if rank != 1:
                meeting.all_reduce(rank, torch.zeros(1))
        except checks_08.HangError as error:
            hung.append((rank, str(error)))
        finally:
            meeting.leave(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert all(told == [[3.0, 3.0]] * 50 for told in sums.values())
    assert sorted(hung) == [(0, "in its all_reduce number 51"), (2, "in its all_reduce number 51")]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_solution_holds_for_other_weights_and_data(seed: int) -> None:
    assert checks_08.check_loop(*B.defined(B.solution), seed).startswith("Right: ")


class TestLesson08(Exercises):
    wrong: ClassVar = {
        A: [
            (lambda shapes, ranks, rank: 12 * sum(map(numel, shapes)), "96 rows divide by 4"),
            (lambda shapes, ranks, rank: 12 * sum(map(numel, shapes)) / ranks, "ceil(10 / 4)"),
            (lambda shapes, ranks, rank: 12 * sum(n // ranks * numel(rest) for n, *rest in shapes), "ceil(10 / 4)"),
            (
                # The rest spread evenly, as torch.tensor_split has it.
                lambda shapes, ranks, rank: (
                    12 * sum((n // ranks + (rank < n % ranks)) * numel(rest) for n, *rest in shapes)
                ),
                "rank 3 of 4 holds 96 bytes; you said 192",
            ),
            (
                lambda shapes, ranks, rank: sum(rows_held(n, ranks)[rank] * numel(rest) for n, *rest in shapes),
                "You left out the 12 bytes",
            ),
            (
                lambda shapes, ranks, rank: (
                    12 * sum(min(-(-n // ranks), n - -(-n // ranks) * rank) * numel(rest) for n, *rest in shapes)
                ),
                "the last two hold nothing",
            ),
            (lambda shapes, ranks, rank: None, "TypeError"),
        ],
        B: [
            ((AGREE, ""), "Rank 0, 2, 3 waits in its all_reduce number"),
            ((" /= ranks", " /= 1"), "the step is 4 times as long"),
            ((CLIP, "", BACKWARD, BACKWARD + CLIP), "each rank clips its own gradient"),
            ((CLIP, ""), "times as long"),
            (("if bad > 0", "if bad > 4"), "the NaN of rank 1 is in the weights"),
            (("if bad > 0", "if False and bad > 0"), "the NaN of rank 1 is in the weights"),
            (("            all_reduce(p.grad)\n            p.grad /= ranks\n", "            pass\n"), "differ"),
            (("            continue\n", "            return rows\n"), "number 3 is a SKIP on every rank"),
            (('rows.append("SKIP")', "pass"), "number 3 is a SKIP on every rank"),
            (
                # Everybody makes the pass, and each decides for itself.
                (AGREE, "", SKIP, "", STEP, STEP_ALONE),
                "in the weights",
            ),
            (
                # The NaN is taken out of the gradient, but rank 1 still steps alone.
                (AGREE, "", SKIP, "", BACKWARD, NO_NAN, STEP, STEP_ALONE),
                "went its own way",
            ),
            (("all_reduce(bad)", "all_reduce(bad.item())"), "all_reduce takes a tensor"),
            (("        optimizer.zero_grad()\n", ""), "not those of one process that leaves out"),
            (("optimizer.zero_grad()", "optimizer.zero_gradients()"), "AttributeError"),
        ],
    }
