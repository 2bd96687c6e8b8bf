"""The real command, engine and client together: a tiny model served plainly and with a draft model."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.cli import main
from tests.server.commands import Command, outrider_serve
from tests.tiny import VOCAB_SIZE, save_tiny

PROMPT = "one two one two one two"
MESSAGES: Any = [{"role": "user", "content": "say one two one two one two"}]
SMALL = ("--max-model-len", "256", "--num-kv-blocks", "128", "--block-size", "4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "target")
    # The same weights draft, so that drafts are accepted wherever the noise is shared.
    save_tiny(folder / "draft")
    return folder


@pytest.fixture(scope="module")
def speculative(models: Path) -> Iterator[Command]:
    with outrider_serve(
        "--model", str(models / "target"), "--draft-model", str(models / "draft"),
        # A planner would find a tiny model's rows too dear.
        "--served-model-name", "tiny", "--planner", "fixed", *SMALL,
    ) as command:  # fmt: skip
        yield command
        # SIGTERM ends it cleanly, whatever it has served.
        assert command.end() == 0


@pytest.fixture(scope="module")
def plain(models: Path) -> Iterator[Command]:
    with outrider_serve(
        "--model", str(models / "target"), "--speculation", "none", "--served-model-name", "tiny", *SMALL
    ) as command:
        yield command
        assert command.end() == 0


@pytest.fixture(scope="module")
def client(speculative: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{speculative.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain_client(plain: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(command: Command, name: str, label: str = "") -> float:
    """The sum of a metric's series, those with `label` only."""
    lines = httpx.get(f"{command.url}/metrics").text.splitlines()
    series = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and label in line]
    assert series, f"no metric {name} with {label!r}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in series)


def test_the_trial_of_the_draft_at_start_is_shown_and_leaves_no_other_trace(speculative: Command) -> None:
    assert "speculation probe: first token accepted in" in speculative.log
    assert metric(speculative, "outrider_spec_decode_probed_acceptance") == 1.0


def wait_until_idle(command: Command) -> None:
    for _ in range(200):
        if not metric(command, "outrider_num_requests_running") and not metric(
            command, "outrider_num_requests_waiting"
        ):
            return
        time.sleep(0.05)
    raise AssertionError("requests still run")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 2.0},
        {"temperature": 0, "frequency_penalty": -2.0, "logprobs": 3},
        {"temperature": 0, "echo": True, "logprobs": 2},
        {"temperature": 0, "stop": ["e", "o"]},
        {"seed": 3, "temperature": 0.9},
        {"seed": -1, "top_p": 0.8, "presence_penalty": 1.0, "n": 3},
        {"seed": 2**63 - 1, "extra_body": {"top_k": 7, "min_p": 0.05, "repetition_penalty": 1.3}},
        {"seed": 5, "logit_bias": {"101": 5, "111": -100}, "extra_body": {"min_tokens": 5}},
        {"seed": 6, "extra_body": {"stop_token_ids": [101, 32]}},
        {"prompt": [[5, 6, 7], [8, 9]], "seed": 7, "echo": True},
    ],
)
def test_the_same_completion_as_the_plain_server(
    client: openai.OpenAI, plain_client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    wishes: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, **fields}
    ours = client.completions.create(**wishes).choices
    theirs = plain_client.completions.create(**wishes).choices
    assert [(c.index, c.text, c.finish_reason) for c in ours] == [
        (c.index, c.text, c.finish_reason) for c in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs and other.logprobs:
            assert one.logprobs.tokens == other.logprobs.tokens
            assert one.logprobs.text_offset == other.logprobs.text_offset
            assert one.logprobs.token_logprobs is not None
            assert other.logprobs.token_logprobs is not None
            values = [value for value in one.logprobs.token_logprobs if value is not None]
            expected = [value for value in other.logprobs.token_logprobs if value is not None]
            assert values == pytest.approx(expected, abs=1e-4)


def test_streamed_chat_equals_the_whole_one_logprobs_included(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**wishes)
    chunks = list(client.chat.completions.create(**wishes, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert whole.choices[0].logprobs is not None
    expected = whole.choices[0].logprobs.content
    assert expected is not None
    assert len(expected) == 12
    assert [(e.token, [t.token for t in e.top_logprobs]) for e in entries] == [
        (e.token, [t.token for t in e.top_logprobs]) for e in expected
    ]
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    # Several tokens came in one step, or this test says nothing about them.
    assert len(chunks) < 12


def test_an_answer_says_what_speculation_did(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.model_extra is not None
    report = answer.model_extra["speculation"]
    assert report["accepted_tokens"] == report["drafted_tokens"] > 0
    assert report["tokens_per_forward"] == pytest.approx(20 / report["steps"])
    assert report["tokens_per_forward"] > 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prediction_saves_steps_and_changes_nothing(
    client: openai.OpenAI, plain_client: openai.OpenAI, temperature: float
) -> None:
    def ask(to: openai.OpenAI, **more: Any) -> Any:
        return to.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=60,
            temperature=temperature,
            seed=5,
            logit_bias={str(letter): 100 for letter in range(97, 123)},
            extra_body=more,
        )

    text = ask(plain_client).choices[0].text
    for to in (client, plain_client):
        answer = ask(to, prediction=text[:20] + "?" + text[20:] + "no more")
        assert answer.choices[0].text == text
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == 60
        assert details.rejected_prediction_tokens == len("?no more")
        assert answer.model_extra["speculation"]["tokens_per_forward"] > 4


def test_async_clients_at_once_get_what_each_gets_alone(speculative: Command) -> None:
    wishes = [{"seed": seed, "prompt": f"{seed} one two one two"} for seed in range(8)]

    async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> str:
        stream = await client.completions.create(model="tiny", max_tokens=20, stream=True, **fields)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{speculative.url}/v1", api_key="none") as client:
            together = list(await asyncio.gather(*(ask(client, fields) for fields in wishes)))
            alone = [await ask(client, fields) for fields in wishes]
        return together, alone

    together, alone = asyncio.run(run())
    assert together == alone


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [[]]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, 400, "prompt"),
        ({"prompt": "x" * 300}, 400, "prompt"),
        ({"prompt": "x", "seed": 2**64}, 400, "seed"),
        ({"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "guided_json": {"type": "object"}}, 400, "guided_json"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
    ],
)
def test_bad_input_is_refused_and_the_next_request_succeeds(
    speculative: Command, body: dict[str, Any], status: int, param: str
) -> None:
    answer = httpx.post(f"{speculative.url}/v1/completions", json={"model": "tiny", **body})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"]
    good = httpx.post(f"{speculative.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert good.status_code == 200, good.text


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": "tiny", "prompt": "x", "temperature": NaN}'])
def test_broken_bodies(speculative: Command, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{speculative.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_ten_megabytes_are_refused(speculative: Command) -> None:
    body = {"model": "tiny", "prompt": "x" * 10_000_000}
    answer = httpx.post(f"{speculative.url}/v1/completions", json=body)
    assert answer.status_code == 413
    assert "error" in answer.json()
    assert httpx.get(f"{speculative.url}/health").status_code == 200


def test_a_client_that_leaves_frees_its_blocks(speculative: Command) -> None:
    wait_until_idle(speculative)
    aborted = metric(speculative, "outrider_request_success_total", 'finished_reason="abort"')
    body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{speculative.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(3):
            next(lines)
    wait_until_idle(speculative)
    assert metric(speculative, "outrider_kv_cache_usage_perc") == 0
    after = metric(speculative, "outrider_request_success_total", 'finished_reason="abort"')
    assert after == aborted + 1


def test_metrics_add_up(speculative: Command, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
    drafted = metric(speculative, "outrider_spec_decode_num_draft_tokens_total")
    accepted = metric(speculative, "outrider_spec_decode_num_accepted_tokens_total")
    assert drafted >= accepted > 0
    assert metric(speculative, "outrider_spec_decode_num_accepted_tokens_per_pos_total") == accepted
    committed = metric(speculative, "outrider_committed_tokens_total")
    assert committed == metric(speculative, "outrider_generation_tokens_total")
    assert committed > metric(speculative, "outrider_target_forwards_total") > 0
    assert metric(speculative, "outrider_spec_decode_accepted_length_count") == metric(
        speculative, "outrider_spec_decode_num_drafts_total"
    )


def test_probes_and_documentation(speculative: Command) -> None:
    for path in ("/health", "/ready", "/docs", "/openapi.json", "/v1/models"):
        assert httpx.get(f"{speculative.url}{path}").status_code == 200, path


def test_the_start_log_says_what_was_chosen(speculative: Command) -> None:
    for said in ("weights on cpu", "kv cache", "draft", "256"):
        assert said in speculative.log, speculative.log


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_model_that_is_not_there_ends_the_start_with_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["serve", "--port", "0", "--model", str(missing), "--offline"]) == 1
    *_, last = said = capfd.readouterr().err.splitlines()
    assert last.startswith("outrider: ")
    assert str(missing) in last
    assert not any("Traceback" in line for line in said)


def test_tiny_models_stay_out_of_the_users_cache(plain: Command) -> None:
    """Their packed weights lie in the cache of this run."""
    packed = Path(os.environ["OUTRIDER_CACHE_DIR"]) / "packed"
    assert any(path.name.startswith("target-") for path in packed.iterdir())
