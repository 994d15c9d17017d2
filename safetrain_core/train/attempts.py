"""Attempts of a step, and their rows as soon as they are known: at once, or at the next look."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import TrainConfig
from ..distributed import world_size
from ..records import StepLog
from ..step.amp import AmpTrainState
from ..step.deferred import DeferredSteps, can_defer
from .cursor import samples_in
from .telemetry import Attempt, gradient_cells

__all__ = ["Attempts"]


class Attempts:
    """With ``nan_check_interval`` 1 each attempt gives its row; above 1 rows may wait until the host looks at them.

    Args:
        blocks: name -> weights whose gradients' norms are told, every ``telemetry_log_interval`` steps.

    Attributes:
        waiting: attempts whose rows have not been taken in. defers: whether rows wait.
    """

    def __init__(self, amp: AmpTrainState, config: TrainConfig, blocks: Mapping[str, Any]) -> None:
        self._amp, self._config, self._blocks = amp, config, blocks
        self._every = config.nan_check_interval
        self.defers = self._every > 1 and world_size() == 1 and can_defer(amp.optimizer)
        self._deferred = DeferredSteps(amp) if self.defers else None
        self.waiting: list[Attempt] = []

    @property
    def next_step(self) -> int:
        """The number of the next attempt."""
        return self._amp.counters.step + len(self.waiting) + 1

    def make(
        self,
        window: list[tuple[Any, Any]],
        begin: tuple[int, int],
        cells: dict[str, Any],
        requests: Callable[[], int],
    ) -> list[StepLog]:
        """Attempt one step; the rows that are known now: its own, none yet, or all since the last look.

        Args:
            begin: (epoch, batch_in_epoch) of the window. cells: what else the log tells of this attempt.
            requests: what this rank asks of all, where they speak to one another at this step.
        """
        start, step, config = time.perf_counter(), self.next_step, self._config
        rows: list[StepLog] = []
        if self._deferred is not None:
            self._deferred.attempt(window)
            pending = len(self._deferred)
            last = config.max_steps is not None and self._amp.counters.updates + pending >= config.max_steps
            if pending == self._every or last:
                rows = self._deferred.look()
        else:
            light = step % config.gradient_log_interval == 0
            heavy = bool(self._blocks) and step % config.telemetry_log_interval == 0
            examine = self._every > 1 and step % self._every == 0
            rows = [self._amp.step_window(window, detail=light or heavy, examine=examine, requests=requests())]
            cells = cells | gradient_cells(self._amp.detail, self._blocks if heavy else {}, statistics=light)
        samples = world_size() * sum(samples_in(*batch) for batch in window)
        self.waiting.append(Attempt(begin, samples, time.perf_counter() - start, cells))
        return rows

    def look(self) -> list[StepLog]:
        """The rows that wait, looked at now."""
        return self._deferred.look() if self._deferred is not None else []

    def taken(self) -> list[Attempt]:
        """The attempts that waited; none does from now on."""
        taken, self.waiting = self.waiting, []
        return taken
