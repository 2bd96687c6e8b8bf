"""From a prompt to the request that is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from server.bench.prompts import Prompt
from server.config import ConfigError

CHAT, COMPLETIONS = "/chat/completions", "/completions"
Endpoint = Literal["auto", "chat", "completions"]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How every prompt is asked.

    Attributes:
        max_tokens: Tokens of an answer at most.
        temperature: 0 takes the likeliest token.
        seed: Of the first request; each later one has the next number.
        ignore_eos: Go on past the model's own end.
        endpoint: Which one is asked; auto asks chat for conversations and completions for bare texts.
        extra: More keys of the request.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    endpoint: Endpoint = "auto"
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """One request to be made.

    Attributes:
        prompt: What is asked.
        path: The endpoint, from the API's root.
        body: What is sent, without the model's name and what streaming needs.
    """

    prompt: Prompt
    path: str
    body: Mapping[str, Any]


def make_question(prompt: Prompt, number: int, wishes: Wishes) -> Question:
    """The request for a prompt.

    Args:
        prompt: What is asked.
        number: Which request of the run it is, from 0; it moves the seed.
        wishes: How.

    Raises:
        ConfigError: The endpoint cannot take such a prompt.
    """
    path, content = _content(prompt, wishes.endpoint)
    options: dict[str, Any] = {
        "max_tokens": wishes.max_tokens,
        "temperature": wishes.temperature,
        "seed": wishes.seed + number,
    }
    if wishes.ignore_eos:
        options["ignore_eos"] = True
    return Question(prompt, path, {**content, **options, **wishes.extra})


def _content(prompt: Prompt, endpoint: Endpoint) -> tuple[str, dict[str, Any]]:
    if endpoint == "completions" or (endpoint == "auto" and prompt.messages is None):
        if prompt.text is None:
            raise ConfigError(f"--endpoint completions: prompt {prompt.name} is a conversation, not a text")
        return COMPLETIONS, {"prompt": prompt.text}
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return CHAT, {"messages": list(messages)}
