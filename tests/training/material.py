"""Small heads and batches."""

from collections.abc import Sequence

import torch

from engine.speculation.heads.config import EagleConfig
from engine.speculation.heads.eagle import EagleHead, build_eagle_head
from engine.training.features import Stored
from engine.training.packing import Batch, Piece, load_batch
from engine.training.rows import Span

VOCAB, HIDDEN, TOP_K = 40, 16, 6


def small_config(family: str = "eagle3", draft_vocab_size: int | None = None) -> EagleConfig:
    return EagleConfig(
        family="eagle3" if family == "eagle3" else "eagle",
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab_size,
        features=(0, 1, 2) if family == "eagle3" else "last",
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=20,
    )


def small_head(draft_ids: torch.Tensor, family: str = "eagle3") -> tuple[EagleHead, torch.Tensor]:
    """A head with random weights, norms included, and embeddings for it."""
    generator = torch.Generator().manual_seed(3)
    head = build_eagle_head(small_config(family, len(draft_ids) if family == "eagle3" else None))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return head, torch.randn(VOCAB, HIDDEN, generator=generator)


class InMemory:
    """What a batch is read from, made of random numbers."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def tokens(self, row: Stored) -> torch.Tensor:
        return torch.randint(0, VOCAB, (row.num_tokens,), generator=self._generator)

    def hidden(self, row: Stored) -> torch.Tensor:
        return torch.randn(row.num_tokens, 4 * HIDDEN, generator=self._generator)

    def top_ids(self, row: Stored) -> torch.Tensor:
        ids = [torch.randperm(VOCAB, generator=self._generator)[:TOP_K] for _ in range(row.num_answer_tokens)]
        return torch.stack(ids)

    def top_logprobs(self, row: Stored) -> torch.Tensor:
        scores = torch.randn(row.num_answer_tokens, TOP_K, generator=self._generator)
        return scores.log_softmax(dim=-1).sort(descending=True).values


def make_batch(lengths: Sequence[tuple[int, int]], seed: int = 5) -> tuple[Batch, list[list[int]]]:
    """Sequences of so many tokens of a prompt and of an answer, and where their answers are."""
    rows = [
        Stored("", 0, prompt + answer, 0, (Span(prompt, prompt + answer),), False)
        for prompt, answer in lengths
    ]
    pieces = [Piece(row, 0, row.num_tokens) for row in rows]
    batch = load_batch(InMemory(seed), pieces)  # type: ignore[arg-type]
    return batch, [list(range(prompt, prompt + answer)) for prompt, answer in lengths]
