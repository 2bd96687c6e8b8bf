"""The draft model of the tests, on a paged cache and as transformers runs it."""

import pytest
from transformers import PreTrainedModel

from tests.speculation.drafting import RecordingRunner
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_model("llama", attention="eager")


@pytest.fixture
def runner() -> RecordingRunner:
    return RecordingRunner(tiny_model("llama"))
