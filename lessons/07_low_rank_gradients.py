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
# # 07 · Low-rank gradients
#
# **How small can optimizer state get?**
#
# You will be able to
#
# - measure how much of a gradient lies in a few directions, and for how many updates these directions hold;
# - write GaLore for one matrix, and say what goes into the small space and what comes back;
# - predict the bytes of an optimizer's state before training, and see where a rank is too high to save any;
# - choose rank, interval and learning rate, and leave the embeddings out;
# - tell when it does not pay, which on a laptop is nearly always.
#
# 30 minutes; the computing takes about half a minute on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/07_low_rank_gradients.py --num-steps 150`.
#
# <!-- nav -->
#
# Previous: [Thermal guard](06_thermal_guard.ipynb) · Next: [The whole run, on four ranks](08_distributed_run.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# It settles none of the symptoms in [lesson 00](00_start_here.ipynb): what it is about shows neither in a loss nor in a file.
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
)

args = lesson_args(
    "07_low_rank_gradients",
    num_steps=whole(150, at_least=12, at_most=400, help="updates of each run"),
)

# %%
from functools import partial

import torch
from safetrain_core import (
    AmpTrainState,
    GaLore,
    clip_global_l2_norm,
    next_token_loss,
    predict_state_bytes,
    probe_memory,
    probe_skip_leaves_state_untouched,
)

from support import low_rank as lab
from support.counting import calls_of
from support.knobs import slider
from support.toy import text_batches

# These matrices are so small that threads wait for each other longer than they compute:
# with two of them, on a busy machine, an SVD took 20 times as long.
torch.set_num_threads(1)
LONG = args.num_steps >= 120  # below that, losses say little
runs = partial(lab.run, steps=args.num_steps, seed=args.seed)

# %% [markdown]
# ## 1. Predict
#
# AdamW keeps two numbers for each weight: the mean of its gradient and the mean of its square. So a model that fits on your GPU may end at the
# first `optimizer.step()`, where this state is made. Now, the gradient of a 64 x 256 weight has 64 singular directions. How
# many of them hold 90 % of its energy, the sum of the squares of its entries? In the first update, and late in the run? One line;
# nobody grades it.

# %%
my_guess = ""  # for example: "about 50, always"

# %% [markdown]
# ## 2. Break it
#
# ### What there is to save

# %%
model = lab.gpt(args.seed)
weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
state_bytes, _ = lab.state_bytes(lab.ADAMW, seed=args.seed)
print(
    f"weights {about(weight_bytes / 1e3, 3)} kB, AdamW's state {about(state_bytes / 1e3, 3)} kB"
)
claim(abs(state_bytes / weight_bytes - 2) < 0.01, "AdamW keeps twice the weights' bytes")

# %% [markdown]
# Say there is room for three times the weights. Weights and gradients fit, and one short text's activations too. The doctor counts your step:


# %%
def step(run, micro_batches):
    model, optimizer = run
    optimizer.zero_grad()
    for x, y in micro_batches:
        (next_token_loss(model(x), y) / len(micro_batches)).backward()
    optimizer.step()


def with_adamw():
    model = lab.gpt(args.seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.002)


room, one_text = 3 * weight_bytes, list(text_batches(1, args.seed, 1))
doctor(probe_memory(step, with_adamw, one_text, limit_bytes=room), "weights_do_not_fit")

# %% [markdown]
# ### Are gradients low-rank?
#
# A MiniGPT of width 64 trains on the sources of Python's standard library, 16 windows of 32 characters in each batch, and keeps the
# gradients of its updates. A 64 x 256 matrix of pure noise stands beside them.

# %%
gradients = lab.recorded(args.num_steps, args.seed)
first, last = (lab.by_kind(gradients[u]) for u in (0, args.num_steps - 1))
noise = lab.noise_shares(args.seed)


def percent(*curves):
    return [about(100 * float(curve[r - 1])) for curve in curves for r in (1, 4, 16)]


table(
    "spectrum",
    ["energy (%) in the leading", "1", "4", "16", "late: 1", "4", "16"],
    [[kind, *percent(first[kind], last[kind])] for kind in first]
    + [["noise", *percent(noise, noise)]],
)
claim(all(s[0] > 0.8 for s in first.values()), "at first, one direction holds over 80%")
claim(noise[3] < 0.2, "of noise, 4 directions hold less than 20%")
claim(all(s[15] > 0.9 for s in last.values()), "late, 16 of 64 still hold over 90%")
if LONG:
    claim(all(last[k][3] < first[k][3] for k in first), "but 4 hold less than at first")
    claim(all(s[0] < 0.9 for s in last.values()), "and one alone less than 90%, everywhere")
else:
    not_shown("--num-steps 120 or more")

# %%
show(
    lab.spectrum_figure(
        {
            "first update, MLP down": first["MLP, down"],
            "last update, MLP down": last["MLP, down"],
            "last update, attention in": last["attention, in"],
            "noise of the same shape": noise,
        }
    ),
    "spectrum",
    alt="Share of a gradient's energy over the number of directions kept, on a log scale. At "
    "the first update one direction of 64 holds nearly all. At the last update it takes "
    "4 to 8 for nine tenths. Noise rises slowly and needs nearly all 64.",
)

# %% [markdown]
# At the first update the model says the same for every input, and all tokens pull one way: the common characters up. Later they pull in
# several. Full rank, in the strict sense, it always is; it is the energy that sits in a few directions.
#
# But that was each gradient in its own best directions. Training uses them for gradients that come later. Predict: of the next
# batch's gradient, how much lies in the 4 best directions of this one?

# %%
my_guess = ""

# %%
ages = {r: lab.ageing(args.num_steps, args.seed, r) for r in (4, 8)}
table(
    "ageing",
    ["age (updates)", "rank 4 holds (%)", "rank 8 holds (%)"],
    [[age, about(100 * ages[4][age]), about(100 * ages[8][age])] for age in ages[4]],
)
if LONG:
    claim(ages[4][0] > 0.7, "a basis of rank 4 holds over 70% of the gradient it is from")
    claim(ages[4][1] < ages[4][0] - 0.1, "of the very next one over 10 points less")
    claim(ages[4][1] - ages[4][20] < 0.2, "the next 19 updates take less than 20 more")
    claim(ages[4][20] > 0.25, "which is still 4 times what random directions hold, 6%")
else:
    not_shown("--num-steps 120 or more")

# %%
show(
    lab.ageing_figure(ages),
    "ageing",
    alt="Share of a gradient's energy inside a basis over the basis's age. For its own "
    "gradient it is over 90 per cent. At age one it falls, at rank 4 to about 60 per cent, and "
    "then it stays nearly level up to 50 updates, far above what a random basis holds.",
)

# %% [markdown]
# Much of what one gradient shows is its own batch's noise, and gone with it. What is left lasts long. Both matter below.
#
# ### First try: a low-rank gradient for AdamW
#
# Cut the gradient down to rank 4 and hand it to AdamW, `weight.grad = P @ (P.T @ grad)`. Predict: how many bytes does that
# save, and of which rank is AdamW's step?

# %%
my_guess = ""

# %%
gradient = gradients[args.num_steps - 1][lab.WATCHED]
held, of_gradient, of_step = lab.low_rank_but_whole(gradient, rank=4)
print(
    f"state {held:,} bytes, rank of the gradient {of_gradient}, of AdamW's step {of_step}"
)
claim(held == 2 * gradient.numel() * 4 + 4, "state as large as without it: nothing saved")
claim(of_gradient == 4 and of_step > 40, "and the step has a rank ten times as high")

# %% [markdown]
# A matrix of rank 4 written out in full is as large as any other, and so are its moments. AdamW divides entry by entry, which does not
# keep a rank. The moments themselves have to live in the small space: a **proxy** of shape 4 x 256 with the gradient $P^T G$,
# stepped by the optimizer, and its change multiplied by $P$ on the way back.
#
# ### Second try: a proxy of zeros
#
# What value has the proxy? AdamW does not look, so zeros do. Adafactor does look: its step is a share of the weight's size. Predict:
# what does it make of zeros?

# %%
my_guess = ""

# %%
shorter = {size: lab.step_ratio(size, seed=args.seed) for size in (0.02, 1.0)}
for size, times in shorter.items():
    print(f"weights of size {size:g}: Adafactor's step is {times:.0f} times too short")
claim(abs(shorter[0.02] / 20 - 1) < 0.1, "at the size that MiniGPT starts with: 20 times")
claim(abs(shorter[1.0] / 1000 - 1) < 0.1, "at size 1: a thousand times")
by_hand = {
    "proxy of zeros": lab.adafactor_by_hand(
        empty=True, steps=args.num_steps, seed=args.seed
    ),
    "proxy holds the projected weight": lab.adafactor_by_hand(
        empty=False, steps=args.num_steps, seed=args.seed
    ),
}
if LONG:
    zeros, holds = (sum(losses[-20:]) / 20 for losses in by_hand.values())
    claim(zeros > holds + 0.04, "and it trains worse, by over 0.04 nats per token")
else:
    not_shown("--num-steps 120 or more")

# %%
show(
    lab.loss_figure(
        by_hand,
        "Around Adafactor, a proxy of zeros leaves the blocks behind",
        steps=args.num_steps,
    ),
    "empty_proxy",
    alt="Loss over updates of GaLore around Adafactor. With a proxy of zeros the curve lies "
    "above the one whose proxy holds the projected weight, all the way.",
)

# %% [markdown]
# Nothing fails, nothing warns, and the loss falls: the embeddings, norms and biases, stepped by AdamW in both runs, see to that.
# Adafactor falls back on its floor of 0.001 for the size of a weight. So the proxy has to hold $P^T W$.
#
# ### Third try: every matrix
#
# An embedding is a matrix too. Predict: what does projecting it cost, at rank 4?

# %%
my_guess = ""

# %%
plain, left_out, too = runs(), runs(4), runs(4, embeddings_too=True)
for label, one in (("AdamW", plain), ("blocks", left_out), ("embeddings too", too)):
    print(f"{label}: ends at {about(one.end, 4)} nats per token")
if LONG:
    claim(
        too.end > left_out.end + 0.05, "projecting the embeddings too costs over 0.05 nats"
    )
else:
    not_shown("--num-steps 120 or more")

# %% [markdown]
# A row of the embedding is one character's vector, and now all characters may move in the same 4 directions only, those that suit the
# common ones. No learning rate from 0.01 to 0.16 mended it. From here on, embeddings stay out.
#
# ## 3. By hand
#
# GaLore around Adam, for one matrix with no more rows than columns:


# %%
def galore_step(W, G, s, lr=0.01, rank=4, interval=20, scale=0.25):
    if s["t"] % interval == 0:
        s["P"] = torch.linalg.svd(G, full_matrices=False).U[:, :rank]
    s["t"] += 1
    R = s["P"].T @ G  # the gradient in the small space: rank x columns
    s["m"] = 0.9 * s["m"] + 0.1 * R
    s["v"] = 0.999 * s["v"] + 0.001 * R**2
    m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
    W -= lr * scale * s["P"] @ (m / (v.sqrt() + 1e-8))  # and back


# %% [markdown]
# ## 4. The package
#
# `GaLore` wraps any optimizer of torch: it gets a function that makes one, and hands it proxies. Both step one weight with the same real
# gradients, over three bases:

# %%
seen = [g["blocks.1.attention.out.weight"] for u, g in sorted(gradients.items()) if u > 0]
interval = -(-len(seen) // 3)
by_hand_weight, weight = torch.zeros(64, 64), torch.nn.Parameter(torch.zeros(64, 64))
galore = GaLore(
    [weight],
    lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0),
    rank=4,
    update_interval=interval,
)
s = {"t": 0, "m": 0.0, "v": 0.0}
for G in seen:
    galore_step(by_hand_weight, G, s, interval=interval)
    weight.grad = G.clone()
    galore.step()
gap = float((weight.detach() - by_hand_weight).abs().max())
moments = galore.state[weight]["inner"]
print("basis", tuple(galore.state[weight]["projector"].shape), end=", ")
print("moments", tuple(moments["exp_avg"].shape))
claim(gap < 1e-5, "the package's weight equals the hand version's to 1e-5")
claim(bool(galore.state[weight]["projector"].equal(s["P"])), "and has the same basis")

# %% [markdown]
# ### How long is its step?
#
# Adam makes each entry of its first step as large as the learning rate, whatever the gradient. Predict: how long is GaLore's first
# step, beside AdamW's, at rank 4 of 64 and scale 1/4?

# %%
my_guess = ""

# %%
whole_step = lab.first_step(seen[-1], None)
ratios = {r: lab.first_step(seen[-1], r) / whole_step for r in (1, 4, 16)}
for r, ratio in ratios.items():
    print(f"rank {r:2}: {ratio:.3f} of AdamW's step")
claim(
    all(abs(ratio / (0.25 * (r / 64) ** 0.5) - 1) < 0.02 for r, ratio in ratios.items()),
    "the step's length is scale x sqrt(rank / 64) of AdamW's",
)

# %% [markdown]
# That is why GaLore wants a larger learning rate: in this lesson 0.02 for the matrices, where AdamW has 0.002, each the best of four or three
# that were tried. Weights that are not projected do not get the scale: give them a group of their own.
#
# ### Full rank, and still another optimizer
#
# With all 64 directions, $P P^T$ is the identity: nothing is lost, the weight is only seen from another angle. Predict: do SGD
# with momentum and AdamW end where they end without it?

# %%
my_guess = ""

# %%
sgd = lab.rotation_gap(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), seed=args.seed)
adamw = lab.rotation_gap(
    lambda p: torch.optim.AdamW(p, lr=0.002, weight_decay=0.0), seed=args.seed
)
print(f"after 5 updates, off by (share of the way): SGD {about(sgd)}, AdamW {about(adamw)}")
claim(sgd < 1e-4, "SGD with momentum: the plain optimizer, but for rounding")
claim(adamw > 0.3, "AdamW: another one")

g = torch.tensor([3.0, 4.0])
P = torch.tensor([[1.0, -1.0], [1.0, 1.0]]) / 2**0.5  # axes turned by 45 degrees
print("Adam's first step along g = (3, 4):", torch.sign(g).tolist())
turned = P @ torch.sign(P.T @ g)
print(
    "the same in turned axes, seen from here:", [round(v, 2) + 0.0 for v in turned.tolist()]
)
claim(
    bool((turned - torch.tensor([0.0, 2**0.5])).abs().max() < 1e-5), "along one axis only"
)

# %% [markdown]
# SGD adds and multiplies by numbers, and that commutes with a rotation. Adam divides each entry by its own size, so it depends on the axes in
# which the entries are written. In GaLore these are the gradient's singular directions: a direction with little energy gets as long a step
# as the strongest. Hence the small ones count for more than their energy says, and rank is worth more than the spectrum promised.
#
# ### Clip, guard, accumulation, and a NaN at the wrong moment
#
# This loss takes the mean over the targets that are not padding, written as one often meets it. A batch whose targets are all padding
# makes it 0 / 0, and its gradients NaN. Predict: what does the hand version do with them when a new basis is due, and what between two bases?

# %%
my_guess = ""


# %%
def masked_mean(logits, y):
    valid = (y != -100).flatten()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), y.flatten().clamp(min=0), reduction="none"
    )
    return (each * valid).sum() / valid.sum()


def by_hand_meets_nan(t):
    model = lab.gpt(args.seed)
    x, y = next(text_batches(1, args.seed, 4))
    masked_mean(model(x), torch.full_like(y, -100)).backward()
    W = model.blocks[0].attention.out.weight
    s = {"t": t, "m": 0.0, "v": 0.0, "P": torch.eye(64, 4)}
    try:
        with torch.no_grad():
            galore_step(W, W.grad, s)
    except torch.linalg.LinAlgError:
        return "LinAlgError"
    return f"{int(W.isnan().sum())} of {W.numel()} weights are NaN"


# %%
due, between = by_hand_meets_nan(20), by_hand_meets_nan(21)
print(f"a new basis is due: {due}\nbetween two bases:  {between}")
claim(due == "LinAlgError", "the SVD of a NaN ends the run")
claim(between == "4096 of 4096 weights are NaN", "between bases it poisons every entry")

# %% [markdown]
# Does the package's `GaLore` help, in the loop of section 2? The doctor plants a NaN:


# %%
def with_galore():
    model = lab.gpt(args.seed)
    tables = lab.embeddings(model)
    return model, GaLore(lab.groups(model), lab.ADAMW, rank=4, exclude=tables)


(batch,) = text_batches(1, args.seed, 4)
found = probe_skip_leaves_state_untouched(step, with_galore, batch)
doctor(found, "nan_reaches_weights")

# %% [markdown]
# `GaLore` refuses such a gradient where it would take a basis of it, before anything is changed. It is `AmpTrainState` that looks at every step, and it
# looks at the **full** gradients, before they are projected. Each window here is four micro-batches, a basis is due at updates 0, 4 and 8,
# and attempt 5, the one with the bad micro-batch, falls on the second:

# %%
model = lab.gpt(args.seed)
galore = GaLore(
    lab.groups(model),
    lambda groups: torch.optim.AdamW(groups, lr=0.02, fused=True),
    rank=4,
    update_interval=4,
    exclude=lab.embeddings(model),
)
guard = AmpTrainState(model, optimizer=galore, loss_fn=masked_mean, amp_dtype=torch.float32)


def full_norm(window):
    model.zero_grad()
    for x, y in window:
        (masked_mean(model(x), y) / len(window)).backward()
    return clip_global_l2_norm(model, 1e30)[0]


# %%
svds, same_norm, untouched = [], [], False
for attempt in range(1, 11):
    window = list(text_batches(4, args.seed + attempt, 4))
    norm = full_norm(window)
    if attempt == 5:
        window[2] = (window[2][0], torch.full_like(window[2][1], -100))
        before = lab.snapshot(model, galore)
    rows = []
    svds.append(
        calls_of("aten::_linalg_svd", lambda: rows.append(guard.step_window(window)))
    )
    print(rows[0])
    if attempt == 5:
        untouched = lab.same(before, lab.snapshot(model, galore))
    else:
        same_norm.append(abs(rows[0].pre_clip / norm - 1) < 1e-3)

# %%
print("SVDs in each attempt:", svds)
claim(svds == [8, 0, 0, 0, 0, 8, 0, 0, 0, 8], "8 matrices: 8 SVDs per basis, not 8 x 4")
claim(guard.log[4].skip_reason == "non_finite_loss", "the bad window is skipped")
claim(untouched, "weights, bases and moments are bit for bit as before")
claim(all(same_norm), "the logged norm is that of the window's full gradient")

# %% [markdown]
# The due basis was taken one attempt later, from a sound gradient. One projection per update, however many micro-batches: their gradients are
# summed in full size first. A clip or a guard that saw only projected gradients would see what the picture of the ageing basis shows, about 60 % of
# the energy at rank 4, and a spike in the other directions would leave no row in the log.
#
# ## 5. What it costs
#
# ### Bytes
#
# Predict: at which rank of 64 does GaLore around AdamW keep as much as AdamW? And does it help Adafactor, which keeps a row and
# a column for each matrix?

# %%
my_guess = ""

# %%
GRID = (4, 8, 16, 32, 48, 60, 64)
counted = {("AdamW", None): lab.state_bytes(lab.ADAMW)}
counted |= {("AdamW", r): lab.state_bytes(lab.ADAMW, r) for r in GRID}
counted[("Adafactor", None)] = lab.state_bytes(lab.ADAFACTOR)
counted |= {("Adafactor", r): lab.state_bytes(lab.ADAFACTOR, r) for r in GRID}
model, (full, _) = lab.gpt(args.seed), counted["AdamW", None]
apollo = {r: lab.apollo_bytes(model, r) for r in (1, 8)}
rows = [
    [f"GaLore {r}, {name}" if r else name, about(a, 4), about(b, 4), about(a / full)]
    for (name, r), (a, b) in counted.items()
    if name == "AdamW" or r in (None, 4, 32)
]
rows += [
    [f"APOLLO, rank {r}", "-", about(size, 4), about(size / full)]
    for r, size in apollo.items()
]
table("state_bytes", ["optimizer", "counted", "predicted", "of AdamW's"], rows)
claim(all(a == b for a, b in counted.values()), "the prediction is the count, to the byte")
claim(counted["AdamW", 4][0] < 0.2 * full, "rank 4: less than a fifth of AdamW's state")
claim(
    counted["AdamW", 60][0] > full, "rank 60: more than AdamW's, for the bases are kept too"
)
claim(counted["AdamW", 64][0] == full, "rank 64: nothing is projected, and it is AdamW")
claim(
    all(counted["Adafactor", r][0] > counted["Adafactor", None][0] for r in GRID[:-1]),
    "around Adafactor, every rank keeps more than Adafactor alone",
)
claim(
    abs(apollo[8] / counted["AdamW", 8][0] - 1) < 0.01,
    "APOLLO keeps at rank 8 what GaLore around AdamW keeps, within 1%",
)

# %%
show(
    lab.bytes_figure(
        GRID,
        {
            "GaLore, AdamW": [counted["AdamW", r][0] / full for r in GRID],
            "AdamW alone": [1.0] * len(GRID),
            "GaLore, Adafactor": [counted["Adafactor", r][0] / full for r in GRID],
            "Adafactor alone": [counted["Adafactor", None][0] / full] * len(GRID),
        },
    ),
    "state_bytes",
    alt="State in multiples of AdamW's over the rank. GaLore around AdamW rises in a straight "
    "line and is above AdamW at rank 60; at 64 it is AdamW. GaLore around Adafactor rises "
    "from Adafactor's flat line near zero, and is above it at every rank but 64.",
)

# %%
found = probe_memory(step, with_galore, one_text, limit_bytes=room)
claim(not found, "rank 4: in the room of section 2, the doctor finds nothing")

# %% [markdown]
# For one m x n weight, m <= n, GaLore around AdamW keeps mr + 2nr numbers, and AdamW 2mn: a square weight saves only below r = 2n/3. Torch's
# Adafactor keeps m + n, and no basis is that small: combine the two where Adafactor has a first moment, which torch's has not.
# APOLLO, from its authors' package, projects at random and needs no SVD; its line is computed from the shapes, and what it keeps in small
# moments it uses to scale a gradient that stays full.
#
# So much for 0.1 million weights. Here are 310 million, predicted from shapes alone, with no memory taken:

# %%
large = lab.large_model()
sizes = {
    rank: predict_state_bytes(
        large.parameters(), lab.ADAMW, rank=rank, exclude=lab.embeddings(large)
    )
    for rank in (None, 4, 64, 256)
}
for rank, size in sizes.items():
    print(f"{f'GaLore, rank {rank}' if rank else 'AdamW'}: {size / 1e9:.2f} GB of state")
claim(
    sizes[256] < 0.35 * sizes[None],
    "at width 1024, rank 256 keeps a third of AdamW's state",
)

# %% [markdown]
# ### The loss, at equal updates
#
# Now the price. All runs see the same batches; embeddings, norms and biases are stepped by AdamW at 0.01 in each. 16 directions held over 90 % of
# every gradient. Predict: from which rank on is the loss AdamW's?

# %%
my_guess = ""

# %%
by_rank = {r: runs(r) for r in (1, 4, 16, 32)}
table(
    "loss_by_rank",
    ["optimizer", "loss at the end", "above AdamW"],
    [
        [name, about(one.end, 4), about(one.end - plain.end)]
        for name, one in [
            ("AdamW", plain),
            *((f"GaLore {r}", v) for r, v in by_rank.items()),
        ]
    ],
)
if LONG:
    claim(
        by_rank[1].end > by_rank[4].end > by_rank[32].end,
        "the lower the rank, the higher the loss",
    )
    claim(by_rank[4].end > plain.end + 0.03, "rank 4 is over 0.03 nats above AdamW")
    claim(by_rank[32].end < plain.end + 0.05, "rank 32 is within 0.05 of it")
else:
    not_shown("--num-steps 120 or more")

# %%
show(
    lab.loss_figure(
        {
            "AdamW": plain.losses,
            "GaLore, rank 16": by_rank[16].losses,
            "GaLore, rank 4": by_rank[4].losses,
            "GaLore, rank 1": by_rank[1].losses,
        },
        "At equal updates, a lower rank costs loss",
        steps=args.num_steps,
    ),
    "loss_by_rank",
    alt="Loss over updates for AdamW and GaLore at ranks 16, 4 and 1. The curves start together "
    "and end in the order of the ranks, AdamW lowest and rank 1 highest.",
)

# %% [markdown]
# From about rank 16 on, the two can hardly be told apart, in a run this short. The gap grows with its length: after 400 updates
# (`--num-steps 400`) rank 4 was 0.18 nats above AdamW and rank 16 0.06. Rank 1, which held nearly all of the first gradient, does learn, and ends well above. A share of energy says what is lost of one gradient, not
# what is lost in training.
#
# ### Does the basis have to be renewed?
#
# Between two bases a weight can move in `rank` directions only. Predict: which rank has the change of a weight over the whole run, with one
# basis, with a new one every 20 updates? And which of them ends lower?

# %%
my_guess = ""

# %%
renewed = {
    "never": runs(4, interval=lab.NEVER),
    "every 20": left_out,
    "every 1": runs(4, interval=1),
    "every 1, moments reset": runs(4, interval=1, moments="reset"),
}
bases = -(-args.num_steps // lab.INTERVAL)
ranks = {label: lab.rank_of(one.moved) for label, one in renewed.items()}
table(
    "intervals",
    ["new basis", "rank of the change", "loss at the end"],
    [[label, about(ranks[label]), about(one.end, 4)] for label, one in renewed.items()],
)
claim(ranks["never"] == 4, "one basis: the change of a weight has rank 4")
claim(
    ranks["every 20"] <= 4 * bases,
    f"every 20 updates: at most 4 x {bases}, one share for each basis",
)
if LONG:
    claim(
        ranks["every 20"] > 12, "and well above 4: many low-rank steps, a full-rank change"
    )
    apart = abs(renewed["never"].end - left_out.end)
    claim(apart < 0.1, "never and every 20: less than 0.1 nats apart")
    kept, reset = renewed["every 1"].end, renewed["every 1, moments reset"].end
    claim(kept > renewed["never"].end, "every update, moments kept: above never")
    claim(reset < kept - 0.03, "every update, moments reset: over 0.03 below moments kept")
else:
    not_shown("--num-steps 120 or more")

# %% [markdown]
# In a run this short, a basis that is never renewed does as well as one that is: the second picture said so, since what lasts of it lasts long. The change
# stays of rank 4 then, as in LoRA, and whether that is enough is a matter of how far training has to go. Renewing too often does harm: the
# moments are sums over old axes, read in new ones. `moments="reset"` or `"project"` answers that; the paper keeps them, and renews seldom.
#
# ### Time
#
# One 512 x 1024 weight, rank 64, medians of updates that take turns. Predict: how many updates of fused AdamW fit into one SVD?

# %%
my_guess = ""

# %%
ms = lab.update_ms()
table(
    "update_ms",
    ["one update", "ms", "of fused AdamW's"],
    [[name, about(t, 3).rjust(8), about(t / ms[lab.PLAIN], 3)] for name, t in ms.items()],
)
claim(ms[lab.BETWEEN] > 1.5 * ms[lab.PLAIN], "between bases: over 1.5 times fused AdamW")
claim(ms[lab.NEW_SVD] > 3 * ms[lab.BETWEEN], "with an SVD: over 3 times that")
claim(ms[lab.NEW_RANDOM] < ms[lab.NEW_SVD] / 1.5, "randomized: less than two thirds of it")
every_200 = lab.spread(ms[lab.BETWEEN], ms[lab.NEW_SVD], 200)
claim(
    every_200 < 2 * ms[lab.BETWEEN],
    "every 200 updates the SVD adds less than the rest takes",
)

# %%
show(
    lab.spread_figure(ms),
    "spread",
    alt="Time of a mean update in multiples of fused AdamW's over the interval between bases, "
    "both on log scales. With a basis at every update the SVD costs far more than the "
    "randomized method; from about a hundred on both come down to the dotted line of no new basis.",
)

# %% [markdown]
# Between bases it is the two products with $P$, about $4rmn$ operations, where AdamW has a dozen for each of $mn$ weights. What does the randomized basis lose
# against the exact one?

# %%
late = gradients[args.num_steps - 1]
excess = {r: lab.randomized_excess(late, r, args.seed) for r in (4, 16)}
white = {"blocks.noise": torch.randn(64, 256, generator=torch.Generator().manual_seed(1))}
of_noise = lab.randomized_excess(white, 4, args.seed)
for r, ratio in excess.items():
    print(
        f"rank {r:2}: at most {about(ratio - 1, 1)} more than the exact basis, as a share"
    )
print(f"of noise, where nothing stands out: {about(of_noise - 1, 1)}")
claim(max(excess.values()) < 1.01, "of real gradients it loses within 1% of the exact one")
claim(of_noise < 1.05, "even of noise within 5%")

# %% [markdown]
# ### When it does not pay
#
# What a run holds is more than state. Predict: what share of the whole does rank 8 save here?

# %%
my_guess = ""

# %%
parts = {rank: lab.memory_parts(rank) for rank in (None, 8)}
table(
    "memory",
    ["kB", *parts[None]],
    [
        [
            f"GaLore, rank {rank}" if rank else "AdamW",
            *(about(v / 1e3, 3) for v in of.values()),
        ]
        for rank, of in parts.items()
    ],
)
plain_sum, sum_8 = (sum(of.values()) for of in parts.values())
print(f"saved: {about(100 * (1 - sum_8 / plain_sum))}% of the whole")
claim(parts[8]["state"] < 0.3 * parts[None]["state"], "rank 8 saves over 70% of the state")
claim(1 - sum_8 / plain_sum < 0.2, "and less than 20% of the whole: activations rule here")

# %% [markdown]
# It does not pay, then, where activations fill the memory (a small model, long sequences, a large batch: that is lesson 05's); where the
# optimizer keeps little as it is (Adafactor, plain SGD); where most weights are embeddings; on a CPU, where memory is cheap and the update takes several times as long;
# and never without a look at the loss. It pays where weights and state fill the memory and rows are few. Gradients stay in full size all the while.
#
# ## 6. Turn the knob
#
# Rank, interval, and what becomes of the moments. Can you find a setting below AdamW?

# %% tags=["nbval-ignore-output"]
_ = knob(
    lambda rank, interval, moments: lab.rank_picture(
        rank, interval, moments, args.num_steps, args.seed
    ),
    rank=slider("rank", [(str(r), r) for r in (1, 2, 4, 8, 16, 32)], 4),
    interval=slider(
        "updates between two bases",
        [*((str(t), t) for t in (1, 5, 20, 50)), ("never a new one", lab.NEVER)],
        20,
    ),
    moments=slider("moments", [(m, m) for m in ("keep", "reset", "project")], "keep"),
)

# %% [markdown]
# And where memory goes, at an eighth of the width as rank. Which size has the most to save?

# %% tags=["nbval-ignore-output"]
_ = knob(
    lab.memory_picture,
    width=slider("width", [(str(w), w) for w in (32, 64, 128, 256)], 64),
    rows=slider("rows of a batch", [(str(r), r) for r in (1, 4, 16, 64)], 16),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. How many numbers?
#
# Write `numbers(m, n, rank)`: what GaLore around AdamW keeps for one m x n weight, basis and moments together, the step count left out. Not every
# weight is projected.

# %% tags=["exercise"]
from support.checks_07 import check_numbers, check_rank_for, check_step


def numbers(m, n, rank):
    return 2 * rank * n  # the moments of a wide weight: mend it


say(check_numbers(numbers))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three things to settle: which side the basis stands on, what is kept beside the moments, and when nothing is projected.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `small, large = sorted((m, n))`. The basis is small x rank, each moment rank x large. A weight with small <= rank is stepped as it is.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def numbers(m, n, rank):
#     small, large = sorted((m, n))
#     if small <= rank:
#         return 2 * m * n
#     return small * rank + 2 * rank * large
# ```
#
# </details>

# %% [markdown]
# ### B. Which rank?
#
# Write `rank_for(gradient, share)`: the lowest rank whose directions hold at least this share of the gradient's energy.


# %% tags=["exercise"]
def rank_for(gradient, share):
    values = torch.linalg.svdvals(gradient)  # from the largest on
    held = values.cumsum(0) / values.sum()
    return int((held < share).sum())  # close, but mend it


say(check_rank_for(rank_for))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What are the singular values of a matrix whose energy is 25, if it is diagonal with 4 and 3? Which share has the first?
#
# </details>
# <details><summary>Hint 2</summary>
#
# 16 / 25: squares. And where one direction holds enough, none is below the share, and the answer is 1.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def rank_for(gradient, share):
#     energy = torch.linalg.svdvals(gradient).square()
#     held = energy.cumsum(0) / energy.sum()
#     return int((held < share).sum()) + 1
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a step
#
# "It raises on half of the weights, overshoots on the rest, and after one bad batch all is NaN." This step has several faults, all of them from this
# lesson. It must return True for an update that was taken; for a gradient with a NaN in it, it must change nothing and return False.


# %% tags=["exercise"]
@torch.no_grad()
def step(weights, states, lr, rank, interval, scale):
    for W, s in zip(weights, states, strict=True):
        if "P" not in s:
            U = torch.linalg.svd(W.grad, full_matrices=False).U
            s.update(t=0, m=0.0, v=0.0, P=U[:, :rank])
        s["t"] += 1
        R = s["P"].T @ W.grad
        s["m"] = 0.9 * s["m"] + 0.1 * R
        s["v"] = 0.999 * s["v"] + 0.001 * R**2
        m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
        W -= lr * s["P"] @ (m / (v.sqrt() + 1e-8))
    return True


say(check_step(step))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Four things: the scale, the side of the basis, the interval, and what has to be looked at before the first weight is touched. The check says
# which is next.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A tall weight is a wide one transposed: `G = W.grad if W.shape[0] <= W.shape[1] else W.grad.T`, and the change goes back the same
# way. Count with `s.setdefault("t", 0)`, so that `s["t"] % interval == 0` tells when a basis is due.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# @torch.no_grad()
# def step(weights, states, lr, rank, interval, scale):
#     if not all(W.grad.isfinite().all() for W in weights):
#         return False
#     for W, s in zip(weights, states, strict=True):
#         wide = W.shape[0] <= W.shape[1]
#         G = W.grad if wide else W.grad.T
#         if s.setdefault("t", 0) % interval == 0:
#             s["P"] = torch.linalg.svd(G, full_matrices=False).U[:, :rank]
#         s["t"] += 1
#         R = s["P"].T @ G
#         s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * R
#         s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * R**2
#         m, v = s["m"] / (1 - 0.9 ** s["t"]), s["v"] / (1 - 0.999 ** s["t"])
#         change = lr * scale * s["P"] @ (m / (v.sqrt() + 1e-8))
#         W -= change if wide else change.T
#     return True
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. You set `weight.grad = P @ (P.T @ weight.grad)` at rank 8 and call AdamW. What has become smaller?**
#
# <details><summary>A. The two moments, which have rank 8 as well</summary>
#
# No. Their mean may have a low rank, but they are stored entry by entry, in the shape of the weight.
#
# </details>
# <details><summary>B. Nothing that is stored, and the step has full rank</summary>
#
# Right. Moments have the shape of the gradient that AdamW sees, and dividing entry by entry keeps no rank.
#
# </details>
# <details><summary>C. The rank of the step, and with it the learning</summary>
#
# No. AdamW divides each entry by its own size, and what comes out had full rank in section 2.
#
# </details>

# %% [markdown]
# **2. GaLore with a basis of full rank and scale 1: around which optimizer is it the plain optimizer?**
#
# <details><summary>A. AdamW, since nothing of the gradient is lost</summary>
#
# No. Nothing is lost, but the entries are others, and AdamW divides entry by entry: it went another way.
#
# </details>
# <details><summary>B. Every one of them, since P P^T is the identity</summary>
#
# No. That holds for what comes back at once. In between, the optimizer worked on rotated entries.
#
# </details>
# <details><summary>C. None, since moments turn with every new basis</summary>
#
# No. There was one basis here, and SGD with momentum agreed to within rounding.
#
# </details>
# <details><summary>D. SGD with momentum, as it only adds and scales</summary>
#
# Right. Sums and multiples commute with a rotation. Dividing by each entry's own size does not.
#
# </details>

# %% [markdown]
# **3. Four directions hold 93 % of a gradient. What does that say about training at rank 4?**
#
# <details><summary>A. That 93 % of that one gradient's energy gets through</summary>
#
# Right. Of the next batch's gradient it is far less, and AdamW weighs directions by another measure than energy.
#
# </details>
# <details><summary>B. That the loss falls at 93 % of the usual speed</summary>
#
# No. Energy is not progress: rank 1 held nearly all of the first gradient, and ended the run far above AdamW.
#
# </details>
# <details><summary>C. That 7 % of the weights do not move until a new basis</summary>
#
# No. A direction is a combination of rows, so every weight moves; what is left out is a direction, not an entry.
#
# </details>

# %% [markdown]
# **4. Which of these runs has the most to gain from GaLore?**
#
# <details><summary>A. A small model on long sequences, with large batches</summary>
#
# No. Its memory is activations, which GaLore does not touch: lesson 05 does.
#
# </details>
# <details><summary>B. A large model with Adafactor, on one small GPU</summary>
#
# No. Torch's Adafactor keeps a row and a column per matrix, and the bases alone are larger than that.
#
# </details>
# <details><summary>C. A large model with AdamW, and few rows per batch</summary>
#
# Right. Weights, gradients and state fill the memory then, and state is half of these.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# import torch
# from safetrain_core import AmpTrainState, GaLore, predict_state_bytes
#
# def adamw(groups):
#     return torch.optim.AdamW(groups, lr=2e-3, fused=True)
#
# tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
# print(predict_state_bytes(model.parameters(), adamw, rank=128, exclude=tables))
# galore = GaLore(model.parameters(), adamw, rank=128, update_interval=200, exclude=tables)
# state = AmpTrainState(model, optimizer=galore, loss_fn=loss_fn)
# ```
#
# **The rule.** Predict the bytes first. Keep embeddings out. Raise the learning rate of what is projected, not of the rest. Renew seldom. Compare
# the loss with the plain optimizer's, at equal updates, before you believe the memory.
#
# **The knobs,** by their names in a `TrainConfig`: `use_galore`, `galore_rank`, `galore_update_interval`, `galore_scale`, and
# `galore_max_dim`, which leaves out what has a larger side, a big vocabulary's embedding for one.
#
# **Where it is.** `safetrain_core/optim/galore.py` (the wrapper), `safetrain_core/optim/projection.py` (bases, and how moments
# follow), `safetrain_core/optim/state_bytes.py` (counted and predicted).
#
# **Sources.** Zhao et al. 2024, [GaLore](https://arxiv.org/abs/2403.03507); Zhu et al. 2024,
# [APOLLO](https://arxiv.org/abs/2412.05270); Shazeer and Stern 2018, [Adafactor](https://arxiv.org/abs/1804.04235); Halko, Martinsson and
# Tropp 2011, [Finding structure with randomness](https://arxiv.org/abs/0909.4061) (the randomized basis).

# %%
finish()
