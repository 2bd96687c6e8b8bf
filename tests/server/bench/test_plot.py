"""The picture: dots, the file format, charts, and which chart is drawn of what."""

import struct
import zlib
from itertools import pairwise

import pytest

from server.bench.chart import HEIGHT, WIDTH, Chart, Series, draw_charts, ticks
from server.bench.font import read_glyphs
from server.bench.load import Run
from server.bench.measuring import Compared, Measured, Outcome
from server.bench.paired import Pair, PairedRun, summarize_pairs
from server.bench.plot import draw, shares
from server.bench.png import BLACK, WHITE, Canvas, Colour, text_width
from server.bench.records import Record
from server.bench.summary import summarize
from tests.server.bench.scripted import record

RED: Colour = (255, 0, 0)
BLUE, ORANGE = (0, 114, 178), (213, 94, 0)


def read_png(data: bytes) -> list[list[Colour]]:
    """The dots of a true-colour file without filters, its checksums checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, rest = {}, data[8:]
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        kind, content = rest[4:8], rest[8 : 8 + length]
        assert struct.unpack(">I", rest[8 + length : 12 + length])[0] == zlib.crc32(kind + content)
        chunks[kind] = content
        rest = rest[12 + length :]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 2, 0, 0, 0]
    raw = zlib.decompress(chunks[b"IDAT"])
    assert len(raw) == height * (1 + 3 * width)
    rows = [raw[start : start + 1 + 3 * width] for start in range(0, len(raw), 1 + 3 * width)]
    assert {row[0] for row in rows} == {0}
    return [[(row[at], row[at + 1], row[at + 2]) for at in range(1, 1 + 3 * width, 3)] for row in rows]


def test_the_file_has_the_dots_of_the_canvas() -> None:
    canvas = Canvas(5, 3)
    canvas.fill(1, 0, 2, 2, RED)
    dots = read_png(canvas.png())
    assert dots == [
        [WHITE, RED, RED, WHITE, WHITE],
        [WHITE, RED, RED, WHITE, WHITE],
        [WHITE, WHITE, WHITE, WHITE, WHITE],
    ]
    assert canvas.colour_at(2, 1) == RED


def test_what_falls_off_the_sheet_is_left_out() -> None:
    canvas = Canvas(4, 4)
    canvas.fill(-2, -2, 3, 3, RED)
    canvas.fill(3, 3, 9, 9, RED)
    canvas.fill(8, 1, 2, 2, RED)
    canvas.fill(-9, 1, 2, 2, RED)
    red = [(x, y) for y, row in enumerate(read_png(canvas.png())) for x, dot in enumerate(row) if dot == RED]
    assert red == [(0, 0), (3, 3)]


def test_a_line_goes_from_end_to_end() -> None:
    canvas = Canvas(12, 8)
    canvas.line((1, 1), (9, 5), RED)
    assert [canvas.colour_at(*place) for place in ((1, 1), (5, 3), (9, 5))] == [RED] * 3
    assert [canvas.colour_at(*place) for place in ((1, 5), (9, 1), (0, 0), (11, 7))] == [WHITE] * 4


def test_every_letter_of_the_font_is_five_by_seven_and_like_no_other() -> None:
    glyphs = read_glyphs()
    assert set("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:-+/()%_=?'") == set(glyphs)
    assert all([len(row) for row in rows] == [5] * 7 for rows in glyphs.values())
    assert all(set("".join(rows)) == {"#", "."} for rows in glyphs.values())
    assert len(set(glyphs.values())) == len(glyphs)


def test_text_is_written_letter_by_letter() -> None:
    canvas = Canvas(30, 9)
    canvas.text(1, 1, "i {")
    dots = read_png(canvas.png())
    drawn = ["".join(".#"[dot == BLACK] for dot in row[1:18]) for row in dots[1:8]]
    glyphs = read_glyphs()
    assert drawn == [f"{i}.{'.' * 5}.{mark}" for i, mark in zip(glyphs["I"], glyphs["?"], strict=True)]
    assert text_width("i {") == 17
    assert text_width("") == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 5, [0, 1, 2, 3, 4, 5]),
        (0, 8, [0, 2, 4, 6, 8]),
        (0, 93, [0, 20, 40, 60, 80, 100]),
        (1, 1.4, [1, 1.1, 1.2, 1.3, 1.4]),
        (-3, 4, [-4, -2, 0, 2, 4]),
        (7, 7, [6, 8]),
        (0, 0, [0, 0.2]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0.0013, 0.0017), (0, 1e9), (-0.2, 77.7), (999, 1001), (5, 5)])
def test_ticks_are_few_and_even(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert found[0] <= low <= high <= found[-1]
    steps = [later - earlier for earlier, later in pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_a_chart_puts_points_where_its_axes_say() -> None:
    """x from 0 to 10 lies between dots 64 and 570, y from 0 to 4 between 260 and 34."""
    chart = Chart("t", "x", (Series("one", ((0, 0), (10, 4)), joined=False), Series("two", ((5, 2),))), 1.0)
    dots = read_png(draw_charts([chart]))
    assert (len(dots), len(dots[0])) == (HEIGHT, WIDTH)
    assert (dots[260][64], dots[34][570], dots[147][317]) == (BLUE, BLUE, ORANGE)
    assert dots[204][200] == BLACK, "the level of 1"


def test_a_chart_without_points_says_so_and_charts_stand_below_each_other() -> None:
    dots = read_png(draw_charts([Chart("t", "x", ()), Chart("t", "x", (Series("one", ((1, 1), (2, 2))),))]))
    assert len(dots) == 2 * HEIGHT
    assert all(BLUE not in row for row in dots[:HEIGHT])
    assert any(BLUE in row for row in dots[HEIGHT:])


def test_shares_are_the_empirical_distribution() -> None:
    assert shares([3.0, 1.0, 2.0, 2.0]) == ((1.0, 25.0), (2.0, 50.0), (2.0, 75.0), (3.0, 100.0))
    assert shares([]) == ()
    many = shares([float(value) for value in range(100_000)])
    assert len(many) < 1000
    assert (many[0], many[-1]) == ((0.0, 0.001), (99999.0, 100.0))


def measured(level: float, *records: Record) -> Measured:
    run = Run(records, 2.0)
    return Measured(run, summarize(f"{level:g} at once", level, run))


ANSWER = record(arrivals=(0.1, 0.2, 0.4), lengths=(1, 1, 1))
FAILURE = record(error="no")


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(("a",), measured=(measured(1, ANSWER),)),
        Outcome(("a",), measured=(measured(1, ANSWER), measured(4, ANSWER, FAILURE))),
        Outcome(("a",), measured=(measured(1, FAILURE), measured(4, FAILURE))),
    ],
)
def test_each_outcome_has_three_charts(outcome: Outcome) -> None:
    assert len(read_png(draw(outcome))) == 3 * HEIGHT


def test_a_comparison_has_a_chart_of_speed_ups_per_load() -> None:
    run = PairedRun((Pair(ANSWER, ANSWER), Pair(FAILURE, ANSWER)), 1.0, 1.0)
    compared = Compared(run, summarize_pairs("1 at once", 1, run, 0), ())
    dots = read_png(draw(Outcome(("speculation", "plain"), compared=(compared, compared))))
    assert len(dots) == 2 * HEIGHT
    assert any(BLUE in row for row in dots[:HEIGHT])
