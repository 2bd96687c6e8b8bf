"""Two servers for real clients: one around a tiny model, and one whose model follows a script."""

import gc
from collections.abc import Iterator, Sequence

import pytest

from engine.sampling_params import SamplingParams
from server.app import AppSettings, create_app
from tests.clients.asking import MODEL, TOLD
from tests.engines import build_llm, load_tiny
from tests.fakes import FakeEngine
from tests.server.conftest import new_metrics
from tests.server.engines import serving
from tests.server.running import running_server


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """Where a tiny model with a draft model is served; what it says is a function of the seed."""
    length = 2048  # descriptions of tools take hundreds of its tokens, which are bytes
    target, draft = (
        load_tiny(max_model_len=length, max_position_embeddings=length, noise=noise) for noise in (0.0, 0.1)
    )
    llm = build_llm("draft_model 2,1,1", target=target, draft=draft, num_kv_blocks=2048)
    with serving(llm, MODEL) as server:
        yield f"{server.url}/v1"


@pytest.fixture(scope="session")
def scripted_url() -> Iterator[str]:
    """Where a model is served that calls `weather` by itself, and then says what came of it."""
    engine = FakeEngine(answer=_follow_script, max_model_len=4096)
    app = create_app(engine, AppSettings(served_model_name=MODEL), new_metrics(engine))
    with running_server(app) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def untidy() -> Iterator[None]:
    """For clients that leave their connections to the garbage collector: it comes before the next test.

    What Python has to say about that falls under the filters of the test that is at fault.
    """
    yield
    gc.collect()


def _follow_script(prompt_token_ids: Sequence[int], params: SamplingParams) -> bytes:
    if b"warm in Brno for 2 days" in bytes(token for token in prompt_token_ids if token < 256):
        return TOLD.encode()
    return b'{"name": "weather", "arguments": {"city": "Brno", "days": 2}}'
