"""AmpTrainState: what a step does, what a refused step leaves alone, and what the scaler is told."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from safetrain_core import AmpTrainState, rolling_skip_rate
from safetrain_core.step.scaling import MIN_SCALE

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 2)
BOTH_WAYS = pytest.mark.parametrize("check", [True, False])


def small_model(seed=0, *layers):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Tanh(), nn.Linear(8, 2))


def snapshot(state):
    """Everything that a skip must leave alone, as a copy."""
    return copy.deepcopy(
        {
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict() if state.scheduler else None,
        }
    )


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def poison_gradient(model, value=math.inf):
    """The next backward, and only that, gives a gradient with ``value`` in it, while the loss stays finite."""
    weight = next(model.parameters())

    def spoil(grad):
        handle.remove()
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    handle = weight.register_hook(spoil)


# --- the good path -------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_float32_step_equals_the_bare_loop_bit_for_bit(check):
    ours, theirs = small_model(), small_model()
    state = AmpTrainState(ours, lr=0.05, amp_dtype=torch.float32, check_loss_before_backward=check)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.05, weight_decay=0.01, fused=True)
    for _ in range(6):
        row = state.step(X, Y)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(theirs(X), Y)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        if norm > 1:
            for p in theirs.parameters():
                p.grad *= 1.0 / (norm.item() + 1e-12)
        optimizer.step()
        assert row.loss == loss.item()
        assert row.pre_clip == pytest.approx(norm.item(), rel=1e-6)
        assert row.scale is None
    assert_same(ours.state_dict(), theirs.state_dict())


def test_defaults_are_bfloat16_on_cpu_adamw_and_a_loss_by_target_type():
    state = AmpTrainState(small_model())
    assert state.amp_dtype is torch.bfloat16
    assert isinstance(state.optimizer, torch.optim.AdamW)
    assert state.optimizer.param_groups[0]["lr"] == 1e-2
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.01
    assert not state.scaler.is_enabled()
    for amp_dtype, targets in ((torch.float32, Y), (torch.float32, torch.zeros(8, dtype=torch.int64))):
        model = small_model()
        expected = (nn.functional.mse_loss if targets.is_floating_point() else nn.functional.cross_entropy)(
            model(X), targets
        )
        assert AmpTrainState(model, amp_dtype=amp_dtype).step(X, targets).loss == expected.item()


@BOTH_WAYS
def test_a_float16_window_with_clipping_equals_the_unscaled_run(check):
    """Unscale and clip once, at the end of the window; scaling by a power of two is exact."""
    halves = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    scaled = AmpTrainState(small_model(), 0.1, 0.05, amp_dtype=torch.float16, check_loss_before_backward=check)
    plain_model = small_model()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1, weight_decay=0.01, fused=True)
    for _ in range(3):
        row = scaled.step_window(halves)
        plain.zero_grad()
        for x, y in halves:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(plain_model(x), y)
            # The same factor, so that float16 gradients underflow equally, divided out by hand.
            (loss / 2 * 65536.0).backward()
        for p in plain_model.parameters():
            p.grad /= 65536.0
        pre = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.05)
        plain.step()
        assert row.pre_clip == pytest.approx(pre.item(), rel=1e-6)
        assert row.pre_clip > row.post_clip == 0.05
    for a, b in zip(scaled.model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_window_divides_by_what_it_has_and_the_loss_is_the_mean():
    whole, parts = (AmpTrainState(small_model(), amp_dtype=torch.float32, max_norm=0) for _ in range(2))
    one = whole.step(X[:6], Y[:6])
    three = parts.step_window([(X[i : i + 2], Y[i : i + 2]) for i in (0, 2, 4)])
    assert three.loss == pytest.approx(one.loss, rel=1e-6)
    assert three.pre_clip == pytest.approx(one.pre_clip, rel=1e-5)


def test_an_optimizer_a_scheduler_and_a_loss_of_the_users_are_used():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = AmpTrainState(
        model,
        amp_dtype=torch.float32,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_fn=lambda out, y: (out - y).abs().mean(),
    )
    assert [state.step(X, Y).lr for _ in range(3)] == [1.0, 0.5, 0.25]


# --- a refused step ------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", ["loss", "grad"])
def test_skipped_step_leaves_weights_moments_buffers_and_schedule_untouched(check, amp_dtype, fault):
    model = small_model(0, nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = AmpTrainState(
        model,
        amp_dtype=amp_dtype,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        check_loss_before_backward=check,
    )
    assert not state.step(X, Y).skipped
    before = snapshot(state)
    if fault == "loss":
        row = state.step_window([(X, Y), (X, torch.full_like(Y, math.inf)), (X, Y)])
        assert (row.skip_reason, row.loss, row.pre_clip, row.post_clip) == (
            "non_finite_loss",
            math.inf,
            None,
            None,
        )
    else:
        poison_gradient(model)
        row = state.step_window([(X, Y), (X, Y)])
        assert (row.skip_reason, row.pre_clip, row.post_clip) == ("non_finite_grad", math.inf, None)
        assert math.isfinite(row.loss)
    assert_same(snapshot(state), before)
    assert all(p.grad is None for p in model.parameters())
    assert (state.counters.step, state.counters.updates, state.skip_count) == (2, 1, 1)
    assert [s.reason for s in state.skip_log] == [row.skip_reason]
    assert not state.step(X, Y).skipped


def test_rows_weights_moments_and_scale_are_the_same_with_and_without_the_early_look():
    runs = []
    for check in (True, False):
        model = small_model(0, nn.BatchNorm1d(8))
        state = AmpTrainState(model, 0.05, amp_dtype=torch.float16, check_loss_before_backward=check, growth_interval=3)
        for step in range(12):
            targets = (
                torch.full_like(Y, math.nan) if step in (2, 3) else torch.full_like(Y, math.inf) if step == 7 else Y
            )
            if step == 5:
                poison_gradient(model, math.nan)
            state.step_window([(X, Y), (X, targets)])
        runs.append((repr(state.log), state.model.state_dict(), state.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    assert_same(runs[0][2], runs[1][2])
    assert "non_finite_grad" in runs[0][0]


def test_a_loss_of_inf_and_one_of_minus_inf_are_reported_as_the_first():
    rows = []
    for check in (True, False):
        state = AmpTrainState(
            small_model(),
            amp_dtype=torch.float32,
            loss_fn=lambda out, y: out.sum() + y.sum(),
            check_loss_before_backward=check,
        )
        rows.append(state.step_window([(X, Y + math.inf), (X, Y - math.inf)]))
    assert rows[0] == rows[1]
    assert rows[0].loss == math.inf


# --- the scaler ----------------------------------------------------------------------------------------------


def test_a_real_float16_overflow_on_the_cpu_halves_until_it_fits_and_then_trains():
    state = AmpTrainState(small_model(), amp_dtype=torch.float16, init_scale=2.0**24)
    rows = [state.step(X, Y) for _ in range(20)]
    assert rows[0].skip_reason == "non_finite_grad"
    skipped = list(itertools.takewhile(lambda row: row.skipped, rows))
    assert [row.scale for row in skipped] == [2.0**24 / 2**i for i in range(len(skipped))]
    assert not rows[-1].skipped
    assert rows[-1].loss < rows[0].loss


def test_the_scale_doubles_after_a_clean_stretch_and_a_bad_loss_neither_halves_it_nor_counts_as_clean():
    state = AmpTrainState(small_model(), amp_dtype=torch.float16, init_scale=1024.0, growth_interval=3)
    scales = []
    for step in range(8):
        row = state.step(X, Y + (math.inf if step in (0, 2, 3) else 0.0))
        scales.append((row.skipped, row.scale))
    assert scales == [
        (True, 1024.0),
        (False, 1024.0),
        (True, 1024.0),
        (True, 1024.0),
        (False, 1024.0),
        (False, 1024.0),
        (False, 2048.0),
        (False, 2048.0),
    ]
    assert state.scale == state.scaler.get_scale() == 2048.0


def test_the_scale_that_rows_report_is_always_the_scalers_own():
    model = small_model()
    state = AmpTrainState(model, amp_dtype=torch.float16, init_scale=2.0**10, growth_interval=2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        kind = int(torch.randint(0, 5, (), generator=generator))
        if kind == 0:
            poison_gradient(model)
        expected = state.scaler.get_scale()
        assert state.step(X, Y + (math.nan if kind == 1 else 0.0)).scale == expected


def test_one_infinite_loss_then_good_ones_does_not_let_the_scale_decay():
    model = small_model()
    state = AmpTrainState(model, amp_dtype=torch.float16, init_scale=256.0)
    state.step(X, Y + math.inf)
    before = copy.deepcopy(model.state_dict())
    assert not state.step(X, Y).skipped
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    for _ in range(10):
        assert state.step(X, Y).scale == 256.0


def test_the_scale_never_falls_below_one():
    model = small_model()
    state = AmpTrainState(model, amp_dtype=torch.float16, init_scale=2.0)
    for expected in (2.0, 1.0, 1.0):
        poison_gradient(model)
        row = state.step(X, Y)
        assert (row.skip_reason, row.scale) == ("non_finite_grad", expected)
    assert state.scaler.get_scale() == MIN_SCALE
    assert state.scaler.state_dict()["_growth_tracker"] == 0


def test_an_exception_in_mid_window_ends_the_window_and_the_next_step_works():
    model = small_model(0, nn.BatchNorm1d(8))
    state = AmpTrainState(model, amp_dtype=torch.float16)
    state.step(X, Y)
    before = snapshot(state)
    with pytest.raises(ValueError, match=r"shapes \(3, 5\) and \(8, 2\) does not fit"):
        state.step_window([(X, Y), (torch.zeros(3, 5), Y)])
    assert_same(snapshot(state), before)
    assert not state.step(X, Y).skipped

    handle = state.optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        state.step(X, Y)
    handle.remove()
    assert not state.step(X, Y).skipped
    assert state.counters.step == 3


def test_first_loss_infinite_prints_no_warning_and_does_not_move_the_schedule():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda u: 1 / (u + 1))
    state = AmpTrainState(model, amp_dtype=torch.float16, optimizer=optimizer, scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [state.step(X, Y + (math.inf if i == 0 else 0)).lr for i in range(3)] == [1.0, 1.0, 0.5]


# --- the post-clip guard -------------------------------------------------------------------------------------


def test_post_clip_guard_is_the_only_belt_without_clipping():
    model = small_model()
    state = AmpTrainState(model, max_norm=0, amp_dtype=torch.float32, inf_post_clip_threshold=10.0)
    before = snapshot(state)
    row = state.step(X * 1000, Y + 1e6)
    assert row.skip_reason == "post_clip_explosion"
    assert row.post_clip == row.pre_clip > 10
    assert_same(snapshot(state), before)
    assert (
        not AmpTrainState(model, max_norm=0, amp_dtype=torch.float32, inf_post_clip_threshold=0)
        .step(X, Y + 1e6)
        .skipped
    )


def test_post_clip_guard_looks_at_elements_not_at_the_norm():
    model = nn.Linear(100, 1, bias=False)
    state = AmpTrainState(
        model,
        max_norm=0,
        amp_dtype=torch.float32,
        inf_post_clip_threshold=2.0,
        loss_fn=lambda out, y: out.mean(),
    )
    row = state.step(torch.full((1, 100), 1.5), Y)
    assert row.pre_clip == pytest.approx(15.0)  # the norm is above the threshold, no element is
    assert not row.skipped


@pytest.mark.parametrize("threshold", [1.0, 1.5])
def test_post_clip_guard_cannot_fire_after_a_clip_at_or_below_its_threshold(threshold):
    model = nn.Linear(1, 1, bias=False)  # one weight: after the clip, max|g| is the clip norm itself
    state = AmpTrainState(model, lr=1e-6, amp_dtype=torch.float32, inf_post_clip_threshold=threshold)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = torch.randn(1, 1, generator=generator) * 1000
        assert not state.step(x, torch.full((1, 1), 50.0)).skipped


def test_post_clip_guard_fires_below_the_clip_norm():
    model = nn.Linear(1, 1, bias=False)
    state = AmpTrainState(model, amp_dtype=torch.float32, inf_post_clip_threshold=0.5)
    assert state.step(torch.full((1, 1), 100.0), torch.full((1, 1), -9.0)).skip_reason == "post_clip_explosion"


# --- loss jump and detail ------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_loss_three_times_the_median_is_refused_where_the_factor_is_two(check):
    state = AmpTrainState(
        small_model(),
        1e-6,
        amp_dtype=torch.float32,
        loss_fn=lambda out, y: (out * 0).sum() + y.mean(),
        check_loss_before_backward=check,
        loss_jump_factor=2.0,
        loss_jump_window=3,
    )
    targets = [1.0, 5.0, 1.0, 1.9, 1.95, 6.0, 3.7, float("nan")]
    rows = [state.step(X, torch.full((8, 2), t)) for t in targets]
    assert [row.skip_reason for row in rows] == [None] * 5 + ["loss_jump", None, "non_finite_loss"]
    assert rows[5].loss == 6.0
    assert state.counters.losses == pytest.approx([1.0, 5.0, 1.0, 1.9, 1.95, 3.7])


def test_a_median_of_zero_or_less_is_no_limit():
    state = AmpTrainState(
        small_model(),
        amp_dtype=torch.float32,
        loss_fn=lambda out, y: (out * 0).sum() + y.mean(),
        loss_jump_factor=2.0,
        loss_jump_window=2,
    )
    assert not any(state.step(X, torch.full((8, 2), t)).skipped for t in (-1.0, -1.0, 50.0))


def test_detail_is_the_gradients_before_the_clip_at_no_further_read():
    state = AmpTrainState(small_model(), amp_dtype=torch.float32, max_norm=0.01)
    state.step_window([(X, Y)])
    assert state.detail is None
    reference = copy.deepcopy(state.model)
    row = state.step_window([(X, Y)], detail=True)
    nn.functional.mse_loss(reference(X), Y).backward()
    grads = [p.grad for p in reference.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    assert list(state.detail.norm_of.values()) == pytest.approx([g.norm().item() for g in grads], rel=1e-5)
    assert list(state.detail.norm_of) == list(state.model.parameters())
    assert state.detail.max_abs == pytest.approx(flat.abs().max().item(), rel=1e-6)
    assert state.detail.rms == pytest.approx(flat.pow(2).mean().sqrt().item(), rel=1e-5)
    assert row.pre_clip > row.post_clip


# --- skip rate -----------------------------------------------------------------------------------------------


def test_skip_rate_above_the_alert_warns_once_per_crossing():
    state = AmpTrainState(small_model(), amp_dtype=torch.float32, skip_rate_alert=0.25, skip_rate_window=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bad in [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]:
            state.step(X, Y + (math.inf if bad else 0.0))
    assert [str(w.message).split(":")[0] for w in caught] == [
        "skip rate 50.0% over the last 4 steps is above 25.0% at step 4",
        "skip rate 50.0% over the last 4 steps is above 25.0% at step 10",
    ]
    assert rolling_skip_rate(state.log, 4)[3] == 0.5


def test_rows_kept_are_bounded_when_asked():
    state = AmpTrainState(small_model(), amp_dtype=torch.float32, keep_rows=5)
    for _ in range(12):
        state.step(X, Y + math.inf)
    assert [row.step for row in state.log] == [8, 9, 10, 11, 12]
    assert len(state.skip_log) == 5
    assert state.skip_count == 12


# --- state ---------------------------------------------------------------------------------------------------


def test_scaler_and_counters_come_back_and_training_goes_on_as_if_never_stopped():
    def fresh():
        return AmpTrainState(small_model(), 0.05, amp_dtype=torch.float16, init_scale=1024.0, growth_interval=5)

    whole = fresh()
    poison_gradient(whole.model)
    whole.step(X, Y)
    poison_gradient(whole.model)
    whole.step(X, Y)
    for _ in range(3):
        whole.step(X, Y)
    assert whole.scale == 256.0
    saved, weights = copy.deepcopy(whole.state_dict()), copy.deepcopy(whole.model.state_dict())

    resumed = fresh()
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert resumed.scale == 256.0
    assert resumed.scaler.state_dict()["_growth_tracker"] == 3
    assert (resumed.counters, resumed.skip_count) == (whole.counters, 2)
    for _ in range(4):
        assert resumed.step(X, Y) == whole.step(X, Y)
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


def test_a_disabled_scalers_state_in_an_enabled_one_and_the_reverse_are_handled_and_logged(caplog):
    on = AmpTrainState(small_model(), amp_dtype=torch.float16, init_scale=64.0)
    off = AmpTrainState(small_model(), amp_dtype=torch.float32)
    saved_on, saved_off = copy.deepcopy(on.state_dict()), copy.deepcopy(off.state_dict())
    on.load_state_dict(saved_off)
    assert on.scale == 64.0
    assert "was disabled" in caplog.text
    off.load_state_dict(saved_on)
    assert off.scale is None
    assert "64.0 is dropped" in caplog.text
    assert not on.step(X, Y).skipped
    assert not off.step(X, Y).skipped


def test_a_state_that_does_not_fit_is_refused_before_anything_changes():
    state = AmpTrainState(small_model(), amp_dtype=torch.float16)
    state.step(X, Y)
    before = copy.deepcopy(state.state_dict())
    bad = {
        "keys": {"optimizer": {}},
        "scheduler": {**before, "scheduler": {"last_epoch": 1}},
        "train state has keys": {**before, "counters": {"step": 1}},
        "parameter group": {
            **before,
            "optimizer": torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict(),
        },
    }
    for message, wrong in bad.items():
        with pytest.raises(ValueError, match=message):
            state.load_state_dict(wrong)
        assert_same(state.state_dict(), before)


# --- refusals ------------------------------------------------------------------------------------------------


def test_float16_weights_with_a_scaler_are_refused_by_name():
    with pytest.raises(ValueError, match=r"0\.weight is float16"):
        AmpTrainState(small_model().half(), amp_dtype=torch.float16)


def test_bfloat16_weights_switch_the_scaler_off():
    state = AmpTrainState(small_model().bfloat16(), amp_dtype=torch.float16)
    assert not state.scaler.is_enabled()
    assert (
        AmpTrainState(small_model().bfloat16(), amp_dtype=torch.float32).step(X.bfloat16(), Y.bfloat16()).scale is None
    )


def test_devices_that_do_not_match_are_refused_with_both_named():
    with pytest.raises(ValueError, match=r"0\.weight is on cpu but device_type='cuda'"):
        AmpTrainState(small_model(), device_type="cuda")
    with pytest.raises(ValueError, match=r"on meta but device_type='cpu'"):
        AmpTrainState(small_model().to("meta"))
    stranger = nn.Parameter(torch.zeros(1, device="meta"))
    model = small_model()
    with pytest.raises(ValueError, match="optimizer holds a weight on meta but device_type='cpu'"):
        AmpTrainState(model, optimizer=torch.optim.SGD([*model.parameters(), stranger], lr=1))
    state = AmpTrainState(small_model())
    with pytest.raises(ValueError, match="inputs are on meta but the model is on cpu"):
        state.step(X.to("meta"), Y)
    with pytest.raises(ValueError, match="targets are on meta"):
        state.step(X, Y.to("meta"))
    assert not state.step(X, Y).skipped


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AmpTrainState(small_model(), max_norm=-1), "max_norm=-1"),
        (lambda: AmpTrainState(small_model(), max_norm=math.nan), "max_norm=nan"),
        (lambda: AmpTrainState(small_model(), inf_post_clip_threshold=-2), "inf_post_clip_threshold=-2"),
        (lambda: AmpTrainState(small_model(), init_scale=0.5), "init_scale"),
        (lambda: AmpTrainState(small_model(), keep_rows=0), "keep_rows=0"),
        (lambda: AmpTrainState(small_model().requires_grad_(False)), "no trainable parameter"),
        (lambda: AmpTrainState(small_model(), device_type="mps"), "no default amp_dtype"),
        (lambda: AmpTrainState(small_model(), device_type="gpu"), "pass device_type='cpu' or 'cuda'"),
        (lambda: AmpTrainState(small_model()).step(X, Y.long()), r"class numbers of shape \(8,\).*\.float\(\)"),
        (
            lambda: AmpTrainState(small_model()).step(X.expand(3, *X.shape), torch.zeros(3, 8, dtype=torch.int64)),
            r"targets are int64 of shape \(3, 8\).*next_token_loss",
        ),
        (
            lambda: AmpTrainState(small_model(), optimizer=torch.optim.SGD(small_model().parameters(), lr=1)),
            "none of the model's trainable weights",
        ),
        (
            lambda: (lambda m, o: AmpTrainState(m, optimizer=o, scheduler=ReduceLROnPlateau(o)))(
                *(lambda m: (m, torch.optim.SGD(m.parameters(), lr=1)))(small_model())
            ),
            "ReduceLROnPlateau needs a metric",
        ),
        (lambda: AmpTrainState(small_model()).step_window([]), "0 micro-batches"),
        (lambda: AmpTrainState(small_model(), loss_fn=lambda out, y: out).step(X, Y), r"returned \(8, 2\)"),
        (lambda: AmpTrainState(small_model(), loss_fn=lambda out, y: 1.0).step(X, Y), "returned float"),
        (
            lambda: AmpTrainState(small_model(), loss_fn=lambda out, y: torch.ones(1, requires_grad=True).sum()).step(
                X, Y
            ),
            "reached no weight",
        ),
        (
            lambda: AmpTrainState(small_model(), loss_fn=lambda out, y: out.detach().mean()).step(X, Y),
            "reached no weight",
        ),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_frozen_weights_and_an_optimizer_over_part_of_the_model_are_fine():
    model = small_model()
    model[0].requires_grad_(False)
    frozen = copy.deepcopy(model[0].state_dict())
    assert not AmpTrainState(model, amp_dtype=torch.float16).step(X, Y).skipped
    assert_same(model[0].state_dict(), frozen)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model": None}, "model is a NoneType, expected a torch.nn.Module"),
        ({"amp_dtype": "float16"}, "amp_dtype='float16' must be one of torch.float16"),
        ({"amp_dtype": torch.int8}, "amp_dtype=torch.int8 must be one of"),
        ({"optimizer": torch.optim.SGD}, "optimizer is the class SGD, expected one that is built"),
        ({"optimizer": 3}, "optimizer is an int"),
        ({"scheduler": 5}, "scheduler is an int, expected one from torch.optim.lr_scheduler"),
        ({"loss_fn": 3}, "loss_fn is an int, expected a function"),
        ({"max_norm": "1"}, "max_norm=1 must be at least 0"),
        ({"keep_rows": 2.5}, "keep_rows=2.5 must be at least 1"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_refused_before_a_step_finds_out(options, told):
    with pytest.raises(ValueError, match=told):
        AmpTrainState(**{"model": nn.Linear(2, 1), **options})


class Scaled(nn.Module):
    """Divides by the largest input of its first batch, kept in a buffer that is None, or not there, until then."""

    def __init__(self, there):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        if there:
            self.register_buffer("scale", None)

    def forward(self, x):
        if getattr(self, "scale", None) is None:
            self.register_buffer("scale", x.abs().max().clone())
        return self.net(x / self.scale)


@BOTH_WAYS
@pytest.mark.parametrize("there", [True, False])
def test_a_buffer_that_a_refused_step_has_made_is_gone(there, check):
    """Else the Inf of a first batch would divide all that follow."""
    state = AmpTrainState(Scaled(there), amp_dtype=torch.float32, check_loss_before_backward=check)
    assert state.step(X / 0, Y).skipped
    assert not list(state.model.buffers())
    assert not state.step(X, Y).skipped
    assert state.model.scale == X.abs().max()


class Masked(nn.Module):
    """Makes its causal mask, of -inf, at the first batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.register_buffer("mask", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.full((4, 4), -math.inf).triu(1)
        return self.net(x @ self.mask.softmax(-1))


def test_a_mask_made_at_the_first_batch_is_infinite_by_design_and_what_is_poisoned_later_is_not():
    state = AmpTrainState(Masked(), amp_dtype=torch.float32)
    state.model.register_buffer("seen", torch.zeros(1))
    rows = [state.step_window([(X, Y)], examine=True) for _ in range(3)]
    assert [row.skip_reason for row in rows] == [None] * 3
    state.model.seen.fill_(math.nan)
    assert state.step_window([(X, Y)], examine=True).skip_reason == "non_finite_state"


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))
        self.register_buffer("eighth", torch.zeros(3, dtype=torch.float8_e4m3fn))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def test_a_nan_in_complex_weights_or_float8_buffers_is_found():
    state = AmpTrainState(Complex(), amp_dtype=torch.float32)
    assert state.step_window([(X, Y)], examine=True).skip_reason is None
    with torch.no_grad():
        state.model.weight[0, 0] = complex(0, math.nan)
    assert state.step_window([(X, Y)], examine=True).skip_reason == "non_finite_state"
    other = AmpTrainState(Complex(), amp_dtype=torch.float32)
    other.model.eighth.copy_(torch.full((3,), math.nan))
    assert other.step_window([(X, Y)], examine=True).skip_reason == "non_finite_state"


def test_an_optimizer_that_needs_a_closure_is_refused_at_once():
    model = small_model()
    with pytest.raises(ValueError, match="LBFGS computes the loss itself"):
        AmpTrainState(model, optimizer=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "targets are a dict, and the default loss takes a tensor; pass loss_fn"),
        ({"loss_weighting": "tokens", "loss_fn": lambda out, y: out.sum()}, "targets are a dict; tokens are counted"),
    ],
)
def test_targets_that_are_no_tensor_need_a_loss_function_and_equal_weights(options, said):
    with pytest.raises(ValueError, match=said):
        AmpTrainState(small_model(), **options).step(X, {"y": Y})
