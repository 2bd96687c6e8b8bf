"""Choices of one request over HTTP: their prompt is read once, and usage and metrics say so."""

import httpx
import pytest

from tests.engines import build_llm
from tests.server.engines import serving

PROMPT = "one two three one two three, " * 3  # 87 tokens, of which a choice finds 84 in whole blocks


@pytest.mark.parametrize("method", ["none", "ngram", "eagle3"])
def test_the_choices_of_a_request_find_its_prompt_in_the_cache(method: str) -> None:
    body = {"prompt": PROMPT, "n": 4, "seed": 7, "max_tokens": 8, "ignore_eos": True}
    with serving(build_llm(method)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        metrics = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines())
        again = http.post("/v1/completions", json=body).raise_for_status().json()
    with serving(build_llm("none", prefix_caching=False)) as server:
        plain = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    texts = [choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["text"] for choice in again["choices"]] == texts
    assert len(set(texts)) > 1
    # A prompt counts once, as its first choice found it.
    assert answer["usage"]["prompt_tokens"] == 87
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 84
    totals = {name.partition("{")[0]: value for name, value in metrics.items()}
    assert float(totals["outrider_prefix_cache_queries_total"]) == 4 * 87
    assert float(totals["outrider_prefix_cache_hits_total"]) == 3 * 84
