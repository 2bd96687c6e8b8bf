"""The target as training sees it: what its forward passes say at every place of a text.

They are the engine's own passes, with its weights and its cache as they are served by default, so a head
learns from the very states that it will read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.attention.choice import choose_backend
from engine.model.cache_type import choose_cache_type
from engine.model.hidden_states import HiddenSelection
from engine.model.input_batch import SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.loaded_model import LoadedModel
from engine.model.model_runner import ModelRunner
from engine.model.support import text_config
from engine.speculation.heads.config import default_features
from engine.training.rows import Row

PASS_TOKENS = 1024
"""Tokens of short sequences that share a pass; a longer one is read in several."""
_BLOCK_SIZE = 16
_LEAST_LOGPROB = -60000.0
"""What is less likely is not told apart: float16 ends there."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What the target thought of one sequence.

    Attributes:
        hidden: float16 [num_tokens, (num_features + 1) * hidden_size] on the CPU: the states that EAGLE-3
            reads, then the one after the final norm.
        top_ids: int32 [num_answer_tokens, K], the likeliest tokens in each answer token's place, best first.
        top_logprobs: float16 [num_answer_tokens, K], their logarithmic probabilities.
    """

    hidden: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


class TargetReader:
    """Reads sequences with a target.

    Args:
        model: The target.
        top_k: How many of the likeliest tokens are kept in each place.

    Attributes:
        features: Which states EAGLE-3 reads, as indices of transformers' output_hidden_states.
    """

    def __init__(self, model: LoadedModel, top_k: int) -> None:
        self.model = model
        self.features = default_features(text_config(model.module.config).num_hidden_layers)
        self._top_k = min(top_k, model.vocab_size)
        self._num_blocks = -(-max(PASS_TOKENS, model.max_model_len) // _BLOCK_SIZE) + PASS_TOKENS
        dtype = choose_cache_type("auto", model)
        cache = PagedKVCache(model.layers, self._num_blocks, _BLOCK_SIZE, dtype, model.device)
        backend = choose_backend(model.operators, model.device)
        self._runner = ModelRunner(
            model.module, cache, backend, model.vocab_size, model.operators, model.weights
        )
        self._tap = self._runner.tap(HiddenSelection(self.features, last=True))

    @torch.inference_mode()
    def read(self, rows: Sequence[Row]) -> list[Captured]:
        """Runs sequences, of which several share a pass only if they fit into one together."""
        with self._runner.threads:
            return self._read(rows)

    def _read(self, rows: Sequence[Row]) -> list[Captured]:
        if len(rows) == 1 and len(rows[0].token_ids) > PASS_TOKENS:
            return [self._read_long(rows[0])]
        slices, first = [], 0
        for row in rows:
            count = -(-len(row.token_ids) // _BLOCK_SIZE)
            wanted = len(row.token_ids) - row.answers[0].begin + 1
            slices.append(SequenceSlice(row.token_ids, 0, range(first, first + count), rows=wanted))
            first += count
        taken = self._runner.forward_tapped(self._runner.build(slices), self._tap)
        scores = torch.split(taken.logits, [piece.rows for piece in slices])
        states = torch.split(taken.features, [len(row.token_ids) for row in rows])
        return [
            self._captured(row, part, score) for row, part, score in zip(rows, states, scores, strict=True)
        ]

    def _read_long(self, row: Row) -> Captured:
        """One sequence in several passes."""
        table = range(self._num_blocks)
        captured = []
        for begin in range(0, len(row.token_ids), PASS_TOKENS):
            piece = SequenceSlice(row.token_ids[begin : begin + PASS_TOKENS], begin, table, rows=0)
            # Rows of the pass whose next token is an answer's.
            wanted = [
                place - begin
                for span in row.answers
                for place in range(max(span.begin - 1, begin), min(span.end - 1, begin + len(piece)))
            ]
            rows = len(piece) - wanted[0] if wanted else 0
            piece = SequenceSlice(piece.token_ids, begin, table, rows=rows)
            taken = self._runner.forward_tapped(self._runner.build([piece]), self._tap)
            places = torch.tensor(wanted, dtype=torch.long, device=self.model.device) - (len(piece) - rows)
            captured.append((taken.features, *self._best(taken.logits[places])))
        hidden, ids, logprobs = (torch.cat(parts) for parts in zip(*captured, strict=True))
        return Captured(_as_half(hidden), ids, logprobs)

    def _captured(self, row: Row, hidden: torch.Tensor, logits: torch.Tensor) -> Captured:
        begin = row.answers[0].begin - 1
        # The distribution in an answer token's place is the output of the token before.
        places = torch.cat(
            [torch.arange(span.begin - 1 - begin, span.end - 1 - begin) for span in row.answers]
        )
        return Captured(_as_half(hidden), *self._best(logits[places.to(logits.device)]))

    def _best(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of rows, and their logarithmic probabilities."""
        best = logits.topk(self._top_k, dim=-1)
        peak = best.values[:, :1]
        # Not logsumexp, which torch computes several times slower on a CPU.
        whole = (logits - peak).exp_().sum(dim=-1, keepdim=True).log_() + peak
        logprobs = (best.values - whole).clamp_(min=_LEAST_LOGPROB)
        return best.indices.int().cpu(), logprobs.half().cpu()


def _as_half(states: torch.Tensor) -> torch.Tensor:
    # A few states of some models are beyond what float16 can hold.
    limit = torch.finfo(torch.float16).max
    return states.float().clamp_(-limit, limit).half().cpu()
