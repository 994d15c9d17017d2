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
# # 00 · Start here
#
# **What breaks in training, and where do you see it fixed?**
#
# Training runs die of a short list of faults. In these lessons you break training in each of these ways, on purpose and for
# real, read it in numbers, and mend it twice: by hand, in a few lines, and with `safetrain_core`, the package that you take home.
#
# After this page you will be able to
#
# - say whether this computer is ready for the lessons, and mend what is not;
# - tell a step that was taken from one that was refused;
# - bring about each of 14 symptoms, and read what the doctor says of it;
# - find the lesson for a symptom that you have met.
#
# 15 minutes, less than a minute of computing, no GPU, no network. Run a cell with Shift+Enter.
#
# <!-- nav -->
#
# Next: [Clipping and mixed precision](01_clipping_amp.ipynb)
#
# <!-- /nav -->

# %%
from pathlib import Path

from support import (
    claim,
    doctor,
    finish,
    lesson_args,
    not_shown,
    say,
    show,
    table,
    whole,
)
from support.environment import check, look
from support.first_minute import first_minute_figure
from support.knobs import buttons, dropdown
from support.progress import progress

args = lesson_args("00_start_here", num_steps=whole(20, help="steps of the run"))

# %% [markdown]
# ## 1. Is this computer ready?
#
# Each line is one thing that the lessons need. A line that starts with FIX says what to do about it.

# %%
facts = look(Path(args.out))
findings = check(facts)
for finding in findings:
    print(finding)
claim(
    all(finding.good for finding in findings),
    "this computer has everything that the lessons need",
)

# %% tags=["nbval-ignore-output"]
for name, version in facts.versions.items():
    print(f"{name}: {version}")
for name, value in facts.details.items():
    print(f"{name}: {value}")
print("NVIDIA GPU (no lesson needs one):", facts.gpu)

# %% [markdown]
# ## 2. The first minute
#
# A small network learns from the logarithms of hourly call counts. Now and then there is an hour without a call, and log(0) is
# minus infinity. Predict: after the first such batch, how many batches does the plain loop below need to recover?

# %%
my_guess = ""  # one line, never graded

# %%
import torch
import torch.nn.functional as F
from torch import nn

from support.toy import call_batches


def network():
    torch.manual_seed(args.seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
plain = []
for x, y in call_batches(args.num_steps, args.seed):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plain.append(loss.item())

# %%
print(" ".join("nan" if loss != loss else "ok" for loss in plain))
first_nan = next((i for i, loss in enumerate(plain) if loss != loss), len(plain))
claim(
    all(loss != loss for loss in plain[first_nan:]),
    "after the first NaN there is nothing but NaN",
)

# %% [markdown]
# One bad batch, and the run is over: the NaN is in the weights now, and good data cannot wash it out. Here are the same
# batches and the same network, stepped by `AmpTrainState`:

# %%
from safetrain_core import AmpTrainState

state = AmpTrainState(network(), lr=1e-2, amp_dtype=torch.float32)
for x, y in call_batches(args.num_steps, args.seed):
    print(state.step(x, y))

# %%
bad = [
    i
    for i, (x, _) in enumerate(call_batches(args.num_steps, args.seed), start=1)
    if not x.isfinite().all()
]
claim(
    [row.step for row in state.skip_log] == bad,
    "exactly the batches with log(0) were skipped",
)
if bad:
    claim(
        all(p.isnan().all() for p in model.parameters()),
        "in the plain loop, every weight is NaN",
    )
else:
    not_shown("a batch with log(0) comes later, --num-steps 20 has one")
claim(
    all(p.isfinite().all() for p in state.model.parameters()),
    "here, every weight is finite",
)

# %%
show(
    first_minute_figure(plain, state.log),
    "first_minute",
    alt="Loss over the steps. The plain loop's curve stops at the first batch with "
    "minus infinity, where its loss becomes NaN. The curve of AmpTrainState has a "
    "SKIP mark there and goes on falling.",
)

# %% [markdown]
# That is the whole idea: **look before you step, and leave no trace of a step that you refuse.** STEP and SKIP, with the reason
# and the numbers, are the language of all the lessons.
#
# ## 3. What have you seen?
#
# While training:
#
# <!-- training -->
#
# | | You see | Because | Fix | Broken and fixed in |
# |---|---|---|---|---|
# | 1 | One batch, and the loss shoots up and stays up | that batch's gradient norm was hundreds of times the usual one, and nothing held it back | clip the global norm, at 1.0 to begin with | [lesson 01](01_clipping_amp.ipynb) |
# | 2 | After one step every weight is NaN | a gradient left float16's range: Inf, then Inf / Inf | a `GradScaler`, which leaves that step out | [lesson 01](01_clipping_amp.ipynb) |
# | 3 | The scaling factor is the same number in every row | the path that skips a step never reaches `scaler.update()` | end every window in `update()`, skipped or not | [lesson 01](01_clipping_amp.ipynb) |
# | 4 | The logged norm is in the thousands and follows the scaling factor | the clip sees gradients that are still multiplied by it | `scaler.unscale_(optimizer)`, then the norm and the clip | [lesson 01](01_clipping_amp.ipynb) |
# | 5 | SKIP rows by the hundred in each epoch | the values themselves do not fit float16; no factor can help | an alert above 5 % skipped; then better units, or bfloat16 | [lesson 01](01_clipping_amp.ipynb) |
# | 6 | Accumulating over K micro-batches makes steps K times too large | each micro-batch's loss was used whole | divide each loss by K | [lesson 02](02_accumulation.ipynb) |
# | 7 | The loss curve after a resume is not the one before it | the random number generators started afresh | save their state, and restore it last | [lesson 03](03_checkpoint_resume.ipynb), [lesson 08](08_distributed_run.ipynb) |
# | 8 | Out of memory in the forward pass, though the weights fit | every layer's activations wait for the backward pass | keep few of them and compute the rest again | [lesson 05](05_gradient_checkpointing.ipynb) |
#
# <!-- /training -->
#
# While loading a checkpoint:
#
# <!-- loading -->
#
# | | You see | Because | Fix | Broken and fixed in |
# |---|---|---|---|---|
# | 9 | `world_size mismatch` | saved on another number of ranks than it is loaded on | load on the same number, or reshard on purpose | [lesson 04](04_sharded_resume.ipynb) |
# | 10 | `sha256 mismatch on rank` | the save was cut off, and part of a shard is missing | write to a temporary file, fsync, rename | [lesson 04](04_sharded_resume.ipynb) |
# | 11 | `shard file missing` | the manifest lists more shards than the folder holds | look for each listed file before reading any | [lesson 04](04_sharded_resume.ipynb) |
# | 12 | `unknown schema` | the payload's schema name does not begin with ckpt | migrate older layouts by their schema name | [lesson 03](03_checkpoint_resume.ipynb), [lesson 04](04_sharded_resume.ipynb) |
# | 13 | A resume looks well, and a hundred steps later the loss is NaN | a shard is incomplete, but the manifest beside it says nothing of that | atomic writes, and a checksum for each shard on load | [lesson 03](03_checkpoint_resume.ipynb), [lesson 04](04_sharded_resume.ipynb) |
# | 14 | The disk is full in the middle of the run | each save added a checkpoint and none was ever removed | keep the last few with `rotate_checkpoints` | [lesson 03](03_checkpoint_resume.ipynb), [lesson 04](04_sharded_resume.ipynb) |
#
# <!-- /loading -->
#
# `safetrain_core` has a **doctor** for all of them. `diagnose` reads the log of a run, yours or anybody's; the probes run your own step, save and load
# functions; `verify_checkpoints` looks through a folder. Each gives findings: what is wrong, by which rule it was found, where it shows, why, and what to do.
#
# Nothing in the next cell is faked. It trains eight tiny runs that have the first eight faults, and damages six folders of checkpoints in the other six ways.
# Predict: for how many of the 14 does the doctor name the right one first?

# %%
my_guess = ""

# %%
from support.symptoms import CASES, break_it, pressed

shown = {case.number: break_it(case.number, args.seed) for case in CASES}
table(
    "symptoms",
    ["", "what was done", "the doctor's rule", "severity", "lesson"],
    [
        [case.number, case.did, found.rule, found.severity, found.lesson[:2]]
        for case in CASES
        for found in shown[case.number].findings[:1]
    ],
)
claim(
    all([f.rule for f in shown[case.number].findings[:1]] == [case.rule] for case in CASES),
    "the doctor names all 14, each by its own rule",
)

# %% [markdown]
# Here is one of them whole, number 3. The code that skips a bad step leaves by a short way out, and never reaches `scaler.update()`. First what you would see,
# then what the doctor makes of it:

# %%
print("\n".join(shown[3].lines))
doctor(shown[3].findings, "scale_never_moves")

# %% [markdown]
# And one of a checkpoint, number 9. The run was saved on four ranks; the next job got two.

# %%
for line in shown[9].lines:
    say(line)
doctor(shown[9].findings, "world_size_mismatch")

# %% [markdown]
# A picture says where to look. In number 4 the clip comes before `scaler.unscale_(optimizer)`. The gradients are still multiplied by the scaling factor there, so the
# norm in the log doubles whenever the factor does; and each step is cut to next to nothing. `safetrain diagnose my.csv --plot my.png` draws your own log like this.

# %%
from support.symptom_page import figure_of

show(
    figure_of(shown[4], "The logged norm doubles whenever the factor does"),
    "norm_follows_scale",
    alt="Gradient norm and scaling factor over 36 steps on a log scale. The factor doubles every "
    "8 steps, and the norm jumps with it. Triangles mark the steps that the doctor names "
    "as evidence, before and after the first three jumps.",
)

# %% [markdown]
# Now you. Choose a symptom and press **Break it**: it runs here and now, and shows what its victim would see, what the doctor says, and the code that did
# it. **Mend it** runs the same without the fault.

# %% tags=["nbval-ignore-output"]
_ = buttons(
    pressed,
    {"break": "Break it", "mend": "Mend it"},
    number=dropdown(
        "Symptom", [(f"{case.number}. {case.seen}", case.number) for case in CASES], 1
    ),
)

# %% [markdown]
# ## 4. The lessons
#
# Take them in order, or follow a symptom. Each one breaks something, mends it, counts the cost, and leaves you with ten lines to
# take home.
#
# <!-- lessons -->
#
# | | Lesson | Question | Minutes |
# |---|---|---|---|
# | 01 | [Clipping and mixed precision](01_clipping_amp.ipynb) | How does one bad step end a run, and what stops it? | 35 |
# | 02 | [Gradient accumulation](02_accumulation.ipynb) | When do K small batches equal a large one? | 30 |
# | 03 | [Checkpoint and resume](03_checkpoint_resume.ipynb) | Is the resumed run the same run? | 30 |
# | 04 | [Sharded checkpoints](04_sharded_resume.ipynb) | Which of many files can you trust after a crash? | 30 |
# | 05 | [Gradient checkpointing](05_gradient_checkpointing.ipynb) | What does memory cost in recomputation? | 30 |
# | 06 | [Thermal guard](06_thermal_guard.ipynb) | What should training do when the device runs hot? | 25 |
# | 07 | [Low-rank gradients](07_low_rank_gradients.ipynb) | How small can optimizer state get? | 30 |
# | 08 | [The whole run, on four ranks](08_distributed_run.ipynb) | Do all the guards hold together? | 35 |
#
# <!-- /lessons -->
#
# Each lesson ends with exercises that check your answer. Which of them you have passed here is kept in `lessons/runs/progress.json`, on this computer
# and nowhere else; delete the file to start over. Run the next cell again to see how far you are.

# %% tags=["nbval-ignore-output"]
print("\n".join(progress()))

# %% [markdown]
# Every lesson is also a script. In a terminal, in the project's folder and with its environment active
# (`. .venv/bin/activate`), `python lessons/01_clipping_amp.py --help` says what it takes. It prints the same rows, saves its
# figures and tables, and exits with 0 only if everything that the lesson claims held on your machine.
#
# A number that starts with `~` was measured here and may differ on your machine, and so may the norms and losses of the rows.
# Everything else should be the same.

# %%
finish()
