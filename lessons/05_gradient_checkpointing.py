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
# # 05 · Gradient checkpointing
#
# **What does memory cost in recomputation?**
#
# You will be able to
#
# - say before a run what its activations will take, and which of them grow with depth, width and sequence;
# - recompute layers in the backward pass and show that the gradients are the same, bit for bit, dropout included;
# - recognise the three ways to get it wrong: gradients that are missing, gradients of another mask, batches counted twice;
# - choose between `full`, segments of k and `selective` by count, and say where the sqrt(L) rule holds and where not;
# - get a plan for a model and a budget before you rent the GPU.
#
# 30 minutes; the computing takes about 30 seconds on a laptop CPU. It needs what `00_start_here` checks, no network, no GPU.
# In a terminal: `python lessons/05_gradient_checkpointing.py --layers 16`.
#
# <!-- nav -->
#
# Previous: [Sharded checkpoints](04_sharded_resume.ipynb) · Next: [Thermal guard](06_thermal_guard.ipynb)
#
# <!-- /nav -->
#
# <!-- settles -->
#
# Of the symptoms in [lesson 00](00_start_here.ipynb), this settles
#
# - **8.** Out of memory in the forward pass, though the weights fit
#
# <!-- /settles -->

# %%
from support import (
    about,
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
    "05_gradient_checkpointing",
    layers=whole(16, at_least=4, at_most=64, help="layers of the models that are counted"),
)

# %%
import itertools
import warnings

import torch
import torch.nn as nn
from safetrain_core import (
    AmpTrainState,
    activation_memory_bytes,
    apply_recompute,
    checkpoint_cost,
    measure_recompute,
    memory_after_checkpoint_bytes,
    next_token_loss,
    optimal_segment,
    plan_recompute,
    plan_recompute_for,
    probe_memory,
    remove_recompute,
    selective_checkpoint_cost,
    transformer_activation_bytes,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from support import recompute as lab
from support.knobs import slider

LAYERS, SEED = args.layers, args.seed

# %% [markdown]
# ## 1. Predict
#
# A training step holds weights, gradients, optimizer state, and *activations*: what the forward pass computed and the backward pass
# will need. Double the layers, double the batch, double the sequence: which of the four grows with which? Write one line; nobody grades it.

# %%
my_guess = ""  # for example: "all of them with all three"

# %% [markdown]
# ## 2. Break it
#
# ### Activations, counted
#
# `measure_recompute` runs one step and watches every operation: each tensor that appears, until it is freed. The numbers are exact
# and the same each time. A small GPT of growing depth, width 64, 2 sequences of 128 tokens, float32:

# %%
depths = sorted({max(1, LAYERS // 8), LAYERS // 4, LAYERS // 2, LAYERS})
costs = {n: lab.counted(n, attention="flash") for n in depths}
table(
    "depth",
    ["layers", "weights, MB", "gradients, MB", "activations, MB"],
    [
        [
            n,
            *(
                f"{size / 1e6:.2f}"
                for size in (c.parameter_bytes, c.gradient_bytes, c.activation_bytes)
            ),
        ]
        for n, c in costs.items()
    ],
)
steps = {
    (costs[b].kept_bytes - costs[a].kept_bytes) / (b - a)
    for a, b in itertools.pairwise(depths)
}
claim(len(steps) == 1, "each layer more keeps the same number of bytes more")
claim(
    costs[LAYERS].activation_bytes > 5 * costs[LAYERS].parameter_bytes,
    "with 256 tokens in the batch, activations are over 5 times the weights",
)

# %%
show(
    lab.depth_figure(depths),
    "depth",
    alt="Megabytes over the number of layers. Activations with all kept rise steeply, in a "
    "straight line. With each layer recomputed they rise slowly, and at the full depth they are "
    "less than the weights.",
)

# %% [markdown]
# Weights and optimizer state grow with depth and width alone. Activations also grow with every token of the batch. What does one
# layer keep? In values per token and per unit of width (B x L x d of them make 1):

# %%
parts = {kind: lab.kept_by_part(128, kind) for kind in ("flash", "math")}
table(
    "parts",
    ["part of a layer", "values kept", "with the math kernel"],
    [
        [name, f"{parts['flash'][name]:.1f}", f"{parts['math'][name]:.1f}"]
        for name in parts["flash"]
    ]
    + [["all", *(f"{sum(kept.values()):.1f}" for kept in parts.values())]],
)
claim(
    round(sum(parts["flash"].values())) == 16, "a layer keeps 16 values, its input included"
)

# %% [markdown]
# Each norm keeps its input. Attention keeps its normalized input, q, k, v and the mix; the MLP its normalized input, and 4 + 4 values before and after
# the GELU. A *flash* kernel never stores the scores. The *math* kernel stores them all, heads x L more values per token; at 128 tokens that
# is here as much as everything else.
#
# ### Out of memory, for real
#
# The next cell starts a process that may take only so much memory: half-way between what a step needs with all activations kept, and
# with every layer recomputed. Weights and batch fit with ease. Predict: where does the step end?

# %%
my_guess = ""

# %%
tried = lab.out_of_memory(LAYERS, SEED)
if tried is None:
    not_shown("Linux, which can limit a process's memory")
else:
    needs = {policy: size / 1e6 for policy, size in tried["needs"].items()}
    print(
        f"needs, counted: {needs['none']:.0f} MB; recomputed {needs['full']:.0f} MB;",
        end=" ",
    )
    print(f"allowed: {tried['limit_bytes'] / 1e6:.0f} MB")
    for policy in ("none", "full"):
        error = tried[policy]["error"]
        reached = tried[policy]["reached"]
        told = (
            error.partition("DefaultCPUAllocator: ")[2].partition(":")[0]
            if error
            else "done"
        )
        where = (
            f"after layer {about(reached)} of {LAYERS}"
            if reached < LAYERS
            else "backward too"
        )
        print(f"{policy}: {told}, {where}")
    claim(
        "can't allocate memory" in tried["none"]["error"]
        and tried["none"]["reached"] < LAYERS,
        "all kept: out of memory in the forward pass, though the weights fit",
    )
    claim(tried["full"]["error"] is None, "each layer recomputed: the same step is done")
    found = diagnose_text(tried["none"]["trace"])
    claim(found[0].rule == "does_not_fit", "the doctor reads that from its traceback")

# %% [markdown]
# It got half-way, as the limit is half-way. The doctor also tells it before the run, on any machine, if you give it your step and the bytes that there
# are. Here they are enough for weights, gradients and AdamW's two moments, and for half of the activations on top:


# %%
def fresh(policy="none"):  # what a probe calls for a run of its own
    model = apply_recompute(lab.gpt(LAYERS, 128, seed=SEED), policy)
    return model, torch.optim.AdamW(model.parameters())


def step(run, micro_batches):
    model, optimizer = run
    optimizer.zero_grad()
    for x, y in micro_batches:
        (next_token_loss(model(x), y) / len(micro_batches)).backward()
    optimizer.step()


limit = 4 * costs[LAYERS].parameter_bytes + costs[LAYERS].activation_bytes // 2
window = [lab.tokens(2, 128, SEED)]
doctor(probe_memory(step, fresh, window, limit_bytes=limit), "does_not_fit")
found = probe_memory(step, lambda: fresh("full"), window, limit_bytes=limit)
claim(not found, "with each layer recomputed, the doctor finds nothing")

# %% [markdown]
# What saved the second try is *gradient checkpointing*: keep a layer's input, forget what is
# inside, and when the backward pass comes to the layer, run its forward again. Nothing to do with checkpoints on disk. torch has it:
# `torch.utils.checkpoint.checkpoint(layer, x)`. Here are three ways to get it wrong, none of which raises an error.
#
# ### Wrong: gradients that are missing
#
# Fine-tuning: embeddings frozen, three layers and a head to train, and the older of torch's two engines, `use_reentrant=True`. Predict the loss curve.

# %%
my_guess = ""


# %%
def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


sound, faulty = (
    lab.frozen_gpt(SEED),
    lab.with_layers_run_by(lab.frozen_gpt(SEED), reentrant),
)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    curves = {
        "layers called through checkpoint, reentrant": lab.train_losses(faulty, seed=SEED),
        "layers called as they are": lab.train_losses(sound, seed=SEED),
    }
trainable = [p for p in faulty.parameters() if p.requires_grad]
without = sum(p.grad is None for p in trainable)
print(f"weight tensors to train: {len(trainable)}, without any gradient: {without}")
print("warning:", str(caught[0].message).strip())
(wrong, right) = curves.values()
claim(without == len(trainable) - 3, "only the last norm and the head have gradients")
claim(lab.end_of(wrong) < wrong[0] - 0.5, "and yet the loss falls")
claim(lab.end_of(right) < lab.end_of(wrong) - 0.02, "with all gradients it falls further")

# %%
show(
    lab.frozen_figure(curves),
    "frozen",
    alt="Loss over 60 steps. Both curves fall, and they look much alike. The one whose layers "
    "are called through the reentrant checkpoint stays a little higher: only its head trains.",
)

# %% [markdown]
# The reentrant engine runs the layer without a graph and puts one node into its place. That node has a backward only if an *input*
# needs a gradient. A frozen embedding's output needs none, so there is no way back into any layer. torch warns, once.
#
# ### Wrong: gradients of another mask
#
# A dropout layer draws when it runs. If it runs twice, it draws twice. torch puts the random state back for the second run, which costs
# a little, and there is a flag to leave it out. Predict: what changes, the loss, the gradients, or both?

# %%
my_guess = ""


# %%
def no_rng(layer, x):
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)


batch = lab.tokens(2, 64, SEED)
plain = lab.gpt(4, 64, dropout=0.1, seed=SEED)
loss, gradients = lab.loss_and_gradients(plain, batch)
other = lab.with_layers_run_by(lab.gpt(4, 64, dropout=0.1, seed=SEED), no_rng)
other_loss, other_gradients = lab.loss_and_gradients(other, batch)
gap = lab.apart(other_gradients, gradients)
print("the loss is the same:", other_loss == loss)
print(f"the gradient is {about(100 * gap)}% away")
claim(other_loss == loss, "the forward pass is the same, bit for bit")
claim(gap > 0.05, "the gradient is more than 5% off: it belongs to another mask")

# %% [markdown]
# The log shows the right loss. The gradient mixes two masks: one that made the loss, and one that the backward pass went through.
#
# ### Wrong: batches counted twice
#
# BatchNorm moves its running mean and counts batches in each forward pass. Ten batches:


# %%
def twice(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def as_it_is(layer, x):
    return layer(x)


nets = {
    run: lab.train_norm_net(lab.norm_net(SEED), run, seed=SEED) for run in (as_it_is, twice)
}
norms = {run.__name__: net[0][1] for run, net in nets.items()}
for name, norm in norms.items():
    print(f"{name}: {norm.num_batches_tracked} batches counted")
same = lab.equal(*(list(net.parameters()) for net in nets.values()))
mean = norms["as_it_is"].running_mean
off = float((norms["twice"].running_mean - mean).norm() / mean.norm())
print(f"weights equal: {same}; running mean {about(100 * off)}% off")
claim(norms["twice"].num_batches_tracked == 20, "10 batches, 20 counted")
claim(same, "the weights are right, to the last bit")
claim(off > 0.05, "the running mean is not: evaluation uses another one than training made")

# %% [markdown]
# Training looks well, since in training mode the running mean is not used. The validation loss is off, and nobody suspects the memory setting.
#
# ## 3. By hand
#
# How would you write it so that the first two cannot happen? Autograd lets you say what happens to each tensor that it wants to keep: pack it
# into anything, and unpack it later. So pack it into its number. When the backward pass asks for the first number, run the layer again, with the
# random state of its first run, and take what it saves this time.


# %%
def again(layer, x):
    rng, inputs, found = torch.get_rng_state(), x.detach(), []
    inputs.requires_grad_(x.requires_grad)
    numbers = itertools.count()

    def unpack(number):
        if not found:  # the first to be asked for: run the layer again
            keep = saved_tensors_hooks(lambda t: found.append(t.detach()), lambda t: t)
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), keep:
                torch.set_rng_state(rng)
                layer(inputs)
        saved, found[number] = found[number], None  # needed once: let it go
        return saved

    with saved_tensors_hooks(lambda t: next(numbers), unpack):
        return layer(x)


# %% [markdown]
# Predict: how far are its gradients from the plain ones, with dropout on?

# %%
my_guess = ""

# %%
hand = lab.with_layers_run_by(lab.gpt(4, 64, dropout=0.1, seed=SEED), again)
hand_loss, hand_gradients = lab.loss_and_gradients(hand, batch)
gaps = [float((a - b).abs().max()) for a, b in zip(hand_gradients, gradients, strict=True)]
print("largest difference:", max(gaps))
claim(hand_loss == loss, "the same loss")
claim(lab.equal(hand_gradients, gradients), "the same gradients, bit for bit")

mended = lab.with_layers_run_by(lab.frozen_gpt(SEED), again)
claim(lab.train_losses(mended, seed=SEED) == right, "frozen embeddings: the same run, too")

by_hand, whole_cost = (
    measure_recompute(model, batch, timed_runs=0) for model in (hand, plain)
)
share = by_hand.activation_bytes / whole_cost.activation_bytes
print(f"peak: {share:.2f} of the plain run's, 4 layers")
print(f"FLOPs: {1 + lab.more_flops(by_hand, whole_cost):.2f} of the plain run's")
claim(share < 0.5, "less than half of the bytes")

# %% [markdown]
# The same numbers, since the second run computes the same products in the same order. No node stands between input and output, so it
# does not matter which input needs a gradient. BatchNorm is still counted twice; that is exercise B.
#
# ## 4. The package
#
# `apply_recompute(model, policy)` does this in place, for any model with a stack of layers, and `remove_recompute` takes it back. The engine is torch's
# non-reentrant one. Predict: which of the seven policies give the same gradients to the last bit, dropout on?

# %%
my_guess = ""

# %%
rows, equal = [], []
for policy in lab.POLICIES:
    model = apply_recompute(lab.gpt(4, 64, dropout=0.1, seed=SEED), policy, k=2)
    found_loss, found = lab.loss_and_gradients(model, batch)
    equal.append(found_loss == loss and lab.equal(found, gradients))
    cost = measure_recompute(model, batch, timed_runs=0)
    share = cost.kept_bytes / whole_cost.kept_bytes
    rows.append(
        [policy, "yes" if equal[-1] else "no", f"{share:.2f}", f"{cost.overhead:.1%}"]
    )
table(
    "policies",
    ["policy", "same bits", "kept after forward", "more FLOPs"],
    rows,
)
claim(all(equal), "every policy: loss and gradients are the plain run's, bit for bit")

full = apply_recompute(lab.gpt(4, 64, dropout=0.1, seed=SEED), "full")
package = measure_recompute(full, batch, timed_runs=0)
claim(
    lab.equal(lab.loss_and_gradients(full, batch)[1], hand_gradients)
    and package.activation_bytes == by_hand.activation_bytes,
    "full is the hand version: the same gradients, and the same bytes at the peak",
)
claim(
    list(full.state_dict()) == list(plain.state_dict()), "no key of the state dict changes"
)
full.eval()
with torch.no_grad():
    claim(
        torch.equal(full(batch[0]), remove_recompute(full)(batch[0])), "eval() bypasses it"
    )

# %% [markdown]
# `every_k` runs segments of k layers again (here 2), `sqrt` chooses k, `selective` recomputes the attention core alone, `selective_ops` everything but the
# matrix products, and `offload` sends what is kept to host memory: on a CPU it is there already. (What is kept is not yet the peak, which comes
# in section 5.) Now the frozen embeddings and the
# BatchNorm of section 2:

# %%
mended = apply_recompute(lab.frozen_gpt(SEED), "full")
claim(
    lab.train_losses(mended, seed=SEED) == right,
    "frozen embeddings: no gradient is missing",
)
net = lab.norm_net(SEED)
apply_recompute(net, "full")
lab.train_norm_net(net, as_it_is, seed=SEED)
claim(
    lab.equal(list(net.buffers()), list(nets[as_it_is].buffers())),
    "BatchNorm: 10 batches counted, the running mean of the plain run",
)

# %% [markdown]
# For its second run, a layer gets copies of its buffers as they were. In a whole training run, guards and all:

# %%
logs = {}
for policy in ("none", "full"):
    model = apply_recompute(lab.gpt(4, 64, dropout=0.1, seed=SEED), policy)
    state = AmpTrainState(model, lr=1e-3, loss_fn=next_token_loss, amp_dtype=torch.float32)
    torch.manual_seed(SEED)
    logs[policy] = [state.step(*lab.tokens(2, 64, seed)) for seed in range(4)]
for log in logs["full"]:
    print(log)
claim(logs["full"] == logs["none"], "four steps, and each row is the row of the plain run")

# %% [markdown]
# ### A model in hand, and a budget
#
# Layers may differ. `plan_recompute_for` counts each of them, and picks those that bring the peak below a budget for the fewest FLOPs. Here are
# six blocks of unequal inner width. Predict which go first.

# %%
my_guess = ""

# %%
torch.manual_seed(SEED)
uneven = nn.Sequential(
    *(
        nn.Sequential(nn.Linear(32, 32 * n), nn.GELU(), nn.Linear(32 * n, 32))
        for n in (2, 16, 4, 8, 16, 2)
    )
)
data = torch.ones(256, 32), torch.ones(256, 32)
everything = measure_recompute(uneven, data, "none", timed_runs=0).activation_bytes
for percent in (80, 60, 40):
    plan = plan_recompute_for(uneven, data, everything * percent // 100)
    say(f"{percent}%: {plan.report()}")
    apply_recompute(uneven, plan.layers)
    cost = measure_recompute(uneven, data, timed_runs=0)
    claim(
        plan.fits is (percent > 40) and cost.activation_bytes == plan.activation_bytes,
        f"{percent}% of the bytes: {'it fits' if plan.fits else 'nothing fits'}, counted",
    )

# %% [markdown]
# Not the largest as such: the peak is where the last large block runs backward, and what counts there is what the blocks before it left. Below
# some half nothing is to be had: while the largest block runs again, its whole inside is there. The largest layer is a floor.
#
# ## 5. What it costs
#
# ### Bytes, by the length of a segment
#
# The classical rule: with segments of k of L layers you keep L/k boundaries and, while one segment runs again, the inside of k layers. L/k + k
# is least at k = sqrt(L). Predict: which k is best for this GPT, by count?

# %%
my_guess = ""

# %%
sizes = lab.ks(LAYERS)
none = lab.counted(LAYERS)
by_k = {k: lab.counted(LAYERS, policy="every_k", k=k) for k in sizes}
rule_of_all = memory_after_checkpoint_bytes(LAYERS, LAYERS)
table(
    "segments",
    ["k", "bytes, rule", "bytes, counted", "more FLOPs"],
    [
        [
            k,
            f"{memory_after_checkpoint_bytes(LAYERS, k) / rule_of_all:.2f}",
            f"{by_k[k].activation_bytes / none.activation_bytes:.2f}",
            f"{by_k[k].overhead:.1%}",
        ]
        for k in sizes
    ],
)
best = min(sizes, key=lambda k: by_k[k].activation_bytes)
print("least by the rule at k =", optimal_segment(LAYERS), "and by count at k =", best)
claim(best < optimal_segment(LAYERS), "the count's best segment is shorter than the rule's")
claim(
    by_k[1].activation_bytes < by_k[optimal_segment(LAYERS)].activation_bytes
    and by_k[1].overhead < by_k[optimal_segment(LAYERS)].overhead,
    "each layer by itself beats sqrt(L) on bytes and on FLOPs",
)
claim(
    by_k[LAYERS].activation_bytes > 0.95 * none.activation_bytes,
    "one segment of all layers saves nothing, and pays for all",
)

# %%
show(
    lab.segments_figure(LAYERS),
    "segments",
    alt="Peak bytes as a fraction of those of none over the segment size. The rule falls to a "
    "minimum near the square root of the depth and rises again. The counted curve begins low at "
    "one layer per segment and rises all the way to 1.",
)

# %%
show(
    lab.flops_figure(LAYERS),
    "flops",
    alt="Extra FLOPs in percent over the segment size. The counted curve rises from about 25 to "
    "33 percent, where the dotted line of the rule is.",
)

# %% [markdown]
# Why do they differ? The rule lets a kept boundary cost as much as a layer's inside. Count both: a transformer's boundary is 1 value per token and width,
# and its inside 16, or 32 with scores. So the balance is at sqrt(L / 16): 1 at 16 layers, 2 at 64. Does the rule hold where its
# assumption does? 64 layers of Linear and ReLU, where each keeps one thing, and 64 of a transformer with the flash kernel:

# %%
stacks = lab.two_stacks()
knees = {name: min(curve, key=curve.get) for name, curve in stacks.items()}
for name, knee in knees.items():
    print(f"{name}: least at k = {knee}, {stacks[name][knee]:.2f} of none")
claim(knees["Linear + ReLU"] == 8, "a boundary as dear as a layer: the knee is at sqrt(64)")
claim(knees["transformer"] == 2, "a boundary of a sixteenth: it is at sqrt(64 / 16)")

# %%
show(
    lab.stacks_figure(stacks),
    "two_stacks",
    alt="Peak bytes over segment sizes 1 to 64 for two stacks of 64 layers, log scale. For plain "
    "Linear and ReLU layers the curve is a V with its minimum at 8. For a transformer the "
    "minimum is at 2, at a fourth of that height, and the curve rises from there.",
)

# %% [markdown]
# ### FLOPs: a third, or a quarter?
#
# The rule: a step is 1 forward and 2 for the backward; one more forward makes 4 units instead of 3. The table above begins at 25 %. Predict what
# is left out.

# %%
my_guess = ""

# %%
early = lab.counted(LAYERS, policy="full").overhead
with set_checkpoint_early_stop(False), lab.kernel("math"):
    to_the_end = measure_recompute(
        lab.gpt(LAYERS), lab.tokens(2, 128), "full", timed_runs=0
    ).overhead
dropped = measure_recompute(
    lab.gpt(LAYERS, dropout=0.1), lab.tokens(2, 128), "full", timed_runs=0
).overhead
rule = checkpoint_cost(LAYERS)["overhead_vs_no_ckpt"]
table(
    "full",
    ["recomputed: full", "more FLOPs"],
    [
        ["by the rule", f"{rule:.1%}"],
        ["counted, run to the end", f"{to_the_end:.1%}"],
        ["counted, as torch does it", f"{early:.1%}"],
        ["the same with dropout at the layer's end", f"{dropped:.1%}"],
    ],
)
print(f"a step's time, full over none: {about(lab.seconds_ratio(LAYERS, 'full'))}")
claim(abs(to_the_end - rule) < 0.02, "run to the end, it is the rule's third")
claim(early < 0.26, "torch stops early: a quarter")
claim(abs(dropped - to_the_end) < 0.005, "a dropout behind the last product: no early stop")

# %% [markdown]
# torch ends the second run as soon as it has the last tensor that the backward pass wants. A layer's last product is not needed for
# that: only its inputs are. With dropout behind it, its mask is, and the run goes on to the end. In seconds a second run costs more than in FLOPs where
# models are as small as this one, since each operation's own start-up counts; at width 8,192 products are nearly all of the time.
#
# ### Full against selective
#
# What if only the scores go? They are L x L for each head. `selective` recomputes the attention core, and keeps the rest. Predict: at how many tokens do
# the scores take more than all the rest of a layer, at width 64 with 8 heads?

# %%
my_guess = ""

# %%
lengths = [32, 64, 128, 256, 512]
kept = {
    (policy, kind, seq): lab.values_per_layer(seq, policy, kind)
    for _, policy, kind in lab.LENGTH_CURVES
    for seq in lengths
}
table(
    "lengths",
    ["L", "scores", "selective keeps", "it costs", "full keeps", "it costs"],
    [
        [
            seq,
            f"{1 - kept['none', 'flash', seq] / kept['none', 'math', seq]:.0%}",
            f"{kept['selective', 'math', seq] / kept['none', 'math', seq]:.2f}",
            f"{lab.layer_overhead(seq, 'selective'):.1%}",
            f"{kept['full', 'math', seq] / kept['none', 'math', seq]:.2f}",
            f"{lab.layer_overhead(seq, 'full'):.1%}",
        ]
        for seq in lengths
    ],
)
half = next(
    s for s in lengths if kept["none", "math", s] >= 1.98 * kept["selective", "math", s]
)
print("half of a layer's bytes are scores at", half, "tokens")
claim(
    half == 16 * lab.WIDTH // lab.HEADS, "that is 16 x width / heads: from there L^2 rules"
)
claim(
    all(0 < lab.layer_overhead(seq, "selective") < 0.1 for seq in lengths),
    "selective costs 1 to 10% more FLOPs",
)
no_gain = kept["selective", "math", 512] / kept["none", "flash", 512]
claim(
    0.95 < no_gain < 1.05,
    "a flash kernel keeps no scores at all: there selective has nothing to drop",
)

# %%
show(
    lab.lengths_figure(lengths),
    "lengths",
    alt="Values kept per token and width over the sequence length from 32 to 512. With the math "
    "kernel and nothing recomputed the curve rises from 20 to 80. Selective stays at 16, and so "
    "does the flash kernel with nothing recomputed. Full stays at 1.",
)

# %% [markdown]
# At a real width of 128 per head in 16 bit, with float32 scores, half is reached at 1,024 tokens. With a flash kernel, what helps between nothing and
# `full` is `selective_ops`: keep what products return, redo the cheap rest.

# %%
names = ("none", "selective", "selective_ops", "full")
kinds = {p: lab.counted(LAYERS, policy=p, attention="flash") for p in names}
rows = {
    p: (c.activation_bytes / kinds["none"].activation_bytes, c.overhead)
    for p, c in kinds.items()
}
table(
    "flash",
    ["flash kernel", "bytes", "more FLOPs"],
    [[p, f"{share:.2f}", f"{more:.1%}"] for p, (share, more) in rows.items()],
)
claim(rows["selective"][0] > 0.98, "flash: selective saves next to nothing")
claim(rows["selective_ops"][0] < 0.8, "selective_ops saves a fifth or more")
claim(rows["selective_ops"][1] == 0, "and does no product again")

# %% [markdown]
# ### The rules of thumb, beside the counts
#
# They are for a real size: width and sequence 8,192, batch 1, BF16. On a laptop? Tensors can be *fake*: a size, no numbers. The same
# operations run, and are counted, at any size.

# %%
layer_gb = lab.real_layer_gb()
big = {policy: lab.real_size(2, policy) for policy in ("none", "full")}
finer = transformer_activation_bytes(1, 8192, 8192, 1, 64, policy="selective") / 1e9
plan = plan_recompute(64, 8192, 8192, 1, 64, "bfloat16", 80_000_000_000)
by_name = {option.name: option for option in plan.options}
whole_gb = by_name["none"].activation_bytes / 1e9
table(
    "rules",
    ["", "rule", "count"],
    [
        ["values kept per layer, x B*L*d", 12, f"{kept['none', 'flash', 128]:.1f}"],
        [
            "GB per layer at 8192",
            f"{activation_memory_bytes(1) / 1e9:.2f}",
            f"{layer_gb:.2f}",
        ],
        ["the same, finer rule", f"{finer:.2f}", f"{layer_gb:.2f}"],
        [
            "GB for 64 layers",
            f"{activation_memory_bytes(64) / 1e9:.0f}",
            f"{64 * layer_gb:.0f}",
        ],
        ["full: more FLOPs, toy", f"{rule:.1%}", f"{early:.1%}"],
        ["full: more FLOPs at 8192", f"{rule:.1%}", f"{big['full'].overhead:.1%}"],
        [
            "selective: more FLOPs, L=128",
            f"{selective_checkpoint_cost(64)['overhead_vs_no_ckpt']:.1%}",
            f"{lab.layer_overhead(128, 'selective'):.1%}",
        ],
        ["layers per segment, of 64", optimal_segment(64), knees["transformer"]],
    ],
)
claim(round(activation_memory_bytes(1) / 1e9, 2) == 1.61, "12 values: 1.61 GB per layer")
claim(round(activation_memory_bytes(64) / 1e9) == 103, "64 layers: 103 GB")
claim(
    1.3 < layer_gb / (activation_memory_bytes(1) / 1e9) < 1.4,
    "counted: a third more, 16 values",
)
claim(
    abs(whole_gb / (64 * layer_gb) - 1) < 0.03, "the planner's figure is the count's, to 3%"
)

# %% [markdown]
# Good rules to see which size of machine you need, and no more. (The finer one, by Korthikanti et al., has 34 bytes: our 32, and one each for two
# dropout masks.) `optimal_segment(64)` gives 8 checkpoints of 8 layers; by count, 32 of 2 are better. The 5 % stand for attention as 15 % of the forward
# pass, which depends on L / d.
#
# ## 6. Turn the knob
#
# `plan_recompute` puts it together: sizes and a budget in, the cheapest policy that fits with 10 % headroom out. In a shell: `safetrain plan
# --layers 64 --hidden 8192 --seq 8192 --budget-gb 80`. Predict its choice, and what it would be for 12 GB.

# %%
my_guess = ""

# %%
for budget in (200, 80, 12, 8):
    plan = plan_recompute(64, 8192, 8192, 1, 64, "bfloat16", budget * 10**9)
    say(f"{budget} GB. {plan.advice.splitlines()[0]}")
    if budget == 80:
        claim(plan.choice.policy == "full", "80 GB: full")
    if budget == 12:
        claim(plan.choice.name == "every_k, k=2", "12 GB: pairs of layers")
    if budget == 8:
        claim(plan.choice is None, "8 GB: nothing fits, and it says what would")
claim(
    by_name["every_k, k=2"].activation_bytes < by_name["full"].activation_bytes
    and by_name["sqrt"].activation_bytes > by_name["full"].activation_bytes,
    "at 64 layers pairs take less than full, and sqrt takes more",
)

# %%
figure, text = lab.plan_picture(64, 8192, 8192, 80, "flash")
show(figure, "plan", alt=text)

# %% tags=["nbval-ignore-output"]
_ = knob(
    lab.plan_picture,
    layers=slider("layers", [(str(n), n) for n in (8, 16, 32, 64, 96)], 64),
    hidden=slider("width", [(f"{n:,}", n) for n in (1024, 2048, 4096, 8192)], 8192),
    seq=slider(
        "tokens per sequence",
        [(f"{n:,}", n) for n in (1024, 2048, 4096, 8192, 32768)],
        8192,
    ),
    budget_gb=slider("budget", [(f"{n} GB", n) for n in (4, 8, 12, 24, 48, 80, 160)], 80),
    attention=slider("attention kernel", [("flash", "flash"), ("math", "math")], "flash"),
)

# %% [markdown]
# And the rule itself: make the boundary cheaper, from a layer's whole inside (12 of 12 values) to its input alone (1 of 12), and watch the knee move.

# %% tags=["nbval-ignore-output"]
_ = knob(
    lab.segment_picture,
    layers=slider("layers", [(str(n), n) for n in (16, 32, 64, 128)], 64),
    boundary_values=slider(
        "a boundary takes", [(f"{n} of 12", n) for n in (12, 6, 3, 1)], 12
    ),
)

# %% [markdown]
# ## 7. Your turn
#
# ### A. The best segment
#
# Write `best_segment(layers, inside, boundary)`: how many layers per segment, so that the boundaries of all segments and the inside of one are
# least? A boundary takes `boundary`, one layer's inside `inside`; the last segment may be shorter.

# %% tags=["exercise"]
from support.checks_05 import check_loop, check_once, check_segment


def best_segment(layers, inside, boundary):
    return round(layers**0.5)  # the classical rule: mend it


say(check_segment(best_segment))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the memory for one k: how many boundaries are there, and how many insides? For which k does the classical rule assume the two cost the same?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `math.ceil(layers / k) * boundary + k * inside`. There are only `layers` candidates: try them all, with `min(..., key=...)`.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def best_segment(layers, inside, boundary):
#     def memory(k):
#         return -(-layers // k) * boundary + k * inside
#
#     return min(range(1, layers + 1), key=memory)
# ```
#
# </details>

# %% [markdown]
# ### B. Count each batch once
#
# Write `once(layer, x)`: a checkpoint after which the layer's buffers (running mean and variance, the number of batches) are those of one forward
# pass, while the gradients stay the same.


# %% tags=["exercise"]
def once(layer, x):
    return checkpoint(layer, x, use_reentrant=False)  # the buffers move twice: mend it


say(check_once(once))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Give `checkpoint` a function of your own that calls the layer, and that knows whether it is called for the first time. In the second run, save the
# buffers before, and put them back after.
#
# </details>
# <details><summary>Hint 2</summary>
#
# torch ends the second run early, by an exception that passes through your function. What is in a `finally` happens all the same.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def once(layer, x):
#     runs = 0
#
#     def forward(x):
#         nonlocal runs
#         runs += 1
#         before = [buffer.clone() for buffer in layer.buffers()]
#         try:
#             return layer(x)
#         finally:
#             if runs > 1:
#                 with torch.no_grad():
#                     for buffer, value in zip(layer.buffers(), before, strict=True):
#                         buffer.copy_(value)
#
#     return checkpoint(forward, x, use_reentrant=False)
# ```
#
# </details>

# %% [markdown]
# ### C. Repair a loop
#
# "We turned checkpointing on to fit the model. It takes a third longer, the memory is what it was, and it grows from step to step, and the
# fine-tuned model is no good." `model` is the GPT with frozen embeddings of section 2, with dropout. The loop must return the losses.


# %% tags=["exercise"]
def loop(model, optimizer, batches):
    layers = nn.Sequential(*model.blocks)
    losses = []
    for x, y in batches:
        h = model.tokens(x) + model.positions.weight[: x.shape[1]]
        h = checkpoint(layers, h, use_reentrant=True, preserve_rng_state=False)
        loss = next_token_loss(model.head(model.norm(h)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


say(check_loop(loop))

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Look at each argument of `checkpoint` and ask what section 2 says of it. Then: how many segments are there, and what does a loss hold on to?
#
# </details>
# <details><summary>Hint 2</summary>
#
# One segment of all layers keeps everything again while it is recomputed: call `checkpoint` for each block. A loss is the end of a graph, and what the
# graph keeps lives as long as the loss does; `.item()` is a number.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def loop(model, optimizer, batches):
#     losses = []
#     for x, y in batches:
#         h = model.tokens(x) + model.positions.weight[: x.shape[1]]
#         for block in model.blocks:
#             h = checkpoint(block, h, use_reentrant=False)
#         loss = next_token_loss(model.head(model.norm(h)), y)
#         optimizer.zero_grad()
#         loss.backward()
#         optimizer.step()
#         losses.append(loss.item())
#     return losses
# ```
#
# </details>

# %% [markdown]
# ## 8. Quiz
#
# **1. Weights and optimizer state fill half of a GPU. The forward pass ends out of memory in layer 20 of 40. What helps?**
#
# <details><summary>A. An optimizer with a smaller state</summary>
#
# No. It would free a fixed amount, once. What runs out here grows layer by layer, and with every token of the batch.
#
# </details>
# <details><summary>B. Layers recomputed in the backward</summary>
#
# Right. What grows with each layer is what the layers keep. Recomputed, a layer keeps its input alone.
#
# </details>
# <details><summary>C. A gradient that is set to None early</summary>
#
# No. It frees gradients before the forward pass, which is good practice, but the activations pile up all the same.
#
# </details>

# %% [markdown]
# **2. A transformer of 16 layers: why does `full` take less memory than segments of sqrt(16) = 4?**
#
# <details><summary>A. A kept boundary is far smaller than a layer's inside</summary>
#
# Right. 16 boundaries at 1 and one inside at 16 make 32. Four boundaries and four insides make 68.
#
# </details>
# <details><summary>B. Segments of 4 keep the insides of all of their layers</summary>
#
# No. They keep none between forward and backward. But four insides are there at once while a segment runs again.
#
# </details>
# <details><summary>C. torch stops early, and leaves out most of each layer</summary>
#
# No. The early stop leaves out a last product, which saves FLOPs. It hardly changes what is alive at the peak.
#
# </details>

# %% [markdown]
# **3. With a flash kernel, `selective` saves 1 % of the bytes. Why?**
#
# <details><summary>A. The kernel's scores are kept in a format of 8 bits</summary>
#
# No. They are not kept in any format: the kernel computes them tile by tile, and again in its own backward.
#
# </details>
# <details><summary>B. The core is recomputed, but its inputs stay in memory</summary>
#
# No. Its inputs q, k and v do stay, with the math kernel too, where selective saves half or more at long sequences.
#
# </details>
# <details><summary>C. There are no scores to drop: the kernel keeps none</summary>
#
# Right. What selective drops is the L x L matrix of each head, and a flash kernel never writes it to memory.
#
# </details>

# %% [markdown]
# **4. Fine-tuning with frozen embeddings and reentrant checkpoints. What do you see?**
#
# <details><summary>A. An error in the first backward pass</summary>
#
# No. The head and the last norm still have a graph of their own, so that backward has something to do.
#
# </details>
# <details><summary>B. A loss that stays exactly the same</summary>
#
# No. The head trains, and the loss falls. It would be easier to notice if it did not.
#
# </details>
# <details><summary>C. A loss that falls, but not so far</summary>
#
# Right. Only what comes after the last checkpoint trains. Look for weights whose gradient is None.
#
# </details>

# %% [markdown]
# **5. The textbook says 33 % more FLOPs for `full`, and you count 25 %. Which is right?**
#
# <details><summary>A. The 33 %: the counter misses what is fused</summary>
#
# No. Run to the end, the same counter finds the third. What is missing was not computed.
#
# </details>
# <details><summary>B. The 25 %: torch skips each last product</summary>
#
# Right. The backward pass needs the inputs of a layer's last product, and not its result. With dropout behind it you count 33 %.
#
# </details>
# <details><summary>C. Both: it depends on the machine you use</summary>
#
# No. FLOPs are counted from shapes, and are the same on every machine. Seconds would differ.
#
# </details>

# %% [markdown]
# ## 9. Take it home
#
# ```python
# from safetrain_core import apply_recompute, measure_recompute, plan_recompute_for
#
# for policy in ("none", "full", "every_k", "selective"):  # two minutes before the long run
#     print(policy, measure_recompute(model, batch, policy, k=2, loss_fn=loss_fn))
# apply_recompute(model, "full")  # the loop stays as it is
#
# plan = plan_recompute_for(model, batch, budget_bytes=30 * 10**9, headroom=0.1)  # or let it choose
# apply_recompute(model, plan.layers)
# ```
#
# `probe_memory(step, make, [batch], limit_bytes=...)` says whether your step fits, and what takes it; a loss stored with its graph it finds, too.
#
# In a loop without the package: `checkpoint(layer, x, use_reentrant=False)` around each layer. In a shell: `safetrain plan --layers 32 --hidden 4096 --seq 8192
# --budget-gb 40`.
#
# **The rule.** Activations grow with depth and tokens: count them. Flash attention first, then `full`: 1/16 of a layer's bytes for a quarter to a third more FLOPs.
# `selective` where scores are kept. Pairs of layers where 64 layers leave no other way. Non-reentrant, random state preserved, buffers moved once. Gradients do not change, not by a bit:
# if they do, something is wrong. If nothing fits, a smaller micro-batch and accumulation ([lesson 02](02_accumulation.ipynb)).
#
# **The knobs,** by their names in a `TrainConfig`: `recompute_policy` (none), `recompute_k` (4).
#
# **Where it is.** `safetrain_core/memory/recompute.py` (policies), `layer.py`, `segment.py`, `moment.py` (how a layer runs again), `measure.py` and `count.py` (counts),
# `rules.py`, `shape.py`, `plan.py`, `blocks.py` (rules and planners).
#
# **Sources.** Chen et al. 2016, [Training deep nets with sublinear memory cost](https://arxiv.org/abs/1604.06174) (segments, sqrt);
# Korthikanti et al. 2022, [Reducing activation recomputation in large transformer models](https://arxiv.org/abs/2205.05198) (selective, the finer rule);
# Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135);
# PyTorch, [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html).

# %%
finish()
