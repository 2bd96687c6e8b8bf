"""One answer of a chat completion: from the engine's outputs to deltas, and from deltas to the whole."""

from collections.abc import Sequence

from engine.outputs import RequestOutput
from server.protocol.chat import AssistantMessage, ChatChoice, ChatChunkChoice, ChatLogprobs, MessageDelta
from server.protocol.tools import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from server.protocol.usage import PromptLogprob
from server.services.answer_reader import AnswerReader, Content, Piece, Thought
from server.services.generation import Choice
from server.services.logprobs import chat_logprobs, prompt_logprobs
from server.services.streaming import is_text_alone
from server.tools.parser import CallDelta


class ChatChoiceWriter:
    """Turns the outputs of one choice into deltas.

    Args:
        reader: Reads the outputs.
        with_token_ids: Whether the deltas have the token ids.

    Attributes:
        prompt_logprobs: Those of the prompt, once they have come, if they come with this choice.
    """

    def __init__(self, reader: AnswerReader, *, with_token_ids: bool = False) -> None:
        self._reader = reader
        self._with_token_ids = with_token_ids
        self._has_begun = False
        self._has_content = False
        self.prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None

    @property
    def choice(self) -> Choice:
        """The choice that is told of."""
        return self._reader.choice

    def write(self, output: RequestOutput) -> ChatChunkChoice:
        """What an output adds."""
        return self._delta(output, self._reader.read(output))

    def write_or_text(self, output: RequestOutput) -> ChatChunkChoice | str | None:
        """The same for a stream: the text alone if that is all there is, None if there is nothing."""
        pieces = self._reader.read(output)
        if self._has_begun and not self._with_token_ids and is_text_alone(output) and len(pieces) == 1:
            [piece] = pieces
            if isinstance(piece, Content):
                self._has_content = True
                return piece.text
        delta = self._delta(output, pieces)
        return delta if _says_something(delta) else None

    def text_delta(self, text: str) -> ChatChunkChoice:
        """A text as `write` would tell of it."""
        return self._choice(MessageDelta(content=text))

    def _delta(self, output: RequestOutput, pieces: Sequence[Piece]) -> ChatChunkChoice:
        message = MessageDelta() if self._has_begun else MessageDelta(role="assistant")
        self._has_begun = True
        self._fill(message, pieces)
        if output.prompt_logprobs is not None and self.choice.params.prompt_logprobs is not None:
            num_top = self.choice.params.prompt_logprobs
            self.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, num_top)
        reason = output.finish_reason and output.finish_reason.value
        if not self._reader.reads_calls:
            message.content = message.content or ""
        elif reason is not None:
            if self._reader.num_calls and reason == "stop":
                reason = "tool_calls"
            if not (self._reader.num_calls or self._has_content):
                message.content = ""
        logprobs = None if output.logprobs is None else chat_logprobs(output.logprobs)
        delta = self._choice(message, logprobs, reason, output.stop_reason)
        if self._with_token_ids:
            delta.token_ids = list(output.token_ids)
        return delta

    def _choice(
        self,
        message: MessageDelta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=self.choice.index,
            delta=message,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _fill(self, message: MessageDelta, pieces: Sequence[Piece]) -> None:
        """Sorts what is said into the message's places; only those of which there is something are set."""
        thoughts = [piece.text for piece in pieces if isinstance(piece, Thought)]
        contents = [piece.text for piece in pieces if isinstance(piece, Content)]
        calls = [self._call_delta(piece) for piece in pieces if isinstance(piece, CallDelta)]
        if thoughts:
            message.reasoning_content = "".join(thoughts)
        if contents:
            message.content = "".join(contents)
            self._has_content = True
        if calls:
            message.tool_calls = calls

    def _call_delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(index=call.index, function=FunctionCallDelta(arguments=call.arguments))
        return ToolCallDelta(
            index=call.index,
            id=self._reader.call_id(call.index),
            type="function",
            function=FunctionCallDelta(name=call.name, arguments=call.arguments),
        )


def _says_something(choice: ChatChunkChoice) -> bool:
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
