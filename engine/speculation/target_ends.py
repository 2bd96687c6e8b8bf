"""What draft heads share of the target: its embedding, its output layer and its ids."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine.speculation.draft_ids import DraftIds


class TargetEnds:
    """The first and the last layer of a target.

    Args:
        module: The target.
        vocab_size: Ids that may be drafted.

    Attributes:
        embed: Its embedding, int64 [...] to [..., hidden_size].
        vocab_size: See above.
    """

    def __init__(self, module: PreTrainedModel, vocab_size: int) -> None:
        config = module.config.get_text_config()
        embedding = module.get_input_embeddings()
        self.embed: Callable[[torch.Tensor], torch.Tensor] = embedding
        self.vocab_size = vocab_size
        self._lm_head: Callable[[torch.Tensor], torch.Tensor] = module.get_output_embeddings()
        # What some architectures do to their logits: Cohere's and Granite's factors, Gemma's cap.
        self._factor = float(getattr(config, "logit_scale", None) or 1.0)
        self._factor /= float(getattr(config, "logits_scaling", None) or 1.0)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    @property
    def output_layer(self) -> object:
        """Its output layer."""
        return self._lm_head

    @property
    def plain_lm_head(self) -> object:
        """Its output layer if the logits are what that gives; None if the target does more to them."""
        return self._lm_head if self._factor == 1.0 and self._softcap is None else None

    def score(self, state: torch.Tensor) -> torch.Tensor:
        """The target's logits of states after its final norm, [..., hidden_size] to [..., rows]."""
        return self.finish(self._lm_head(state))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the target makes of its output layer's results, some or all of them."""
        if self._factor != 1.0:
            logits = logits * self._factor
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def ids(self, draft_to_target: torch.Tensor | None) -> DraftIds | None:
        """What the rows of a head's output layer stand for; None where they are the target's ids."""
        if draft_to_target is None:
            return None
        kept = draft_to_target < self.vocab_size
        if bool(kept.all()):
            return DraftIds(draft_to_target, self.vocab_size)
        return DraftIds(draft_to_target[kept], self.vocab_size, kept.nonzero()[:, 0])

    def cut(self, logits: torch.Tensor, ids: DraftIds | None) -> torch.Tensor:
        """Logits of ids that may be drafted, as float32.

        Args:
            logits: Of a head's output layer, or the target's.
            ids: What `ids` returned for that layer.
        """
        if ids is None:
            return logits.float()[..., : self.vocab_size]
        return logits.float() if ids.kept is None else logits.float().index_select(-1, ids.kept)

    def spread(self, logits: torch.Tensor, draft_to_target: torch.Tensor | None) -> torch.Tensor:
        """A head's logits at the places of the target's ids, -inf where the head has none.

        Args:
            logits: [..., draft_vocab_size], or [..., rows] of the target.
            draft_to_target: int64 [draft_vocab_size], the id of each; None where they are the target's.

        Returns:
            float32 [..., vocab_size].
        """
        ids = self.ids(draft_to_target)
        logits = self.cut(logits, ids)
        return logits if ids is None else ids.spread(logits, -torch.inf)
