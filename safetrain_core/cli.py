"""The command line: flags and a YAML file become a config, a config becomes a run.

Exit statuses: 0 done; 1 TrainingFailed, a broken checkpoint or an error of the machine; 2 the user's mistake; 75 the
thermal guard's abort; 130 and 143 interrupted.
torch is imported only once the arguments are found to be right, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .errors import SafeTrainError

if TYPE_CHECKING:
    from .config import TrainConfig
    from .train.result import FitResult

__all__ = ["main"]

#: What a run leaves in its folder. A folder that has one of these holds a run.
RUN_FILES = ("config.yaml", "metrics.csv", "final.pt", "best.json", "bad_windows.jsonl")

EXIT_MISTAKE = 2
EXIT_TOO_HOT = 75


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, without the usage of fifty flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_MISTAKE, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    from . import __version__
    from .thermal.watch import add_arguments

    parser = _Parser(prog="safetrain", description="Train safely, and find out what went wrong.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"safetrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="train|verify|watch", required=True, parser_class=_Parser)
    check = verbs.add_parser(
        "verify",
        help="say whether checkpoints are whole",
        description="Say what a checkpoint file is, whether it is whole, and its step, schema and size; or all of a "
        "folder's. Exit status 1 where one is not whole.",
        allow_abbrev=False,
    )
    check.add_argument("path", type=Path, help="a checkpoint, or a folder with some")
    add_arguments(verbs)
    train = verbs.add_parser(
        "train",
        help="train a small GPT on text",
        description="Train a small GPT on text, one guarded step after the other. Prints a row per step, writes "
        "metrics.csv, ends with a summary. Ctrl-C ends the run after the present step; twice, at once.",
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
        args = _parse(sys.argv[1:] if argv is None else argv)
        if args.verb == "watch":
            from .thermal.watch import watch
            from .train.console import plain_warnings

            with plain_warnings():
                return watch(args)
        return _verify(args.path) if args.verb == "verify" else _train(args)
    except SafeTrainError as error:
        print(f"safetrain: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"safetrain: {line}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read our output has gone (`| head`): nobody to tell. Keeps Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"safetrain: {error.strerror}: {error.filename or 'while writing the run'}", file=sys.stderr)
        return 1


def _train(args: argparse.Namespace) -> int:
    import yaml

    config = _config(args)
    if args.print_config:
        print(yaml.safe_dump(config.model_dump(), sort_keys=False), end="")
        return 0
    if args.resume is not None and args.overwrite:
        raise ValueError("--resume continues the run in --out and --overwrite replaces it; say one of them")
    _claim_folder(args.out, args.overwrite or args.resume is not None)
    from .train.console import plain_warnings, print_summary
    from .train.lock import folder_lock

    busy = f"--out {args.out} is in use by another run; name another folder, or wait for it"
    with plain_warnings(), folder_lock(args.out, busy):
        status, result = _fit(args, config)
    print_summary(args.out, config, result)
    return status


def _verify(path: Path) -> int:
    """Print a line per checkpoint; 1 where one is not whole."""
    from .checkpoint.rolling import inspect

    if not path.exists():
        raise ValueError(f"{path} does not exist; name a checkpoint or a folder with some")
    files = sorted(path.glob("*.pt")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no checkpoint (*.pt); name another folder")
    whole = True
    for file in files:
        about, sound = inspect(file)
        whole &= sound
        print(f"{'whole ' if sound else 'BROKEN'} {file}: {about}")
    return 0 if whole else 1


def _claim_folder(out: Path, overwrite: bool) -> None:
    """Make ``out``, or refuse: it holds a run already, or cannot be written."""
    try:
        held = [path.name for pattern in (*RUN_FILES, "step_*.pt") for path in out.glob(pattern)]
    except OSError as error:
        raise ValueError(f"--out {out} cannot be used: {error.strerror}; name another folder") from error
    if held and not overwrite:
        raise ValueError(
            f"--out {out} holds a run already ({held[0]}); add --resume to continue it, --overwrite to replace it, "
            "or name another"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".safetrain-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}; name another folder") from error


def _fit(args: argparse.Namespace, config: TrainConfig) -> tuple[int, FitResult]:
    """Build corpus, model and trainer, and run. The old run in the folder goes only when all of that stands."""
    # Idle OpenMP threads sleep instead of spinning: on a busy machine a run of 5 s took 100 s otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import yaml
    from torch.utils.data import DataLoader

    from .checkpoint.atomic import atomic_save, atomic_write_text
    from .checkpoint.single import model_state
    from .corpus import Corpus
    from .errors import ThermalAbort, TrainingFailed
    from .minigpt import MiniGPT, MiniGPTConfig, next_token_loss
    from .train.console import row_printer
    from .train.trainer import SafeTrainer

    try:
        device = torch.zeros(1, device=args.device).device
        torch.zeros(1, device=device).tolist()  # the device "meta" holds no values
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:90]
        raise ValueError(f"--device {args.device} is not available ({why}); use --device cpu") from error
    size = MiniGPTConfig(1, args.context, args.layers, args.heads, args.width, args.dropout, args.tied)
    corpus = Corpus.from_files(args.corpus, size.context)
    torch.manual_seed(config.seed)
    try:
        model = MiniGPT(dataclasses.replace(size, vocab_size=len(corpus.vocab))).to(device)
    except RuntimeError as error:
        raise ValueError(
            f"a model of {args.layers} x {args.width} does not fit: {str(error).splitlines()[0]}"
        ) from error
    train = DataLoader(corpus.train, config.batch_size, shuffle=True)
    with row_printer(config.max_steps) as show:
        trainer = SafeTrainer(
            model,
            config.model_copy(update={"csv_log_path": config.csv_log_path or str(args.out / "metrics.csv")}),
            train,
            DataLoader(corpus.val, config.batch_size),
            next_token_loss,
            on_row=show,
            checkpoint_dir=args.out,
            identity={"model": dataclasses.asdict(model.config), "corpus": corpus.sha256()},
        )
        weights = sum(p.numel() for p in model.parameters())
        about = f"MiniGPT with {weights:,} weights on {device}, {len(corpus.train):,} sequences of {size.context}"
        if args.resume is not None:
            found = trainer.resume(None if args.resume == "auto" else args.resume)
            about += "\n" + (f"resumed from step {trainer.state.step}: {found}" if found else "starting fresh")
        else:
            for path in [*(args.out / name for name in RUN_FILES), *args.out.glob("step_*.pt")]:
                path.unlink(missing_ok=True)
        # As it is resolved, but for the log's default place: from this file another run must not write over this log.
        resolved = {**trainer.config.model_dump(), "csv_log_path": config.csv_log_path}
        atomic_write_text(yaml.safe_dump(resolved, sort_keys=False), args.out / "config.yaml")
        print(about, flush=True)
        try:
            result = trainer.fit()
        except (TrainingFailed, ThermalAbort) as failure:
            print(f"safetrain: {failure}", file=sys.stderr)
            return EXIT_TOO_HOT if isinstance(failure, ThermalAbort) else 1, failure.result
    if result.status == "completed":
        atomic_save(model_state(model), args.out / "final.pt")
    return (0 if result.signal is None else 128 + result.signal), result
