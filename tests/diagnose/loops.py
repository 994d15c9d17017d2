"""A plain PyTorch loop that can be broken on purpose, and what it logs: real models, real gradients, tiny.

``train(Setup(...))`` gives the rows of a run. Every fault is one that people put into their own loops; none is faked
in the log.
"""

import copy
import math
import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 24
CLASSES = 4


@dataclass(frozen=True)
class Setup:
    """One run; the defaults are a healthy one."""

    seed: int = 0
    steps: int = 80
    model: str = "mlp"  # mlp, linear, tokens
    batch: int = 16
    lr: float = 0.3
    optimizer: str = "sgd"  # sgd, momentum, adam
    schedule: str = "constant"  # constant, cosine, warmup, restarts, onecycle, stairs
    dtype: str = "float32"  # float32, float16, bfloat16
    init_scale: float = 2.0**12
    growth_interval: int = 2000
    clip: float = 0.0
    accumulate: int = 1
    val_every: int = 0
    epoch_steps: int = 0  # the data repeats after so many steps, ordered from easy to hard
    dropout: float = 0.0
    pretrained: int = 0
    log_every: int = 1
    # faults
    bad_batch_at: int = 0
    bad_share: float = 0.0  # of batches whose values do not fit float16
    bad_gain: float = 3e4
    guard: str = "scaler"  # scaler, skip_without_update, fresh_scaler, none
    unscale: bool = True
    divide: bool = True
    schedule_on_skips: bool = False
    stop_at: int = 0
    resume_forgets: str = ""  # schedule, rng, optimizer, data, scaler


def make_model(setup):
    torch.manual_seed(setup.seed)
    if setup.model == "linear":
        return nn.Linear(WIDTH, 1)
    if setup.model == "tokens":
        return nn.Sequential(
            nn.Embedding(12, WIDTH), nn.Flatten(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(setup.dropout), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


class Data:
    """Batches by their number: the same number gives the same batch, unless the generators started afresh."""

    def __init__(self, setup, salt=0):
        self.setup, self.salt = setup, salt
        teacher = torch.Generator().manual_seed(7 + setup.seed)
        self.weights = torch.randn(WIDTH, CLASSES, generator=teacher)

    def batch(self, number, size=None):
        s = self.setup
        if s.epoch_steps:
            number = number % s.epoch_steps
        g = torch.Generator().manual_seed(1_000_003 * s.seed + number + 500_009 * self.salt)
        size = size or s.batch
        if s.model == "tokens":
            x = torch.randint(0, 12, (size, 4), generator=g)
            return x, (x[:, 0] + x[:, 2]) % CLASSES
        x = torch.randn(size, WIDTH, generator=g)
        hardness = 0.2 + (2.0 * number / s.epoch_steps if s.epoch_steps else 0.0)
        clean = x @ self.weights / WIDTH**0.5 * 2
        noisy = clean + hardness * torch.randn(size, CLASSES, generator=g)
        if s.bad_share and torch.rand((), generator=g).item() < s.bad_share:
            x = x * s.bad_gain
        return x, (noisy[:, :1] if s.model == "linear" else noisy.argmax(1))


def loss_of(model, x, y):
    out = model(x)
    return F.mse_loss(out, y) if y.is_floating_point() else F.cross_entropy(out, y)


def make_optimizer(setup, model):
    if setup.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=setup.lr)
    return torch.optim.SGD(model.parameters(), lr=setup.lr, momentum=0.9 if setup.optimizer == "momentum" else 0.0)


def make_schedule(setup, optimizer):
    n = setup.steps

    def factor(u):
        if setup.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(u, n) / n))
        if setup.schedule == "warmup":
            w = max(1, n // 5)
            return (u + 1) / w if u < w else 0.5 * (1 + math.cos(math.pi * min(1.0, (u - w) / (n - w))))
        if setup.schedule == "restarts":
            period = max(4, n // 4)
            return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (u % period) / period))
        if setup.schedule == "onecycle":
            half = n / 2
            return 0.04 + 0.96 * (u / half if u < half else max(0.0, (n - u) / half))
        if setup.schedule == "stairs":
            return 0.3 ** (3 * u // n)
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def norm_of(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])).item()


class Loop:
    """The loop of a run: its model, optimizer, schedule, scaler, and the rows so far."""

    def __init__(self, setup, salt=0):
        self.setup, self.data = setup, Data(setup, salt)
        self.model = make_model(setup)
        self.optimizer = make_optimizer(setup, self.model)
        self.schedule = make_schedule(setup, self.optimizer)
        self.autocast = setup.dtype != "float32"
        self.dtype = getattr(torch, setup.dtype)
        self.scaler = self.new_scaler()
        self.rows = []

    def new_scaler(self):
        on = self.setup.dtype == "float16" and self.setup.guard != "none"
        return torch.amp.GradScaler(
            "cpu", init_scale=self.setup.init_scale, growth_interval=self.setup.growth_interval, enabled=on
        )

    def loss(self, x, y):
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.autocast):
            return loss_of(self.model, x, y)

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            clean = Data(replace(self.setup, bad_share=0.0))
            value = loss_of(self.model, *clean.batch(10**6, 256)).item()
        self.model.train()
        return value

    def step(self, number):
        s, total = self.setup, 0.0
        self.optimizer.zero_grad()
        for k in range(s.accumulate):
            x, y = self.data.batch(number * s.accumulate + k)
            if number == s.bad_batch_at and number:
                x, y = x * 60, (y * 60 if y.is_floating_point() else (y + 1) % CLASSES)
            loss = self.loss(x, y)
            part = loss / s.accumulate if s.divide else loss
            self.scaler.scale(part).backward()
            total += part.item()
        scale, lr = self.scaler.get_scale(), self.optimizer.param_groups[0]["lr"]
        skipped = self.update()
        if not skipped or s.schedule_on_skips:
            with warnings.catch_warnings():  # torch warns where the first step was skipped; that is the fault
                warnings.simplefilter("ignore")
                self.schedule.step()
        row = {"step": number, "loss": total, "lr": lr, "grad_norm": self.norm}
        if s.clip:
            row["grad_norm_clipped"] = min(self.norm, s.clip) if math.isfinite(self.norm) else None
        if s.dtype == "float16" and s.guard != "none":
            row |= {"scale": scale, "skipped": int(skipped)}
        if s.val_every and number % s.val_every == 0:
            row["val_loss"] = self.validate()
        if number % s.log_every == 0 or number == 1:
            self.rows.append(row)

    def update(self):
        """One update as the setup says; whether it was skipped."""
        s = self.setup
        if s.guard == "skip_without_update":
            # The norm is taken by hand and a bad step left early: scaler.update() is never reached.
            self.norm = norm_of(self.model) / self.scaler.get_scale()
            if not math.isfinite(self.norm):
                return True
        if s.guard == "fresh_scaler":
            self.scaler = self.new_scaler()
            self.scaler.scale(torch.zeros(()))
        if s.unscale and s.guard != "skip_without_update":
            self.scaler.unscale_(self.optimizer)
        if s.guard != "skip_without_update":
            self.norm = norm_of(self.model)
        if s.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if s.guard == "fresh_scaler":
            skipped = self.scaler.get_scale() < before
            self.scaler = self.new_scaler()  # "to be safe", each step
            return skipped
        return self.scaler.get_scale() < before

    def state(self):
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load(self, state):
        forgets = self.setup.resume_forgets
        self.model.load_state_dict(state["model"])
        if forgets != "optimizer":
            self.optimizer.load_state_dict(state["optimizer"])
        if forgets == "schedule":
            self.schedule = make_schedule(self.setup, make_optimizer(self.setup, self.model))
            self.schedule.optimizer = self.optimizer
            self.optimizer.param_groups[0]["lr"] = self.schedule.get_last_lr()[0]
        else:
            self.schedule.load_state_dict(state["schedule"])
            self.optimizer.param_groups[0]["lr"] = self.schedule.get_last_lr()[0]
        if forgets != "scaler" and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if forgets != "rng":
            torch.set_rng_state(state["rng"])


def train(setup):
    """The rows of a run; where ``stop_at`` is set, it is stopped there, and resumed in a new loop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loop = Loop(setup)
        if setup.pretrained:
            for number in range(1, setup.pretrained + 1):
                loop.step(10_000 + number)
            loop = _fine_tuned(setup, loop)
        for number in range(1, setup.steps + 1):
            if number == setup.stop_at + 1 and setup.stop_at:
                again = Loop(setup, salt=1 if setup.resume_forgets == "data" else 0)
                torch.manual_seed(setup.seed)
                again.load(loop.state())
                again.rows = loop.rows
                loop = again
            loop.step(number)
        return loop.rows
    finally:
        torch.set_num_threads(threads)


def _fine_tuned(setup, loop):
    fresh = Loop(setup)
    fresh.model.load_state_dict(loop.model.state_dict())
    return fresh
