"""Paired runs: who is asked when, and what follows from the answers."""

import asyncio
from typing import Any

import pytest

from server.bench.asking import Question
from server.bench.client import TokenChoice
from server.bench.divergence import MOST_LOOKUPS, Divergence, explain
from server.bench.paired import Pair, PairedRun, run_paired, summarize_pairs
from server.bench.records import DraftCounts
from tests.server.bench.scripted import Answer, ScriptedServer, question, record, steady, usage


def paired(server: ScriptedServer, questions: list[Question], concurrency: int = 1) -> PairedRun:
    ways = (server.client("fast", way="fast"), server.client("slow", way="slow"))
    return asyncio.run(run_paired(ways, questions, concurrency, lambda _: None, server.clock.timer))


def asked(server: ScriptedServer) -> str:
    """Who was asked what, such as `f0 s0`."""
    return " ".join(f"{body['way'][0]}{body['messages'][0]['content']}" for body in server.bodies)


def ask_each(names: str, concurrency: int = 1) -> str:
    server = ScriptedServer(lambda _: steady(["a", "b"], 0.1, 0.1))
    paired(server, [question(name, said=name) for name in names], concurrency)
    return asked(server)


def test_what_comes_first_alternates() -> None:
    assert ask_each("0123") == "f0 s0 s1 f1 f2 s2 s3 f3"


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ("0101", "f0 s0 s1 f1 s0 f0 f1 s1"),
        ("012012", "f0 s0 s1 f1 f2 s2 s0 f0 f1 s1 s2 f2"),
        ("000", "f0 s0 s0 f0 f0 s0"),
    ],
)
def test_a_prompt_that_comes_again_is_asked_the_other_way_round(names: str, order: str) -> None:
    assert ask_each(names) == order


def test_groups_are_asked_together() -> None:
    assert ask_each("01234", concurrency=2) == "f0 f1 s0 s1 s2 s3 f2 f3 f4 s4"


def test_pairs_are_of_one_prompt() -> None:
    server = ScriptedServer(lambda body: steady([body["way"], body["messages"][0]["content"]], 0.1, 0.1))
    run = paired(server, [question(name, said=name) for name in "abc"])
    assert [(pair.candidate.text, pair.baseline.text) for pair in run.pairs] == [
        (f"fast{name}", f"slow{name}") for name in "abc"
    ]


def test_speed_ups_are_ratios_of_neighbours_whatever_the_machine_does() -> None:
    """Ten times slower from prompt to prompt, the candidate always twice as fast in its decoding."""
    slowness = {"a": 1.0, "b": 10.0, "c": 100.0}

    def script(body: dict[str, Any]) -> Answer:
        scale = slowness[body["messages"][0]["content"]]
        gap = scale * (0.1 if body["way"] == "fast" else 0.2)
        return steady(list("abcde"), 0.4 * scale, gap, usage(5))

    run = paired(ScriptedServer(script), [question(name, name, said=name) for name in "abc"])
    summary = summarize_pairs("1 at once", 1, run, seed=0)
    total = summary.total
    assert total.decode is not None
    assert total.whole is not None
    assert total.ttft is not None
    assert [total.decode.mean, total.whole.mean, total.ttft.mean] == pytest.approx([2.0, 1.5, 1.0])
    assert total.decode.interval is not None
    assert [total.decode.interval.low, total.decode.interval.high] == pytest.approx([2.0, 2.0])
    assert (total.pairs, total.equal_texts, total.decode.num_prompts) == (3, 3, 3)
    assert run.candidate_seconds == pytest.approx(0.8 * 111)
    assert run.baseline_seconds == pytest.approx(1.2 * 111)
    assert [figures.kind for figures in summary.kinds] == ["a", "b", "c"]
    assert summary.losses == ()


def pair(prompt: str, candidate: float, baseline: float, kind: str = "chat", **fields: Any) -> Pair:
    ours = record(prompt, candidate, kind=kind, num_output_tokens=10, **fields)
    return Pair(ours, record(prompt, baseline, kind=kind, num_output_tokens=10))


def test_where_it_loses_is_said_by_prompt_and_kind() -> None:
    pairs = (
        pair("edit-1", 1.0, 4.0, "edit", drafts=DraftCounts(10, 8, 2)),
        pair("chat-1", 2.0, 1.0, drafts=DraftCounts(10, 1, 9)),
        pair("chat-2", 1.25, 1.0),
    )
    summary = summarize_pairs("", 1, PairedRun(pairs, 4.25, 6.0), 0)
    assert summary.losses == (("chat-1", 0.5), ("chat-2", 0.8))
    chat, edit = summary.kinds
    assert edit.whole is not None
    assert chat.whole is not None
    assert (edit.kind, edit.whole.interval, chat.kind) == ("edit", None, "chat")
    assert [edit.whole.mean, chat.whole.mean] == pytest.approx([4.0, 0.4**0.5])
    assert [chat.whole.smallest, chat.whole.largest] == pytest.approx([0.5, 0.8])
    assert edit.acceptance is not None
    assert (edit.acceptance.rate, edit.acceptance.tokens_per_forward) == (0.8, 5.0)
    assert summary.candidate.output_tokens_per_second == pytest.approx(30 / 4.25)
    assert summary.baseline.output_tokens_per_second == pytest.approx(5.0)


def test_repetitions_of_a_prompt_are_one_observation() -> None:
    pairs = (pair("a", 1.0, 2.0), pair("a", 1.0, 8.0), pair("b", 1.0, 1.0))
    whole = summarize_pairs("", 1, PairedRun(pairs, 3.0, 11.0), 0).total.whole
    assert whole is not None
    assert whole.num_prompts == 2
    assert [whole.smallest, whole.largest] == pytest.approx([1.0, 4.0])
    assert whole.mean == pytest.approx(2.0)


def test_a_pair_with_a_failure_is_in_no_ratio_but_in_the_count() -> None:
    broken = Pair(record("a", error="HTTP 500: no"), record("a", num_output_tokens=10))
    summary = summarize_pairs("", 1, PairedRun((broken, pair("b", 1.0, 3.0)), 2.0, 4.0), 0)
    assert (summary.total.pairs, summary.candidate.num_failed, summary.baseline.num_failed) == (1, 1, 0)
    assert summary.total.whole is not None
    assert summary.total.whole.mean == pytest.approx(3.0)
    assert summary.candidate.errors == {"HTTP 500: no": 1}


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [("abc", "abc", None), ("abc", "abd", 2), ("abc", "ab", 2), ("", "a", 0), ("xbc", "abc", 0)],
)
def test_the_first_difference(ours: str, theirs: str, place: int | None) -> None:
    assert Pair(record(text=ours), record(text=theirs)).divergence == place


class Choosing:
    """A client that only knows token choices."""

    def __init__(self, *choices: TokenChoice) -> None:
        self.choices = list(choices)
        self.asked = 0

    async def token_choices(self, question: Question) -> list[TokenChoice]:
        self.asked += 1
        return self.choices


CHOICES = (
    TokenChoice("ab", (("ab", -0.5), ("x", -2.0))),
    TokenChoice("cd", (("cd", -1.0), ("ce", -1.25))),
)


def explained(client: Choosing, *pairs: Pair, temperature: float = 0.0) -> tuple[Divergence, ...]:
    asked = question()
    asked = Question(asked.prompt, asked.path, {**asked.body, "temperature": temperature})
    return asyncio.run(explain(client, [asked] * len(pairs), pairs))  # type: ignore[arg-type]


def texts(ours: str, theirs: str, error: str | None = None) -> Pair:
    return Pair(record(text=ours, error=error), record(text=theirs))


def test_a_difference_is_explained_by_the_lead_of_the_token_there() -> None:
    found = explained(Choosing(*CHOICES), texts("abce and so on", "abcd"))
    assert found == (Divergence("sky", 3, "e and so on", "d", ("cd", "ce", 0.25)),)


@pytest.mark.parametrize(
    "client",
    [Choosing(), Choosing(TokenChoice("other", CHOICES[0].best)), Choosing(TokenChoice("abcd", ()))],
)
def test_without_fitting_logprobs_there_is_no_lead(client: Choosing) -> None:
    [found] = explained(client, texts("abce", "abcd"))
    assert (found.place, found.token) == (3, None)


def test_equal_texts_failures_and_drawn_tokens_are_not_looked_up() -> None:
    client = Choosing(*CHOICES)
    assert explained(client, texts("abcd", "abcd"), texts("", "abcd", error="no")) == ()
    [found] = explained(client, texts("abce", "abcd"), temperature=1.0)
    assert (found.token, client.asked) == (None, 0)


def test_only_the_first_few_differences_are_looked_up() -> None:
    client = Choosing(*CHOICES)
    found = explained(client, *[texts("abce", "abcd")] * (MOST_LOOKUPS + 3))
    assert client.asked == MOST_LOOKUPS
    assert [item.token is not None for item in found] == [True] * MOST_LOOKUPS + [False] * 3
