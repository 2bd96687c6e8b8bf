"""Throughput with speculation off, fixed and planned, side by side over the same weights, by concurrency.

    python -m tests.bench.planner --model M [--draft-model D | --eagle HEAD] [--lookup ngram]
        [--concurrency 1,2,4,8,16,32] [--turns N] [--prompts FILE] [--max-tokens N] [--rounds N]
        [--plot FILE.png]

At each concurrency so many prompts are answered together by each way in turn, round after round, so that a
machine whose speed drifts slows all alike. A ratio is the median of the rounds' own ratios.

With one turn all begin together and nothing comes after them: where drafts have some end early, the others go
on in a smaller batch, which is slower in all. With several turns the next prompt begins where one has ended,
so many for each place, as at a server that is kept busy; only the last ones end in a smaller batch.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from engine.config import (
    CacheConfig,
    DraftModelSpeculation,
    EngineConfig,
    ModelConfig,
    NgramSpeculation,
    NoSpeculation,
    SchedulerConfig,
    SpeculationConfig,
    SuffixSpeculation,
)
from engine.factory import assemble
from engine.head_config import EagleSpeculation
from engine.llm import LLM, Completion
from engine.model.loader import load_causal_lm
from engine.sampling_params import SamplingParams
from engine.speculation.factory import load_drafts
from server.bench.chart import Chart, Series, draw_charts
from server.bench.prompts import own_prompts, read_prompts
from tests.bench.methods import BenchPrompt, encode

OFF, FIXED, PLANNED = "off", "fixed", "planner"


@dataclass(slots=True)
class Figures:
    """What one way did at one concurrency.

    Attributes:
        speeds: Tokens per second of all requests together, a round each.
        drafted, steps: Draft tokens and requests' steps, all rounds together.
        differing: Answers that are not those of the plain run.
    """

    speeds: list[float] = field(default_factory=list)
    drafted: int = 0
    steps: int = 0
    differing: int = 0


def main() -> None:
    """Runs the benchmark."""
    options = parse()
    engines = build(options)
    tokenizer = engines[OFF].tokenizer
    asked = read_prompts(options.prompts) if options.prompts else own_prompts()
    prompts = [BenchPrompt(prompt.name, encode(prompt, tokenizer)) for prompt in asked]
    figures = {(way, count): Figures() for way in engines for count in options.concurrency}
    for llm in engines.values():
        answered(llm, prompts[:1], 1, options)
    for number in range(options.rounds):
        for count in options.concurrency:
            # Other prompts in each round, the same for all ways.
            size = count * options.turns
            chosen = list(islice(cycle(prompts), number * size, (number + 1) * size))
            # Who comes first is another one in each round: it finds the machine rested.
            order = [*engines][number % len(engines) :] + [*engines][: number % len(engines)]
            rounds = {way: answered(engines[way], chosen, count, options) for way in order}
            for way, (answers, seconds) in rounds.items():
                enter(figures[way, count], answers, rounds[OFF][0], seconds)
            say(f"round {number + 1}, {count} at once", figures, count)
    report(figures, options)
    outcomes(engines[PLANNED])
    if options.plot:
        options.plot.write_bytes(draw_charts(list(charts(figures, options.concurrency))))


def parse() -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.planner", description=__doc__.split("\n")[0])
    add_methods(parser)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=1, help="prompts one after the other at each place")
    options = parser.parse_args()
    options.max_num_seqs = max(options.concurrency)
    return options


def add_methods(parser: argparse.ArgumentParser) -> None:
    """The flags that `build` reads, and those of a run."""
    parser.add_argument("--model", default=ModelConfig().model)
    parser.add_argument(
        "--method", choices=("ngram", "suffix"), default="ngram", help="without a draft model"
    )
    parser.add_argument("--draft-model", help="a draft model drafts instead")
    parser.add_argument("--eagle", help="an EAGLE head drafts instead")
    parser.add_argument("--num-draft-tokens", type=int, help="default: the method's own")
    parser.add_argument("--lookup", choices=("none", "ngram", "suffix"), default="none")
    parser.add_argument("--prompts", type=Path, help="a .json or .jsonl file; default: four of our own")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="a PNG file to write")


def build(options: argparse.Namespace, wanted: Sequence[str] = (OFF, FIXED, PLANNED)) -> dict[str, LLM]:
    """An engine per way, over the same weights."""
    length = {} if options.num_draft_tokens is None else {"num_draft_tokens": options.num_draft_tokens}
    speculation: SpeculationConfig
    if options.eagle:
        speculation = EagleSpeculation(head=options.eagle, lookup=options.lookup, probe=False, **length)
    elif options.draft_model:
        speculation = DraftModelSpeculation(
            draft_model=options.draft_model, lookup=options.lookup, probe=False, **length
        )
    else:
        speculation = {"ngram": NgramSpeculation, "suffix": SuffixSpeculation}[options.method](**length)
    model = ModelConfig(model=options.model, max_model_len=options.max_model_len)
    target = load_causal_lm(model)
    drafts = load_drafts(speculation, target, model)
    ways: dict[str, SpeculationConfig] = {
        OFF: NoSpeculation(),
        FIXED: speculation.model_copy(update={"planner": "fixed"}),
        PLANNED: speculation.model_copy(update={"planner": "auto"}),
    }
    engines: dict[str, LLM] = {}
    for way in wanted:
        config = EngineConfig(
            model=model,
            cache=CacheConfig(prefix_caching=False, kv_cache_gb=1.0),
            scheduler=SchedulerConfig(max_num_seqs=options.max_num_seqs),
            speculation=ways[way],
        )
        own = [] if way == OFF else drafts
        engines[way] = LLM(assemble(config, target, own, calibrates=True))
    return engines


def answered(
    llm: LLM, prompts: Sequence[BenchPrompt], at_once: int, options: argparse.Namespace
) -> tuple[list[Completion], float]:
    """The answers to prompts, so many of them at a time, and the seconds they took."""
    wishes = SamplingParams(
        temperature=options.temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True
    )
    answers = [Completion(list(prompt.token_ids)) for prompt in prompts]
    waiting = list(enumerate(answers))[::-1]
    running: dict[str, Completion] = {}
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < at_once:
            number, answer = waiting.pop()
            llm.core.add_request(f"bench-{number}", answer.prompt_token_ids, wishes)
            running[f"bench-{number}"] = answer
        for output in llm.core.step():
            running[output.request_id].add(output)
            if output.finish_reason is not None:
                del running[output.request_id]
    return answers, time.perf_counter() - began


def enter(
    figures: Figures, answers: Sequence[Completion], expected: Sequence[Completion], seconds: float
) -> None:
    """Adds a round."""
    figures.speeds.append(sum(len(answer.token_ids) for answer in answers) / seconds)
    for answer, plain in zip(answers, expected, strict=True):
        figures.drafted += answer.speculation.num_draft_tokens
        figures.steps += answer.speculation.num_steps
        figures.differing += answer.token_ids != plain.token_ids


def ratio(figures: dict[tuple[str, int], Figures], way: str, other: str, count: int) -> float:
    """The median of the rounds' own ratios."""
    pairs = zip(figures[way, count].speeds, figures[other, count].speeds, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def say(title: str, figures: dict[tuple[str, int], Figures], count: int) -> None:
    """One line while it goes on."""
    parts = [f"{way} {figures[way, count].speeds[-1]:7.1f}" for way in (OFF, FIXED, PLANNED)]
    sys.stderr.write(f"{title}: tokens/s {'  '.join(parts)}\n")


def report(figures: dict[tuple[str, int], Figures], options: argparse.Namespace) -> None:
    """The table."""
    lines = [
        "{:>8} {:>9} {:>9} {:>9} {:>11} {:>11} {:>12} {:>13} {:>15} {:>9}".format(
            *("at once", "off", "fixed", "planner", "fixed/off", "planner/off", "planner/best"),
            *("drafted fixed", "drafted planner", "same text"),
        )
    ]
    for count in options.concurrency:
        speeds = [statistics.median(figures[way, count].speeds) for way in (OFF, FIXED, PLANNED)]
        best = OFF if ratio(figures, FIXED, OFF, count) < 1 else FIXED
        drafted = [figures[way, count].drafted / figures[way, count].steps for way in (FIXED, PLANNED)]
        num_answers = count * options.turns * len(figures[OFF, count].speeds)
        same = num_answers - max(figures[FIXED, count].differing, figures[PLANNED, count].differing)
        lines.append(
            f"{count:8} {speeds[0]:9.1f} {speeds[1]:9.1f} {speeds[2]:9.1f} "
            f"{ratio(figures, FIXED, OFF, count):11.2f} {ratio(figures, PLANNED, OFF, count):11.2f} "
            f"{ratio(figures, PLANNED, best, count):12.2f} {drafted[0]:13.2f} {drafted[1]:15.2f} "
            f"{f'{same}/{num_answers}':>9}"
        )
    sys.stdout.write("\n".join(lines) + "\n")


def outcomes(llm: LLM) -> None:
    """What the planner says of itself."""
    found = llm.planner_report()
    counts = {count.outcome: count.num_steps for count in found.outcomes if count.num_steps}
    total = sum(counts.values())
    shares = ", ".join(f"{outcome} {number / total:.0%}" for outcome, number in counts.items())
    error = "-" if found.prediction_error is None else f"{found.prediction_error:.0%}"
    sys.stdout.write(f"planner: {total} steps ({shares}), steps predicted within {error}\n")
    curve = ", ".join(f"{point.rows}: {point.milliseconds:.1f}" for point in found.forward[:20])
    sys.stdout.write(f"forward by rows, ms: {curve}\n")


def charts(figures: dict[tuple[str, int], Figures], concurrency: Sequence[int]) -> Iterator[Chart]:
    """Throughput, and what it is over plain decoding."""
    yield Chart(
        "tokens per second, all requests together",
        "requests at once",
        tuple(
            Series(
                way,
                tuple((float(count), statistics.median(figures[way, count].speeds)) for count in concurrency),
            )
            for way in (OFF, FIXED, PLANNED)
        ),
    )
    yield Chart(
        "speed over plain decoding",
        "requests at once",
        tuple(
            Series(way, tuple((float(count), ratio(figures, way, OFF, count)) for count in concurrency))
            for way in (OFF, FIXED, PLANNED)
        ),
    )


if __name__ == "__main__":
    main()
