"""Fields of other servers that would change the answer: each is refused by name, with what to do instead."""

import pytest

from server.protocol.refused import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
from tests.server.conftest import Served
from tests.server.test_validation import PATHS, refused


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        *[("chat", field.name) for field in REFUSED_IN_CHAT],
        *[("completions", field.name) for field in REFUSED_IN_COMPLETIONS],
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(served: Served, endpoint: str, field: str) -> None:
    error = refused(served, endpoint, {field: {"something": "wanted"}})
    assert error["param"] == field
    assert error["message"].startswith(f"{field} is not supported")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("prediction", {"type": "content", "content": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("best_of", 2),
        ("echo", True),
        ("n_predict", 64),
        ("stop_sequences", ["END"]),
        ("repeat_penalty", 1.1),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.5),
        ("top_a", 0.2),
        ("tfs_z", 0.95),
        ("early_stopping", True),
        ("reasoning", {"effort": "high"}),
    ],
)
def test_real_values_of_refused_fields(served: Served, field: str, value: object) -> None:
    assert refused(served, "chat", {field: value})["param"] == field


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("max_new_tokens", "max_tokens"),
        ("n_predict", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("stop_sequences", "stop"),
        ("repeat_penalty", "repetition_penalty"),
        ("top_a", "min_p"),
        ("tfs_z", "top_p"),
    ],
)
def test_other_servers_names_are_told_this_ones(served: Served, field: str, known: str) -> None:
    for endpoint in PATHS:
        message = refused(served, endpoint, {field: 3})["message"]
        assert message.startswith(f"{field} is not supported: use {known}")
