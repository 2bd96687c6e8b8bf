"""Conversations that are too long, without their oldest turns."""

from collections.abc import Awaitable, Callable, Sequence

from server.protocol.chat import ChatMessage

_LEADING = ("system", "developer")


async def shortened(
    messages: Sequence[ChatMessage], fits: Callable[[Sequence[ChatMessage]], Awaitable[bool]]
) -> Sequence[ChatMessage]:
    """The messages without as few turns as makes them fit; with the last one alone if nothing does.

    A turn is what the user says and what follows up to the next time, so that no call loses its result.
    System messages at the beginning stay.

    Args:
        messages: The conversation.
        fits: Whether one fits; a shorter one fits if a longer one does.
    """
    if await fits(messages):
        return messages
    lead = next((i for i, message in enumerate(messages) if message.role not in _LEADING), len(messages))
    starts = [i for i, message in enumerate(messages) if message.role == "user" and i > lead]
    if not starts:
        return messages
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits([*messages[:lead], *messages[starts[middle] :]]):
            high = middle
        else:
            low = middle + 1
    return [*messages[:lead], *messages[starts[low] :]]
