"""A lesson's parameters: from one cell in a notebook, from the command line in a script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import report


@dataclass(frozen=True)
class Parameter:
    """A default, how text becomes a value (``ValueError`` says what is allowed), and a line of help."""

    default: Any
    parse: Callable[[str], Any]
    help: str = ""
    shown: str = ""


def _in_range(text: str, kind: type, at_least: float | None, at_most: float | None) -> Any:
    what = "a whole number" if kind is int else "a number"
    limits = [f"at least {at_least}"] if at_least is not None else []
    limits += [f"at most {at_most}"] if at_most is not None else []
    allowed = " ".join([what, " and ".join(limits)]).strip()
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {allowed}") from None
    if (at_least is not None and not value >= at_least) or (
        at_most is not None and not value <= at_most
    ):
        raise ValueError(f"{text} is not {allowed}")
    return value


def whole(
    default: int, *, at_least: int = 1, at_most: int = 100_000, help: str = ""
) -> Parameter:
    """A whole number in a range.

    >>> whole(20).parse("100")
    100
    >>> whole(20).parse("0")
    Traceback (most recent call last):
    ...
    ValueError: 0 is not a whole number at least 1 and at most 100000
    """
    return Parameter(default, lambda text: _in_range(text, int, at_least, at_most), help)


def fraction(
    default: float, *, at_least: float = 0.0, at_most: float = 1.0, help: str = ""
) -> Parameter:
    """A number in a range.

    >>> fraction(0.5).parse("0.25")
    0.25
    """
    return Parameter(default, lambda text: _in_range(text, float, at_least, at_most), help)


def whole_list(
    default: Sequence[int], *, at_least: int = 1, at_most: int = 100_000, help: str = ""
) -> Parameter:
    """Whole numbers with commas between them.

    >>> whole_list([1, 2]).parse("1,2,4")
    [1, 2, 4]
    """

    def parse(text: str) -> list[int]:
        return [_in_range(part.strip(), int, at_least, at_most) for part in text.split(",")]

    return Parameter(list(default), parse, help, shown=",".join(map(str, default)))


def lesson_args(
    name: str,
    argv: Sequence[str] | None = None,
    *,
    refuse: Callable[[Any], str | None] | None = None,
    **parameters: Parameter | int,
) -> SimpleNamespace:
    """The parameters of lesson ``name``, with ``seed`` and ``out`` added.

    A notebook gets the defaults: edit them in the cell. A script reads its command line; a bad value ends it
    with one line on stderr and exit status 2.

    Args:
        name: the lesson's file name without its ending.
        argv: the command line, for tests; None = ``sys.argv``, or nothing in a notebook.
        refuse: gets all the values, and says what is wrong with them together, or nothing.
        parameters: a ``Parameter`` each, or a whole number for a count of at least 1.

    >>> lesson_args("01_clipping_amp", ["--num-steps", "5"], num_steps=20).num_steps
    5
    """
    known = {
        key: value if isinstance(value, Parameter) else whole(value)
        for key, value in parameters.items()
    }
    known["seed"] = whole(0, at_least=0, at_most=2**31 - 1, help="seed of weights and data")
    for_test = argv is not None
    notebook = report.in_notebook() and not for_test
    if argv is None:
        argv = [] if notebook else sys.argv[1:]

    parser = _Parser(
        prog=f"python lessons/{name}.py",
        description=f"Lesson {name[:2]} without a notebook: prints its rows, saves its figures, checks its claims.",
        allow_abbrev=False,
    )
    for key, parameter in known.items():
        words = parameter.help or key.replace("_", " ")
        parser.add_argument(
            "--" + key.replace("_", "-"),
            default=parameter.default,
            metavar="N",
            type=_explained(parameter.parse),
            help=f"{words} (default {parameter.shown or parameter.default})",
        )
    parser.add_argument(
        "--out",
        default=Path("runs") / name,
        type=Path,
        metavar="DIR",
        help="folder for figures and tables (default %(default)s)",
    )
    args = parser.parse_args(list(argv))
    if refuse is not None and (problem := refuse(args)):
        parser.error(problem)
    if not notebook:
        _refuse_unwritable(parser, args.out)
    if not for_test:
        report.current = report.Run(out=args.out)
    return SimpleNamespace(**vars(args))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}; try --help\n")


def _explained(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _refuse_unwritable(parser: argparse.ArgumentParser, out: Path) -> None:
    nearest = out.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        parser.error(f"--out {out}: {nearest} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        parser.error(f"--out {out}: {nearest} cannot be written; name another folder")
