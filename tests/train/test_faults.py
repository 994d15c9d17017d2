"""Faults injected through the trainer's hook: what is restored, what it costs in retries, and that it ends."""

import copy
import csv
import math

import pytest
import torch
from torch import nn

from safetrain_core import SafeTrainer, TrainConfig, TrainingFailed


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(count)]


def poison_weight(*steps):
    def fault(step, net):
        if step in steps:
            with torch.no_grad():
                net[0].weight[0, 0] = math.nan

    return fault


def poison_gradient(*steps):
    def fault(step, net):
        if step in steps:
            handle = net[0].weight.register_hook(lambda grad: (handle.remove(), grad * math.nan)[1])

    return fault


def run(fault, count=20, net=None, **config):
    net = net or model()
    trainer = SafeTrainer(net, TrainConfig(**config), batches(count), fault=fault)
    return trainer.fit(), net


def reasons(result):
    return [row.skip_reason for row in result.rows]


@pytest.mark.parametrize("optimizer_class", ["adamw", "sgd_momentum"])
def test_weights_poisoned_at_step_3_are_found_at_5_and_the_last_safe_state_restored(optimizer_class):
    result, net = run(
        poison_weight(3), optimizer_class=optimizer_class, nan_check_interval=5, max_steps=10, scheduler_type="constant"
    )
    assert reasons(result)[:5] == [None, None, "non_finite_loss", "non_finite_loss", "non_finite_state"]
    assert reasons(result)[5:] == [None] * 10
    assert (result.state.step, result.state.updates) == (15, 10)
    assert all(p.isfinite().all() for p in net.parameters())
    # Steps 6..15 are the ten steps of a run that starts where this one was put back to: at the very beginning.
    clean = model()
    reference = SafeTrainer(
        clean,
        TrainConfig(optimizer_class=optimizer_class, nan_check_interval=5, max_steps=10, scheduler_type="constant"),
        batches(20)[5:15],
    ).fit()
    assert [row.loss for row in result.rows[5:]] == [row.loss for row in reference.rows]
    for a, b in zip(net.parameters(), clean.parameters(), strict=True):
        assert torch.equal(a, b)


def test_poisoned_weights_cost_one_retry_where_the_verdict_waits_for_the_look():
    result, _ = run(poison_weight(3), nan_check_interval=5, max_steps=10, max_nan_retries=1)
    assert result.state.retries == 1
    with pytest.raises(TrainingFailed, match=r"at step 5 \(non_finite_state\), 0 of 0 retries used"):
        run(poison_weight(3), nan_check_interval=5, max_steps=10, max_nan_retries=0)


def test_a_fused_optimizer_refuses_the_bad_update_on_the_device_and_nothing_is_rolled_back():
    result, net = run(poison_gradient(3), nan_check_interval=5, max_steps=9, scheduler_type="constant")
    assert reasons(result) == [None, None, "non_finite_grad"] + [None] * 7
    assert (result.state.updates, result.state.retries) == (9, 1)
    every_step, eager = run(poison_gradient(3), max_steps=9, scheduler_type="constant")
    assert [row.loss for row in result.rows] == pytest.approx([row.loss for row in every_step.rows], rel=1e-5)
    for a, b in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "max_steps"), [(5, 12), (4, 3), (7, 7)])
def test_with_an_interval_the_run_still_ends_at_max_steps_exactly(n, max_steps, tmp_path):
    log = tmp_path / "m.csv"
    result, _ = run(poison_gradient(2), nan_check_interval=n, max_steps=max_steps, csv_log_path=str(log))
    assert (result.state.updates, result.state.step) == (max_steps, max_steps + 1)
    rows = list(csv.DictReader(log.open(newline="")))
    assert [int(row["step"]) for row in rows] == list(range(1, max_steps + 2))
    assert [int(row["updates"]) for row in rows] == [1, 1, *range(2, max_steps + 1)]


def test_at_the_end_of_the_one_epoch_waiting_rows_are_told():
    result, _ = run(None, count=7, nan_check_interval=5)
    assert [row.step for row in result.rows] == [1, 2, 3, 4, 5, 6, 7]


def test_poisoned_weights_end_a_run_that_looks_only_at_gradients():
    with pytest.raises(TrainingFailed, match=r"at step 6 \(non_finite_loss\)"):
        run(poison_weight(3), max_steps=10)


@pytest.mark.parametrize("n", [1, 4])
def test_a_fault_that_stays_ends_the_run(n):
    with pytest.raises(TrainingFailed, match="3 of 3 retries used") as caught:
        run(poison_weight(*range(1, 1000)), count=200, nan_check_interval=n, max_steps=100)
    assert caught.value.result.state.step <= 4 * n
    with pytest.raises(TrainingFailed, match="3 of 3 retries used"):
        run(poison_gradient(*range(1, 1000)), count=200, nan_check_interval=n, max_steps=100)


def test_retries_are_forgiven_after_that_many_good_updates_and_not_before():
    spaced = range(5, 200, 5)  # one bad step in five: four good ones between
    result, _ = run(poison_gradient(*spaced), count=60, max_steps=40, max_nan_retries=1, nan_retry_reset_updates=4)
    assert result.state.updates == 40
    with pytest.raises(TrainingFailed, match="at step 10"):
        run(poison_gradient(*spaced), count=60, max_steps=40, max_nan_retries=1, nan_retry_reset_updates=5)
    with pytest.raises(TrainingFailed, match="at step 10"):
        run(poison_gradient(*spaced), count=60, max_steps=40, max_nan_retries=1)


def jump_at(*steps):
    """The loss at these steps is three times what it is, and so is its gradient."""

    def fault(step, net):
        if step in steps:
            handle = net.register_forward_hook(lambda *_: (handle.remove(), _[2] + 5.0)[1])

    return fault


def test_a_loss_jump_goes_back_to_the_safe_state_and_leaves_the_window_out():
    options = {"loss_jump_factor": 2.0, "loss_jump_window": 4, "scheduler_type": "constant"}
    result, net = run(jump_at(7), max_steps=12, **options)
    assert [row.step for row in result.rows if row.skip_reason == "loss_jump"] == [7]
    assert (result.state.retries, result.state.updates) == (1, 12)
    # The safe state is that of 4 updates; the run goes on from it with the data that comes after the jump.
    reference = model()
    first = SafeTrainer(reference, TrainConfig(max_steps=12, **options), batches(20)[:4] + batches(20)[7:]).fit()
    assert [row.loss for row in result.rows[7:]] == [row.loss for row in first.rows[4:]]
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_that_stays_high_fails_and_never_loops():
    with pytest.raises(TrainingFailed, match=r"\(loss_jump\), 2 of 2 retries used"):
        run(
            jump_at(*range(9, 1000)),
            count=300,
            max_steps=200,
            loss_jump_factor=2.0,
            loss_jump_window=4,
            max_nan_retries=2,
        )


def test_a_skip_leaves_buffers_alone_and_needs_no_safe_state():
    net = model()
    trainer = SafeTrainer(net, TrainConfig(max_steps=1), batches(3), fault=poison_gradient(1))
    before = copy.deepcopy(net[1].state_dict())
    seen = []
    trainer.on_row = lambda row: seen.append((row.skipped, copy.deepcopy(net[1].state_dict())))
    trainer.fit()
    assert seen[0][0]
    assert all(torch.equal(before[key], value) for key, value in seen[0][1].items())
    assert trainer._safe is None


def test_gradient_and_block_columns_follow_their_intervals_and_agree_with_the_norm(tmp_path):
    log = tmp_path / "m.csv"
    run(
        poison_gradient(4),
        max_steps=11,
        csv_log_path=str(log),
        enable_block_grad_norms=True,
        gradient_log_interval=2,
        telemetry_log_interval=3,
    )
    rows = list(csv.DictReader(log.open(newline="")))
    blocks = [name for name in rows[0] if name.startswith("grad_norm_")]
    assert blocks == ["grad_norm_0", "grad_norm_1", "grad_norm_3"]
    assert [int(r["step"]) for r in rows if r["gradient_max_abs"]] == [2, 6, 8, 10, 12]
    assert [int(r["step"]) for r in rows if r["grad_norm_0"]] == [3, 6, 9, 12]
    for row in rows:
        if row["grad_norm_0"]:
            whole = math.sqrt(sum(float(row[name]) ** 2 for name in blocks))
            assert whole == pytest.approx(float(row["gradient_norm"]), rel=1e-5)
    assert all(row["gradient_norm"] for row in rows)


def test_blocks_of_the_users_own_are_used(tmp_path):
    log, net = tmp_path / "m.csv", model()
    SafeTrainer(
        net,
        TrainConfig(max_steps=1, csv_log_path=str(log), enable_block_grad_norms=True, telemetry_log_interval=1),
        batches(1),
        blocks={"ends": [net[0].weight, net[3].weight]},
    ).fit()
    row = next(csv.DictReader(log.open(newline="")))
    assert float(row["grad_norm_ends"]) > 0


def test_the_hook_before_a_step_may_end_the_run():
    class EnoughError(Exception):
        pass

    def before(step, net):
        if step == 3:
            raise EnoughError

    trainer = SafeTrainer(model(), TrainConfig(max_steps=9), batches(9), before_step=before)
    with pytest.raises(EnoughError):
        trainer.fit()
    assert trainer.result.state.step == 2
