"""The data position of a run: which epoch, how many batches of it are behind, and how to be there again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset

from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..errors import CheckpointError, type_of
from ..memory.moment import host_random, put_host_random
from ..records import TrainState
from ..step.accumulate import windows

__all__ = ["Cursor", "batch_to", "length_of", "samples_in"]


def length_of(loader: Any) -> int | None:
    """How many batches an epoch of ``loader`` has; None where it cannot say.

    A DataLoader always has a ``__len__``; over an ``IterableDataset`` without one it raises ``TypeError``.

    >>> length_of([1, 2]), length_of(iter([1, 2]))
    (2, None)
    """
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def streams(loader: Any) -> bool:
    """Whether a DataLoader reads a stream: its length is a guess then, and where it ends is seen by reading on."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


class Cursor:
    """Yields windows of ``accum_steps`` batches on ``device``, and keeps ``state.epoch`` and ``state.batch_in_epoch``.

    A window never spans two epochs. Loader, samplers and dataset that have a ``set_epoch`` are told each epoch, so that
    ranks shuffle alike.

    ``remembers``: keep the random states from before each window, for ``take_back_draws``. ``broken``: a window could
    not be fetched.

    ``state_dict`` and ``load_state_dict`` make a resumed run see each sample of the epoch exactly once. A loader with
    a ``state_dict`` of its own (torchdata's StatefulDataLoader) is used as it is. Any other is started again from the
    random states that its epoch began with, and its first batches are passed over; the present random states, and those
    of the loader's own generators, are put back after that. Workers that persist over epochs keep random states of
    their own, which nothing can put back: with random augmentation, leave ``persistent_workers`` off.

    >>> state = TrainState()
    >>> cursor = Cursor([(1, 2), (3, 4), (5, 6)], 2, torch.device("cpu"), state)
    >>> next(iter(cursor.windows(epochs=1))), state.batch_in_epoch
    ([(1, 2), (3, 4)], 2)
    >>> again = Cursor(cursor.loader, 2, torch.device("cpu"), TrainState(batch_in_epoch=2))
    >>> again.load_state_dict(cursor.state_dict())
    >>> list(again.windows(epochs=1))
    [[(5, 6)]]
    """

    def __init__(self, loader: Iterable[Any], accum_steps: int, device: torch.device, state: TrainState) -> None:
        self.loader, self.accum_steps, self.device, self.state = loader, accum_steps, device, state
        self._epoch_start: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        self._batches: Iterator[Any] = iter(())
        self._before: tuple[Any, Tensor] | None = None
        self.remembers = self.broken = False

    def windows(self, epochs: int | None = None) -> Iterator[list[tuple[Any, Any]]]:
        """The windows from the present position to the end of ``epochs`` epochs, or without end.

        Raises:
            ValueError: an epoch without a batch, or a batch that is not a pair.
            CheckpointError: the loader has fewer batches than are behind.
        """
        state = self.state
        while epochs is None or state.epoch < epochs:
            epoch = state.epoch
            self._batches = self._begin_epoch()
            gathered = windows(self._batches, self.accum_steps)
            while window := self._fetch(gathered):
                state.batch_in_epoch += len(window)
                yield window
            if state.epoch == epoch:
                if state.batch_in_epoch == 0:
                    raise ValueError(f"train_loader is empty (0 batches) in epoch {epoch}; give it at least one batch")
                self._end_epoch()

    def _fetch(self, gathered: Iterator[list[Any]]) -> list[tuple[Any, Any]]:
        """The next window, on the device; empty at the end."""
        self._before = (host_random(), torch.get_rng_state()) if self.remembers else None
        try:
            return [batch_to(self.device, batch) for batch in next(gathered, [])]
        except BaseException:
            self.broken = True
            raise

    def take_back_draws(self) -> None:
        """The last window is still to come: put back the random states from before it was fetched.

        A dataset that augments in this process has drawn from them, and will again when the run resumes.
        """
        if self._before is not None:
            put_host_random(self._before[0])
            torch.set_rng_state(self._before[1])

    def settle(self) -> None:
        """Where the epoch's last batch is behind, stand at the beginning of the next one."""
        if not streams(self.loader) and self.state.batch_in_epoch == length_of(self.loader):
            # A shuffling sampler draws from its generator once more when it is asked for a batch that is not there.
            next(self._batches, None)
            self._end_epoch()

    def _end_epoch(self) -> None:
        self.state.epoch, self.state.batch_in_epoch = self.state.epoch + 1, 0
        self._epoch_start = None

    def _begin_epoch(self) -> Iterator[Any]:
        for part in self._parts():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(self.state.epoch)
        resume, self._resume = self._resume, None
        if resume is None or resume["epoch_start"] is None:
            self._epoch_start = self._random_states()
            return iter(self.loader)
        now = self._random_states()
        self._epoch_start = resume["epoch_start"]
        stateful = resume["stateful"] is not None
        if not stateful:
            self._put_random_states(resume["epoch_start"])
        batches = iter(self.loader)  # draws from the random states, if only for the seeds of worker processes
        for behind in range(0 if stateful else self.state.batch_in_epoch):
            if next(batches, self) is self:
                raise CheckpointError(
                    f"train_loader ended after {behind} batches, but {self.state.batch_in_epoch} of this epoch are "
                    "behind the checkpoint; resume with the data that it was trained on"
                )
        self._put_random_states(now)
        return batches

    def _parts(self) -> list[Any]:
        """The loader, and what it is made of that may shuffle; each once."""
        batches = getattr(self.loader, "batch_sampler", None)
        samplers = [getattr(self.loader, "sampler", None), getattr(batches, "sampler", None), batches]
        parts = [self.loader, *samplers, getattr(self.loader, "dataset", None)]
        return list({id(part): part for part in parts if part is not None}.values())

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(part, "generator", None) for part in self._parts()]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _random_states(self) -> dict[str, Any]:
        return {"rng": capture_rng_state(), "generators": [g.get_state() for g in self._generators()]}

    def _put_random_states(self, states: dict[str, Any]) -> None:
        restore_rng_state(states["rng"])
        for generator, saved in zip(self._generators(), states["generators"], strict=True):
            generator.set_state(saved)

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors; copies."""
        stateful = getattr(self.loader, "state_dict", None)
        return {
            "epoch_start": self._epoch_start,
            "generators": [g.get_state() for g in self._generators()],
            "stateful": stateful() if stateful is not None and self._epoch_start is not None else None,
        }

    def fresh_position(self) -> dict[str, Any]:
        """A ``state_dict`` for an epoch whose first batches are to be passed over, from the present random states."""
        states = self._random_states()
        return {"epoch_start": states, "generators": states["generators"], "stateful": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where ``state_dict`` was taken; ``state.epoch`` and ``state.batch_in_epoch`` must say so too.

        Raises:
            CheckpointError: the loader has another number of generators of its own.
        """
        generators = self._generators()
        if len(generators) != len(state["generators"]):
            raise CheckpointError(
                f"train_loader has {len(generators)} generators of its own, the checkpoint {len(state['generators'])}; "
                "build the loader as it was built then"
            )
        for generator, saved in zip(generators, state["generators"], strict=True):
            generator.set_state(saved)
        if state["stateful"] is not None:
            self.loader.load_state_dict(state["stateful"])  # type: ignore[attr-defined]
        self._resume, self._epoch_start = state, state["epoch_start"]


def batch_to(device: torch.device, batch: Any) -> tuple[Any, Any]:
    """The pair ``(inputs, targets)`` with its tensors on ``device``, also those in dicts, lists and tuples.

    What has a ``.to(device)`` of its own moves by that. ``ValueError`` when it is no pair.

    >>> inputs, targets = batch_to(torch.device("meta"), ({"ids": torch.zeros(2), "name": "a"}, (torch.zeros(1), 3)))
    >>> inputs["ids"].device.type, inputs["name"], targets[0].device.type, targets[1]
    ('meta', 'a', 'meta', 3)
    >>> batch_to(torch.device("cpu"), {"x": 1})
    Traceback (most recent call last):
    ...
    ValueError: a batch is a dict of 1, expected a pair (inputs, targets); make pairs in the loader's collate_fn, ...
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, Sized) else ""
        raise ValueError(
            f"a batch is {type_of(batch)}{size}, expected a pair (inputs, targets); make pairs in the loader's "
            "collate_fn, or in a generator around it (inputs may be a dict or a tuple: the model gets them as they are)"
        )
    ahead = device.type != "cpu"  # a copy to the CPU that nobody waits for is read before it is there

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=ahead)
        return value.to(device) if _moves_itself(value) else value

    inputs, targets = (tree_map(moved, part, is_leaf=_moves_itself) for part in batch)
    return inputs, targets


def _moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None))


def samples_in(inputs: Any, targets: Any) -> int:
    """Samples in a batch: the first dimension of its targets; where they are no tensor, that of its inputs.

    >>> samples_in(torch.zeros(3, 2), torch.zeros(3, 5)), samples_in(torch.zeros(2), torch.tensor(1.0))
    (3, 1)
    >>> samples_in({"x": torch.zeros(3)}, {"y": torch.zeros(3), "z": torch.zeros(3)}), samples_in("ab", ["a", "b"])
    (3, 2)
    """
    if isinstance(targets, Tensor):
        return targets.shape[0] if targets.dim() else 1
    if isinstance(inputs, Tensor) and inputs.dim():
        return inputs.shape[0]
    if isinstance(targets, Mapping):
        inside = [t for t in tree_leaves(dict(targets)) if isinstance(t, Tensor) and t.dim()]
        return inside[0].shape[0] if inside else 1
    return len(targets) if isinstance(targets, Sized) else 1
