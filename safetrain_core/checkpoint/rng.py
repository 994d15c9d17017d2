"""The random states that a run depends on: Python's, NumPy's, torch's on the CPU and on each CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng_state", "check_rng_state", "restore_rng_state"]


def capture_rng_state() -> dict[str, Any]:
    """A copy of all random states, in plain types and tensors (about 15 KB, and 16 bytes per CUDA device).

    >>> saved = capture_rng_state()
    >>> first = random.random(), np.random.rand(), torch.rand(1).item()
    >>> restore_rng_state(saved)
    >>> (random.random(), np.random.rand(), torch.rand(1).item()) == first
    True
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put back what ``capture_rng_state`` gave. CUDA states beyond this machine's devices are passed over.

    Raises:
        ValueError: a state is missing or malformed; nothing is changed then.

    >>> saved = capture_rng_state()
    >>> first = torch.rand(3)
    >>> restore_rng_state(saved)
    >>> torch.equal(torch.rand(3), first)
    True
    >>> restore_rng_state({})
    Traceback (most recent call last):
    ...
    ValueError: random state is missing or malformed (KeyError: 'python')
    """
    python, numpy, cpu, cuda = check_rng_state(state)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    for device, saved in enumerate(cuda[: torch.cuda.device_count()] if torch.cuda.is_available() else []):
        torch.cuda.set_rng_state(saved, device)


def check_rng_state(state: Any) -> tuple[Any, Any, torch.Tensor, list[torch.Tensor]]:
    """The states as Python, NumPy, torch and CUDA take them, tried on generators of their own.

    Raises:
        ValueError: a state is missing or malformed.

    >>> [type(part).__name__ for part in check_rng_state(capture_rng_state())]
    ['tuple', 'tuple', 'Tensor', 'list']
    """
    try:
        version, numbers, gauss = state["python"]
        python = (version, tuple(numbers.tolist()), gauss)
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy = (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
        cpu, cuda = state["torch"], state["cuda"]
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(cpu)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"random state is missing or malformed ({type(error).__name__}: {error})") from error
    return python, numpy, cpu, cuda
