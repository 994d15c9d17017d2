"""Checks of a value out of a manifest, which a stranger may have written: CheckpointError, and nothing else."""

from __future__ import annotations

import math
import re
from typing import Any

from ..errors import CheckpointError, type_of
from .atomic import StrPath

__all__ = ["LARGEST_NUMBER", "checked_fields", "checked_sha256", "count", "listed", "no_key_twice", "seconds", "shown"]

#: No size, offset or step is larger.
LARGEST_NUMBER = 2**62


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dict; ``ValueError`` where a key is there twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def shown(value: Any) -> str:
    """What a stranger has written, for an error: short, without control characters, whatever it is.

    >>> shown("rank0" + chr(27) + "[2J"), shown([1] * 100)
    ("'rank0\\\\x1b[2J'", '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...')
    """
    try:
        text = " ".join(ascii(value).split())
    except (ValueError, RecursionError):  # an integer of many thousand digits; a list nested as deep
        text = type_of(value)
    return text if len(text) <= 42 else text[:39] + "..."


def checked_fields(told: Any, expected: str, names: tuple[str, ...], where: StrPath) -> dict[str, Any]:
    """``told`` as a dict with exactly ``names``, and ``expected`` as its ``schema``."""
    if not isinstance(told, dict):
        raise CheckpointError(f"{where} holds {type_of(told)}, expected an object; it is no manifest")
    schema = told.get("schema")
    if not isinstance(schema, str) or not schema.startswith("ckpt"):
        raise CheckpointError(f"unknown schema {shown(schema)} in {where}: not a safetrain checkpoint")
    if schema != expected:
        raise CheckpointError(f"unknown schema {shown(schema)} in {where}: expected {expected}, another kind of folder")
    missing, more = set(names) - told.keys(), told.keys() - {*names, "schema"}
    if missing or more:
        what = f"lacks {min(missing)}" if missing else f"has an unknown {shown(min(more))}"
        raise CheckpointError(f"{where} {what}; it is damaged")
    return told


def count(value: Any, name: str, where: StrPath, least: int = 0) -> int:
    """``value`` as an integer from ``least`` to ``LARGEST_NUMBER``."""
    if type(value) is not int or not least <= value <= LARGEST_NUMBER:
        raise CheckpointError(f"{where}: {name} is {shown(value)}, expected an integer from {least} to 2**62")
    return value


def seconds(value: Any, where: StrPath) -> float:
    """``value`` as a finite number."""
    if type(value) not in (int, float) or not abs(value) < 1e18 or not math.isfinite(value):
        raise CheckpointError(f"{where}: wall_clock_seconds is {shown(value)}, expected seconds since 1970")
    return float(value)


def listed(value: Any, name: str, where: StrPath) -> list[Any]:
    """``value`` as a list."""
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: {name} is {type_of(value)}, expected a list; it is damaged")
    return value


def checked_sha256(value: Any, whose: str, where: StrPath) -> str:
    """``value`` as 64 lower-case hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise CheckpointError(f"{where}: the sha256 of {whose} is {shown(value)}, expected 64 hexadecimal digits")
    return value
