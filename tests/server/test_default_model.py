"""The default model, for real: fetched if it is not there yet, converted, served, and asked."""

import openai
import pytest

from tests.server.commands import outrider_serve


@pytest.mark.slow
def test_the_default_model_answers_and_starts_again_without_the_network() -> None:
    """The first start may have to download 100 MB; the second must find everything in the cache,
    which is the user's own, so that the next run downloads nothing."""
    with outrider_serve(start_seconds=900, OUTRIDER_CACHE_DIR="") as command:
        answers = [ask(command.url)]
    with outrider_serve("--offline", "--speculation", "none", OUTRIDER_CACHE_DIR="") as command:
        answers.append(ask(command.url))
        assert "smollm2-135m-instruct" in command.log
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]


def ask(url: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "What is the capital of France? Answer twice."}],
            max_tokens=24,
            temperature=0,
        )
    return answer.choices[0].message.content or ""
