"""One answer of a chat completion: from the engine's outputs to deltas, and from deltas to the whole."""

from collections.abc import Sequence

from engine.outputs import RequestOutput
from server.protocol.chat import AssistantMessage, ChatChoice, ChatChunkChoice, ChatLogprobs, MessageDelta
from server.protocol.tools import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from server.protocol.usage import PromptLogprob
from server.services.generation import Choice
from server.services.logprobs import chat_logprobs, prompt_logprobs
from server.services.reasoning import ReasoningSplitter
from server.tools.parser import CallDelta, Parsed
from server.tools.plan import ToolPlan


class ChatChoiceWriter:
    """Turns the outputs of one choice into deltas.

    Args:
        choice: Which.
        plan: How calls in it are read; None takes all of the text as content.
        reasoning: Takes thoughts apart; None leaves them in the content.
        with_token_ids: Whether the deltas have the token ids.

    Attributes:
        prompt_logprobs: Those of the prompt, once they have come, if they come with this choice.
    """

    def __init__(
        self,
        choice: Choice,
        plan: ToolPlan | None,
        reasoning: ReasoningSplitter | None = None,
        *,
        with_token_ids: bool = False,
    ) -> None:
        self.choice = choice
        self._with_token_ids = with_token_ids
        self._plan = plan
        self._reasoning = reasoning
        self._parser = plan.parser() if plan is not None else None
        self._has_begun = False
        self._has_content = False
        self.prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None

    def write(self, output: RequestOutput) -> ChatChunkChoice:
        """What an output adds."""
        is_last = output.finish_reason is not None
        message = MessageDelta() if self._has_begun else MessageDelta(role="assistant")
        self._has_begun = True
        if output.prompt_logprobs is not None and self.choice.params.prompt_logprobs is not None:
            num_top = self.choice.params.prompt_logprobs
            self.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, num_top)
        reason = output.finish_reason and output.finish_reason.value
        text = self._said(output.text, message, is_last=is_last)
        if self._parser is None:
            message.content = text
        else:
            parsed = self._parser.feed(text)
            self._add(message, parsed)
            if is_last:
                self._add(message, self._parser.finish())
                if self._parser.num_calls and reason == "stop":
                    reason = "tool_calls"
                if not (self._parser.num_calls or self._has_content):
                    message.content = ""
        delta = ChatChunkChoice(
            index=self.choice.index,
            delta=message,
            logprobs=None if output.logprobs is None else chat_logprobs(output.logprobs),
            finish_reason=reason,
            stop_reason=output.stop_reason,
        )
        if self._with_token_ids:
            delta.token_ids = list(output.token_ids)
        return delta

    def _said(self, text: str, message: MessageDelta, *, is_last: bool) -> str:
        """A text without its thoughts, which go to the message's own place for them."""
        if self._reasoning is None:
            return text
        parts = [self._reasoning.feed(text)]
        if is_last:
            parts.append(self._reasoning.finish())
        if thoughts := "".join(part.reasoning for part in parts):
            message.reasoning_content = thoughts
        return "".join(part.content for part in parts)

    def _add(self, message: MessageDelta, parsed: Parsed) -> None:
        if parsed.content:
            message.content = (message.content or "") + parsed.content
            self._has_content = True
        if parsed.calls:
            message.tool_calls = [*(message.tool_calls or []), *map(self._call_delta, parsed.calls)]

    def _call_delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(index=call.index, function=FunctionCallDelta(arguments=call.arguments))
        assert self._plan is not None, "there are no calls without tools"
        return ToolCallDelta(
            index=call.index,
            id=self._plan.call_id(self.choice, call.index),
            type="function",
            function=FunctionCallDelta(name=call.name, arguments=call.arguments),
        )


def says_something(choice: ChatChunkChoice) -> bool:
    """Whether a delta is worth an event."""
    delta = choice.delta
    return bool(
        delta.role
        or delta.content
        or delta.reasoning_content
        or delta.tool_calls
        or choice.logprobs
        or choice.token_ids
        or choice.finish_reason
    )


def fold(deltas: Sequence[ChatChunkChoice]) -> ChatChoice:
    """The whole of a choice."""
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    contents = [delta.delta.content for delta in deltas if delta.delta.content is not None]
    calls = _fold_calls([call for delta in deltas for call in delta.delta.tool_calls or ()])
    last = deltas[-1]
    message = AssistantMessage(
        role="assistant", content="".join(contents) if contents else None, refusal=None
    )
    if calls:
        message.tool_calls = calls
    if thoughts := "".join(delta.delta.reasoning_content or "" for delta in deltas):
        message.reasoning_content = thoughts
    whole = ChatChoice(
        index=last.index,
        message=message,
        logprobs=ChatLogprobs(content=[entry for part in logprobs for entry in part.content])
        if logprobs
        else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    if last.token_ids is not None:
        whole.token_ids = [token_id for delta in deltas for token_id in delta.token_ids or ()]
    return whole


def _fold_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.id is not None and delta.type is not None and delta.function.name is not None:
            function = FunctionCall(name=delta.function.name, arguments="")
            calls.append(ToolCall(id=delta.id, type=delta.type, function=function))
        calls[delta.index].function.arguments += delta.function.arguments or ""
    return calls
