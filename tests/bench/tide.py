"""A load that rises and falls within one run: first tokens and throughput, speculation off and planned.

    python -m tests.bench.tide --model M [--eagle HEAD | --draft-model D] [--lookup ngram] [--seconds N]
        [--peak N] [--prompts FILE] [--rounds N] [--plot FILE.png]

Requests come on a timetable: few a second at first, most in the middle, few again at the end, the same times
and prompts for every way. Ways take turns, round after round; a ratio is the median of the rounds' own. What
is compared is how long the last answer took from the first arrival on, and each request's time to its first
token. By the number of requests that share a step it is told how much was drafted: speculation fades as the
load rises and returns as it falls.
"""

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.engine_core import EngineCore
from engine.sampling_params import SamplingParams
from server.bench.chart import Chart, Series, draw_charts
from server.bench.prompts import own_prompts, read_prompts, take
from tests.bench.methods import BenchPrompt, encode
from tests.bench.planner import OFF, PLANNED, add_methods, build

PART = 1.0
"""Seconds of the run that a point of the plot stands for."""


@dataclass(slots=True)
class Run:
    """What one way did in one round.

    Attributes:
        seconds: From the first arrival to the end of the last answer.
        first_tokens: Seconds from a request's arrival to its first token, in the order of arrival.
        drafted: By the number of requests that ran, the draft tokens of each of their steps.
        course: By the part of the run, requests that ran and draft tokens of each, of every step in it.
        tokens: The answers, in the order of arrival.
    """

    seconds: float = 0.0
    first_tokens: dict[str, float] = field(default_factory=dict)
    drafted: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    course: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


def timetable(seconds: float, peak: float) -> list[float]:
    """Times of arrival: the rate goes from none to `peak` a second and back, as a sine does."""
    count = round(2 * peak * seconds / math.pi)
    # The share of arrivals until t is (1 - cos(pi t / seconds)) / 2, turned around.
    return [seconds * math.acos(1 - 2 * (place + 0.5) / count) / math.pi for place in range(count)]


def run(
    core: EngineCore, prompts: Sequence[BenchPrompt], times: Sequence[float], wishes: SamplingParams
) -> Run:
    """One round of one way."""
    result = Run()
    arrived: dict[str, float] = {}
    open_requests: set[str] = set()
    began = time.perf_counter()
    while len(arrived) < len(times) or open_requests:
        now = time.perf_counter() - began
        while len(arrived) < len(times) and times[len(arrived)] <= now:
            name = f"tide-{len(arrived)}"
            core.add_request(name, prompts[len(arrived)].token_ids, wishes)
            arrived[name] = times[len(arrived)]
            open_requests.add(name)
        if not core.has_work:
            time.sleep(0.001)
            continue
        for output in core.step():
            now = time.perf_counter() - began
            result.first_tokens.setdefault(output.request_id, now - arrived[output.request_id])
            result.tokens[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                open_requests.discard(output.request_id)
        stats = core.take_stats()
        if stats.num_request_forwards:
            each = stats.num_draft_tokens / stats.num_request_forwards
            result.drafted[stats.num_request_forwards].append(each)
            result.course[int(now / PART)].append((stats.num_request_forwards, each))
    result.seconds = time.perf_counter() - began
    return result


def main() -> None:
    """Runs the benchmark."""
    options = parse()
    engines = build(options, [OFF, PLANNED])
    tokenizer = engines[OFF].tokenizer
    times = timetable(options.seconds, options.peak)
    asked = take(read_prompts(options.prompts) if options.prompts else own_prompts(), len(times))
    prompts = [BenchPrompt(prompt.name, encode(prompt, tokenizer)) for prompt in asked]
    wishes = SamplingParams(
        temperature=options.temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True
    )
    runs: dict[str, list[Run]] = {way: [] for way in engines}
    for llm in engines.values():
        llm.generate([prompts[0].token_ids], wishes)
    for number in range(options.rounds):
        # Who comes first is another one in each round: a machine whose speed drifts favours neither.
        ways = list(engines.items())
        for way, llm in ways if number % 2 == 0 else reversed(ways):
            runs[way].append(run(llm.core, prompts, times, wishes))
            sys.stderr.write(f"round {number + 1}, {way}: {runs[way][-1].seconds:.1f} s\n")
    report(runs, len(times))
    if options.plot:
        options.plot.write_bytes(draw_charts([course_chart(runs[PLANNED])]))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tide", description=__doc__.split("\n")[0])
    add_methods(parser)
    parser.add_argument("--seconds", type=float, default=30.0, help="over which requests come")
    parser.add_argument("--peak", type=float, default=3.0, help="requests a second in the middle")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    return parser.parse_args()


def report(runs: dict[str, list[Run]], count: int) -> None:
    """The tables."""
    pairs = list(zip(runs[OFF], runs[PLANNED], strict=True))
    lines = [
        f"{count} requests a round, {len(pairs)} rounds; planned over off, medians of the rounds' ratios:"
    ]
    lines.append(f"  tokens per second: {statistics.median(a.seconds / b.seconds for a, b in pairs):.3f}")
    for name, share in (("median", 0.5), ("95th percentile", 0.95)):
        ratio = statistics.median(first_token(b, share) / first_token(a, share) for a, b in pairs)
        here = [1000 * statistics.median(first_token(each, share) for each in runs[way]) for way in runs]
        lines.append(
            f"  time to first token, {name}: {ratio:.3f} (off {here[0]:.0f} ms, planned {here[1]:.0f})"
        )
    differing = sum(a.tokens[name] != b.tokens[name] for a, b in pairs for name in a.tokens)
    lines.append(f"  answers that differ: {differing} of {count * len(pairs)}")
    lines.append("draft tokens of a request and step, by requests in the step:")
    drafted: dict[int, list[float]] = defaultdict(list)
    for each in runs[PLANNED]:
        for requests, numbers in each.drafted.items():
            drafted[requests].extend(numbers)
    lines.append("  " + "  ".join(f"{n}: {statistics.mean(drafted[n]):.2f}" for n in sorted(drafted)))
    sys.stdout.write("\n".join(lines) + "\n")


def first_token(run: Run, share: float) -> float:
    """A quantile of the times to first token."""
    waits = sorted(run.first_tokens.values())
    return waits[min(int(share * len(waits)), len(waits) - 1)]


def course_chart(runs: Sequence[Run]) -> Chart:
    """How the load and the drafts went, second by second."""
    parts = sorted(set().union(*(each.course for each in runs)))
    steps = {part: [step for each in runs for step in each.course.get(part, ())] for part in parts}

    def series(name: str, place: int) -> Series:
        return Series(
            name, tuple((part * PART, statistics.mean(step[place] for step in steps[part])) for part in parts)
        )

    return Chart(
        "a load that rises and falls",
        "seconds",
        (series("requests in a step", 0), series("drafts of each", 1)),
    )


if __name__ == "__main__":
    main()
