"""The picture of a benchmark."""

from collections.abc import Sequence

from server.bench.chart import Chart, Series, draw_charts
from server.bench.measuring import Compared, Measured, Outcome
from server.bench.summary import known

_MOST_POINTS = 400


def draw(outcome: Outcome) -> bytes:
    """A PNG file: latencies and throughput over the loads, or of one load their shares, or speed-ups."""
    if outcome.compared:
        return draw_charts([_speed_ups(compared, *outcome.ways) for compared in outcome.compared])
    if len(outcome.measured) == 1:
        return draw_charts(_shares(outcome.measured[0]))
    return draw_charts(_loads(outcome.measured))


def shares(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The empirical distribution: each value in ascending order, and the percentage up to it."""
    ordered = sorted(values)
    every = max(1, len(ordered) // _MOST_POINTS)
    kept = [index for index in range(len(ordered)) if index % every == 0 or index == len(ordered) - 1]
    return tuple((ordered[index], 100 * (index + 1) / len(ordered)) for index in kept)


def _loads(measured: Sequence[Measured]) -> list[Chart]:
    summaries = [item.summary for item in measured]
    x_label = "arrivals per second" if "per second" in summaries[0].load else "requests at once"
    throughput = tuple((s.level, s.output_tokens_per_second) for s in summaries)
    first = [(s.level, s.ttft) for s in summaries if s.ttft]
    each = [(s.level, s.itl) for s in summaries if s.itl]
    return [
        Chart("output tokens per second, all answers together", x_label, (Series("total", throughput),)),
        Chart(
            "time to first token, ms",
            x_label,
            (
                Series("p50", tuple((load, 1000 * times.p50) for load, times in first)),
                Series("p99", tuple((load, 1000 * times.p99) for load, times in first)),
            ),
        ),
        Chart(
            "inter-token latency, ms",
            x_label,
            (
                Series("p50", tuple((load, 1000 * times.p50) for load, times in each)),
                Series("p99", tuple((load, 1000 * times.p99) for load, times in each)),
            ),
        ),
    ]


def _shares(measured: Measured) -> list[Chart]:
    good = [record for record in measured.run.records if record.error is None]
    load = measured.summary.load
    first = shares([1000 * ttft for ttft in known(record.ttft for record in good)])
    each = shares([1000 * gap for record in good for gap in record.gaps])
    whole = shares([1000 * record.seconds for record in good])
    return [
        Chart("answers whose first token came in time, %", f"ms, {load}", (Series("first token", first),)),
        Chart("tokens that came in time, %", f"ms since the last, {load}", (Series("tokens", each),)),
        Chart("answers that were whole in time, %", f"ms, {load}", (Series("answers", whole),)),
    ]


def _speed_ups(compared: Compared, candidate: str, baseline: str) -> Chart:
    """A mark per pair, in ascending order, coloured by kind."""
    pairs = [(pair.kind, pair.whole_ratio) for pair in compared.run.pairs if pair.is_whole]
    ratios = sorted((ratio, kind) for kind, ratio in pairs if ratio is not None)
    marks: dict[str, list[tuple[float, float]]] = {}
    for place, (ratio, kind) in enumerate(ratios, 1):
        marks.setdefault(kind, []).append((float(place), ratio))
    return Chart(
        title=f"speed-up of whole answers, {candidate} over {baseline}",
        x_label=f"pairs from the worst to the best, {compared.summary.candidate.load}",
        series=tuple(Series(kind, tuple(marks[kind]), joined=False) for kind in sorted(marks)),
        level=1.0,
    )
