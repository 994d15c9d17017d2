"""The thermal guard in the trainer: the GPU's cells for the log, and one question before each window.

A poller reads; the trainer only looks at what was read, so a step costs no call into the driver and no host read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config import TrainConfig
from ..distributed import agree
from ..errors import ThermalAbort
from ..records import GPU_COLUMNS, THERMAL_COLUMN
from ..thermal.guard import ThermalGuard, ThermalState
from ..thermal.hold import Wish, wait_while_hot
from ..thermal.nvml import GpuMonitor
from ..thermal.poller import Poller
from .devices import DeviceChoice
from .result import FitResult
from .sinks import RowLog
from .switch import DeviceSwitch

__all__ = ["Thermal"]

log = logging.getLogger(__name__)

Save = Callable[[], Any]


class Thermal:
    """What the trainer asks about heat. Built by ``thermal_from_config``; entered for the length of a run.

    Args:
        sources: device name -> source of its temperatures; the first is the device that the run begins on.
        switch, devices: what moves the run, and where to, by preference; None and empty = nowhere.
        closing: sources to be closed at the end of the run.
        newest_good: gives the path of the checkpoint to resume from.
    """

    def __init__(
        self,
        config: TrainConfig,
        result: FitResult,
        sources: Mapping[str, Any],
        *,
        switch: DeviceSwitch | None = None,
        devices: Sequence[str] = (),
        closing: Sequence[GpuMonitor] = (),
        newest_good: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.config, self.result, self.newest_good = config, result, newest_good
        self.sources, self.home, self.closing = dict(sources), next(iter(sources)), closing
        self.guards = {n: self._guard(n, s) for n, s in self.sources.items()} if config.gpu_temp_guard else {}
        if self.guards:
            result.thermal_events = self.guards[self.home].events
            self.poller = self.guards[self.home].poller
        else:
            self.poller = Poller(self.sources[self.home], config.gpu_temp_poll_interval_seconds)
        self.choice = DeviceChoice(devices, self.guards, switch) if switch is not None else None
        self._stack = contextlib.ExitStack()
        self._told: list[str] = []  # of the last row
        self._without_row = False

    def _guard(self, name: str, source: Any) -> ThermalGuard:
        config, label = self.config, name if name.startswith("cuda") else "GPU"
        if isinstance(source, GpuMonitor) and source.name:
            label += f" ({source.name})"
        return ThermalGuard(
            source,
            config.gpu_temp_pause_threshold_c,
            config.gpu_temp_resume_threshold_c,
            config.gpu_temp_critical_threshold_c,
            config.gpu_temp_poll_interval_seconds,
            slowdown_c=getattr(source, "slowdown_c", None),
            name=label,
        )

    # --- a run ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Thermal:
        """Take the first readings; ``ValueError`` where the guard gets no temperature of the run's own device."""
        with contextlib.ExitStack() as stack:
            for monitor in self.closing:
                stack.callback(monitor.close)
            if not self.guards:
                stack.enter_context(self.poller)
            for name, guard in self.guards.items():
                try:
                    stack.enter_context(guard)
                except ValueError:
                    if name == self.home:
                        raise
                    log.warning("%s gives no temperature, so the run will not move to it", name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._stack.close()
        if kind is None and self.choice is not None:
            self.choice.go_home()

    # --- the log ----------------------------------------------------------------------------------------------

    @property
    def columns(self) -> list[str]:
        """The log's columns of the device that the run began on."""
        return [*GPU_COLUMNS, *([THERMAL_COLUMN] if self.guards else [])]

    def cells(self, step: int) -> dict[str, Any]:
        """The cells of the row of ``step``: the poller's last reading, where one is due."""
        cells: dict[str, Any] = {}
        if step % self.config.telemetry_log_interval == 0:
            cells = dict(self.poller.reading.cells())
        if self._without_row:
            cells[THERMAL_COLUMN] = "; ".join(self._told)
        else:
            self._told = []
        self._without_row = False
        return cells

    def _note(self, csv: RowLog | None, text: str) -> None:
        """Put what the guard did into the row of the step before it, at once; before the first step, into its row."""
        self._told.append(text)
        if csv is not None and not csv.amend({THERMAL_COLUMN: "; ".join(self._told)}):
            self._without_row = True

    # --- before each window -----------------------------------------------------------------------------------

    @property
    def hot(self) -> bool:
        """Whether this process's own readings ask for a pause or an abort."""
        return bool(self.guards) and self._wish() != Wish.GO

    @property
    def critical(self) -> bool:
        """Whether the run is to be aborted, by this process's own readings."""
        return bool(self.guards) and self._wish() == Wish.ABORT

    def before_window(self, csv: RowLog | None, save: Save, should_stop: Callable[[], bool]) -> bool:
        """Return once it is cool enough; False where a signal came meanwhile. It may move the run to another device.

        Args:
            csv: the run's log. save: saves a checkpoint, complete when it returns. should_stop: a signal has come.

        Raises:
            ThermalAbort: above critical, or the sensor is lost; the checkpoint is saved.
        """
        while self.guards:
            ended = self._wait(csv, save, should_stop)
            if ended == Wish.ABORT:
                self._abort(csv)
            if ended == Wish.STOP:
                return False
            if self.choice is None or self._settled(self.choice, csv, save):
                break
        return True

    def _wish(self) -> Wish:
        return self.guards[self.home].wish() if self.choice is None else self.choice.wish()

    def _wait(self, csv: RowLog | None, save: Save, should_stop: Callable[[], bool]) -> Wish:
        own = agreed = Wish.GO

        def wish() -> Wish:
            nonlocal own, agreed
            own = Wish.STOP if should_stop() else self._wish()
            # The largest wish of all ranks is everyone's; they come here where one has asked for it in its last step.
            agreed = Wish(agree(own, self._device()))
            return agreed

        def save_and_note() -> None:
            save()
            if agreed == Wish.PAUSE:
                self._note(csv, f"paused {self._celsius(ThermalState.PAUSED)}" if own else "paused for another rank")

        ended, seconds = wait_while_hot(wish, self.poller.wait, save_and_note)
        if seconds:
            self.result.pauses += 1
            self.result.paused_s += seconds
            what = {Wish.GO: "resumed", Wish.STOP: "interrupted"}.get(ended, "not resumed")
            self._note(csv, f"{what} {self._celsius()} after {seconds:.1f} s")
            log.warning("paused for %.1f s; %s at %s", seconds, what, self._celsius())
        return ended

    def _settled(self, choice: DeviceChoice, csv: RowLog | None, save: Save) -> bool:
        before = choice.current
        if choice.settle(save) is None:
            return False
        if choice.current != before:
            self.result.switches += 1
            self._note(csv, f"switched to {choice.current} {self._celsius()}")
        return True

    def _abort(self, csv: RowLog | None) -> None:
        self._note(csv, f"aborted {self._celsius(ThermalState.ABORTED)}")
        hot = next((g for g in self.guards.values() if g.state == ThermalState.ABORTED), None)
        checkpoint = None
        with contextlib.suppress(Exception):  # whatever is wrong with the folder, the card comes first
            checkpoint = self.newest_good()
        self.result.status = "aborted"
        raise ThermalAbort(
            hot.abort_message(checkpoint) if hot is not None else "another rank's GPU is too hot, or its sensor lost",
            result=self.result,
        )

    def _celsius(self, state: ThermalState | None = None) -> str:
        """The temperature at which the guard last went into ``state``; None = the present one."""
        told = [event.temperature_c for event in self.guards[self.home].events if event.state == state]
        celsius = told[-1] if told else self.poller.reading.temperature_c
        return "temperature unknown" if celsius is None else f"{celsius:.0f} C"

    def _device(self) -> torch.device:
        return torch.device(self.choice.current if self.choice is not None else self.home)
