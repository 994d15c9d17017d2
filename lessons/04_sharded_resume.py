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
# # 04 · Sharded checkpoints
#
# **Which of many files can you trust after a crash?**
#
# You will be able to
#
# - save a run from all its ranks, a file each, so that a kill at any moment leaves a checkpoint that loads;
# - read a manifest, and say which of its lines finds which fault;
# - recognise the six ways in which loading fails, one of them a hundred steps late;
# - overwrite a checkpoint, rotate old ones, and move a run to another number of ranks, without a moment in which nothing loads;
# - tell how large each file is and how long a save takes, on 1 rank and on 64.
#
# 30 minutes; the computing takes about 20 seconds on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/04_sharded_resume.py --ranks 4`.
#
# <!-- nav -->
#
# Previous: [Checkpoint and resume](03_checkpoint_resume.ipynb) · Next: [Gradient checkpointing](05_gradient_checkpointing.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# Of the symptoms in [lesson 00](00_start_here.ipynb), this settles
#
# - **9.** `world_size mismatch`
# - **10.** `sha256 mismatch on rank`
# - **11.** `shard file missing`
# - **12.** `unknown schema`
# - **13.** A resume looks well, and a hundred steps later the loss is NaN
# - **14.** The disk is full in the middle of the run
#
# <!-- /settles -->
#
# [Lesson 03](03_checkpoint_resume.ipynb) has the same for a checkpoint that is one file; here it is about many that belong together.

# %%
from support import (
    about,
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
    "04_sharded_resume",
    ranks=whole(4, at_least=2, at_most=8, help="ranks, and so shards"),
    num_steps=whole(
        20,
        at_least=11,
        at_most=1000,
        help="steps of the run; it is saved at step 10",
    ),
)

# %%
import inspect
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import torch
from safetrain_core import (
    CHECKPOINT_STEP,
    CheckpointError,
    diagnose,
    launch,
    load_shard,
    load_sharded,
    reshard,
    rotate_checkpoints,
    save_sharded,
    verify_checkpoints,
)
from safetrain_core.checkpoint.folders import all_checkpoints

from support import sharded_resume as lab
from support import sharded_worker as worker
from support.knobs import slider

RANKS, AT, TOTAL = args.ranks, CHECKPOINT_STEP, args.num_steps
scratch = tempfile.TemporaryDirectory(prefix="lesson04-")
folder = Path(scratch.name)

# %% [markdown]
# ## 1. Predict
#
# Four ranks have written four files and a manifest that lists them. One file is a kilobyte short: the job was killed just before its end. Your loader
# reads the manifest, then each file into memory that it has set aside. What will you see, and when? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "an error when it loads"

# %% [markdown]
# ## 2. Break it
#
# ### A run in four pieces
#
# Large models do not fit one device, so each rank keeps a piece: of the FP32 weights, and of the two moments that AdamW has for each of
# them. (That is stage 1 of ZeRO. All weights are laid end to end, and the long row is cut into equal pieces.) Our run is a tiny GPT on text;
# one process plays all the ranks for now, each with an AdamW of its own. Later in this lesson each rank is a process.

# %%
run = lab.ShardedRun(args.seed, RANKS)
run.train(AT)
for row in run.rows[:2] + run.rows[-1:]:
    print(row)
states = run.states()
numbers = sum(state["param_shard"].numel() for state in states)
print(f"{numbers} weights on {RANKS} ranks:", [s["param_shard"].numel() for s in states])
claim(len(states) == RANKS, "each rank has a piece of the weights, and no more")

# %% [markdown]
# ### Killed a kilobyte before the end
#
# Here is how this run was saved last year, and how it is loaded. Both look harmless.

# %%
print(inspect.getsource(worker.save_raw))


def load_raw(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    loaded = []
    for rank, numel in enumerate(manifest["numel"]):
        memory = torch.empty(3 * numel)
        with open(folder / f"rank{rank}.raw", "rb") as file:
            file.readinto(memory.numpy())  # tells how many bytes it got; nobody asks
        loaded.append(memory)
    return lab.from_numbers(loaded, manifest["step"])


# %% [markdown]
# The next cell starts a process that saves step 10 like that, and gets a SIGKILL a kilobyte before the end of the last shard. The manifest is there already.
# Then everything is made anew and loaded. What the file lacks stays in memory as it was: `torch.empty` promises nothing. So that you see the same as everybody
# else, fresh memory is filled with NaN here, as torch does it in its deterministic mode. Elsewhere it may hold zeros, or numbers of somebody else's.

# %%
good = folder / "good" / f"step_{AT}"
save_sharded(states, good, AT)
print(lab.killed(worker.save_raw_and_die, str(good), str(folder / "raw")))
short = [(folder / "raw" / f"rank{r}.raw").stat().st_size for r in range(RANKS)]
print(
    "bytes missing in each shard:",
    [12 * s["param_shard"].numel() - n for s, n in zip(states, short, strict=True)],
)

with lab.visible_memory():
    partial = load_raw(folder / "raw")
late = lab.ShardedRun(args.seed, RANKS)
late.load(partial)
rare = lab.first_rare_step(args.seed, AT, at_most=400)
late.train((rare or AT + 400) - AT)

alone = lab.uninterrupted(args.seed, RANKS, AT + len(late.losses))
same = lab.same_for(late.losses, alone.losses[AT:])
print(
    f"steps after the resume with the very loss of the uninterrupted run: {about(same, 3)}"
)
if rare is not None:
    print(f"loss in the step after those: {late.losses[same]}")
    claim(
        same == rare - AT - 1 and late.losses[same] != late.losses[same],
        "the same losses to the last bit, and then NaN",
    )
else:
    not_shown("a batch with one of the rarest characters within 400 steps")

# %%
if rare is not None:
    show(
        lab.nan_figure(alone.losses, late.losses, AT),
        "partial_shard",
        alt="Loss over steps. A grey line is the uninterrupted run, falling. The run resumed at step 10 "
        "from the partial shard lies exactly on it, step after step, until a vertical line "
        "marks the step at which its loss is NaN.",
    )

# %% [markdown]
# And the doctor? From the log it can tell no more than you can:

# %%
if rare is not None:
    late.train(2)
    claim(diagnose(late.rows)[0].rule == "nan_stays", "the doctor, from the log: nan_stays")

# %% [markdown]
# The kilobyte was the end of AdamW's second moments, and there the last rows of the token embedding are: the rarest characters. Their weights became NaN with the
# first update. No loss shows it until one of them is in a batch. In a real vocabulary of 100,000 tokens that takes longer, and by then rotation has deleted
# what was whole. The guarded step of lesson 01 would refuse that batch, and every later one with such a token; heal the weights it cannot.
#
# ### Killed between two renames
#
# You know the cure from lesson 03: write to `.tmp`, fsync, rename. So this save does that for each shard, then for the manifest, which comes last. It even has sums in it.
# The folder holds step 10 already, the new files have the old names, and the kill falls between two of the renames. Predict: which step loads?

# %%
my_guess = ""

# %%
newer, in_place = folder / "good" / f"step_{TOTAL}", folder / "in_place"
ended = lab.uninterrupted(args.seed, RANKS, TOTAL)
save_sharded(ended.states(), newer, TOTAL)
lab.publish_in_place(load_sharded(good, RANKS)[1], in_place, AT)

kills = {"in place": lab.after_each_rename("in place", in_place, newer, folder, RANKS)}
for renames, left in enumerate(kills["in place"]):
    loads = "nothing" if left.step is None else f"step {left.step}"
    print(f"killed after {renames} renames: files of steps {left.steps}, {loads} loads")
between = kills["in place"][1 : RANKS + 1]
say(lab.said(between[0].reason))
claim(
    all(left.step is None for left in between),
    "between the renames nothing loads: the old one is gone, the new one not there",
)
claim(
    all(left.mixed for left in between),
    "a loader without sums would take it, and mix two steps",
)
doctor(verify_checkpoints(folder / "in_place_1").findings, "sha256_mismatch")

# %% [markdown]
# Each rename is atomic; all of them together are not. The sums save you from training on a mixture, but not from having lost both checkpoints.
#
# ## 3. By hand
#
# Two ideas mend it. **New files get new names**, so that nothing of the old checkpoint is touched. **The manifest is the switch:** it names its files, it is
# replaced by one rename, and only then what it no longer names is removed.


# %%
def write_whole(write, path):
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    handle = os.open(path.parent, os.O_RDONLY)
    os.fsync(handle)  # the new name, too, has to reach the disk
    os.close(handle)


def save_by_hand(states, folder, step):
    folder.mkdir(parents=True, exist_ok=True)
    again = (folder / "manifest.json").exists()
    nonce = f".{secrets.token_hex(6)}" if again else ""
    shards, offset = [], 0
    for rank, state in enumerate(states):
        path, numel = folder / f"rank{rank}{nonce}.bin", state["param_shard"].numel()
        payload = {"schema": "ckpt.shards.v1", "rank": rank, "step": step, "state": state}
        write_whole(lambda file: torch.save(payload, file), path)
        shards.append(
            {
                "rank": rank,
                "path": path.name,
                "sha256": lab.sum_of_file(path),
                "size_bytes": path.stat().st_size,
                "param_shard_offset": offset,
                "param_shard_numel": numel,
            }
        )
        offset += numel
    manifest = {
        "schema": "ckpt.shards.v1",
        "world_size": len(states),
        "step": step,
        "wall_clock_seconds": 0.0,
        "shards": shards,
    }
    text = json.dumps(manifest).encode()
    write_whole(lambda file: file.write(text), folder / "manifest.json")  # the switch
    for path in folder.glob("rank*.bin"):
        if path.name not in [shard["path"] for shard in shards]:
            path.unlink()


def load_by_hand(folder, world_size):
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["world_size"] != world_size:
        raise ValueError("world_size mismatch")
    paths = [folder / shard["path"] for shard in manifest["shards"]]
    if not all(path.exists() for path in paths):  # all are there, before one is read
        raise ValueError("shard file missing")
    for shard, path in zip(manifest["shards"], paths, strict=True):
        if lab.sum_of_file(path) != shard["sha256"]:
            raise ValueError(f"sha256 mismatch on rank {shard['rank']}")
    return [torch.load(path, weights_only=True)["state"] for path in paths]


# %% [markdown]
# One folder, saved into twice; then the same shard cut short by the same kilobyte.

# %%
by_hand = folder / "by_hand"
save_by_hand(states, by_hand, AT)
first_names = sorted(os.listdir(by_hand))
hand_sums = [lab.sum_of_file(by_hand / f"rank{rank}.bin") for rank in range(RANKS)]
loaded = load_by_hand(by_hand, RANKS)
hand_run = lab.resumed(loaded, args.seed, TOTAL)
save_by_hand(hand_run.states(), by_hand, TOTAL)
second_names = sorted(os.listdir(by_hand))
print("first: ", *first_names)
print("second:", *(lab.said(name) for name in second_names))
claim(
    set(first_names) & set(second_names) == {"manifest.json"},
    "no file of the old checkpoint was written to",
)
claim(load_by_hand(by_hand, RANKS)[0]["step"] == TOTAL, "and the new one loads")
claim(
    hand_run.losses == ended.losses[AT:],
    f"resumed from the shards of step {AT}: the same losses, bit for bit",
)

lab.truncate(next(by_hand.glob(f"rank{RANKS - 1}.*bin")), lab.CUT)
try:
    load_by_hand(by_hand, RANKS)
except ValueError as error:
    print(error)
    claim(
        str(error) == f"sha256 mismatch on rank {RANKS - 1}",
        "the partial shard is found before it is unpickled",
    )

# %% [markdown]
# ## 4. The package
#
# `save_sharded` writes and hashes the shards beside one another, and publishes the manifest last. `load_sharded` checks the manifest as if a stranger had written it, then that
# every file is there, then each sum, and returns the states. First, four shards and a manifest:

# %%
manifest, reloaded = load_sharded(good, RANKS)
print(f"{manifest.schema}: step {manifest.step} of {manifest.world_size} ranks")
table(
    "manifest",
    ["rank", "path", "bytes", "first element", "elements", "sha256"],
    [
        [
            shard.rank,
            shard.path,
            about(shard.size_bytes, 6),
            shard.param_shard_offset,
            shard.param_shard_numel,
            shard.sha256[:12] + "...",
        ]
        for shard in manifest.shards
    ],
)
on_disk = [lab.sum_of_file(good / shard.path) for shard in manifest.shards]
claim(
    on_disk == [s.sha256 for s in manifest.shards],
    "each file has the sha256 that the manifest tells",
)
for rank, (saved, back) in enumerate(zip(states, reloaded, strict=True)):
    same = lab.same_bytes(saved, back) and lab.same_bytes(
        load_shard(good, rank, RANKS)[1], back
    )
    claim(same, f"rank {rank}: {len(lab.tensors_of(back))} tensors come back byte for byte")
claim(on_disk == hand_sums, "the very bytes that save_by_hand wrote")
claim(not verify_checkpoints(good, RANKS).findings, "and the doctor finds nothing in it")

# %% [markdown]
# And the run? Everything made anew, loaded from those, trained to the end.

# %%
package_run = lab.resumed(reloaded, args.seed, TOTAL)
pairs = zip(package_run.losses, ended.losses[AT:], strict=True)
print(
    f"steps {AT + 1} to {TOTAL}, largest difference of a loss:",
    max(abs(a - b) for a, b in pairs),
)
claim(
    package_run.losses == ended.losses[AT:],
    "resumed from the shards, it is the uninterrupted run, bit for bit",
)

# %% [markdown]
# ### Six ways to fail
#
# Now break it: a copy of that folder for each fault. Predict the message of each before you run the cell. After it stands the doctor's
# name for it: a load stops at the first thing that is wrong, `safetrain verify` looks at everything.

# %%
my_guess = ""


# %%
def refused(what, sign, spoil, rule, world_size=RANKS):
    broken = folder / "broken" / f"step_{AT}"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(good, broken)
    spoil(broken)
    try:
        load_sharded(broken, world_size)
    except CheckpointError as error:
        print(f"* {what}")
        say(lab.said(error))
        claim(sign in str(error), sign)
    else:
        claim(False, f"{what}: it loads, and should not")
    found = verify_checkpoints(broken, world_size).findings
    claim(found[0].rule == rule, f"the doctor: {rule}")


refused(
    f"loaded on {2 * RANKS} ranks",
    "world_size mismatch",
    lambda f: None,
    "world_size_mismatch",
    2 * RANKS,
)
refused(
    "one bit of rank 0 is turned over",
    "sha256 mismatch on rank 0",
    lambda f: lab.flip(f / "rank0.bin", 5000),
    "sha256_mismatch",
)
refused(
    "rank 1 was not copied along",
    "shard file missing",
    lambda f: (f / "rank1.bin").unlink(),
    "shard_file_missing",
)
refused(
    "somebody else's format",
    "unknown schema",
    lambda f: lab.edited(f, schema="weights-2"),
    "unknown_schema",
)
refused(
    "a version to come",
    "unknown schema",
    lambda f: lab.edited(f, schema="ckpt.shards.v9"),
    "unknown_schema",
)

# %% [markdown]
# Those are four of the six. The fifth was NaN a hundred steps after a resume: a partial shard behind a manifest. A kill cannot leave that any more, since the
# manifest comes last; a disk or a copy can:

# %%
last = RANKS - 1
refused(
    f"rank {last} is a kilobyte short, as in section 2",
    f"sha256 mismatch on rank {last}",
    lambda f: lab.truncate(f / f"rank{last}.bin", lab.CUT),
    "partial_shard",
)
doctor(verify_checkpoints(folder / "broken").findings, "partial_shard")

# %% [markdown]
# That is what no log could tell. The sixth is a disk that is full; it follows in section 5.
# Three more that are not in the list, because people do edit manifests, and files do get mixed up:

# %%
told = json.loads((good / "manifest.json").read_text())
elsewhere = [{**shard, "path": "../" + shard["path"]} for shard in told["shards"]]
refused(
    "a path that leads out of the folder",
    "refused unopened",
    lambda f: lab.edited(f, shards=elsewhere),
    "damaged_manifest",
)
refused(
    "two shards have changed places",
    "sha256 mismatch on rank 0",
    lambda f: lab.swap(f / "rank0.bin", f / "rank1.bin"),
    "sha256_mismatch",
)
refused(
    "the manifest was never written",
    "never finished",
    lambda f: (f / "manifest.json").unlink(),
    "damaged_manifest",
)
stray = folder / "stray"
shutil.copytree(good, stray)
shutil.copy(newer / "rank1.bin", stray / f"rank{RANKS}.bin")
claim(
    load_sharded(stray, RANKS)[0] == manifest,
    "one file too many is not part of it: the manifest decides",
)

# %% [markdown]
# ### Between two renames, again
#
# The kills of section 2, now with `save_sharded` over a folder that holds step 10. Predict.

# %%
my_guess = ""

# %%
kills["save_sharded"] = lab.after_each_rename("save_sharded", good, newer, folder, RANKS)
for renames, left in enumerate(kills["save_sharded"]):
    print(f"killed after {renames} renames: step {left.step} loads")
claim(
    [left.step for left in kills["save_sharded"]] == [AT] * (RANKS + 1) + [TOTAL],
    "the old checkpoint up to the manifest's rename, the new one from then on",
)

# %%
show(
    lab.rename_figure(kills, AT, TOTAL),
    "between_renames",
    alt="Three rows of boxes, one box per number of renames before the kill. In place without sums: "
    "step 10, then mixtures of files of both steps, then step 20. In place with "
    "sha256: step 10, then nothing loads, then step 20. save_sharded: step 10 in every "
    "box up to the manifest's rename, then step 20.",
)

# %% [markdown]
# What a power failure adds (which writes had reached the disk?) is in lesson 03; the order of fsync and rename is the same here, file by file.
#
# ### Each rank its own file
#
# So far one process had everything. In a real run no process has: each rank calls `save_shard` with its own state, and rank 0 publishes the manifest
# once all have landed. `launch` starts the ranks: here they load their shard of step 10 each, and save it again.

# %%
own = folder / "own"
elements = launch(worker.save_own, RANKS, str(good), str(own), timeout_s=60)
theirs = load_sharded(own, RANKS)[0]
print("elements that each process had:", [numel for numel, _ in elements])
claim(
    [s.sha256 for s in theirs.shards] == on_disk,
    f"{RANKS} processes, a shard each: the same bytes as from one",
)

# %% [markdown]
# Now one of them has a full disk. (Yours stays as it is: a limit on the size of a file stands in, and the write really fails, in the middle of the shard.)

# %%
if os.name == "posix":
    (_, told), *others = launch(
        worker.save_own, RANKS, str(newer), str(own), 1, timeout_s=60
    )
    say(lab.said(told))
    claim(
        "rank 1" in told and all(text == told for _, text in others),
        "every rank is told which one failed, and why",
    )
    claim(
        load_sharded(own, RANKS)[0].step == AT,
        f"nothing was published: step {AT} still loads",
    )
else:
    not_shown("limits on the size of a file, which this system lacks")

# %% [markdown]
# ### Another number of ranks
#
# Half of the machines are gone until Monday. Loading on the wrong number is refused, as it should be: each rank would have somebody else's weights. `reshard` joins the pieces and
# cuts them anew, on purpose, into another folder. Predict: resumed on half as many ranks, are the losses the same?

# %%
my_guess = ""

# %%
HALF = RANKS // 2
half, back = folder / "half", folder / "back"
reshard(good, half, HALF)
reshard(half, back, RANKS)
fewer, half_states = load_sharded(half, HALF)
print(f"{RANKS} ranks:", [s.param_shard_numel for s in manifest.shards])
print(f"{HALF} ranks:", [s.param_shard_numel for s in fewer.shards])
claim(
    [s.sha256 for s in load_sharded(back, RANKS)[0].shards] == on_disk,
    f"{RANKS} -> {HALF} -> {RANKS}: every file is byte for byte what it was",
)
half_run = lab.resumed(half_states, args.seed, TOTAL)
claim(
    half_run.losses == ended.losses[AT:], f"resumed on {HALF}: the same losses, bit for bit"
)

# %% [markdown]
# AdamW looks at one number at a time, so it does not matter where the row is cut. (With real ranks, each has its own part of the batch as well, and fewer of them sum it up
# in another order: expect 1e-6 rather than 0.) What is each rank's own, such as random states, cannot be cut: `reshard(..., drop=("rng",))` leaves it out.
#
# ## 5. What it costs
#
# ### Bytes
#
# FP32 weights and two moments are 12 bytes per weight, so 12 P / N on each of N ranks.

# %%
table(
    "bytes_per_rank",
    ["rank", "12 P / N", "file", "more"],
    [
        [
            shard.rank,
            12 * shard.param_shard_numel,
            about(shard.size_bytes, 6),
            about(shard.size_bytes - 12 * shard.param_shard_numel, 4),
        ]
        for shard in manifest.shards
    ],
)
claim(
    all(0 < s.size_bytes - 12 * s.param_shard_numel < 5000 for s in manifest.shards),
    "each file has 12 P / N bytes, and less than 5 kB of names and sums",
)

# %% [markdown]
# That holds if the piece is all that is saved. A piece that you cut with `flat[a:b]` or `chunk` is a view, and `torch.save` writes everything behind it:

# %%
flat = torch.zeros(100_000)
view = flat[: len(flat) // RANKS]
print(f"a piece of {4 * len(view)} bytes; torch.save of the view:", end=" ")
torch.save(view, folder / "view.pt")
torch.save(view.clone(), folder / "clone.pt")
sizes = {n: (folder / f"{n}.pt").stat().st_size for n in ("view", "clone")}
print(f"{about(sizes['view'], 6)}, of its clone: {about(sizes['clone'], 6)}")
save_sharded([{"param_shard": view}], folder / "view", AT)
claim(
    sizes["view"] > 4 * len(flat) > sizes["clone"],
    "behind a view the whole tensor is saved, in each rank's file",
)
claim(
    (folder / "view" / "rank0.bin").stat().st_size < 4 * len(view) + 5000,
    "save_sharded writes the piece alone",
)

# %% [markdown]
# ### Time
#
# Why a file each, and not one from rank 0? The rule of thumb: what takes 4 hours on one rank takes 4 minutes on 64, since bandwidth adds up. Does it,
# here? The same megabytes, written by rank 0 alone, and by all ranks, a part each. Predict the ratio.

# %%
my_guess = ""

# %%
times = launch(worker.write_times, RANKS, str(folder), 32, 5, timeout_s=200)[0]
table(
    "write_time",
    ["how", "MB", "ms, rank 0 alone", f"ms, {RANKS} ranks", "times as fast"],
    [
        [
            how,
            32 // worker.WAYS[how][1],
            about(1e3 * one),
            about(1e3 * every),
            about(one / every),
        ]
        for how, (one, every) in times.items()
    ],
)
one, every = times["a link each"]
claim(
    one / every > RANKS / 2,
    f"where each rank has a link of {worker.LINK_MB_S} MB/s of its own, it adds up",
)

# %% [markdown]
# The first two rows are your disk. It is one, whoever writes to it, so don't expect a factor; what `atomic_save` computes (packing, sha256) is shared among cores, and that may show.
# The last row is what a cluster has: each node has its own link to the storage. We have slowed each rank's writes down to a link's pace; the adding up is real, the link is not.
#
# ### Disk
#
# Twelve saves, with and without `rotate_checkpoints`. It keeps the newest 5 if you don't say otherwise.

# %%
kept, everything = folder / "kept", folder / "everything"
growth = {parent: [] for parent in (everything, kept)}
for step in range(AT, 13 * AT, AT):
    for parent in growth:
        save_sharded(states, parent / f"step_{step}", step)
    rotate_checkpoints(kept)
    for parent, sizes in growth.items():
        sizes.append(lab.folder_bytes(parent))
table(
    "rotation",
    ["saves", "kB, none deleted", "kB, rotated"],
    [
        [n, *(about(sizes[n - 1] / 1e3, 3) for sizes in growth.values())]
        for n in (1, 5, 6, 12)
    ],
)
claim(
    round(growth[everything][-1] / growth[everything][0]) == 12,
    "without rotation the disk fills",
)
claim(
    round(growth[kept][-1] / growth[kept][0]) == 5,
    "with it, five checkpoints' worth is all",
)
three_more = 7 * growth[everything][0] // 2  # as if the disk had room for these
found = verify_checkpoints(everything, free_bytes=three_more).findings
doctor(found, "no_rotation")

# %% [markdown]
# A folder of checkpoints never holds checkpoints alone. Here are two saves that were killed in the middle, step 75 and step 130, and somebody's notes. Predict: with
# `keep_last=2`, which folders go?

# %%
my_guess = ""

# %%
for step in (75, 130):
    lab.killed(
        worker.save_and_die, "save_sharded", str(good), str(kept / f"step_{step}"), 2
    )
(kept / "step_notes").mkdir()
(kept / "step_notes" / "ideas.txt").write_text("try a longer warm-up")
print("before:", *sorted(os.listdir(kept)))
gone = rotate_checkpoints(kept, keep_last=2)
print("gone:  ", *gone)
print("after: ", *sorted(os.listdir(kept)))
claim(
    [f.name for f in all_checkpoints(kept)] == ["step_110", "step_120"],
    "the newest stay, by number; by name, step_90 would be the newest",
)
claim("step_75" in gone, "what a killed save has left goes with the older ones")
claim(
    (kept / "step_130").is_dir(),
    "an unfinished newer one stays: somebody may be writing it",
)
claim((kept / "step_notes").is_dir(), "what is not a checkpoint is not touched")

# %% [markdown]
# ## 6. Turn the knob
#
# How long does a save take where you train? 12 P bytes, through N links at once, into a storage that takes in so much and no more. Predict: 64 ranks, 1 GB/s each, a model of
# 1.2 trillion weights. And with 256 ranks, if the storage takes 100 GB/s?

# %%
my_guess = ""

# %%
table(
    "write_rule",
    ["ranks", "GB in each file", "time of a save"],
    [
        [
            n,
            f"{lab.bytes_per_rank(1.2e12, n) / 1e9:.1f}",
            lab.span(lab.write_seconds(1.2e12, n, 1, 100)),
        ]
        for n in (1, 16, 64, 256, 1024)
    ],
)
claim(
    lab.span(lab.write_seconds(1.2e12, 1, 1, 100)) == "4 h", "one rank writes for 4 hours"
)
claim(
    lab.write_seconds(1.2e12, 64, 1, 100) < 4 * 60, "64 ranks write for less than 4 minutes"
)
claim(
    lab.write_seconds(1.2e12, 256, 1, 100) == lab.write_seconds(1.2e12, 1024, 1, 100),
    "past 100 ranks the storage is what limits, and more of them do not help",
)

# %%
show(
    lab.write_figure(1.2e12, 64, 1, 100),
    "write_time_rule",
    alt="Time of one save over the number of ranks, both on log scales. Rank 0 alone: a level line at "
    "240 minutes. One file per rank: a falling line, through 3.8 minutes at 64 ranks, which "
    "is marked, and level from 128 ranks on, where the storage limits.",
)

# %% tags=["nbval-ignore-output"]
_ = knob(
    lab.write_picture,
    params=slider(
        "weights",
        [
            ("1 billion", 1e9),
            ("7 billion", 7e9),
            ("70 billion", 7e10),
            ("1.2 trillion", 1.2e12),
        ],
        1.2e12,
    ),
    ranks=slider("ranks", [(str(n), n) for n in (1, 4, 16, 64, 256, 1024)], 64),
    link_gb_s=slider(
        "link of a rank", [("0.1 GB/s", 0.1), ("1 GB/s", 1), ("5 GB/s", 5)], 1
    ),
    storage_gb_s=slider(
        "storage", [("10 GB/s", 10), ("100 GB/s", 100), ("1000 GB/s", 1000)], 100
    ),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. Cut
#
# Write `cut(flat, ranks)`: the pieces of a flat tensor, one for each rank, in order. No piece may have more than one number above another, and each will be saved with `torch.save`.

# %% tags=["exercise"]
from support.checks_04 import check_cut, check_loop, check_problem


def cut(flat, ranks):
    return list(flat.chunk(ranks))  # is that one for each? mend it


say(check_cut(cut))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many pieces does `torch.arange(5.0).chunk(4)` have? And what did section 5 say about a piece of a larger tensor?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `torch.tensor_split` always makes as many as you ask for. `clone()` gives a piece memory of its own.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def cut(flat, ranks):
#     return [piece.clone() for piece in torch.tensor_split(flat, ranks)]
# ```
#
# </details>

# %% [markdown]
# ### B. What is wrong with this folder?
#
# Write `problem(folder, world_size)`: None for a checkpoint that is whole, otherwise a sentence with the words that you know: `unknown schema`, `world_size mismatch`, `shard file missing`,
# `sha256 mismatch on rank 2`. Nothing may be unpickled. `lab.sum_of_file(path)` is the sha256 of a file.


# %% tags=["exercise"]
def problem(folder, world_size):
    files = sorted(folder.glob("rank*.bin"))
    if len(files) != world_size:
        return "shard file missing"
    return None  # go on


say(check_problem(problem))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with the manifest, and go through what it names; the folder may hold more, under other names. First look for all the files, then read them.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A path is a bare file name if `Path(path).name == path`. Check schema, then the number of ranks, then paths, then files, then sums.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def problem(folder, world_size):
#     manifest = json.loads((folder / "manifest.json").read_text())
#     if not manifest["schema"].startswith("ckpt"):
#         return f"unknown schema {manifest['schema']}"
#     if manifest["world_size"] != world_size:
#         return f"world_size mismatch: saved on {manifest['world_size']}"
#     for shard in manifest["shards"]:
#         if Path(shard["path"]).name != shard["path"]:
#             return f"the path {shard['path']} leads out of the folder"
#         if not (folder / shard["path"]).is_file():
#             return f"shard file missing: {shard['path']}"
#     for shard in manifest["shards"]:
#         if lab.sum_of_file(folder / shard["path"]) != shard["sha256"]:
#             return f"sha256 mismatch on rank {shard['rank']}"
#     return None
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a loop
#
# "It went back a thousand steps after the last restart, and since yesterday's kill it does not start at all." The loop is called again with a new `run` (the same as in section 2, on two
# ranks) after each preemption. It saves every 5 steps below `parent` and keeps the newest two. `run.train(1)` takes a step; leave that line as it is.


# %% tags=["exercise"]
def loop(run, parent, total_steps):
    names = sorted(os.listdir(parent))
    if names:
        _, states = load_sharded(parent / names[-1], len(run.shards))
        run.load(states)
    while run.step < total_steps:
        run.train(1)
        if run.step % 5 == 0:
            save_sharded(run.states(), parent / f"step_{run.step}", run.step)
            for name in sorted(os.listdir(parent))[:-2]:
                shutil.rmtree(parent / name)


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which comes last in `sorted(["step_5", "step_10"])`? What does a save leave behind that was killed before its manifest? And if the newest is torn?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `all_checkpoints(parent)` has the folders with a manifest, oldest first by number. Try them from the end, and go on to the next on a `CheckpointError`.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(run, parent, total_steps):
#     for checkpoint in reversed(all_checkpoints(parent)):
#         try:
#             _, states = load_sharded(checkpoint, len(run.shards))
#         except CheckpointError:
#             continue  # in a real run, say so in the log
#         run.load(states)
#         break
#     while run.step < total_steps:
#         run.train(1)
#         if run.step % 5 == 0:
#             save_sharded(run.states(), parent / f"step_{run.step}", run.step)
#             rotate_checkpoints(parent, keep_last=2)
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. A resumed run has the right losses for a hundred steps, and then NaN. The manifest was there, all files were there. What do you look at first?**
#
# <details><summary>A. The learning rate, which may have started afresh</summary>
#
# No. Another learning rate shows in the second loss after the resume, and it seldom makes a NaN out of a run that was well.
#
# </details>
# <details><summary>B. The size and the sum of each shard on the disk</summary>
#
# Right. Where a shard ends early, some weights or moments are whatever was in memory, and a rare token may take long to meet them.
#
# </details>
# <details><summary>C. The batch of that step, which must have a NaN in it</summary>
#
# No. It had a rare token in it, and the uninterrupted run took the same batch without any trouble.
#
# </details>

# %% [markdown]
# **2. A folder holds step 10. A save writes `.tmp` files, fsyncs them, and renames the shards and then the manifest to the old names. A kill falls after the second rename. What loads?**
#
# <details><summary>A. Step 10, since the manifest is still that of step 10</summary>
#
# No. The manifest is, but two of the files that it names are already those of step 20, and their sums do not fit.
#
# </details>
# <details><summary>B. Step 20, since all of its files had been fsynced before</summary>
#
# No. They had, but two of them are still under names that no manifest knows, so nobody can find them.
#
# </details>
# <details><summary>C. Neither, since both of them have lost files to the other</summary>
#
# Right. Every rename was atomic, and all of them together were not: only one rename may make the difference.
#
# </details>

# %% [markdown]
# **3. Two saves of a run on 8 ranks fail to load on 4: `world_size mismatch`. What do you do?**
#
# <details><summary>A. Call reshard into another folder, and load that on 4 ranks</summary>
#
# Right. The pieces are joined in order and cut anew; the old folder stays until the new one has proved itself.
#
# </details>
# <details><summary>B. Set world_size to 4 in the manifest, and load that on 4 ranks</summary>
#
# No. Then it lists eight shards for four ranks, which is refused; and if it were not, half of the weights would be missing.
#
# </details>
# <details><summary>C. Let each of the 4 ranks load the file that has its own number</summary>
#
# No. Those are the first four of eight pieces: half of the weights, each rank's at the wrong place.
#
# </details>

# %% [markdown]
# **4. After a move from 64 to 256 ranks, saves take as long as before. Which reason is likely?**
#
# <details><summary>A. Each rank's file has the same size as it had</summary>
#
# No. It has 12 P / N bytes, a quarter of what it had on 64 ranks, as long as the pieces are not views.
#
# </details>
# <details><summary>B. The ranks write one after the other by design</summary>
#
# No. Each writes its own file at the same time as the others; only the manifest waits for all of them.
#
# </details>
# <details><summary>C. The links of the ranks are slower in a larger run</summary>
#
# No. Each rank still has its own link, and there are four times as many of them.
#
# </details>
# <details><summary>D. The storage behind them takes in no more than that</summary>
#
# Right. Links add up until what is behind them is full; from there on more ranks write smaller files in the same time.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import load_shard, rotate_checkpoints, save_shard
# from safetrain_core.checkpoint.folders import all_checkpoints
#
# # under torchrun, on every rank; state: {"param_shard": my_piece, "optimizer": ..., "step": step}
# save_shard(state, f"runs/mine/step_{step:08d}", rank=rank, world_size=world_size, step=step)
# if rank == 0:
#     rotate_checkpoints("runs/mine", keep_last=5)
#
# newest = all_checkpoints("runs/mine")[-1]  # and the one before, if this raises CheckpointError
# manifest, state = load_shard(newest, rank, world_size)
# ```
#
# From one process: `save_sharded(states, folder, step)` and `load_sharded(folder, world_size)`; `reshard(folder, other_folder, new_world_size)` in between.
#
# **The rule.** A file per rank, written beside, fsynced, renamed; the manifest last, by one rename, and it alone decides. Never write over a file that a manifest names. Before loading:
# the number of ranks, every file, every sum. Keep the last five; order them by number. Save pieces, not views.
#
# **Where it is.** `safetrain_core/checkpoint/sharded.py` (saving, loading, `reshard`), `manifest.py` (`ShardManifest`, `rotate_checkpoints`, what is refused), `atomic.py` (one file);
# `CHECKPOINT_STEP` is the step at which this lesson saves, and lesson 08, where the ranks are real and the sharding is FSDP2's.
#
# **Sources.** Rajbhandari et al. 2020, [ZeRO: memory optimizations toward training trillion parameter models](https://arxiv.org/abs/1910.02054), on the shards and 12 P / N;
# Pillai et al. 2014, [All file systems are not created equal](https://www.usenix.org/conference/osdi14/technical-sessions/presentation/pillai), on renames;
# PyTorch, [Saving and loading tensors preserves views](https://docs.pytorch.org/docs/stable/notes/serialization.html#saving-and-loading-tensors-preserves-views), and
# [fill_uninitialized_memory](https://docs.pytorch.org/docs/stable/deterministic.html#torch.utils.deterministic.fill_uninitialized_memory).

# %%
scratch.cleanup()
finish()
