"""Labelled runs: for each symptom that a log can show, ways to have it; and ways to be healthy. All by seed."""

import csv
import random
import statistics
from dataclasses import replace

from loops import Setup, train

from safetrain_core import SimulatedCard

#: Seeds that thresholds were looked at with; what is measured from HELD_OUT on was never looked at while tuning.
#: (1000 to 1019 were held out once; a miss there, which seed 19 shows too, was looked at, and a rule was added.)
TUNING, HELD_OUT = 0, 2000

MODELS = ("mlp", "tokens", "linear")


def _dice(seed, salt):
    return random.Random(1000 * seed + salt)


# --- broken: label -> what makes one with a seed. Each gives (rows, baseline or None).


def _mean(rows):
    return sum(row["loss"] for row in rows) / len(rows)


def _median(rows):
    return statistics.median(row["loss"] for row in rows)


def spike_without_clipping(seed):
    """The label is what happened: the median loss of ten steps, three after the bad batch, is up by 30 % or more."""
    d = _dice(seed, 1)
    while True:
        at, model = d.randint(30, 42), d.choice(("mlp", "linear"))
        rows = train(
            Setup(
                seed,
                steps=d.choice((60, 90, 140)),
                model=model,
                batch=d.choice((16, 32)),
                lr={"mlp": d.choice((0.2, 0.4)), "linear": 0.01}[model],
                bad_batch_at=at,
                val_every=d.choice((0, 20)),
            )
        )
        if _median(rows[at + 2 : at + 12]) > 1.3 * _median(rows[at - 11 : at - 1]):
            return rows, None


def nan_that_stays(seed):
    d = _dice(seed, 2)
    kind = d.choice(("float16", "rate", "batch"))
    if kind == "float16":  # no scaler, no guard: a value past 65504 is Inf
        return train(Setup(seed, dtype="float16", guard="none", bad_share=0.04, bad_gain=1e6, steps=100)), None
    if kind == "rate":
        return train(Setup(seed, model="linear", lr=d.choice((2.0, 5.0)), steps=d.choice((120, 200)))), None
    return train(Setup(seed, model="linear", lr=0.05, bad_share=0.03, bad_gain=1e15, steps=120)), None


def scale_that_never_moves(seed):
    d = _dice(seed, 3)
    return train(
        Setup(
            seed,
            dtype="float16",
            steps=d.choice((60, 100)),
            guard=d.choice(("skip_without_update", "fresh_scaler")),
            init_scale=2.0 ** d.choice((10, 13, 16)),
            bad_share=d.choice((0.04, 0.1, 0.2)),
            bad_gain=3e3,
            lr=d.choice((0.02, 0.05)),
        )
    ), None


def clip_on_scaled_gradients(seed):
    d = _dice(seed, 4)
    return train(
        Setup(
            seed,
            dtype="float16",
            unscale=False,
            clip=1.0,
            init_scale=2.0 ** d.choice((12, 14, 16)),
            growth_interval=d.choice((15, 25, 2000)),
            steps=d.choice((80, 120)),
            optimizer=d.choice(("sgd", "adam")),
            lr=d.choice((0.003, 0.02)),
            model=d.choice(("mlp", "tokens")),
        )
    ), None


def skip_rate(seed):
    d = _dice(seed, 5)
    return train(
        Setup(
            seed,
            dtype="float16",
            bad_share=d.choice((0.12, 0.2, 0.3)),
            bad_gain=1e6,
            steps=d.choice((120, 200)),
            growth_interval=d.choice((8, 2000)),
            clip=d.choice((0.0, 1.0)),
        )
    ), None


def loss_k_times(seed):
    d = _dice(seed, 6)
    return train(
        Setup(
            seed,
            accumulate=d.choice((2, 4, 8, 16)),
            divide=False,
            batch=d.choice((8, 16)),
            steps=d.choice((40, 60)),
            val_every=d.choice((5, 10)),
            lr=d.choice((0.002, 0.005)),
            model=d.choice(("mlp", "tokens")),
        )
    ), None


def bent_resume(seed):
    d = _dice(seed, 7)
    forgets = d.choice(("rng", "data", "optimizer", "schedule", "scaler"))
    setup = Setup(
        seed,
        dropout=0.3,
        optimizer=d.choice(("adam", "momentum")),
        lr=0.01,
        schedule="cosine",
        steps=d.choice((50, 80)),
    )
    if forgets == "scaler":
        # The factor has come down from where it began, so that a new scaler is another one.
        setup = replace(setup, dtype="float16", init_scale=2.0**22, optimizer="momentum")
    baseline = train(setup)
    return train(replace(setup, stop_at=d.randint(20, 35), resume_forgets=forgets)), baseline


def schedule_on_skips(seed):
    d = _dice(seed, 8)
    return train(
        Setup(
            seed,
            dtype="float16",
            schedule=d.choice(("cosine", "onecycle", "warmup")),
            schedule_on_skips=True,
            bad_share=d.choice((0.06, 0.1)),
            bad_gain=1e6,
            steps=d.choice((100, 160)),
        )
    ), None


def schedule_restarted(seed):
    d = _dice(seed, 9)
    steps = d.choice((60, 100))
    return train(
        Setup(
            seed,
            schedule=d.choice(("cosine", "warmup")),
            steps=steps,
            stop_at=int(steps * d.uniform(0.35, 0.7)),
            resume_forgets="schedule",
            model=d.choice(MODELS[:2]),
            optimizer=d.choice(("sgd", "adam")),
            lr=0.01,
        )
    ), None


def clip_at_every_step(seed):
    d = _dice(seed, 10)
    return train(
        Setup(seed, clip=d.choice((0.005, 0.02)), lr=0.5, steps=d.choice((80, 120)), model=d.choice(MODELS[:2]))
    ), None


def diverging(seed):
    """A rate above what the model bears. The label: the last tenth is half as much again above the first loss."""
    d = _dice(seed, 11)
    while True:
        model = d.choice(("mlp", "tokens", "linear"))
        steps = d.choice((100, 160))
        rows = train(
            Setup(
                seed,
                model=model,
                lr=d.uniform(0.2, 0.4) if model == "linear" else d.choice((0.1, 0.3, 1.0)),
                optimizer="sgd" if model == "linear" else d.choice(("adam", "momentum")),
                schedule="constant" if model == "linear" else d.choice(("warmup", "constant", "onecycle")),
                batch=d.choice((8, 16)),
                steps=steps,
            )
        )
        end = [row["loss"] for row in rows[-steps // 10 :]]
        if min(end) > 1.1 * rows[0]["loss"] and _mean(rows[-steps // 10 :]) > 1.5 * rows[0]["loss"]:
            return rows, None


def healthy_rows(seed, salt):
    """A plain run's rows, and the dice that the rest is decided by."""
    d = _dice(seed, salt)
    return [
        dict(row) for row in train(Setup(seed, steps=d.choice((40, 70)), val_every=10, model=d.choice(MODELS[:2])))
    ], d


def steps_backwards(seed):
    """Resumed from a checkpoint some steps back, appended to the old log."""
    rows, d = healthy_rows(seed, 12)
    cut = d.randint(20, 35)
    back = d.randint(2, 12)
    return rows[:cut] + rows[cut - back :], None


def steps_twice(seed):
    """Two ranks write the same file."""
    rows, _ = healthy_rows(seed, 13)
    return [row for row in rows for _ in range(2)], None


#: Label -> (how it is made, the rules that name it).
BROKEN = {
    "spike without clipping": (spike_without_clipping, {"spike_stays"}),
    "NaN that stays": (nan_that_stays, {"nan_stays"}),
    "scale never moves": (scale_that_never_moves, {"scale_never_moves"}),
    "clip on scaled gradients": (clip_on_scaled_gradients, {"norm_follows_scale"}),
    "skip rate above 5 %": (skip_rate, {"skip_rate"}),
    "loss K times too large": (loss_k_times, {"loss_times_k"}),
    "resume leaves its baseline": (bent_resume, {"leaves_baseline"}),
    "schedule moves on skips": (schedule_on_skips, {"schedule_moves_on_skips"}),
    "schedule restarts on resume": (schedule_restarted, {"schedule_restarts"}),
    "clip at every step": (clip_at_every_step, {"clips_every_step"}),
    "divergence": (diverging, {"diverged", "spike_stays", "nan_stays"}),
    "steps backwards": (steps_backwards, {"log_backwards"}),
    "steps twice": (steps_twice, {"log_twice"}),
}


# --- healthy: name -> what makes one with a seed.


def _thinned(rows, dice, share):
    """Values missing here and there, as where a logger drops a line."""
    return [{k: (None if k != "step" and dice.random() < share else v) for k, v in row.items()} for row in rows]


def with_temperature(rows, dice, settles_c):
    """With the readings of a simulated card that this load brings to ``settles_c``, a row each second."""
    now = [0.0]
    card = SimulatedCard(25, heat_capacity_j_per_c=10, cooling_time_s=8, clock=lambda: now[0])
    read = []
    for _ in rows:
        now[0] += 1
        card.work(joules=dice.uniform(0.99, 1.01) * (settles_c - 25) * 10 / 8)
        read.append(round(card.read().temperature_c))
    return [{**row, "gpu_temp": celsius} for row, celsius in zip(rows, read, strict=True)]


HEALTHY = {
    "plain": lambda s, d: train(Setup(s, model=d.choice(MODELS), lr=0.02)),
    "warm-up": lambda s, d: train(Setup(s, schedule="warmup", optimizer="adam", lr=0.01, clip=1.0, val_every=10)),
    "batch of 1 or 2": lambda s, d: train(Setup(s, batch=d.choice((1, 2)), lr=0.01, steps=150, model=d.choice(MODELS))),
    "batch of 2, momentum": lambda s, d: train(Setup(s, batch=2, lr=0.004, optimizer="momentum", steps=120, clip=1.0)),
    "learning-rate restarts": lambda s, d: train(
        Setup(s, schedule="restarts", steps=120, lr=d.choice((0.05, 0.2)), model=d.choice(MODELS[:2]))
    ),
    "one cycle": lambda s, d: train(Setup(s, schedule="onecycle", steps=100, lr=0.1)),
    "stairs": lambda s, d: train(Setup(s, schedule="stairs", steps=100, lr=0.1, optimizer="momentum", clip=1.0)),
    "epochs from easy to hard": lambda s, d: train(
        Setup(s, epoch_steps=d.choice((20, 30)), steps=120, lr=0.05, batch=8, val_every=20)
    ),
    "fine-tuning": lambda s, d: train(Setup(s, pretrained=150, lr=0.005, steps=80, optimizer="momentum", val_every=10)),
    "bfloat16, no scaler": lambda s, d: train(Setup(s, dtype="bfloat16", steps=70, clip=1.0, schedule="cosine")),
    "float16, scaler finds its factor": lambda s, d: train(
        Setup(s, dtype="float16", init_scale=2.0 ** d.choice((16, 20, 24)), growth_interval=d.choice((20, 2000)))
    ),
    "float16, rare overflow": lambda s, d: train(
        Setup(
            s, dtype="float16", bad_share=0.01, bad_gain=3e4, steps=150, growth_interval=40, schedule="cosine", clip=1.0
        )
    ),
    "logged every 100 steps": lambda s, d: train(
        Setup(
            s, model="linear", steps=3000, log_every=100, lr=0.003, batch=4, schedule=d.choice(("constant", "cosine"))
        )
    ),
    "values missing": lambda s, d: _thinned(train(Setup(s, val_every=7, clip=1.0, steps=90)), d, 0.2),
    "accumulated and divided": lambda s, d: train(
        Setup(s, accumulate=d.choice((2, 4)), batch=8, steps=50, val_every=10, model=d.choice(MODELS[:2]))
    ),
    "dropout": lambda s, d: train(Setup(s, dropout=0.5, steps=100, val_every=10, optimizer="adam", lr=0.005)),
    "resumed whole": lambda s, d: train(
        Setup(
            s,
            schedule=d.choice(("cosine", "warmup")),
            optimizer="adam",
            lr=0.01,
            stop_at=d.randint(20, 60),
            dropout=0.2,
        )
    ),
    "warm card": lambda s, d: with_temperature(
        train(Setup(s, model=d.choice(MODELS[:2]), lr=0.02)), d, settles_c=d.uniform(60, 78)
    ),
    "short": lambda s, d: train(Setup(s, steps=d.randint(1, 15), val_every=3)),
}


#: How other trainers name things: ours, Hugging Face's, Lightning's. The last two log validation in a row of its own,
#: and no flag for a skipped step.
STYLES = (
    {},
    {"lr": "learning_rate", "grad_norm": "gradient_norm", "grad_norm_clipped": "gradient_norm_clipped",
     "scale": "scaler_scale"},
    {"lr": "learning_rate", "val_loss": "eval_loss"},
    {"loss": "train_loss", "lr": "lr-SGD", "scale": "loss_scale"},
)  # fmt: skip


def styled(rows, style):
    """``rows`` as another trainer would have logged them."""
    names, made = STYLES[style], []
    for row in rows:
        apart = style >= 2 and row.get("val_loss") is not None
        kept = {k: v for k, v in row.items() if not (apart and k == "val_loss") and not (style >= 2 and k == "skipped")}
        made.append({names.get(k, k): v for k, v in kept.items()})
        if apart:
            made.append({"step": row["step"], names.get("val_loss", "val_loss"): row["val_loss"]})
    return made


def broken(label, seed):
    """(rows, baseline or None) of a run that has ``label``, in the style of a trainer that goes by the seed."""
    rows, baseline = BROKEN[label][0](seed)
    return styled(rows, seed % len(STYLES)), baseline and styled(baseline, seed % len(STYLES))


def healthy(name, seed):
    """The rows of a healthy run."""
    return styled(HEALTHY[name](seed, _dice(seed, 99)), seed % len(STYLES))


def write_csv(rows, path):
    """Rows as a CSV; what is missing is an empty cell."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
