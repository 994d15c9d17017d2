"""GaLore and what can go wrong: skips, overflows, resumes, degenerate gradients, arguments out of range."""

import copy
import math

import needs
import pytest
import torch
from galore_cases import adamw, same, train, weights
from measure import Watch
from torch import nn

from safetrain_core import (
    AmpTrainState,
    CheckpointError,
    GaLore,
    load_checkpoint,
    save_checkpoint,
)
from safetrain_core.optim.build import build_optimizer
from safetrain_core.optim.schedule import make_schedule
from safetrain_core.step.deferred import can_defer
from safetrain_core.train.safe_state import SafeState

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(6, 8, generator=GENERATOR), torch.randn(6, 4, generator=GENERATOR)) for _ in range(8)]
INF = (BATCHES[0][0], torch.full((6, 4), math.inf))


def make(rank=3, interval=4, dtype=torch.float32, name="adamw", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)).to(dtype)
    optimizer = build_optimizer(
        model, name, lr=0.02, weight_decay=0.1, galore_rank=rank, galore_update_interval=interval, galore_scale=1.0
    )
    schedule = make_schedule(optimizer, "cosine", total_steps=20)
    return AmpTrainState(model, amp_dtype=torch.float32, optimizer=optimizer, scheduler=schedule, **options)


def everything(amp):
    return copy.deepcopy([amp.optimizer.state_dict(), amp.model.state_dict(), amp.scheduler.state_dict()])


@pytest.mark.parametrize("updates", [0, 3, 4], ids=["at the first basis", "between bases", "at a later basis"])
def test_a_skipped_step_leaves_projector_moments_counters_and_weights_untouched(updates):
    amp = make()
    for batch in BATCHES[:updates]:
        amp.step(*batch)
    before = everything(amp)
    assert amp.step(*INF).skip_reason == "non_finite_loss"
    poison = amp.model[0].weight.register_hook(lambda grad: grad * math.nan)
    assert amp.step(*BATCHES[0]).skip_reason == "non_finite_grad"
    poison.remove()
    assert same(everything(amp), before)
    clean = make()
    for batch in BATCHES[: updates + 2]:
        clean.step(*batch)
    for batch in BATCHES[updates : updates + 2]:
        amp.step(*batch)
    assert same(everything(amp), everything(clean))


def test_a_float16_overflow_leaves_it_untouched_too():
    torch.manual_seed(0)
    model = nn.Linear(8, 12)
    optimizer = GaLore(model.parameters(), adamw, rank=3, update_interval=2)
    amp = AmpTrainState(model, amp_dtype=torch.float16, optimizer=optimizer, init_scale=2.0**30)
    x, y = torch.ones(4, 8), torch.zeros(4, 12)
    before = copy.deepcopy(optimizer.state_dict())
    assert amp.step(x, y).skip_reason == "non_finite_grad"
    assert same(optimizer.state_dict(), before)
    while amp.step(x, y).skipped:
        pass
    assert optimizer.param_groups[0]["galore_updates"] == 1


def test_the_clip_sees_full_gradients():
    plain = make(rank=64, max_norm=0.1)
    ours = make(rank=3, max_norm=0.1)
    assert ours.optimizer._proxy
    assert not plain.optimizer._proxy
    a, b = plain.step(*BATCHES[0]), ours.step(*BATCHES[0])
    assert (a.pre_clip, a.post_clip, a.loss) == (b.pre_clip, b.post_clip, b.loss)
    assert b.pre_clip > 0.1
    norm = math.sqrt(sum(w.grad.square().sum().item() for w in ours.model.parameters()))
    assert norm == pytest.approx(0.1, rel=1e-5)


def test_four_micro_batches_make_one_projection_and_one_inner_update():
    amp = make()
    with Watch() as watch:
        amp.step_window(BATCHES[:4])
    assert watch.ops["_linalg_svd"] == 2  # one for each of the two matrices
    assert {float(s["inner"]["step"]) for s in amp.optimizer.state.values() if "inner" in s} == {1.0}
    big = make()
    big.step(torch.cat([x for x, _ in BATCHES[:4]]), torch.cat([y for _, y in BATCHES[:4]]))
    for a, b in zip(amp.model.parameters(), big.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", pytest.param("muon", marks=needs.muon), "sgd_momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_saved_between_two_bases_resumes_bit_for_bit(tmp_path, name, dtype):
    batches = [(x.to(dtype), y.to(dtype)) for x, y in BATCHES]
    whole = make(name=name, dtype=dtype)
    for batch in batches[:3]:
        whole.step(*batch)
    path = tmp_path / "a.pt"
    save_checkpoint(whole.model, whole.optimizer, whole.scheduler, whole.counters, path)
    assert "projector" in torch.load(path, weights_only=True)["optimizer"]["state"][0]
    resumed = make(name=name, dtype=dtype)
    resumed.step(*batches[7])  # a state of its own, to be replaced
    assert load_checkpoint(path, resumed.model, resumed.optimizer, resumed.scheduler).updates == 3
    for batch in batches[3:]:  # past the next basis, at update 4
        whole.step(*batch)
        resumed.step(*batch)
    assert same(everything(whole), everything(resumed))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"rank": 2}, "GaLore of rank 3 around AdamW; here it is GaLore of rank 2 around AdamW"),
        ({"name": "adafactor"}, "GaLore of rank 3 around AdamW; here it is GaLore of rank 3 around Adafactor"),
    ],
)
def test_a_checkpoint_of_another_rank_or_optimizer_is_refused_and_nothing_is_changed(tmp_path, other, told):
    amp, there = make(), make(**other)
    amp.step(*BATCHES[0])
    save_checkpoint(amp.model, amp.optimizer, amp.scheduler, amp.counters, tmp_path / "a.pt")
    before = everything(there)
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path / "a.pt", there.model, there.optimizer, there.scheduler)
    assert same(everything(there), before)


def test_loading_a_state_from_before_the_first_update_forgets_all_moments():
    params = weights((8, 12), (5,))
    optimizer = GaLore(params, adamw, rank=3)
    start = copy.deepcopy(optimizer.state_dict())
    train(params, optimizer, 3)
    optimizer.load_state_dict(start)
    twin = weights((8, 12), (5,))
    for weight, value in zip(twin, params, strict=True):
        weight.data.copy_(value)
    assert same(train(params, optimizer, 2), train(twin, GaLore(twin, adamw, rank=3), 2))
    assert optimizer.state[params[1]]["step"] == 2


def test_a_state_without_galore_or_with_other_weights_projected_is_refused():
    params = weights((8, 12), (12, 40))
    plain = adamw(params)
    train(params, plain, 1)
    ours = GaLore(params, adamw, rank=3)
    with pytest.raises(ValueError, match="it was saved without GaLore"):
        ours.load_state_dict(plain.state_dict())
    train(params, ours, 1)
    with pytest.raises(ValueError, match=r"\(12, 40\) was saved with a basis of shape \(12, 3\), here None"):
        GaLore(params, adamw, rank=3, max_dim=20).load_state_dict(ours.state_dict())
    fewer = GaLore(params, adamw, rank=3, max_dim=20)
    train(params, fewer, 1)
    with pytest.raises(ValueError, match=r"\(12, 40\) was saved with a basis of shape None, here \(12, 3\)"):
        ours.load_state_dict(fewer.state_dict())


def test_a_safe_state_brings_projector_moments_and_counter_back():
    amp = make(interval=2)
    for batch in BATCHES[:3]:
        amp.step(*batch)
    safe = SafeState(amp)
    safe.capture()
    before = everything(amp)
    for batch in BATCHES[3:6]:
        amp.step(*batch)
    safe.restore()
    assert same(everything(amp), before)
    for batch in BATCHES[3:6]:
        amp.step(*batch)
    assert amp.optimizer.inner.state[next(iter(amp.optimizer._proxy.values()))]["step"] == 6
    assert not can_defer(amp.optimizer)  # so that its steps are judged one by one, whatever nan_check_interval
