"""What a verification is told: its flags, and the plan they make."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from engine.sampling_params import Acceptance
from server.bench.asking import Endpoint
from server.bench.prompts import FORMATS, Prompt, own_prompts, read_prompts, take
from server.bench.values import positive, whole
from server.config import ConfigError

HELP = """\
Prove that speculation changes nothing: on your model, your draft, your settings.

    outrider verify                                                   the default model and method
    outrider verify --model ./target.gguf --draft-model ./draft.gguf --methods ngram,draft_model
    outrider verify --url http://127.0.0.1:8000                       a server that runs
    outrider verify --quick                                           less of everything

Texts, endings and logprobs with speculation are compared with plain decoding of each prompt alone, over a
grid of sampling options: greedy and seeded, temperature, top_k, top_p, min_p, penalties of both signs,
logit_bias, min_tokens, stops, n=3, logprobs; alone, and all options mixed in one batch. Under the match rule
all texts must be equal; under the others the greedy ones, since a sampled text depends on the draft there.

Distributions are tested with many seeds: how often which three tokens come, by a chi-square test against the
exact law. In process that is computed from the target's own rows with all options applied; over HTTP from
the 20 logprobs per token that a server gives, all other tokens counting as one, and only for options whose
law follows from them. All tests of a run together fail by chance with the probability --false-alarm.

Where two texts part, the gap is shown: by how many nats the plain run's token leads the other there. Up to
the bound that is printed they are as good as equal, rounding decides, and that is no fault. Exit status: 0;
1 for a fault, or a server that is not there; 2 for flags that cannot hold.

Settings of `outrider serve` (--model, --draft-model, --num-draft-tokens, ...) make the engines, one per
method, in this process."""
LOCAL_ONLY = "is a setting of the engines that are built in this process, and --url names a server that runs"

# Rules that keep less than the distribution: there is nothing to prove about them.
_LOSSY = ("typical",)

_SHORT = ("short", "chat", "What is two plus two? Answer with the number alone.")
_LOOP = ("loop", "text", "red green blue red green blue red green blue red green")


@dataclass(frozen=True, slots=True)
class Plan:
    """A verification to be run.

    Attributes:
        url: The server; None builds engines in this process.
        api_model: The model's name in requests; None takes the first that the server lists.
        endpoint: Which one is asked.
        concurrency: Requests at once in a batch, over HTTP.
        timeout: Seconds without a sign of the server after which a request has failed.
        methods: Speculation methods; empty for the one that is set.
        rules: Acceptance rules.
        prompts: What to ask.
        max_tokens: Tokens of an answer.
        seed: The first seed of the texts.
        num_seeds: Draws of a distribution.
        false_alarm: Chance that any of the distributions' tests fails though nothing is wrong.
        near_tie: Nats that rounding may decide about; None goes by the type of the activations.
        tolerance: Of logprobs; None goes by the type of the activations.
        quick: Fewer distributions.
        json: File for everything.
        quiet: No progress bars.
    """

    url: str | None
    api_model: str | None
    endpoint: Endpoint
    concurrency: int
    timeout: float
    methods: tuple[str, ...]
    rules: tuple[Acceptance, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: int
    seed: int
    num_seeds: int
    false_alarm: float
    near_tie: float | None
    tolerance: float | None
    quick: bool
    json: Path | None
    quiet: bool

    @property
    def num_methods(self) -> int:
        """Methods that are verified."""
        return max(1, len(self.methods))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `outrider verify`, without those of the engines that it may build."""
    what = parser.add_argument_group("What is verified")
    what.add_argument("--url", help="a running Outrider; /v1 is added to an address without a path")
    what.add_argument("--methods", metavar="M,M", help="speculation methods in turn (default: the one set)")
    rules = ",".join(rule for rule in Acceptance if rule not in _LOSSY)
    what.add_argument("--rules", metavar="R,R", default=rules, help=f"acceptance rules (default: {rules})")
    asked = parser.add_argument_group("What is asked")
    asked.add_argument("--prompts", type=Path, metavar="FILE", help=f"default: six of our own; {FORMATS}")
    asked.add_argument("--num-prompts", type=whole, metavar="N", help="of the file's, evenly (default: all)")
    asked.add_argument("--max-tokens", type=whole, metavar="N", help="per answer (default: 24, quick: 16)")
    asked.add_argument("--seed", type=int, default=0, help="the first one of the texts (default: 0)")
    asked.add_argument(
        "--seeds", type=whole, metavar="N", help="draws per distribution (default: 300, quick: 100)"
    )
    asked.add_argument("--quick", action="store_true", help="two prompts, fewer tokens, one distribution")
    bounds = parser.add_argument_group("What is a fault")
    bounds.add_argument(
        "--false-alarm", type=_chance, default=0.001, metavar="P", help="of all tests (default: 0.001)"
    )
    bounds.add_argument("--near-tie", type=positive, metavar="NATS", help="default: 1e-4 for float32")
    bounds.add_argument("--tolerance", type=positive, metavar="NATS", help="default: 1e-5 for float32")
    http = parser.add_argument_group("With --url")
    http.add_argument("--api-model", metavar="NAME", help="default: the first that the server lists")
    http.add_argument(
        "--endpoint",
        choices=("auto", "chat", "completions"),
        default="auto",
        help="auto: chat, and completions for prompts to be continued",
    )
    http.add_argument("--concurrency", type=whole, default=8, metavar="N", help="at once (default: 8)")
    http.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="without a sign (default: 600)"
    )
    output = parser.add_argument_group("Output")
    output.add_argument("--json", type=Path, metavar="FILE", help="every row and every divergence")
    output.add_argument("--quiet", action="store_true", help="no progress bars")


def read_plan(args: argparse.Namespace) -> Plan:
    """The plan that flags make.

    Raises:
        ConfigError: Flags contradict each other, or the prompts are none.
    """
    if args.url is not None and not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {args.url} must start with http:// or https://")
    if args.url is not None and args.methods:
        raise ConfigError("--methods is for engines in this process: a server has the method it was given")
    prompts = read_prompts(args.prompts) if args.prompts else _own_prompts()
    count = args.num_prompts or (2 if args.quick else None)
    return Plan(
        url=args.url,
        api_model=args.api_model,
        endpoint=args.endpoint,
        concurrency=args.concurrency,
        timeout=args.timeout,
        methods=tuple(_names(args.methods)) if args.methods is not None else (),
        rules=_rules(args.rules),
        prompts=tuple(take(prompts, count and min(count, len(prompts)))),
        max_tokens=args.max_tokens or (16 if args.quick else 24),
        seed=args.seed,
        num_seeds=args.seeds or (100 if args.quick else 300),
        false_alarm=args.false_alarm,
        near_tie=args.near_tie,
        tolerance=args.tolerance,
        quick=args.quick,
        json=args.json,
        quiet=args.quiet,
    )


def _own_prompts() -> list[Prompt]:
    """The benchmark's, an answer that ends at once, and a text that lookup drafts well."""
    prime, rename, *others = own_prompts()
    name, kind, question = _SHORT
    short = Prompt(name, kind, ({"role": "user", "content": question},), question)
    name, kind, text = _LOOP
    # A quick run takes the first and the fourth.
    return [rename, prime, short, Prompt(name, kind, None, text), *others]


def _rules(text: str) -> tuple[Acceptance, ...]:
    known = {rule.value: rule for rule in Acceptance}
    names = _names(text)
    for name in names:
        if name not in known:
            raise ConfigError(f"--rules: there is no {name!r}; there are {', '.join(known)}")
        if name in _LOSSY:
            raise ConfigError(f"--rules: {name} is lossy, so there is nothing to prove about it")
    return tuple(known[name] for name in names)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _chance(text: str) -> float:
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be a probability between 0 and 1, got {text!r}")
    return value
