"""Training steps as people write them, right and wrong, over models, optimizers and seeds, for the probes to judge."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from safetrain_core import AmpTrainState, GaLore, MiniGPT, MiniGPTConfig, build_optimizer, train_one_optimizer_step

PAD = -100


class Tokens(nn.Module):
    """Logits for each of a row of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


def model(kind):
    match kind:
        case "linear":
            return nn.Linear(6, 3)
        case "mlp":
            return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
        case "dropout":
            return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        case "batchnorm":
            return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
        case "conv":
            return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
        case "tokens":
            return Tokens()
        case "gpt":
            return MiniGPT(MiniGPTConfig(vocab_size=12, context=8, layers=1, heads=2, width=8, dropout=0.1))
    raise ValueError(kind)


MODELS = ("linear", "mlp", "dropout", "batchnorm", "conv", "tokens", "gpt")


def batch(kind, seed, samples=12):
    made = torch.Generator().manual_seed(1000 + seed)
    if kind in ("tokens", "gpt"):
        x, y = (torch.randint(0, 12, (samples, 8), generator=made) for _ in range(2))
        for row in range(samples):  # sentences of 2 to 8 tokens
            y[row, 2 + row % 7 :] = PAD
        return x, y
    shape = (samples, 1, 5, 5) if kind == "conv" else (samples, 6)
    return torch.randn(shape, generator=made), torch.randint(0, 3, (samples,), generator=made)


def loss_of(output, target, reduction="mean"):
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=PAD, reduction=reduction)


def optimizer(kind, net):
    parameters = list(net.parameters())
    match kind:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.05)
        case "momentum":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
        case "adam":
            return torch.optim.Adam(parameters, lr=1e-2)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2)
        case "fused":
            return torch.optim.AdamW(parameters, lr=1e-2, fused=True)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=1e-2)
        case "lion":
            return build_optimizer(net, "lion", lr=1e-3, weight_decay=0.01)
        case "galore":
            return GaLore(parameters, torch.optim.AdamW, rank=2, update_interval=3, scale=0.5)
    raise ValueError(kind)


OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "fused", "rmsprop", "adagrad", "lion", "galore")


@dataclass
class Run:
    """What a script has as globals."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    dtype: torch.dtype | None
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A run by its kinds. ``amp``: None, "float16" (with a GradScaler) or "bfloat16"."""

    model: str = "mlp"
    optimizer: str = "adamw"
    amp: str | None = None
    seed: int = 0
    max_norm: float = 1.0

    def make(self):
        net = model(self.model)
        chosen = optimizer(self.optimizer, net)
        schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda n: 1 / (1 + n))
        dtype = getattr(torch, self.amp) if self.amp else None
        scaler = torch.amp.GradScaler("cpu", enabled=self.amp == "float16", init_scale=2.0**14)
        return Run(net, chosen, schedule, scaler, dtype)

    def batch(self):
        return batch(self.model, self.seed)

    def ours(self, **knobs):
        net = model(self.model)
        chosen = optimizer(self.optimizer, net)
        schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda n: 1 / (1 + n))
        dtype = getattr(torch, self.amp) if self.amp else torch.float32
        return AmpTrainState(
            net, max_norm=self.max_norm, amp_dtype=dtype, optimizer=chosen, scheduler=schedule, loss_fn=loss_of, **knobs
        )


def cases(amps=(None, "float16", "bfloat16"), models=MODELS, optimizers=OPTIMIZERS, seeds=(0, 1, 2), count=12):
    """``count`` cases that go round all kinds; they differ in each."""
    pairs = [(m, o) for o in optimizers for m in models]
    step = next(n for n in (11, 13, 17, 19, 23) if len(pairs) % n)
    chosen = [pairs[at * step % len(pairs)] for at in range(count)]
    return [Case(m, o, amps[at % len(amps)], seeds[at % len(seeds)]) for at, (m, o) in enumerate(chosen)]


def forward(run, x):
    if run.dtype is None:
        return run.model(x)
    with torch.autocast("cpu", run.dtype):
        return run.model(x).float()


def step(case, fault=None):
    """``step_fn(run, micro_batches)`` of a guarded loop with accumulation, AMP, clip and schedule; with one fault."""

    def work(run, window):
        weights = list(run.model.parameters())
        buffers = [b.clone() for b in run.model.buffers()]
        if fault != "gradients not cleared":
            run.optimizer.zero_grad()
        bad = False
        total = sum((y != PAD).sum() for _, y in window)
        for x, y in window:
            if fault == "zero_grad in the window":
                run.optimizer.zero_grad()
            loss = loss_of(forward(run, x), y)
            bad |= not loss.isfinite()
            match fault:
                case "not divided":
                    share = 1.0
                case "divided twice":
                    share = 1 / len(window) ** 2
                case "divided by a constant":
                    share = 1 / 8
                case "weighed equally":
                    share = 1 / len(window)
                case _:
                    share = (y != PAD).sum() / total
            if fault == "skips the backward of the last" and y is window[-1][1] and len(window) > 1:
                continue
            run.scaler.scale(loss * share).backward()
            if fault == "clip per micro-batch":
                nn.utils.clip_grad_norm_(weights, case.max_norm)
            if fault == "step per micro-batch":
                run.scaler.step(run.optimizer)
                run.scaler.update()
                run.optimizer.zero_grad()
        if fault == "step per micro-batch":
            return
        if fault == "clip before unscale":
            nn.utils.clip_grad_norm_(weights, case.max_norm)
            run.scaler.unscale_(run.optimizer)
        elif fault == "clip without unscale":
            nn.utils.clip_grad_norm_(weights, case.max_norm)
        else:
            run.scaler.unscale_(run.optimizer)
        bad |= not all(p.grad is None or bool(p.grad.isfinite().all()) for p in weights)
        if bad and fault != "no guard":
            leave(run, buffers, weights, fault)
            return
        match fault:
            case "no clip" | "clip before unscale" | "clip without unscale" | "clip per micro-batch":
                pass
            case "clip by value":
                nn.utils.clip_grad_value_(weights, case.max_norm / 40)
            case "clip after the step":
                run.optimizer.step()
                nn.utils.clip_grad_norm_(weights, case.max_norm)
                run.scaler.update()
                return
            case "clip of the first layer only":
                nn.utils.clip_grad_norm_(weights[:1], case.max_norm)
            case "another max_norm":
                nn.utils.clip_grad_norm_(weights, case.max_norm / 3)
            case "normalises always":
                norm = nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
                for p in weights:
                    if p.grad is not None:
                        p.grad *= case.max_norm / norm
            case _:
                nn.utils.clip_grad_norm_(weights, case.max_norm)
        if fault == "no guard":  # as if there were no scaler either
            run.optimizer.step()
        else:
            run.scaler.step(run.optimizer)
        run.scaler.update()
        run.scheduler.step()

    return work


def leave(run, buffers, weights, fault):
    """The way out of a refused window."""
    if fault != "buffers stay":
        for buffer, before in zip(run.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    if fault == "schedule moves":
        run.scheduler.step()
    if fault == "NaN made 0":
        for p in weights:
            if p.grad is not None:
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        run.optimizer.step()
    if fault == "moments move":  # weights are put back, moments are not
        kept = [p.detach().clone() for p in weights]
        for p in weights:
            p.grad = torch.zeros_like(p)
        run.optimizer.step()
        with torch.no_grad():
            for p, before in zip(weights, kept, strict=True):
                p.copy_(before)
    if fault != "gradients not cleared":
        run.optimizer.zero_grad()
    if run.scaler.is_enabled() and fault != "no scaler.update":
        run.scaler.update()


# --- right steps, written otherwise ---------------------------------------------------------------------------


def divides_gradients(run, window):
    """Sums up losses over samples, and divides the gradients once, before the clip."""
    run.model.zero_grad(set_to_none=True)
    count, finite = 0, True
    for x, y in window:
        loss = loss_of(run.model(x), y, "sum")
        finite &= bool(loss.isfinite())
        loss.backward()
        count += int((y != PAD).sum())
    weights = [p for p in run.model.parameters() if p.grad is not None]
    for p in weights:
        p.grad /= count
    norm = nn.utils.clip_grad_norm_(weights, 1.0)
    if finite and norm.isfinite():
        run.optimizer.step()
        run.scheduler.step()
    run.optimizer.zero_grad(set_to_none=True)


def one_backward(run, window):
    """Keeps the graphs of all micro-batches and goes back once; stops the run on NaN."""
    losses = [loss_of(run.model(x), y, "sum") for x, y in window]
    loss = sum(losses) / sum((y != PAD).sum() for _, y in window)
    run.optimizer.zero_grad()
    if not torch.isfinite(loss):
        raise FloatingPointError("loss is not finite")
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
    run.optimizer.step()
    run.scheduler.step()


def with_closure(run, window):
    """The optimizer calls for the gradients itself, as Lightning has it."""

    def closure():
        run.optimizer.zero_grad()
        total = sum((y != PAD).sum() for _, y in window)
        loss = 0.0
        for x, y in window:
            part = loss_of(run.model(x), y, "sum") / total
            part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        return loss

    run.optimizer.step(closure)


def plain_of_ours(run, window):
    """``train_one_optimizer_step``: equal weights, no guard, no clip."""
    train_one_optimizer_step(run.model, run.optimizer, window, loss_of)


def amp_window(amp, window):
    """``AmpTrainState``."""
    return amp.step_window(window)
