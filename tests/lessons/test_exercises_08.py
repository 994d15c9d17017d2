"""Lesson 08's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_08
from support.distributed_run import rows_held

SCRIPT = LESSONS / "08_distributed_run.py"
NAMES = {**vars(checks_08), "say": print, "torch": torch}
EXERCISES = [("bytes_on", checks_08.check_bytes), ("loop", checks_08.check_loop)]


@pytest.mark.parametrize(("number", "name", "check"), [(i, *e) for i, e in enumerate(EXERCISES)])
def test_check_turns_away_the_stub_and_accepts_the_solution(number: int, name: str, check: Callable[..., str]) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    assert check(defined(stub, name, NAMES)).startswith("Not yet: ")
    assert check(defined(solution_of(markdown), name, NAMES)).startswith("Right: ")
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_two_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


# --- A ---------------------------------------------------------------------------------------------------------


def numel(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
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
)
def test_check_bytes_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_08.check_bytes(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


@pytest.mark.parametrize("ranks", [1, 3, 4, 5])
def test_the_right_bytes_are_those_of_the_lessons_rule_and_add_up(ranks: int) -> None:
    shapes = [(97, 32), (10, 3, 2), (5,)]
    right = [checks_08.right_bytes(shapes, ranks, rank) for rank in range(ranks)]
    by_rule = [12 * sum(rows_held(n, ranks)[rank] * numel(rest) for n, *rest in shapes) for rank in range(ranks)]
    assert right == by_rule
    assert sum(right) == 12 * sum(map(numel, shapes))


# --- B ---------------------------------------------------------------------------------------------------------

SOUND = solution_of(exercise_cells(SCRIPT)[1][1])
AGREE = "        all_reduce(bad)\n"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
BACKWARD = "        loss.backward()\n"


def spoiled(*changes: tuple[str, str]) -> str:
    code = SOUND
    for old, new in changes:
        assert code.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
        code = code.replace(old, new)
    return code


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (spoiled((AGREE, "")), "Rank 0, 2, 3 waits in its all_reduce number"),
        (spoiled((" /= ranks", " /= 1")), "the step is 4 times as long"),
        (spoiled((CLIP, ""), (BACKWARD, BACKWARD + CLIP)), "each rank clips its own gradient"),
        (spoiled((CLIP, "")), "times as long"),
        (spoiled(("if bad > 0", "if bad > 4")), "the NaN of rank 1 is in the weights"),
        (spoiled(("if bad > 0", "if False and bad > 0")), "the NaN of rank 1 is in the weights"),
        (spoiled(("            all_reduce(p.grad)\n            p.grad /= ranks\n", "            pass\n")), "differ"),
        (spoiled(("            continue\n", "            return rows\n")), "number 3 is a SKIP on every rank"),
        (spoiled(('rows.append("SKIP")', "pass")), "number 3 is a SKIP on every rank"),
        (
            # Everybody makes the pass, and each decides for itself.
            spoiled(
                (AGREE, ""),
                ('        if bad > 0:\n            rows.append("SKIP")\n            continue\n', ""),
                ("        optimizer.step()\n", "        if not bad:\n            optimizer.step()\n"),
            ),
            "in the weights",
        ),
        (
            # The NaN is taken out of the gradient, but rank 1 still steps alone.
            spoiled(
                (AGREE, ""),
                ('        if bad > 0:\n            rows.append("SKIP")\n            continue\n', ""),
                (BACKWARD, BACKWARD + "        [p.grad.nan_to_num_() for p in model.parameters()]\n"),
                ("        optimizer.step()\n", "        if not bad:\n            optimizer.step()\n"),
            ),
            "went its own way",
        ),
        (spoiled(("all_reduce(bad)", "all_reduce(bad.item())")), "all_reduce takes a tensor"),
        (spoiled(("        optimizer.zero_grad()\n", "")), "not those of one process that leaves out"),
        (spoiled(("optimizer.zero_grad()", "optimizer.zero_gradients()")), "AttributeError"),
    ],
)
def test_check_loop_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_08.check_loop(defined(code, "loop", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


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
    assert checks_08.check_loop(defined(SOUND, "loop", NAMES), seed).startswith("Right: ")
