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
# # 08 · The whole run, on four ranks
#
# **Do all the guards hold together?**
#
# You will be able to
#
# - say why a rank must never decide alone, and let all ranks agree on a step with one small all-reduce;
# - recognise a run that hangs, or whose ranks train different models, by what each rank has to show;
# - save and resume a sharded run so that it is the same run, and prove it;
# - tell how many bytes each of N ranks holds, and how many rows are behind one update;
# - take the same run to a cluster.
#
# 35 minutes; the computing takes about 40 seconds on a laptop with two cores. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/08_distributed_run.py --num-steps 20 --ranks 4`.
#
# <!-- nav -->
#
# Previous: [Low-rank gradients](07_low_rank_gradients.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# Of the symptoms in [lesson 00](00_start_here.ipynb), this settles
#
# - **7.** The loss curve after a resume is not the one before it
#
# <!-- /settles -->
#
# That one in the form that it takes with several ranks, where each has a random state of its own.

# %%
from support import (
    about,
    as_log,
    claim,
    diagnose_text,
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
    "08_distributed_run",
    ranks=whole(4, at_least=2, at_most=8, help="processes that train together"),
    num_steps=whole(20, at_least=2, at_most=1000, help="optimizer steps of the run"),
)

# %%
import inspect
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetrain_core import (
    CheckpointError,
    agree,
    diagnose,
    effective_batch_size,
    launch,
    next_token_loss,
    verify_checkpoints,
)
from safetrain_core.checkpoint.dcp_files import verify_dcp
from safetrain_core.train.resume_check import resumed, verdict

from support import distributed_run as lab
from support import distributed_worker as worker
from support.knobs import slider

scratch = tempfile.TemporaryDirectory(prefix="lesson08-")
folder = Path(scratch.name)
plan = lab.Plan(
    args.ranks, args.num_steps, args.seed, folder, lab.write_text(folder / "text.txt")
)

# %% [markdown]
# ## 1. Predict
#
# Four processes, called ranks, train one model together: each takes its own rows, and in `loss.backward()` they average their gradients.
# In step 3 the batch of rank 1 has no target left (prompts so long that every answer was cut off), so that its loss is the
# mean over nothing, NaN. The other three are fine. Rank 1 does what lesson 01 taught: it looks at its loss before the backward, and leaves
# the step out. What happens to the run? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "the others take the step without it"

# %% [markdown]
# ## 2. Break it
#
# The next cell starts the ranks, real processes that talk through gloo, and lets them try this and three more naive ways, one after the other.
# A wait for another rank ends after 5 seconds here; by default it is minutes. What the ranks find comes back as values. (Their loops are in
# [support/distributed_worker.py](support/distributed_worker.py), since a process that is started cannot see a notebook's functions.)

# %%
broken = launch(worker.broken, args.ranks, plan, timeout_s=110)
good = [rank for rank in range(args.ranks) if rank != lab.FAULTY]

# %% [markdown]
# ### A rank that leaves out its backward
#
# ```python
# loss = next_token_loss(model(x), y)
# if not torch.isfinite(loss):
#     continue  # nothing is spoilt yet
# optimizer.zero_grad()
# loss.backward()  # DistributedDataParallel averages the gradients over the ranks in here
# optimizer.step()
# ```
#
# In each row are the steps whose gradients the rank shared with the others, in order.

# %%
lefts = [found.left for found in broken]
table(
    "left_out",
    ["rank", "1st", "2nd", "3rd", "4th", "5th", "and then"],
    [
        [
            rank,
            *left.shared,
            f"waits in step {left.stuck_in}" if left.stuck_in else "has ended",
        ]
        for rank, left in enumerate(lefts)
    ],
)
claim(
    all(lefts[rank].stuck_in == lab.SHORT for rank in good),
    f"the others hang in step {lab.SHORT}, three steps after the fault",
)
claim(
    lefts[lab.FAULTY].shared[2] == lefts[0].shared[2] + 1,
    "before that, gradients of different steps were averaged, and nobody was told",
)

# %% [markdown]
# Nothing happens in step 3. The others wait in their all-reduce until rank 1 comes, and it comes, with the gradients of step 4. From then on rank 1
# is a step ahead, and the fault shows where its data ends: the others wait for a rank that has gone. On a cluster this is the run that stands
# still, at full load, until a time-out ends it, far from the cause. With sharded weights it is worse, since what meets is not even the same kind of message.
# All that is left of such a run is the text of that error. The doctor reads it, as `safetrain diagnose` does from a file:

# %%
doctor(diagnose_text(lefts[0].ended_in), "collective_timeout")

# %% [markdown]
# ### A rank that skips alone
#
# So every rank has to make its backward. Then let each look at its own loss, and step only if it is finite:
#
# ```python
# loss.backward()
# if torch.isfinite(loss):
#     optimizer.step()
# ```
#
# Nothing hangs now. Predict: what do you see in the losses?

# %%
my_guess = ""

# %%
alone = [found.alone for found in broken]
table(
    "alone",
    ["rank", "NaN losses", "updates", "parameter norm", "weights away from rank 0's, %"],
    [
        [
            rank,
            sum(loss != loss for loss in found.losses),
            found.updates,
            about(found.norm, 7),
            about(100 * found.away[-1]) if found.away[-1] else 0,
        ]
        for rank, found in enumerate(alone)
    ],
)
late = [loss for found in alone for loss in found.losses[lab.BAD :]]
claim(all(loss == loss for loss in late), "after step 3 each loss of each rank is finite")
claim(
    alone[lab.FAULTY].away[-1] > 1e-3 and not any(alone[rank].away[-1] for rank in good),
    "rank 1 trains another model from step 3 on, and the others the same",
)
claim(
    alone[lab.FAULTY].away[-1] > alone[lab.FAULTY].away[lab.BAD - 1],
    "the distance grows: AdamW's memory of rank 1 lacks that step for good",
)

# %%
show(
    lab.drift_figure([found.away for found in alone]),
    "drift",
    alt="Distance of the weights from those of rank 0, over the steps. For the other ranks it is 0 "
    "throughout. For rank 1 it is 0 up to step 2, jumps to about 2 percent in step 3, "
    "where its loss is NaN, and grows from there.",
)

# %% [markdown]
# No error, no warning, no loss that looks odd. Gradients are averaged over models that are not the same, and the checkpoint has whichever one
# the saving rank holds. Rank 1's own log has the one NaN, and the doctor sees no more than that:

# %%
doctor(diagnose(as_log(loss=alone[lab.FAULTY].losses)), "nan_passes")

# %% [markdown]
# Under FSDP2 there is one model, in parts: then it is rank 1's part of each weight that stays an update behind.

# %%
print("updates of each rank's part under FSDP2:", [a.updates_sharded for a in alone])
claim(
    [a.updates_sharded for a in alone] == [a.updates for a in alone],
    "rank 1's part of the sharded model missed an update, too",
)

# %% [markdown]
# ### A maximum that loses the NaN
#
# The ranks have to tell each other, then. Take the largest loss of all: if one is NaN, so is the largest, isn't it? Here the other ranks have losses from 4 upward, and the
# NaN is on rank 0 first, then on rank 1, and so on.

# %%
maxima = [found.maxima for found in broken]
for place, largest in enumerate(maxima[0]):
    print(f"NaN on rank {place}: the largest loss is {about(largest)}")
claim(all(str(m) == str(maxima[0]) for m in maxima), "all ranks are told the same")
claim(any(m == m for m in maxima[0]), "MAX over floats loses a NaN, depending on its place")

# %% [markdown]
# ### A checkpoint with one random state
#
# Last, a resume. Each rank draws its own dropout masks, from a random state of its own. This loop saves with `torch.distributed.checkpoint` (DCP), which
# writes each rank's part of the sharded weights:
#
# ```python
# weights, moments = get_state_dict(model, optimizer)
# dcp.save({"model": weights, "optimizer": moments, "random": torch.get_rng_state()}, checkpoint_id=folder)
# ```
#
# It saves in mid-run, goes on to the end, and then resumes. Predict: what does DCP do with four random states that have one name?

# %%
my_guess = ""

# %%
one = [found.resumed[lab.ONE_STATE] for found in broken]
own = [found.resumed[lab.OWN_STATES] for found in broken]
gaps = {
    name: lab.largest_gap(found[0].whole[plan.at :], found[0].again)
    for name, found in ((lab.ONE_STATE, one), (lab.OWN_STATES, own))
}
table(
    "random_states",
    ["saved as", "ranks that got their own back", "loss differs by at most"],
    [
        [f'"random": {lab.ONE_STATE}', sum(f.own_state for f in one), about(gaps[lab.ONE_STATE])],
        [f'"random of rank r": {lab.OWN_STATES}', sum(f.own_state for f in own), gaps[lab.OWN_STATES]],
    ],
)  # fmt: skip
claim(sum(f.own_state for f in one) == 1, "DCP kept one state, and every rank loaded it")
claim(gaps[lab.ONE_STATE] > 0, "so the resumed run is another run")
claim(
    gaps[lab.OWN_STATES] == 0, "with a name for each rank it is the same run, bit for bit"
)
after = range(plan.at + 1, args.num_steps + 1)
logs = [as_log(step=after, loss=x) for x in (one[0].again, one[0].whole[plan.at :])]
if len(after) >= 4:
    doctor(diagnose(logs[0], baseline=logs[1]), "leaves_baseline")
else:
    not_shown("--num-steps 8 or more")

# %%
show(
    lab.random_figure(broken[0].resumed, plan.at),
    "random_states",
    alt="Difference between the resumed and the uninterrupted loss, over the steps after the "
    "checkpoint. With one random state for all ranks it is above 0 in every step; with "
    "each rank's own it is exactly 0.",
)

# %% [markdown]
# To DCP a plain tensor is the same on all ranks, as a bias would be, and so it is written once, by the rank with the least to write. The difference is
# small enough to be taken for noise, which is why such a run is called "resumed" for years.
#
# ## 3. By hand
#
# What a rank has found becomes a small integer: 0 is fine, 1 a gradient and 2 a loss that is not finite. The ranks take the worst. Integers have no NaN
# that could be lost.


# %%
def agree_by_hand(code):
    worst = torch.tensor(code)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst)


def step_by_hand(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = next_token_loss(model(x), y)
    loss.backward()  # whatever the loss is: the others wait in there
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    code = 0 if torch.isfinite(norm.full_tensor()) else 1
    code = code if torch.isfinite(loss) else 2
    code = agree_by_hand(code)
    if code == 0:
        optimizer.step()
    return code


# %% [markdown]
# Three rules are in these lines. Every rank makes every pass; every rank calls every collective, in the same order; and a rank decides only by what all of them know.
#
# The next launch trains with this step and with the package's, beside each other, with the fault on rank 1 in step 3. (The text of these two functions is
# sent to the ranks.) Then it does the whole run. Predict: how many ranks skip step 3?

# %%
my_guess = ""

# %%
by_hand = inspect.getsource(agree_by_hand) + "\n\n" + inspect.getsource(step_by_hand)
first = launch(worker.whole_run, args.ranks, plan, by_hand, timeout_s=110)

# %%
for rank, found in enumerate(first):
    print(f"rank {rank}: codes of its steps {found.codes}")
expected = [2 if step == lab.BAD else 0 for step in range(1, lab.SHORT + 1)]
claim(
    all(found.codes == expected for found in first),
    "by hand: every rank skips step 3, and only that, with the reason of rank 1",
)

# %% [markdown]
# ## 4. The package
#
# `agree(code)` does the same. It also carries requests (stop, save, pause), so that a SIGTERM on one machine ends all ranks after the same step.

# %%
cases = first[0].agreements
same = sum(
    by_hand == package for found in first for _, by_hand, package in found.agreements
)
print("codes of the ranks -> agreed, for example:")
for codes, _, package in cases[-3:]:
    print(f"  {codes} -> {package}")
print(f"{same} of {args.ranks * len(cases)} agreements are those of the hand version")
claim(
    same == args.ranks * len(cases), "agree_by_hand and agree say the same, on every rank"
)
claim(agree(2) == 2, "on one process agree is the identity")

# %% [markdown]
# `AmpTrainState` has it inside. These are its rows on the sharded model, as rank 0 saw them.

# %%
for row in first[0].rows:
    print(row)
reasons = [[row.skip_reason for row in found.rows] for found in first]
claim(
    all(told == reasons[0] for told in reasons) and reasons[0][lab.BAD - 1] == "non_finite_loss",
    "every rank has the same rows, with the reason",
)  # fmt: skip
claim(all(found.untouched for found in first), "SKIP left every rank's part bit for bit")
gap = max(found.gap for found in first)
print("largest difference of a weight to the hand version:", about(gap))
claim(gap < 1e-5, "after six steps the weights are those of the hand version")

# %% [markdown]
# ### The whole run
#
# MiniGPT with 2 blocks of width 32 and 4 heads, on text, cut over the ranks by FSDP2; two micro-batches per update, synced on the last; AdamW, a cosine, clip at 1.0,
# dropout; a checkpoint in mid-run. It is what `safetrain train --world-size 4` does.

# %%
run = [found.report for found in first]
for row in run[0].result.rows:
    print(row)
losses = [lab.losses_of(report) for report in run]
claim(all(report.status == 0 for report in run), "the run completed on every rank")
claim(all(told == losses[0] for told in losses), "every rank logged the same losses")
if args.num_steps >= 10:
    claim(losses[0][args.num_steps] < losses[0][1], "and they fall")
else:
    not_shown("--num-steps 10 or more")

# %%
norms = [report.facts.norm for report in run]
table(
    "ranks",
    ["rank", "weights held", "weights + moments, bytes", "12 P / N", "parameter norm"],
    [
        [
            rank,
            report.facts.held,
            report.facts.weight_bytes + report.facts.optimizer_bytes,
            f"{report.facts.ideal_bytes(args.ranks):.0f}",
            about(report.facts.norm, 9),
        ]
        for rank, report in enumerate(run)
    ],
)
claim(len(set(norms)) == 1, "the norm of all weights is the same number on every rank")

# %% [markdown]
# No rank holds the model; all of them together do, and each can tell the norm of the whole. Look at that number first when you doubt a run: in
# section 2 rank 1 had another.
#
# And how many rows are behind one of these updates? Predict, before you run the cell: batches of 8, two micro-batches, and your ranks.

# %%
my_guess = ""

# %%
logged = lab.logged_column(folder / "run" / "metrics.csv", "effective_batch_size")
rows = effective_batch_size(lab.ROWS, accum_steps=lab.ACCUM, world_size=args.ranks)
print(f"{lab.ROWS} rows x {lab.ACCUM} micro-batches x {args.ranks} ranks = {rows} rows")
claim(set(logged) == {str(rows)}, "the log counted as many rows in every update")

# %% [markdown]
# Twice the ranks is twice the batch, and half the updates for the same data. To keep the batch, and with it the learning rate, halve the micro-batches:
# that was lesson 02's rule, with one factor more.
#
# ### The checkpoint
#
# In mid-run all ranks saved together into one folder. DCP writes the tensors; beside it every rank writes what it alone has; and rank 0 publishes a manifest over
# all of it, last, by one rename.

# %%
manifest = verify_dcp(plan.checkpoint)
table(
    "manifest",
    ["file", "what is in it", "bytes", "digits of its sha256"],
    [[a, b, about(c, 3), d] for a, b, c, d in lab.manifest_rows(manifest)],
)
print(f"{manifest.schema}, world_size={manifest.world_size}, step={manifest.step}")
claim(manifest.step == plan.at, "it was saved after the step that was planned")
claim(
    len(manifest.ranks) == args.ranks, "and has a file of each rank, random state included"
)

# %% [markdown]
# ### A second launch
#
# New processes, with weights that begin elsewhere. They load that checkpoint, with every sum verified first, and go on to the end. For every rank this compares
# the bytes that it holds after loading, each loss, and the bytes at the end, with those of the run that was never interrupted. Predict the largest difference of a loss.

# %%
my_guess = ""

# %%
second = launch(resumed, args.ranks, plan.job, plan.at, timeout_s=110)
holds, words = verdict(run, second, plan.at)
say(words)
claim(holds and words.startswith("RESUME VERIFIED"), "the second launch is the same run")
reloaded = [
    a.digests[plan.at] == b.digests[plan.at] for a, b in zip(run, second, strict=True)
]
again = lab.losses_of(second[0])
rest = [losses[0][step] for step in again]
print(f"shards reloaded byte-equal: {sum(reloaded)} of {args.ranks}")
print("largest difference of a loss:", lab.largest_gap(rest, list(again.values())))
claim(
    list(again) == list(range(plan.at + 1, args.num_steps + 1)),
    "it took the steps after the checkpoint, and no others",
)

# %%
show(
    lab.loss_figure(run[0], second[0], plan.at),
    "loss",
    alt="Loss over the steps. The first launch is a wide grey line that falls from step 1 to the "
    "end. The second launch begins after the checkpoint in the middle and lies on it.",
)

# %% [markdown]
# In a shell, `--verify-resume` does the same. And if a bit of one of those files turns over? Every load begins with `verify_dcp`:

# %%
lab.flip_one_bit(plan.checkpoint / manifest.part / "__1_0.distcp")
try:
    verify_dcp(plan.checkpoint)
except CheckpointError as error:
    say(lab.without_names(str(error), folder, manifest))
    claim("sha256 mismatch" in str(error), "one bit in one rank's file is found")
else:
    claim(False, "one bit in one rank's file is found")
doctor(verify_checkpoints(plan.checkpoint).findings, "sha256_mismatch")

# %% [markdown]
# ### On a cluster
#
# The worker is the same function; only who starts it changes. `launch` is for one machine, notebooks and tests. On one machine, torchrun starts the same run:
#
# ```sh
# torchrun --nproc-per-node 4 \
#     -m safetrain_core train --max-steps 20 --layers 2 --width 32 --heads 4 --dropout 0.1 \
#     --gradient-accumulation-steps 2 --checkpoint-every-n-steps 10 --verify-resume --out runs/four
# ```
#
# On two machines with eight GPUs each, run this on both:
#
# ```sh
# torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 \
#     --rdzv-backend c10d --rdzv-endpoint first-machine:29500 --rdzv-id run7 \
#     -m safetrain_core train --device cuda --steps 10000 --checkpoint-every-seconds 1200 \
#     --out /shared/runs/run7 --resume auto
# ```
#
# What changes: `--device cuda` brings nccl in gloo's place, and rank r of a machine takes GPU r. `--out` has to be a folder that all machines see, since each rank writes its own
# part there. The ranks meet at an address in place of a file, so the port must be open. The effective batch grows with the ranks. Sums over GPUs may be taken in
# another order each time: expect losses equal to less than 1e-4 after a resume, not to the last bit. `--resume auto` makes the same command go on after a restart, on fewer machines too: DCP cuts the
# tensors anew, the data position is carried over, and only the random states, which belong to ranks, begin anew. (The kit's
# own tests run torchrun with gloo on one machine; the rest follows PyTorch's documentation.)
#
# ## 5. What it costs
#
# ### Memory
#
# The launch with the whole run also cut the same model over fewer ranks. For every weight there are 12 bytes: 4 for its FP32 value and 8 for AdamW's two moments. Predict: what is
# on each of 2 ranks, and on each of 4?

# %%
my_guess = ""

# %%
shares = {n: [found.shares[n] for found in first] for n in lab.sizes(args.ranks)}
P = shares[1][0].parameters
held = {
    n: [fact.weight_bytes + fact.optimizer_bytes for fact in facts[:n]]
    for n, facts in shares.items()
}
table(
    "memory",
    ["N", "least on a rank, bytes", "most on a rank", "12 P / N", "in sum", "12 P"],
    [
        [n, min(h), max(h), f"{lab.bytes_per_rank(P, n):.0f}", sum(h), lab.BYTES * P]
        for n, h in held.items()
    ],
)
claim(
    all(h == lab.shares_by_rule(n) for n, h in held.items()),
    "each rank holds its rows of each weight, to the byte",
)
claim(all(sum(h) == lab.BYTES * P for h in held.values()), "in sum it is 12 P")
even = [n for n, h in held.items() if set(h) == {lab.bytes_per_rank(P, n)}]
print("exactly 12 P / N on each rank for N =", *even)

# %%
show(
    lab.memory_figure(shares),
    "memory",
    alt="Bars of the bytes on each rank, weights below and moments twice as high on top: one tall "
    "bar for N = 1, bars of half that height for N = 2, of a quarter for N = 4. Each ends at "
    "the line of 12 P / N.",
)

# %% [markdown]
# Here all dimensions divide by 4. FSDP2 cuts a weight by its rows, ceil(rows / N) for each rank until there are no more. Ten rows, on your ranks:

# %%
parts = [found.uneven.held for found in broken]
print(f"{lab.UNEVEN} rows on {args.ranks} ranks:", parts)
claim(
    parts == lab.rows_held(lab.UNEVEN, args.ranks), "ceil(rows / N), and the rest is left"
)
claim(sum(parts) == lab.UNEVEN, "in sum nothing is lost")

# %% [markdown]
# Gradients (4 bytes, cut the same way), activations and the weights of the block at work, which are gathered whole for a moment, come on top.
#
# ### Messages
#
# What does agreeing cost? The ranks counted what torch sends in one update of two micro-batches.

# %%
counts = {way: first[0].messages[way] for way in lab.WAYS}
table(
    "messages",
    ["how", *lab.KINDS],
    [[way, *told.values()] for way, told in counts.items()],
)
reduce = {way: told["reduce-scatter"] for way, told in counts.items()}
claim(
    reduce[lab.EVERY] == lab.ACCUM * reduce[lab.LAST],
    "sync on the last: gradients are sent once per update, not once per micro-batch",
)
claim(
    counts[lab.GUARDED] == counts[lab.LAST],
    "the guarded step sends no message more than the plain one that logs its norm",
)

# %% [markdown]
# The norm of sharded gradients needs an all-reduce anyway. The package puts the verdict, the requests and the loss into that one message: a hundred bytes more, no wait more.
#
# ## 6. Turn the knob
#
# Why does one cut a model? Here is 12 P / N for 7 billion weights. Predict: how many devices of 80 GB does it take at least?

# %%
my_guess = ""

# %%
chosen = {"parameters": 7e9, "ranks": 8, "micro_batch": 4, "accum_steps": 4}
fig, text = lab.plan_picture(**chosen)
show(fig, "plan", alt=text)
each = {n: lab.bytes_per_rank(7e9, n) / 1e9 for n in (1, 2, 8)}
print("GB on each rank:", {n: round(gb, 1) for n, gb in each.items()})
claim(
    each[1] > lab.CAPACITY_GB > each[2],
    "7 billion weights do not fit one device of 80 GB; their state fits two",
)

# %% tags=["nbval-ignore-output"]
_ = knob(
    lab.plan_picture,
    parameters=slider(
        "weights", [("125 M", 0.125e9), ("1 B", 1e9), ("7 B", 7e9), ("70 B", 70e9)], 7e9
    ),
    ranks=slider("ranks N", [(str(2**i), 2**i) for i in range(11)], 8),
    micro_batch=slider("rows of a micro-batch", [(str(n), n) for n in (1, 2, 4, 8)], 4),
    accum_steps=slider("micro-batches", [(str(n), n) for n in (1, 2, 4, 8, 16)], 4),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. Bytes on a rank
#
# Write `bytes_on(shapes, ranks, rank)`: the bytes of FP32 weights and AdamW's moments that `rank` holds, of weights with these shapes, under FSDP2.

# %% tags=["exercise"]
from support.checks_08 import check_bytes, check_loop


def bytes_on(shapes, ranks, rank):
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    return 12 * parameters / ranks  # on every rank? mend it


say(check_bytes(bytes_on))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Only the first dimension is cut, and each weight by itself. How many of its rows does `rank` get, if every rank takes ceil(rows / ranks) while there are some?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `most = -(-rows // ranks)` rounds up. Before `rank` comes, `most * rank` rows are gone; what is left may be less than `most`, or nothing.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def bytes_on(shapes, ranks, rank):
#     held = 0
#     for rows, *rest in shapes:
#         most = -(-rows // ranks)
#         mine = max(0, min(most, rows - most * rank))
#         held += mine * torch.Size(rest).numel()
#     return 12 * held
# ```
#
# </details>

# %% [markdown]
# ### B. Repair a loop
#
# "It hangs about once a week. It also learns four times too fast on four machines, they say." Each rank calls this loop with its own copy of the model (the weights are equal), its own batches, and
# `all_reduce(tensor)`, which adds up over the ranks, in place, as `dist.all_reduce` does. It is to step by the mean of all ranks' gradients, clipped at 1.0, to leave out a step in which any rank has a loss that is not finite, and to return
# "STEP" or "SKIP" for each. (The check runs it on four threads, and tells at once who waits for whom.)


# %% tags=["exercise"]
def loop(model, optimizer, batches, all_reduce, ranks):
    rows = []
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(model(x), y)
        if not torch.isfinite(loss):
            rows.append("SKIP")
            continue
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for p in model.parameters():
            all_reduce(p.grad)
        optimizer.step()
        rows.append("STEP")
    return rows


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three faults: a rank decides alone; a sum is taken for a mean; and something is done to each rank's own gradient that belongs to the mean.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Before the `if`, make a tensor that is 1.0 where the loss is not finite and 0.0 elsewhere, and add it up over all ranks: above 0, everyone skips. The clip comes after the loop over the gradients.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(model, optimizer, batches, all_reduce, ranks):
#     rows = []
#     for x, y in batches:
#         loss = torch.nn.functional.mse_loss(model(x), y)
#         bad = (~torch.isfinite(loss)).float()
#         all_reduce(bad)
#         if bad > 0:
#             rows.append("SKIP")
#             continue
#         optimizer.zero_grad()
#         loss.backward()
#         for p in model.parameters():
#             all_reduce(p.grad)
#             p.grad /= ranks
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#         optimizer.step()
#         rows.append("STEP")
#     return rows
# ```
#
# This loop may skip before its backward, since all ranks do so together. `DistributedDataParallel` and FSDP2 talk inside `backward()`; agreeing before costs a message for each micro-batch, and
# so the package agrees once, after the last.
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. A run on 64 GPUs stands still at full load, and no rank has an error. What do you look for first?**
#
# <details><summary>A. A rank whose network card is slower than that of the others</summary>
#
# No. A slow rank makes all of them slow, since they wait for it in every step; but the steps go on.
#
# </details>
# <details><summary>B. A rank that went past a collective that the others wait in</summary>
#
# Right. One left out a backward, or a save, or ended its data early. See in which step and in which call each rank is.
#
# </details>
# <details><summary>C. A rank whose loss became NaN, which then spread to the others</summary>
#
# No. A NaN that spreads gives NaN losses in all ranks' rows, and the run goes on. It is the rank that reacts to it alone that stops a run.
#
# </details>

# %% [markdown]
# **2. Rank 3 alone has a NaN loss. In your loop every rank makes its backward, and steps if its own loss is finite. What do the rows show?**
#
# <details><summary>A. A skip on rank 3, then losses like before</summary>
#
# Right. That is why it is dangerous: rank 3 trains another model from then on, and only the ranks' norms would tell.
#
# </details>
# <details><summary>B. A skip on rank 3, then NaN on every rank</summary>
#
# No. The gradient of a mean over nothing is 0 here, so the others stepped by a finite one. With a NaN gradient it would be so.
#
# </details>
# <details><summary>C. A skip on each rank, then losses like before</summary>
#
# No. That takes an agreement. Here the others see nothing but their own loss, which is finite, and take the step.
#
# </details>

# %% [markdown]
# **3. A checkpoint of 4 ranks has model, optimizer, schedule, counters, and the random state of rank 0. What is the resumed run?**
#
# <details><summary>A. The same run, as all ranks were seeded alike</summary>
#
# No. Ranks with one random state would draw the same dropout masks, so they are seeded apart, and each state has moved on.
#
# </details>
# <details><summary>B. The same run, if the data order has its own seed</summary>
#
# No. The order of the data is right then, and the dropout masks of three ranks are still those of the first.
#
# </details>
# <details><summary>C. Another run, by little more than noise in the loss</summary>
#
# Right. Nothing looks wrong in the curve. It shows where losses are compared bit for bit, as `--verify-resume` does.
#
# </details>

# %% [markdown]
# **4. A model of 10 billion weights, AdamW in FP32, 16 ranks under FSDP2. How much of weights and moments is on each rank?**
#
# <details><summary>A. 2.5 GB, since the weights alone are cut</summary>
#
# No. That is 4 P / N, the weights. The moments of a sharded weight are sharded with it, and are twice as large.
#
# </details>
# <details><summary>B. 7.5 GB, since all three numbers are cut</summary>
#
# Right. 12 P / N: 120 GB over 16 ranks. Gradients and activations come on top.
#
# </details>
# <details><summary>C. 82 GB, as the moments stay on each rank</summary>
#
# No. That would be the weights cut and two whole moments. FSDP2 keeps the optimizer's state for what a rank holds.
#
# </details>

# %% [markdown]
# **5. You go from 4 ranks to 16, and the learning rate should stay right. Micro-batches of 8, eight of them per update. What now?**
#
# <details><summary>A. Two micro-batches per update</summary>
#
# Right. 8 x 8 x 4 = 8 x 2 x 16 = 256 rows per update: the same gradient noise, the same schedule.
#
# </details>
# <details><summary>B. Eight micro-batches, as before</summary>
#
# No. That makes 1,024 rows per update, and a quarter of the updates for the same data.
#
# </details>
# <details><summary>C. Four micro-batches per update</summary>
#
# No. That is half as many for four times the ranks: 512 rows per update, where there were 256.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import SafeTrainer, TrainConfig
# from safetrain_core.distributed import process_group
# from safetrain_core.train.worker import sharded
#
# with process_group("gloo"):  # torchrun starts this script on every rank; nccl and torch.cuda.set_device(LOCAL_RANK) on GPUs
#     model = sharded(build_model(), torch.device("cpu"))  # or fully_shard by your own plan
#     config = TrainConfig(max_steps=10_000, gradient_accumulation_steps=2, checkpoint_every_seconds=1200)
#     loader = DataLoader(data, config.batch_size, sampler=DistributedSampler(data))  # this rank's rows
#     trainer = SafeTrainer(model, config, loader, checkpoint_dir="/shared/runs/mine")
#     trainer.resume()  # the newest checkpoint that verifies, on as many ranks as there are now
#     trainer.fit()
# ```
#
# In a loop of your own: `code = agree(code)` before the step; `save_dcp(state, folder, step=step, own={"rng": capture_rng_state()})` and `load_dcp(folder, state)`.
#
# **The safe defaults of all lessons** in one file, for `safetrain train --config safe.yaml`, or by the same names in a `TrainConfig`:
#
# ```yaml
# grad_clip_max_norm: 1.0         # where transformers begin
# inf_post_clip_threshold: 10.0   # a second belt behind the clip
# max_nan_retries: 3              # a few bad steps pass; more have a cause
# loss_jump_factor: 2.0           # above twice the median loss: back to the last checkpoint
# use_amp: true                   # 16 bits: about half of the activations' bytes
# scheduler_type: cosine          # or constant, or linear_warmup_then_constant
# scheduler_warmup_ratio: 0.05    # share of the schedule that warms up
# checkpoint_every_n_steps: 1000  # the steps that you can afford to lose, against the time of a save
# csv_log_path: runs/metrics.csv  # read it early: safetrain diagnose runs/metrics.csv
# gpu_temp_guard: true            # on a GPU
# gpu_metrics_backend: nvml
# ```
#
# **The rule.** Every rank makes every pass and calls every collective, in the same order. A rank decides by what all ranks know. Of a checkpoint, each rank keeps what it
# alone has. A resume is proved by equal losses, not by a curve that looks right.
#
# **When a rank falls** (an error, a kill), `launch` ends the others and names the rank and its error; torchrun does so too, and `--max-restarts` begins again from the newest whole checkpoint.
#
# **Where it is.** `safetrain_core/distributed.py` (`agree`), `launcher.py` (`launch`), `train/worker.py` (the run of one rank), `train/resume_check.py` (the proof),
# `checkpoint/dcp.py` (`save_dcp`, `load_dcp`), `step/ranks.py` (norms over ranks).
#
# **Sources.** Rajbhandari et al. 2020, [ZeRO](https://arxiv.org/abs/1910.02054), section 3.1 for the 12 bytes; PyTorch on
# [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
# [distributed checkpoints](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html) and
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).

# %%
scratch.cleanup()
finish()
