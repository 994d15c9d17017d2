"""Labelled logs as files: text that was really damaged after a run wrote it, and runs whose card got hot. By seed."""

import csv
import itertools

from corpus import BROKEN, broken, healthy_rows, styled, with_temperature, write_csv
from hot import POLL, loader, model

from safetrain_core import SafeTrainer, SimulatedCard, ThermalAbort, TrainConfig

__all__ = ["DAMAGED", "LABELS", "broken_log"]


def _lines(seed, salt, path):
    """A healthy log at ``path``: its lines as they stand there, header first, and the dice."""
    rows, dice = healthy_rows(seed, salt)
    write_csv(styled(rows, seed % 4), path)
    return path.read_bytes().decode().splitlines(keepends=True), dice


def _write(path, text):
    path.write_bytes(text.encode())


def torn(seed, path):
    """Killed while it wrote a row: what is left ends somewhere before the row's last cell."""
    lines, dice = _lines(seed, 21, path)
    last = lines[dice.randint(len(lines) // 2, len(lines) - 1)]
    whole = lines[: lines.index(last)]
    _write(path, "".join(whole) + last[: dice.randint(1, last.rindex(","))])


def ragged(seed, path):
    """A row that was cut and written on, another column from some row on, or two processes in one file."""
    lines, dice = _lines(seed, 22, path)
    at = dice.randint(len(lines) // 3, len(lines) - 3)
    how = dice.choice(("written on", "new column", "two processes"))
    if how == "written on":  # a resumed run appends to what the killed one left
        cut = lines[at][: dice.randint(lines[at].index(",") + 1, lines[at].rindex(","))]
        _write(path, "".join(lines[:at]) + cut + "".join(lines[at:]))
    elif how == "new column":  # started again by a newer version, that logs one thing more
        more = [line.rstrip("\r\n") + f",{dice.uniform(10, 20):.2f}\r\n" for line in lines[at:]]
        _write(path, "".join(lines[:at] + more))
    else:  # each flushes its own buffer when it is full, wherever a row may be then
        size = dice.choice((256, 512, 1024))
        texts = ["".join(lines), "".join(_lines(seed + 1, 22, path)[0])]
        blocks = [[text[i : i + size] for i in range(0, len(text), size)] for text in texts]
        _write(path, "".join(part for pair in itertools.zip_longest(*blocks, fillvalue="") for part in pair))


def header_twice(seed, path):
    """Started again, from the same step or an earlier one, by a loop that opens the log to append its header."""
    lines, dice = _lines(seed, 23, path)
    at = dice.randint(len(lines) // 3, len(lines) - 3)
    back = dice.choice((0, 0, 5))
    _write(path, "".join(lines[:at] + lines[:1] + lines[at - back :]))


def _guarded(seed, path, dice, *, joules, steps):
    """SafeTrainer's own log of a run on a simulated card that each step heats, and each look at it lets cool."""
    looks = itertools.count()
    card = SimulatedCard(
        25, start_c=dice.uniform(30, 60), heat_capacity_j_per_c=1, cooling_time_s=10, clock=lambda: next(looks)
    )
    config = TrainConfig(
        max_steps=steps, gpu_temp_guard=True, gpu_temp_poll_interval_seconds=POLL / 5, telemetry_log_interval=2,
        csv_log_path=str(path), seed=seed,
    )  # fmt: skip

    def heat(row):
        card.work(joules)
        trainer._thermal.poller.wait(30)

    trainer = SafeTrainer(model(), config, loader(), thermal_source=card, on_row=heat)
    return trainer


def thermal_pauses(seed, path):
    """A card that the guard paused, one that it gave up, or one without a guard that stays at its slowdown."""
    dice = healthy_rows(seed, 24)[1]
    how = dice.choice(("paused", "given up", "no guard"))
    if how == "no guard":
        rows = healthy_rows(seed, 24)[0]
        write_csv(styled(with_temperature(rows, dice, settles_c=dice.uniform(88, 95)), seed % 4), path)
        return
    joules = dice.uniform(15, 25) if how == "paused" else dice.uniform(70, 90)
    trainer = _guarded(seed, path, dice, joules=joules, steps=dice.choice((30, 50)))
    try:
        result = trainer.fit()
    except ThermalAbort as error:
        result = error.result
    with path.open(newline="") as file:
        events = [row["thermal_event"] for row in csv.DictReader(file)]
    if not any(events) or not result.thermal_events:
        raise AssertionError(f"seed {seed}: the card did not get hot enough to be paused")


#: Label -> (what writes such a log to a path, the rules that name it).
DAMAGED = {
    "torn log": (torn, {"log_torn"}),
    "ragged rows": (ragged, {"log_ragged"}),
    "header twice": (header_twice, {"log_header_twice"}),
    "thermal pauses": (thermal_pauses, {"thermal_pauses"}),
}

#: Label -> the rules that name it, of all labels.
LABELS = {label: rules for label, (_, rules) in {**BROKEN, **DAMAGED}.items()}


def broken_log(label, seed, path):
    """Write a log that has ``label`` to ``path``; returns its baseline's rows, or None."""
    if label in DAMAGED:
        DAMAGED[label][0](seed, path)
        return None
    rows, baseline = broken(label, seed)
    write_csv(rows, path)
    return baseline
