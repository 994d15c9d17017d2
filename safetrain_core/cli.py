"""The command line: flags and a YAML file become a config, a config becomes a run.

Exit statuses: 0 done; 1 TrainingFailed, a finding that is an error, a broken checkpoint, a plan that does not fit or an
error of the machine; 2 the user's mistake; 75 the thermal guard's abort; 130 and 143 interrupted.
torch is imported only once the arguments are found to be right, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .errors import CheckpointDoesNotFit, SafeTrainError

if TYPE_CHECKING:
    from .config import TrainConfig

__all__ = ["main"]

EXIT_MISTAKE = 2


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage of fifty flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_MISTAKE, f"{self.prog}: {message}; see {self.prog} --help\n" if _speaks() else None)


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    from . import __version__
    from .diagnose.command import add_diagnose_parser
    from .memory.command import add_plan_parser
    from .thermal.watch import add_arguments
    from .train.verify import add_verify_parser

    parser = _Parser(prog="safetrain", description="Train safely, and find out what went wrong.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"safetrain {__version__}")
    verbs = parser.add_subparsers(
        dest="verb", metavar="train|diagnose|verify|plan|watch", required=True, parser_class=_Parser
    )
    add_verify_parser(verbs)
    add_diagnose_parser(verbs)
    add_plan_parser(verbs)
    add_arguments(verbs)
    train = verbs.add_parser(
        "train",
        help="train a small GPT on text",
        description="Train a small GPT on text, one guarded step after the other. Prints a row per step, writes "
        "metrics.csv, ends with a summary. Ctrl-C ends the run after the present step; twice, at once. Exit status 0 "
        "done, 1 failed, 2 a mistake and nothing was changed, 75 ended by the thermal guard, 130 or 143 interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    run = train.add_argument_group("the run")
    run.add_argument(
        "--out", type=Path, default=Path("runs/train"), metavar="DIR", help="folder for what the run leaves"
    )
    run.add_argument("--overwrite", action="store_true", help="replace the run that --out holds")
    run.add_argument(
        "--corpus",
        nargs="+",
        metavar="FILE",
        help="UTF-8 text to train on, instead of the standard library's sources",
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="auto|PATH",
        help="continue from the newest whole checkpoint in --out, or a fresh start where there is none; or from PATH",
    )
    run.add_argument("--config", type=Path, metavar="FILE", help="YAML file with config fields; flags win over it")
    run.add_argument("--print-config", action="store_true", help="print the config as YAML and stop")
    run.add_argument("--device", default="cpu", help="where to train: cpu, cuda, cuda:1, ...")
    run.add_argument(
        "--world-size",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine, the model cut over them by FSDP2; for several machines, use torchrun",
    )
    run.add_argument(
        "--verify-resume",
        action="store_true",
        help="then continue from the newest checkpoint before the end, and prove that it is the same run",
    )
    size = train.add_argument_group("the model")
    for flag, default, about in (
        ("context", 64, "longest sequence, in characters"),
        ("layers", 2, "transformer blocks"),
        ("heads", 4, "attention heads per block"),
        ("width", 64, "model width, a multiple of the heads"),
    ):
        size.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=about)
    size.add_argument("--dropout", type=float, default=0.0, metavar="P", help="dropout probability")
    size.add_argument("--tied", action=argparse.BooleanOptionalAction, default=True, help="head shares the embedding")
    _add_config_flags(train)
    return parser, verbs.choices


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of TrainConfig. Its text is judged by the config itself, so there is one judge."""
    from .config import TrainConfig, allowed, field_kind, shown

    group = parser.add_argument_group("the config (also keys of the YAML file, with _ for -)")
    for name, info in TrainConfig.model_fields.items():
        flags = [f"--{name.replace('_', '-')}"] + (["--steps"] if name == "max_steps" else [])
        about = f"{info.description} ({shown(info.default)})".replace("%", "%%")
        if field_kind(name)[0] is bool:
            group.add_argument(
                *flags,
                dest=name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=about,
            )
        else:
            words = allowed(name).replace("%", "%%")
            group.add_argument(*flags, dest=name, default=argparse.SUPPRESS, metavar="X", help=f"{about}; {words}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser, verbs = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [option for action in verbs[args.verb]._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1, cutoff=0.7)
        verbs[args.verb].error(f"unknown argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    return args


def _config(args: argparse.Namespace) -> TrainConfig:
    """Defaults, then the YAML file, then the flags."""
    from .config import TrainConfig, field_kind, load_yaml

    values = load_yaml(args.config) if args.config is not None else {}
    for name, text in vars(args).items():
        if name not in TrainConfig.model_fields:
            continue
        values[name] = text
        kind = field_kind(name)[0]
        if kind in (int, float):
            with contextlib.suppress(ValueError):  # the config tells what is wrong with a text that is no number
                values[name] = kind(text)
    return TrainConfig(**values)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``safetrain``; returns the exit status.

    >>> main(["train", "--batch-size", "0", "--print-config"])
    2
    """
    try:
        with _save_requests_are_no_death():
            args = _parse(sys.argv[1:] if argv is None else argv)
            status = _run(args)
        if _torchrun():
            sys.stdout.flush()
            os._exit(status)  # past the interpreter's end: gloo's threads now and then abort there (torch 2.13)
        return status
    except (ValueError, CheckpointDoesNotFit) as error:
        for line in str(error).splitlines() if _speaks() else ():
            print(f"safetrain: {line}", file=sys.stderr)
        return EXIT_MISTAKE
    except SafeTrainError as error:
        print(f"safetrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read our output has gone (`| head`): nobody to tell. Keeps Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        advice = "; free some room, then go on with --resume" if error.errno == errno.ENOSPC else ""
        print(f"safetrain: {error.strerror}: {error.filename or 'while writing the run'}{advice}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _save_requests_are_no_death() -> Iterator[None]:
    """SIGUSR1 asks a run to save. While it starts or ends there is nothing new to save, and no reason to die of it.

    Ranks that are started meanwhile ignore it too, until their loops begin.
    """
    if not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _run(args: argparse.Namespace) -> int:
    """What the verb says; the exit status."""
    if args.verb == "verify":
        from .train.verify import run_verify

        text, status = run_verify(args)
        print(text)
        return status
    if args.verb == "plan":
        from .memory.command import run_plan

        text, status = run_plan(args)
        print(text)
        return status
    if args.verb == "diagnose":
        from .diagnose.command import run_diagnose

        text, status = run_diagnose(args)
        print(text)
        return status
    if args.verb == "watch":
        from .thermal.watch import watch
        from .train.console import plain_warnings

        with plain_warnings():
            return watch(args)
    return _train(args)


def _train(args: argparse.Namespace) -> int:
    import yaml

    config = _config(args)
    if args.print_config:
        print(yaml.safe_dump(config.model_dump(), sort_keys=False), end="")
        return 0
    if args.resume is not None and args.overwrite:
        raise ValueError("--resume continues the run in --out and --overwrite replaces it; say one of them")
    started = int(os.environ.get("WORLD_SIZE", "1")) if _torchrun() else None
    if args.world_size < 1 or (started is not None and args.world_size not in (1, started)):
        limit = "at least 1" if started is None else f"{started}, as torchrun has started, or left out"
        raise ValueError(f"--world-size {args.world_size} must be {limit}")
    if config.use_galore and max(args.world_size, started or 1) > 1:
        raise ValueError(
            "use_galore=true is for one process: each rank holds a part of every weight; leave it at false"
        )
    _refuse_no_checkpoint_between(args, config)
    from .minigpt import MiniGPTConfig
    from .train.run import run_everywhere
    from .train.worker import Job

    size = MiniGPTConfig(1, args.context, args.layers, args.heads, args.width, args.dropout, args.tied)
    job = Job(config, size, args.out, args.corpus, args.device, args.resume, args.overwrite, witness=args.verify_resume)
    return run_everywhere(job, args.world_size, under_torchrun=started is not None)


def _refuse_no_checkpoint_between(args: argparse.Namespace, config: TrainConfig) -> None:
    """``ValueError`` where --verify-resume will find no checkpoint to resume from: before the run, not after it."""
    steps, every = config.max_steps, config.checkpoint_every_n_steps
    others = (args.resume, config.checkpoint_every_seconds, config.eval_every_n_steps)
    if args.verify_resume and steps is not None and every >= steps and others == (None, None, None):
        raise ValueError(
            f"--verify-resume needs a checkpoint before the run's end (step {steps}); lower "
            f"--checkpoint-every-n-steps, {every} now"
        )


def _speaks() -> bool:
    """Whether this process tells of a mistake: one for each machine, where torchrun has started several."""
    return not _torchrun() or os.environ.get("LOCAL_RANK", "0") == "0"


def _torchrun() -> bool:
    """Whether this process is one of several that torchrun, or an equal, has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
