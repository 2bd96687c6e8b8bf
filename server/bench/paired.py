"""The same prompts asked in two ways, in alternation; speed-ups are ratios of neighbours.

A machine whose speed drifts slows both alike, and what comes first changes from prompt to prompt, so that
neither way always finds warm caches.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.bench.asking import Question
from server.bench.client import BenchClient
from server.bench.load import OnDone, Run, Timer
from server.bench.records import Acceptance, Record
from server.bench.statistics import Interval, bootstrap_interval, geometric_mean
from server.bench.summary import Summary, summarize


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt asked in both ways.

    Attributes:
        candidate: The way under test.
        baseline: What it is compared with.
    """

    candidate: Record
    baseline: Record

    @property
    def prompt(self) -> str:
        """The prompt's name."""
        return self.baseline.prompt

    @property
    def kind(self) -> str:
        """What the prompt is about."""
        return self.baseline.kind

    @property
    def is_whole(self) -> bool:
        """Whether both have an answer."""
        return self.candidate.error is None and self.baseline.error is None

    @property
    def whole_ratio(self) -> float | None:
        """Baseline's time per token over the candidate's, whole answers: above 1 the candidate is faster."""
        return _over(self.baseline.seconds_per_token, self.candidate.seconds_per_token)

    @property
    def decode_ratio(self) -> float | None:
        """The same of the time per token after the first chunk."""
        return _over(self.baseline.tpot, self.candidate.tpot)

    @property
    def ttft_ratio(self) -> float | None:
        """The same of the time to the first token."""
        return _over(self.baseline.ttft, self.candidate.ttft)

    @property
    def divergence(self) -> int | None:
        """The first character at which the texts differ; None if they are equal."""
        ours, theirs = self.candidate.text, self.baseline.text
        if ours == theirs:
            return None
        shorter = min(len(ours), len(theirs))
        return next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)


Ratio = Callable[[Pair], float | None]


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times as fast the candidate is.

    Attributes:
        mean: Geometric mean over the prompts.
        interval: Its 95 % confidence interval; None for a single prompt.
        smallest: The prompt that gains least.
        largest: The prompt that gains most.
        num_prompts: Prompts counted.
    """

    mean: float
    interval: Interval | None
    smallest: float
    largest: float
    num_prompts: int


@dataclass(frozen=True, slots=True)
class PairFigures:
    """The pairs of one kind of prompt, or all of them.

    Attributes:
        kind: What the prompts are about; "all" for all.
        whole: Speed-up of whole answers, the reading of the prompt included.
        decode: Speed-up of the tokens after the first chunk.
        ttft: Speed-up of the first token.
        acceptance: What the candidate's speculation did; None if its server does not say.
        equal_texts: Pairs whose texts are equal.
        pairs: Pairs with both answers.
    """

    kind: str
    whole: SpeedUp | None
    decode: SpeedUp | None
    ttft: SpeedUp | None
    acceptance: Acceptance | None
    equal_texts: int
    pairs: int


@dataclass(frozen=True, slots=True)
class PairedSummary:
    """A paired run in figures.

    Attributes:
        candidate: The figures of the way under test.
        baseline: The figures of the other.
        total: The comparison over all prompts.
        kinds: The same by kind of prompt.
        losses: Prompts whose whole answers were slower than the baseline's, and their ratio; worst first.
    """

    candidate: Summary
    baseline: Summary
    total: PairFigures
    kinds: tuple[PairFigures, ...]
    losses: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class PairedRun:
    """What a paired load brought.

    Attributes:
        pairs: In the order of the questions.
        candidate_seconds: Time spent on the candidate.
        baseline_seconds: Time spent on the baseline.
    """

    pairs: tuple[Pair, ...]
    candidate_seconds: float
    baseline_seconds: float


async def run_paired(
    clients: tuple[BenchClient, BenchClient],
    questions: Sequence[Question],
    concurrency: int,
    on_done: OnDone,
    timer: Timer,
) -> PairedRun:
    """Asks groups of `concurrency` questions at once, each group in both ways.

    Args:
        clients: The candidate and the baseline.
        questions: What to ask.
        concurrency: How many at once.
        on_done: Told of each record.
        timer: The clock.
    """
    began = timer.clock()
    records: tuple[list[Record], list[Record]] = ([], [])
    seconds = [0.0, 0.0]
    num_prompts = len({question.prompt.name for question in questions})
    for start in range(0, len(questions), concurrency):
        group = questions[start : start + concurrency]
        # From group to group, and against the last round where the prompts come round again.
        rounds, place = divmod(start, num_prompts)
        for way in (0, 1) if (place // concurrency + rounds) % 2 == 0 else (1, 0):
            async with clients[way].steps.watching():
                group_began = timer.clock()
                asked = await asyncio.gather(*(_ask(clients[way], item, began, on_done) for item in group))
                seconds[way] += timer.clock() - group_began
            records[way].extend(asked)
    return PairedRun(tuple(map(Pair, *records)), *seconds)


def summarize_pairs(load: str, level: float, run: PairedRun, seed: int) -> PairedSummary:
    """The figures of a paired run; `seed` is that of the confidence intervals' resampling."""
    candidate, baseline = tuple(p.candidate for p in run.pairs), tuple(p.baseline for p in run.pairs)
    kinds = {kind: [pair for pair in run.pairs if pair.kind == kind] for kind in _kinds(run.pairs)}
    ratios = _by_prompt([pair for pair in run.pairs if pair.is_whole], lambda pair: pair.whole_ratio)
    slower = [(prompt, ratio) for prompt, ratio in ratios.items() if ratio < 1]
    return PairedSummary(
        candidate=summarize(load, level, Run(candidate, run.candidate_seconds)),
        baseline=summarize(load, level, Run(baseline, run.baseline_seconds)),
        total=_figures("all", run.pairs, seed),
        kinds=tuple(_figures(kind, pairs, seed) for kind, pairs in kinds.items()),
        losses=tuple(sorted(slower, key=lambda item: item[1])),
    )


def _kinds(pairs: Sequence[Pair]) -> list[str]:
    return sorted({pair.kind for pair in pairs})


async def _ask(client: BenchClient, question: Question, began: float, on_done: OnDone) -> Record:
    record = await client.ask(question, began)
    on_done(record)
    return record


def _figures(kind: str, pairs: Sequence[Pair], seed: int) -> PairFigures:
    whole = [pair for pair in pairs if pair.is_whole]
    return PairFigures(
        kind=kind,
        whole=_speed_up(whole, lambda pair: pair.whole_ratio, seed),
        decode=_speed_up(whole, lambda pair: pair.decode_ratio, seed),
        ttft=_speed_up(whole, lambda pair: pair.ttft_ratio, seed),
        acceptance=Acceptance.of(pair.candidate for pair in whole),
        equal_texts=sum(pair.divergence is None for pair in whole),
        pairs=len(whole),
    )


def _speed_up(pairs: Sequence[Pair], ratio: Ratio, seed: int) -> SpeedUp | None:
    each = list(_by_prompt(pairs, ratio).values())
    if not each:
        return None
    return SpeedUp(geometric_mean(each), bootstrap_interval(each, seed), min(each), max(each), len(each))


def _by_prompt(pairs: Sequence[Pair], ratio: Ratio) -> dict[str, float]:
    """One ratio per prompt, since the repetitions of a prompt are not independent of each other."""
    collected: dict[str, list[float]] = {}
    for pair in pairs:
        found = ratio(pair)
        if found is not None:
            collected.setdefault(pair.prompt, []).append(found)
    return {prompt: geometric_mean(values) for prompt, values in collected.items()}


def _over(baseline: float | None, candidate: float | None) -> float | None:
    return baseline / candidate if baseline and candidate else None
