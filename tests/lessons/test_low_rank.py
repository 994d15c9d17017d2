"""The experiments behind lesson 07's pictures and controls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support import low_rank as lab
from support.counting import calls_of
from torch import nn

from safetrain_core import GaLore, find_basis, optimizer_state_bytes

STEPS = 120

adamw = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the lesson."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- gradients ---------------------------------------------------------------------------------------------------


def test_shares_of_energy_are_those_of_a_matrix_with_known_singular_values() -> None:
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=draws)).Q for n in (5, 9))
    matrix = left @ torch.diag(torch.tensor([5.0, 4.0, 3.0, 1.0, 0.0])) @ right[:5]
    want = torch.tensor([25.0, 41.0, 50.0, 51.0, 51.0]) / 51
    assert torch.allclose(lab.shares(matrix), want, atol=1e-5)
    assert torch.allclose(lab.shares(matrix.T), want, atol=1e-5)


def test_recorded_gradients_are_those_of_the_first_update_and_of_the_second_half() -> None:
    kept = lab.recorded(12, 3)
    assert list(kept) == [0, *range(6, 12)]
    model = lab.gpt(3)
    x, y = next(lab.batches(1, 3))
    lab.next_token_loss(model(x), y).backward()
    for name, weight in lab.matrices(model).items():
        assert torch.equal(kept[0][name], weight.grad)
    assert len(lab.matrices(model)) == 8


def test_the_first_gradients_are_nearly_of_rank_1_and_later_ones_are_not_and_noise_never_is() -> None:
    kept = lab.recorded(STEPS, 1)
    first, last = (lab.by_kind(kept[update]) for update in (0, STEPS - 1))
    assert set(first) == {*lab.KINDS.values(), lab.EMBEDDING}
    for kind in first:
        assert first[kind][0] > 0.9
        assert last[kind][0] < 0.85
        assert last[kind][15] > 0.95
    assert lab.noise_shares()[15] < 0.5


def test_a_basis_holds_much_less_of_the_next_gradient_than_of_its_own_and_more_than_a_random_one() -> None:
    held = lab.ageing(STEPS, 1, rank=4)
    assert list(held) == [0, 1, 2, 5, 10, 20, 50]
    assert held[0] > 0.9
    assert 0.4 < held[1] < 0.8
    assert held[50] > 4 * 4 / lab.WIDTH


def test_what_a_basis_holds_is_the_projections_share() -> None:
    gradient = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    basis = find_basis(gradient, 3)
    inside = (basis.mT @ gradient).square().sum() / gradient.square().sum()
    assert lab.seen_share(gradient, basis) == pytest.approx(float(inside), abs=1e-6)
    assert lab.seen_share(gradient, basis) == pytest.approx(float(lab.shares(gradient)[2]), abs=1e-5)


# --- what the first tries get wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 80), (80, 32)])
def test_adamw_on_a_low_rank_gradient_keeps_all_its_state_and_steps_with_full_rank(shape: tuple[int, int]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    held, of_gradient, of_step = lab.low_rank_but_whole(gradient, 4)
    assert held == 2 * gradient.numel() * 4 + 4
    assert (of_gradient, of_step) == (4, 32)


@pytest.mark.parametrize("size", [0.01, 0.1, 2.0])
def test_adafactors_step_on_zeros_is_its_floor_and_else_in_proportion_to_the_weight(size: float) -> None:
    assert lab.step_ratio(size) == pytest.approx(size / 1e-3, rel=0.02)


def test_galore_around_adafactor_by_hand_goes_the_way_of_the_package() -> None:
    steps = 25
    model = lab.gpt(2)
    inside = list(lab.matrices(model).values())
    factor = partial(torch.optim.Adafactor, lr=lab.ADAFACTOR_LR, weight_decay=0.0)
    galore = GaLore(inside, factor, rank=8, update_interval=lab.INTERVAL, scale=0.25)
    rest = torch.optim.AdamW(lab.groups(model)[1:], weight_decay=0.0)
    losses = []
    for x, y in lab.batches(steps, 2):
        model.zero_grad()
        loss = lab.next_token_loss(model(x), y)
        loss.backward()
        galore.step()
        rest.step()
        losses.append(loss.item())
    assert lab.adafactor_by_hand(empty=False, steps=steps, seed=2) == pytest.approx(losses, abs=1e-3)
    assert lab.adafactor_by_hand(empty=True, steps=steps, seed=2) != pytest.approx(losses, abs=1e-3)


# --- runs --------------------------------------------------------------------------------------------------------


def test_the_loss_falls_with_the_rank_and_embeddings_should_stay_out() -> None:
    plain = lab.run(steps=STEPS, seed=1).end
    low, high = (lab.run(r, steps=STEPS, seed=1).end for r in (1, 32))
    assert plain + 0.05 < low
    assert high < min(low - 0.05, plain + 0.05)
    out, projected = (lab.run(4, embeddings_too=too, steps=STEPS, seed=1).end for too in (False, True))
    assert out + 0.05 < projected


@pytest.mark.parametrize(("interval", "bases"), [(lab.NEVER, 1), (5, 2), (3, 3)])
def test_a_weight_moves_in_rank_directions_for_each_basis(interval: int, bases: int) -> None:
    moved = lab.run(4, interval=interval, steps=9).moved
    assert moved.shape == (64, 256)
    assert lab.rank_of(moved) == 4 * bases


def test_a_run_does_not_depend_on_those_before_it() -> None:
    first = lab.run(4, steps=5, seed=9).losses
    lab.run.cache_clear()
    torch.randn(3)
    assert lab.run(4, steps=5, seed=9).losses == first


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [lab.ADAMW, lab.ADAFACTOR])
@pytest.mark.parametrize("rank", [None, 4, 60, 64])
def test_the_prediction_is_the_count(factory: lab.Factory, rank: int | None) -> None:
    counted, predicted = lab.state_bytes(factory, rank)
    assert counted == predicted > 0


def test_a_square_weight_saves_below_two_thirds_of_its_side_and_not_above() -> None:
    whole = 2 * 48 * 48 * 4
    assert lab.one_weight_bytes(48, 48, 31) < whole
    assert lab.one_weight_bytes(48, 48, 32) == whole
    assert lab.one_weight_bytes(48, 48, 33) > whole


def test_no_warning_of_a_rank_that_is_too_high_while_it_is_counted_and_one_afterwards(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    lab.state_bytes(lab.ADAMW, 64)
    assert capfd.readouterr().err == ""
    GaLore([nn.Parameter(torch.zeros(4, 4))], adamw, rank=8)
    assert "projects none" in caplog.text


@pytest.mark.parametrize("rank", [1, 8])
def test_apollos_bytes_from_the_shapes_are_those_of_its_package(rank: int) -> None:
    pytest.importorskip("apollo_torch", reason="apollo-torch is not installed; pip install -e '.[apollo]'")
    from safetrain_core.optim.apollo import apollo
    from safetrain_core.optim.build import decay_groups

    model = lab.gpt()
    x, y = next(lab.batches(1))
    lab.next_token_loss(model(x), y).backward()
    optimizer = apollo(decay_groups(model, 0.01, split_tables=True), 1e-3, rank=rank)
    optimizer.step()
    assert optimizer_state_bytes(optimizer) == lab.apollo_bytes(model, rank)


def test_the_large_model_takes_no_memory_and_its_state_is_in_proportion() -> None:
    model = lab.large_model(width=128, layers=2)
    assert all(p.device.type == "meta" for p in model.parameters())
    weights = sum(p.numel() for p in model.parameters())
    told = lab.predict_state_bytes(model.parameters(), lab.ADAMW)
    assert told == 8 * weights + 4 * len(list(model.parameters()))


def test_activations_grow_with_the_rows_and_nothing_else_does() -> None:
    few, many = (lab.memory_parts(8, rows=rows) for rows in (2, 16))
    assert many["activations"] == pytest.approx(8 * few["activations"], rel=0.05)
    for part in ("weights", "gradients", "state"):
        assert few[part] == many[part] > 0
    assert lab.memory_parts(None)["state"] > many["state"]


# --- time, rotations, skipped steps ------------------------------------------------------------------------------


def test_an_svd_is_dearer_than_a_randomized_basis_which_is_dearer_than_none() -> None:
    ms = lab.update_ms((256, 512), rank=16, rounds=3)
    assert ms[lab.NEW_SVD] > ms[lab.NEW_RANDOM] > ms[lab.BETWEEN]
    assert min(ms.values()) > 0


def test_the_randomized_basis_of_a_real_gradient_is_as_good_and_of_noise_nearly() -> None:
    kept = lab.recorded(12, 3)
    assert 1 - 1e-6 < lab.randomized_excess(kept[11], 4) < 1.01
    noise = {"blocks.x": torch.randn(64, 256, generator=torch.Generator().manual_seed(0))}
    assert 1 + 1e-6 < lab.randomized_excess(noise, 4) < 1.05


def test_under_a_rotation_sgd_is_itself_and_adamw_is_not() -> None:
    assert lab.rotation_gap(partial(torch.optim.SGD, lr=0.1, momentum=0.9), steps=3) < 1e-5
    assert lab.rotation_gap(adamw, steps=3) > 0.3


@pytest.mark.parametrize("rank", [2, 8])
def test_the_first_step_is_as_long_as_the_square_root_of_the_rank_says(rank: int) -> None:
    gradient = torch.randn(32, 50, generator=torch.Generator().manual_seed(0))
    ratio = lab.first_step(gradient, rank, scale=0.5) / lab.first_step(gradient, None)
    assert ratio == pytest.approx(0.5 * math.sqrt(rank / 32), rel=1e-3)


def test_a_snapshot_holds_bases_and_moments_and_notices_a_change_in_them() -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    model = nn.ParameterList([weight])
    galore = GaLore([weight], adamw, rank=2)
    weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    galore.step()
    before = lab.snapshot(model, galore)
    assert sorted(tuple(t.shape) for t in before) == [(), (2, 6), (2, 6), (4, 2), (4, 6)]
    assert lab.same(before, lab.snapshot(model, galore))
    galore.state[weight]["inner"]["exp_avg"][0, 0] += 1
    assert not lab.same(before, lab.snapshot(model, galore))


def test_calls_of_an_operator_are_counted() -> None:
    def two() -> None:
        torch.linalg.svdvals(torch.eye(3))
        torch.linalg.svd(torch.eye(2))

    assert calls_of("aten::_linalg_svd", two) == 2
    assert calls_of("aten::_linalg_svd", lambda: torch.eye(3) @ torch.eye(3)) == 0


# --- pictures ----------------------------------------------------------------------------------------------------


def test_pictures_have_labelled_axes_and_say_what_they_show() -> None:
    ms = {lab.PLAIN: 1.0, lab.BETWEEN: 5.0, lab.NEW_SVD: 200.0, lab.NEW_RANDOM: 50.0}
    figures = [
        lab.spectrum_figure({"noise": lab.noise_shares()}),
        lab.ageing_figure({4: {0: 0.9, 1: 0.5}}),
        lab.loss_figure({"a": [3.0, 2.0]}, "title", steps=2),
        lab.bytes_figure([4, 8], {"a": [0.1, 0.2]}),
        lab.spread_figure(ms),
    ]
    for picture in (
        lab.rank_picture(4, lab.NEVER, "keep", steps=6),
        lab.rank_picture(4, 2, "project", steps=6),
        lab.memory_picture(32, 4),
    ):
        figure, text = picture
        assert len(text.split()) > 8
        figures.append(figure)
    for figure in figures:
        (ax,) = figure.axes
        assert ax.get_title(loc="left")
        assert ax.get_xlabel()
        assert ax.get_ylabel() or ax.get_yticklabels()


def test_the_spread_picture_shows_what_spread_says() -> None:
    ms = {lab.PLAIN: 2.0, lab.BETWEEN: 10.0, lab.NEW_SVD: 210.0, lab.NEW_RANDOM: 50.0}
    (ax,) = lab.spread_figure(ms).axes
    svd = dict(zip(*ax.lines[0].get_data(), strict=True))
    assert svd[1] == 105
    assert svd[100] == pytest.approx(6.0)
