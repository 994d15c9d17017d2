"""What the ranks of tests/step/test_ranks.py run, and the test itself on one process, on the same global batches."""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn

from safetrain_core import AmpTrainState, clip_global_l2_norm, has_non_finite_grad
from safetrain_core.distributed import rank, world_size

VOCABULARY = 7


def call(worker, args, options):
    return globals()[worker](*args, **options)


def spread(model, kind):
    """``model`` as several ranks train it: fsdp2, ddp; as it is on one process."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world_size(),))
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def net(kind=None, norm=False):
    """5 -> 7 -> 1: no dimension divides by 2 or 3 without a rest, and the last layer leaves all ranks but one empty."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), *([nn.BatchNorm1d(7)] if norm else []), nn.Tanh(), nn.Linear(7, 1)]
    return spread(nn.Sequential(*layers), kind)


def reader(kind=None):
    torch.manual_seed(0)
    return spread(nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)), kind)


def token_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def batches(count, rows=12, scale=1.0):
    """Windows of two micro-batches each."""
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(rows, 5, generator=generator), scale * torch.randn(rows, 1, generator=generator)) for _ in "ab"]
        for _ in range(count)
    ]


def of_this_rank(window):
    return [(x.chunk(world_size())[rank()], y.chunk(world_size())[rank()]) for x, y in window]


def whole(tensor):
    """All of a DTensor; every rank has to ask."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def plain_name(name):
    return name.removeprefix("module.")


def told(state, model):
    """Rows, weights, buffers and moments."""
    names = {p: plain_name(n) for n, p in model.named_parameters()}
    moments = {
        f"{names[p]} {key}": whole(value)
        for p, entry in state.optimizer.state.items()
        for key, value in entry.items()
        if key != "step"
    }
    return {
        "rows": list(state.log),
        "weights": {name: whole(p) for p, name in names.items()},
        "buffers": {plain_name(n): b.detach().clone() for n, b in model.named_buffers()},
        "moments": moments,
    }


def trains(kind, windows, *, faults=(), norm=False, detail=False, requests=(), **options):
    """Train on ``windows``; a fault (window, rank, what) acts on one rank, or on all for rank None.

    ``requests``: for each window, what each rank asks for.
    """
    model, now = net(kind, norm), {}

    def loss_fn(output, target):
        now["micro"] += 1
        for window, whose, what in faults:
            if window == now["window"] and whose in (None, rank()):
                if what == f"raises in {now['micro']}":
                    raise ArithmeticError("in the loss, after the model's forward")
                if what == "nan loss":
                    target = target * math.nan
                if what == "inf gradient":
                    output.register_hook(lambda grad: grad * math.inf)
                if what == "large gradient":
                    output.register_hook(lambda grad: grad * 1e4)
        return nn.functional.mse_loss(output, target)

    def in_the_middle(module, args):
        if (now["window"], None, f"raises in the model in {now['micro'] + 1}") in faults:
            raise ArithmeticError("between two layers")

    next(m for m in model.modules() if isinstance(m, nn.Tanh)).register_forward_pre_hook(in_the_middle)
    state = AmpTrainState(model, 0.05, loss_fn=loss_fn, **{"amp_dtype": torch.float32, **options})
    details, reduced, asked = [], [], []
    for number, window in enumerate(windows):
        now.update(window=number, micro=0)
        with Counting(reduced):
            here = requests[number][rank()] if requests else 0
            with contextlib.suppress(ArithmeticError):
                state.step_window(of_this_rank(window), detail=detail, requests=here)
        asked.append(state.requests)
        if state.detail is not None:
            names = {p: plain_name(n) for n, p in model.named_parameters()}
            norms = {names[p]: value for p, value in state.detail.norm_of.items()}
            details.append((norms, state.detail.max_abs, state.detail.rms))
    return {**told(state, model), "details": details, "reduced": reduced, "requests": asked}


class Counting:
    """Appends how many all-reduces this process asked for."""

    def __init__(self, counts):
        self.counts = counts

    def __enter__(self):
        self.real, self.count = dist.all_reduce, 0

        def all_reduce(*args, **options):
            self.count += 1
            return self.real(*args, **options)

        dist.all_reduce = all_reduce

    def __exit__(self, *error):
        dist.all_reduce = self.real
        self.counts.append(self.count)


def reads_tokens(kind, windows, weighting):
    model = reader(kind)
    state = AmpTrainState(model, 0.05, amp_dtype=torch.float32, loss_fn=token_loss, loss_weighting=weighting)
    reduced = []
    for window in windows:
        with Counting(reduced):
            state.step_window(of_this_rank(window))
    return {**told(state, model), "reduced": reduced}


def guards(kind, max_norm):
    """The guard by itself: (norm before, after, gradients, then with a NaN, an Inf on one rank)."""
    model = net(kind)
    (x, y), _ = of_this_rank(batches(1)[0])
    nn.functional.mse_loss(model(x), y).backward()
    finite = has_non_finite_grad(model)
    pre, post = clip_global_l2_norm(model, max_norm)
    grads = {plain_name(n): whole(p.grad) for n, p in model.named_parameters()}
    found = []
    for value in (math.nan, math.inf):
        place = next(p.grad for p in model.parameters())
        place = place.to_local() if hasattr(place, "to_local") else place
        if rank() == world_size() - 1:
            place.view(-1)[0] = value
        before = place.clone()
        found.append((has_non_finite_grad(model), *clip_global_l2_norm(model, max_norm)))
        found.append(torch.equal(place.nan_to_num(7.0, 8.0), before.nan_to_num(7.0, 8.0)))
        place.view(-1)[0] = 0.0
    return pre, post, finite, grads, found


def huge_gradients(kind):
    """Each of 100 elements is 1e20: finite, though the sum of squares is not in float32."""
    torch.manual_seed(0)
    model = spread(nn.Sequential(nn.Linear(10, 10, bias=False)), kind)
    state = AmpTrainState(model, 0.01, amp_dtype=torch.float32, loss_fn=lambda output, _: output.sum())
    x = torch.full((1, 10), 1e20)
    row = state.step(x, x)
    return row.pre_clip, row.post_clip, row.skip_reason, whole(next(model.parameters()))


def scales(kind, real_overflow):
    """float16 with a scaler; the scale after each step. On the last rank alone, step 1 overflows."""
    model, now = net(kind), [0]

    def loss_fn(output, target):
        if not real_overflow and now[0] == 1 and rank() == world_size() - 1:
            output.register_hook(lambda grad: grad * math.inf)
        return nn.functional.mse_loss(output.float(), target)

    start = 2.0**24 if real_overflow else 1024.0
    state = AmpTrainState(
        model,
        0.05,
        amp_dtype=torch.float16,
        loss_fn=loss_fn,
        init_scale=start,
        growth_interval=20 if real_overflow else 2,
    )
    seen = []
    for window in batches(9 if real_overflow else 4):
        state.step_window(of_this_rank(window))
        now[0] += 1
        seen.append((state.log[-1].skip_reason, state.log[-1].scale, state.scale, state.scaling.good_in_a_row))
    return seen, told(state, model)["weights"]
