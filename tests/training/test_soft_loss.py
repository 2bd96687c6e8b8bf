"""The loss of an output layer against torch's own softmax."""

import pytest
import torch

from engine.training import soft_loss
from engine.training.soft_loss import SparseTargets, soft_cross_entropy, sparse_targets
from engine.training.vocabulary import DraftVocabulary


@pytest.mark.parametrize("chunk_bytes", [1, 2**24])
def test_loss_and_gradients_are_those_of_a_dense_softmax(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soft_loss, "_CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.stack([torch.randperm(11, generator=generator)[:3] for _ in range(7)])
    shares = torch.rand(7, 3, generator=generator, dtype=torch.float64)
    shares = shares / shares.sum(dim=-1, keepdim=True)
    shares[2] = 0.0
    found, best = soft_cross_entropy(states, weight, SparseTargets(rows, shares))
    logits = states @ weight.T
    dense = torch.zeros(7, 11, dtype=torch.float64).scatter_(1, rows, shares)
    expected = -(dense * logits.log_softmax(dim=-1)).sum()
    torch.testing.assert_close(found, expected)
    assert torch.equal(best, logits.argmax(dim=-1))
    inputs = (states, weight)
    for mine, plain in zip(
        torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    ):
        torch.testing.assert_close(mine, plain)


def test_a_frozen_output_layer_costs_no_gradient() -> None:
    states = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(6, 4)
    loss, _ = soft_cross_entropy(states, weight, SparseTargets(torch.zeros(3, 1).long(), torch.ones(3, 1)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None
    assert weight.grad is None


def test_targets_are_renormalised_over_the_draft_vocabulary() -> None:
    vocabulary = DraftVocabulary.of(torch.tensor([2, 3, 7]), 10)
    top_ids = torch.tensor([[3, 5, 7], [5, 3, 2], [2, 9, 8]])
    shares = torch.tensor([[0.5, 0.3, 0.125], [0.6, 0.2, 0.1], [0.9, 0.05, 0.01]])
    targets = sparse_targets(top_ids, shares.log(), vocabulary)
    torch.testing.assert_close(
        targets.shares, torch.tensor([[0.8, 0.0, 0.2], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    )
    assert targets.rows[0].tolist() == [1, 0, 2]
    assert int(targets.rows[2, 0]) == 0


def test_the_most_frequent_tokens_make_the_draft_vocabulary() -> None:
    counts = torch.tensor([0, 5, 1, 9, 1, 0])
    vocabulary = DraftVocabulary.most_frequent(counts, 3)
    assert vocabulary.to_target.tolist() == [1, 2, 3]
    assert vocabulary.from_target.tolist() == [-1, 0, 1, 2, -1, -1]
    assert vocabulary.coverage(counts) == pytest.approx(15 / 16)
