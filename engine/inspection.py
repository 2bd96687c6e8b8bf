"""Inspector: what the target says at a place, read off its rows and not off anybody's answer.

For checks that hold answers against the target itself: the exact law of a token under all sampling options,
and by how much one token leads another. Every row is computed plainly, without a draft and without a batch.
"""

from collections.abc import Mapping, Sequence
from itertools import count

import torch

from engine.admission import admit
from engine.core.kv_cache_manager import PrefixMatch
from engine.errors import InvalidRequest, Overloaded
from engine.factory import Engine
from engine.model.input_batch import SequenceSlice
from engine.sampling.logits import process_logits
from engine.sampling.noise import Stream, gumbel_noise
from engine.sampling.row_group import RowGroup
from engine.sampling_params import SamplingParams

_NO_MATCH = PrefixMatch((), 0, 0)
_CHUNK = 128


class Inspector:
    """Looks at an engine's target between its steps.

    Args:
        engine: It must have no work while anything here runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self._kv = engine.core.scheduler.kv
        self._limits = engine.core.limits
        self._names = count()

    def laws(
        self, prompt: Sequence[int], histories: Sequence[Sequence[int]], params: SamplingParams, least: float
    ) -> list[Mapping[int, float]]:
        """The exact law of the token behind each history, all sampling options applied.

        Args:
            prompt: Token ids of the prompt.
            histories: Beginnings of an answer.
            params: Of the request; the seed does not matter.
            least: Tokens less likely than that are left out.

        Returns:
            Per history the probability of each token, computed in float64.

        Raises:
            InvalidRequest: The prompt does not fit.
        """
        laws: list[Mapping[int, float]] = []
        for row in self._processed(prompt, histories, params):
            if params.is_greedy:
                laws.append({int(row.argmax()): 1.0})
                continue
            law = row.double().softmax(dim=-1)
            likely = (law >= least).nonzero()[:, 0]
            laws.append(dict(zip(likely.tolist(), law[likely].tolist(), strict=True)))
        return laws

    def lead(
        self, prompt: Sequence[int], history: Sequence[int], params: SamplingParams, tokens: tuple[int, int]
    ) -> float:
        """By how many nats the first of two tokens leads the second behind a history.

        Their scores are processed logits, for sampled requests log probabilities with the seed's noise: the
        target says the token with the highest one.

        Raises:
            InvalidRequest: The prompt does not fit.
        """
        [row] = self._processed(prompt, [history], params)
        scores = row.double()
        if not params.is_greedy:
            group = self._group(prompt, history, params)
            scores = scores + gumbel_noise([group.noise_key(0, Stream.TARGET)], len(row), row.device)[0]
        first, second = tokens
        return float(scores[first] - scores[second])

    def _processed(
        self, prompt: Sequence[int], histories: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[torch.Tensor]:
        """Per history the processed logits of the token behind it, [vocab_size]."""
        rows = self._rows(prompt, histories)
        groups = [self._group(prompt, history, params) for history in histories]
        return [
            process_logits(row[None], [group], self._runner.operators)[0]
            for row, group in zip(rows, groups, strict=True)
        ]

    def _group(self, prompt: Sequence[int], history: Sequence[int], params: SamplingParams) -> RowGroup:
        matcher = None if params.constraint is None else self._limits.grammars.compile(params.constraint)
        if matcher is not None and not matcher.advance(history):
            raise InvalidRequest(f"the answer's format does not allow its beginning {list(history)}")
        return RowGroup(params, [*prompt, *history], len(prompt), self._limits.eos_token_ids, matcher=matcher)

    def _rows(self, prompt: Sequence[int], histories: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Per history the target's logits behind it; the prompt is read once."""
        longest = max(map(len, histories), default=0)
        request = admit(
            f"inspection-{next(self._names)}", prompt, SamplingParams(max_tokens=longest), self._limits
        )
        # Blocks of the engine's own pool, so that nothing that others share is written over.
        if not self._kv.admit(request, _NO_MATCH, len(prompt) + longest):
            raise Overloaded(f"the KV pool has no room for {len(prompt) + longest} tokens")
        try:
            at_prompt = self._read(request.token_ids, 0, self._kv.block_table(request))
            return [
                self._read(history, len(prompt), self._kv.block_table(request)) if history else at_prompt
                for history in histories
            ]
        finally:
            self._kv.free(request)

    def _read(self, token_ids: Sequence[int], start: int, table: Sequence[int]) -> torch.Tensor:
        """Computes tokens from a position on; the row of the last one."""
        for begin in range(0, len(token_ids), _CHUNK):
            piece = token_ids[begin : begin + _CHUNK]
            rows = self._runner.forward(self._runner.build([SequenceSlice(piece, start + begin, table)]))
        return rows[-1]
