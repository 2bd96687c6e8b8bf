"""Reading server-sent events the strict way: anything that is no frame is an error."""

import json
from typing import Any

import httpx


def frames(text: str) -> list[str]:
    """The data of each event of a whole stream."""
    assert text.endswith("\n\n"), "the last event is not complete"
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    return [event.removeprefix("data: ") for event in events]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that succeeded."""
    assert response.status_code == 200, response.text
    found = payloads(response.text)
    assert all("error" not in chunk for chunk in found), found[-1]
    return found


def payloads(text: str) -> list[dict[str, Any]]:
    """What the events of a whole stream say before [DONE]."""
    *data, done = frames(text)
    assert done == "[DONE]"
    return [json.loads(item) for item in data]
