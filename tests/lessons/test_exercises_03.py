"""Lesson 03's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from exercises import Exercises, exercises_of
from support import checks_03

from safetrain_core import capture_rng_state, restore_rng_state

A, B, C = exercises_of("03_checkpoint_resume")


# --- A ---------------------------------------------------------------------------------------------------------


def number_of(name: str) -> int:
    return int(name[5:-3])


def with_best(choose: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def to_delete(losses: dict[str, Any], keep_last: int, keep_best: int) -> list[str]:
        best = choose(losses)[:keep_best]
        return [n for n in sorted(losses, key=number_of)[:-keep_last] if n not in best]

    return to_delete


# --- B ---------------------------------------------------------------------------------------------------------

LOOKED = "    name, keys, *rest = np.random.get_state()\n"
DRAWN = "    np.random.rand()\n" + LOOKED


def test_check_random_states_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()
    assert B.verdict(B.solution).startswith("Right: ")
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_the_packages_own_functions_pass() -> None:
    assert checks_03.check_random_states(capture_rng_state, restore_rng_state).startswith("Right: ")


# --- C ---------------------------------------------------------------------------------------------------------

COUNTERS = '        run.counters.update(saved["counters"])\n'
SAVE = "            atomic_save(saved, path)\n"


class TestLesson03(Exercises):
    wrong: ClassVar = {
        A: [
            (lambda losses, last, best: sorted(losses, key=number_of)[:-last], "stays however old it is"),
            (with_best(lambda losses: sorted(losses, key=lambda n: losses[n] or 9)), "a NaN is never the best"),
            (
                with_best(
                    lambda losses: sorted((n for n in losses if losses[n] == losses[n]), key=lambda n: losses[n])
                ),
                "TypeError",
            ),
            (
                with_best(
                    lambda losses: sorted(losses, key=lambda n: losses[n] if losses[n] == losses[n] else math.inf)
                ),
                "TypeError",
            ),
            (lambda losses, last, best: [], "these go"),
            (lambda losses, last, best: None, "TypeError"),
        ],
        B: [
            (("keys.tolist()", "keys"), "refused by weights_only=True"),
            (("    random.setstate((version, tuple(numbers), gauss))\n", ""), "Python's random generator goes on"),
            (
                ("    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))\n", ""),
                "NumPy's generator goes on",
            ),
            (('    torch.set_rng_state(state["torch"])\n', ""), "torch's generator does not draw"),
            (("tuple(numbers), gauss", "tuple(numbers), None"), "Python's random generator goes on"),
            (("*rest))", "rest[0]))"), "NumPy's generator goes on"),
            ((LOOKED + "    return", DRAWN + "    return"), "draw nothing"),
            (("tuple(numbers)", "numbers[:3]"), "it raised"),
        ],
        C: [
            ((SAVE, "            torch.save(saved, path)\n"), "a kill in mid-save left a torn file"),
            (
                (
                    SAVE,
                    "            import os\n"
                    "            torch.save(saved, str(path) + '.tmp')\n"
                    "            os.replace(str(path) + '.tmp', path)\n",
                ),
                "there has to be an fsync",
            ),
            (('("model", "optimizer", "scheduler")', '("model", "optimizer")'), "the schedule stands at 14"),
            (('("model", "optimizer", "scheduler")', '("model", "scheduler")'), "look at the optimizer"),
            (('("model", "optimizer", "scheduler")', '("optimizer", "scheduler")'), "from step 11 on"),
            (('        restore_rng_state(saved["rng"])\n', ""), "from step 11 on"),
            (('        run.epoch_start = saved["epoch_start"]\n', ""), "never. The data position"),
            ((COUNTERS, '        run.counters["step"] = saved["counters"]["step"]\n'), "data position"),
            ((COUNTERS, ""), "step belongs in the checkpoint"),
            ((SAVE, "            pass\n"), "no checkpoint at path"),
            (("run.train(1)", "run.train(7)"), "Keep run.train(1)"),
            (('saved["epoch_start"]', 'saved["start"]'), "KeyError"),
        ],
    }
