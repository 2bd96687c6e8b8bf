"""The page at /docs: every endpoint and field, readable without scripts and without the internet."""

import json
import re
import shlex
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser

import pytest

from server.app import AppSettings
from server.docs_page import Heading, Place, render_page
from server.protocol.base import SamplingRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completion import CompletionRequest
from server.protocol.response import ResponseRequest
from server.reference import Answer, Body, Endpoint, FieldRow
from tests.server.conftest import Served

Serve = Callable[..., Served]

VOID = {"meta", "br"}


class Page(HTMLParser):
    """What a page loads and links to; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            assert name != "src"
            if name == "href":
                self.links.append(value or "")
            if name == "id":
                self.ids.add(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture(scope="module")
def page(served: Served) -> str:
    response = served.http.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    return response.text


def section(page: str, anchor: str) -> str:
    return page.split(f'<section id="{anchor}">')[1].split("</section>")[0]


def test_it_loads_and_runs_nothing(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "form"} & set(parsed.tags)
    assert "url(" not in page
    assert "@import" not in page
    inside = [link[1:] for link in parsed.links if link.startswith("#")]
    assert set(inside) <= parsed.ids
    assert {link for link in parsed.links if not link.startswith("#")} == {"/openapi.json"}


def test_it_has_every_endpoint(page: str, served: Served) -> None:
    for path, operations in served.http.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            assert f'<span class="{method}">{method.upper()}</span> <code>{path}</code>' in page
            assert operation["description"] in unescape(page)


@pytest.mark.parametrize(
    ("anchor", "kind"),
    [
        ("post-v1-completions", CompletionRequest),
        ("post-v1-chat-completions", ChatCompletionRequest),
        ("post-v1-responses", ResponseRequest),
    ],
)
def test_it_describes_every_field(page: str, anchor: str, kind: type[SamplingRequest]) -> None:
    text = unescape(section(page, anchor))
    for name, field in kind.model_fields.items():
        assert f"<code>{name}</code>" in text
        assert field.description is not None
        assert field.description in text
    assert '<span class="outer">speculation.</span>num_draft_tokens' in text
    assert "0 to 2" in text
    assert '"match", "rejection"' in text


def test_it_shows_nested_fields_of_chat(page: str) -> None:
    text = section(page, "post-v1-chat-completions")
    assert '<span class="outer">stream_options.</span>include_usage' in text
    assert '<span class="outer">messages[].</span>role</code> <span class="must">required' in text
    assert '<span class="outer">choices[].message.</span>content' in text
    assert '<span class="outer">choices[].delta.</span>content' in text
    assert '<span class="outer">usage.completion_tokens_details.</span>accepted_prediction_tokens' in text


def test_it_shows_items_and_events_of_responses(page: str) -> None:
    text = section(page, "post-v1-responses")
    assert '<span class="outer">input[].</span>call_id' in text
    assert '<span class="outer">output[].content[].</span>text' in text
    assert "response.output_text.delta" in text
    assert "curl -X DELETE " in section(page, "delete-v1-responses-response-id")


@pytest.mark.parametrize(
    "anchor",
    ["post-v1-completions", "post-v1-chat-completions", "post-v1-responses", "get-v1-models-model"],
)
def test_its_examples_work(page: str, served: Served, anchor: str) -> None:
    example = re.search("<pre>(.*?)</pre>", section(page, anchor), re.DOTALL)
    assert example is not None
    words = shlex.split(unescape(example[1]).replace("\\\n", ""))
    assert words[0] == "curl"
    assert words[1].startswith(served.url)
    if len(words) == 2:
        assert served.http.get(words[1]).json()["id"] == "fake"
        return
    assert words[2::2] == ["-H", "-d"]
    name, _, value = words[3].partition(": ")
    response = served.http.post(words[1], content=words[5], headers={name: value})
    assert response.status_code == 200, json.loads(words[5])


def test_behind_a_prefix_links_and_examples_have_it(serve: Serve) -> None:
    served = serve(settings=AppSettings(served_model_name="fake", root_path="/llm"))
    page = served.http.get("/docs", headers={"host": "api.example.org"}).text
    assert 'href="/llm/openapi.json"' in page
    assert "curl http://api.example.org/llm/v1/completions" in page


def test_what_comes_from_elsewhere_is_escaped(served: Served) -> None:
    page = served.http.get("/docs", headers={"host": '"><script>alert(1)</script>'}).text
    assert "<script" not in page
    bad = "<i>&"
    row = FieldRow(bad, bad, bad, bad, bad, True, bad)
    answer = Answer(200, bad, (Body(bad, (row,)), Body(bad, ())))
    endpoint = Endpoint("GET", bad, bad, bad, (row,), (row,), bad, bad, (answer,), (answer,))
    text = render_page(Heading(bad, bad, bad), [endpoint], Place(bad, bad))
    assert "<i>" not in text
    Page(text)


def test_head(served: Served) -> None:
    response = served.http.head("/docs")
    assert (response.status_code, response.content) == (200, b"")
