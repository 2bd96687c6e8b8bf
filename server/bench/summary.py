"""The figures of a run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from server.bench.load import Run
from server.bench.records import Acceptance, Record
from server.bench.statistics import Distribution


@dataclass(frozen=True, slots=True)
class KindFigures:
    """The answers to the prompts of one kind.

    Attributes:
        kind: What the prompts are about.
        count: Answers.
        decode_tokens_per_second: Median over the answers, the reading of the prompt left out.
        acceptance: What speculation did there.
    """

    kind: str
    count: int
    decode_tokens_per_second: float | None
    acceptance: Acceptance | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Failed requests count as such and are in no other figure. Times are in seconds.

    Attributes:
        load: What was put on the server, in words.
        level: The same as a number: requests at once, or arrivals per second.
        seconds: Length of the run.
        requests: All requests.
        errors: Messages of those that failed, and how many had each.
        num_prompt_tokens: Tokens read, as servers tell.
        num_cached_tokens: Those of them that came out of a prefix cache.
        num_output_tokens: Tokens written.
        counted_by: "usage", "chunks" or both: where the tokens were counted.
        finish_reasons: Why answers ended.
        ttft: Time to first token.
        tpot: Time per output token after the first chunk, per answer.
        itl: Latency of each token after the first chunk, over all answers.
        e2e: Whole answers.
        tokens_per_chunk: How many tokens came together, on average.
        max_late: The longest that a request was sent after its time.
        acceptance: What speculation did; None if the server does not say.
        kinds: The same by kind of prompt.
    """

    load: str
    level: float
    seconds: float
    requests: int
    errors: dict[str, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    counted_by: str
    finish_reasons: dict[str, int]
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    tokens_per_chunk: float | None
    max_late: float
    acceptance: Acceptance | None
    kinds: tuple[KindFigures, ...]

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return sum(self.errors.values())

    @property
    def output_tokens_per_second(self) -> float:
        """Tokens written over the length of the run, all answers together."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        """Answers over the length of the run."""
        return (self.requests - self.num_failed) / self.seconds if self.seconds else 0.0


def summarize(load: str, level: float, run: Run) -> Summary:
    """The figures of a run; `load` and `level` say in words and as a number what was put on the server."""
    good = [record for record in run.records if record.error is None]
    num_chunks = sum(len(record.arrivals) for record in good)
    num_tokens = sum(record.num_tokens for record in good)
    return Summary(
        load=load,
        level=level,
        seconds=run.seconds,
        requests=len(run.records),
        errors=count_errors(run.records),
        num_prompt_tokens=sum(record.num_prompt_tokens or 0 for record in good),
        num_cached_tokens=sum(record.num_cached_tokens or 0 for record in good),
        num_output_tokens=num_tokens,
        counted_by=_counted_by(good),
        finish_reasons=dict(Counter(record.finish_reason or "none" for record in good)),
        ttft=Distribution.of(known(record.ttft for record in good)),
        tpot=Distribution.of(known(record.tpot for record in good)),
        itl=Distribution.of([gap for record in good for gap in record.gaps]),
        e2e=Distribution.of([record.seconds for record in good]),
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
        max_late=max((record.late for record in run.records), default=0.0),
        acceptance=Acceptance.of(good),
        kinds=tuple(_of_kind(kind, good) for kind in sorted({record.kind for record in good})),
    )


def count_errors(records: Iterable[Record]) -> dict[str, int]:
    """Error messages and how often each came, the most frequent first."""
    return dict(Counter(record.error for record in records if record.error is not None).most_common())


def known(values: Iterable[float | None]) -> list[float]:
    """Those that are there."""
    return [value for value in values if value is not None]


def _of_kind(kind: str, records: Sequence[Record]) -> KindFigures:
    own = [record for record in records if record.kind == kind]
    speeds = [1 / tpot for tpot in known(record.tpot for record in own) if tpot > 0]
    return KindFigures(kind, len(own), median(speeds) if speeds else None, Acceptance.of(own))


def _counted_by(records: Sequence[Record]) -> str:
    ways = {"chunks" if record.num_output_tokens is None else "usage" for record in records}
    return " and ".join(sorted(ways)) or "nothing"
