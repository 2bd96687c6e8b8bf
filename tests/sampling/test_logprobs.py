import math

import pytest
import torch

from engine.sampling.logprobs import row_logprobs


def random_logits(rows: int, vocab_size: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))


def test_values_are_the_log_softmax() -> None:
    logits = random_logits(5, 30)
    expected = logits.double().log_softmax(dim=-1)
    for row, entry in enumerate(row_logprobs(logits, [3, 1, 4, 1, 5], 30)):
        assert entry.token_id == [3, 1, 4, 1, 5][row]
        assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-5)
        assert [token for token, _ in entry.top] == expected[row].argsort(descending=True).tolist()
        assert dict(entry.top)[entry.token_id] == entry.logprob
        assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0, abs=1e-5)


def test_no_alternatives_on_request() -> None:
    (entry,) = row_logprobs(random_logits(1, 30), [2], 0)
    assert entry.top == ()
    assert entry.logprob < 0


def test_more_alternatives_than_tokens() -> None:
    (entry,) = row_logprobs(random_logits(1, 5), [2], 20)
    assert len(entry.top) == 5


def test_equals_are_listed_by_their_ids() -> None:
    logits = torch.zeros(1, 3000)
    logits[0, 2000] = 1.0
    (entry,) = row_logprobs(logits, [0], 4)
    assert [token for token, _ in entry.top] == [2000, 0, 1, 2]


def test_rows_do_not_depend_on_their_neighbours_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(7, 4999)
    together = row_logprobs(logits, range(7), 5)
    assert [row_logprobs(logits[row : row + 1], [row], 5)[0] for row in range(7)] == together
    monkeypatch.setattr("engine.sampling.logits.CHUNK_ELEMENTS", 3 * 4999)
    assert row_logprobs(logits, range(7), 5) == together


def test_no_rows_no_entries() -> None:
    assert row_logprobs(torch.empty(0, 10), [], 3) == []


def test_rows_and_tokens_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rows for 1 tokens"):
        row_logprobs(random_logits(2, 10), [1], 0)
