"""What a person reads."""

from server.bench.divergence import Divergence
from server.bench.load import Run
from server.bench.measuring import Compared, Measured, Outcome
from server.bench.paired import Pair, PairedRun, summarize_pairs
from server.bench.parts import StepTime
from server.bench.records import DraftCounts, Record
from server.bench.report import as_text
from server.bench.summary import summarize
from tests.server.bench.scripted import record


def answer(prompt: str, gap: float, drafts: DraftCounts | None, **fields: object) -> Record:
    return record(
        prompt,
        seconds=0.5 + 2 * gap,
        arrivals=(0.5, 0.5 + gap, 0.5 + 2 * gap),
        lengths=(1, 1, 1),
        text="abc",
        finish_reason="length",
        num_output_tokens=3,
        num_prompt_tokens=7,
        drafts=drafts,
        **fields,
    )


def test_a_run() -> None:
    run = Run((answer("a", 0.1, DraftCounts(4, 2, 2)), record("b", error="HTTP 500: no")), 2.0)
    text = as_text(Outcome(("h:8000",), measured=(Measured(run, summarize("1 at once", 1, run)),)))
    assert (
        text
        == """\
1 at once: 1 of 2 answers in 2.0 s
  FAILED: 1 of 2 requests
    1 x HTTP 500: no
  ms                       p50    p90    p99   mean    max
  time to first token    500.0  500.0  500.0  500.0  500.0
  time per output token  100.0  100.0  100.0  100.0  100.0
  inter-token latency    100.0  100.0  100.0  100.0  100.0
  whole answer           700.0  700.0  700.0  700.0  700.0
  1.5 tokens/s, 0.50 answers/s; 3 tokens written (counted by usage), 7 read, 0 of them cached
  1.00 tokens per chunk; ended by length 1
  kind  answers  decode tokens/s  acceptance  tokens/forward
  chat        1             10.0        0.50            1.50
"""
    )


def test_where_the_time_went() -> None:
    run = Run((answer("a", 0.1, None),), 2.0)
    steps = StepTime(10, {"build": 0.1, "forward": 0.3})
    text = as_text(Outcome(("h",), measured=(Measured(run, summarize("1 at once", 1, run), steps),)))
    assert text.endswith(
        """\
  part of a step     ms   share
  build           10.00   25.0%
  forward         30.00   75.0%
  all             40.00  100.0%
"""
    )


def test_where_the_time_went_in_two_ways_of_which_one_tells() -> None:
    run = PairedRun((Pair(answer("a", 0.1, None), answer("a", 0.1, None)),), 1.0, 1.0)
    summary = summarize_pairs("1 at once, in pairs", 1, run, 0)
    ours, theirs = StepTime(2, {"build": 0.1, "forward": 0.1}), StepTime(0, {"build": 0.0, "forward": 0.0})
    text = as_text(Outcome(("a", "b"), compared=(Compared(run, summary, (), (ours, theirs)),)))
    assert "  part of a step    a ms   share\n  build            50.00   50.0%\n" in text
    told = (ours, StepTime(1, ours.seconds))
    text = as_text(Outcome(("a", "b"), compared=(Compared(run, summary, (), told),)))
    assert text.splitlines()[-4:] == [
        "  part of a step    a ms   share    b ms   share",
        "  build            50.00   50.0%  100.00   50.0%",
        "  forward          50.00   50.0%  100.00   50.0%",
        "  all             100.00  100.0%  200.00  100.0%",
    ]


def test_a_run_of_failures() -> None:
    run = Run((record("a", error="HTTP 500: no"),) * 3, 2.0)
    text = as_text(Outcome(("h",), measured=(Measured(run, summarize("1 at once", 1, run)),)))
    assert text == "1 at once: 0 of 3 answers in 2.0 s\n  FAILED: 3 of 3 requests\n    3 x HTTP 500: no\n"


def compare(*pairs: Pair, divergences: tuple[Divergence, ...] = ()) -> str:
    run = PairedRun(pairs, 1.0, 2.0)
    compared = Compared(run, summarize_pairs("1 at once, in pairs", 1, run, 0), divergences)
    return as_text(Outcome(("speculation", "plain"), compared=(compared,)))


def test_a_comparison() -> None:
    text = compare(
        Pair(answer("a", 0.25, DraftCounts(4, 2, 2)), answer("a", 0.5, DraftCounts(0, 0, 3))),
        Pair(answer("b", 1.0, DraftCounts(4, 0, 3)), answer("b", 0.5, DraftCounts(0, 0, 3))),
        divergences=(Divergence("a", 2, "c", "d", ("d", "c", 0.25)), Divergence("b", 0, "x", "y", None)),
    )
    assert (
        text
        == """\
1 at once, in pairs: speculation against plain, 2 of 2 pairs answered
  speed-up       mean  95 % interval  worst  best  prompts
  whole answers  0.95   0.60 to 1.50   0.60  1.50        2
  decoding       1.00   0.50 to 2.00   0.50  2.00        2
  first token    1.00   1.00 to 1.00   1.00  1.00        2
               tokens/s  first token ms  ms per token  acceptance  tokens/forward  cached
  speculation       6.0           500.0         625.0        0.25            1.20       0
  plain             3.0           500.0         500.0           -            1.00       0
  kind  pairs  whole  95 % interval  decoding  acceptance  tokens/forward  same text
  chat      2   0.95   0.60 to 1.50      1.00        0.25            1.20        2/2
  all       2   0.95   0.60 to 1.50      1.00        0.25            1.20        2/2
  slower than the baseline: 1 of 2 prompts
    0.60 b
  texts that differ: 0 of 2
    a at character 2: 'c', not 'd'; there 'd' leads 'c' by 0.250000 nats
    b at character 0: 'x', not 'y'
"""
    )


def test_a_server_that_drafts_although_asked_not_to_is_found_out() -> None:
    drafts = DraftCounts(4, 2, 2)
    text = compare(Pair(answer("a", 0.25, drafts), answer("a", 0.5, drafts)))
    assert "NOTE: 4 tokens were drafted for plain answers: the server ignored the wish" in text


def test_a_server_that_drafts_nothing_is_found_out() -> None:
    plain = DraftCounts(0, 0, 3)
    text = compare(Pair(answer("a", 0.25, plain), answer("a", 0.5, plain)))
    assert (
        "NOTE: no token was drafted with speculation either: plain decoding was compared with itself" in text
    )
    for told in (DraftCounts(1, 0, 3), None):
        assert "NOTE" not in compare(Pair(answer("a", 0.25, told), answer("a", 0.5, plain)))


def test_failed_pairs_are_shown_and_long_lists_are_cut() -> None:
    failures = [Pair(record("a", error=f"no {number}"), record("a")) for number in range(12)]
    text = compare(*failures)
    assert "speculation against plain, 0 of 12 pairs answered" in text
    assert "FAILED: speculation: 12 of 12 requests" in text
    assert "1 x no 9" in text
    assert "no 10" not in text
    assert "and 2 more; --json has all" in text
