"""Error texts speak of JSON and of the client's fields, not of Python or of how they are checked."""

import pytest

from tests.server.conftest import Served
from tests.server.test_validation import refused

PREFIX = '{"messages": [{"role": "user", "content": "x"}], '


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"stop_token_ids": [5, null]', "stop_token_ids[1] must be an integer, got null"),
        ('"n": true', "n must be an integer, got true"),
        ('"temperature": "hot"', 'temperature must be a number, got "hot"'),
        ('"temperature": NaN', "temperature must be a finite number, got NaN"),
        ('"top_p": 1.5', "top_p must be less than or equal to 1, got 1.5"),
        ('"stream": "yes"', 'stream must be true or false, got "yes"'),
        ('"user": 5', "user must be a string, got 5"),
        ('"stop": 5', "stop must be a string or a list of strings, got 5"),
        ('"stop_token_ids": 5', "stop_token_ids must be a list, got 5"),
        ('"speculation": []', "speculation must be an object"),
        ('"messages": []', "messages must not be empty"),
        (
            '"logit_bias": {"5": null}',
            "logit_bias: the bias of token 5 must be a number between -100 and 100, got null",
        ),
        (
            '"logit_bias": {"5": true}',
            "logit_bias: the bias of token 5 must be a number between -100 and 100, got true",
        ),
        ('"speculation": {"num_draft": 3}', "speculation has no num_draft; did you mean num_draft_tokens?"),
        (
            '"speculation": {"x": 3}',
            "speculation has no x; it has enabled, num_draft_tokens, acceptance",
        ),
    ],
)
def test_what_is_wrong_in_words(served: Served, fields: str, message: str) -> None:
    assert refused(served, "chat", PREFIX + fields + "}")["message"] == message


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ('"metadata": ' + "[" * 300 + "]" * 300, "nested too deeply"),
        ('"seed": 1' + "0" * 5000, "with a number of too many digits"),
    ],
)
def test_valid_json_that_is_too_much_is_not_called_invalid(served: Served, fields: str, fault: str) -> None:
    error = refused(served, "chat", PREFIX + fields + "}")
    assert error["message"].startswith(f"the body is JSON {fault}, at line 1 column ")
    assert error["code"] == "invalid_json"


def test_no_object_at_all(served: Served) -> None:
    assert refused(served, "chat", "[1]")["message"] == "the body must be a JSON object"
