"""Moving a run to another device: the choice, what moves, what follows. Here cpu:1 stands in for a second device."""

import pytest
import torch
from hot import Card, at, loader, make, model, rows_of, same
from torch import nn

from safetrain_core import AmpTrainState, SafeTrainer, ThermalAbort, TrainConfig, TrainState
from safetrain_core.train.cursor import Cursor
from safetrain_core.train.switch import DeviceSwitch, optimizer_state_to

CPU = torch.device("cpu")
SWITCH = {"switch_on_thermal": True, "gpu_temp_guard": True}


def after(*actions):
    """``on_row`` for several ``(step, action)``."""

    def on_row(row):
        for step, action in actions:
            if row.step == step:
                action()

    return on_row


def test_a_hot_card_is_left_for_the_next_device_and_returned_to_below_resume(tmp_path):
    card, log = Card(), tmp_path / "m.csv"
    plain, whole = make(tmp_path / "a")
    expected = whole.fit()
    on = []

    def place(row):
        on.append(trainer._thermal.choice.current)

    moves = after((3, lambda: card.be(86.0)), (5, lambda: card.be(80.0)), (7, lambda: card.be(74.0)))
    net, trainer = make(
        tmp_path / "b",
        card,
        on_row=lambda row: (moves(row), place(row)),
        devices=["cpu", "cpu:1"],
        csv_log_path=str(log),
        **SWITCH,
    )
    result = trainer.fit()
    assert on == ["cpu"] * 3 + ["cpu:1"] * 4 + ["cpu"] * 3
    assert (result.switches, result.pauses, result.paused_s) == (2, 0, 0.0)
    assert result.rows == expected.rows
    assert same(plain, net)
    events = {row["step"]: row["thermal_event"] for row in rows_of(log) if row["thermal_event"]}
    assert events == {"3": "switched to cpu:1 86 C", "7": "switched to cpu 74 C"}
    assert (tmp_path / "b" / "step_00000003.pt").exists(), "saved before it left"


def test_another_card_must_be_below_resume_to_be_moved_to_and_is_left_when_it_is_hot_itself():
    home, second, on = Card(), Card(80.0), []
    moves = after(
        (2, lambda: home.be(86.0)),  # cpu:1 is at 80: not cool enough to be moved to
        (4, lambda: second.be(70.0)),
        (6, lambda: second.be(84.0)),  # warm, and not yet hot: it stays
        (8, lambda: second.be(86.0)),
        (10, lambda: home.be(70.0)),
    )
    _, trainer = make(
        None,
        home,
        on_row=lambda row: (moves(row), on.append(trainer._thermal.choice.current)),
        source={"cpu": home, "cpu:1": second},
        devices=["cpu", "cpu:1", "cpu:2"],
        max_steps=12,
        **SWITCH,
    )
    second.trainer = trainer
    second_poller = trainer._thermal.guards["cpu:1"].poller

    def be(celsius):
        second.celsius = celsius
        assert second_poller.wait(30)
        assert second_poller.wait(30)

    second.be = be
    result = trainer.fit()
    assert on == ["cpu"] * 2 + ["cpu:2"] * 2 + ["cpu:1"] * 4 + ["cpu:2"] * 2 + ["cpu"] * 2
    assert result.switches == 4


def test_where_every_device_is_hot_the_run_pauses_and_then_moves_to_the_first_that_cools(tmp_path):
    home, second = Card(), Card(86.0)
    saved = tmp_path / "step_00000003.pt"
    second.cools_when(saved.exists, 86.0, 80.0, 70.0)
    _, trainer = make(
        tmp_path,
        home,
        on_row=at(3, lambda: home.be(86.0)),
        source={"cpu": home, "cpu:1": second},
        devices=["cpu", "cpu:1"],
        csv_log_path=str(tmp_path / "m.csv"),
        **SWITCH,
    )
    result = trainer.fit()
    assert (result.pauses, result.switches) == (1, 1)
    event = rows_of(tmp_path / "m.csv")[2]["thermal_event"]
    assert event.startswith("paused 86 C; resumed 86 C after ")
    assert event.endswith("; switched to cpu:1 86 C")


def test_critical_at_home_aborts_wherever_the_run_is_and_a_lost_sensor_elsewhere_is_only_not_fit(tmp_path):
    home, second = Card(), Card()
    moves = after((2, lambda: home.be(86.0)), (4, lambda: home.be(96.0)))
    _, trainer = make(tmp_path, home, on_row=moves, devices=["cpu", "cpu:1"], **SWITCH)
    with pytest.raises(ThermalAbort, match=r"96 C is above critical 95 C.*step_00000004"):
        trainer.fit()
    assert trainer._thermal.choice.current == "cpu:1", "an abort does not go back to the hot card"
    home, second = Card(), Card(None)
    _, trainer = make(
        None,
        home,
        on_row=at(2, lambda: home.be(86.0)),
        source={"cpu": home, "cpu:1": second},
        devices=["cpu", "cpu:1", "cpu:2"],
        **SWITCH,
    )
    result = trainer.fit()
    assert (result.status, result.switches) == ("completed", 1)
    assert trainer._thermal.choice.current == "cpu", "where a run ends, its model is where its owner put it"


class Balky(nn.Module):
    """Moves as a module does, until it does not fit."""

    def __init__(self):
        super().__init__()
        self.fails = self.moves = 0
        self.weight = nn.Parameter(torch.zeros(1))

    def _apply(self, *args, **kwargs):
        self.moves += 1
        if self.fails:
            self.fails -= 1
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return super()._apply(*args, **kwargs)

    def forward(self, x):
        return x + self.weight


def test_a_device_that_has_no_room_is_given_up_and_the_run_stays_where_it_was(caplog):
    home, balky = Card(), Balky()
    net = nn.Sequential(nn.Linear(3, 4), balky, nn.Linear(4, 1))

    def hot():
        balky.fails = 1
        home.be(86.0)

    _, trainer = make(None, home, net=net, on_row=at(3, hot), devices=["cpu", "cpu:1", "cpu:2"], **SWITCH)
    result = trainer.fit()
    assert (result.status, result.switches) == ("completed", 1)
    assert balky.moves == 4, "out, back from half-way, out to the next, home at the end"
    assert "the run cannot move to cpu:1 (CUDA out of memory. Tried to allocate 2 GiB); it stays" in caplog.text
    assert "training goes on on cpu:2, after cpu" in caplog.text


def test_optimizer_state_moves_with_its_bits_and_dtype_and_step_counters_stay_where_torch_wants_them():
    meta = torch.device("meta")
    for fused in (False, True):
        net = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state = optimizer.state[net.weight]
        state["nested"] = {"list": [torch.ones(1)], "word": "kept"}
        optimizer_state_to(optimizer, meta)
        assert state["exp_avg"].device == state["exp_avg_sq"].device == state["nested"]["list"][0].device == meta
        assert state["step"].device == (meta if fused else CPU)
        assert state["nested"]["word"] == "kept"
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    sgd = torch.optim.SGD([weight], lr=1)
    sgd.state[weight]["master"] = torch.tensor([1 + 2**-20, 1 / 3])  # load_state_dict would round it to bfloat16
    optimizer_state_to(sgd, CPU)
    assert sgd.state[weight]["master"].tolist() == torch.tensor([1 + 2**-20, 1 / 3]).tolist()


def switched(amp):
    return DeviceSwitch(amp, Cursor([], 1, amp.device, TrainState()))


def test_weights_keep_their_identity_and_a_loss_function_that_is_a_module_moves_along():
    net, moved = model(), []

    class Loss(nn.MSELoss):
        def _apply(self, *args, **kwargs):
            moved.append(1)
            return super()._apply(*args, **kwargs)

    amp = AmpTrainState(net, loss_fn=Loss())
    weights = list(net.parameters())
    switch = switched(amp)
    assert switch.move(torch.device("cpu:1"))
    assert switch.move(CPU)
    assert all(a is b for a, b in zip(weights, net.parameters(), strict=True))
    assert len(moved) == 2
    assert not amp.step(torch.ones(2, 3), torch.ones(2, 1)).skipped


def test_autocast_and_scaler_follow_the_device_and_the_factor_waits_for_the_return():
    torch.manual_seed(0)
    amp = AmpTrainState(nn.Linear(3, 1), amp_dtype=torch.float16, init_scale=2.0**20, growth_interval=5)
    batch = torch.ones(2, 3), torch.ones(2, 1)
    for _ in range(12):
        amp.step(*batch)
    scale, state = amp.scale, amp.scaler.state_dict()
    assert scale != 2.0**20
    switch = switched(amp)
    switch.follow(CPU, torch.bfloat16)
    row = amp.step(*batch)
    assert (row.scale, row.skipped, amp.amp_dtype, amp.scaler.is_enabled()) == (None, False, torch.bfloat16, False)
    switch.follow(CPU, torch.bfloat16)  # from one to another that needs none
    switch.follow(CPU, torch.float16)
    assert (amp.scale, amp.scaler.state_dict()) == (scale, state)
    assert amp.step(*batch).scale == scale


@pytest.mark.parametrize(
    ("devices", "config", "told"),
    [
        (["cpu:1", "cpu"], {}, "must begin with the model's own device, cpu"),
        (None, {}, "no device to move to: cpu is the only one here"),
        (["cpu"], {}, "must be at least two different devices; add cpu"),
        (["cpu", "cpu"], {}, "must be at least two different devices"),
        (["cpu", "cuda:99"], {}, "thermal_devices: cuda:99 is not available"),
        (["cpu", "meta"], {}, "thermal_devices: meta is not available"),
        (["cpu", "cpu:1"], {"use_galore": True}, "use_galore"),
    ],
)
def test_devices_that_cannot_be_switched_to_are_refused(devices, config, told):
    with pytest.raises(ValueError, match=told):
        SafeTrainer(
            model(), TrainConfig(**SWITCH, **config), loader(), thermal_source=lambda: 60.0, thermal_devices=devices
        )
