# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Thermal guard
#
# **What should training do when the device runs hot?**
#
# You will be able to
#
# - draw the three states of a thermal guard, and say what moves a run from one to the other;
# - show why one threshold is not enough, and what the gap between two costs;
# - choose a poll interval with which no card passes its critical temperature unseen;
# - pause, abort and resume a training run without changing a bit of its result;
# - tell a card that is cool from a card that cannot be seen.
#
# 25 minutes; the computing takes about 15 seconds on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU: the card is
# simulated, and its clock runs faster than yours. What the guard does to the training run is real.
# In a terminal: `python lessons/06_thermal_guard.py --pause-c 80 --resume-c 70`.
#
# <!-- nav -->
#
# Previous: [Gradient checkpointing](05_gradient_checkpointing.ipynb) · Next: [Low-rank gradients](07_low_rank_gradients.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# It settles none of the symptoms in [lesson 00](00_start_here.ipynb): what it is about shows neither in a loss nor in a file.
#
# <!-- /settles -->

# %%
import math
import random
import tempfile
import threading
import warnings
from pathlib import Path

from support import (
    as_log,
    claim,
    doctor,
    finish,
    knob,
    lesson_args,
    not_shown,
    say,
    show,
    table,
    whole,
)

args = lesson_args(
    "06_thermal_guard",
    num_steps=whole(120, at_least=100, at_most=2000, help="updates of each training run"),
    pause_c=whole(85, at_least=60, at_most=90, help="pause above this, in C"),
    resume_c=whole(75, at_least=40, at_most=89, help="resume below this, in C"),
    refuse=lambda a: (
        f"--resume-c {a.resume_c} must be less than --pause-c {a.pause_c}"
        if a.resume_c >= a.pause_c
        else None
    ),
)

# %%
import torch
from safetrain_core import (
    GpuMonitor,
    RecordedTrace,
    ThermalAbort,
    ThermalGuard,
    Thresholds,
    diagnose,
    next_state,
)
from safetrain_core.thermal.guard import ThermalState

from support import thermal as lab
from support import thermal_figures as pictures
from support.checkpoint_resume import logged, said
from support.knobs import slider
from support.toy import sensor_batches, tiny_mlp

STEPS, PAUSE, RESUME, CRITICAL = args.num_steps, args.pause_c, args.resume_c, lab.CRITICAL_C
LIMITS = Thresholds(PAUSE, RESUME, CRITICAL)
scratch = tempfile.TemporaryDirectory(prefix="lesson06-")


def folder(name):
    path = Path(scratch.name, name)
    path.mkdir()
    return path


# %% [markdown]
# ## 1. Predict
#
# A card of 300 W sits behind a filter full of dust. Idle it is as warm as the room, 25 C; under full load it would settle at 115 C. Half of any distance to where it
# would settle is gone in 42 seconds. The guard should pause training above 85 C. How long does training run before the first pause, and how long is
# the pause? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "two minutes, and then for good"

# %% [markdown]
# ## 2. Break it
#
# ### No guard
#
# Here is a real training run: AdamW, dropout, BatchNorm, a shuffled loader, one sample with an infinite reading in it. Each step takes a second of
# the card's time and 300 J. The card follows Newton's law of cooling: it loses heat in proportion to what it is hotter than the room. Nobody looks at the
# temperature.

# %%
unguarded = lab.train(folder("unguarded"), STEPS, args.seed, limits=None)
heat = unguarded.bench.course
for row in unguarded.rows[:3]:
    print(row)
for limit in (PAUSE, CRITICAL):
    at = next(s for s, c in zip(heat.seconds, heat.celsius, strict=True) if c > limit)
    print(f"above {limit:g} C after {at:.0f} s")
print(f"hottest: {heat.hottest_c:.0f} C, and it would settle at {lab.STEADY_C:.0f} C")
claim(unguarded.result.status == "completed", "the run says that all is well")
claim(heat.hottest_c > CRITICAL, "the card passed its critical temperature")

# %%
show(
    pictures.run_figure(unguarded, LIMITS, "No guard: the run completes, the card cooks"),
    "unguarded",
    alt="Temperature over simulated time without a guard: it rises from 25 C in a curve that "
    "flattens, crosses the lines for resume, pause and critical, and goes on. Two or three "
    "steps are marked SKIP at the foot.",
)

# %% [markdown]
# No row of the log shows it: loss, norm and learning rate know nothing of heat (the SKIP row is the infinite sample). A real card would defend itself: at its
# slowdown temperature it lowers its clocks, and your steps take longer for no visible reason; at its shutdown temperature it switches
# itself off, and with it everything since the last checkpoint. A guard acts below both. The doctor sees the heat only where it was logged
# (`gpu_metrics_backend: nvml` does). With the card's temperature beside each loss:

# %%
seen = heat.celsius[-len(unguarded.rows) :]
losses, skips = zip(*((row.loss, row.skipped) for row in unguarded.rows), strict=True)
log = as_log(loss=losses, skipped=skips, gpu_temperature_c=seen)
doctor(diagnose(log), "thermal_pauses")

# %% [markdown]
# ### One threshold
#
# So pause above the threshold and go on below it. Predict: how often does that stop and go in ten minutes?

# %%
my_guess = ""


# %%
def one_threshold(state, celsius):
    return "paused" if celsius > PAUSE else "normal"


flapping = lab.simulate(one_threshold, seconds=600, poll_s=1)
two = lab.simulate(lab.guard_rule(PAUSE, RESUME), seconds=600, poll_s=1)
courses = {f"One threshold, {PAUSE} C": flapping, f"Two, {PAUSE} and {RESUME} C": two}
table(
    "thresholds",
    ["rule", "changes of state", "pauses", "hottest C"],
    [[n, c.changes, c.pauses, f"{c.hottest_c:.1f}"] for n, c in courses.items()],
)
if PAUSE - RESUME >= 5:
    claim(flapping.changes > 4 * two.changes, "one threshold flaps over 4 times as often")
else:
    not_shown("at least 5 C between --pause-c and --resume-c")
claim(abs(flapping.hottest_c - two.hottest_c) < 1, "and the card gets as hot with either")

# %%
show(
    pictures.flapping_figure(courses, LIMITS),
    "flapping",
    alt="Two panels of temperature over the first 200 s. With one threshold the temperature sticks "
    "to 85 C, and the shaded pauses come every three seconds. With two it swings between 85 "
    "and 75 C in a saw-tooth with few, longer pauses.",
)

# %% [markdown]
# Each of these pauses would write a checkpoint before it waits. One degree is also what a sensor's last digit flickers by: with one
# threshold, even a card that sits still at 85 C goes on and off.
#
# ### A sensor that says NaN
#
# After 20 seconds this sensor fails, and every reading is NaN. The rule above compares: `celsius > 85`. Predict: what does it do?

# %%
my_guess = ""

# %%
print("nan > 85:", math.nan > 85, "   nan < 75:", math.nan < 75)
blind = lab.simulate(one_threshold, seconds=240, blind_from_s=20)
print(f"trained {100 * blind.trained:.0f}% of the time, hottest {blind.hottest_c:.0f} C")
claim(blind.pauses == 0 and blind.hottest_c > CRITICAL, "blind is taken for cool: no pause")

# %% [markdown]
# Every comparison with NaN is false, so a rule that asks "is it hot?" hears no. A rule that asks "is it cool?" hears no, too, and that one is safe.
#
# ## 3. By hand
#
# Three states. *Normal* trains, *paused* waits, *aborted* is the end. This is the whole machine:

# %%
show(
    pictures.machine_figure(LIMITS),
    "machine",
    alt="State diagram: normal goes to paused above the pause threshold, paused goes back to normal "
    "below the resume threshold, both go to aborted above critical. Nothing leads out of "
    "aborted. An unknown reading leaves the state as it is, three in a row abort.",
)


# %%
def guard_by_hand(state, celsius, limits=LIMITS):
    if state == "aborted":  # final
        return "aborted"
    if celsius is None or not celsius > -273.15:  # None, NaN, nonsense: unknown
        return state  # neither hot nor cool
    if celsius > limits.critical_c:
        return "aborted"
    if celsius > limits.pause_c:
        return "paused"
    if celsius < limits.resume_c:
        return "normal"
    return state  # between the two: as it was


# %% [markdown]
# Step it by hand before you run the next cell: write down the state after each of these readings.

# %%
readings = pictures.walk_around(LIMITS)
print("readings:", *(f"{celsius:g}" for celsius in readings))
my_guess = ""  # normal, normal, ...

# %%
state, rows = "normal", []
for number, celsius in enumerate(readings, start=1):
    before, state = state, guard_by_hand(state, celsius)
    rows.append([number, f"{celsius:g}", state, "" if state == before else f"was {before}"])
table("by_hand", ["reading", "C", "state", "change"], rows)
states = [row[2] for row in rows]
claim(states[3] == "paused", "between the two thresholds a pause goes on")
claim(states[4] == "paused", "NaN does not end a pause")
claim(states[-1] == "aborted", "aborted is final, however cool it gets")

# %% tags=["nbval-ignore-output"]
_ = knob(
    lambda number: pictures.machine_picture(LIMITS, number),
    number=slider("readings so far", [(str(n), n) for n in range(len(readings) + 1)], 0),
)

# %% [markdown]
# A machine that stays where it is when it cannot see needs one more rule, or a lost sensor in *normal* would be trained on for ever: **three unknown
# readings in a row end the run.** One or two can be a hiccup of the driver. You will write that in exercise A.
#
# ## 4. The package
#
# `next_state(state, temperature_c, thresholds)` is this function. Is it really? On 2000 random traces, with random thresholds, values exactly on them,
# NaN, None and infinities:

# %%
draws, compared, visited = random.Random(args.seed), 0, set()
for _ in range(2000):
    resume, pause, critical = sorted(draws.sample(range(30, 121), 3))
    limits = Thresholds(pause, resume, critical)
    ours, theirs = "normal", ThermalState.NORMAL
    for celsius in lab.random_trace(draws, limits):
        ours = guard_by_hand(ours, celsius, limits)
        theirs = next_state(theirs, celsius, limits)
        compared += ours == theirs
        visited.add(ours)
print("states compared:", compared, "  visited:", *sorted(visited))
claim(compared == 2000 * 40, "by hand and next_state agree in every one")

# %% [markdown]
# Thresholds that do not rise are refused before anything runs:

# %%
try:
    Thresholds(pause_c=85, resume_c=85)
except ValueError as error:
    say(f"ValueError: {error}")

# %% [markdown]
# ### A run that pauses
#
# The same training run as above, with the guard on. `SafeTrainer` gets a source of temperatures, here the simulated card. A thread of the guard
# reads it every 5 seconds (of the card's clock), and before each step training asks the guard. Predict: how does the loss of the last step
# differ from that of the run that never paused?

# %%
my_guess = ""

# %%
paused = lab.train(folder("paused"), STEPS, args.seed, LIMITS)
for step, what in paused.events[:3]:
    print(f"after step {step}: {what}")
course = paused.bench.course
waited = len(course.seconds) - len(paused.rows)
first, last = course.spans("paused")[0]
print(f"the first pause: after {first:.0f} s, for {last - first:.0f} s")
print(f"{paused.result.pauses} pauses, {waited} of {len(course.seconds)} s;", end=" ")
print(f"hottest {course.hottest_c:.1f} C")
claim(paused.result.pauses >= 1, "it paused, cooled and resumed")
claim(course.hottest_c < CRITICAL, "the card stayed below critical")
saved = [
    Path(paused.log.parent, f"step_{int(s):08d}.pt").exists() for s, _ in paused.events
]
claim(all(saved[-3:]), "each pause left a checkpoint behind")

# %%
show(
    pictures.run_figure(
        paused, LIMITS, "Pause, cool, resume: the card stays below critical"
    ),
    "paused",
    alt="Temperature over simulated time of a run with the guard: it rises to just above the "
    "pause threshold, falls below the resume threshold during each shaded pause, and never "
    "reaches critical. SKIP steps are marked at the foot.",
)

# %% [markdown]
# The seconds in the log are real ones: a simulated pause takes no time. Each pause begins a little above its threshold and ends a little below: that is the
# poll interval, and section 5 is about it. How near was your guess of section 1?
#
# Now compare. Every row, every weight, every buffer, every number of AdamW's memory:

# %%
same_rows = lab.losses(paused.rows) == lab.losses(unguarded.rows)
skips = [str(row).split(" lr=")[0] for row in paused.rows if row.skipped]
print("refused:", *skips, sep="\n  ")
claim(same_rows, "each step has the very loss that it had without a pause")
claim(lab.same_end(paused, unguarded), "weights, buffers and moments are bit-equal")

# %% [markdown]
# A pause costs time and nothing else. It falls between two windows, so no half-summed gradient waits; and while training waits, nothing draws a
# random number.
#
# Was that luck of the simulation? The same card under the same rule, as a pure function of thresholds and poll interval, with no training
# and no threads in it, goes through the same temperatures:

# %%
pure = lab.simulate(lab.guard_rule(PAUSE, RESUME), seconds=len(course.seconds))
gap = max(abs(a - b) for a, b in zip(pure.celsius, course.celsius, strict=True))
print("largest difference, C:", gap)
claim(gap < 1e-9 and pure.states == course.states, "the run went as the function says")

# %% [markdown]
# And the training thread itself never asked the sensor, apart from the very first reading. A call into a driver can take milliseconds, and may hang; it
# has no place in a training step.

# %%
own = paused.bench.threads.count(threading.get_ident())
print("readings taken by the training thread:", own)
claim(own == 1, "one at the start, none in a step: the poller reads")

# %% [markdown]
# ### Critical
#
# At 60 seconds a neighbour starts a job of 400 W on the same card. Our run pauses, and it does not help. Predict: what is left of our run?

# %%
my_guess = ""

# %%
at = folder("critical")
critical = lab.train(at, STEPS, args.seed, LIMITS, neighbour_w=400, neighbour_from_s=60)
for step, what in critical.events[-1:]:
    print(f"after step {step}: {what}")
say(f"{type(critical.abort).__name__}: {said(critical.abort)}")
print("status:", critical.result.status)
newest = max(at.glob("step_*.pt"))
states = [event.state.value for event in critical.result.thermal_events]
claim(states[-2:] == ["paused", "aborted"], "from paused to aborted: no way back to normal")
claim(int(newest.stem[5:]) == critical.rows[-1].step, "a checkpoint of its last step")
doctor(diagnose(critical.log), "thermal_pauses")

# %%
show(
    pictures.run_figure(
        critical,
        LIMITS,
        "A pause that does not help: aborted above critical",
        note=(60, "the neighbour starts"),
    ),
    "critical",
    alt="Temperature over simulated time: it rises as before, then steeply when the neighbour "
    "starts, goes on rising during the shaded pause, and the run ends with a star marked "
    "ABORT above the critical line.",
)

# %% [markdown]
# In a shell, `safetrain train` ends with exit status 75 here: "try again later". Let the card cool, send the neighbour away, and run the same command
# with `--resume`:

# %%
later = lab.train(at, STEPS, args.seed, LIMITS, resume=True)
print("resumed from", later.resumed_from.name)
print(later.rows[0])
both = lab.losses(critical.rows) | lab.losses(later.rows)
claim(later.result.status == "completed", "the second run comes to the end")
claim(
    len(critical.rows) + len(later.rows) == len(unguarded.rows)
    and both == lab.losses(unguarded.rows),
    "together they took each step once, with the loss it has without any of this",
)
claim(lab.same_end(later, unguarded), "and they end in the same weights, bit for bit")

# %% [markdown]
# ### A lost sensor
#
# The NaN sensor again, now with the package's guard.

# %%
lost = lab.train(folder("lost"), STEPS, args.seed, LIMITS, blind_from_s=20)
say(f"{type(lost.abort).__name__}: {said(lost.abort)}")
print("steps taken:", len(lost.rows))
claim(isinstance(lost.abort, ThermalAbort), "a card that cannot be seen is not heated")
claim(len(lost.rows) == 20, "the run ends, with a checkpoint, where the sensor was lost")
doctor(diagnose(lost.log), "sensor_lost")

# %% [markdown]
# ### Another device
#
# With `switch_on_thermal`, a pause need not be a wait: the run moves to the next device that is cool, and comes back when the card is below resume. Weights,
# optimizer state, autocast and scaler go along. Predict: does the loss curve show it?
#
# You may have no second device, so here it is called `cpu:1`. That is honest work for the guard (it decides, saves, copies each tensor, goes back) and for the
# optimizer's state. It is not a second memory, nothing is rounded differently there, and it costs no transfer worth measuring. On a real pair of devices
# expect losses to agree to a few digits, not bit for bit, and steps on a CPU to take far longer.

# %%
moved = lab.train(folder("moved"), STEPS, args.seed, LIMITS, switch=True)
for step, what in moved.events[:2]:
    print(f"after step {step}: {what}")
print(f"{moved.result.switches} switches, {moved.result.pauses} pauses")
claim(moved.result.switches >= 1 and moved.result.pauses == 0, "it moved, and did not wait")
claim(len(moved.bench.course.seconds) == len(moved.rows), "no second was lost")
claim(lab.same_end(moved, unguarded), "what moved there and back is bit-equal")

# %%
show(
    pictures.run_figure(
        moved, LIMITS, "Switching: the card cools while training goes on", shaded="away"
    ),
    "moved",
    alt="Temperature of the card over simulated time: it rises to the pause threshold, and falls "
    "while training is on the other device, which is shaded and labelled AWAY, then rises "
    "again when training is back.",
)

# %% [markdown]
# ### Your own loop
#
# `ThermalGuard` does not need the trainer: enter it, and call `hold` before each step. It returns at once while the card is cool.

# %%
bench, model = lab.Bench(LIMITS), tiny_mlp(args.seed)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpoints = []


def save():
    checkpoints.append(bench.clock.now)  # yours calls save_checkpoint
    bench.hold()  # the simulated card has to know that training waits


with logged(), ThermalGuard(bench.read, PAUSE, RESUME, poll_interval_s=0.01) as guard:
    for x, y in sensor_batches(STEPS, args.seed):
        guard.hold(save)
        torch.nn.functional.mse_loss(model(x), y).backward()
        adamw.step()
        adamw.zero_grad()
        bench.step()  # one second of load
for event in guard.events[:2]:
    print(event)
claim(len(checkpoints) >= 1, "a pause saves first")
claim(bench.course.hottest_c < CRITICAL, "and keeps the card below critical")

# %% [markdown]
# ### Your card
#
# Enough of simulations. `GpuMonitor` asks NVML, the library that comes with NVIDIA's driver. If there is a card, the next cell shows what it says; if there
# is none, why not, and what would help. The output differs from machine to machine, so no check compares it.

# %% tags=["nbval-ignore-output"]
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    monitor = GpuMonitor("cuda:0")
    reading = monitor.read()
    trouble = monitor.trouble
if reading.temperature_c is not None:
    print(f"{monitor.name}: {reading}")
    print(
        f"it slows down at {monitor.slowdown_c} C and switches off at {monitor.shutdown_c} C"
    )
    print(
        "the guard, from normal:",
        next_state(ThermalState.NORMAL, reading.temperature_c, LIMITS),
    )
else:
    say(f"{reading}. {trouble}")
monitor.close()

# %%
claim(
    (reading.temperature_c is None) == (trouble is not None)
    if reading.temperature_c is None
    else reading.temperature_c > 0,
    "there is a temperature, or the reason why there is none: never a 0 in its place",
)

# %% [markdown]
# Set the pause threshold below the temperature at which the card slows itself down. Above it, the card throttles, stays just below your threshold, and the
# guard never sees a reason to act; it warns you when it finds such a pair.
#
# ### A recorded trace
#
# `safetrain watch` prints readings beside any training, yours or somebody else's, and says what the guard would do; `--csv` keeps them. `--replay` judges
# a recorded file. Here is one of the run without a guard, with two readings missing.

# %%
trace = Path(scratch.name) / "trace.csv"
recorded = [(s, None if s in (35, 40) else c) for s, c in unguarded.bench.course.readings]
lab.write_trace(trace, recorded[:20])
status, lines = lab.safetrain(
    "watch", "--replay", str(trace),
    "--gpu-temp-pause-threshold-c", str(PAUSE),
    "--gpu-temp-resume-threshold-c", str(RESUME),
)  # fmt: skip
print(*lines[5:], sep="\n")
print("exit status:", status)
claim(status == 75, "what the guard would have ended has exit status 75")
claim(any("would pause" in line for line in lines), "and it would have paused before that")

# %% [markdown]
# A replay judges what was recorded. The real card would have cooled during the pause, so read the first `would pause` as the answer, and what comes after as what
# happened without a guard. The paused run wrote a log of its own, and the same command reads that:

# %%
status, lines = lab.safetrain("watch", "--replay", str(paused.log))
print("readings:", len(RecordedTrace(paused.log).rows), "  exit status:", status)
claim(status == 0, "in the guarded run's log nothing would have to be ended")

# %% [markdown]
# ## 5. What it costs
#
# ### The gap
#
# The lower the resume threshold, the rarer the pauses. Predict: does that cost training time?

# %%
my_guess = ""

# %%
rows, measured, by_rule = [], [], []
gaps = [g for g in (1, 2, 5, 10, 25, 40) if PAUSE - g > lab.AMBIENT_C + 10]
for gap in gaps:
    long = lab.simulate(
        lab.guard_rule(PAUSE, PAUSE - gap), seconds=3600, poll_s=1, start_c=PAUSE - gap
    )
    measured.append(long.trained)
    by_rule.append(lab.cycle_share(PAUSE, PAUSE - gap))
    rows.append(
        [gap, long.pauses, f"{100 * long.trained:.1f}%", f"{100 * by_rule[-1]:.1f}%"]
    )
table("gap", ["gap C", "pauses an hour", "trains", "by the formula"], rows)
claim(
    all(abs(a - b) < 0.015 for a, b in zip(measured, by_rule, strict=True)),
    "the share of the time in training is that of the formula, within 1.5 points",
)
claim(measured == sorted(measured, reverse=True), "a wider gap trains less of the time")
claim(rows[0][1] > 5 * rows[-1][1], "and pauses less often")

# %% [markdown]
# The formula is the time from resume to pause under load, over that plus the time back. With no gap at all it becomes (85 - 25) / (115 - 25), two thirds: **what a
# hot card can do is decided by its cooling, not by the guard.** A wide gap costs a few points because the card is cooler on average, and cool things give off less
# heat. Ten degrees are a fair middle.
#
# A guard is a seat belt, not a way to drive. If it pauses every minute, clean the filter, or lower the card's power limit: steady work at less power beats stop and go.
#
# ### The poll interval
#
# Between two readings the card does what it wants. If one reading says exactly 85 C, training goes on for another whole interval t, and the card may reach
#
# $$T_\max(t) = T_\mathrm{settle} - (T_\mathrm{settle} - T_\mathrm{pause})\, e^{-t/\tau}$$
#
# with tau = 60 s here. Predict: how rarely may you read, for the card to stay below 95 C?

# %%
my_guess = ""

# %%
polls = (1, 2, 5, 10, 20, 30, 45)
found = {poll: lab.hottest_by_phase(PAUSE, poll) for poll in polls}
table(
    "overshoot",
    ["poll every s", "hottest C, found", "at most", "above critical"],
    [
        [p, f"{c:.1f}", f"{lab.ceiling_c(PAUSE, p):.1f}", "yes" if c > CRITICAL else "no"]
        for p, c in found.items()
    ],
)
longest = lab.longest_poll_s(PAUSE, CRITICAL)
print(f"longest interval that is safe: {longest:.0f} s")
claim(
    all(c <= lab.ceiling_c(PAUSE, p) for p, c in found.items()),
    "no simulated card passes the formula's limit",
)
claim(
    all(lab.ceiling_c(PAUSE, p) - c < 1.5 for p, c in found.items()),
    "and the worst comes within 1.5 C of it",
)
claim(
    all(c <= CRITICAL for p, c in found.items() if p <= longest),
    "with every interval up to the longest safe one, critical is never passed",
)
claim(
    found[5] - PAUSE < (CRITICAL - PAUSE) / 2,
    "at the default of 5 s it uses less than half of the room below critical",
)

# %%
show(
    pictures.overshoot_figure(found, LIMITS),
    "overshoot",
    alt="Hottest temperature over the poll interval. The found points lie just below the curve of the "
    "formula, which rises from 85 C and flattens. It crosses the critical line at about 24 s.",
)

# %% [markdown]
# Found means: with the readings falling on the worst second. That is why one trial tells little here; a card that happens to be read at the right moment looks safe at any interval.
# Real chips are quicker than this one: a die can gain several degrees in a second or two, before the heat sink even notices. Leave more room between
# pause and critical than a formula for a lump of metal tells you.
#
# ## 6. Turn the knob
#
# Ten minutes of the same card. Predict, before you move anything: at a reading every 60 s, is it the pause threshold or the gap that saves the card?

# %%
my_guess = ""

# %%
settings = {poll: lab.simulate(lab.guard_rule(85, 75), poll_s=poll) for poll in (5, 60)}
for poll, course in settings.items():
    end = "aborted" if course.hottest_c > 95 else "went on"
    print(
        f"every {poll} s: {course.pauses} pauses, hottest {course.hottest_c:.1f} C, {end}"
    )
claim(
    settings[5].hottest_c < 95 < settings[60].hottest_c, "every 60 s is too rarely at 85 C"
)
wider = lab.simulate(lab.guard_rule(85, 45), poll_s=60)
cooler = lab.simulate(lab.guard_rule(70, 60), poll_s=60)
print(f"resume at 45 C instead of 75: hottest {wider.hottest_c:.1f} C")
print(f"pause at 70 C instead of 85:  hottest {cooler.hottest_c:.1f} C")
claim(
    wider.hottest_c > 95 > cooler.hottest_c,
    "the pause threshold saves it, the gap does not",
)

# %%
figure, text = pictures.settings_picture(85, 10, 5)
show(figure, "settings", alt=text)

# %% tags=["nbval-ignore-output"]
_ = knob(
    pictures.settings_picture,
    pause_c=slider(
        "pause above", [(f"{c} C", c) for c in (60, 65, 70, 75, 80, 85, 90)], 85
    ),
    gap_c=slider("resume below, by", [(f"{c} C", c) for c in (1, 2, 5, 10, 20, 30)], 10),
    poll_s=slider("read every", [(f"{s} s", s) for s in (1, 2, 5, 10, 20, 30, 60)], 5),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. The lost sensor
#
# Write `watch(readings)`: the state after all of them, from normal on, with pause 85, resume 75, critical 95. Three unknown readings in a row (None or NaN) abort.


# %% tags=["exercise"]
from support.checks_06 import check_longest_poll, check_loop, check_watch

LESSON = Thresholds(pause_c=85, resume_c=75, critical_c=95)


def watch(readings):
    state = ThermalState.NORMAL
    for celsius in readings:
        state = next_state(state, celsius, LESSON)  # what is missing here?
    return state


say(check_watch(watch))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Count the unknown ones, and set the count back to 0 at each reading that is known. `math.isnan(None)` raises.
#
# </details>
# <details><summary>Hint 2</summary>
#
# At a count of 3 the state is `ThermalState.ABORTED`. `next_state` never leads out of that one, whatever comes after.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def watch(readings):
#     state, unknown = ThermalState.NORMAL, 0
#     for celsius in readings:
#         known = celsius is not None and not math.isnan(celsius)
#         unknown = 0 if known else unknown + 1
#         state = next_state(state, celsius, LESSON)
#         if unknown >= 3:
#             state = ThermalState.ABORTED
#     return state
# ```
#
# </details>

# %% [markdown]
# ### B. How often to read
#
# Write `longest(pause_c, critical_c, steady_c, tau_s)`: the longest poll interval, in seconds, with which a card that settles at `steady_c` cannot pass `critical_c`
# between a reading of `pause_c` and the next.


# %% tags=["exercise"]
def longest(pause_c, critical_c, steady_c, tau_s):
    return 5.0  # the default; is it always short enough?


say(check_longest_poll(longest))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Put the formula of section 5 equal to `critical_c`, and solve it for t.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The distance to `steady_c` shrinks from `steady_c - pause_c` to `steady_c - critical_c`. And if the card settles below critical? Then `math.inf`.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def longest(pause_c, critical_c, steady_c, tau_s):
#     if steady_c <= critical_c:
#         return math.inf
#     return tau_s * math.log((steady_c - pause_c) / (steady_c - critical_c))
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a loop
#
# "We look at the temperature all the time, and still lost a card, and a night of training with it." The loop gets a `run` with windows of two micro-batches,
# a `card()` that gives degrees C or NaN, `save()` and `sleep(seconds)`. It should pause above 85 C, resume below 75 C, and raise `ThermalAbort` above 95 C or when
# three readings in a row are unknown. Use `next_state` and `LESSON`; leave the three lines that call `run` in their order.


# %% tags=["exercise"]
def loop(run, card, save, sleep):
    for window in run.windows():
        for batch in window:
            while card() > 85:
                sleep(5)
            run.backward(batch)
        run.update()


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Look before the window, not inside. Keep a state and a count of unknown readings that outlive the window.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Before each window: read, step the state, and leave the inner loop if it is normal. Else save if this pause has not been saved, raise if aborted, sleep, and
# read again.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(run, card, save, sleep):
#     state, unknown = ThermalState.NORMAL, 0
#     for window in run.windows():
#         saved = False
#         while True:
#             celsius = card()
#             known = celsius is not None and not math.isnan(celsius)
#             unknown = 0 if known else unknown + 1
#             state = next_state(state, celsius, LESSON)
#             if unknown >= 3:
#                 state = ThermalState.ABORTED
#             if state == ThermalState.NORMAL:
#                 break
#             if not saved:
#                 save()
#                 saved = True
#             if state == ThermalState.ABORTED:
#                 raise ThermalAbort(f"{celsius} C, {unknown} unknown readings in a row")
#             sleep(5)
#         for batch in window:
#             run.backward(batch)
#         run.update()
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. A run is paused at 85 C, and the next reading says 80 C. Resume is at 75 C. What does the guard do, and why?**
#
# <details><summary>A. It resumes, since 80 C is below the pause threshold</summary>
#
# No. That is the rule with one threshold: at 80 C it would soon be back, after a checkpoint for every few seconds of work.
#
# </details>
# <details><summary>B. It aborts, since the card does not cool fast enough</summary>
#
# No. It aborts above critical or without a sensor. How long a pause takes is no reason to end the run.
#
# </details>
# <details><summary>C. It stays paused until a reading is below 75 C</summary>
#
# Right. Between the two thresholds the state stays what it was; that gap is what keeps it from flapping.
#
# </details>

# %% [markdown]
# **2. You widen the gap from 10 C to 40 C. What do you see in an hour?**
#
# <details><summary>A. Fewer pauses, and somewhat less training</summary>
#
# Right. Each pause is longer, the card is cooler on average, and so it gives off less heat: fewer joules for training.
#
# </details>
# <details><summary>B. Fewer pauses, and more time for training</summary>
#
# No. The pauses are rarer but much longer. Only what each pause costs in checkpoints is saved.
#
# </details>
# <details><summary>C. As many pauses, but a card that stays cooler</summary>
#
# No. From a lower start it takes longer to get back to the pause threshold, so pauses become rarer.
#
# </details>

# %% [markdown]
# **3. The driver begins to answer "temperature unknown" in the middle of a run. What should a guard make of it?**
#
# <details><summary>A. Count it as 0 C, so that the log has no holes in it</summary>
#
# No. A 0 is cool, and resumes a pause on a card that may be burning. What is unknown stays empty in the log.
#
# </details>
# <details><summary>B. Stay in its state, and end the run at the third in a row</summary>
#
# Right. One may be a hiccup; three are a lost sensor, and what cannot be seen must not be heated. The checkpoint is saved first.
#
# </details>
# <details><summary>C. Keep the last reading for as long as the driver is silent</summary>
#
# No. The last reading says what the card was. Under full load it can be ten degrees hotter within seconds.
#
# </details>

# %% [markdown]
# **4. With pause 85, critical 95 and a reading every 5 s, a run is aborted at 97 C in its first minute. Which change helps?**
#
# <details><summary>A. A resume threshold of 60 C, for longer pauses</summary>
#
# No. It came to critical before any pause could help. Resume decides how a pause ends, not how it begins.
#
# </details>
# <details><summary>B. A critical threshold of 105 C, for more room</summary>
#
# No. That is room taken from the card: it slows down or switches itself off there, whatever the guard says.
#
# </details>
# <details><summary>C. A larger checkpoint interval, for less load</summary>
#
# No. Checkpoints have next to nothing to do with the heat of the card. It was not read in time.
#
# </details>
# <details><summary>D. A lower pause threshold, or shorter intervals</summary>
#
# Right. The card gained over 10 C between two readings, so leave it more than that, or look more often.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import GpuMonitor, ThermalGuard, save_checkpoint
#
# monitor = GpuMonitor("cuda:0")
# with ThermalGuard(monitor, pause_c=80, resume_c=70, critical_c=90, slowdown_c=monitor.slowdown_c) as guard:
#     for batch in loader:
#         guard.hold(save=lambda: save_checkpoint(model, optimizer, schedule, state, path))
#         train_step(batch)
# ```
#
# With the trainer: `TrainConfig(gpu_metrics_backend="nvml", gpu_temp_guard=True, gpu_temp_pause_threshold_c=80, ...)`. In a shell:
# `safetrain train --gpu-metrics-backend nvml --gpu-temp-guard --gpu-temp-pause-threshold-c 80`; after exit status 75, the same command with `--resume`. Beside any
# training: `safetrain watch --csv readings.csv`.
#
# **The rule.** Pause above one temperature, resume below a lower one, end above a third. Save before you wait. Look between windows, and often enough for the
# heat that one interval adds. Unknown is not cool.
#
# **The knobs,** by their names in a `TrainConfig`: `gpu_temp_guard`, `gpu_temp_pause_threshold_c` (85), `gpu_temp_resume_threshold_c` (75),
# `gpu_temp_critical_threshold_c` (95), `gpu_temp_poll_interval_seconds` (5), `switch_on_thermal`, `gpu_metrics_backend`, `nvml_device_index`.
#
# **Where it is.** `safetrain_core/thermal/states.py` (the machine), `guard.py` and `poller.py`, `nvml.py` (`GpuMonitor`), `simulated.py`, `trace.py`, `watch.py`;
# `safetrain_core/train/switch.py` (moving a run).
#
# **Sources.** NVIDIA, [NVML API reference](https://docs.nvidia.com/deploy/nvml-api/) (temperatures, thresholds, throttle reasons); Incropera et al., *Fundamentals of Heat and
# Mass Transfer*, chapter 5 (the lumped capacitance method: Newton's law of cooling for a body of one temperature).

# %%
scratch.cleanup()
finish()
