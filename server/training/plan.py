"""What a training is told: its flags, and the plan they make."""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from server.bench.values import count, list_of, positive, share, whole
from server.config import ConfigError

Method = Literal["eagle3", "eagle", "medusa"]

HELP = """\
Train a draft head for a model, with the model's own answers.

    outrider train-head --method eagle3 --model M --prompts FILE --out DIR --minutes 60
    outrider train-head --method medusa --model M --generations FILE --out DIR2 --work DIR/work --epochs 5

First the model answers the prompts, once with each temperature, then its hidden states are kept on disk, then
the head is trained on them, as often as wanted. Each stage goes on where an earlier run stopped, so Ctrl-C
costs nothing: give the same command again. More prompts may be added in between, and heads of one model may
share --work.

Held-out prompts tell how often drafts are accepted. The best head stands in --out at any time, in the layout
that other engines read too, with a model card, and training.csv and training.png with the course of the
training."""

PROMPTS = (
    "a line has `prompt` or `question`, `turns` (questions of one conversation) or `messages` (a "
    "conversation); JSON lines"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A training; see the flags for what each field means."""

    method: Method
    out: Path
    work: Path
    prompts: tuple[Path, ...]
    generations: tuple[Path, ...]
    texts: tuple[Path, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    max_num_seqs: int
    held_out: float
    disk_gb: float
    top_k: int
    max_length: int
    minutes: float | None
    epochs: float | None
    learning_rate: float
    warmup: float
    weight_decay: float
    output_rate: float
    passes: int
    pass_ramp: float
    pass_share: float
    noise: float
    num_heads: int
    draft_vocab_size: int
    batch_tokens: int
    accumulate: int
    eval_minutes: float
    eval_tokens: int
    seed: int
    head_dtype: str
    threads: int | None
    quiet: bool


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `outrider train-head`, without those of the model."""
    parser.add_argument("--method", choices=get_args(Method), help="the kind of head")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the finished head")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder of answers, features and the state of the training (default: work, in --out)",
    )
    data = parser.add_argument_group("Data")
    for flag, text in (
        ("--prompts", f"prompts for the model to answer: {PROMPTS}"),
        ("--generations", "answers of the model: `id`, `prompt_token_ids`, `output_token_ids`; JSON lines"),
        ("--text", "texts to train on as they stand: `messages` or `text`; JSON lines"),
    ):
        data.add_argument(flag, type=Path, nargs="+", default=[], metavar="FILE", help=text)
    data.add_argument(
        "--temperatures",
        type=list_of(share),
        default=(0.0, 0.8),
        metavar="T,T",
        help="each prompt is answered once with each (default: 0,0.8)",
    )
    data.add_argument("--max-tokens", type=whole, default=256, metavar="N", help="per answer (default: 256)")
    data.add_argument(
        "--answers-at-once", type=whole, default=32, metavar="N", help="that the model gives (default: 32)"
    )
    data.add_argument(
        "--held-out",
        type=_fraction,
        default=0.05,
        metavar="X",
        help="share of the prompts kept for the evaluation (default: 0.05)",
    )
    _add_feature_flags(data)
    _add_head_flags(parser)
    _add_training_flags(parser)


def _add_feature_flags(data: argparse._ArgumentGroup) -> None:
    data.add_argument(
        "--disk-gb", type=positive, default=20.0, metavar="G", help="that features may take (default: 20)"
    )
    data.add_argument(
        "--top-k",
        type=whole,
        default=64,
        metavar="K",
        help="likeliest tokens of the model kept for each place (default: 64)",
    )
    data.add_argument(
        "--max-length",
        type=whole,
        default=1024,
        metavar="N",
        help="longer sequences are trained on in pieces (default: 1024)",
    )


def _add_head_flags(parser: argparse.ArgumentParser) -> None:
    head = parser.add_argument_group("The head")
    head.add_argument(
        "--draft-vocab-size",
        type=whole,
        default=8192,
        metavar="N",
        help="tokens that EAGLE-3 can draft, the most frequent; others are trained on these (default: 8192)",
    )
    head.add_argument("--num-heads", type=whole, default=4, metavar="N", help="of Medusa (default: 4)")
    head.add_argument(
        "--head-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the finished weights (default: bfloat16)",
    )


def _add_training_flags(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("Training")
    number: tuple[tuple[str, Callable[[str], float], float | None, str], ...] = (
        ("--minutes", share, None, "how long it trains; give this or --epochs"),
        ("--epochs", share, None, "how often it sees the data"),
        ("--learning-rate", positive, 1e-3, "the highest; AdamW with a cosine"),
        ("--warmup", _fraction, 0.03, "share of the training in which it rises"),
        ("--weight-decay", share, 0.01, "of matrices"),
        (
            "--output-rate",
            share,
            1.0,
            "of EAGLE-3's own output layer, in learning rates; 0 leaves it as it is",
        ),
        ("--passes", whole, 3, "of EAGLE over its own output, in training"),
        ("--pass-ramp", _fraction, 0.1, "share of the training after which a pass is added to the first"),
        ("--pass-share", _share, 0.5, "of its drafts, how many a pass hands on to the next"),
        ("--noise", share, 0.2, "on EAGLE-1's features"),
        ("--batch-tokens", whole, 1024, "drafted from at once"),
        ("--accumulate", whole, 1, "such batches for a step"),
        ("--eval-minutes", share, 3.0, "between evaluations"),
        ("--eval-tokens", whole, 8192, "that are evaluated"),
        ("--seed", count, 0, "of answers, order and chance"),
    )
    for flag, read, default, text in number:
        shown = "" if default is None else f" (default: {default:g})"
        training.add_argument(flag, type=read, default=default, metavar="N", help=f"{text}{shown}")
    training.add_argument("--threads", type=whole, metavar="N", help="of torch (default: torch's own choice)")
    training.add_argument("--quiet", action="store_true", help="no progress")


def read_plan(args: argparse.Namespace) -> Plan:
    """The plan that flags make.

    Raises:
        ConfigError: Flags contradict each other, or something is missing.
    """
    _check(args)
    return Plan(
        method=args.method,
        out=args.out,
        work=args.work or args.out / "work",
        prompts=tuple(args.prompts),
        generations=tuple(args.generations),
        texts=tuple(args.text),
        temperatures=args.temperatures,
        max_tokens=args.max_tokens,
        max_num_seqs=args.answers_at_once,
        held_out=args.held_out,
        disk_gb=args.disk_gb,
        top_k=args.top_k,
        max_length=args.max_length,
        minutes=args.minutes,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        output_rate=args.output_rate,
        passes=args.passes,
        pass_ramp=args.pass_ramp,
        pass_share=args.pass_share,
        noise=args.noise if args.method == "eagle" else 0.0,
        num_heads=args.num_heads,
        draft_vocab_size=args.draft_vocab_size,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        eval_minutes=args.eval_minutes,
        eval_tokens=args.eval_tokens,
        seed=args.seed,
        head_dtype=args.head_dtype,
        threads=args.threads,
        quiet=args.quiet,
    )


def _check(args: argparse.Namespace) -> None:
    for flag, value in (("--method", args.method), ("--out", args.out)):
        if value is None:
            raise ConfigError(f"{flag} is missing; see outrider train-head --help")
    if not (args.prompts or args.generations or args.text):
        raise ConfigError("there is nothing to train on: give --prompts, --generations or --text")
    if args.minutes is None and args.epochs is None:
        raise ConfigError("the training has no end: give --minutes or --epochs")
    for path in (*args.prompts, *args.generations, *args.text):
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"cannot read {path}: its rights do not allow it")
    for flag, folder in (("--out", args.out), ("--work", args.work)):
        if folder is not None:
            _check_folder(flag, folder)


def _check_folder(flag: str, folder: Path) -> None:
    """What there is of a folder must be one, and let more be written into it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{flag}: {folder} cannot be a folder: {there} is a file")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{flag}: cannot write to {there}: change its rights, or give another folder")


def _fraction(text: str) -> float:
    """A number from 0 on, below 1."""
    return _below(text, 0.0, 1.0, "a number from 0 on, below 1")


def _share(text: str) -> float:
    """A number above 0, up to 1."""
    return _below(text, math.ulp(0.0), math.nextafter(1.0, 2.0), "a number above 0, up to 1")


def _below(text: str, least: float, end: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < end:
        raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
    return value
