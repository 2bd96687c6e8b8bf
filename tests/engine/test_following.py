"""A head follows texts while its drafts may pay, and lets go of them under load: texts stay the same."""

import pytest

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from engine.speculation.base import ProposalContext
from engine.speculation.planner import FixedPlanner
from engine.token_tree import TokenTree
from tests.engine.answers import PROMPT
from tests.engine.test_lossless import PROMPTS, plain_answers
from tests.engine.test_planning import with_planner
from tests.engines import build_llm, drafter_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


class UpTo(FixedPlanner):
    """A head pays for so many requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def follows_texts(self, method: int, num_requests: int) -> bool:
        return num_requests <= self.limit


def asked(llm: LLM) -> list[set[str]]:
    """From now on, whom the head was asked about in each call."""
    speculator, calls = drafter_of(llm).speculator, list[set[str]]()
    propose = speculator.propose

    def noting(context: ProposalContext) -> list[TokenTree]:
        calls.append({request.request_id for request in context.requests})
        return propose(context)

    speculator.propose = noting  # type: ignore[method-assign]
    return calls


def test_who_comes_under_load_is_not_followed_and_who_came_before_still_drafts() -> None:
    llm = with_planner(build_llm("eagle3"), UpTo(2))
    calls = asked(llm)
    answers = llm.generate(PROMPTS[:4], GREEDY)
    expected = plain_answers("greedy")[:4]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.speculation.num_draft_tokens > 0 for answer in answers] == [True, True, False, False]
    assert max(map(len, calls)) == 2
    calls.clear()
    [alone] = llm.generate(PROMPTS[3:4], GREEDY)
    assert alone.speculation.num_draft_tokens > 0
    assert alone.token_ids == answers[3].token_ids


def test_blocks_that_were_not_followed_serve_who_is_not_followed() -> None:
    llm = with_planner(build_llm("eagle3"), UpTo(0))
    first, second = (llm.generate([PROMPT], GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens > 0
    with_planner(llm, UpTo(8))
    [third] = llm.generate([PROMPT], GREEDY)
    assert third.num_cached_tokens == 0
    assert first.token_ids == second.token_ids == third.token_ids


@pytest.mark.parametrize(("limit", "stays"), [(0, False), (8, True)])
def test_after_a_while_of_load_texts_are_let_go(
    limit: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.speculation.following._PATIENCE", 2)
    llm = with_planner(build_llm("eagle3", num_draft_tokens=1), UpTo(8))
    core = llm.core
    core.add_request("a", PROMPT, LONG)
    core.step()
    [request] = core.scheduler.running
    assert request.needs_draft_cache
    with_planner(llm, UpTo(limit))
    for _ in range(14):
        core.step()
    assert request.needs_draft_cache
    for _ in range(9):
        core.step()
    assert request.needs_draft_cache is stays
    assert (drafter_of(llm).speculator.num_computed_tokens("a") > 0) is stays
    with_planner(llm, UpTo(8))
    for _ in range(9):
        core.step()
    assert request.needs_draft_cache is stays  # What was missed cannot be made up.


def test_now_and_then_a_text_is_followed_all_the_same() -> None:
    """Or else drafts that are worth nothing today would never be seen to be worth something tomorrow."""
    llm = with_planner(build_llm("eagle3"), UpTo(0))
    wishes = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    drafted = [llm.generate([PROMPT], wishes)[0].speculation.num_draft_tokens for _ in range(34)]
    assert [place for place, count in enumerate(drafted, start=1) if count] == [16, 32]
