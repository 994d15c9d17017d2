"""Recomputation inside the safe step, the trainer and the command: rows, weights and checkpoints are those without."""

import copy
import math

import pytest
import torch
from recompute_cases import LAYER_POLICIES, POLICIES, dense, gpt, normed, plain_stack, vectors
from torch import nn

from safetrain_core import AmpTrainState, SafeTrainer, TrainConfig, apply_recompute, next_token_loss
from safetrain_core.checkpoint.single import read_checkpoint
from safetrain_core.cli import main
from safetrain_core.step.deferred import DeferredSteps


def token_batches(count=6):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, 11, (2, 3, 12), generator=generator)) for _ in range(count)]


def fit(policy="none", k=4, steps=6, resume=False, folder=None, model=None, **config):
    model = model or gpt()
    trainer = SafeTrainer(
        model,
        TrainConfig(max_steps=steps, recompute_policy=policy, recompute_k=k, scheduler_total_steps=6, **config),
        token_batches(),
        loss_fn=next_token_loss,
        checkpoint_dir=folder,
    )
    if resume:
        assert trainer.resume() is not None
    return trainer.fit(), model


def equal_weights(one, other):
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(("policy", "k"), POLICIES)
@pytest.mark.parametrize("config", [{}, {"use_amp": True, "gradient_accumulation_steps": 2}, {"nan_check_interval": 3}])
def test_a_run_of_the_trainer_is_the_run_without(policy, k, config):
    plain, expected = fit(**config)
    result, model = fit(policy, k, **config)
    assert result.rows == plain.rows
    assert len(result.rows) == 6
    assert equal_weights(model, expected)
    assert any("forward" in vars(module) for module in model.modules())


def test_a_checkpoint_knows_nothing_of_the_policy_and_a_run_resumes_under_another(tmp_path):
    plain, expected = fit()
    plain.rows.clear()
    fit("every_k", 2, steps=3, folder=tmp_path)
    (saved,) = tmp_path.glob("step_*.pt")
    assert list(read_checkpoint(saved)["model"]) == list(gpt().state_dict())
    result, model = fit("full", resume=True, folder=tmp_path)
    assert result.state.updates == 6
    assert equal_weights(model, expected)


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
def test_a_skipped_step_leaves_no_trace_of_its_second_runs(policy, k):
    """A NaN in the loss, or in a gradient: weights, moments and BatchNorm's buffers as after a plain skipped step."""
    states = []
    for name in ("none", policy):
        model = apply_recompute(plain_stack(normed), name, k)
        state = AmpTrainState(model, amp_dtype=torch.float16, init_scale=1024.0)
        torch.manual_seed(1)
        for step in range(5):
            target = torch.full((8, 6), math.nan if step == 1 else 1.0)
            if step == 3:
                handle = model[2][0].weight.register_hook(lambda g: g * math.inf)
            state.step(vectors(seed=step), target)
            if step == 3:
                handle.remove()
        assert [row.skip_reason for row in state.log] == [None, "non_finite_loss", None, "non_finite_grad", None]
        states.append((copy.deepcopy(model.state_dict()), state.log, state.scale, torch.get_rng_state()))
    (one, rows, scale, random), (other, rows2, scale2, random2) = states
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert (repr(rows), scale) == (repr(rows2), scale2)  # as text: a loss of NaN equals nothing
    assert torch.equal(random, random2)


def test_deferred_looks_see_the_same_rows():
    rows = []
    for policy in ("none", "every_k"):
        steps = DeferredSteps(AmpTrainState(apply_recompute(gpt(), policy), loss_fn=next_token_loss))
        torch.manual_seed(2)
        for batch in token_batches(3):
            steps.attempt([batch])
        rows.append(steps.look())
    assert rows[0] == rows[1]


def test_the_trainer_validates_with_the_policy_out_of_the_way():
    losses = []
    for policy in ("none", "full"):
        model = gpt()
        trainer = SafeTrainer(
            model,
            TrainConfig(max_steps=4, eval_every_n_steps=2, recompute_policy=policy),
            token_batches(),
            token_batches(2),
            next_token_loss,
        )
        losses.append(trainer.fit().val_loss)
    assert losses[0] == losses[1] is not None


def test_with_none_the_trainer_leaves_what_the_caller_applied():
    model = apply_recompute(gpt(), "full")
    fit(model=model)
    assert all("forward" in vars(block) for block in model.blocks)


def test_a_policy_that_the_model_cannot_have_is_refused_at_the_start():
    for net, policy, told in (
        (nn.Linear(6, 1), "full", "Linear has no stack of layers"),
        (plain_stack(dense), "selective", "Sequential has no attention core"),
    ):
        with pytest.raises(ValueError, match=told):
            SafeTrainer(net, TrainConfig(max_steps=1, recompute_policy=policy), [(vectors(), vectors())])


def test_the_command_trains_the_same_weights_under_every_policy(tmp_path, capsys):
    text = tmp_path / "corpus.txt"
    text.write_text("to be or not to be, that is the question " * 40, encoding="utf-8")
    finals = []
    for policy in ("none", "full", "every_k", "selective"):
        out = tmp_path / policy
        flags = ["--steps", "3", "--corpus", str(text), "--context", "16", "--width", "16", "--heads", "2"]
        flags += ["--dropout", "0.1", "--recompute-policy", policy, "--recompute-k", "2", "--out", str(out)]
        assert main(["train", *flags]) == 0
        finals.append(torch.load(out / "final.pt", weights_only=True))
        assert f"recompute_policy: {policy}" in (out / "config.yaml").read_text()
    capsys.readouterr()
    for final in finals[1:]:
        assert all(torch.equal(value, final[name]) for name, value in finals[0].items())
