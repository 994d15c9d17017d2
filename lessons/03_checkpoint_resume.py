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
# # 03 · Checkpoint and resume
#
# **Is the resumed run the same run?**
#
# You will be able to
#
# - save so that a kill or a power failure at any moment leaves a whole file, and say which call makes it so;
# - put all five buckets into a checkpoint, and tell from a bent curve which one is missing;
# - resume in the middle of a shuffled epoch with each sample seen exactly once;
# - find a torn or altered file before it is loaded, and load files of strangers without running their code;
# - choose how often to save and how many files to keep.
#
# 30 minutes; the computing takes about 20 seconds on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/03_checkpoint_resume.py --total-steps 24 --interrupt-at 10`.
#
# <!-- nav -->
#
# Previous: [Gradient accumulation](02_accumulation.ipynb) · Next: [Sharded checkpoints](04_sharded_resume.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# Of the symptoms in [lesson 00](00_start_here.ipynb), this settles
#
# - **7.** The loss curve after a resume is not the one before it
# - **12.** `unknown schema`
# - **13.** A resume looks well, and a hundred steps later the loss is NaN
# - **14.** The disk is full in the middle of the run
#
# <!-- /settles -->
#
# 13 and 14 for a checkpoint that is one file; and it shows what a truncated or altered one does, and how it is found.

# %%
from support import (
    about,
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
    "03_checkpoint_resume",
    total_steps=whole(24, at_least=2, at_most=2000, help="steps of each run"),
    interrupt_at=whole(10, at_most=2000, help="step after which a run is interrupted"),
    refuse=lambda a: (
        f"--interrupt-at {a.interrupt_at} must be less than --total-steps {a.total_steps}"
        if a.interrupt_at >= a.total_steps
        else None
    ),
)

# %%
import io
import os
import pickle
import pickletools
import random
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetrain_core import (
    CheckpointError,
    Checkpoints,
    TrainState,
    atomic_save,
    capture_rng_state,
    diagnose,
    load_checkpoint,
    probe_resume,
    restore_rng_state,
    save_checkpoint,
    verify_checkpoints,
)
from safetrain_core.checkpoint.atomic import verify
from safetrain_core.checkpoint.inspection import inspect

from support import checkpoint_resume as lab
from support.knobs import slider

TOTAL, AT = args.total_steps, args.interrupt_at
scratch = tempfile.TemporaryDirectory(prefix="lesson03-")
folder = Path(scratch.name)

# %% [markdown]
# ## 1. Predict
#
# A run saves to `last.pt`, every few minutes, with `torch.save(payload, "last.pt")`. The cluster kills it, without warning, while
# it saves for the second time. What is in `last.pt`: the first checkpoint, the second, or what else? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "the first one"

# %% [markdown]
# ## 2. Break it
#
# ### Killed in the middle of a save
#
# The next cell starts two processes. Each saves a megabyte of weights as step 1, then begins to save step 2 to the same path, and
# gets a SIGKILL when half of it is written. The first one calls `torch.save`; the second one we come back to.

# %%
kills = lab.killed_in_mid_save(["naive", "atomic"], folder)
torn, status = kills["naive"]
print("exit status:", status, "(minus the number of the signal)")
print(f"{torn.name}: {about(torn.stat().st_size / 1e3, 3)} kB of {about(1001, 3)} kB")
try:
    torch.load(torn, weights_only=True)
except RuntimeError as error:
    say(f"{type(error).__name__}: {lab.said(error).split('. ')[0]}")
else:
    claim(False, "a torn file does not load")
claim(status == -9, "the process really was killed by SIGKILL")
claim(torn.stat().st_size < 900_000, "the file is torn: neither step 1 nor step 2 is in it")

# %% [markdown]
# Both checkpoints are gone. Opening the file for writing had emptied it, and the only other copy was in the memory of the process
# that is no more. The more often you save like that, the likelier a kill meets a save. `safetrain verify` asks the doctor about a file:

# %%
doctor(verify_checkpoints(torn).findings, "torn_file")

# %% [markdown]
# ### Resumed, but not the same run
#
# Now suppose that the file is whole. Here is a small run with what real ones have: AdamW, a cosine, dropout, a shuffled loader, inputs
# that are jittered by Python's `random` and by NumPy. It is interrupted in the middle of an epoch, everything is made anew, as in a
# new process, and loaded from a checkpoint in which one bucket is missing. Predict: which of model, optimizer, scheduler, counters
# and random states (RNG) will you *not* miss?

# %%
my_guess = ""

# %%
whole_run = lab.uninterrupted(args.seed, TOTAL)
without = {
    bucket: lab.resumed(args.seed, TOTAL, AT, without=bucket) for bucket in lab.BUCKETS
}
differs = {b: lab.first_difference(whole_run.losses, r.losses) for b, r in without.items()}
epoch = lab.epoch_around(AT)
mid_epoch = AT % lab.PER_EPOCH != 0 and epoch.stop <= TOTAL
rows = []
for bucket, run in without.items():
    twice = sum(n > 1 for n in lab.sample_counts(run.seen[epoch]))
    rows.append(
        [
            bucket,
            differs[bucket] or "-",
            about(lab.largest_difference(whole_run.losses, run.losses)),
            twice and about(twice) if mid_epoch else "-",
            run.counters["step"],
        ]
    )
table(
    "left_out",
    ["left out", "first step that differs", "by at most", "samples twice", "says it is at"],
    rows,
)
if TOTAL >= AT + 3:
    claim(None not in differs.values(), "without any one of the five it is another run")
    claim(
        [differs[b] - AT for b in lab.BUCKETS] == [1, 2, 3, 1, 1],
        "no optimizer shows a step late, no scheduler two steps late, the others at once",
    )
else:
    not_shown("at least 3 steps after the interruption")
claim(
    without["counters"].counters["step"] == TOTAL - AT,
    "without counters it would train as many steps again as it had taken",
)

# %%
show(
    lab.buckets_figure(
        whole_run,
        {f"no {b}": run for b, run in without.items()}
        | {"with all five": lab.resumed(args.seed, TOTAL, AT)},
        AT,
    ),
    "buckets",
    alt="Six panels, each with the loss of the uninterrupted run in grey and that of a resumed "
    "run on top. Without the model the loss jumps back up. Without optimizer, scheduler, "
    "counters or RNG it bends away more gently. With all five the two curves are one.",
)

# %% [markdown]
# Only the missing model is easy to see. The rest looks like a run that trains, and it is: another one. Without the scheduler the loss may
# even be lower, since the learning rate starts again from the top. Without counters or random states the curve tells you nothing at all; the
# samples do, seen twice or never. The optimizer's absence shows one step late, because the first loss
# is computed from weights that are right. Beside the uninterrupted run's log the doctor sees where a resumed one leaves it, here without the
# random states. To see what was left out, it takes a few steps with your own functions, saves, loads, and compares:

# %%
logs = [as_log(loss=run.losses) for run in (without["rng"], whole_run)]
doctor(diagnose(logs[0], baseline=logs[1]), "leaves_baseline")

# %%
named = {
    bucket: probe_resume(lab.saving(bucket), lab.loading, lab.next_step, lab.Run)[0]
    for bucket in lab.BUCKETS
}
table(
    "probed",
    ["left out", "what the probe says"],
    [[b, f.symptom] for b, f in named.items()],
)
claim(
    [finding.rule for finding in named.values()]
    == [
        "resume_without_weights",
        "resume_without_optimizer",
        "resume_without_schedule",
        "resume_at_wrong_data",
        "resume_without_rng",
    ],
    "and it names each of the five",
)

# %% [markdown]
# Of the random states, one is not enough:


# %%
def torch_alone(run, saved):
    lab.unpacked(run, saved)
    random.seed(args.seed)  # as they stand when a script has just begun
    np.random.seed(args.seed)


run = lab.resumed(args.seed, TOTAL, AT, unpack=torch_alone)
first = lab.first_difference(whole_run.losses, run.losses)
print("torch's state alone: differs from step", first)
claim(
    first == AT + 1,
    "Python's and NumPy's generators jitter the data: they count too",
)

# %% [markdown]
# ### One bit
#
# A file can also be whole in length and wrong in content: a disk, a copy, a page that never reached the platter. Here one single bit is
# turned over, in one number of AdamW's memory. Predict: what does `torch.load` say?

# %%
my_guess = ""

# %%
early = lab.Run(args.seed, TOTAL)
early.train(AT)
state = TrainState(
    step=AT,
    updates=AT,
    epoch=early.counters["epoch"],
    batch_in_epoch=early.counters["batch_in_epoch"],
)
altered = folder / "altered.pt"
save_checkpoint(early.model, early.optimizer, early.scheduler, state, altered, loader=early)
lab.spoil_momentum(altered, early)

saved = torch.load(altered, weights_only=True)  # says nothing
late = lab.Run(args.seed, TOTAL)
for part in ("model", "optimizer", "scheduler"):
    getattr(late, part).load_state_dict(saved[part])
late.counters.update({name: saved["state"][name] for name in late.counters})
late.load_state_dict(saved["loader"])
restore_rng_state(saved["rng"])
late.train(min(4, TOTAL - AT))
right = whole_run.losses[AT:][: len(late.losses)]
for step, pair in enumerate(zip(late.losses, right, strict=True), start=AT + 1):
    print(f"step {step}: loss {about(pair[0], 6)}, should be {about(pair[1], 6)}")
claim(
    late.losses[0] == right[0],
    "torch.load accepts it, and the first loss is right",
)
if TOTAL >= AT + 3:
    claim(not late.losses[2] < 1e6, "two steps later the run is lost")
doctor(verify_checkpoints(altered).findings, "altered_file")

# %% [markdown]
# This is the resume that "looks well, and later the loss is NaN". Here it takes a step or two. In the memory of a weight that is seldom
# used, a rare token's embedding for instance, it can wait for hundreds, and by then rotation has deleted the older files.
#
# ### A file that is a program
#
# A `.pt` file is a pickle in a zip archive, and a pickle can call functions. This object asks, when it is unpickled, for a file to be
# created. It could ask for anything.

# %%
marker = folder / "i-was-here"


class Surprise:
    def __reduce__(self):
        return io.open, (str(marker), "w")


gift = folder / "gift.pt"
torch.save({"weight": torch.ones(3), "note": Surprise()}, gift)
with zipfile.ZipFile(gift) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
    program = pickletools.genops(archive.read(name))  # reads the program, does not run it
    called = [argument for code, argument, _ in program if code.name == "GLOBAL"]
print("functions that this file wants called:", called)
try:
    torch.load(gift, weights_only=True)
except pickle.UnpicklingError as error:
    print(f"{type(error).__name__}: {lab.said(error).split('. ')[0]}")
claim("io open" in called, "the call is in the file, beside those that rebuild tensors")
claim(not marker.exists(), "weights_only=True refuses it, and nothing was executed")

# %% [markdown]
# `weights_only=True` allows what rebuilds tensors and plain containers, and no other function. It is the default from torch 2.6 on;
# write it anyway, since your code may meet an older one.
#
# ## 3. By hand
#
# ### A save that is whole or not there
#
# Write beside the target, and let the file system switch names: a rename puts the new file in the old one's place at once.


# %%
def save_by_hand(payload, path):
    temporary = path.with_name(f".{path.name}.tmp")  # the same folder: the same file system
    with open(temporary, "wb") as file:
        torch.save(payload, file)
        file.flush()  # from Python to the system
        os.fsync(file.fileno())  # from the system to the disk
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name, too, has to reach the disk
    os.close(folder)


# %% [markdown]
# A kill is survived by the rename alone. A power failure is not: until an fsync, what was written may be on the disk, or not, or in part,
# and a rename may reach it before the data does. Predict: of the states that a crash can leave behind after each call, in how many does the target load?

# %%
my_guess = ""

# %%
for name in lab.SAVERS:
    print(f"{name}:")
    for call, states, loads in lab.survival(name):
        print(f"  {call:<12} {loads} of {states} states load")
bad = {n: sum(s - k for _, s, k in lab.survival(n)) for n in lab.SAVERS}
claim(bad["naive"] > 0, "naive: from its first call on, the old file may be gone")
claim(bad["rename, no fsync"] > 0, "rename alone: the new name may stand on half a file")
claim(bad["atomic_save"] == 0, "with both fsyncs: the old file or the new one, always")

# %%
show(
    lab.crash_figure(),
    "crash_points",
    alt="Three rows of boxes, one per file-system call of a save. Naive: after opening the target, "
    "one of two states loads, after the writes one of four and two of four. Rename without "
    "fsync: all states load up to the rename, then two of four. atomic_save: in every box "
    "all states load.",
)

# %% [markdown]
# The model behind it: data is certain up to its file's last fsync; what came later is kept, lost, or cut in the middle; a new name is certain
# after an fsync of its folder. The package's tests do the same with the recorded calls of real saves, over 300 states in all.
#
# ### All five buckets


# %%
def pack(run):
    return {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "counters": run.counters,  # step, epoch, batch in the epoch
        "rng": {"now": capture_rng_state(), "epoch_start": run.epoch_start},
    }


def unpack(run, saved):
    for part in ("model", "optimizer", "scheduler"):
        getattr(run, part).load_state_dict(saved[part])
    run.counters.update(saved["counters"])
    run.epoch_start = saved["rng"]["epoch_start"]
    restore_rng_state(saved["rng"]["now"])  # last: nothing may draw after it


# %% [markdown]
# Why two random states? To pass over the batches that are behind, the loader has to shuffle as it did when this epoch began; the next
# dropout mask has to be the one that would have come now.

# %%
by_hand = folder / "by_hand.pt"


def to_file(run):
    save_by_hand(pack(run), by_hand)
    return by_hand


def from_file(run, path):
    unpack(run, torch.load(path, weights_only=True))


hand_run = lab.resumed(args.seed, TOTAL, AT, pack=to_file, unpack=from_file)
gap = lab.largest_difference(whole_run.losses, hand_run.losses)
print("largest difference of a loss:", gap)
claim(gap == 0.0, "resumed by hand: the same run, bit for bit")
found = probe_resume(
    lambda run, path: save_by_hand(pack(run), path), from_file, lab.next_step, lab.Run
)
claim(not found, "and the probe of section 2 finds nothing")

# %% [markdown]
# ## 4. The package
#
# `save_checkpoint` packs the same five buckets (and scaler, config and schema), and writes them with `atomic_save`. `load_checkpoint` checks
# everything first, and restores the random states last. The loader's place is what `loader=` has in its `state_dict()`.

# %%
packaged = folder / "packaged.pt"


def save_packaged(run):
    state = TrainState(updates=run.counters["step"], **run.counters)
    save_checkpoint(run.model, run.optimizer, run.scheduler, state, packaged, loader=run)
    return packaged


def load_packaged(run, path):
    state = load_checkpoint(path, run.model, run.optimizer, run.scheduler, loader=run)
    run.counters.update({name: getattr(state, name) for name in run.counters})


package_run = lab.resumed(args.seed, TOTAL, AT, pack=save_packaged, unpack=load_packaged)
claim(
    package_run.losses == hand_run.losses,
    "the package resumes to the same losses as by hand",
)

small = {"step": 1, "weight": torch.ones(3)}
save_by_hand(small, by_hand)
digest = atomic_save(small, folder / "small.pt")
archive, trailer, told = (
    (folder / "small.pt").read_bytes().rpartition(b"\nsafetrain-sha256:")
)
print("behind the archive:", trailer.decode().strip(), "and", len(told.strip()), "digits")
claim(
    archive == by_hand.read_bytes(), "atomic_save writes the very bytes of the hand version"
)
claim(
    told.decode().strip() == digest == verify(folder / "small.pt"),
    "and their sha256 behind",
)

# %% [markdown]
# Now to the second process of section 2. It was killed half-way through the same bytes, but it had called `atomic_save`.

# %%
kept, status = kills["atomic"]
print(
    f"exit status {status}; {inspect(kept)[0].partition(',')[0]},",
    "whole:",
    inspect(kept)[1],
)
left = [path.name for path in kept.parent.iterdir() if path.suffix == ".tmp"]
print("temporary files left behind:", len(left))
step = torch.load(kept, weights_only=True)["state"]["step"]
claim((status, step) == (-9, 1), "killed in mid-save: the checkpoint of step 1 is whole")
claim(
    len(left) == 1,
    "what was half written has another name (the next rolling save removes it)",
)

# %% [markdown]
# ### Killed, and resumed in another process
#
# `SafeTrainer` with a `checkpoint_dir` does all this by itself. A first process trains, with a checkpoint every 5 updates, and is killed by
# SIGKILL after as many steps as above. A second process calls `resume()` and goes on. A third run, here, is left alone. Predict
# the difference of their losses.

# %%
my_guess = ""

# %%
first = lab.in_a_process(args.seed, TOTAL, folder / "run", kill_after=AT)
second = lab.in_a_process(args.seed, TOTAL, folder / "run")
alone = []
lab.trainer(args.seed, TOTAL, None, note=alone.append).fit()

print(f"first process, exit status {first.status}:")
for row in first.rows[-2:]:
    print(" ", row["row"])
print(f"second process, exit status {second.status}:")
for row in second.rows[:2]:
    print(" ", row["row"])
both = {row["step"]: row for row in first.rows + second.rows}
gaps = [
    abs(row["loss"] - right["loss"])
    for rows in (first.rows, second.rows)
    for row in rows
    for right in alone
    if row["step"] == right["step"]
]
print("steps done twice:", len(first.rows) + len(second.rows) - TOTAL)
print("loss difference to the uninterrupted run:", max(gaps))
claim((first.status, second.status) == (-9, 0), "one was killed, one ended by itself")
claim(sorted(both) == list(range(1, TOTAL + 1)), "together they took every step")
claim(max(gaps) == 0.0, "two processes, one run: the losses are equal bit for bit")

# %% [markdown]
# On a GPU, sums may be taken in another order each time; there, expect less than 1e-4, and look into anything above. And the samples of the
# epoch in which the kill fell?

# %%
counts = lab.sample_counts([both[step + 1]["seen"] for step in range(TOTAL)][epoch])
if mid_epoch:
    before = AT - epoch.start
    print(
        f"epoch of {lab.PER_EPOCH} batches: {before} before the kill, {lab.PER_EPOCH - before} after"
    )
    print(
        "samples seen once:",
        counts.count(1),
        "twice:",
        counts.count(2),
        "never:",
        counts.count(0),
    )
    claim(set(counts) == {1}, "each sample of the interrupted epoch was seen exactly once")
else:
    not_shown("an --interrupt-at in mid-epoch, and --total-steps to that epoch's end")

# %% [markdown]
# ### Files that are not what they say
#
# `verify` compares a file with the sha256 at its end, without unpickling anything. The next cell turns over one bit in each of several hundred
# places, one at a time, and cuts the file at several lengths.

# %%
sound, spoilt = packaged.read_bytes(), folder / "spoilt.pt"


def load(path):
    torch.load(path, weights_only=True)


places = range(0, len(sound), len(sound) // 300)
looks = {"torch.load": load, "verify": verify}
noticed = {
    name: sum(lab.refused(spoilt, lab.flipped(sound, at), look) for at in places)
    / len(places)
    for name, look in looks.items()
}
print(f"one bit: torch.load notices {about(100 * noticed['torch.load'])}%,", end=" ")
print(f"verify {100 * noticed['verify']:.0f}%")
cuts = [len(sound) * tenth // 10 for tenth in range(10)]
claim(noticed["verify"] == 1, "verify finds every flipped bit")
claim(noticed["torch.load"] < 0.5, "torch.load passes over most of them")
claim(
    all(lab.refused(spoilt, sound[:cut], verify) for cut in cuts),
    "verify finds every truncated file",
)
for path in (altered, torn, gift):
    try:
        load_checkpoint(path, late.model, late.optimizer, late.scheduler)
    except CheckpointError as error:
        say(lab.said(error).partition(": its sha256 is")[0].partition(" (")[0])

# %% [markdown]
# And files of another time. The payload names its schema: one that is not ours is refused, an older one is brought up to date by a table of
# functions, with a warning where something cannot be made up for.

# %%
for schema in ("weights-2", "ckpt.v9"):
    atomic_save({"schema": schema, "model": {}}, folder / "other.pt")
    try:
        load_checkpoint(folder / "other.pt", late.model, late.optimizer, late.scheduler)
    except CheckpointError as error:
        say(lab.said(error))
        claim("unknown schema" in str(error), f"{schema} is refused by name")
doctor(verify_checkpoints(folder / "other.pt").findings, "unknown_schema")

# %%
old = folder / "old.pt"
lab.save_old_layout(early, old)
fresh = lab.Run(args.seed, TOTAL)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    migrated = load_checkpoint(old, fresh.model, fresh.optimizer, fresh.scheduler)
say(f"warning: {caught[0].message}")
same = all(
    torch.equal(a, b)
    for a, b in zip(fresh.model.parameters(), early.model.parameters(), strict=True)
)
claim(same and migrated.step == AT, "ckpt.v0 is migrated: weights and counters are there")

# %% [markdown]
# ### Which files stay
#
# Predict: of six saves with these validation losses, which stay with `keep_last=2, keep_best=1`?

# %%
my_guess = ""

# %%
losses = [float("nan"), 0.5, 0.3, 0.4, 0.6, float("nan")]
rolling = Checkpoints(tempfile.mkdtemp(dir=folder), keep_last=2, keep_best=1)
for step, val_loss in enumerate(losses, start=1):
    rolling.save(packed := pack(early), step, val_loss=val_loss)
    print(f"val_loss {val_loss}: {' '.join(str(int(p.stem[5:])) for p in rolling.all())}")
print("best:", rolling.best().name, " latest:", rolling.latest().name)
claim(
    rolling.best().name == "step_00000003.pt",
    "NaN is never the best, not even as the first",
)
claim(
    [int(p.stem[5:]) for p in rolling.all()] == [3, 5, 6],
    "the two newest and the best stay",
)

# %% [markdown]
# Now the newest one is torn. `latest()` passes over it, and says so in the log.

# %%
newest = rolling.latest()
newest.write_bytes(newest.read_bytes()[:5000])
with lab.logged() as lines:
    found = rolling.latest()
print("latest:", found.name)
say("log: " + lines[0])
claim(found.name == "step_00000005.pt", "the newest that verifies is taken")

# %% [markdown]
# ## 5. What it costs
#
# ### Disk
#
# What is in such a file, and what does the disk say when none is deleted?

# %%
sizes = {name: lab.saved_bytes(part) for name, part in packed.items()}
table("bucket_bytes", ["bucket", "kB"], [[b, about(n / 1e3)] for b, n in sizes.items()])
one_state = lab.saved_bytes(capture_rng_state())
claim(
    one_state < 50_000, "the random states are less than 50 KB, whatever the model's size"
)
numbers = sum(p.numel() for p in early.model.parameters())
moments = sum(
    t.numel() for s in early.optimizer.state.values() for k, t in s.items() if k != "step"
)
claim(
    moments == 2 * numbers,
    "AdamW keeps two numbers per weight: a checkpoint is 3 x the model",
)

# %%
growth = {
    keep: lab.bytes_while_saving(folder / f"keep{keep}", packed, 24, keep)
    for keep in (10_000, 5)
}
table(
    "rotation",
    ["saves", "kB, none deleted", "kB, keep_last=5"],
    [[n, *(about(growth[k][n - 1] / 1e3, 3) for k in growth)] for n in (1, 5, 6, 12, 24)],
)
everything, rotated = (sizes[-1] / sizes[0] for sizes in growth.values())
print(f"after 24 saves: {everything:.0f} files' worth, with rotation {rotated:.0f}")
claim(
    round(everything) == 24 and round(rotated) == 5,
    "without rotation the disk fills; with it, not",
)
three_more = 7 * growth[10_000][0] // 2  # as if the disk had room for these
found = verify_checkpoints(folder / "keep10000", free_bytes=three_more).findings
doctor(found, "no_rotation")

# %% [markdown]
# A model of 7 billion weights has 84 GB in such a file (float32, AdamW). A disk of 2 TB is full after 23 of them, in the middle of
# the run. During a save there is one more than `keep_last`, since the old one goes only when the new one is whole: leave room for it.
#
# ### Time
#
# Predict: what does an fsync cost on top of `torch.save`?

# %%
my_guess = ""

# %%
large = {"weight": torch.randn(2_000_000)}  # 8 MB
seconds = lab.save_seconds(
    folder,
    {"torch.save": torch.save, "by hand": save_by_hand, "atomic_save": atomic_save},
    large,
)
table(
    "save_time", ["how", "ms for 8 MB"], [[n, about(1e3 * s)] for n, s in seconds.items()]
)
print(
    f"the call with async_save=True: {about(1e3 * lab.async_seconds(folder / 'async', large))} ms"
)

# %% [markdown]
# `torch.save` alone returns when the data is in the memory of the system, and the disk gets it some time after: that is not faster, it is
# later. The sha256 is made beside the write. Where the wait hurts, `Checkpoints(..., async_save=True)` copies the state, returns, and writes
# while training goes on.
#
# ## 6. Turn the knob
#
# How often, then? Each save costs time, and each failure costs, on average, half an interval of work. J. W. Young's rule: save
# every sqrt(2 x save x mean time between failures) seconds. Predict: a save takes 30 s, a failure comes every 6 hours. How often?

# %%
my_guess = ""

# %%
save_s, mtbf_s = 30, 6 * 3600
best = lab.youngs_interval(save_s, mtbf_s)
print(f"Young: every {best / 60:.0f} minutes")
tries = [best / 10, best / 3, best, 3 * best, 10 * best]
table(
    "how_often",
    ["save every", "lost, by the rule", "lost, by dice"],
    [
        [
            f"{t / 60:.0f} min",
            f"{100 * lab.share_lost(t, save_s, mtbf_s):.1f}%",
            f"{100 * lab.share_lost_simulated(t, save_s, mtbf_s):.1f}%",
        ]
        for t in tries
    ],
)
dice = [lab.share_lost_simulated(t, save_s, mtbf_s) for t in tries]
rule = lab.share_lost(best, save_s, mtbf_s)
claim(
    min(dice) == dice[2],
    "of these, Young's interval loses least, by 20,000 simulated failures too",
)
claim(abs(dice[2] / rule - 1) < 0.15, "there the rule is within 15% of the simulation")
claim(
    dice[0] > 3 * dice[2] < dice[4],
    "ten times too often or too rarely loses over 3 times as much",
)

# %%
show(
    lab.interval_figure(save_s, mtbf_s),
    "how_often",
    alt="Share of the time lost over the time between two saves, on a log scale. What saving costs "
    "falls, what is done twice grows, and their sum has a flat minimum where the two cross, "
    "at 19 minutes, marked as Young's interval.",
)

# %% [markdown]
# The minimum is flat: a factor of 2 either way costs a quarter more, so round to what is easy to remember. With a thousand times as many
# machines failures come a thousand times as often, and saves have to be 32 times as frequent.

# %% tags=["nbval-ignore-output"]
_ = knob(
    lab.interval_picture,
    save_s=slider(
        "a save takes", [("1 s", 1), ("5 s", 5), ("30 s", 30), ("2 min", 120)], 30
    ),
    mtbf_s=slider(
        "a failure every",
        [("hour", 3600), ("6 h", 21600), ("day", 86400), ("week", 604800)],
        21600,
    ),
    size_gb=slider("one file", [("0.5 GB", 0.5), ("10 GB", 10), ("84 GB", 84)], 84),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. Which files go
#
# Write `to_delete(losses, keep_last, keep_best)`. `losses` has a validation loss for each file name, or None where none was measured. The
# newest `keep_last` stay, and so do the `keep_best` of lowest loss.

# %% tags=["exercise"]
from support.checks_03 import check_loop, check_random_states, check_to_delete


def to_delete(losses, keep_last, keep_best):
    return sorted(losses)[:-keep_last]  # keeps the last ones, does it? mend it


say(check_to_delete(to_delete))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How does Python sort `"step_9.pt"` and `"step_10.pt"`? And what does `min` give for a list with a NaN in it?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `int(name[5:-3])` is the number. Leave out None and what is not `math.isfinite` before you sort by loss. What goes is everything
# that is in neither group.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# import math
#
#
# def to_delete(losses, keep_last, keep_best):
#     by_number = sorted(losses, key=lambda name: int(name[5:-3]))
#     measured = [n for n in by_number if losses[n] is not None and math.isfinite(losses[n])]
#     best = sorted(measured, key=lambda name: losses[name])[:keep_best]
#     return [name for name in by_number[:-keep_last] if name not in best]
# ```
#
# </details>

# %% [markdown]
# ### B. Random states
#
# Write `capture()` and `restore(state)` for Python's, NumPy's and torch's generators on the CPU. The state must survive a file that is
# read with `weights_only=True`.


# %% tags=["exercise"]
def capture():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def restore(state):  # two faults in these two functions: mend them
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


say(check_random_states(capture, restore))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `random.getstate()` and `np.random.get_state()` are the other two. What types are inside them, and which of these is not plain?
#
# </details>
# <details><summary>Hint 2</summary>
#
# NumPy's state has an array in second place: `.tolist()` makes it plain. Give `random.setstate` a tuple whose second part is a tuple.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def capture():
#     name, keys, *rest = np.random.get_state()
#     return {
#         "python": random.getstate(),
#         "numpy": [name, keys.tolist(), *rest],
#         "torch": torch.get_rng_state(),
#     }
#
#
# def restore(state):
#     version, numbers, gauss = state["python"]
#     random.setstate((version, tuple(numbers), gauss))
#     name, keys, *rest = state["numpy"]
#     np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
#     torch.set_rng_state(state["torch"])
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a loop
#
# "It resumes, but the curve after each preemption is a bit off, and last week a job could not start at all." The loop is called again with
# a new `run` (the same as in section 2) after each preemption. It saves every 5 steps. `run.train(1)` takes a step; leave that line as it is.


# %% tags=["exercise"]
def loop(run, path, total_steps):
    if path.exists():
        saved = torch.load(path, weights_only=True)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.counters["step"] = saved["step"]
        restore_rng_state(saved["rng"])
    while run.counters["step"] < total_steps:
        run.train(1)
        if run.counters["step"] % 5 == 0:
            saved = {
                "model": run.model.state_dict(),
                "optimizer": run.optimizer.state_dict(),
                "rng": capture_rng_state(),
                "step": run.counters["step"],
            }
            torch.save(saved, path)


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the five buckets and ask of each: is it in `saved`, and is all of it there? Then look at the line that writes.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The scheduler is missing, and so is the data position: `run.counters` whole, and `run.epoch_start`. `pack` and `unpack` from section 3
# have both; `atomic_save` takes the place of `torch.save`.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(run, path, total_steps):
#     if path.exists():
#         saved = torch.load(path, weights_only=True)
#         for part in ("model", "optimizer", "scheduler"):
#             getattr(run, part).load_state_dict(saved[part])
#         run.counters.update(saved["counters"])
#         run.epoch_start = saved["epoch_start"]
#         restore_rng_state(saved["rng"])
#     while run.counters["step"] < total_steps:
#         run.train(1)
#         if run.counters["step"] % 5 == 0:
#             saved = {
#                 "model": run.model.state_dict(),
#                 "optimizer": run.optimizer.state_dict(),
#                 "scheduler": run.scheduler.state_dict(),
#                 "counters": run.counters,
#                 "epoch_start": run.epoch_start,
#                 "rng": capture_rng_state(),
#             }
#             atomic_save(saved, path)
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. A resumed run has the same loss in its first step as the run before, and another one in its second. Which bucket do you suspect?**
#
# <details><summary>A. The random states</summary>
#
# No. They choose the dropout mask and the jitter of the first batch already, so the first loss would differ.
#
# </details>
# <details><summary>B. The optimizer's state</summary>
#
# Right. The first loss needs only weights, data and random numbers; what the optimizer remembers shows in the update after it.
#
# </details>
# <details><summary>C. The weights of the model</summary>
#
# No. Other weights give another loss at once, in the very first step after the resume.
#
# </details>

# %% [markdown]
# **2. A save writes to `last.pt.tmp` and then calls `os.replace`, without any fsync. What can go wrong?**
#
# <details><summary>A. A SIGKILL between the two would leave half a file at last.pt</summary>
#
# No. Up to the rename only the temporary is touched, and what was written is safe in the system's memory after a kill.
#
# </details>
# <details><summary>B. Nothing can, since a rename of a file is always atomic</summary>
#
# No. It is atomic for whoever looks at the running system. What a power failure leaves on the disk is another matter.
#
# </details>
# <details><summary>C. A power failure may keep the new name and lose its data</summary>
#
# Right. The rename may reach the disk before the data does, and then the new name stands on a file that is empty or cut.
#
# </details>

# %% [markdown]
# **3. Two of 8 batches of a shuffled epoch are behind when the run stops. What does the resume need, to see each sample once?**
#
# <details><summary>A. The position, and the random state from the epoch's start</summary>
#
# Right. The same shuffle comes again, two batches are passed over, and then the present random state is put back.
#
# </details>
# <details><summary>B. The position, and the random state at the time of the stop</summary>
#
# No. A shuffle from that state is another one. Two of its batches are passed over, but not the two that were seen.
#
# </details>
# <details><summary>C. The position alone, since a seed gives the same order</summary>
#
# No. A seed set at the start gives the first epoch's order again, and the run may be in its fifth.
#
# </details>

# %% [markdown]
# **4. One bit of a checkpoint has flipped. Which of these is sure to notice?**
#
# <details><summary>A. torch.load, by the CRC-32 of each entry in the zip archive</summary>
#
# No. The sums are in the file, but torch does not compare them: most of the flips in section 4 were loaded without a word.
#
# </details>
# <details><summary>B. weights_only=True, since altered weights are not allowed</summary>
#
# No. It restricts what a file may call while it loads. What numbers are in the tensors does not concern it.
#
# </details>
# <details><summary>C. The first loss after the resume, which would be another</summary>
#
# No. In section 2 the bit was in the optimizer's memory, and the first loss was the right one to the last digit.
#
# </details>
# <details><summary>D. A sha256 over the whole file, compared before it is loaded</summary>
#
# Right. It covers data, headers and padding, and one bit changes it beyond recognition.
#
# </details>

# %% [markdown]
# **5. Saves take 30 s and you save every 20 minutes. The jobs move to machines that fail 4 times as often. What now?**
#
# <details><summary>A. Save every 5 minutes</summary>
#
# No. That loses as much as not changing anything: by the rule, the interval follows the square root.
#
# </details>
# <details><summary>B. Save every 10 minutes</summary>
#
# Right. The interval goes with the root of the time between failures: a quarter of that time, half the interval.
#
# </details>
# <details><summary>C. Save every 20 minutes</summary>
#
# No. That loses a quarter more time than it has to, most of it to work that is done twice.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import SafeTrainer, TrainConfig
#
# config = TrainConfig(
#     max_steps=10_000, checkpoint_every_seconds=1200, max_rolling_checkpoints=5, num_best_checkpoints=1
# )
# trainer = SafeTrainer(model, config, train_loader, val_loader, checkpoint_dir="runs/mine")
# print("resumed from", trainer.resume())  # None: there was nothing, it starts fresh
# trainer.fit()  # run the same script again after every kill
# ```
#
# In a loop of your own: `save_checkpoint(model, optimizer, scheduler, state, path, loader=loader)` and `load_checkpoint(...)`.
# In a shell: `safetrain verify runs/mine`.
#
# **The rule.** Five buckets: model, optimizer, scheduler, counters with the data position, random states, and these last. Write beside, fsync, rename,
# fsync the folder. A sum over the file, compared before loading. Keep the last few and the best; NaN is never the best. On a loss that
# jumps above twice its usual value, go back to the previous one (`loss_jump_factor`).
#
# **The knobs,** by their names in a `TrainConfig`: `checkpoint_every_n_steps`, `checkpoint_every_seconds`, `max_rolling_checkpoints` (5),
# `num_best_checkpoints`, `async_save`.
#
# **Where it is.** `safetrain_core/checkpoint/atomic.py` (writing, `verify`), `rng.py`, `single.py` (the payload, migrations), `rolling.py`
# (`Checkpoints`), `safetrain_core/train/cursor.py` (the data position).
#
# **Sources.** J. W. Young 1974, [A first order approximation to the optimum checkpoint interval](https://doi.org/10.1145/361147.361115);
# Pillai et al. 2014, [All file systems are not created equal](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/pillai);
# PyTorch, [torch.load](https://docs.pytorch.org/docs/stable/generated/torch.load.html) and its `weights_only`.

# %%
scratch.cleanup()
finish()
