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
# # 02 · Gradient accumulation
#
# **When do K small batches equal a large one?**
#
# You will be able to
#
# - get from K micro-batches the very step that one big batch would give, and show that it is the same;
# - recognise a step that is K times too long, even where AdamW or a clip hides it;
# - weigh micro-batches that differ in tokens, and close a window that is too short;
# - say what happens once per window and what once per micro-batch: sync, clip, step, schedule;
# - tell what accumulation costs, and what it does not save.
#
# 30 minutes; the computing takes about 20 seconds on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/02_accumulation.py --num-steps 100 --accum-grid 1,2,4,8,16`.
#
# <!-- nav -->
#
# Previous: [Clipping and mixed precision](01_clipping_amp.ipynb) · Next: [Checkpoint and resume](03_checkpoint_resume.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# Of the symptoms in [lesson 00](00_start_here.ipynb), this settles
#
# - **6.** Accumulating over K micro-batches makes steps K times too large
#
# <!-- /settles -->

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
    whole_list,
)

args = lesson_args(
    "02_accumulation",
    num_steps=whole(20, help="optimizer steps of each run"),
    accum_grid=whole_list(
        [1, 2, 4, 8, 16], at_most=64, help="micro-batches per step to sweep"
    ),
    micro_batch=whole(8, at_most=128, help="rows of a micro-batch"),
)

# %%
import torch
from safetrain_core import (
    AmpTrainState,
    clip_global_l2_norm,
    next_token_loss,
    probe_accumulation,
    probe_clip_order,
)
from safetrain_core.optim.schedule import make_schedule
from safetrain_core.step.accumulate import (
    effective_batch_size,
    scale_lr_with_batch,
    train_one_optimizer_step,
    windows,
)

from support import accumulation as lab
from support import ranks as rank_lab
from support.knobs import slider
from support.toy import sensor_batches, text_batches, tiny_gpt, tiny_mlp

# The models are so small that threads wait for each other longer than they compute:
# with two of them this lesson took twice as long.
torch.set_num_threads(1)

# %% [markdown]
# ## 1. Predict
#
# A batch of 32 rows does not fit into memory. So you cut it into 4 micro-batches of 8, call `loss.backward()` for each, and
# `optimizer.step()` after the fourth. Nothing else is changed, since gradients add up by themselves. How does this step differ
# from that of the batch of 32? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "not at all"

# %% [markdown]
# ## 2. Break it
#
# ### The step that is K times too long
#
# Here is that loop for several K, beside one big batch of the same rows: the length of its gradient, and how far SGD and AdamW
# move the weights, each divided by what the big batch gives.


# %%
def whole_losses(model, micro_batches):
    model.zero_grad()
    for x, y in micro_batches:
        next_token_loss(model(x), y).backward()
    return lab.gradient(model)


# %%
ratios = {}
for K in args.accum_grid:
    big = next(text_batches(1, args.seed, K * args.micro_batch))
    norms = [whole_losses(tiny_gpt(args.seed), lab.split(big, k)).norm() for k in (K, 1)]
    moved = {
        name: [
            lab.step_length(False, name, K, big, args.seed),
            lab.step_length(True, name, 1, big, args.seed),
        ]
        for name in ("sgd", "adamw")
    }
    ratios[K] = [
        float(norms[0] / norms[1]),
        *(wrong / right for wrong, right in moved.values()),
    ]
table(
    "whole_losses",
    ["K", "gradient norm", "SGD step", "AdamW step"],
    [[K, *(f"{ratio:.1f}x" for ratio in row)] for K, row in ratios.items()],
)
claim(
    all(abs(r / K - 1) < 0.01 for K, row in ratios.items() for r in row[:2]),
    "the gradient, and with it SGD's step, is K times too long",
)
claim(
    all(abs(row[2] - 1) < 0.05 for row in ratios.values()),
    "AdamW divides by the gradient's size, and so its step looks right",
)

# %% [markdown]
# Each micro-batch's loss is a mean over its own rows. Four means add up to four times the mean of all. A log would not show it, unless
# you have one of the same run with another K. So the doctor runs your step, on micro-batches and on the one batch of all their rows:


# %%
def fresh_run():
    model = tiny_gpt(args.seed)
    return model, lab.optimizer_for(model, "adamw")


def stepping(gather):  # what a probe calls: one optimizer step on a window
    def step(run, micro_batches):
        model, optimizer = run
        gather(model, micro_batches)
        optimizer.step()

    return step


# %%
text = next(text_batches(1, args.seed, 32))
found = probe_accumulation(stepping(whole_losses), fresh_run, text, unequal=False)
doctor(found, "loss_not_divided")

# %% [markdown]
# AdamW does not hide it from a probe. Now train with 16
# micro-batches per step. Predict: which of the two optimizers will show that something is wrong, and after how many steps?

# %%
my_guess = ""

# %%
runs = {
    (name, divide): lab.divided_run(divide, name, steps=args.num_steps, seed=args.seed)
    for name in ("sgd", "adamw")
    for divide in (False, True)
}
ends = {key: losses[-1] for key, (losses, _) in runs.items()}
if args.num_steps >= 12:
    claim(not ends["sgd", False] < 10 * ends["sgd", True], "SGD on whole losses is lost")
    gap = abs(ends["adamw", False] / ends["adamw", True] - 1)
    claim(gap < 0.1, "AdamW on whole losses ends within 10% of where it should")
else:
    not_shown("--num-steps 12 or more")

# %%
show(
    lab.divided_figure(
        {
            f"{label}, {'losses / 16' if divide else 'whole losses'}": runs[name, divide][0]
            for name, label in (("sgd", "SGD"), ("adamw", "AdamW"))
            for divide in (False, True)
        }
    ),
    "whole_losses",
    alt="Loss over the optimizer steps on a log scale, 16 micro-batches each. SGD on whole "
    "losses climbs by orders of magnitude and becomes NaN. SGD on divided losses falls, and "
    "so do both AdamW curves, which lie on each other.",
)

# %% [markdown]
# So is all well with AdamW? No: it hides the fault, and everything that looks at the gradient is now off by 16. The clip is the
# first of these. Predict: in what share of its steps does a clip at 1.0 act?

# %%
my_guess = ""

# %%
clips = {}
for divide in (False, True):
    _, norms = lab.divided_run(
        divide, "adamw", steps=args.num_steps, seed=args.seed, max_norm=1.0
    )
    clips[divide] = (norms[0], sum(norm > 1 for norm in norms) / len(norms))
    label = "losses / 16" if divide else "whole losses"
    first, share = clips[divide]
    print(f"{label}: first norm {about(first)}, clipped in {about(100 * share)}% of steps")
claim(clips[False][1] == 1, "on whole losses the clip acts in every single step")
if args.num_steps >= 12:
    claim(clips[True][1] < 0.9, "on divided losses there are steps that it leaves alone")

# %% [markdown]
# A clip at 1.0 of a gradient that is 16 times too long is a clip at 1/16: every gradient gets the same length, and a spike is
# no longer told from the rest. **The sign to trust is the logged norm: it must not change when you change K.**
#
# ### Micro-batches that differ in tokens
#
# Divide by K, then, and all is well? These micro-batches hold lines of Python code. Loaders put lines of like length together,
# to save padding; the targets behind the end of a line are -100, which the loss leaves out. Predict: how far is the gradient,
# with each loss divided by 4, from that of the one big batch?

# %%
my_guess = ""

# %%
((micro, big),) = lab.line_windows(1, accum=4, rows=args.micro_batch, seed=args.seed)
tokens = lab.token_counts(micro)
model = tiny_gpt(args.seed)
right = lab.gradient_of(model, [big], [1.0]).clone()
equal = lab.gradient_of(model, micro, [1 / 4] * 4).clone()
by_tokens = lab.gradient_of(model, micro, [n / sum(tokens) for n in tokens]).clone()

# %%
table(
    "token_weights",
    ["micro-batch", "valid tokens", "weight of one token under 1/K"],
    [[i, about(n, 3), about(sum(tokens) / 4 / n)] for i, n in enumerate(tokens, start=1)],
)
print(f"gradient by 1/K:    {about(100 * lab.apart(equal, right))}% off the big batch's")
print(f"gradient by tokens: {about(100 * lab.apart(by_tokens, right))}% off")
claim(tokens[-1] > 1.5 * tokens[0], "the micro-batches really differ in tokens")
claim(lab.apart(equal, right) > 0.02, "1/K is wrong here: it is off by more than 2%")
claim(lab.apart(by_tokens, right) < 1e-4, "weighed by tokens it is the big batch's")

# %% [markdown]
# In the big batch every token weighs 1. Under 1/K a character of a short line counts several times as much as one of a long
# line, and no row of the log says so. The big batch knows nothing of micro-batches: its loss is one mean over all tokens. So the share of a micro-batch is its tokens
# over the window's. The probe finds it, by micro-batches of unequal size:


# %%
def by_1_over_k(model, micro_batches):
    lab.gradient_of(model, micro_batches, [1 / len(micro_batches)] * len(micro_batches))


((_, lines),) = lab.line_windows(1, seed=args.seed)
found = probe_accumulation(stepping(by_1_over_k), fresh_run, lines)
doctor(found, "unequal_micro_batches")

# %% [markdown]
# ### Once per window, done once per micro-batch
#
# `clip` right after each `backward` looks tidy. But what it clips is everything that has gathered so far. Predict: of the first of 8
# micro-batches, how much is left at the end?

# %%
my_guess = ""

# %%
eight = list(text_batches(8, args.seed, args.micro_batch))
once = lab.gradient_of(model, eight, [1 / 8] * 8).clone()
shares, wrong_by = {}, {}
for limit in (1.0, 0.25):
    got, shares[limit] = lab.clipped_each_time(model, eight, limit)
    wrong_by[limit] = lab.apart(got, once * min(1, limit / float(once.norm())))
table(
    "clip_each_time",
    ["clip at", *(f"left of {i}" for i in range(1, 9)), "gradient off by"],
    [
        [
            f"{limit:g}",
            *(about(share) for share in left),
            about(100 * wrong_by[limit]) + "%",
        ]
        for limit, left in shares.items()
    ],
)
claim(
    all(left[-1] > 1.2 * left[0] for left in shares.values()),
    "later micro-batches count for more than earlier ones",
)
claim(wrong_by[0.25] > 0.02, "at 0.25 it is another gradient, by more than 2%")


# %%
def clip_each_time(model, micro_batches):
    lab.clipped_each_time(model, micro_batches, max_norm=1.0)


found = probe_clip_order(stepping(clip_each_time), fresh_run, text, 1.0, accum_steps=8)
doctor(found, "clip_bends_gradient")

# %% [markdown]
# The schedule, too, belongs to the optimizer step. Here are 5 windows of 4, with a cosine that should end after 5 updates:


# %%
def run_with_schedule():
    model = tiny_mlp(args.seed)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, adamw, make_schedule(adamw, "cosine", total_steps=5)


def take(run, window, per_micro_batch):
    model, adamw, schedule = run
    for i, (x, y) in enumerate(window, start=1):
        (torch.nn.functional.mse_loss(model(x), y) / len(window)).backward()
        if per_micro_batch or i == len(window):
            adamw.step()
            schedule.step()
            adamw.zero_grad()


def counted(per_micro_batch):
    run = model, adamw, schedule = run_with_schedule()
    rates = []
    for window in windows(sensor_batches(20, args.seed), 4):
        rates.append(adamw.param_groups[0]["lr"])
        take(run, window, per_micro_batch)
    moments = int(adamw.state[next(model.parameters())]["step"])
    return moments, schedule.last_epoch, rates


# %%
for per_micro_batch in (True, False):
    moments, advanced, rates = counted(per_micro_batch)
    print("per micro-batch:" if per_micro_batch else "per window:")
    print(f"  moments decayed {moments} times, schedule at {advanced}")
    print("  learning rate of each window:", *(f"{rate:.3f}" for rate in rates))
claim(counted(True)[:2] == (20, 20), "per micro-batch: 20 steps of momentum and schedule")
claim(counted(False)[:2] == (5, 5), "per window: 5, one for each update")

# %% [markdown]
# Per micro-batch, the learning rate is 0 from the third window on: the schedule was over after 5 micro-batches.

# %%
batch = next(sensor_batches(1, args.seed))
found = probe_accumulation(
    lambda run, window: take(run, window, per_micro_batch=True), run_with_schedule, batch
)
doctor(found, "step_per_micro_batch")

# %% [markdown]
# ### Two ranks that talk K times
#
# On several GPUs, `DistributedDataParallel` averages gradients over all ranks during `backward`. The next cell starts two real
# processes that train together, and counts their all-reduces with a hook inside DDP. Predict: how many per update, at K = 4?

# %%
my_guess = ""

# %%
sizes = {"updates": 3, "accum": 4, "rows": args.micro_batch, "seed": args.seed}
ranks = rank_lab.two_ranks(**sizes)
talk = ranks[rank_lab.EVERY].per_update
print("all-reduces in each of 3 updates:", talk)
claim(talk == [4, 4, 4], "4 micro-batches, 4 all-reduces per update")

# %% [markdown]
# The weights wait for the fourth. What the first three sent over the wire was not needed there yet.
#
# ## 3. By hand
#
# One window, one step. The counts are known before the first forward pass, so each loss can be weighed at once.


# %%
def window_step(model, optimizer, micro_batches):
    tokens = [int((y != -100).sum()) for _, y in micro_batches]
    optimizer.zero_grad()
    mean = 0.0
    for (x, y), n in zip(micro_batches, tokens, strict=True):
        loss = next_token_loss(model(x), y) * (n / sum(tokens))
        loss.backward()
        mean += loss.item()
    norm, _ = clip_global_l2_norm(model, max_norm=1.0)
    optimizer.step()
    return mean, norm


# %% [markdown]
# Is it the one big batch? Predict: is the largest difference between the weights exactly 0?

# %%
my_guess = ""


# %%
def gap_to_big_batch(dtype):
    models = []
    for parts in (micro, [big]):
        model = tiny_gpt(args.seed).to(dtype)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        window_step(model, sgd, parts)
        models.append(lab.weights(model))
    return float((models[0] - models[1]).abs().max())


single, double = gap_to_big_batch(torch.float32), gap_to_big_batch(torch.float64)
print(f"largest difference of a weight: float32 {about(single)}, float64 {about(double)}")
claim(single < 1e-4, "K micro-batches equal the one big batch to less than 1e-4")
claim(double < 1e-11, "in float64 to less than 1e-11")

# %% [markdown]
# Not a fault, and the doctor, who allows for that, finds none:

# %%
found = probe_accumulation(lambda run, parts: window_step(*run, parts), fresh_run, lines)
claim(not found, "nothing found in window_step, with micro-batches of any size")

# %% [markdown]
# It is rounding: the same numbers, added in another order. Three numbers are enough to see it:

# %%
a, b, c = torch.tensor([1e8, -1e8, 1.0])
print(f"(a + b) + c = {(a + b) + c:.0f}    a + (b + c) = {a + (b + c):.0f}")
claim((a + b) + c != a + (b + c), "float32 sums depend on their order")

# %% [markdown]
# Now the end of an epoch. There are 10 batches and 4 fit into a window. Predict: how many updates, and by what are the last two
# losses divided?

# %%
my_guess = ""

# %%
ten = list(text_batches(10, args.seed, args.micro_batch))
cut = list(windows(ten, 4))
print("batches in each window:", [len(window) for window in cut])
model = tiny_gpt(args.seed)
fixed, by_size = (lab.gradient_of(model, cut[-1], [1 / k] * 2).norm() for k in (4, 2))
print(f"last window: dividing by 4 gives {fixed / by_size:.2f} of the step, by 2 the step")
claim([len(window) for window in cut] == [4, 4, 2], "10 batches, 4 per window: 3 updates")
claim(abs(fixed / by_size - 0.5) < 1e-3, "a fixed 1/4 halves the last step")

# %% [markdown]
# `window_step` has no 4 in it: it divides by what the window holds.
#
# One model for which no division helps is one with BatchNorm, whose statistics are those of the micro-batch at hand:

# %%
gap = lab.batchnorm_gap(args.seed)
print(f"with BatchNorm, 4 micro-batches are {about(100 * gap)}% away from the big batch")
claim(gap > 0.01, "BatchNorm: no equality with the big batch, and none is claimed")

# %% [markdown]
# ## 4. The package
#
# `train_one_optimizer_step` is the plain step, to read: `zero_grads(model)`, then for each micro-batch
# `loss_scaled_for_accum(logits, target, accum_steps, loss_fn).backward()`, then one step. Equal shares, no clip, no guard.

# %%
plain, one_go = tiny_gpt(args.seed), tiny_gpt(args.seed)
whole_batch = next(text_batches(1, args.seed, 4 * args.micro_batch))
done = [
    train_one_optimizer_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), parts, next_token_loss
    )
    for model, parts in ((plain, lab.split(whole_batch, 4)), (one_go, [whole_batch]))
]
gap = float((lab.weights(plain) - lab.weights(one_go)).abs().max())
claim(gap < 1e-4, "4 micro-batches of 1/4 of the rows each: the big batch's weights")
claim(abs(done[0].grad_norm / done[1].grad_norm - 1) < 1e-3, "and its gradient norm")

# %% [markdown]
# `AmpTrainState.step_window` is the guarded one, with everything from lesson 01 around it. `loss_weighting="tokens"` weighs as
# `window_step` does. Both train on the same windows of lines, the schedule moving once per update:


# %%
def optimizer_and_schedule(model):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return sgd, make_schedule(sgd, "cosine", total_steps=args.num_steps)


def guarded(weighting):
    model = tiny_gpt(args.seed)
    sgd, schedule = optimizer_and_schedule(model)
    return AmpTrainState(
        model,
        optimizer=sgd,
        scheduler=schedule,
        loss_fn=next_token_loss,
        loss_weighting=weighting,
        amp_dtype=torch.float32,
    )


# %%
line_windows = lab.line_windows(args.num_steps, 4, args.micro_batch, args.seed)
state = guarded("tokens")
for parts, _ in line_windows:
    print(state.step_window(parts))

# %%
hand_model = tiny_gpt(args.seed)
sgd, schedule = optimizer_and_schedule(hand_model)
hand = []
for parts, _ in line_windows:
    hand.append(window_step(hand_model, sgd, parts))
    schedule.step()
gap = float((lab.weights(hand_model) - lab.weights(state.model)).abs().max())
rows = [(row.loss, row.pre_clip) for row in state.log]
claim(gap < 1e-4, "the package's weights equal the hand version's")
claim(
    all(
        abs(x - y) < 1e-3
        for a, b in zip(hand, rows, strict=True)
        for x, y in zip(a, b, strict=True)
    ),
    "and so does every loss and every norm",
)
claim(
    state.counters.updates == state.scheduler.last_epoch == args.num_steps,
    f"{args.num_steps} windows: {args.num_steps} updates, and as many of the schedule",
)

# %% [markdown]
# A micro-batch may hold no token at all: prompts so long that the answers, the only targets, were cut off. The mean over none is
# NaN. Predict: what does each weighting do with the other three micro-batches of that window?

# %%
my_guess = ""

# %%
parts, _ = line_windows[0]
(x, y), *others = parts
with_an_empty_one = [(x, torch.full_like(y, -100)), *others]
verdicts = {}
for weighting in ("equal", "tokens"):
    state = guarded(weighting)
    before = lab.weights(state.model)
    row = state.step_window(with_an_empty_one)
    print(row)
    verdicts[weighting] = (row.skip_reason, torch.equal(before, lab.weights(state.model)))
claim(
    verdicts["equal"] == ("non_finite_loss", True),
    "equal: the window is dropped whole, no weight moved",
)
claim(verdicts["tokens"] == (None, False), "tokens: a share of 0, and the step is taken")

# %% [markdown]
# And the two ranks. `train_one_optimizer_step` and `step_window` run all but the last micro-batch inside `no_sync_context`, where
# DDP leaves the gradients local:

# %%
of_text = {way: ranks[way] for way in rank_lab.WAYS if way not in rank_lab.OF_LINES}
table(
    "all_reduces",
    ["how", "all-reduces per update", "kB sent per update"],
    [
        [way, max(found.per_update), about(found.bytes_per_update / 1000, 3)]
        for way, found in of_text.items()
    ],
)
one = rank_lab.one_process(**sizes)
gaps = [float((found.weights - one).abs().max()) for found in of_text.values()]
claim(
    [found.per_update for found in of_text.values()] == [[4] * 3, [1] * 3, [1] * 3],
    "4 all-reduces per update without no_sync, 1 with it",
)
claim(max(gaps) < 1e-4, "all three end with the weights of one process on the big batch")

# %% [markdown]
# DDP averages over ranks as `/ K` averages over micro-batches: as if all had the same number of tokens. The ranks also trained on
# lines, the first one on the shorter half. `step_window` adds up the tokens of all ranks, one integer per update, and weighs by
# that. How far are the weights from where one process on the big batch goes, as a share of the way?

# %%
start = lab.weights(tiny_gpt(args.seed))
goal = rank_lab.one_process(**sizes, of_lines=True) - start
off = {way: lab.apart(ranks[way].weights - start, goal) for way in rank_lab.OF_LINES}
for way, share in off.items():
    print(f"{way}: {about(100 * share)}% off")
claim(off[rank_lab.BY_COUNT] > 0.02, "ranks of equal weight: off by more than 2%")
claim(off[rank_lab.BY_TOKENS] < 1e-3, "weighed by the tokens of all ranks: the same way")

# %% [markdown]
# Each of these updates had behind it

# %%
samples = effective_batch_size(args.micro_batch, accum_steps=4, world_size=2)
print(f"{args.micro_batch} rows x 4 micro-batches x 2 ranks = {samples} rows")
claim(samples == 8 * args.micro_batch, "effective batch: micro-batch x K x ranks")

# %% [markdown]
# ## 5. What it costs
#
# Memory is the reason for all this. Counted: the bytes that autograd keeps between forward and backward, for a big batch and for one
# of its micro-batches.

# %%
K = max(args.accum_grid)
in_one, in_parts = (lab.kept_bytes(n * args.micro_batch, args.seed) for n in (K, 1))
print(f"one batch of {K * args.micro_batch} rows: {about(in_one / 1e6, 3)} MB")
print(
    f"{K} micro-batches of {args.micro_batch}:  {about(in_parts / 1e6, 3)} MB at any one time"
)
claim(abs(in_one / in_parts / K - 1) < 0.05, "K micro-batches keep 1/K of the activations")

# %% [markdown]
# Time is the price, per update. Predict: you double K. What happens to the time per update, and what to the samples per second?

# %%
my_guess = ""

# %%
seconds = lab.update_seconds(args.accum_grid, args.micro_batch, args.num_steps, args.seed)
least, most = min(seconds), max(seconds)
table(
    "throughput",
    ["K", "ms per update", f"times K={least}", "samples per second"],
    [
        [K, about(1e3 * t, 3), about(t / seconds[least]), about(args.micro_batch * K / t)]
        for K, t in seconds.items()
    ],
)
if most > least:
    longer = seconds[most] / seconds[least] / (most / least)
    claim(
        0.375 < longer < 2.5, "the time per update grows with K: accumulation saves no time"
    )
else:
    not_shown("--accum-grid with two different values")

# %%
show(
    lab.throughput_figure(seconds, args.micro_batch),
    "throughput",
    alt="Samples per second over the number of micro-batches per optimizer step. The curve "
    "rises a little at first, since one optimizer step is shared by more samples, and is "
    "level after that.",
)

# %% [markdown]
# Double K, and an update takes about twice as long; the little that you gain at small K is the optimizer's own time, spread over more
# samples. What accumulation does save is talk: all-reduces per sample fall to 1/K, which is why it helps on a slow network.
#
# ## 6. Turn the knob
#
# K times as many samples per update means a K-th of the updates for the same data. The linear rule says: then make the learning
# rate K times as large. Predict: for K = 4, 8 and 32, will the loss after the same 2,560 samples be that of K = 1?

# %%
my_guess = ""

# %%
small = lab.rule_run(1, "as it was", seed=args.seed)
end = {1: lab.rule_end(small)}
rows = [[1, *[about(end[1], 3)] * 2, f"{lab.BASE_LR:g}"]]
for K in (4, 8, 32):
    end[K] = [
        lab.rule_end(lab.rule_run(K, rule, seed=args.seed)) for rule in ("as it was", "x K")
    ]
    rows.append(
        [K, *(about(v, 3) for v in end[K]), f"{scale_lr_with_batch(lab.BASE_LR, K):g}"]
    )
table("linear_rule", ["K", "loss, lr as it was", "loss, lr x K", "lr x K"], rows)
as_it_was, scaled = end[4]
claim(as_it_was > end[1], "K=4, the same learning rate: it learns less from the same data")
claim(
    abs(scaled - end[1]) < 0.5 * (as_it_was - end[1]),
    "K=4, lr x 4: more than half of that gap is closed",
)
as_it_was, scaled = end[32]
claim(not scaled < as_it_was, "K=32, lr x 32: worse than no rule at all")

# %%
show(
    lab.rule_figure(
        {
            "K=1": small,
            "K=4, lr as it was": lab.rule_run(4, "as it was", seed=args.seed),
            "K=4, lr x 4": lab.rule_run(4, "x K", seed=args.seed),
        },
        "With the learning rate x 4, four micro-batches keep up",
    ),
    "linear_rule",
    alt="Loss over samples seen. Four micro-batches per step with the learning rate as it was "
    "lag behind the curve of K=1 all the way. With four times the learning rate they come "
    "down to it and stay close.",
)

# %% [markdown]
# A rule of thumb: it follows the small batch while the learning rate is far from what the model bears, and breaks down beyond. Here,
# for plain SGD, that is somewhere between K = 4 and K = 32. A warm-up helps over the start, and for Adam the square root is the
# usual first try. Find the largest K that each rule bears:

# %% tags=["nbval-ignore-output"]
_ = knob(
    lambda accum, rule: lab.rule_picture(accum, rule, args.seed),
    accum=slider("micro-batches per step", [(str(k), k) for k in (2, 4, 8, 16, 32)], 4),
    rule=slider("learning rate", [(rule, rule) for rule in lab.RULES], "x K"),
)

# %% [markdown]
# And the undivided loss of section 2. From what K on does SGD not survive it?

# %% tags=["nbval-ignore-output"]
_ = knob(
    lambda accum, optimizer: lab.divided_picture(accum, optimizer, args.seed),
    accum=slider("micro-batches per step", [(str(k), k) for k in (1, 2, 4, 8, 16)], 16),
    optimizer=slider("optimizer", [("SGD", "sgd"), ("AdamW", "adamw")], "sgd"),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. Shares
#
# Write `shares(targets)`: by what is each micro-batch's mean loss multiplied, so that the window's gradient is that of the one big
# batch? You get the targets of each micro-batch; -100 is padding.

# %% tags=["exercise"]
from support.checks_02 import check_loop, check_shares, check_updates


def shares(targets):
    return [1 / len(targets) for _ in targets]  # the usual rule: mend it


say(check_shares(shares))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which token of which micro-batch has too much to say under 1/K? What would give every token the same weight?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(y != -100).sum()` counts what is in the loss. Divide by the sum over the whole window.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def shares(targets):
#     counts = [int((y != -100).sum()) for y in targets]
#     return [count / sum(counts) for count in counts]
# ```
#
# </details>

# %% [markdown]
# ### B. How long is the schedule?
#
# `scheduler_total_steps` wants optimizer steps. How many will there be? Each rank gets the same number of samples, rounded up; the
# loader keeps a last batch that is not full; a window ends with its epoch.


# %% tags=["exercise"]
def updates(samples, micro_batch, accum, ranks, epochs):
    return epochs * samples // micro_batch  # counts batches: mend it


say(check_updates(updates))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three divisions, one after the other: samples of a rank, batches of a rank, windows of an epoch. Which of them round up?
#
# </details>
# <details><summary>Hint 2</summary>
#
# All three. `math.ceil(a / b)`, or `-(-a // b)`. The epochs come last, after the rounding.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def updates(samples, micro_batch, accum, ranks, epochs):
#     per_rank = -(-samples // ranks)
#     batches = -(-per_rank // micro_batch)
#     return epochs * -(-batches // accum)
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a loop
#
# "With accumulation off it trains well; with 4 it does not, and the last batches of the epoch seem to do nothing." This loop has
# several faults, all of them from this lesson. All batches have the same number of samples. It must return one row
# `(mean loss of the window, norm before the clip)` for each optimizer step.


# %% tags=["exercise"]
def loop(model, optimizer, schedule, batches, accum_steps):
    rows = []
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches, start=1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm, _ = clip_global_l2_norm(model, max_norm=1.0)
        schedule.step()
        if i % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            rows.append((loss.item(), norm))
    return rows


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the lines inside the `for` and ask of each: once per micro-batch, or once per window? And what do batches 9 and 10 of
# 10 do?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two loops are easier to get right than a modulo: `for window in windows(batches, accum_steps)`, and inside it the micro-batches of
# that window. Its length is what you divide by.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(model, optimizer, schedule, batches, accum_steps):
#     rows = []
#     for window in windows(batches, accum_steps):
#         optimizer.zero_grad()
#         mean = 0.0
#         for x, y in window:
#             loss = torch.nn.functional.mse_loss(model(x), y) / len(window)
#             loss.backward()
#             mean += loss.item()
#         norm, _ = clip_global_l2_norm(model, max_norm=1.0)
#         optimizer.step()
#         schedule.step()
#         rows.append((mean, norm))
#     return rows
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. You go from K = 1 to K = 8 with the same effective batch. The logged norm is now 8 times as large, and AdamW trains as before. What is it?**
#
# <details><summary>A. Nothing to mend, since AdamW divides by the size</summary>
#
# No. The weights may look well, but the clip now sees 8 times too much, and so does every alert on the norm.
#
# </details>
# <details><summary>B. Smaller micro-batches have noisier gradients</summary>
#
# No. Each one is noisier, but their mean is the gradient of the same rows, and its norm does not change.
#
# </details>
# <details><summary>C. The micro-batch losses are added, not averaged</summary>
#
# Right. A norm that follows K exactly is that fault, and a working optimizer does not disprove it.
#
# </details>

# %% [markdown]
# **2. Micro-batches hold 60 and 240 valid tokens, and each mean loss is divided by 2. How do their tokens weigh?**
#
# <details><summary>A. A token of the short one weighs 4 times as much</summary>
#
# Right. Each micro-batch has half of the say, and the short one shares its half among a quarter as many tokens.
#
# </details>
# <details><summary>B. A token of the long one weighs 4 times as much</summary>
#
# No. The long one's mean divides by 240, so each of its tokens has less to say, not more.
#
# </details>
# <details><summary>C. All weigh the same, since a mean is over tokens</summary>
#
# No. Each mean is over its own tokens. The mean of two means is the mean of all only where the counts agree.
#
# </details>

# %% [markdown]
# **3. Two ranks, K = 8, DDP. Which backward passes belong inside `no_sync`?**
#
# <details><summary>A. The first one alone, since the rest add to it</summary>
#
# No. Then each of the other seven sends what has gathered so far, and only one of eight is saved.
#
# </details>
# <details><summary>B. The first seven: the last one sends their sum</summary>
#
# Right. Gradients stay local and add up; the eighth backward averages the whole sum over the ranks, once.
#
# </details>
# <details><summary>C. All eight: optimizer.step() sends the gradients</summary>
#
# No. The optimizer knows nothing of other ranks. Each would step on its own gradient, and the weights would drift apart.
#
# </details>

# %% [markdown]
# **4. What does a larger K, with the micro-batch as it is, do to an epoch's wall time on one GPU?**
#
# <details><summary>A. It falls to a K-th, as there are fewer updates</summary>
#
# No. There are fewer updates, but each takes K forward and backward passes: the samples are all still computed.
#
# </details>
# <details><summary>B. It grows K-fold, since each update is longer</summary>
#
# No. Each update is about K times as long, and there are a K-th as many of them in an epoch.
#
# </details>
# <details><summary>C. It halves, as more samples run in parallel</summary>
#
# No. Micro-batches run one after the other. A larger micro-batch would run more in parallel, if it fits.
#
# </details>
# <details><summary>D. Next to nothing, apart from the optimizer's own</summary>
#
# Right. The passes are the same ones. Only the optimizer's step, once per update, becomes rarer.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import AmpTrainState, next_token_loss
# from safetrain_core.step.accumulate import windows
#
# # "tokens" where micro-batches differ in valid targets, else "equal"
# state = AmpTrainState(model, lr=3e-4, loss_fn=next_token_loss, loss_weighting="tokens")
# for epoch in range(3):
#     for window in windows(loader, 8):  # the last may be shorter
#         print(state.step_window(window))  # one clip, one sync, one step
# ```
#
# **The rule.** Once per micro-batch: forward, its share of the loss, backward. Once per window: sync, clip, step, schedule, clear. Divide
# by what the window holds. The logged norm must not depend on K.
#
# **The knobs,** by their names in a `TrainConfig`: `gradient_accumulation_steps`, `loss_weighting: equal | tokens`,
# `scale_lr_with_batch` (the linear rule), `scheduler_total_steps` (in updates).
#
# **Where it is.** `safetrain_core/step/accumulate.py` (shares, windows, `no_sync_context`, the plain step),
# `safetrain_core/step/window.py` (the guarded passes), `safetrain_core/optim/schedule.py`.
#
# **Sources.** Ott et al. 2018, [Scaling neural machine translation](https://arxiv.org/abs/1806.00187) (delayed updates);
# Goyal et al. 2017, [Accurate, large minibatch SGD](https://arxiv.org/abs/1706.02677) (the linear rule and its warm-up);
# PyTorch, [DistributedDataParallel.no_sync](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).

# %%
finish()
