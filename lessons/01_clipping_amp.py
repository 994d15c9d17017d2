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
# # 01 · Clipping and mixed precision
#
# **How does one bad step end a run, and what stops it?**
#
# You will be able to
#
# - tell a gradient spike from a float16 overflow by their rows in the log, and stop both;
# - put loss scaling, unscaling, the clip and the skip in the one order that works, and see in numbers what each wrong order does;
# - predict when the scaling factor halves, doubles, or stays;
# - read a skip rate, and decide between a smaller factor, better units and bfloat16.
#
# 35 minutes; the computing takes a few seconds on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/01_clipping_amp.py --num-steps 100`.
#
# <!-- nav -->
#
# Previous: [Start here](00_start_here.ipynb) · Next: [Gradient accumulation](02_accumulation.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# Of the symptoms in [lesson 00](00_start_here.ipynb), this settles
#
# - **1.** One batch, and the loss shoots up and stays up
# - **2.** After one step every weight is NaN
# - **3.** The scaling factor is the same number in every row
# - **4.** The logged norm is in the thousands and follows the scaling factor
# - **5.** SKIP rows by the hundred in each epoch
#
# <!-- /settles -->

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
)

args = lesson_args("01_clipping_amp", num_steps=20)

# %%
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from safetrain_core import (
    AmpTrainState,
    clip_global_l2_norm,
    diagnose,
    has_non_finite_grad,
    next_token_loss,
    rolling_skip_rate,
)

from support import clipping_amp as lab
from support.knobs import slider
from support.toy import sensor_batches, text_batches, tiny_gpt, tiny_mlp

# %% [markdown]
# ## 1. Predict
#
# A tiny GPT has learned for 29 steps on Python source code. The 30th batch has a bug: its loss is the *sum* over its 512
# characters, where every other batch takes the mean. The 31st batch is fine again. What will the loss do in the ten steps
# after the bad one? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "one high value, then back to normal"

# %% [markdown]
# ## 2. Break it
#
# ### One batch, and the loss goes up like a wall
#
# This is the plain loop, with plain SGD. Nothing is injected: the gradient of a sum over 512 characters really is 512 times
# the gradient of their mean.


# %%
def measure(parameters):
    return clip_global_l2_norm(parameters, max_norm=1e30)  # out of reach: nothing is cut


def train(clip=measure, bad_step=30):
    model = tiny_gpt(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step, (x, y) in enumerate(text_batches(60, args.seed), start=1):
        loss = next_token_loss(model(x), y)
        optimizer.zero_grad()
        (loss * y.numel() if step == bad_step else loss).backward()
        norms.append(clip(model.parameters())[0])
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


# %%
naive, norms = train()
before, worst, last = lab.spike_summary(naive)
print(f"step 29: loss {about(before)}    worst after the bad batch: {about(worst)}")
claim(worst > 10 * before, "one bad batch made the loss at least 10 times as large")
claim(not last < before, "30 good batches later it has not come back")

# %% [markdown]
# The bad batch's own loss per character was normal. The damage shows one step later, in the weights that it left behind.
#
# Would you have found that batch? The doctor gets what this run logged, and nothing else:

# %%
doctor(diagnose(as_log(loss=naive, grad_norm=norms)), "spike_stays")

# %% [markdown]
# ### Numbers that float16 does not have
#
# Predict: which of these three can float16 hold, and which bfloat16: 1 + 1/1000, 70,000, and one hundred-millionth?

# %%
my_guess = ""

# %%
dtypes = (torch.float32, torch.float16, torch.bfloat16)
table(
    "number_formats",
    ["format", "largest", "1 + 1/1000", "70000", "1e-8"],
    [
        [str(d).split(".")[1], f"{torch.finfo(d).max:.5g}"]
        + [f"{torch.tensor(v, dtype=d).item():.6g}" for v in (1 + 1 / 1000, 70000.0, 1e-8)]
        for d in dtypes
    ],
)

# %% [markdown]
# float16 has fine steps and a short ruler: 70,000 is Inf and 1e-8 is 0. bfloat16 has float32's ruler with coarse steps:
# 1.001 is 1. Both ends of float16's ruler matter. At the small end, gradients turn into zeros. Here a loss term has a
# weight of 1e-5, as an auxiliary loss may have:

# %%
x1, y1 = next(sensor_batches(1, args.seed))


def zero_share(factor):
    model = tiny_mlp(args.seed)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-5 * F.mse_loss(model(x1), y1)
    grads = torch.autograd.grad(loss * factor, list(model.parameters()))
    return sum(int((g == 0).sum()) for g in grads) / sum(g.numel() for g in grads)


# %%
for factor in (1.0, 2.0**16):
    print(f"loss times {factor:7.0f}: {about(100 * zero_share(factor))}% of it is zero")
claim(
    zero_share(1.0) > 0.05, "unscaled, more than 5% of the float16 gradient is lost to zero"
)
claim(zero_share(2.0**16) < 0.005, "with the loss times 65536, next to nothing is lost")

# %% [markdown]
# So you multiply the loss before the backward pass and divide the gradients after it. What if the factor is too large?
# Predict: how many of the 577 weights are NaN after the first step of this loop?

# %%
my_guess = ""


# %%
def scaled_by_hand(factor=2.0**20, num_steps=4):
    model = tiny_mlp(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in sensor_batches(num_steps, args.seed):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        (loss * factor).backward()
        for p in model.parameters():
            p.grad /= factor
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lost = sum(int(p.isnan().sum()) for p in model.parameters())
        yield loss.item(), lost


# %%
losses, lost = zip(*scaled_by_hand(), strict=True)
table(
    "unguarded_overflow",
    ["step", "loss", "NaN weights of 577"],
    zip(range(1, 5), map(about, losses), lost, strict=True),
)
claim(lost[0] == 577, "one overflow, and every weight is NaN")
claim(math.isfinite(losses[0]), "the loss of that step was still finite")
doctor(diagnose(as_log(loss=losses)), "nan_stays")

# %% [markdown]
# The loss looked healthy, the backward pass overflowed, and the clip made it complete: it multiplies *every* gradient by a
# factor made from a norm that is Inf or NaN. A clip is no guard against Inf.
#
# ### The right parts in the wrong order
#
# `torch.amp.GradScaler` does the multiplying and dividing, and leaves out a step that overflowed. Two mistakes are common.
# First: the clip before the unscaling. Predict: how large is the norm that this logs, when the factor is 4096?

# %%
my_guess = ""


# %%
def first_norms(factor, unscale_first):
    model = tiny_mlp(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=factor)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x1), y1)
    scaler.scale(loss).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    logged, _ = clip_global_l2_norm(model, max_norm=1.0)
    if not unscale_first:
        scaler.unscale_(optimizer)
    applied, _ = clip_global_l2_norm(model, max_norm=1.0)
    return logged, applied


# %%
true_norm, _ = first_norms(16.0, unscale_first=True)
seen = [(f, *first_norms(f, unscale_first=False)) for f in (16.0, 256.0, 4096.0)]
table(
    "clip_before_unscale",
    ["factor", "logged norm", "norm that the optimizer gets"],
    [[f"{f:.0f}", about(logged, 4), about(applied, 2)] for f, logged, applied in seen],
)
claim(
    lab.close(logged / f / true_norm for f, logged, _ in seen), "logged: true norm x factor"
)
claim(lab.close(applied * f for f, _, applied in seen), "applied: 1 / factor, not 1")

# %% [markdown]
# At factor 4096 the optimizer was handed a gradient of norm 1/4096. Here is what 40 steps make of that, the factor doubling after
# every ten:

# %%
orders = {
    name: [lab.order_run(right, name, seed=args.seed) for right in (True, False)]
    for name in ("sgd", "adamw")
}
table(
    "order_and_loss",
    ["optimizer", "loss, unscale then clip", "loss, clip then unscale"],
    [[name, *(about(lab.end(rows)) for rows in both)] for name, both in orders.items()],
)
right, wrong = map(lab.end, orders["sgd"])
claim(wrong > 2 * right, "SGD in the wrong order: more than twice the loss")
right, wrong = map(lab.end, orders["adamw"])
claim(wrong < 1.5 * right, "AdamW divides by the gradient's size, and so hides the mistake")

# %% [markdown]
# The logged norm is the sign to trust: it must not change when the factor does. By that the doctor knows it, from AdamW's log too:

# %%
doctor(diagnose(orders["adamw"][1]), "norm_follows_scale")

# %% [markdown]
# Second mistake: a skip path without `update()`. This loop checks its gradients itself and skips. Predict: how many of its
# 20 steps will be taken?

# %%
my_guess = ""


# %%
def no_update_on_skip(unscale_before_check):
    model = tiny_mlp(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    rows = []
    for x, y in sensor_batches(20, args.seed):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if unscale_before_check:
            scaler.unscale_(optimizer)
        skipped = has_non_finite_grad(model)
        rows.append((loss.item(), scaler.get_scale(), skipped))
        if skipped:
            continue  # no scaler.update()
        scaler.step(optimizer)
        scaler.update()
    return rows


# %%
losses, factors, skipped = zip(*no_update_on_skip(False), strict=True)
print(f"{skipped.count(False)} of 20 steps taken, factor 2**20 -> {factors[-1]:.0f}")
claim(
    all(skipped) and set(factors) == {2.0**20},
    "no update(): the factor never changes, no step is taken",
)
doctor(diagnose(as_log(loss=losses, scale=factors, skipped=skipped)), "scale_never_moves")

# %%
try:
    no_update_on_skip(unscale_before_check=True)
    message = "nothing was raised"
except RuntimeError as error:
    message = str(error)
say(f"unscaling first: {message}")
claim(
    "already been called" in message,
    "unscale_ before the check: torch stops the next step",
)

# %% [markdown]
# ## 3. By hand
#
# The clip is five lines: one norm over everything, one factor for everything, and nothing at all when the norm is small.


# %%
@torch.no_grad()
def clip_by_hand(parameters, max_norm=1.0):
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = float(torch.stack([g.norm() for g in grads]).norm())
    if norm > max_norm:
        for g in grads:
            g *= max_norm / (norm + 1e-12)
    return norm, min(norm, max_norm)


# %%
clipped, norms = train(clip_by_hand)
usual = sorted(norms)[len(norms) // 2]
print(f"usual norm {about(usual)}, norm of the bad batch {about(norms[29])}")
claim(
    norms[29] > 50 * usual, "the bad batch's gradient was at least 50 times the usual one"
)
claim(
    max(clipped[30:]) < 1.4 * clipped[28],
    "with the clip the loss stays within 1.4 times what it was",
)
found = diagnose(as_log(loss=clipped, grad_norm=norms))
claim(found[0].rule == "healthy", "and the doctor finds nothing in its log")

# %%
show(
    lab.spike_figure({"no clip": naive, "clip at 1.0": clipped}),
    "spike",
    alt="Loss over 60 steps. Both curves fall until the bad batch at step 30. Without a"
    " clip the loss then jumps by a factor of ten or more and stays there; with a "
    "clip at 1.0 it goes on falling.",
)

# %% [markdown]
# "But I use Adam, which divides by the gradient's size." It does, so there is no wall. But its running average of squares
# remembers the spike for hundreds of steps, and the steps stay wrong for as long:

# %%
adam = {tau: lab.spike_run(tau, optimizer="adamw", seed=args.seed)[0] for tau in (0, 1.0)}
ends = {tau: lab.spike_summary(losses)[2] for tau, losses in adam.items()}
print(f"AdamW, no clip:     mean loss of the last ten steps {about(ends[0], 3)}")
print(f"AdamW, clip at 1.0: mean loss of the last ten steps {about(ends[1.0], 3)}")
claim(ends[1.0] < ends[0], "AdamW, too, ends lower with the clip")

# %% [markdown]
# The safe float16 step is fifteen lines. Two checks, two different skips: a loss that is not finite is no fault of the factor,
# so the scaler is not told; a gradient that is not finite is, so `update()` must hear of it.


# %%
def safe_steps(batches):
    model = tiny_mlp(args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.01, fused=True
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=4)
    story = []
    for x, y in batches:
        scale = scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        if not loss.isfinite():
            story.append((scale, "non_finite_loss"))
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        overflow = has_non_finite_grad(model)
        clip_by_hand(model.parameters())
        scaler.step(optimizer)  # left out if unscale_ saw an Inf
        scaler.update()
        story.append((scale, "non_finite_grad" if overflow else None))
    return model, story


# %%
batches = list(sensor_batches(args.num_steps, args.seed, inf_at=12))
hand_model, hand_story = safe_steps(batches)
print(
    "factor as a power of two:",
    *[int(scale).bit_length() - 1 for scale, _ in hand_story[:20]],
)
claim(
    all(p.isfinite().all() for p in hand_model.parameters()),
    "every weight is finite after the last step",
)

# %% [markdown]
# ## 4. The package
#
# The same run through `AmpTrainState`. Each attempt gives a row: STEP, or SKIP with its reason. In batch 12 a sensor reads
# Inf, so the loss itself is not finite. Before you look: where will the factor halve, where double, where stay?

# %%
my_guess = ""

# %%
state = AmpTrainState(
    tiny_mlp(args.seed),
    lr=1e-2,
    amp_dtype=torch.float16,
    init_scale=2.0**19,
    growth_interval=4,
)
for x, y in batches:
    print(state.step(x, y))

# %%
story = [(row.scale, row.skip_reason) for row in state.log]
gap = lab.largest_gap(state.model, hand_model)
claim(
    story == hand_story, "package and hand version agree on every factor, skip and reason"
)
claim(gap < 1e-5, "and on every weight, within 1e-5")

# %%
after = list(pairwise(state.log))
halved = [b.scale == a.scale / 2 for a, b in after if a.skip_reason == "non_finite_grad"]
kept = [b.scale == a.scale for a, b in after if a.skip_reason == "non_finite_loss"]
grown = [b.scale == a.scale * 2 for a, b in after if not a.skipped and b.scale != a.scale]
claim(state.log[0].skipped, "the first attempt overflowed and was skipped")
if args.num_steps >= 13:
    claim(all(halved) and halved, "each overflow halved the factor")
    claim(all(grown) and grown, "four clean steps in a row doubled it")
    claim(kept == [True], "the infinite loss was skipped, and the factor stayed as it was")
else:
    not_shown("--num-steps 13 or more")

# %%
show(
    lab.scale_figure(state.log),
    "scale",
    alt="Scaling factor over the steps, on a log scale. It halves after every SKIP for "
    "non_finite_grad, doubles after four clean steps, and stays level after the one"
    " SKIP for non_finite_loss at step 12.",
)

# %% [markdown]
# You may have read that the factor "halves on every skip". The diamond says otherwise: halving there would have thrown away
# range for a fault that no factor can cure.
#
# On a CPU, `AmpTrainState` would have chosen bfloat16, and then there is no scaler at all: bfloat16 reaches as far as float32.
# And the parts must be on one device:

# %%
default = AmpTrainState(tiny_mlp(args.seed))
print(
    "default on the CPU:",
    default.amp_dtype,
    "| scaler on:",
    default.scaler.is_enabled(),
    "| scale:",
    default.scale,
)
try:
    AmpTrainState(tiny_mlp(args.seed), device_type="cuda")
except ValueError as error:
    print("refused:", error)

# %% [markdown]
# ### The guard behind the clip
#
# After the clip, `AmpTrainState` also refuses a step whose largest gradient element is above `inf_post_clip_threshold` (10 by
# default). Predict: for which pairs can that ever happen? Here is the bad batch again, finite and far too large:

# %%
my_guess = ""

# %%
pairs = [(1.0, 10.0), (1.0, 1.0), (1.0, 0.1), (100.0, 10.0), (0.0, 10.0), (0.0, 0.0)]
judged = {pair: lab.guard_run(*pair, seed=args.seed) for pair in pairs}
table(
    "post_clip_guard",
    ["max_norm", "threshold", "largest element", "verdict"],
    [
        [f"{tau:g}", f"{limit:g}", about(j.largest), j.row.skip_reason or "STEP"]
        for (tau, limit), j in judged.items()
    ],
)
within = [j.largest <= tau * 1.001 for (tau, _), j in judged.items() if tau > 0]
fired = [pair for pair, j in judged.items() if j.row.skipped]
claim(all(within), "after a clip to max_norm no element is larger than max_norm")
claim(
    fired == [(1.0, 0.1), (100.0, 10.0), (0.0, 10.0)],
    "it fires only below max_norm, or without a clip",
)

# %% [markdown]
# No element is larger than the norm of all of them. With a threshold at or above `max_norm` the guard is idle, and that is
# fine. With `max_norm=0`, which means no clipping, it is the only belt you wear.
#
# ### When skipping is no longer the cure
#
# Now one of the 16 inputs is a raw count of visitors: often 20, at times 100,000. Predict: what share of 60 steps will float16
# skip, and what share bfloat16?

# %%
my_guess = ""

# %%
runs = {
    "float16, raw counts": lab.visitor_run(torch.float16, seed=args.seed),
    "bfloat16, raw counts": lab.visitor_run(torch.bfloat16, seed=args.seed),
    "float16, log counts": lab.visitor_run(torch.float16, unit="log", seed=args.seed),
}
for label, (log, _) in runs.items():
    print(f"{label:21s} {lab.skip_line(log)}")
raw, alerts = runs["float16, raw counts"]
say("The alert: " + " ".join(alerts))

# %%
counts = lab.reasons(raw)
quiet = [not alerts for _, alerts in list(runs.values())[1:]]
claim(min(counts.values()) > 0 and len(counts) == 2, "gradients overflowed, and losses too")
claim(raw[-1].scale == 1.0, "the factor went down to its floor of 1, and it did not help")
claim(len(alerts) == 1, "the skip rate over 20 steps rose above 5%, and one alert said so")
claim(all(quiet), "bfloat16 on the same counts, and float16 on their logs, raised none")
doctor(diagnose(raw), "skip_rate")

# %%
rates = {
    label: rolling_skip_rate(log, window=20)
    for label, (log, _) in runs.items()
    if "raw" in label
}
show(
    lab.skip_rate_figure(rates, [row.step for row in raw if row.skipped], limit=0.05),
    "skip_rate",
    alt="Share of skipped steps among the last 20, over 60 steps. float16 starts near "
    "100 percent and stays far above the 5 percent line, with SKIP marks along the "
    "foot; bfloat16 stays at 0.",
)

# %% [markdown]
# A few skips mean that the scaler is at work. Many mean that the values themselves are past 65,504, and that is for you to
# mend: the logarithms of the same counts gave nothing to skip.
#
# ### bfloat16 beside float16
#
# Range is half of the story. Both formats have 16 bits, so what one spends on range it lacks in digits:

# %%
errors = {d: lab.gradient_error(d, args.seed) for d in dtypes}
final = {d: lab.final_loss(d, steps=100, seed=args.seed) for d in dtypes}
table(
    "formats_trained",
    ["format", "gradient error", "loss after 100 steps"],
    [[str(d).split(".")[1], about(errors[d]), about(final[d], 3)] for d in dtypes],
)
ratio = errors[torch.bfloat16] / errors[torch.float16]
spread = max(final.values()) / min(final.values())
claim(5 < ratio < 12, "bfloat16's error is about 8 times float16's: it has 3 bits fewer")
claim(spread < 1.05, "all three end within 5% of the same loss")

# %% [markdown]
# ## 5. What it costs
#
# On a GPU, each time Python asks a tensor for its value, the GPU's queue runs dry. So these are counted, not timed. So is how
# often the guard goes over all gradients. Predict: how many reads does the plain recipe below need, for a model of 4 tensors?

# %%
my_guess = ""

# %%
from support.counting import activation_bytes, gradient_passes, host_reads


def plain_recipe(model, max_norm):
    if any(not p.grad.isfinite().all() for p in model.parameters()):
        return
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    float(norm)


def with_gradients():
    model = tiny_mlp(args.seed)
    F.mse_loss(model(x1), y1).backward()
    return model


# %%
model = with_gradients()
reads = {
    "plain recipe, the gradients alone": host_reads(lambda: plain_recipe(model, 1e9)),
    "ours, 3 micro-batches, each loss looked at first": lab.window_reads(True, 3),
    "ours, 3 micro-batches, losses read with the norm": lab.window_reads(False, 3),
}
table("host_reads", ["one step", "host reads"], reads.items())
claim(list(reads.values()) == [5, 4, 1], "1 read per step, and 1 more per loss looked at")

# %%
passes = []
for label, limit in (("no clip is due", 1e9), ("a clip is due", 1e-3)):
    counts = []
    for guard in (plain_recipe, clip_global_l2_norm):
        model = with_gradients()
        counts.append(round(gradient_passes(model, lambda: guard(model, limit))))
    passes.append([label, *counts])
table("gradient_passes", ["passes over all gradients", "plain recipe", "ours"], passes)
claim(
    [ours for _, _, ours in passes] == [1, 2],
    "one pass gives finiteness and norm; a clip adds one",
)
claim(all(plain > ours for _, plain, ours in passes), "the plain recipe takes more")

# %% [markdown]
# And what autocast saves: the bytes that autograd keeps between forward and backward, each block of memory counted once, the
# weights left out. The rule of thumb says half. Predict: more than that, or less?

# %%
my_guess = ""

# %%
from safetrain_core import MiniGPT, MiniGPTConfig

gpt = MiniGPT(MiniGPTConfig(vocab_size=96, context=64, layers=2, heads=4, width=32))
ids = torch.randint(96, (16, 64))
kept = {}
for dtype in (torch.float32, torch.bfloat16):
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        kept[dtype] = activation_bytes(gpt, lambda: next_token_loss(gpt(ids), ids))
wide, narrow = (sum(by_dtype.values()) for by_dtype in kept.values())
still_wide = kept[torch.bfloat16][torch.float32] / narrow
print(f"float32  {about(wide / 1e6, 3)} MB kept for the backward pass")
print(
    f"autocast {about(narrow / 1e6, 3)} MB, of which {about(100 * still_wide)}% is float32"
)
claim(0.5 < narrow / wide < 0.75, "autocast saves a quarter to a half, less than half")
claim(still_wide > 0.2, "layer norms, the residual stream and the loss stay in float32")

# %% [markdown]
# ## 6. Turn the knob
#
# How far can you raise the threshold until the bad batch gets through? And what does a threshold do that is far too low?

# %%
grid = {tau: lab.spike_run(tau, seed=args.seed)[0] for tau in (0.01, 1.0, 100.0, 0)}
seen = {tau: lab.spike_summary(losses) for tau, losses in grid.items()}
table(
    "thresholds",
    ["max_norm", "loss at step 29", "worst after the bad batch", "mean of the last ten"],
    [[tau or "no clip", *(about(v, 3) for v in values)] for tau, values in seen.items()],
)
claim(seen[0.01][0] > seen[1.0][0], "a clip at 0.01 makes learning slow, bad batch or not")
claim(seen[100.0][1] > 3 * seen[1.0][1], "a clip at 100 lets the bad batch through")

# %%
picture, text = lab.spike_picture(max_norm=1.0, weight=512, seed=args.seed)
show(picture, "knob_clip", alt=text)

# %% tags=["nbval-ignore-output"]
_ = knob(
    lambda max_norm, weight: lab.spike_picture(max_norm, weight, args.seed),
    max_norm=slider(
        "clip threshold",
        [("none", 0), *((str(v), v) for v in (0.01, 0.1, 1.0, 10.0, 100.0))],
        1.0,
    ),
    weight=slider(
        "bad batch is too large by", [(str(v), v) for v in (1, 8, 64, 512, 4096)], 512
    ),
)

# %% [markdown]
# And the scaler, over 40 steps. Make the growth interval 1: what does the skip rate become?

# %%
picture, text = lab.scale_picture(init_exponent=19, growth_interval=4, seed=args.seed)
show(picture, "knob_scaler", alt=text)

# %% tags=["nbval-ignore-output"]
_ = knob(
    lambda start, interval: lab.scale_picture(start, interval, args.seed),
    start=slider("first factor, 2 to the", [(str(v), v) for v in (4, 10, 16, 19, 22)], 19),
    interval=slider(
        "growth interval, steps", [(str(v), v) for v in (1, 2, 4, 8, 16, 2000)], 4
    ),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. A clip of your own
#
# Write `clip(grads, max_norm)`: it changes a list of tensors in place, and returns the norm before and the norm after.

# %% tags=["exercise"]
from support.checks_01 import check_clip, check_loop, check_next_scale


def clip(grads, max_norm):
    return 0.0, 0.0  # your lines here


say(check_clip(clip))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# One number for all tensors: the square root of the sum of all squares.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `g.mul_(factor)` changes a tensor in place. When must the factor be 1?
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def clip(grads, max_norm):
#     norm = sum(float(g.square().sum()) for g in grads) ** 0.5
#     if norm > max_norm:
#         for g in grads:
#             g.mul_(max_norm / norm)
#     return norm, min(norm, max_norm)
# ```
#
# </details>

# %% [markdown]
# ### B. The scaler's rule
#
# Write what the scaling factor becomes after one attempt. `clean` is how many good steps in a row are behind it, and `reason` is
# None for a good step, or why it was skipped. The factor doubles after `growth_interval` good steps in a row.


# %% tags=["exercise"]
def next_scale(scale, clean, reason, growth_interval):
    return (
        scale if reason is None else scale / 2
    ), clean + 1  # the usual one-line rule: mend it


say(check_next_scale(next_scale))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which of the two marks in the picture of section 4 was followed by a lower factor?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Four cases: an overflow; any other skip, which tells nothing about the factor; the last good step of a stretch; any other good step. Each returns a pair.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def next_scale(scale, clean, reason, growth_interval):
#     if reason == "non_finite_grad":
#         return scale / 2, 0
#     if reason is not None:
#         return scale, clean
#     if clean + 1 == growth_interval:
#         return scale * 2, 0
#     return scale, clean + 1
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a loop
#
# This one came with a bug report: "no error, no NaN, and it does not learn." It has four faults, all of them from this
# lesson. It must return one row `(norm, scale, skipped)` per batch, with the norm as it is before the clip.


# %% tags=["exercise"]
def loop(model, optimizer, scaler, batches):
    rows = []
    for x, y in batches:
        scale = scaler.get_scale()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        norm, _ = clip_global_l2_norm(model, max_norm=1.0)
        if has_non_finite_grad(model):
            rows.append((norm, scale, True))
            continue
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rows.append((norm, scale, False))
    return rows


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Follow a batch that overflows, line by line. What does the next batch find in `p.grad`, and what factor does it use?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Write the order down first: clear, forward, look at the loss, scaled backward, unscale, norm and clip, step, update. Then ask
# which of these a skipped batch may leave out.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(model, optimizer, scaler, batches):
#     rows = []
#     for x, y in batches:
#         scale = scaler.get_scale()
#         optimizer.zero_grad()
#         with torch.autocast("cpu", dtype=torch.float16):
#             loss = F.mse_loss(model(x), y)
#         if not loss.isfinite():
#             rows.append((float("nan"), scale, True))
#             continue
#         scaler.scale(loss).backward()
#         scaler.unscale_(optimizer)
#         skipped = has_non_finite_grad(model)
#         norm, _ = clip_global_l2_norm(model, max_norm=1.0)
#         scaler.step(optimizer)
#         scaler.update()
#         rows.append((norm, scale, skipped))
#     return rows
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. A row says `SKIP ... scale=65536.0 reason=non_finite_loss`. Which factor does the next row show?**
#
# <details><summary>A. 32768, since the step was skipped</summary>
#
# No. Halving follows an overflow of the scaled gradients. Here the loss was bad before any factor touched it.
#
# </details>
# <details><summary>B. 65536, since no gradient was ever made</summary>
#
# Right. The factor had no part in it, and lowering it would cost small gradients for nothing.
#
# </details>
# <details><summary>C. 131072, if the stretch before it was clean</summary>
#
# No. A skipped step does not count as clean, so it cannot complete a stretch.
#
# </details>

# %% [markdown]
# **2. The logged norm is 81,920 on one day and 40,960 after the factor halved. What is wrong?**
#
# <details><summary>A. The clip and its norm come before unscale_</summary>
#
# Right. A true norm knows nothing of the factor. These two divided by their factors are the same number.
#
# </details>
# <details><summary>B. The learning rate is too high by far</summary>
#
# No. That would show in the loss, and it would not follow the factor so exactly.
#
# </details>
# <details><summary>C. The scaler halves too late after overflow</summary>
#
# No. It halved when it should. A norm that halves with it is the fault.
#
# </details>

# %% [markdown]
# **3. `max_norm=1.0` and `inf_post_clip_threshold=10`. Which gradient trips the guard behind the clip?**
#
# <details><summary>A. One element of 1e6 among millions of small ones</summary>
#
# No. The clip brings that element down to about 1, with all the others.
#
# </details>
# <details><summary>B. A norm of 11 or more, before it is clipped</summary>
#
# No. The guard looks after the clip, and at the largest element.
#
# </details>
# <details><summary>C. An Inf somewhere in the last layer's bias</summary>
#
# No. Its norm is not finite, so the step is refused earlier, as `non_finite_grad`.
#
# </details>
# <details><summary>D. No finite one: after the clip none is above 1</summary>
#
# Right. An element cannot be larger than the norm of all. Here the threshold would have to be below 1.
#
# </details>

# %% [markdown]
# **4. A float16 run skips a third of its steps, and the factor has been at 1 for an hour. What helps?**
#
# <details><summary>A. A longer growth interval, so that it grows less often</summary>
#
# No. It does not grow at all any more. The values overflow without any scaling.
#
# </details>
# <details><summary>B. A lower clip threshold, so that gradients are smaller</summary>
#
# No. The clip comes after the overflow, and it cannot bring back an Inf.
#
# </details>
# <details><summary>C. Inputs in smaller units, or bfloat16 in place of float16</summary>
#
# Right. The first makes the values fit, the second has the range to hold them.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import AmpTrainState, rolling_skip_rate, save_checkpoint
#
# # float16 with a scaler; on the CPU, bfloat16 without one
# state = AmpTrainState(model, lr=3e-4, device_type="cuda")
# for inputs, targets in loader:
#     row = state.step(inputs, targets)
#     print(row)  # STEP ..., or SKIP ... with its reason
# # above 0.05: look at the reasons in state.skip_log
# print(rolling_skip_rate(state.log)[-1])
# save_checkpoint(
#     model, state.optimizer, None, state.counters, "runs/mine.pt", scaler=state.scaler
# )
# ```
#
# **The rule.** Look at the loss; backward; unscale; one norm; clip; step; update. A skip leaves out the step and nothing else.
#
# **The knobs,** by their names in a `TrainConfig`: `grad_clip_max_norm: 1.0` to begin with, `inf_post_clip_threshold: 10` as the
# second belt, `use_amp`, `amp_dtype`, `skip_rate_alert: 0.05`.
#
# **In a loop of your own,** autocast on the device that the optimizer's weights are on, and refuse what cannot work by
# `raise ValueError`: `python -O` strips every `assert`.
#
# **Where it is.** `safetrain_core/step/gradients.py` (norm, clip), `safetrain_core/step/amp.py` (the order, the scaler),
# `safetrain_core/records.py` (rows, reasons, skip rate).
#
# **Sources.** Pascanu et al. 2013, [On the difficulty of training recurrent neural networks](https://arxiv.org/abs/1211.5063) (the clip);
# Micikevicius et al. 2018, [Mixed precision training](https://arxiv.org/abs/1710.03740) (loss scaling);
# PyTorch, [AMP examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html) (unscale before the clip).

# %%
finish()
