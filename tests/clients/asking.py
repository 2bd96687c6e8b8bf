"""What every client is asked to bring about, and what the server itself says to that."""

from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How warm is it?"}]
QUESTION = MESSAGES[1]["content"]
TALK: dict[str, Any] = {"seed": 3, "temperature": 0.8, "max_tokens": 24}
"""Options under which an answer is one text, in any client."""

TOLD = "It is warm in Brno."
"""How the scripted model ends a conversation that calls a function."""


class Point(BaseModel):
    """A format that even a model of random weights comes to an end with."""

    model_config = ConfigDict(extra="forbid")
    x: int = Field(ge=0, le=99)
    y: Literal["up", "down"]


class Weather(BaseModel):
    """Tells the weather."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=4)
    days: int = Field(ge=1, le=7)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": Weather.model_json_schema(),
    },
}


def weather(city: str, days: int) -> str:
    """Tells the weather."""
    return f"warm in {city} for {days} days"


def asked_plainly(base_url: str, **fields: Any) -> Any:
    """The server's answer to a conversation, by way of no client at all."""
    body = {"model": MODEL, "messages": MESSAGES, **fields}
    response = httpx.post(f"{base_url}/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()
