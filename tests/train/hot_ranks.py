"""Run by test_thermal: one of two ranks, whose second has a hot GPU. Prints what became of the run."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from safetrain_core import SafeTrainer, ThermalAbort, TrainConfig


def main(rank: int, meet: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    celsius = [60.0]
    both_wait, until = folder / "rank0_waits", time.monotonic() + 90

    def source() -> float:
        trainer = trainers[-1]
        if rank == 1 and celsius[0] > 85 and both_wait.exists():
            celsius[0] = 70.0  # cools once the other rank is seen to wait for it
        if rank == 0 and trainer is not None and trainer._thermal._told:
            both_wait.touch()
        return celsius[0] if time.monotonic() < until else 119.0  # rather than wait for ever

    def train(step: int, hot_c: float, **options: object) -> SafeTrainer:
        def heat(row: object) -> None:
            if rank == 1 and row.step == step:
                celsius[0] = hot_c
                for _ in range(2):
                    trainer._thermal.poller.wait(60)

        torch.manual_seed(0)
        config = TrainConfig(
            max_steps=12,
            gpu_temp_guard=True,
            gpu_temp_poll_interval_seconds=0.02,
            csv_log_path=str(folder / f"{rank}-{step}.csv"),
            **options,
        )
        data = [(torch.ones(2, 3), torch.ones(2, 1))] * 4
        trainer = SafeTrainer(nn.Linear(3, 1), config, data, on_row=heat, thermal_source=source)
        trainers.append(trainer)
        return trainer

    trainers: list = [None]
    try:
        train(0, 0.0, switch_on_thermal=True)
    except ValueError as error:
        print("refused", str(error).split(";")[0])
    result = train(5, 86.0).fit()
    print("paused", result.pauses, result.status, result.state.updates)
    both_wait.unlink(missing_ok=True)
    celsius[0] = 60.0
    dist.barrier()
    try:
        train(4, 96.0).fit()
    except ThermalAbort as stop:
        print("aborted at step", stop.result.state.step, stop)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort at the interpreter's end


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
