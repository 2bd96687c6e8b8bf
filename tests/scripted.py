"""A speculator that proposes what a test tells it to."""

from collections.abc import Callable, Mapping, Sequence

from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.token_tree import EMPTY_TREE, TokenTree

Script = Callable[[DraftRequest], TokenTree]
"""What to propose to a request with a budget; longer trees are cut to the budget by the speculator."""


class ScriptedSpeculator:
    """Follows one script for all requests, or one per request id; an id without a script gets nothing.

    Attributes:
        known: Ids of the requests it was asked about and not told to release.
        num_proposed: How often it was asked.
    """

    def __init__(
        self, script: Script | Mapping[str, Script], requirements: Requirements | None = None
    ) -> None:
        self.known: set[str] = set()
        self.num_proposed = 0
        self._script = script
        self._requirements = requirements or Requirements()

    @property
    def requirements(self) -> Requirements:
        return self._requirements

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        self.num_proposed += 1
        self.known.update(request.request_id for request in context.requests)
        return [self._propose(request) for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        return 0

    def release(self, request_id: str) -> None:
        self.known.discard(request_id)

    def _propose(self, request: DraftRequest) -> TokenTree:
        script = self._script.get(request.request_id) if isinstance(self._script, Mapping) else self._script
        if request.budget == 0 or script is None:
            return EMPTY_TREE
        return script(request).truncated(request.budget)


def fixed(draft: Sequence[int] | TokenTree) -> Script:
    """The same tokens (as a chain) or the same tree in every step."""
    tree = draft if isinstance(draft, TokenTree) else TokenTree.chain(draft)
    return lambda request: tree


def forced(
    answer: Sequence[int],
    *,
    changed_at: Sequence[int] = (),
    vocab_size: int = 259,
    branching: bool = False,
) -> Script:
    """The plain run's own answer, so that everything is accepted, or wrong at known places.

    Args:
        answer: The answer's tokens, from the first.
        changed_at: Output positions at which another token is proposed, so that the draft is rejected there.
        vocab_size: Ids to choose other tokens from.
        branching: Every right token gets a wrong sibling in front of it, so that the accepted nodes do not
            lie side by side: nodes 2, 4, 6 ...
    """

    def other(token: int) -> int:
        return (token + 1) % vocab_size

    def script(request: DraftRequest) -> TokenTree:
        begin = len(request.token_ids) - request.num_prompt_tokens
        depth = -(-request.budget // 2) if branching else request.budget
        right = [
            other(answer[place]) if place in changed_at else answer[place]
            for place in range(begin, min(begin + depth, len(answer)))
        ]
        if not branching:
            return TokenTree.chain(right)
        tokens: list[int] = []
        parents: list[int] = []
        for level, token in enumerate(right):
            tokens += [other(token), token]
            parents += [2 * level, 2 * level]
        return TokenTree(tuple(tokens), tuple(parents)).truncated(request.budget)

    return script


def per_prompt(scripts: Mapping[tuple[int, ...], Script]) -> Script:
    """A script per prompt, for engines that name their requests themselves."""

    def script(request: DraftRequest) -> TokenTree:
        chosen = scripts.get(tuple(request.token_ids[: request.num_prompt_tokens]))
        return EMPTY_TREE if chosen is None else chosen(request)

    return script


def failing(error: Exception) -> Script:
    """Raises instead of proposing."""

    def script(request: DraftRequest) -> TokenTree:
        raise error

    return script
