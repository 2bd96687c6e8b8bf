"""ResponseWriter: from what an answer says to the events of a response, and to its output."""

from collections.abc import Iterator, Sequence

from server.protocol.chat import ChatTokenLogprob
from server.protocol.response_object import ItemStatus, OutputItem
from server.services.answer_reader import AnswerReader, Content, Piece, Thought
from server.services.item_writers import CallWriter, ItemWriter, MessageWriter, Place, ReasoningWriter, Told
from server.services.reasoning import num_thought_tokens
from server.tools.parser import CallDelta


class ResponseWriter:
    """Tells of one answer, item by item: each is complete before the next begins.

    What belongs to which item depends on the text alone, not on how many tokens come at once. Log
    probabilities are those of all tokens behind the thoughts, which is why they do not go with calls.

    Args:
        reader: Knows the ids of calls.
        suffix: What makes the ids of items unique.
        numbers: The numbers of the stream's next events.
    """

    def __init__(self, reader: AnswerReader, suffix: str, numbers: Iterator[int]) -> None:
        self._reader = reader
        self._suffix = suffix
        self._numbers = numbers
        self._open: ItemWriter | None = None
        self._output: list[OutputItem] = []
        self._unplaced: list[ChatTokenLogprob] = []
        self._has_spoken = False
        self._has_thoughts = False

    @property
    def output(self) -> list[OutputItem]:
        """The items that are complete."""
        return list(self._output)

    @property
    def has_thoughts(self) -> bool:
        """Whether the answer began with thoughts."""
        return self._has_thoughts

    def write(self, pieces: Sequence[Piece], logprobs: Sequence[ChatTokenLogprob]) -> list[Told]:
        """What an output adds: its pieces, and its tokens if they were asked for."""
        self._unplaced += logprobs
        return [event for piece in pieces for event in self._write(piece)]

    def end(self, status: ItemStatus) -> list[Told]:
        """What ends the output, and how its last item is; an answer that says nothing is an empty message."""
        events: list[Told] = []
        if not self._has_spoken and (status == "completed" or not self._has_thoughts):
            events += self._write(Content(""))
        if self._unplaced and isinstance(self._open, MessageWriter):
            events += self._open.add("", self._take_logprobs())
        is_whole_call = isinstance(self._open, CallWriter) and not self._reader.is_in_call
        return events + self._close("completed" if is_whole_call else status)

    def _write(self, piece: Piece) -> list[Told]:
        match piece:
            case Thought(text):
                return self._think(text)
            case Content(text):
                return self._say(text)
            case CallDelta():
                return self._call(piece)

    def _think(self, text: str) -> list[Told]:
        events: list[Told] = []
        self._has_thoughts = True
        if not isinstance(self._open, ReasoningWriter):
            events = self._close("completed")
            self._open = ReasoningWriter(self._place("rs"))
            events += self._open.begin()
        return events + self._open.add(text)

    def _say(self, text: str) -> list[Told]:
        events: list[Told] = []
        self._has_spoken = True
        if not isinstance(self._open, MessageWriter):
            events = self._close("completed")
            self._open = MessageWriter(self._place("msg"))
            events += self._open.begin()
            if self._has_thoughts:
                del self._unplaced[: num_thought_tokens(bytes(entry.bytes) for entry in self._unplaced)]
        logprobs = self._take_logprobs()
        return events + (self._open.add(text, logprobs) if text or logprobs else [])

    def _call(self, piece: CallDelta) -> list[Told]:
        events: list[Told] = []
        self._has_spoken = True
        if piece.name is not None:
            events = self._close("completed")
            self._open = CallWriter(self._place("fc"), self._reader.call_id(piece.index), piece.name)
            events += self._open.begin()
        assert isinstance(self._open, CallWriter), "arguments follow the name of their call"
        return events + (self._open.add(piece.arguments) if piece.arguments else [])

    def _close(self, status: ItemStatus) -> list[Told]:
        """Completes the item that is open."""
        if self._open is None:
            return []
        done, self._open = self._open, None
        self._output.append(done.whole(status))
        return done.end(status)

    def _place(self, prefix: str) -> Place:
        index = len(self._output)
        return Place(f"{prefix}_{self._suffix}{index:02x}", index, self._numbers)

    def _take_logprobs(self) -> list[ChatTokenLogprob]:
        """Those that came since the last text."""
        taken, self._unplaced = self._unplaced, []
        return taken
