"""What the thermal guard costs a step, counted; and that a run on a hot card, simulated, stays under its limits."""

import threading

import pytest
from hot import counted, make
from measure import Measured, seconds_of
from peer_loops import gpt, loss_of, tokens

from safetrain_core import SafeTrainer, SimulatedCard, TrainConfig

AREA = "thermal"
STEPS = 25


def test_what_the_guard_adds_to_a_step_is_nothing(claim):
    (plain_reads, plain_ops, _), (reads, ops, card) = counted(False), counted(True)
    claim("host reads that the guard adds to 20 steps", reads - plain_reads, "<=", 0)
    claim("operations that the guard adds to 20 steps", ops - plain_ops, "<=", 0)
    own = card.threads.count(threading.get_ident())
    claim("temperatures read by the thread that trains, the one at the start left out", own - 1, "<=", 0)


def test_a_guarded_run_beside_one_without(claim):
    data = [tokens(number) for number in range(STEPS)]

    def run(guard):
        config = TrainConfig(max_steps=STEPS, gpu_temp_guard=guard, gpu_temp_poll_interval_seconds=0.1)
        source = (lambda: 60.0) if guard else None
        trainer = SafeTrainer(gpt(), config, data, loss_fn=loss_of, thermal_source=source)
        return seconds_of(trainer.fit)

    run(False), run(True)
    ratios = []
    for i in range(11):
        first, second = run(bool(i % 2)), run(not i % 2)
        ratios.append(first / second if i % 2 else second / first)
    claim("run with the guard, 10 polls a second / without", Measured.of(ratios), "<=", 1.03, "x")


def test_a_simulated_hot_card_is_held_below_its_critical_temperature(claim, compare):
    card = SimulatedCard(25, start_c=60, heat_capacity_j_per_c=1, cooling_time_s=0.3)
    hottest = [0.0]

    def work(row):
        card.work(joules=6.0)
        hottest[0] = max(hottest[0], card.read().temperature_c)
        trainer._thermal.poller.wait(30)

    _, trainer = make(None, on_row=work, source=card, gpu_temp_guard=True, max_steps=300)
    result = trainer.fit()
    resumes = [e.temperature_c for e in result.thermal_events if e.state.value == "normal"]
    assert (result.status, result.state.updates) == ("completed", 300)
    if not result.pauses:
        pytest.fail("the card never got hot: nothing was measured")
    compare("pauses of 300 steps on a simulated card", result.pauses)
    claim("hottest reading of a guarded simulated card, pause at 85 C", hottest[0], "<=", 95, "C")
    claim("warmest resumption of a guarded simulated card, resume below 75 C", max(resumes), "<=", 75, "C")
