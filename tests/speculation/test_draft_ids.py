"""Drawing from rows over a draft vocabulary is drawing from the same rows over the target's ids."""

import pytest
import torch

from engine.sampling.noise import NoiseKey, Stream
from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest
from engine.speculation.draft_ids import DraftIds
from engine.speculation.drawing import DrawingStyle, RowWish, draw_children
from engine.speculation.growing import TreeGrower
from engine.speculation.growth import StaticGardener
from engine.speculation.target_ends import TargetEnds
from engine.speculation.tree_shape import TreeShape
from engine.token_tree import Proposal, TokenTree
from tests.heads import DRAFT_IDS
from tests.operators import need_operators
from tests.tiny import VOCAB_SIZE, tiny_model

IDS = DraftIds(DRAFT_IDS, VOCAB_SIZE)


def rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, len(DRAFT_IDS), generator=torch.Generator().manual_seed(count)) * 3


@pytest.mark.parametrize("with_operators", [False, True])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("proposal", Proposal)
def test_the_same_children_are_drawn(proposal: Proposal, needs: bool, with_operators: bool) -> None:
    stream = Stream.DRAFT if proposal.is_drawn else Stream.TARGET
    keys = [None if proposal is Proposal.DETERMINISTIC else NoiseKey(1, 0, row, stream) for row in range(4)]
    wishes = [RowWish(proposal, 3, key, needs) for key in keys]
    operators = need_operators() if with_operators else None
    ours = draw_children(rows(), wishes, operators, IDS)
    theirs = draw_children(IDS.spread(rows(), -torch.inf), wishes, operators)
    for own, other in zip(ours, theirs, strict=True):
        assert [child.token_id for child in own] == [child.token_id for child in other]
        for a, b in zip(own, other, strict=True):
            assert a.log_probability == pytest.approx(b.log_probability, abs=1e-6)
            if a.distribution is not None and b.distribution is not None:
                assert torch.allclose(a.distribution, b.distribution, atol=1e-7)
            assert (a.distribution is None) == (b.distribution is None) == (not proposal.is_drawn)


def request(name: str, **wishes: object) -> DraftRequest:
    params = SamplingParams(temperature=0.0, ignore_eos=True, **wishes)  # type: ignore[arg-type]
    return DraftRequest(name, (1, 2, 3), 2, 2, 0, (0, 1, 2), params, budget=3)


def drafts(requests: list[DraftRequest], logits: torch.Tensor, ids: DraftIds | None) -> list[TokenTree]:
    gardener = StaticGardener(TreeShape((0, 0, 0)))
    grower = TreeGrower(gardener, DrawingStyle(branches=True), frozenset())
    trees = [grower.start(each) for each in requests]
    grower.draw(trees, logits, ids)
    return [tree.tree() for tree in trees]


def test_options_that_name_tokens_mean_the_targets() -> None:
    logits = rows()
    best = [int(DRAFT_IDS[row.argmax()]) for row in logits]
    asked = [
        request("plain"),
        request("biased", logit_bias=((best[1], -100.0), (7, 100.0))),
        request("another"),
        request("penalised", repetition_penalty=2.0),
    ]
    together = drafts(asked, logits, IDS)
    assert together == drafts(asked, IDS.spread(logits, -torch.inf), None)
    assert together[1].tokens[0] == 7
    assert best[1] not in together[1].tokens
    assert together[0].tokens[0] == best[0]
    for place, own in enumerate(asked):
        assert drafts([own], logits[place : place + 1], IDS) == [together[place]]


def test_entries_that_pad_the_targets_ids_are_not_drafted() -> None:
    ends = TargetEnds(tiny_model(), 201)
    ids = ends.ids(DRAFT_IDS)
    assert ids is not None
    logits = rows()
    cut = ends.cut(logits, ids)
    assert cut.shape == (4, len(DRAFT_IDS) - 1)
    assert torch.equal(ids.spread(cut, -torch.inf), IDS.spread(logits, -torch.inf)[:, :201])
    assert torch.equal(ends.spread(logits, DRAFT_IDS), ids.spread(cut, -torch.inf))
