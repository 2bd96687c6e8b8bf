"""What a head has to know of the model that it drafts for."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from engine.model.support import text_config


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The sizes of a target that a head must fit.

    Attributes:
        hidden_size: Width of its hidden states.
        vocab_size: Rows of its embedding, padding included.
        num_layers: Its layers.
        ties_embeddings: Whether its lm_head is its embedding.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    ties_embeddings: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TargetShape":
        """The shape of a model, from its config."""
        text = text_config(config)
        return cls(
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            num_layers=text.num_hidden_layers,
            ties_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        )
