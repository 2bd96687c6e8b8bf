"""Heads that come with Outrider, for its default model."""

from pathlib import Path

from engine.config import DEFAULT_MODEL
from engine.errors import ModelNotFound
from engine.speculation.heads.target import TargetShape

SHIPPED = "shipped"
"""In the place of a head's folder or hub id: the one that comes with Outrider."""

SHIPPED_SHAPE = TargetShape(hidden_size=576, vocab_size=49152, num_layers=30, ties_embeddings=True)
"""Of the model that they are for, whatever file it comes from and whatever it is called."""

_FOLDER = Path(__file__).parents[1] / "shipped_heads"


def shipped_head(method: str, target: TargetShape) -> Path:
    """The folder with the config and the weights of the shipped head.

    Args:
        method: "eagle" or "medusa".
        target: The model that it is to draft for.

    Raises:
        ModelNotFound: It is for another model.
    """
    if target != SHIPPED_SHAPE:
        raise ModelNotFound(
            f"the {method} head that comes with Outrider is for {DEFAULT_MODEL} and does not fit this model: "
            "name one that does (--head FOLDER or HUB_ID), or train one (outrider train-head)"
        )
    return _FOLDER / method
