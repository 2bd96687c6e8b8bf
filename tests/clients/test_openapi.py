"""Schemathesis: requests made from /openapi.json, and answers held against it. No endpoint is left out."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.async_engine import AsyncEngine
from server.app import AppSettings, create_app
from tests.engines import build_llm, load_tiny
from tests.fakes import FakeEngine
from tests.server.conftest import new_metrics
from tests.server.running import running_server

schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed; make test-clients does that"
)
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
SETTINGS = AppSettings(served_model_name="tiny", max_choices=4, profiling=True)
BOUNDED = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# What a request is about, so that its options are tried on something that is served.
SENSIBLE: dict[str, Any] = {
    "prompt": "one two",
    "messages": [{"role": "user", "content": "one two"}],
    "tokens": [111, 110, 101],
}
LIMITS = ("max_tokens", "max_completion_tokens")


def operations() -> list[tuple[str, str]]:
    engine = FakeEngine()
    paths: dict[str, Any] = create_app(engine, SETTINGS, new_metrics(engine)).openapi()["paths"]
    return [(path, method.upper()) for path, found in paths.items() for method in found]


# A trace waits for steps, of which there are none while nobody asks for anything; it has a test of its own.
TRACE = ("/profile", "POST")
OPERATIONS = [each for each in operations() if each != TRACE]


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    """The document that a server with a tiny model has, and by it the server."""
    target, draft = (
        load_tiny(max_model_len=256, max_position_embeddings=256, noise=noise) for noise in (0.0, 0.1)
    )
    llm = build_llm("draft_model 2,1,1", target=target, draft=draft)
    engine = AsyncEngine(llm.core, llm.model, llm.tokenizer)
    app = create_app(engine, SETTINGS, new_metrics(engine))
    engine.start()
    try:
        with running_server(app) as server:
            yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    finally:
        engine.close()


def body_of(schema: Any, path: str, method: str) -> Any:
    """The schema of what an operation takes as its body; empty if it takes none."""
    document = schema.raw_schema
    content = document["paths"][path][method.lower()].get("requestBody", {}).get("content", {})
    name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"][name] if name else {}


def sensible(case: Any, body: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """The case with few of its options, a bounded answer, and every other time about something sensible.

    With all options at once hardly a request makes sense, and what is refused says little of the answers.
    """
    fields, required = body["properties"], set(body.get("required", ()))
    options = sorted(case.body.keys() - required)
    kept = draw(st.sets(st.sampled_from(options), max_size=4)) if options else set()
    case.body = {name: value for name, value in case.body.items() if name in kept | required}
    if draw(st.booleans()):
        subjects = sorted(SENSIBLE.keys() & (required or fields))
        case.body |= {name: SENSIBLE[name] for name in (required and subjects) or subjects[-1:]}
    if "stream" in fields:
        case.body["stream"] = draw(st.booleans())
    case.body |= {name: 12 for name in LIMITS if name in fields and name not in case.body}
    return case


def stored_response(schema: Any) -> str:
    """The id of a new one."""
    base_url, body = schema.location.removesuffix("/openapi.json"), {"input": "one", "max_output_tokens": 2}
    answer = httpx.post(f"{base_url}/v1/responses", json=body, timeout=60).raise_for_status()
    name: str = answer.json()["id"]
    return name


@contextmanager
def generating(base_url: str) -> Iterator[None]:
    """Keeps the model generating while the block runs, so that there are steps to trace."""
    is_over = threading.Event()

    def generate() -> None:
        while not is_over.is_set():
            body = {"prompt": "one two", "max_tokens": 200, "ignore_eos": True}
            httpx.post(f"{base_url}/v1/completions", json=body, timeout=60).raise_for_status()

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_what_the_schema_allows(schema: Any, path: str, method: str) -> None:
    operation, body = schema[path][method], body_of(schema, path, method)
    found: Counter[tuple[int, str]] = Counter()

    @BOUNDED
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
        if body:
            case = sensible(case, body, data.draw)
        if "response_id" in (case.path_parameters or {}) and data.draw(st.booleans()):
            case.path_parameters["response_id"] = stored_response(schema)
        response = case.call_and_validate(checks=CHECKS, timeout=60)
        found[response.status_code, response.headers["content-type"][0].partition(";")[0]] += 1

    ask()
    kinds = operation.definition.raw["responses"]["200"]["content"]
    assert {(200, kind) for kind in kinds} <= found.keys(), found


# The others take nothing that could be wrong.
@pytest.mark.parametrize(("path", "method"), [each for each in OPERATIONS if each[1] == "POST"])
def test_what_the_schema_forbids(schema: Any, path: str, method: str) -> None:
    strategy = schema[path][method].as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @BOUNDED
    @given(strategy)
    def ask(case: Any) -> None:
        response = case.call_and_validate(checks=CHECKS, timeout=60)
        assert 400 <= response.status_code < 500

    ask()


def test_traces_of_steps(schema: Any) -> None:
    operation = schema[TRACE[0]][TRACE[1]]
    with generating(schema.location.removesuffix("/openapi.json")):
        for steps, status in ((1, 200), (3, 200), (0, 400), (1001, 400), ("one", 400), ("", 400)):
            response = operation.Case(query={"steps": steps}).call_and_validate(checks=CHECKS, timeout=60)
            assert response.status_code == status, steps
