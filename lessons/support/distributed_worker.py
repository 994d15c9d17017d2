"""What each rank of lesson 08 does: the naive loops that fail, the guarded step, the whole run.

``launch`` starts these functions on every rank; a notebook's own functions cannot be started there. They print nothing
and hand back what they found.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetrain_core import (
    AmpTrainState,
    Corpus,
    MiniGPT,
    agree,
    next_token_loss,
    train_one_optimizer_step,
)
from safetrain_core.distributed import everyones, rank, world_size
from safetrain_core.train.ranks import RankFacts, rank_facts, state_digest
from safetrain_core.train.worker import sharded, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from . import distributed_run as lab

CPU = torch.device("cpu")


def batches(
    plan: lab.Plan, num: int, *, empty_at: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """``num`` batches of this rank's own rows. In batch ``empty_at`` (from 1) of one rank no target is left."""
    data = Corpus.from_files([plan.corpus], lab.SIZE.context).train
    picks = torch.Generator().manual_seed(1000 * plan.seed + rank())
    made = []
    for step in range(1, num + 1):
        chosen = [
            data[i] for i in torch.randint(len(data), (lab.ROWS,), generator=picks).tolist()
        ]
        x, y = (torch.stack(part) for part in zip(*chosen, strict=True))
        if step == empty_at and rank() == lab.FAULTY:
            y = torch.full_like(y, -100)  # prompts so long that every answer was cut off
        made.append((x, y))
    return made


def fresh(plan: lab.Plan, *, cut: bool = True) -> nn.Module:
    """The lesson's MiniGPT with the same weights on each rank; then each rank draws its own random numbers."""
    torch.manual_seed(plan.seed)
    model: nn.Module = MiniGPT(lab.SIZE)
    if cut:
        model = sharded(model, CPU)
    torch.manual_seed(plan.seed + 1 + rank())
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lab.LR)


# --- the first launch: what goes wrong --------------------------------------------------------------------------


def broken(plan: lab.Plan) -> lab.Broken:
    """The three naive ways, one after the other, and what is cut unevenly."""
    alone = judge_alone(plan)  # first: it warms up what must not be late in the next one
    return lab.Broken(leave_early(plan), alone, maxima(), resume_naively(plan), uneven())


def leave_early(plan: lab.Plan) -> lab.Left:
    """Lesson 01's order on several ranks: a rank whose loss is not finite leaves out its backward."""
    dist.barrier()
    # A group of its own, whose waits end soon: the default ones last for minutes.
    group = dist.new_group(timeout=timedelta(seconds=plan.bound_s))
    model = DistributedDataParallel(fresh(plan, cut=False), process_group=group)
    optimizer = adamw(model)
    paired, stuck_in, ended_in = [], None, ""
    for step, (x, y) in enumerate(batches(plan, lab.SHORT, empty_at=lab.BAD), start=1):
        loss = next_token_loss(model(x), y)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        try:
            loss.backward()
        except RuntimeError as error:  # gloo's "Timed out waiting"
            stuck_in = step
            ended_in = str(error).rpartition("] ")[2]  # without the line of gloo's source
            break
        optimizer.step()
        paired.append(step)
    dist.barrier()  # in the group of all, which is sound
    return lab.Left(paired, stuck_in, ended_in)


def judge_alone(plan: lab.Plan) -> lab.Alone:
    """Every rank makes its backward, and then decides by its own loss whether it takes the step."""
    model = DistributedDataParallel(fresh(plan, cut=False))
    optimizer = adamw(model)
    away, losses = [], []
    for x, y in batches(plan, lab.LONG, empty_at=lab.BAD):
        losses.append(_step_alone(model, optimizer, x, y))
        away.append(_from_rank_0(model))
    squares = [p.detach().double().square().sum() for p in model.parameters()]
    norm = float(torch.stack(squares).sum().sqrt())
    model = fresh(plan)
    sharded_optimizer = adamw(model)
    for x, y in batches(plan, lab.LONG, empty_at=lab.BAD):
        _step_alone(model, sharded_optimizer, x, y)
    return lab.Alone(away, losses, norm, _updates(optimizer), _updates(sharded_optimizer))


def _step_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> float:
    loss = next_token_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    return loss.item()


def _updates(optimizer: torch.optim.Optimizer) -> int:
    return int(next(iter(optimizer.state.values()))["step"])


def _from_rank_0(model: nn.Module) -> float:
    """How far this rank's weights are from those of rank 0, as a share of their length."""
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    return float((own - first).norm() / first.norm())


def maxima() -> list[float]:
    """MAX over one loss per rank, a float, where the NaN is on rank 0, on rank 1, ..."""
    found = []
    for place in range(world_size()):
        loss = torch.tensor(math.nan if rank() == place else 4.0 + rank())
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)
        found.append(loss.item())
    return found


def resume_naively(plan: lab.Plan) -> dict[str, lab.Resumed]:
    """Save with torch's own DCP in mid-run, go on, and resume: with one random state for all, and with each rank's own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    data, folder = batches(plan, plan.steps), plan.out / "naive"
    names = {lab.ONE_STATE: "random", lab.OWN_STATES: f"random of rank {rank()}"}

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        random = {name: torch.get_rng_state() for name in names.values()}
        return {"model": weights, "optimizer": moments, **random}

    model = fresh(plan)
    optimizer = adamw(model)
    before = _mean_losses(model, optimizer, data[: plan.at])
    mine = torch.get_rng_state()
    dcp.save(state(model, optimizer), checkpoint_id=folder)
    after = _mean_losses(model, optimizer, data[plan.at :])
    found = {}
    for way, name in names.items():
        model = fresh(plan)
        optimizer = adamw(model)
        saved = state(model, optimizer)
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        torch.set_rng_state(saved[name])
        again = _mean_losses(model, optimizer, data[plan.at :])
        found[way] = lab.Resumed(before + after, again, torch.equal(saved[name], mine))
    return found


def _mean_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Train through ``data``; the loss of each step, over all ranks."""
    told = []
    for x, y in data:
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size()
        dist.all_reduce(mean)
        told.append(mean.item())
    return told


def uneven() -> RankFacts:
    """A weight of ``lab.UNEVEN`` rows, which four ranks do not divide, and its AdamW."""
    layer = sharded(nn.Linear(1, lab.UNEVEN, bias=False), CPU)
    optimizer = adamw(layer)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return rank_facts(layer, optimizer)


# --- the second launch: what holds ------------------------------------------------------------------------------


def whole_run(plan: lab.Plan, by_hand: str) -> lab.Whole:
    """The learner's step, sent as text, beside the package's; what each costs; then the run from the first step."""
    hand = {"torch": torch, "dist": dist, "next_token_loss": next_token_loss}
    exec(compile(by_hand, "<by hand>", "exec"), hand)
    return lab.Whole(
        agreements(hand["agree_by_hand"], plan.seed),
        *guarded(plan, hand["step_by_hand"]),
        {way: messages(plan, way) for way in lab.WAYS},
        {n: shared_by(plan, n) for n in lab.sizes(plan.ranks)},
        train(plan.job),
    )


def agreements(by_hand: Any, seed: int) -> list[tuple[list[int], int, int]]:
    """For many combinations of codes, one for each rank: those, what the learner's agree says, and the package's."""
    combinations = [
        [code if place == at else 0 for place in range(world_size())]
        for at in range(world_size())
        for code in range(6)
    ]
    draws = torch.Generator().manual_seed(seed)
    combinations += torch.randint(0, 6, (20, world_size()), generator=draws).tolist()
    return [(codes, by_hand(codes[rank()]), agree(codes[rank()])) for codes in combinations]


def guarded(plan: lab.Plan, step_by_hand: Any) -> tuple[list[int], list[Any], bool, float]:
    """Codes of the learner's steps; rows of the package's; whether its SKIP left no trace; how far the two are apart."""
    data = batches(plan, lab.SHORT, empty_at=lab.BAD)
    hand = fresh(plan)
    optimizer = adamw(hand)
    codes = [step_by_hand(hand, optimizer, x, y) for x, y in data]

    model = fresh(plan)
    state = AmpTrainState(
        model, optimizer=adamw(model), loss_fn=next_token_loss, amp_dtype=torch.float32
    )
    untouched = True
    for x, y in data:
        before = state_digest(state)
        row = state.step(x, y)
        if row.skipped:
            untouched = untouched and state_digest(state) == before
    gaps = [
        (_held(a) - _held(b)).abs().max()
        for a, b in zip(hand.parameters(), model.parameters(), strict=True)
    ]
    return codes, state.log, untouched, float(torch.stack(gaps).max())


def _held(weight: Any) -> Tensor:
    return weight.detach().to_local()


class Messages(TorchDispatchMode):
    """Counts the messages among ranks while entered, by kind, as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(lab.KINDS, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again as what it does to this rank's part
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.replace("_", "")
            for kind in lab.KINDS:
                self.counts[kind] += kind.replace("-", "") in name
        return func(*args, **(kwargs or {}))


def messages(plan: lab.Plan, way: str) -> dict[str, int]:
    """Messages among the ranks in one update of ``lab.ACCUM`` micro-batches."""
    model = fresh(plan)
    optimizer = adamw(model)
    state = AmpTrainState(
        model, optimizer=optimizer, loss_fn=next_token_loss, amp_dtype=torch.float32
    )
    data = batches(plan, 2 * lab.ACCUM)
    state.step_window(data[: lab.ACCUM])  # the first update sets things up
    with Messages() as seen:
        window = data[lab.ACCUM :]
        if way == lab.GUARDED:
            state.step_window(window)
        else:
            last = way != lab.EVERY
            train_one_optimizer_step(
                model, optimizer, window, next_token_loss, no_sync_until_last=last
            )
    return seen.counts


def shared_by(plan: lab.Plan, ranks: int) -> RankFacts:
    """This rank's share where ``ranks`` ranks hold the model together; the others do the same beside them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("copies", "shards")
    mesh = init_device_mesh("cpu", (world_size() // ranks, ranks), mesh_dim_names=names)[
        "shards"
    ]
    torch.manual_seed(plan.seed)
    model = MiniGPT(lab.SIZE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    ((x, y),) = batches(plan, 1)
    next_token_loss(model(x), y).backward()
    optimizer.step()
    facts = rank_facts(model, optimizer)
    held = everyones(facts.weight_bytes + facts.optimizer_bytes)
    if sum(held) != lab.BYTES * facts.parameters * world_size() // ranks:
        raise RuntimeError(
            f"the shares {held} of {world_size() // ranks} models do not add up"
        )
    return facts
