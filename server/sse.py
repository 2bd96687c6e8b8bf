"""Server-sent events."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import until_disconnect
from server.errors import as_api_error
from server.protocol.response_events import ResponseEvent

_MARK = "\0"
_NUMBER = b'"sequence_number":'

DONE = b"data: [DONE]\n\n"

# nginx buffers a proxied answer unless X-Accel-Buffering says no; no-transform keeps proxies from
# compressing, which would hold events back.
_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}


class TextEvents:
    """The events of one kind that add text to one item of a response.

    They differ in number and text alone, so that the JSON around these is made once.

    Args:
        make: The event with a number and a text, as a model.
    """

    def __init__(self, make: Callable[[int, str], ResponseEvent]) -> None:
        sample = make(0, _MARK)
        before, _, rest = named_frame(sample).partition(_NUMBER + b"0")
        between, _, behind = rest.rpartition(to_json(_MARK))
        self._around = before + _NUMBER, between, behind

    def frame(self, number: int, text: str) -> bytes:
        """The same as `named_frame` of the model."""
        before, between, behind = self._around
        return b"%b%d%b%b%b" % (before, number, between, to_json(text), behind)


@dataclass(frozen=True, slots=True)
class TextEvent:
    """One of them; written when it is sent, if it is.

    Attributes:
        events: What it belongs to.
        sequence_number: Its number in the stream.
        text: What it adds.
    """

    events: TextEvents
    sequence_number: int
    text: str


AnyEvent = TypeVar("AnyEvent")


def data_frame(event: BaseModel | bytes) -> bytes:
    """A model, or what is JSON already, as an event without a name."""
    return b"data: %b\n\n" % (event if isinstance(event, bytes) else as_json(event))


def named_frame(event: ResponseEvent | TextEvent) -> bytes:
    """A model as an event that its type names."""
    if isinstance(event, TextEvent):
        return event.events.frame(event.sequence_number, event.text)
    return b"event: %b\n%b" % (event.type.encode(), data_frame(event))


class EventStream(Response, Generic[AnyEvent]):
    """Sends events, those of one batch in one write, and [DONE] at the end.

    The answer's head waits for the first batch: an error before it is raised, and so becomes an ordinary
    error answer with its status. An error after it becomes an event with an error object, which the end
    follows. When the client disconnects, the batches are closed at once, whatever they wait for.

    Args:
        batches: What to send; closed in every case.
        frame: How an event is written.
        end: What is sent behind the last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        batches: AsyncGenerator[Sequence[AnyEvent], None],
        frame: Callable[[AnyEvent], bytes],
        end: bytes = DONE,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._batches = batches
        self._frame = frame
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request."""
        # A client that has gone needs no answer, and one that has begun cannot become an error.
        with suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._batches) as batches:
            first = await anext(batches, ())
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await self._write(send, first)
            try:
                async for batch in batches:
                    await self._write(send, batch)
                last = b""
            except Exception as error:
                last = data_frame(as_api_error(error).body)
        await send({"type": "http.response.body", "body": last + self._end})

    async def _write(self, send: Send, events: Sequence[AnyEvent]) -> None:
        body = b"".join(map(self._frame, events))
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})


def as_json(model: BaseModel) -> bytes:
    """A model as JSON; keys that nobody set are left out, null that somebody set is not."""
    return model.model_dump_json(exclude_unset=True).encode()
