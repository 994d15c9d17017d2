"""``safetrain plan``: which recompute policy fits a GPT of a given size. No torch: the answer comes at once."""

from __future__ import annotations

import argparse
from typing import Any

from .plan import BYTES, plan_recompute

__all__ = ["add_plan_parser", "run_plan"]

#: Width of a head where --heads is not given.
HEAD_WIDTH = 128

#: Beyond these nobody trains, and counting takes minutes.
MOST = {"layers": 100_000, "hidden": 10_000_000, "seq": 1_000_000_000, "batch": 1_000_000_000}
MOST_GB = 1e12


def add_plan_parser(verbs: Any) -> None:
    """Add the verb and its flags to the command line's."""
    plan = verbs.add_parser(
        "plan",
        help="say which recompute policy fits a GPT into a memory budget",
        description="Say what a GPT's activations take under each recompute policy, what each costs, and which is the "
        "cheapest that fits. Exit status 1 where none does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for flag, about in (
        ("layers", "transformer layers"),
        ("hidden", "model width"),
        ("seq", "tokens per sequence"),
    ):
        plan.add_argument(f"--{flag}", type=int, required=True, metavar="N", help=about)
    plan.add_argument(
        "--budget-gb", type=float, required=True, metavar="GB", help="memory for activations, in 10^9 bytes"
    )
    plan.add_argument("--batch", type=int, default=1, metavar="N", help="sequences per micro-batch")
    plan.add_argument("--heads", type=int, metavar="N", help=f"attention heads; None = one per {HEAD_WIDTH} of width")
    plan.add_argument("--dtype", choices=tuple(BYTES), default="bfloat16", help="of weights and activations")
    plan.add_argument("--attention", choices=("flash", "math"), default="flash", help="attention kernel")
    plan.add_argument("--vocab", type=int, default=0, metavar="N", help="tokens known to the head; 0 = leave it out")


def run_plan(args: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit status.

    >>> parser = argparse.ArgumentParser()
    >>> add_plan_parser(parser.add_subparsers())
    >>> args = parser.parse_args("plan --layers 64 --hidden 8192 --seq 8192 --budget-gb 80".split())
    >>> print(run_plan(args)[0].splitlines()[-2])
    Plan: full, 11.81 GB of activations at the peak, 23.3% more FLOPs.
    """
    if not 0 < args.budget_gb <= MOST_GB:
        raise ValueError(f"--budget-gb {args.budget_gb:g} must be a number above 0, at most {MOST_GB:g}")
    for name in ("layers", "hidden", "seq", "batch"):
        if getattr(args, name) > MOST[name]:
            raise ValueError(f"--{name} {getattr(args, name)} is above {MOST[name]}, the most that is planned for")
    heads = args.heads if args.heads is not None else max(1, args.hidden // HEAD_WIDTH)
    budget = max(1, int(args.budget_gb * 1e9))
    plan = plan_recompute(
        args.layers, args.hidden, args.seq, args.batch, heads, args.dtype, budget, args.attention, args.vocab
    )
    return plan.report(), 0 if plan.choice else 1
