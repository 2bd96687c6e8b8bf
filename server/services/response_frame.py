"""ResponseFrame: the response around an answer, from its beginning to its end."""

from collections.abc import Sequence

from server.protocol.response import ResponseRequest
from server.protocol.response_object import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from server.protocol.usage import Usage
from server.services.models import AnswerHead


class ResponseFrame:
    """What a request and its head say of the response.

    Args:
        request: What was asked.
        head: How the answer is headed.
        is_stored: Whether the response is kept.
    """

    def __init__(self, request: ResponseRequest, head: AnswerHead, *, is_stored: bool) -> None:
        self._request = request
        self._head = head
        self._is_stored = is_stored

    def response(
        self,
        status: ResponseStatus,
        output: Sequence[OutputItem] = (),
        usage: ResponseUsage | None = None,
        error: ResponseError | None = None,
    ) -> ResponseObject:
        """The response as it is."""
        request, choice = self._request, self._request.tool_choice
        reason = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return ResponseObject(
            id=self._head.id,
            object="response",
            created_at=self._head.created,
            status=status,
            error=error,
            incomplete_details=reason,
            model=self._head.model,
            output=list(output),
            usage=usage,
            background=False,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata,
            parallel_tool_calls=request.parallel_tool_calls,
            previous_response_id=request.previous_response_id,
            reasoning={"effort": request.reasoning.effort, "summary": None},
            store=self._is_stored,
            temperature=request.temperature,
            text={"format": request.text.format.model_dump(by_alias=True, exclude_none=True)},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in request.tools],
            top_logprobs=request.top_logprobs,
            top_p=request.top_p,
            truncation=request.truncation,
            user=request.user,
        )


def response_usage(usage: Usage, num_thought_tokens: int) -> ResponseUsage:
    """The numbers in this endpoint's form."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_thought_tokens),
        total_tokens=usage.total_tokens,
    )
