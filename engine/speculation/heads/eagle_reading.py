"""Reads EAGLE heads: the authors' EAGLE-1, 2 and 3, HASS, and the speculators format."""

import logging
from pathlib import Path

import torch

from engine.errors import ModelNotSupported, StartupError
from engine.speculation.heads.checkpoint import Checkpoint
from engine.speculation.heads.config import EagleConfig
from engine.speculation.heads.eagle import EagleHead, build_eagle_head
from engine.speculation.heads.eagle_config import read_eagle_config
from engine.speculation.heads.eagle_features import LayerConvention
from engine.speculation.heads.eagle_names import eagle_name, is_medusa
from engine.speculation.heads.fields import read_fields
from engine.speculation.heads.filling import check_ids, check_vector, fill, listed_ids
from engine.speculation.heads.layers import Rotary
from engine.speculation.heads.target import TargetShape

logger = logging.getLogger(__name__)


def read_eagle_head(
    folder: Path,
    target: TargetShape,
    *,
    convention: LayerConvention | None = None,
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """An EAGLE head from a folder with its config.json and weights, on the CPU and without gradients.

    Args:
        folder: Where it is.
        target: The model that it is to draft for.
        convention: What its layer ids mean, where its config's own convention is not to be believed.
        dtype: The type its weights get.

    Raises:
        ModelNotFound: The folder holds no head.
        ModelNotSupported: It is another kind of head, or was trained for another target.
        StartupError: It is damaged, or tensors are missing, left over or of a wrong shape.
    """
    fields = read_fields(folder)
    stored = Checkpoint.open(folder)
    if any(is_medusa(name) for name in stored.names):
        raise ModelNotSupported(f"{stored.what} is of the Medusa kind: serve it with the method medusa")
    tensors = stored.renamed(eagle_name)
    for name in tensors.names:
        if name.endswith("weight") and not tensors.shape(name):
            raise StartupError(f"{name} of {tensors.what} is a single number")
    config = read_eagle_config(fields, tensors, target, convention)
    ids = _draft_ids(tensors, config)
    with torch.device("meta"):
        head = build_eagle_head(config)
    fill(head, _weights(tensors, config, ids), dtype)
    head.rotary = Rotary(config)
    head.draft_to_target = ids
    logger.info(
        "%s: %s, %d layers, features %s", tensors.what, config.family, config.num_layers, config.features
    )
    return head


def _weights(tensors: Checkpoint, config: EagleConfig, ids: torch.Tensor | None) -> Checkpoint:
    """The tensors of the module alone; copies of the target's and vocabularies are checked and left out."""
    table = (config.vocab_size, config.hidden_size)
    unused = ["d2t", "t2d", "token_map"]
    if not config.own_embeddings:
        _check_copy(tensors, "embed_tokens.weight", table)
        unused.append("embed_tokens.weight")
    if config.family == "eagle" and config.draft_vocab_size is None:
        _check_copy(tensors, "lm_head.weight", table)
        unused.append("lm_head.weight")
    if "t2d" in tensors.names:
        check_vector(tensors, "t2d", config.vocab_size)
    if ids is not None and "token_map" in tensors.names:
        # vLLM's form: rows of the whole vocabulary, of which the map tells which are meant.
        whole = (
            {"lm_head.weight"} & tensors.names if tensors.rows("lm_head.weight") == config.vocab_size else ()
        )
        tensors = tensors.picking(whole, ids)
    return tensors.without(*unused)


def _check_copy(tensors: Checkpoint, name: str, shape: tuple[int, int]) -> None:
    if name in tensors.names and (found := tensors.shape(name)) != shape:
        raise ModelNotSupported(
            f"{name} of {tensors.what} is {list(found)}, but the target's is {list(shape)}: the head was "
            "trained for another model"
        )


def _draft_ids(tensors: Checkpoint, config: EagleConfig) -> torch.Tensor | None:
    """The target's ids of the draft's; None where they are the same."""
    rows = config.draft_vocab_size
    if rows is None:
        if names := sorted({"d2t", "token_map"} & tensors.names):
            raise StartupError(f"{tensors.what} holds {names[0]}, but no lm_head.weight that it would be for")
        return None
    if "token_map" in tensors.names:
        return listed_ids(tensors, "token_map", rows, config.vocab_size)
    if rows == config.vocab_size and "d2t" not in tensors.names:
        return None
    check_vector(tensors, "d2t", rows)
    # d2t holds offsets: id d of the draft is id d + d2t[d] of the target.
    ids = torch.arange(rows) + tensors.integers("d2t")
    check_ids(ids, config.vocab_size, "d2t", tensors.what)
    return None if rows == config.vocab_size and torch.equal(ids, torch.arange(rows)) else ids
