"""GaLore from a config, in whole runs."""

import pytest
import torch
from torch import nn

from safetrain_core import GaLore, SafeTrainer, TrainConfig

DATA = [(torch.randn(6, 8, generator=torch.Generator().manual_seed(i)), torch.zeros(6, 4)) for i in range(12)]


def trainer(folder=None, *, steps=12, fault=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    options = {"use_galore": True, "galore_rank": 3, "galore_update_interval": 5, **options}
    config = TrainConfig(max_steps=steps, scheduler_total_steps=12, learning_rate=0.05, **options)
    return SafeTrainer(model, config, DATA, fault=fault, checkpoint_dir=folder)


def weights(run):
    return [weight.detach().clone() for weight in run.model.parameters()]


def test_the_config_is_what_is_built():
    run = trainer(galore_scale=0.5, galore_max_dim=8, optimizer_class="adafactor")
    optimizer = run.amp.optimizer
    assert isinstance(optimizer, GaLore)
    assert isinstance(optimizer.inner, torch.optim.Adafactor)
    assert (optimizer.rank, optimizer.update_interval, optimizer.scale, optimizer.max_dim) == (3, 5, 0.5, 8)
    assert not isinstance(trainer(use_galore=False).amp.optimizer, GaLore)


def test_a_run_stopped_between_two_bases_and_resumed_ends_bit_for_bit_where_a_whole_one_ends(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.fit()
    trainer(tmp_path / "cut", steps=7).fit()
    rest = trainer(tmp_path / "cut")
    assert rest.resume() is not None
    assert rest.fit().state.updates == 12
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(rest), strict=True))


def test_a_run_resumed_with_another_interval_is_warned_of(tmp_path):
    trainer(tmp_path, steps=3).fit()
    with pytest.warns(UserWarning, match="galore_update_interval 5 -> 6"):
        trainer(tmp_path, galore_update_interval=6).resume()


@pytest.mark.parametrize("interval", [1, 4])
def test_a_bad_step_is_skipped_at_any_look_interval_and_the_run_goes_on(interval):
    def poison(step, model):
        if step == 6:  # the sixth update would need a new basis
            handle = model[0].weight.register_hook(lambda grad: grad * float("nan"))
            handles.append(handle)
        elif handles:
            handles.pop().remove()

    handles = []
    run = trainer(fault=poison, nan_check_interval=interval)
    result = run.fit()
    assert (result.status, result.skips, result.state.updates) == ("completed", 1, 12)
    assert [row.skip_reason for row in result.rows if row.skipped] == ["non_finite_grad"]
    assert all(torch.isfinite(weight).all() for weight in run.model.parameters())


def test_weights_found_poisoned_take_moments_and_basis_back_to_the_safe_state():
    def poison(step, model):
        if step == 6:
            with torch.no_grad():
                model[0].bias[0] = float("nan")

    run = trainer(fault=poison, nan_check_interval=2)
    result = run.fit()
    assert result.status == "completed"
    assert result.skips >= 1
    assert all(torch.isfinite(weight).all() for weight in run.model.parameters())
    assert {group["galore_updates"] for group in run.amp.optimizer.param_groups} == {12}
