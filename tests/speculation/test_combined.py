"""A request's own prediction first, then the configured method."""

from dataclasses import replace

from engine.sampling_params import SamplingParams, SpeculationParams
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.combined import CombinedSpeculator
from engine.speculation.prediction import PredictionSpeculator
from engine.token_tree import EMPTY_TREE, TokenTree
from tests.scripted import ScriptedSpeculator, fixed
from tests.speculation.lookups import EOS, request

PREDICTED = tuple(range(20, 60))
SCRIPTED = TokenTree((1, 2, 3), (0, 0, 1))


def make(requirements: Requirements | None = None) -> tuple[CombinedSpeculator, ScriptedSpeculator]:
    method = ScriptedSpeculator(fixed(SCRIPTED), requirements)
    return CombinedSpeculator(PredictionSpeculator(frozenset({EOS})), method), method


def ask(
    answer: tuple[int, ...],
    name: str = "a",
    budget: int = 4,
    predicted: int = 63,
    prompt: tuple[int, ...] = (7,),
) -> DraftRequest:
    params = SamplingParams(seed=0, speculation=SpeculationParams(prediction=PREDICTED))
    asked = request(prompt + answer, budget, num_prompt=len(prompt), request_id=name, params=params)
    return replace(asked, prediction_budget=predicted)


def propose(combined: CombinedSpeculator, *requests: DraftRequest) -> list[TokenTree]:
    return combined.propose(ProposalContext(requests))


def test_the_prediction_comes_first_and_is_bound_by_its_own_budget() -> None:
    combined, method = make()
    [tree] = propose(combined, ask(PREDICTED[:2]))
    assert len(tree) > 20
    assert tree == TokenTree.chain(PREDICTED[2 : 2 + len(tree)])
    [tree] = propose(combined, ask(PREDICTED[:2], "b", predicted=5))
    assert tree == TokenTree.chain(PREDICTED[2:7])
    assert method.num_proposed == 0


def test_the_method_drafts_for_whom_the_prediction_has_nothing() -> None:
    combined, method = make()
    plain = request((7, 8), 4, request_id="plain")
    trees = propose(
        combined, ask(PREDICTED[:9]), plain, ask(PREDICTED, "done"), ask((1, 2, 3, 4, 5, 6), "lost")
    )
    assert [len(tree) for tree in trees[1:]] == [3, 3, 3]
    assert trees[0].tokens[:1] == PREDICTED[9:10]
    assert method.known == {"plain", "done", "lost"}


def test_a_method_that_has_no_room_is_asked_only_while_a_prompt_is_read() -> None:
    combined, method = make(Requirements(has_cache=True))
    reading = replace(ask((), "reading", 0, 0, prompt=(1, 2, 3)), num_computed_tokens=1)
    assert propose(combined, ask(PREDICTED, "done", 0), reading) == [EMPTY_TREE, EMPTY_TREE]
    assert method.known == {"reading"}
    assert combined.requirements == Requirements(has_cache=True)


def test_without_a_method_predictions_draft_alone() -> None:
    combined = CombinedSpeculator(PredictionSpeculator(frozenset()), None)
    trees = propose(combined, ask(PREDICTED[:1]), ask(PREDICTED, "done"))
    assert trees[0].tokens[:2] == PREDICTED[1:3]
    assert trees[1] == EMPTY_TREE
    assert combined.requirements == Requirements()
    assert combined.num_computed_tokens("a") == 0


def test_release_is_for_both() -> None:
    combined, method = make()
    propose(combined, ask(PREDICTED[:1]), ask(PREDICTED, "done"))
    for name in ("a", "done", "never seen"):
        combined.release(name)
    assert method.known == set()
    assert combined.predictions._readers == {}


def test_a_request_that_was_released_is_read_anew() -> None:
    combined, _ = make()
    answer = (*PREDICTED[:4], 1, 2, *PREDICTED[4:9])
    before = propose(combined, ask(answer))
    combined.release("a")
    assert propose(combined, ask(answer)) == before
    assert propose(combined, ask(PREDICTED[:2]))[0].tokens[0] == PREDICTED[2], "the id came back as another"
