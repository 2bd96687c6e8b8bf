"""Text that a request's grammar leaves no choice about is a draft that costs nothing to find."""

from engine.speculation.base import ProposalContext, Requirements
from engine.token_tree import EMPTY_TREE, TokenTree

# Not 1: the same text can be written in other tokens than those in which the tokenizer would split it.
_CHANCE = 0.97


class ForcedSpeculator:
    """Drafts what the grammar forces (jump-forward decoding), as a chain that is verified like any other."""

    requirements = Requirements(estimates=True)

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator."""
        return [
            EMPTY_TREE
            if request.matcher is None
            else _sure_chain(request.matcher.forced_tokens()[: min(request.budget, request.max_depth)])
            for request in context.requests
        ]

    def num_computed_tokens(self, request_id: str) -> int:
        """There is no cache."""
        return 0

    def release(self, request_id: str) -> None:
        """There is nothing to forget."""


def _sure_chain(tokens: tuple[int, ...]) -> TokenTree:
    chances = tuple(_CHANCE ** (place + 1) for place in range(len(tokens)))
    return TokenTree(tokens, tuple(range(len(tokens))), probabilities=chances)
