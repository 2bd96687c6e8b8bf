"""The figures as text."""

from collections.abc import Iterator, Sequence

from server.bench.divergence import Divergence
from server.bench.measuring import Compared, Outcome
from server.bench.paired import PairFigures, SpeedUp
from server.bench.parts import StepTime
from server.bench.records import Acceptance
from server.bench.statistics import Distribution
from server.bench.summary import Summary

_MOST_SHOWN = 10


def as_text(outcome: Outcome) -> str:
    """The whole report."""
    lines: list[str] = []
    for measured in outcome.measured:
        lines += ["", *_summary(measured.summary), *_steps(("", measured.steps))]
    for compared in outcome.compared:
        lines += ["", *_comparison(compared, *outcome.ways)]
        lines += _steps(*zip(outcome.ways, compared.steps, strict=True))
    return "\n".join(lines[1:]) + "\n"


def _summary(summary: Summary) -> Iterator[str]:
    answers = summary.requests - summary.num_failed
    yield f"{summary.load}: {answers} of {summary.requests} answers in {summary.seconds:.1f} s"
    yield from _failures("", summary)
    if not answers:
        return
    rows = [
        _times("time to first token", summary.ttft),
        _times("time per output token", summary.tpot),
        _times("inter-token latency", summary.itl),
        _times("whole answer", summary.e2e),
    ]
    yield from _table(("ms", "p50", "p90", "p99", "mean", "max"), rows)
    yield (
        f"  {summary.output_tokens_per_second:.1f} tokens/s, {summary.requests_per_second:.2f} answers/s; "
        f"{summary.num_output_tokens} tokens written (counted by {summary.counted_by}), "
        f"{summary.num_prompt_tokens} read, {summary.num_cached_tokens} of them cached"
    )
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(summary.finish_reasons.items()))
    chunks = "" if summary.tokens_per_chunk is None else f"{summary.tokens_per_chunk:.2f} tokens per chunk; "
    late = f"; sent {1000 * summary.max_late:.1f} ms late at most" if summary.max_late else ""
    yield f"  {chunks}ended by {reasons}{late}"
    rows = [
        (kind.kind, str(kind.count), _number(kind.decode_tokens_per_second, 1), *_accepted(kind.acceptance))
        for kind in summary.kinds
    ]
    yield from _table(("kind", "answers", "decode tokens/s", "acceptance", "tokens/forward"), rows)


def _comparison(compared: Compared, candidate: str, baseline: str) -> Iterator[str]:
    summary = compared.summary
    total = summary.total
    num_pairs = len(compared.run.pairs)
    load = summary.candidate.load
    yield f"{load}: {candidate} against {baseline}, {total.pairs} of {num_pairs} pairs answered"
    yield from _failures(f"{candidate}: ", summary.candidate)
    yield from _failures(f"{baseline}: ", summary.baseline)
    yield from _table(
        ("speed-up", "mean", "95 % interval", "worst", "best", "prompts"),
        [
            ("whole answers", *_spread(total.whole)),
            ("decoding", *_spread(total.decode)),
            ("first token", *_spread(total.ttft)),
        ],
    )
    yield from _table(
        ("", "tokens/s", "first token ms", "ms per token", "acceptance", "tokens/forward", "cached"),
        [_way(candidate, summary.candidate), _way(baseline, summary.baseline)],
    )
    yield from _table(
        ("kind", "pairs", "whole", "95 % interval", "decoding", "acceptance", "tokens/forward", "same text"),
        [_kind(figures) for figures in (*summary.kinds, total)],
    )
    yield from _losses(summary.losses, total)
    yield from _differences(compared.divergences, total)
    if baseline == "plain":
        yield from _notes(summary.candidate.acceptance, summary.baseline.acceptance)


def _notes(candidate: Acceptance | None, plain: Acceptance | None) -> Iterator[str]:
    """What makes a comparison with plain decoding one of something else."""
    if plain is not None and plain.drafted:
        yield f"  NOTE: {plain.drafted} tokens were drafted for plain answers: the server ignored the wish"
    if candidate is not None and not candidate.drafted:
        yield "  NOTE: no token was drafted with speculation either: plain decoding was compared with itself"


def _failures(label: str, summary: Summary) -> Iterator[str]:
    if summary.num_failed:
        yield f"  FAILED: {label}{summary.num_failed} of {summary.requests} requests"
        for message, count in list(summary.errors.items())[:_MOST_SHOWN]:
            yield f"    {count} x {message}"
        yield from _more(len(summary.errors))


def _losses(losses: Sequence[tuple[str, float]], total: PairFigures) -> Iterator[str]:
    num_prompts = total.whole.num_prompts if total.whole else 0
    yield f"  slower than the baseline: {len(losses)} of {num_prompts} prompts"
    for prompt, ratio in losses[:_MOST_SHOWN]:
        yield f"    {ratio:.2f} {prompt}"
    yield from _more(len(losses))


def _differences(divergences: Sequence[Divergence], total: PairFigures) -> Iterator[str]:
    yield f"  texts that differ: {total.pairs - total.equal_texts} of {total.pairs}"
    for item in divergences[:_MOST_SHOWN]:
        lead = ""
        if item.token is not None:
            first, second, nats = item.token
            lead = f"; there {first!r} leads {second!r} by {nats:.6f} nats"
        yield f"    {item.prompt} at character {item.place}: {item.candidate!r}, not {item.baseline!r}{lead}"
    yield from _more(len(divergences))


def _steps(*ways: tuple[str, StepTime | None]) -> Iterator[str]:
    """Where the time of steps went, in each way of asking of a server that tells."""
    told = [(label, time) for label, time in ways if time is not None and time.steps and time.total]
    if not told:
        return
    yield from _table(
        ("part of a step", *(name for label, _ in told for name in (f"{label} ms".strip(), "share"))),
        [
            (part, *(cell for _, time in told for cell in _part(time, time.seconds.get(part, 0.0))))
            for part in told[0][1].seconds
        ]
        + [("all", *(cell for _, time in told for cell in _part(time, time.total)))],
    )


def _part(time: StepTime, seconds: float) -> tuple[str, str]:
    return f"{1000 * seconds / time.steps:.2f}", f"{seconds / time.total:.1%}"


def _more(count: int) -> Iterator[str]:
    if count > _MOST_SHOWN:
        yield f"    and {count - _MOST_SHOWN} more; --json has all"


def _times(name: str, times: Distribution | None) -> tuple[str, ...]:
    if times is None:
        return (name, *["-"] * 5)
    values = (times.p50, times.p90, times.p99, times.mean, times.largest)
    return (name, *(f"{1000 * value:.1f}" for value in values))


def _way(label: str, summary: Summary) -> tuple[str, ...]:
    first = 1000 * summary.ttft.p50 if summary.ttft else None
    each = 1000 * summary.tpot.p50 if summary.tpot else None
    return (
        label,
        _number(summary.output_tokens_per_second, 1),
        _number(first, 1),
        _number(each, 1),
        *_accepted(summary.acceptance),
        str(summary.num_cached_tokens),
    )


def _kind(figures: PairFigures) -> tuple[str, ...]:
    mean, interval, *_ = _spread(figures.whole)
    decode = _spread(figures.decode)[0]
    same = f"{figures.equal_texts}/{figures.pairs}"
    return (figures.kind, str(figures.pairs), mean, interval, decode, *_accepted(figures.acceptance), same)


def _spread(ratio: SpeedUp | None) -> tuple[str, ...]:
    if ratio is None:
        return ("-",) * 5
    interval = f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}" if ratio.interval else "-"
    least, most = f"{ratio.smallest:.2f}", f"{ratio.largest:.2f}"
    return (f"{ratio.mean:.2f}", interval, least, most, str(ratio.num_prompts))


def _accepted(acceptance: Acceptance | None) -> tuple[str, str]:
    if acceptance is None:
        return "-", "-"
    return _number(acceptance.rate, 2), _number(acceptance.tokens_per_forward, 2)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows under a head, as wide as they need; the first column starts left, the others end right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        rest = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
        yield f"  {row[0].ljust(widths[0])}  {'  '.join(rest)}".rstrip()
