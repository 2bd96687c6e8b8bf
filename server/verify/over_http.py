"""A server of Outrider's, asked over HTTP; plain decoding is the request's own wish."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from engine.errors import StartupError
from engine.sampling_params import SamplingParams
from server.bench.asking import CHAT, Endpoint, Wishes, make_question
from server.bench.records import DraftCounts
from server.verify.cases import is_bare
from server.verify.subject import NO_DRAFTS, Answer, Ask, Entry, History, Law, OnDone, Token

_PLAIN = SamplingParams()
_SAME_NAME = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)
_FAILURES = (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError)


class HttpSubject:
    """A running server.

    Args:
        http: With the API's root as its base URL.
        model: The model's name there.
        endpoint: Which one is asked; auto asks chat for conversations and completions for bare texts.
        at_once: Requests at once in a batch.
    """

    def __init__(self, http: httpx.Client, model: str, endpoint: Endpoint, at_once: int) -> None:
        self._http = http
        self._model = model
        self._endpoint = endpoint
        self.at_once = at_once

    @property
    def method(self) -> str:
        """A server does not say which it has."""
        return "server"

    @property
    def precision(self) -> str:
        """Nor in which type it computes."""
        return ""

    def answer(self, asks: Sequence[Ask], at_once: int, on_done: OnDone) -> list[tuple[Answer, ...]]:
        """See Subject."""

        def work(ask: Ask) -> tuple[Answer, ...]:
            answers = self._ask(ask)
            for answer in answers:
                on_done(answer)
            return answers

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(work, asks))

    def gap(self, ask: Ask, expected: Answer, got: Answer, choice: int) -> float | None:
        """The lead of the likeliest token over the second, which decides where nothing else does."""
        if not (ask.params.is_greedy and is_bare(ask.params)):
            return None
        character = next(
            (at for at, (a, b) in enumerate(zip(expected.text, got.text, strict=False)) if a != b),
            min(len(expected.text), len(got.text)),
        )
        end = 0
        for entry in expected.entries:
            end += len(entry.text)
            if end > character:
                return entry.top[0][1] - entry.top[1][1] if len(entry.top) > 1 else None
        return None

    def laws(self, ask: Ask, histories: Sequence[History], least: float) -> list[Law] | None:
        """None: a server tells 20 logprobs per token of an answer, so answers have to be drawn."""
        return None

    def _ask(self, ask: Ask) -> tuple[Answer, ...]:
        params = ask.params
        wishes = Wishes(
            max_tokens=params.max_tokens or 16,
            temperature=params.temperature,
            seed=params.seed or 0,
            ignore_eos=params.ignore_eos,
            endpoint=self._endpoint,
            extra=_extra(params, ask.n),
        )
        question = make_question(ask.prompt, 0, wishes)
        body = {**question.body, "model": self._model, **_logprobs(params.logprobs, question.path)}
        try:
            response = self._http.post(question.path.lstrip("/"), json=body)
            if response.status_code != 200:
                reason = f"HTTP {response.status_code}: {_reason(response)}"
                return (Answer(error=reason, is_refused=400 <= response.status_code < 500),) * ask.n
            return _answers(response.json(), question.path)
        except _FAILURES as error:
            return (Answer(error=f"{type(error).__name__}: {error}"),) * ask.n


def connect(root: str, timeout: float) -> httpx.Client:
    """A client of the API at `root`; OPENAI_API_KEY is sent if it is set."""
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.Client(
        base_url=root,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=timeout,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


def first_model(http: httpx.Client) -> str:
    """The name of the first model that a server lists.

    Raises:
        StartupError: It does not answer, or lists none.
    """
    where = f"{str(http.base_url).rstrip('/')}/models"
    try:
        response = http.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except _FAILURES as error:
        raise StartupError(f"{where} names no model: {type(error).__name__}: {error}") from error


def _extra(params: SamplingParams, n: int) -> dict[str, Any]:
    """The keys of a request that differ from their defaults."""
    extra: dict[str, Any] = {
        name: getattr(params, name) for name in _SAME_NAME if getattr(params, name) != getattr(_PLAIN, name)
    }
    speculation = params.speculation
    extra["speculation"] = {"enabled": speculation.enabled}
    if speculation.acceptance is not None:
        extra["speculation"]["acceptance"] = speculation.acceptance.value
    if params.logit_bias:
        extra["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if params.stop:
        extra["stop"] = list(params.stop)
    if params.stop_token_ids:
        extra["stop_token_ids"] = list(params.stop_token_ids)
    if n > 1:
        extra["n"] = n
    return extra


def _logprobs(count: int | None, path: str) -> dict[str, Any]:
    if count is None:
        return {}
    return {"logprobs": True, "top_logprobs": count} if path == CHAT else {"logprobs": count}


def _answers(body: Mapping[str, Any], path: str) -> tuple[Answer, ...]:
    choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
    report = body.get("speculation") or {}
    drafts = DraftCounts(report.get("drafted_tokens", 0), report.get("accepted_tokens", 0), None)
    num_tokens = int(body["usage"]["completion_tokens"])
    answers = []
    for number, choice in enumerate(choices):
        entries = _chat_entries(choice) if path == CHAT else _completion_entries(choice)
        text = (choice["message"]["content"] or "") if path == CHAT else choice["text"]
        answers.append(
            Answer(
                text=text,
                tokens=tuple(entry.token for entry in entries),
                entries=entries,
                ending=_ending(choice),
                # A server reports for all choices of a request together.
                drafts=NO_DRAFTS if number else drafts,
                num_tokens=len(entries) or (0 if number else num_tokens),
            )
        )
    return tuple(answers)


def _chat_entries(choice: Mapping[str, Any]) -> tuple[Entry, ...]:
    logprobs = choice.get("logprobs")
    if not logprobs:
        return ()
    return tuple(
        Entry(
            _token(item),
            item["token"],
            item["logprob"],
            tuple((_token(top), top["logprob"]) for top in item["top_logprobs"]),
        )
        for item in logprobs["content"]
    )


def _token(item: Mapping[str, Any]) -> Token:
    """A token's text, and its bytes, since incomplete characters all read alike."""
    raw = item.get("bytes")
    return item["token"] if raw is None else bytes(raw).decode("latin-1")


def _completion_entries(choice: Mapping[str, Any]) -> tuple[Entry, ...]:
    logprobs = choice.get("logprobs")
    if not logprobs:
        return ()
    tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
    return tuple(
        Entry(token, token, logprob, tuple(sorted(top.items(), key=lambda item: -item[1])))
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    )


def _ending(choice: Mapping[str, Any]) -> str:
    reason, stop = choice["finish_reason"], choice.get("stop_reason")
    return f"{reason}" if stop is None else f"{reason} at {stop!r}"


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return repr(response.content[:200])
