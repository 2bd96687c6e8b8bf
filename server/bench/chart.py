"""A chart: axes, lines or marks, and a legend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from server.bench.png import BLACK, GREY, LINE_HEIGHT, PALE, Canvas, Colour, text_width

WIDTH, HEIGHT = 760, 300

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 34, 40
# The first eight are Okabe and Ito's (2008), which colour-blind readers tell apart too.
_COLOURS: tuple[Colour, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (40, 40, 40),
    (240, 228, 66),
    (120, 80, 40),
    (0, 90, 60),
    (150, 0, 60),
    (130, 130, 210),
    (160, 200, 60),
)
_MARK = 3


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour.

    Attributes:
        name: In the legend.
        points: x and y of each.
        joined: Whether a line goes through them.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw.

    Attributes:
        title: Above it; says what y is.
        x_label: Below the axis.
        series: What is in it.
        level: y of a line across; None for none.
    """

    title: str
    x_label: str
    series: tuple[Series, ...]
    level: float | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    """From a value to a dot."""

    low: float
    high: float
    start: int
    end: int

    def __call__(self, value: float) -> int:
        return round(self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low))


def ticks(low: float, high: float) -> list[float]:
    """Five steps or so of 1, 2 or 5 times a power of ten that cover the range from end to end."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def draw_charts(charts: Sequence[Chart]) -> bytes:
    """The charts below each other, as a PNG file."""
    canvas = Canvas(WIDTH, HEIGHT * max(1, len(charts)))
    for index, chart in enumerate(charts):
        _draw(canvas, index * HEIGHT, chart)
    return canvas.png()


def _draw(canvas: Canvas, top: int, chart: Chart) -> None:
    points = [point for series in chart.series for point in series.points]
    canvas.text(_LEFT, top + 12, chart.title)
    if not points:
        canvas.text(_LEFT, top + _TOP + LINE_HEIGHT, "no figures", GREY)
        return
    heights = [y for _, y in points] + ([] if chart.level is None else [chart.level])
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = ticks(min(0.0, *heights), max(heights))
    right, bottom = WIDTH - _RIGHT, top + HEIGHT - _BOTTOM
    x_scale = _Scale(x_ticks[0], x_ticks[-1], _LEFT, right)
    y_scale = _Scale(y_ticks[0], y_ticks[-1], bottom, top + _TOP)
    for tick in y_ticks:
        canvas.fill(_LEFT, y_scale(tick), right - _LEFT, 1, PALE)
        canvas.text(_LEFT - 8 - text_width(f"{tick:g}"), y_scale(tick) - 3, f"{tick:g}", GREY)
    for tick in x_ticks:
        canvas.fill(x_scale(tick), bottom, 1, 5, GREY)
        canvas.text(x_scale(tick) - text_width(f"{tick:g}") // 2, bottom + 9, f"{tick:g}", GREY)
    canvas.fill(_LEFT, bottom, right - _LEFT + 1, 1, GREY)
    canvas.text((_LEFT + right - text_width(chart.x_label)) // 2, bottom + 23, chart.x_label, GREY)
    if chart.level is not None:
        canvas.fill(_LEFT, y_scale(chart.level), right - _LEFT, 1, BLACK)
    for index, series in enumerate(chart.series):
        colour = _COLOURS[index % len(_COLOURS)]
        _draw_series(canvas, series, (x_scale, y_scale), colour)
        place = top + _TOP + index * LINE_HEIGHT
        canvas.fill(right + 14, place, 8, 7, colour)
        canvas.text(right + 27, place, series.name)


def _draw_series(canvas: Canvas, series: Series, scales: tuple[_Scale, _Scale], colour: Colour) -> None:
    dots = [(scales[0](x), scales[1](y)) for x, y in series.points]
    if series.joined:
        for start, end in pairwise(dots):
            canvas.line(start, end, colour)
    if not series.joined or len(dots) <= 20:
        for x, y in dots:
            canvas.fill(x - _MARK, y - _MARK, 2 * _MARK + 1, 2 * _MARK + 1, colour)
