"""A sound engine passes whole; each planted fault is found, by the row that should find it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from engine.core.scheduler import SchedulerOutput
from engine.engine_core import EngineCore
from engine.sampling import sampler
from engine.sampling.logprobs import RowLogprobs, row_logprobs
from engine.speculation.base import ProposalContext, Speculator
from engine.token_tree import EMPTY_TREE, TokenTree
from server.config import ConfigError
from server.verify.in_process import EngineSubject
from server.verify.report import as_text
from server.verify.results import Outcome, Verdict
from server.verify.running import verify_all
from tests.server.verify.engines import plan, tiny_engine, tiny_subject


def run(*flags: str, method: str = "draft_model") -> Outcome:
    return verify_all([tiny_subject(method)], plan(*flags), "tiny")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_sound_engine_has_no_fault(method: str) -> None:
    outcome = run(method=method)
    assert outcome.num_faults == 0
    assert {row.verdict for row in outcome.texts} == {Verdict.EQUAL}
    assert max(row.logprob_difference or 0 for row in outcome.texts) < 1e-5
    assert len({row.case for row in outcome.texts}) == 19
    # A lookup draws nothing, so that only match verifies it.
    rules = ("match", "rejection", "block") if method == "draft_model" else ("match",)
    assert {(row.method, row.rule) for row in outcome.texts} == {
        ("plain", ""),
        *((method, rule) for rule in rules),
    }
    # A tiny model does not repeat itself, so lookup may find nothing to draft there.
    fine = {Verdict.HOLDS} if method == "draft_model" else {Verdict.HOLDS, Verdict.NO_DRAFTS}
    assert {row.verdict for row in outcome.laws} <= fine
    assert sum(row.drafted for row in outcome.texts) > 10
    if method == "draft_model":
        assert sum(row.accepted for row in outcome.texts) > 10
    text = as_text(outcome)
    assert "no fault:" in text
    assert "FAULT:" not in text


def accept_all(
    tree: TokenTree, choices: Mapping[int, int], accepted: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], int | None]:
    nodes = tuple(range(1, len(tree) + 1))
    return nodes, choices.get(nodes[-1] if nodes else 0)


def test_a_verifier_that_accepts_everything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "follow_choices", accept_all)
    outcome = run("--rules", "match")
    rows = {row.case: row for row in outcome.texts if row.rule}
    assert rows["greedy"].verdict is Verdict.FAULT
    assert sum(row.verdict is Verdict.FAULT for row in rows.values()) > 10
    assert {row.verdict for row in outcome.texts if not row.rule} == {Verdict.EQUAL}
    # What was said instead is far from what the target says: the gap is that of the target's own scores.
    [first, *_] = rows["greedy"].divergences
    assert first.gap is not None
    assert first.gap > 0.01
    assert first.token is not None
    assert any(row.verdict is Verdict.FAULT for row in outcome.laws)
    text = as_text(outcome)
    assert "  FAULT" in text
    assert f"token {first.token}" in text
    assert text.rstrip().splitlines()[-1].startswith("FAULT: ")


def test_logprobs_of_the_wrong_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[RowLogprobs]:
        # Each accepted token with the row of the one before it.
        return row_logprobs(logits[[0, *range(len(logits) - 1)]], token_ids, num_top)

    monkeypatch.setattr(sampler, "row_logprobs", wrong)
    outcome = run("--rules", "match")
    rows = [row for row in outcome.texts if row.rule]
    assert all(row.alone.equal == row.alone.total for row in rows)
    found = [row for row in rows if row.verdict is Verdict.FAULT]
    assert len(found) > 10
    assert min(row.logprob_difference or 0 for row in found) > 1e-3


class Claiming:
    """A drafter that says its tokens were drawn uniformly."""

    def __init__(self, inner: Speculator) -> None:
        self._inner = inner
        self.requirements = inner.requirements
        self.num_computed_tokens = inner.num_computed_tokens
        self.release = inner.release

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        return [self._claim(tree) for tree in self._inner.propose(context)]

    def _claim(self, tree: TokenTree) -> TokenTree:
        claimed = [torch.full_like(q, 1 / len(q)) for q in tree.distributions if isinstance(q, torch.Tensor)]
        return tree if tree == EMPTY_TREE else TokenTree.chain(tree.tokens, tree.proposal, claimed)


def test_a_false_claim_of_how_tokens_were_drawn_is_found_by_the_distribution_alone() -> None:
    engine = tiny_engine()
    drafting = engine.core._drafting
    assert drafting is not None
    drafting._drafters[-1].speculator = Claiming(drafting._drafters[-1].speculator)
    outcome = verify_all([EngineSubject(engine, 40, "float32")], plan("--seeds", "400"), "tiny")
    assert {row.verdict for row in outcome.texts} == {Verdict.EQUAL}
    verdicts = {row.rule: row.verdict for row in outcome.laws}
    assert verdicts == {"match": Verdict.HOLDS, "rejection": Verdict.FAULT, "block": Verdict.FAULT}


def test_an_engine_that_breaks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(
        tree: TokenTree, choices: Mapping[int, int], accepted: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], int | None]:
        if len(tree):
            raise RuntimeError("no such node")
        return (), choices.get(0)

    monkeypatch.setattr(sampler, "follow_choices", broken)
    outcome = run("--rules", "match")
    assert outcome.num_faults > 10
    assert "RuntimeError: no such node" in as_text(outcome)


def test_a_batch_that_changes_plain_texts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = EngineCore._forward

    def leaking(self: EngineCore, plan: SchedulerOutput) -> torch.Tensor:
        rows = forward(self, plan)
        # In a batch each row sees its neighbour.
        return rows if len(plan.scheduled) == 1 else rows + 0.3 * rows.roll(1, 0)

    monkeypatch.setattr(EngineCore, "_forward", leaking)
    outcome = run("--rules", "match")
    assert any(row.verdict is Verdict.FAULT for row in outcome.texts if not row.rule)


def test_rows_that_differ_by_rounding_alone_are_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two best tokens made equal up to 1e-5: whichever comes, it is reported and is no fault."""
    forward = EngineCore._forward
    generator = torch.Generator().manual_seed(0)

    def tied(self: EngineCore, plan: SchedulerOutput) -> torch.Tensor:
        rows = forward(self, plan).clone()
        best = rows.topk(2, dim=-1)
        noise = torch.rand(len(rows), generator=generator) * 1e-6
        rows.scatter_(1, best.indices[:, 1:], best.values[:, :1] + noise[:, None] - 5e-7)
        return rows

    monkeypatch.setattr(EngineCore, "_forward", tied)
    subject = tiny_subject()
    # The target as it is would not show that tie, so the gap is told by one that has it.
    monkeypatch.setattr(EngineSubject, "gap", lambda *given: 5e-7)
    outcome = verify_all([subject], plan("--rules", "match", "--tolerance", "10"), "tiny")
    greedy = [row for row in outcome.texts if row.case == "greedy"]
    assert Verdict.NEAR_TIE in {row.verdict for row in greedy}
    assert Verdict.FAULT not in {row.verdict for row in outcome.texts}
    assert "but for near-ties" in as_text(replace(outcome, laws=()))


@pytest.mark.parametrize("rules", ["rejection", "rejection,block"])
def test_rules_that_fit_nothing_are_no_success(rules: str) -> None:
    with pytest.raises(ConfigError, match=r"nothing is verified, since no rule .* fits: .*ngram draws"):
        run("--rules", rules, method="ngram")
