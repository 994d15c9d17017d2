"""What ``probe_clip_order`` finds in real loops, and that it is quiet on right ones."""

import pytest
import torch
from probed_loops import Case, amp_window, cases, divides_gradients, one_backward, plain_of_ours, step, with_closure

from safetrain_core import probe_clip_order


def rules(findings):
    return [finding.rule for finding in findings]


FAULTS = {
    "no clip": "clip_without_effect",
    "clip after the step": "clip_without_effect",
    "clip of the first layer only": "clip_without_effect",
    "another max_norm": "clip_at_another_norm",
    "clip by value": "clip_bends_gradient",
    "normalises always": "clip_below_threshold",
}


@pytest.mark.parametrize("fault", ["clip before unscale", "clip without unscale"])
@pytest.mark.parametrize("case", cases(amps=("float16",), count=9), ids=str)
def test_a_clip_of_scaled_gradients_is_named_with_the_factor(case, fault):
    findings = probe_clip_order(step(case, fault), case.make, case.batch(), case.max_norm, seed=case.seed)
    assert rules(findings) == ["clip_before_unscale"]
    told = findings[0].evidence[0].values
    assert told["norm at the optimizer"] * told["loss scaling factor"] == pytest.approx(case.max_norm, rel=1e-2)


@pytest.mark.parametrize("fault", ["clip before unscale", "clip without unscale"])
@pytest.mark.parametrize("max_norm", [0.1, 5.0, 40.0])
def test_it_is_named_at_any_threshold_and_without_the_scaler_in_sight(max_norm, fault):
    case = Case("mlp", "adamw", "float16", max_norm=max_norm)
    work = step(case, fault)

    def make():  # what is kept in a closure is not found
        run = case.make()
        return run.model, lambda window: work(run, window)

    found = probe_clip_order(lambda made, window: made[1](window), make, case.batch(), max_norm)
    assert rules(found) == ["clip_before_unscale"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", cases(count=9), ids=str)
def test_a_wrong_clip_is_named(case, fault):
    findings = probe_clip_order(step(case, fault), case.make, case.batch(), case.max_norm, seed=case.seed)
    assert rules(findings) == [FAULTS[fault]], [str(f) for f in findings]


@pytest.mark.parametrize("case", cases(amps=(None, "bfloat16"), count=7), ids=str)
def test_a_clip_of_each_micro_batch_is_named(case):
    findings = probe_clip_order(step(case, "clip per micro-batch"), case.make, case.batch(), 1.0, accum_steps=4)
    assert rules(findings) in (["clip_bends_gradient"], ["clip_at_another_norm"])


@pytest.mark.parametrize("accum_steps", [1, 3])
@pytest.mark.parametrize("case", cases(count=21), ids=str)
def test_a_right_loop_is_left_alone(case, accum_steps):
    found = probe_clip_order(step(case), case.make, case.batch(), 1.0, accum_steps=accum_steps, seed=case.seed)
    assert found == []


@pytest.mark.parametrize("right", [divides_gradients, one_backward, with_closure])
@pytest.mark.parametrize("case", cases(amps=(None,), count=7), ids=str)
def test_right_loops_written_otherwise_are_left_alone(case, right):
    assert probe_clip_order(right, case.make, case.batch(), 1.0, accum_steps=2, seed=case.seed) == []


@pytest.mark.parametrize("case", cases(count=14), ids=str)
def test_ours_is_left_alone(case):
    assert probe_clip_order(amp_window, case.ours, case.batch(), 1.0, accum_steps=2) == []


def test_ours_at_another_threshold_than_told_and_without_a_clip():
    case = Case("mlp", "adamw", "float16", max_norm=0.25)
    assert rules(probe_clip_order(amp_window, case.ours, case.batch(), 1.0)) == ["clip_at_another_norm"]
    quarter = Case("mlp", "adamw", max_norm=0.25)  # a power of two off, and no scaler anywhere
    assert rules(probe_clip_order(amp_window, quarter.ours, quarter.batch(), 1.0)) == ["clip_at_another_norm"]
    plain = Case("mlp", "sgd")
    assert rules(probe_clip_order(plain_of_ours, plain.make, plain.batch(), 1.0)) == ["clip_without_effect"]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_norm": 0}, "max_norm=0 must be above 0"),
        ({"max_norm": float("nan")}, "max_norm=nan"),
        ({"times": 1.0}, "times=1.0 above 1"),
        ({"accum_steps": 13}, "accum_steps=13 must be from 1 to the batch's 12"),
        ({"batch": (torch.zeros(4, 6), torch.full((4,), -100))}, "took no optimizer step"),
    ],
)
def test_what_cannot_be_judged_is_refused(knobs, words):
    case = Case("mlp", "sgd")
    given = {"step_fn": step(case), "make_model": case.make, "batch": case.batch(), "max_norm": 1.0, **knobs}
    with pytest.raises(ValueError, match=words):
        probe_clip_order(**given)


def test_a_step_that_refuses_large_norms_is_judged_below_them():
    case = Case("mlp", "sgd")

    def careful(run, window):
        run.optimizer.zero_grad()
        (x, y) = window[0]
        torch.nn.functional.cross_entropy(run.model(x), y).backward()
        if torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0) < 8:
            run.optimizer.step()

    with pytest.raises(ValueError, match="took no optimizer step"):
        probe_clip_order(careful, case.make, case.batch(), 1.0)
    assert probe_clip_order(careful, case.make, case.batch(), 1.0, times=4.0) == []
