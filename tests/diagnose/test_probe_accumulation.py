"""What ``probe_accumulation`` finds in real loops, and that it is quiet on right ones."""

import pytest
import torch
from probed_loops import (
    PAD,
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
from torch import nn

from safetrain_core import probe_accumulation


def rules(findings):
    return [finding.rule for finding in findings]


FAULTS = {
    "not divided": "loss_not_divided",
    "divided twice": "loss_divided_twice",
    "divided by a constant": "loss_wrongly_divided",
    "zero_grad in the window": "micro_batches_lost",
    "skips the backward of the last": "micro_batches_lost",
    "step per micro-batch": "step_per_micro_batch",
    "weighed equally": "unequal_micro_batches",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", cases(count=9), ids=str)
def test_a_wrong_window_is_named(case, fault):
    knobs = {"whole_loss": lambda run, b: loss_of(run.model(b[0]), b[1])} if fault == "divided by a constant" else {}
    if knobs and case.amp is not None:
        case = Case(case.model, case.optimizer, None, case.seed)
    findings = probe_accumulation(step(case, fault), case.make, case.batch(), seed=case.seed, **knobs)
    assert FAULTS[fault] in rules(findings), [str(f) for f in findings]
    errors = [f for f in findings if f.severity == "error"]
    assert rules(errors) == ([FAULTS[fault]] if fault != "weighed equally" else [])


@pytest.mark.parametrize("case", cases(count=21), ids=str)
def test_a_right_loop_is_left_alone(case):
    assert probe_accumulation(step(case), case.make, case.batch(), seed=case.seed) == []


@pytest.mark.parametrize("right", [divides_gradients, one_backward, with_closure])
@pytest.mark.parametrize("case", cases(amps=(None,), count=7), ids=str)
def test_right_loops_written_otherwise_are_left_alone(case, right):
    assert probe_accumulation(right, case.make, case.batch(), seed=case.seed) == []


@pytest.mark.parametrize("case", cases(count=9), ids=str)
def test_ours_is_right_by_tokens_and_told_of_equal_weights(case):
    tokens = probe_accumulation(amp_window, lambda: case.ours(loss_weighting="tokens"), case.batch())
    same_size = Case("mlp", case.optimizer, case.amp, case.seed)
    equal = probe_accumulation(amp_window, same_size.ours, same_size.batch(), unequal=False)
    short = probe_accumulation(amp_window, same_size.ours, same_size.batch())
    assert equal == []
    assert rules(short) == ["unequal_micro_batches"]
    if case.model in ("tokens", "gpt"):
        assert tokens == []
    else:
        assert rules(tokens) in ([], ["unequal_micro_batches"])  # class labels count as valid targets: right, too


def test_the_plain_step_of_ours_divides_once_and_weighs_equally():
    case = Case("mlp", "sgd")
    assert rules(probe_accumulation(plain_of_ours, case.make, case.batch())) == ["unequal_micro_batches"]
    assert probe_accumulation(plain_of_ours, case.make, case.batch(), unequal=False) == []


@pytest.mark.parametrize("accum_steps", [2, 3, 6])
def test_the_factor_told_is_the_number_of_micro_batches(accum_steps):
    case = Case("mlp", "adamw")
    found = probe_accumulation(step(case, "not divided"), case.make, case.batch(), accum_steps=accum_steps)
    assert f"is {accum_steps} x that of one batch" in found[0].symptom
    assert found[0].evidence[0].values["weights of the micro-batches"] == " ".join(["1"] * accum_steps)


def test_a_constant_divisor_is_judged_by_whole_loss_alone():
    """Divided by 4 with K = 4 it is right; with K = 3 it is not; a step on one piece alone could not tell."""

    def constant(run, window):
        run.optimizer.zero_grad()
        for x, y in window:
            (loss_of(run.model(x), y) / 4).backward()
        run.optimizer.step()

    case, whole = Case("mlp", "sgd"), lambda run, b: loss_of(run.model(b[0]), b[1])
    assert probe_accumulation(constant, case.make, case.batch(), unequal=False, whole_loss=whole) == []
    short = probe_accumulation(constant, case.make, case.batch(), accum_steps=3, unequal=False, whole_loss=whole)
    assert rules(short) == ["loss_wrongly_divided"]
    assert rules(probe_accumulation(constant, case.make, case.batch(), unequal=False)) == ["loss_not_divided"]


def test_dicts_and_named_fields_are_cut_as_tuples_are():
    def lines(run, window):
        run.optimizer.zero_grad()
        for part in window:
            assert part["note"] == "same"
            loss_of(run.model(part["x"]), part["y"]).backward()
        run.optimizer.step()

    case = Case("mlp", "sgd")
    x, y = case.batch()
    assert rules(probe_accumulation(lines, case.make, {"x": x, "y": y, "note": "same"}, unequal=False)) == [
        "loss_not_divided"
    ]


def test_random_states_of_the_caller_are_as_they_were_and_no_hook_stays():
    from torch.optim import optimizer as torch_optimizer

    case = Case("dropout")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    hooks = len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks)
    probe_accumulation(step(case), case.make, case.batch())
    with pytest.raises(ZeroDivisionError):
        probe_accumulation(lambda run, window: 1 / 0, case.make, case.batch())
    assert torch.equal(torch.rand(3), expected)
    assert hooks == (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"accum_steps": 1}, "accum_steps=1 must be from 2"),
        ({"accum_steps": 7}, "half of the batch's 12 samples"),
        ({"batch": (torch.ones(12, 6), torch.zeros(12, dtype=torch.int64))}, "not independent"),
        ({"batch": (torch.ones(12, 6), torch.zeros(3, dtype=torch.int64))}, r"first dimensions \[3, 12\]"),
        ({"batch": "text"}, r"first dimensions \[\]"),
        ({"make_model": lambda: "no model"}, "no module with trainable weights"),
        ({"step_fn": lambda run, window: None}, "took no optimizer step"),
    ],
)
def test_what_cannot_be_judged_is_refused(knobs, words):
    case = Case("mlp", "sgd")
    given = {"step_fn": step(case), "make_model": case.make, "batch": case.batch(), **knobs}
    with pytest.raises(ValueError, match=words):
        probe_accumulation(**given)


def test_models_that_differ_or_are_the_same_object_are_refused():
    case, once = Case("mlp", "sgd"), Case("mlp", "sgd").make()
    with pytest.raises(ValueError, match="the same weights twice"):
        probe_accumulation(step(case), lambda: once, case.batch())
    generator = torch.Generator().manual_seed(0)

    def other():
        run = case.make()
        torch.nn.init.normal_(run.model[0].weight, generator=generator)
        return run

    with pytest.raises(ValueError, match="two different models"):
        probe_accumulation(step(case), other, case.batch())


def test_a_guarded_step_that_refuses_a_micro_batch_without_targets_is_told():
    case = Case("tokens", "sgd")
    x, y = case.batch()
    y[-2:] = PAD
    with pytest.raises(ValueError, match="took no optimizer step"):
        probe_accumulation(step(case, "weighed equally"), case.make, (x, y), accum_steps=6)


def test_the_sparse_gradients_of_an_embedding_are_probed():
    def make():
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def undivided(run, micro_batches):
        model, optimizer = run
        optimizer.zero_grad()
        for x, y in micro_batches:
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    batch = torch.randint(0, 5, (16, 2)), torch.randn(16, 1)
    assert rules(probe_accumulation(undivided, make, batch, unequal=False)) == ["loss_not_divided"]
