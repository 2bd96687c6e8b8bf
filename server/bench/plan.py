"""What a benchmark is told: its flags, and the plan they make."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from server.bench.asking import Wishes, make_question
from server.bench.prompts import FORMATS, Prompt, own_prompts, read_prompts, take
from server.bench.values import count, keys, list_of, positive, share, whole
from server.config import ConfigError

HELP = """\
Measure any server with OpenAI's API: time to first token, time per output token, inter-token latency,
throughput, and what speculation gains.

    outrider bench --url http://127.0.0.1:8000                        a server that runs
    outrider bench --model ./target.gguf --draft-model ./draft.gguf   a server of its own
    outrider bench --url A --concurrency 1,4,8                        so many requests at once, a run each
    outrider bench --url A --rate 0.5,1,2                             Poisson arrivals per second, a run each
    outrider bench --url A --paired                                   speculation against plain decoding
    outrider bench --url A --against B                                one server against another

Settings of `outrider serve` (--model, --draft-model, --max-model-len, ...) are for the server that the
benchmark starts: a process of its own on a free port, so that client and engine do not share an interpreter.
Its prefix cache is off unless --prefix-caching is given, so that every prompt is read.

Tokens are counted by the server's usage; where it sends none, a chunk counts as a token. Tokens that come in
one chunk share the wait for it evenly. A failed request is counted and shown, and is in no other figure; the
exit status is then 1. If OPENAI_API_KEY is set, it is sent.

In a comparison each prompt is asked in both ways, one right after the other, and what comes first alternates.
Speed-ups are the geometric mean over the prompts of such neighbours' ratios, with a 95 % bootstrap interval:
above 1 speculation, or the server of --url, is faster. The interval takes prompts for independent of each
other, which prompts asked at once are not: it is best with --concurrency 1 and many prompts. Where two greedy
texts differ, the lead of the better of the two tokens is looked up: a near-tie, or a fault."""
_DRAFTED_FROM = ("prediction", "response_format", "structured_outputs", "tools")
"""Keys of a request that make drafts without a method: its prediction, and what a grammar forces."""
LOCAL_ONLY = "is a setting of the server that the benchmark starts, and --url names one that runs"


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark to be run.

    Attributes:
        url: The server; None starts one.
        against: A second server to compare with.
        paired: Compare with the same server's plain decoding.
        api_model: The model's name in requests; None takes the first that the server lists.
        prompts: What to ask, repetitions included.
        wishes: How.
        concurrency: Requests at once, one run each; empty where rates are given.
        rates: Arrivals per second, one run each.
        warmup: Requests before each way of asking that are not measured.
        timeout: Seconds without a sign of the server after which a request has failed.
        json: File for all figures.
        plot: File for a picture.
        quiet: No progress bar.
        profile: File for a trace of some steps.
        profile_steps: How many.
    """

    url: str | None
    against: str | None
    paired: bool
    api_model: str | None
    prompts: tuple[Prompt, ...]
    wishes: Wishes
    concurrency: tuple[int, ...]
    rates: tuple[float, ...]
    warmup: int
    timeout: float
    json: Path | None
    plot: Path | None
    quiet: bool
    profile: Path | None = None
    profile_steps: int = 8

    @property
    def compares(self) -> bool:
        """Whether every prompt is asked in two ways."""
        return self.paired or self.against is not None


def check_speculates(plan: Plan, num_draft_tokens: int) -> None:
    """Refuses to compare plain decoding with itself.

    Args:
        plan: What the server that the benchmark starts is to be asked.
        num_draft_tokens: Tokens that its method drafts per step.

    Raises:
        ConfigError: Neither the method nor the requests draft anything.
    """
    if plan.paired and not num_draft_tokens and not plan.wishes.extra.keys() & {*_DRAFTED_FROM}:
        raise ConfigError(
            "--paired compares speculation with plain decoding, and with speculation none both are plain: "
            "choose a method (--speculation ngram, --draft-model, --head), or leave --paired out"
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `outrider bench`, without those of the server that it may start."""
    server = parser.add_argument_group("What is measured")
    server.add_argument("--url", help="a running server; /v1 is added to an address without a path")
    server.add_argument("--against", metavar="URL", help="a second server to compare with, in alternation")
    server.add_argument(
        "--paired", action="store_true", help="compare with plain decoding on the same server (Outrider's)"
    )
    server.add_argument("--api-model", metavar="NAME", help="default: the first that the server lists")
    asked = parser.add_argument_group("What is asked")
    asked.add_argument("--prompts", type=Path, metavar="FILE", help=f"default: four of our own; {FORMATS}")
    asked.add_argument(
        "--num-prompts",
        type=whole,
        metavar="N",
        help="fewer lie evenly among the prompts of the file, for more these come again; default: each once",
    )
    asked.add_argument("--max-tokens", type=whole, default=128, metavar="N", help="per answer (default: 128)")
    asked.add_argument("--temperature", type=share, default=0.0, metavar="T", help="(default: 0)")
    asked.add_argument("--seed", type=int, default=0, help="of requests, arrivals, intervals (default: 0)")
    asked.add_argument("--ignore-eos", action="store_true", help="let every answer have --max-tokens tokens")
    asked.add_argument(
        "--endpoint",
        choices=("auto", "chat", "completions"),
        default="auto",
        help="auto: chat, and completions for prompts to be continued",
    )
    asked.add_argument("--extra", type=keys, default={}, metavar="JSON", help="more keys of each request")
    load = parser.add_argument_group("Load")
    load.add_argument(
        "--concurrency", type=list_of(whole), metavar="N,N", help="requests at once (default: 1)"
    )
    load.add_argument("--rate", type=list_of(positive), metavar="R,R", help="arrivals per second, Poisson")
    load.add_argument(
        "--warmup", type=count, default=1, metavar="N", help="requests not measured (default: 1)"
    )
    load.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="without a sign (default: 600)"
    )
    _add_output_flags(parser)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("Output")
    output.add_argument("--json", type=Path, metavar="FILE", help="every request and all figures")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of the figures")
    output.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="a trace of some more steps, made after the measuring; open it with ui.perfetto.dev",
    )
    output.add_argument(
        "--profile-steps", type=whole, default=8, metavar="N", help="how many are traced (default: 8)"
    )
    output.add_argument("--quiet", action="store_true", help="no progress bar")


def read_plan(args: argparse.Namespace) -> Plan:
    """The plan that flags make.

    Raises:
        ConfigError: Flags contradict each other, or the prompts are none.
    """
    if args.concurrency and args.rate:
        raise ConfigError("--concurrency and --rate both set the load: give one of them")
    if args.paired and args.against:
        raise ConfigError("--paired and --against both name what to compare with: give one of them")
    if args.rate and (args.paired or args.against):
        raise ConfigError("a paired run takes --concurrency, not --rate: it has to keep neighbours together")
    wish = args.extra.get("speculation")
    if args.paired and isinstance(wish, dict) and wish.get("enabled") is False:
        raise ConfigError(
            '--extra: {"speculation": {"enabled": false}} makes all requests plain, and --paired compares '
            "speculation with that: leave one of them out"
        )
    for flag, url in (("--url", args.url), ("--against", args.against)):
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"{flag}: {url} must start with http:// or https://")
    if args.plot is not None and args.plot.suffix.lower() != ".png":
        raise ConfigError(f"--plot: {args.plot} must end in .png, the only format there is")
    plan = Plan(
        url=args.url,
        against=args.against,
        paired=args.paired,
        api_model=args.api_model,
        prompts=tuple(take(read_prompts(args.prompts) if args.prompts else own_prompts(), args.num_prompts)),
        wishes=Wishes(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
            endpoint=args.endpoint,
            extra=args.extra,
        ),
        concurrency=() if args.rate else args.concurrency or (1,),
        rates=args.rate or (),
        warmup=args.warmup,
        timeout=args.timeout,
        json=args.json,
        plot=args.plot,
        quiet=args.quiet,
        profile=args.profile,
        profile_steps=args.profile_steps,
    )
    for prompt in plan.prompts:
        make_question(prompt, 0, plan.wishes)
    return plan
