"""Asks an OpenAI-compatible server and notes what comes when."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from engine.errors import StartupError
from server.bench.asking import CHAT, Question
from server.bench.parts import StepWatch
from server.bench.records import DraftCounts, Record

Clock = Callable[[], float]
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, ValueError)


class _BadAnswer(ValueError):
    """An answer that is none; the message is what the report says."""


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """A token of an answer.

    Attributes:
        token: Its text.
        best: The likeliest tokens there and their logprobs, the likeliest first.
    """

    token: str
    best: tuple[tuple[str, float], ...]


class BenchClient:
    """One server, asked in one way.

    Args:
        http: With the API's root as its base URL.
        label: What reports call this way of asking.
        model: The model's name there.
        extra: Keys that make the way: added to every request.
        clock: A monotonic clock in seconds.

    Attributes:
        steps: Watches where the server's time goes.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        label: str,
        model: str,
        extra: Mapping[str, Any],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._http = http
        self.label = label
        self.steps = StepWatch(http)
        self._fixed = {"model": model, **_STREAMED, **extra}
        self._clock = clock

    async def ask(self, question: Question, began: float = 0.0, due: float | None = None) -> Record:
        """Makes one request; what goes wrong is in the record.

        Args:
            question: The request.
            began: The clock when the run began.
            due: When it should be sent, by the clock; None is now.
        """
        sent = self._clock()
        answer = _Answer()
        error: str | None = None
        try:
            body = {**question.body, **self._fixed}
            async with self._http.stream("POST", question.path.lstrip("/"), json=body) as response:
                if response.status_code != 200:
                    raise _BadAnswer(f"HTTP {response.status_code}: {_reason(await response.aread())}")
                async for event in _events(response):
                    answer.take(event, self._clock() - sent)
            answer.check()
        except _FAILURES as failure:
            error = (
                str(failure) if isinstance(failure, _BadAnswer) else f"{type(failure).__name__}: {failure}"
            )
        return Record(
            prompt=question.prompt.name,
            kind=question.prompt.kind,
            sent=sent - began,
            late=0.0 if due is None else max(0.0, sent - due),
            seconds=self._clock() - sent,
            arrivals=tuple(answer.arrivals),
            lengths=tuple(len(piece) for piece in answer.pieces),
            text="".join(answer.pieces),
            finish_reason=answer.finish_reason,
            num_prompt_tokens=_count(answer.usage, "prompt_tokens"),
            num_cached_tokens=_count(answer.usage, "prompt_tokens_details", "cached_tokens"),
            num_output_tokens=_count(answer.usage, "completion_tokens"),
            drafts=answer.drafts,
            error=error,
        )

    async def token_choices(self, question: Question) -> list[TokenChoice]:
        """The tokens of an answer with the two best at each place; none where the server has no logprobs."""
        wish = {"logprobs": True, "top_logprobs": 2} if question.path == CHAT else {"logprobs": 2}
        body = {**question.body, **self._fixed, **wish}
        for key in _STREAMED:
            del body[key]
        try:
            response = await self._http.post(question.path.lstrip("/"), json=body)
            response.raise_for_status()
            logprobs = response.json()["choices"][0]["logprobs"]
            if question.path == CHAT:
                tokens = [(token["token"], token["top_logprobs"]) for token in logprobs["content"]]
                return [
                    TokenChoice(token, tuple((top["token"], top["logprob"]) for top in best))
                    for token, best in tokens
                ]
            pairs = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
            return [TokenChoice(token, _best_two(best)) for token, best in pairs]
        except (*_FAILURES, LookupError, TypeError, AttributeError):
            return []


async def model_name(http: httpx.AsyncClient) -> str:
    """The name of the first model that a server lists.

    Raises:
        StartupError: It does not answer, or lists none.
    """
    where = f"{str(http.base_url).rstrip('/')}/models"
    try:
        response = await http.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except _FAILURES as error:
        raise StartupError(f"{where} does not answer: {type(error).__name__}: {error}") from error
    except (LookupError, TypeError) as error:
        raise StartupError(f"{where} lists no model: name one with --api-model") from error


def api_root(url: str) -> str:
    """The root of the API at an address: /v1 is added where there is no path."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(path="/v1") if parsed.path in ("", "/") else parsed).rstrip("/") + "/"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, up to [DONE]."""
    # Not aiter_lines(), which also splits at separators that JSON leaves bare within strings.
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line.removeprefix(b"data:").strip()
            if payload == b"[DONE]":
                return
            event = json.loads(payload)
            if not isinstance(event, dict):
                raise _BadAnswer(f"an event is no object: {payload[:80]!r}")
            yield event


@dataclass(slots=True)
class _Answer:
    """An answer as it grows."""

    arrivals: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    drafts: DraftCounts | None = None

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Adds an event that came at `now`."""
        try:
            self._take(event, now)
        except (AttributeError, TypeError) as error:
            raise _BadAnswer(f"an event that is no chunk of an answer: {str(event)[:200]}") from error

    def _take(self, event: Mapping[str, Any], now: float) -> None:
        if "error" in event:
            raise _BadAnswer(f"error in the stream: {_message(event)}")
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            if piece:
                self.arrivals.append(now)
                self.pieces.append(piece)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.usage = event.get("usage") or self.usage
        self.drafts = _drafts(event) or self.drafts

    def check(self) -> None:
        """Refuses an answer that was cut off."""
        if self.finish_reason is None:
            raise _BadAnswer("the stream ended without a finish_reason")


def _best_two(logprobs: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """The two likeliest, of a mapping that also has the chosen one."""
    return tuple(sorted(logprobs.items(), key=lambda item: -item[1])[:2])


def _drafts(event: Mapping[str, Any]) -> DraftCounts | None:
    """What an event says of speculation: in our words, in OpenAI's, or in llama.cpp's."""
    if not (event.get("speculation") or event.get("usage") or event.get("timings")):
        return None  # As all are that bring a token.
    drafted, accepted = (_count(event, "speculation", f"{what}_tokens") for what in ("drafted", "accepted"))
    if drafted is not None and accepted is not None:
        return DraftCounts(drafted, accepted, _count(event, "speculation", "steps"))
    accepted = _count(event, "usage", "completion_tokens_details", "accepted_prediction_tokens")
    rejected = _count(event, "usage", "completion_tokens_details", "rejected_prediction_tokens")
    if accepted is not None and rejected is not None:
        return DraftCounts(accepted + rejected, accepted, None)
    drafted = _count(event, "timings", "draft_n")
    if drafted is not None:
        return DraftCounts(drafted, _count(event, "timings", "draft_n_accepted") or 0, None)
    return None


def _count(values: Mapping[str, Any] | None, *path: str) -> int | None:
    """The whole number at a path of keys; None where there is none."""
    found: Any = values
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else None


def _reason(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return repr(body[:200])
    return _message(answer) if isinstance(answer, dict) else repr(body[:200])


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, Mapping) else error)[:300]
