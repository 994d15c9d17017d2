"""Run by test_crash: children that save without end are killed at random moments; what they leave must load."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from safetrain_core import Checkpoints
from safetrain_core.checkpoint.single import read_checkpoint


def payload(step: int) -> dict:
    return {"schema": "ckpt.v1", "step": step, "weight": torch.full((200_000,), float(step))}


def child(folder: str, step: int) -> None:
    kept = Checkpoints(folder, keep_last=2)
    while True:
        step += 1
        kept.save(payload(step), step, val_loss=random.random())


def main(folder: str, kills: int) -> None:
    kept, dice, whole, last = Checkpoints(folder, keep_last=2), random.Random(0), 0, 0
    kept.save(payload(0), 0)
    for _ in range(kills):
        number = os.fork()
        if number == 0:
            child(folder, last)
        time.sleep(dice.uniform(0.01, 0.12))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        path = kept.latest()
        if path is None:
            continue
        read = read_checkpoint(path)
        ok = read["step"] >= last and torch.equal(read["weight"], payload(read["step"])["weight"])
        whole, last = whole + ok, read["step"]
    temporaries = len(list(Path(folder).glob("*.tmp")))
    print(f"{kills} kills, {whole} times the newest was whole and no older; last step {last}, {temporaries} left")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
