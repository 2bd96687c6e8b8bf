"""Acceptance rules as a client meets them: the law of what comes, refusals, and the label of what is lossy.

A model of five letters is served on a real socket, drafted for by a script that draws trees. The first three
tokens of 20,000 answers are held against their exact law. The seeds are fixed, so the statistic is one number
and the test always passes or always fails; a sound server would exceed the threshold for one in ten thousand
choices of the seeds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, DraftModelSpeculation, EngineConfig, SchedulerConfig
from engine.factory import assemble
from engine.model.loader import wrap_model
from engine.speculation.base import Requirements
from engine.token_tree import Proposal
from server.app import AppSettings
from tests.drawn import drawing, likeliest
from tests.engine.small_law import CONFIG, DEPTH, PROMPT, TEMPERATURE, VOCAB, excess
from tests.operators import operators
from tests.scripted import Script, ScriptedSpeculator
from tests.server.running import RunningServer
from tests.tiny import tiny_model

LETTERS = "abcde"
FORK = (0, 0, 1, 1)
NUM_ANSWERS = 20_000
NUM_CHOICES = 125

StartServer = Callable[..., RunningServer]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 4 are the letters a to e."""
    vocab = {letter: token for token, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@contextmanager
def serving(start_server: StartServer, script: Script) -> Iterator[httpx.Client]:
    """A client of a server whose drafts come from a script."""
    config = EngineConfig(
        cache=CacheConfig(block_size=16, num_kv_blocks=300),
        scheduler=SchedulerConfig(max_num_seqs=NUM_CHOICES, max_num_batched_tokens=1000),
        speculation=DraftModelSpeculation(
            draft_model="scripted",
            num_draft_tokens=len(FORK),
            acceptance="rejection",
            allow_lossy=True,
            planner="fixed",
        ),
    )
    target = wrap_model(
        tiny_model(**CONFIG), letter_tokenizer(), name="letters", max_model_len=32, operators=operators()
    )
    parts = assemble(config, target, speculator=ScriptedSpeculator(script, Requirements(branches=True)))
    engine = AsyncEngine(parts.core, parts.model, parts.tokenizer)
    engine.start()
    try:
        server = start_server(engine, AppSettings(served_model_name="letters", max_choices=NUM_CHOICES))
        with httpx.Client(base_url=server.url, timeout=120) as http:
            yield http
    finally:
        engine.close()


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A completion with room for one token more, so that tokens 2 and 3 are drafted in the second step."""
    body = {"prompt": PROMPT, "max_tokens": DEPTH + 1, "temperature": TEMPERATURE, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def counted(http: httpx.Client, num_answers: int) -> tuple[torch.Tensor, float]:
    """How often each beginning of DEPTH tokens came, and accepted draft tokens per draft."""
    counts = torch.zeros([VOCAB] * DEPTH, dtype=torch.float64)
    accepted = drafts = 0
    for seed in range(num_answers // NUM_CHOICES):
        answer = ask(http, n=NUM_CHOICES, seed=seed)
        for choice in answer["choices"]:
            counts[tuple(LETTERS.index(letter) for letter in choice["text"][:DEPTH])] += 1
        accepted += answer["speculation"]["accepted_tokens"]
        drafts += answer["speculation"]["drafts"]
    return counts.flatten(), accepted / drafts


def test_the_law_of_twenty_thousand_answers_is_the_targets(start_server: StartServer) -> None:
    with serving(start_server, drawing(FORK, Proposal.SAMPLED_DISTINCT)) as http:
        counts, accepted = counted(http, NUM_ANSWERS)
    assert int(counts.sum()) == NUM_ANSWERS
    assert excess(counts) < 1
    # Trees are accepted to every depth, and refused.
    assert 0.5 < accepted < 1.5


def test_a_tenth_of_them_would_show_a_false_claim(start_server: StartServer) -> None:
    """The planted error: the likeliest tokens, with the claim that they were drawn."""
    with serving(start_server, drawing(FORK, Proposal.SAMPLED_DISTINCT, draw=likeliest)) as http:
        counts, _ = counted(http, NUM_ANSWERS // 10)
    assert excess(counts) > 2


@pytest.fixture
def http(start_server: StartServer) -> Iterator[httpx.Client]:
    with serving(start_server, drawing(FORK, Proposal.SAMPLED)) as client:
        yield client


def counter(http: httpx.Client, name: str) -> float:
    """The sum of a counter's series."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"outrider_{name}_total{{"))


def lossy_of(http: httpx.Client, num_finished: int) -> float:
    """Lossy requests, once so many have been counted at all: an answer may be there before its step is."""
    deadline = time.monotonic() + 20
    while counter(http, "request_success") < num_finished:
        assert time.monotonic() < deadline, "the requests were not counted"
        time.sleep(0.01)
    return counter(http, "spec_decode_lossy_requests")


@pytest.mark.parametrize(
    ("options", "temperature", "acceptance", "lossless"),
    [
        ({}, 1.0, "rejection", True),
        ({"acceptance": None}, 1.0, "rejection", True),
        ({"acceptance": "match"}, 1.0, "match", True),
        ({"acceptance": "block"}, 0.0, "block", True),
        ({"acceptance": "typical"}, 1.0, "typical", False),
        ({"acceptance": "typical"}, 0.0, "typical", True),
        ({"acceptance": "typical", "enabled": False}, 1.0, "typical", True),
    ],
)
def test_an_answer_is_labelled(
    http: httpx.Client, options: dict[str, Any], temperature: float, acceptance: str, lossless: bool
) -> None:
    report = ask(http, speculation=options, temperature=temperature, n=2)["speculation"]
    assert (report["acceptance"], report["lossless"]) == (acceptance, lossless)
    assert lossy_of(http, 2) == (0 if lossless else 2)
