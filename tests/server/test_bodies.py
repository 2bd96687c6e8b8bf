"""Bodies that hold no request: broken JSON, other content types."""

import pytest

from tests.server.conftest import Served
from tests.server.test_validation import error_of, refused


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(
    "body",
    [
        *["", "{", "{]", "nope", "[1]", '"x"', "5", "null", "\x00", '{"prompt": "x"} trailing'],
        '{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        "[" * 5000,
        '{"seed": 1' + "0" * 5000 + "}",
    ],
)
def test_broken_json(served: Served, endpoint: str, body: str) -> None:
    assert "JSON" in refused(served, endpoint, body)["message"]


def test_bytes_that_are_no_utf8(served: Served) -> None:
    body = b'{"prompt": "\xff\xfe"}'
    headers = {"content-type": "application/json"}
    error_of(served.http.post("/v1/completions", content=body, headers=headers))


def test_nan_in_json_names_the_field(served: Served) -> None:
    error = refused(served, "completions", '{"prompt": "x", "temperature": NaN}')
    assert error["param"] == "temperature"
    assert "finite" in error["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
def test_the_wrong_content_type_is_told_the_right_one(served: Served, content_type: str) -> None:
    response = served.http.post(
        "/v1/completions", content='{"prompt": "x"}', headers={"content-type": content_type}
    )
    assert "application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_other_spellings_is_fine(served: Served, content_type: str) -> None:
    response = served.http.post(
        "/v1/completions", content='{"prompt": "x"}', headers={"content-type": content_type}
    )
    assert response.status_code == 200


def test_a_compressed_body_is_refused(served: Served) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(served.http.post("/v1/completions", content=b"\x1f\x8b", headers=headers), 415)
