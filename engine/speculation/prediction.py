"""Predicted Outputs: drafts from a text that the client says the answer will resemble."""

from collections.abc import Sequence

from engine.speculation.alignment import Alignment
from engine.speculation.base import DraftRequest, ProposalContext, Requirements
from engine.speculation.ngram import ending_ids
from engine.token_tree import EMPTY_TREE, TokenTree


class PredictionSpeculator:
    """Drafts what a request's own prediction says comes next, for requests that bring one.

    Args:
        eos_token_ids: The target's EOS ids; a draft ends with the first one.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._readers: dict[str, Alignment] = {}

    @property
    def requirements(self) -> Requirements:
        """None at all; its drafts come with estimates."""
        return Requirements(estimates=True)

    def propose(self, context: ProposalContext) -> list[TokenTree]:
        """See Speculator; empty trees for requests without a prediction."""
        return [self._propose(request) for request in context.requests]

    def num_computed_tokens(self, request_id: str) -> int:
        """0: there is no cache."""
        return 0

    def release(self, request_id: str) -> None:
        """Forgets how far the request had come; its tokens tell it again."""
        self._readers.pop(request_id, None)

    def num_found(
        self, request_id: str, prediction: Sequence[int], token_ids: Sequence[int], num_prompt_tokens: int
    ) -> int:
        """Tokens of a prediction that the answer so far has, in their order but for moved passages.

        Args:
            request_id: Whose.
            prediction: The predicted tokens.
            token_ids: Prompt and answer so far.
            num_prompt_tokens: How many of them are the prompt.
        """
        return self._read(request_id, prediction, token_ids, num_prompt_tokens).num_found

    def _propose(self, request: DraftRequest) -> TokenTree:
        prediction = request.params.speculation.prediction
        if not prediction or request.budget == 0:
            return EMPTY_TREE
        reader = self._read(request.request_id, prediction, request.token_ids, request.num_prompt_tokens)
        ends = ending_ids(request, self._eos_token_ids)
        return reader.draft(min(request.budget, request.max_depth), request.price, ends)

    def _read(
        self, request_id: str, prediction: Sequence[int], token_ids: Sequence[int], num_prompt_tokens: int
    ) -> Alignment:
        """The request's alignment, up to its last token."""
        reader = self._readers.get(request_id)
        if reader is None or num_prompt_tokens + reader.num_read > len(token_ids):
            reader = self._readers[request_id] = Alignment(prediction)
        reader.read(token_ids[num_prompt_tokens + reader.num_read :])
        return reader
