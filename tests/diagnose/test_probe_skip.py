"""What ``probe_skip_leaves_state_untouched`` finds in real loops, and that it is quiet on right ones."""

import pytest
import torch
from probed_loops import (
    Case,
    amp_window,
    cases,
    divides_gradients,
    loss_of,
    one_backward,
    plain_of_ours,
    step,
    with_closure,
)

from safetrain_core import probe_skip_leaves_state_untouched as probe_skip


def rules(findings):
    return {finding.rule for finding in findings}


STATEFUL = ("momentum", "adam", "adamw", "fused", "rmsprop", "adagrad", "lion", "galore")

#: Fault -> what must be found, which may be found besides, and where it can show.
FAULTS = {
    "no guard": (
        ("nan_reaches_weights", "nan_reaches_moments"),
        {"nan_reaches_buffers", "skip_moves_buffers", "skip_moves_weights", "skip_moves_schedule"},
        {},
    ),
    "buffers stay": (("nan_reaches_buffers", "skip_moves_buffers"), set(), {"models": ("batchnorm", "conv")}),
    "schedule moves": ("skip_moves_schedule", set(), {}),
    "NaN made 0": (
        "skip_moves_weights",
        {"skip_moves_moments"},
        {"optimizers": ("momentum", "adam", "adamw", "fused")},
    ),
    "moments move": ("skip_moves_moments", set(), {"optimizers": ("momentum", "adam", "adamw", "fused", "rmsprop")}),
    "no scaler.update": ("no_scaler_update_on_skip", set(), {"amps": ("float16",)}),
    "gradients not cleared": ("bad_gradients_stay", set(), {}),
}


def spread():
    for fault, (_, _, where) in FAULTS.items():
        for case in cases(count=9, **where):
            yield pytest.param(case, fault, id=f"{fault}-{case}")


@pytest.mark.parametrize(("case", "fault"), list(spread()))
def test_a_wrong_way_out_is_named(case, fault):
    expected, besides, _ = FAULTS[fault]
    got = rules(probe_skip(step(case, fault), case.make, case.batch(), accum_steps=2, seed=case.seed))
    wanted = {expected} if isinstance(expected, str) else set(expected)
    assert got & wanted, got
    assert got <= wanted | besides


@pytest.mark.parametrize("accum_steps", [1, 3])
@pytest.mark.parametrize("case", cases(count=21), ids=str)
def test_a_right_loop_is_left_alone(case, accum_steps):
    assert probe_skip(step(case), case.make, case.batch(), accum_steps=accum_steps, seed=case.seed) == []


@pytest.mark.parametrize("case", cases(count=21), ids=str)
def test_ours_is_left_alone(case):
    assert probe_skip(amp_window, case.ours, case.batch(), accum_steps=2) == []


@pytest.mark.parametrize("right", [divides_gradients, one_backward])
@pytest.mark.parametrize(
    "case", cases(amps=(None,), models=("linear", "mlp", "dropout", "tokens", "gpt"), count=6), ids=str
)
def test_right_loops_written_otherwise_are_left_alone(case, right):
    """One skips, one raises. (With BatchNorm in the model they would have to put buffers back.)"""
    assert probe_skip(right, case.make, case.batch(), accum_steps=2, seed=case.seed) == []


@pytest.mark.parametrize("case", cases(amps=("float16",), models=("linear", "mlp", "tokens"), count=9), ids=str)
def test_the_recipe_of_torchs_documentation_moves_its_schedule_on_a_skip_and_nothing_else(case):
    def recipe(run, window, *, schedule):
        for x, y in window:
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(run.model(x), y) / len(window)
            run.scaler.scale(loss).backward()
        run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad()
        if schedule:
            run.scheduler.step()

    batch = case.batch()
    assert probe_skip(lambda run, w: recipe(run, w, schedule=False), case.make, batch, seed=case.seed) == []
    moved = probe_skip(lambda run, w: recipe(run, w, schedule=True), case.make, batch, seed=case.seed)
    assert rules(moved) == {"skip_moves_schedule"}


@pytest.mark.parametrize("unguarded", [plain_of_ours, with_closure])
@pytest.mark.parametrize("case", cases(amps=(None,), count=7), ids=str)
def test_a_plain_step_lets_nan_through(case, unguarded):
    if unguarded is with_closure and case.optimizer == "galore":
        pytest.skip("takes no closure that clips")
    found = probe_skip(unguarded, case.make, case.batch(), seed=case.seed)
    assert found[0].severity == "error"
    assert ("nan_reaches_moments" if case.optimizer == "lion" else "nan_reaches_weights") in rules(found)


@pytest.mark.parametrize("fault", ["nan_loss", "inf_grad"])
def test_a_guard_of_the_loss_alone_is_told_from_one_of_the_gradients(fault):
    case = Case("mlp", "adamw")

    def loss_only(run, window):
        run.optimizer.zero_grad()
        loss = loss_of(run.model(window[0][0]), window[0][1])
        if loss.isfinite():
            loss.backward()
            run.optimizer.step()

    got = rules(probe_skip(loss_only, case.make, case.batch(), faults=(fault,)))
    assert got == (set() if fault == "nan_loss" else {"nan_reaches_weights"})


def test_a_loop_that_never_updates_its_scaler_is_named_in_its_second_window():
    case = Case("mlp", "adamw", "float16")

    def never(run, window):
        run.optimizer.zero_grad()
        run.scaler.scale(loss_of(run.model(window[0][0]), window[0][1])).backward()
        run.scaler.unscale_(run.optimizer)
        run.scaler.step(run.optimizer)

    found = probe_skip(never, case.make, case.batch())
    assert rules(found) == {"no_scaler_update_on_skip"}


def test_moments_are_looked_at_where_the_optimizer_is_in_a_closure():
    case = Case("mlp", "adamw")
    work = step(case, "moments move")

    def make():
        run = case.make()
        return run.model, lambda window: work(run, window)

    assert rules(probe_skip(lambda made, window: made[1](window), make, case.batch())) == {"skip_moves_moments"}


def test_a_step_that_raises_has_refused_but_what_it_left_is_told():
    case = Case("batchnorm", "adamw")
    assert rules(probe_skip(one_backward, case.make, case.batch())) <= {"nan_reaches_buffers", "skip_moves_buffers"}
    assert probe_skip(one_backward, case.make, case.batch()) != []


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"faults": ("fire",)}, "faults has"),
        ({"accum_steps": 0}, "accum_steps=0 must be from 1"),
        ({"step_fn": lambda run, window: None}, "took no optimizer step on a good window"),
    ],
)
def test_what_cannot_be_judged_is_refused(knobs, words):
    case = Case("mlp", "sgd")
    given = {"step_fn": step(case), "make_model": case.make, "batch": case.batch(), **knobs}
    with pytest.raises(ValueError, match=words):
        probe_skip(**given)
