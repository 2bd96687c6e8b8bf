"""Several speculators that feed one tree."""

from dataclasses import replace

import pytest

from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from engine.speculation.base import ProposalContext, Requirements
from engine.speculation.several import SeveralSpeculators
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import MAX_NODES, TokenTree
from tests.scripted import ScriptedSpeculator, fixed
from tests.speculation.drafting import Blocks, RecordingRunner, Text, make_drafter, propose
from tests.tiny import tiny_model


def scripted(*tokens: int, requirements: Requirements | None = None) -> ScriptedSpeculator:
    return ScriptedSpeculator(fixed(tokens), requirements)


@pytest.mark.parametrize(
    ("budget", "paths"),
    [
        (1, [(1,)]),
        (2, [(1,), (2,)]),
        (3, [(1,), (2,), (1, 5)]),
        (6, [(1,), (2,), (1, 5), (2, 5), (1, 5, 6), (2, 5, 6)]),
        (60, [(1,), (2,), (1, 5), (2, 5), (1, 5, 6), (2, 5, 6), (1, 5, 6, 7), (2, 5, 6, 7)]),
    ],
)
def test_everyone_gets_an_equal_share(budget: int, paths: list[tuple[int, ...]]) -> None:
    speculator = SeveralSpeculators([scripted(1, 5, 6, 7), scripted(2, 5, 6, 7)])
    [tree] = propose(speculator, Text("a", [1, 2], Blocks()).ask(budget))
    assert [tree.path_tokens(node) for node in range(1, len(tree) + 1)] == paths


def test_what_they_agree_on_is_checked_once() -> None:
    speculator = SeveralSpeculators([scripted(1, 5, 6), scripted(1, 5, 7)])
    [tree] = propose(speculator, Text("a", [1, 2], Blocks()).ask(6))
    assert tree == TokenTree((1, 5, 6, 7), (0, 1, 2, 2))


def test_requirements_are_those_of_all() -> None:
    members = [
        scripted(1, requirements=Requirements(has_cache=True, max_model_len=90)),
        scripted(2, requirements=Requirements(max_model_len=70)),
        scripted(3),
    ]
    found = SeveralSpeculators(members).requirements
    assert replace(found, shape=None) == Requirements(has_cache=True, max_model_len=70, branches=True)
    # Side by side, since drafts share nothing but the root for sure.
    assert found.shape is not None
    assert found.shape.parents[:6] == (0, 0, 0, 1, 2, 3)
    alone = SeveralSpeculators([scripted(3)]).requirements
    assert replace(alone, shape=None) == Requirements(branches=True)
    assert alone.shape == TreeShape.chain(MAX_NODES)


def test_a_block_counts_as_drafted_if_every_cache_has_it() -> None:
    ahead, behind = (make_drafter(RecordingRunner(tiny_model("llama", seed=seed))) for seed in (0, 1))
    speculator = SeveralSpeculators([ahead, scripted(1), behind])
    text = Text("a", list(range(9)), Blocks())
    ahead.propose(ProposalContext((text.ask(2),)))
    assert ahead.num_computed_tokens("a") == 9
    assert speculator.num_computed_tokens("a") == 0
    propose(speculator, text.ask(6))
    assert speculator.num_computed_tokens("a") == 9
    speculator.release("a")
    assert ahead.num_computed_tokens("a") == behind.num_computed_tokens("a") == 0


def test_drawn_drafts_are_never_merged() -> None:
    rejection = SpeculationParams(acceptance=Acceptance.REJECTION)
    params = SamplingParams(seed=1, ignore_eos=True, speculation=rejection)
    speculator = SeveralSpeculators(
        [make_drafter(RecordingRunner(tiny_model("llama", seed=seed))) for seed in (0, 1)]
    )
    with pytest.raises(ValueError, match="cannot be merged"):
        propose(speculator, Text("a", [1, 2, 3], Blocks(), params).ask(4))
