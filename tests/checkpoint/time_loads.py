"""Run by the benchmarks: verified loads of shards beside plain ones, each in a process that has loaded nothing before.

As one that resumes: memory that is used again halves the time of a load. So the children are forked from this process,
which has held no tensors, and not from one that has run other benchmarks.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from safetrain_core import load_sharded


def seconds_in_a_child(load) -> float:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        start = time.perf_counter()
        loaded = load()
        os.write(tell, str(time.perf_counter() - start).encode())
        os._exit(len(loaded) == 0)
    os.close(tell)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("a child failed")
    with os.fdopen(told) as file:
        return float(file.read())


def main(shards: Path, plain: list[Path], rounds: int) -> None:
    """Print the ratios of all rounds, ours to theirs, as JSON; first and second alternate."""

    def theirs():
        return [torch.load(path, map_location="cpu", weights_only=True) for path in plain]

    def ours():
        return load_sharded(shards, len(plain))

    ratios = []
    for i in range(rounds):
        first, second = map(seconds_in_a_child, (theirs, ours) if i % 2 else (ours, theirs))
        ratios.append(second / first if i % 2 else first / second)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[3:]], int(sys.argv[2]))
