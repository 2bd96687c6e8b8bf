"""One item of a response's output: the events that tell of it, and the whole of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from server.protocol.chat import ChatTokenLogprob
from server.protocol.response_events import (
    AnyResponseEvent,
    ArgumentsDelta,
    ArgumentsDone,
    ItemEvent,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from server.protocol.response_object import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from server.sse import TextEvent, TextEvents

Told = AnyResponseEvent | TextEvent
"""What tells of an item."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item stands.

    Attributes:
        item_id: Its id.
        output_index: Its place in the output.
        numbers: The numbers of the stream's next events.
    """

    item_id: str
    output_index: int
    numbers: Iterator[int]

    def item(
        self, kind: Literal["response.output_item.added", "response.output_item.done"], item: OutputItem
    ) -> ItemEvent:
        """The item begins, or is complete."""
        number = next(self.numbers)
        return ItemEvent(type=kind, sequence_number=number, output_index=self.output_index, item=item)

    def part(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        part: OutputText | ReasoningText,
    ) -> PartEvent:
        """Its only part begins, or is complete."""
        return PartEvent(
            type=kind,
            sequence_number=next(self.numbers),
            item_id=self.item_id,
            output_index=self.output_index,
            content_index=0,
            part=part,
        )

    def text(self, events: TextEvents, text: str) -> TextEvent:
        """More of its text."""
        return TextEvent(events, next(self.numbers), text)


class MessageWriter:
    """Tells of a message."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._deltas = TextEvents(self._delta)

    def begin(self) -> list[Told]:
        """What comes first."""
        return [
            self._place.item("response.output_item.added", self._item("in_progress", [])),
            self._place.part("response.content_part.added", self._part("", [])),
        ]

    def add(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> list[Told]:
        """More of its text, and of its tokens."""
        self._texts.append(text)
        self._logprobs += logprobs
        if logprobs:
            return [self._delta(next(self._place.numbers), text, logprobs)]
        return [self._place.text(self._deltas, text)]

    def end(self, status: ItemStatus) -> list[Told]:
        """What comes last."""
        part = self._part("".join(self._texts), self._logprobs)
        done = TextDone(
            type="response.output_text.done",
            sequence_number=next(self._place.numbers),
            item_id=self._place.item_id,
            output_index=self._place.output_index,
            content_index=0,
            text=part.text,
            logprobs=part.logprobs,
        )
        return [
            done,
            self._place.part("response.content_part.done", part),
            self._place.item("response.output_item.done", self.whole(status)),
        ]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The message."""
        return self._item(status, [self._part("".join(self._texts), self._logprobs)])

    def _delta(self, number: int, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> TextDelta:
        return TextDelta(
            type="response.output_text.delta",
            sequence_number=number,
            item_id=self._place.item_id,
            output_index=self._place.output_index,
            content_index=0,
            delta=text,
            logprobs=list(logprobs),
        )

    def _item(self, status: ItemStatus, content: list[OutputText]) -> OutputMessage:
        return OutputMessage(
            type="message", id=self._place.item_id, status=status, role="assistant", content=content
        )

    def _part(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> OutputText:
        return OutputText(type="output_text", text=text, annotations=[], logprobs=list(logprobs))


class ReasoningWriter:
    """Tells of thoughts."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._texts: list[str] = []
        self._deltas = TextEvents(self._delta)

    def begin(self) -> list[Told]:
        """What comes first."""
        return [
            self._place.item("response.output_item.added", self._item("in_progress", [])),
            self._place.part("response.content_part.added", ReasoningText(type="reasoning_text", text="")),
        ]

    def add(self, text: str) -> list[Told]:
        """More of them."""
        self._texts.append(text)
        return [self._place.text(self._deltas, text)]

    def end(self, status: ItemStatus) -> list[Told]:
        """What comes last."""
        part = ReasoningText(type="reasoning_text", text="".join(self._texts))
        done = ReasoningDone(
            type="response.reasoning_text.done",
            sequence_number=next(self._place.numbers),
            item_id=self._place.item_id,
            output_index=self._place.output_index,
            content_index=0,
            text=part.text,
        )
        return [
            done,
            self._place.part("response.content_part.done", part),
            self._place.item("response.output_item.done", self.whole(status)),
        ]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The thoughts."""
        return self._item(status, [ReasoningText(type="reasoning_text", text="".join(self._texts))])

    def _delta(self, number: int, text: str) -> ReasoningDelta:
        return ReasoningDelta(
            type="response.reasoning_text.delta",
            sequence_number=number,
            item_id=self._place.item_id,
            output_index=self._place.output_index,
            content_index=0,
            delta=text,
        )

    def _item(self, status: ItemStatus, content: list[ReasoningText]) -> ReasoningItem:
        return ReasoningItem(
            type="reasoning", id=self._place.item_id, status=status, summary=[], content=content
        )


class CallWriter:
    """Tells of a call.

    Args:
        place: Where it stands.
        call_id: What its output will refer to.
        name: The function.
    """

    def __init__(self, place: Place, call_id: str, name: str) -> None:
        self._place = place
        self._call_id = call_id
        self._name = name
        self._texts: list[str] = []
        self._deltas = TextEvents(self._delta)

    def begin(self) -> list[Told]:
        """What comes first."""
        return [self._place.item("response.output_item.added", self._item("in_progress", ""))]

    def add(self, text: str) -> list[Told]:
        """More of its arguments."""
        self._texts.append(text)
        return [self._place.text(self._deltas, text)]

    def end(self, status: ItemStatus) -> list[Told]:
        """What comes last."""
        arguments = "".join(self._texts)
        done = ArgumentsDone(
            type="response.function_call_arguments.done",
            sequence_number=next(self._place.numbers),
            item_id=self._place.item_id,
            output_index=self._place.output_index,
            name=self._name,
            arguments=arguments,
        )
        return [done, self._place.item("response.output_item.done", self.whole(status))]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The call."""
        return self._item(status, "".join(self._texts))

    def _delta(self, number: int, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(
            type="response.function_call_arguments.delta",
            sequence_number=number,
            item_id=self._place.item_id,
            output_index=self._place.output_index,
            delta=text,
        )

    def _item(self, status: ItemStatus, arguments: str) -> FunctionCallItem:
        return FunctionCallItem(
            type="function_call",
            id=self._place.item_id,
            status=status,
            call_id=self._call_id,
            name=self._name,
            arguments=arguments,
        )


ItemWriter = MessageWriter | ReasoningWriter | CallWriter
