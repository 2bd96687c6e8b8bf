"""What the tests of lookup drafters share."""

from collections.abc import Sequence

from engine.sampling_params import SamplingParams
from engine.speculation.base import DraftRequest, ProposalContext, Speculator
from engine.token_tree import MAX_NODES, Proposal, TokenTree

EOS = 9


def request(
    tokens: Sequence[int],
    budget: int = 4,
    *,
    num_prompt: int = 1,
    request_id: str = "a",
    params: SamplingParams | None = None,
    max_depth: int = MAX_NODES,
) -> DraftRequest:
    return DraftRequest(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=len(tokens) - 1,
        num_cached_tokens=0,
        block_table=(),
        params=params or SamplingParams(seed=0),
        budget=budget,
        max_depth=max_depth,
    )


def propose_one(speculator: Speculator, asked: DraftRequest) -> TokenTree:
    [tree] = speculator.propose(ProposalContext((asked,)))
    assert tree.proposal is Proposal.DETERMINISTIC
    assert len(tree) <= asked.budget
    assert max(tree.depths()) <= asked.max_depth
    return tree


def read_answer(
    speculator: Speculator, prompt: Sequence[int], answer: Sequence[int], budget: int = 15
) -> list[tuple[int, int]]:
    """Speculates an answer that is known; (drafted, accepted) of each step."""
    tokens = [*prompt, answer[0]]
    steps = []
    while (place := len(tokens) - len(prompt)) < len(answer):
        tree = propose_one(speculator, request(tuple(tokens), budget, num_prompt=len(prompt)))
        node = accepted = 0
        while place + accepted < len(answer):
            right = [c for c in tree.children(node) if tree.tokens[c - 1] == answer[place + accepted]]
            if not right:
                break
            node, accepted = right[0], accepted + 1
        steps.append((len(tree), accepted))
        tokens += answer[place : place + accepted + 1]
    return steps
