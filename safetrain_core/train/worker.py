"""One rank of ``safetrain train``, or its only process: corpus, MiniGPT, trainer, run. Started here, by ``launch``, or
by torchrun; with several ranks the model is sharded by FSDP2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ..checkpoint.atomic import atomic_save, atomic_write_text
from ..checkpoint.model_state import model_state
from ..config import TrainConfig
from ..corpus import Corpus
from ..distributed import everyones, is_main, rank, world_size
from ..errors import ThermalAbort, TrainingFailed
from ..minigpt import MiniGPT, MiniGPTConfig, next_token_loss
from .console import plain_warnings, row_printer, say
from .devices import usable_device
from .ranks import RankFacts, rank_facts, state_digest
from .result import FitResult
from .run_folder import claimed, remove_old_run
from .trainer import SafeTrainer

__all__ = ["Job", "Report", "sharded", "train"]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one run is to do; plain values, so that it can be sent to the ranks.

    Args:
        size: the model's; its vocabulary is the corpus's. out: folder for what the run leaves.
        corpus: text files, None = the default corpus.
        device: ``cpu``, ``cuda``, ``cuda:1``; with several ranks ``cuda`` means a GPU for each.
        resume: None = a fresh run, ``auto``, or a checkpoint. overwrite: replace the run that ``out`` holds.
        quiet: print nothing. witness: keep a digest of the state at each checkpoint.
        init_seed: of the weights, where it is not the config's.
    """

    config: TrainConfig
    size: MiniGPTConfig
    out: Path
    corpus: Sequence[str] | None = None
    device: str = "cpu"
    resume: str | None = None
    overwrite: bool = False
    quiet: bool = False
    witness: bool = False
    init_seed: int | None = None


@dataclasses.dataclass
class Report:
    """What one rank's run reached.

    ``status``: as an exit status. ``failure``: why it is 1. ``began``: step it resumed from. ``digests``, where
    asked for: step -> sha256 of what this rank holds, at the beginning, at each checkpoint and at the end.
    """

    status: int
    result: FitResult
    facts: RankFacts
    began: int
    digests: dict[int, str]
    failure: str | None = None


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` with its weights cut over all ranks by FSDP2: each block of a stack by itself, then the rest.

    Raises:
        ValueError: on CPUs with torch 2.6, whose FSDP2 asks the CPU's stream for what it does not have.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
    """
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ValueError(
            f"FSDP2 on CPUs needs torch 2.7 or newer, this is {torch.__version__}; upgrade torch, or use one process"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world_size(),))
    for stack in model.children():
        for block in stack if isinstance(stack, nn.ModuleList) else ():
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(job: Job) -> Report:
    """Run ``job`` on this rank; every rank calls it with the same job.

    Raises:
        ValueError: the folder, the corpus, the device or the model cannot be used; the same on every rank.
    """
    # Idle OpenMP threads sleep instead of spinning: on a busy machine a run of 5 s took 100 s otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _warnings_of_one_rank(), contextlib.ExitStack() as stack:
        claim = claimed(job.out, may_hold_a_run=job.overwrite or job.resume is not None)
        _on_main(lambda: stack.enter_context(claim))
        return _run(job)


def _on_each(work: Callable[[], Any]) -> Any:
    """What ``work`` returns on this rank; what one rank refuses is refused on every rank, in the same words."""
    value, error = None, None
    try:
        value = work()
    except ValueError as refused:
        error = str(refused)
    if (told := next((one for one in everyones(error) if one is not None), None)) is not None:
        raise ValueError(told)
    return value


def _on_main(work: Callable[[], Any]) -> None:
    """Do ``work`` on rank 0; what it refuses is refused on every rank."""
    _on_each(lambda: work() if is_main() else None)


@contextlib.contextmanager
def _warnings_of_one_rank() -> Iterator[None]:
    if is_main():
        with plain_warnings():
            yield
        return
    logging.getLogger("safetrain_core").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _device(name: str) -> torch.device:
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', rank())}"
    try:
        device = usable_device(name)
    except ValueError as error:
        raise ValueError(f"--device {error}; use --device cpu") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _loader(data: Dataset[Any], config: TrainConfig, *, shuffle: bool) -> DataLoader[Any]:
    """Batches of this rank's share, padded with the first samples where the ranks do not divide the whole."""
    if world_size() == 1:
        return DataLoader(data, config.batch_size, shuffle=shuffle)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=shuffle, seed=config.seed)
    return DataLoader(data, config.batch_size, sampler=sampler)


def _parts(job: Job) -> tuple[torch.device, Corpus, MiniGPT]:
    """The device, the data, and the model on it; ``ValueError`` where one cannot be had."""
    device = _device(job.device)
    corpus = Corpus.from_files(job.corpus, job.size.context)
    torch.manual_seed(job.config.seed if job.init_seed is None else job.init_seed)
    try:
        return device, corpus, MiniGPT(dataclasses.replace(job.size, vocab_size=len(corpus.vocab))).to(device)
    except RuntimeError as error:
        raise ValueError(
            f"a model of {job.size.layers} x {job.size.width} does not fit: {str(error).splitlines()[0]}"
        ) from error


def _run(job: Job) -> Report:
    config, out, main = job.config, job.out, is_main()
    device, corpus, model = _on_each(lambda: _parts(job))
    weights = sum(p.numel() for p in model.parameters())
    if world_size() > 1:
        sharded(model, device)
    digests: dict[int, str] = {}

    def witness(step: int, _: nn.Module) -> None:
        saved = out / f"step_{step - 1:08d}{'' if world_size() > 1 else '.pt'}"
        if saved.exists() or not digests:
            digests[step - 1] = state_digest(trainer.amp)

    with row_printer(config.max_steps) if main and not job.quiet else contextlib.nullcontext() as show:
        trainer = SafeTrainer(
            model,
            config.model_copy(update={"csv_log_path": config.csv_log_path or str(out / "metrics.csv")}),
            _loader(corpus.train, config, shuffle=True),
            _loader(corpus.val, config, shuffle=False),
            next_token_loss,
            on_row=show,
            before_step=witness if job.witness else None,
            checkpoint_dir=out,
            identity={"model": dataclasses.asdict(model.config), "corpus": corpus.sha256()},
        )
        idle = False
        ranks = f", {world_size()} ranks" if world_size() > 1 else ""
        data = f"{len(corpus.train):,} sequences of {job.size.context}"
        about = f"MiniGPT with {weights:,} weights on {device}{ranks}, {data}"
        if job.resume is not None:
            found = trainer.resume(None if job.resume == "auto" else job.resume)
            about += "\n" + (f"resumed from step {trainer.state.step}: {found}" if found else "starting fresh")
            idle = config.max_steps is not None and trainer.state.updates >= config.max_steps
            if idle:
                about += f"\nnothing to do: {trainer.state.updates} updates are behind, max_steps={config.max_steps}"
        else:
            if (log := config.csv_log_path) is not None and Path(log).absolute() != (out / "metrics.csv").absolute():
                trainer.refuse_log(continues=False)  # while the old run is still there
            _on_main(lambda: remove_old_run(out))
        began = trainer.state.step
        if main and not idle:  # where nothing is done, the file keeps telling of the run that was
            # As it is resolved, but for the log's default place: with this file another run must not write this log.
            resolved = {**trainer.config.model_dump(), "csv_log_path": config.csv_log_path}
            atomic_write_text(yaml.safe_dump(resolved, sort_keys=False), out / "config.yaml")
        if main and not job.quiet:
            say(about)
        failure, ended = None, 0
        try:
            result = trainer.fit()
        except (TrainingFailed, ThermalAbort) as stop:
            failure, result, ended = str(stop), stop.result, 75 if isinstance(stop, ThermalAbort) else 1
    if job.witness:
        digests[result.state.step] = state_digest(trainer.amp)
    if result.status == "completed":
        whole = _whole_weights(model)
        if main:
            atomic_save(whole, out / "final.pt")
    status = ended if failure is not None else 0 if result.signal is None else 128 + result.signal
    return Report(status, result, rank_facts(model, trainer.amp.optimizer), began, digests, failure)


def _whole_weights(model: nn.Module) -> dict[str, Any]:
    """The model's state_dict, whole on rank 0; the others help."""
    if world_size() == 1:
        return model_state(model)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
