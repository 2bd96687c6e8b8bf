"""Reads Medusa heads: the authors' files, full Medusa-2 models, bare blocks, vLLM's form."""

import logging
import re
from pathlib import Path

import torch

from engine.errors import ModelNotSupported, StartupError
from engine.speculation.heads.checkpoint import MEDUSA_WEIGHTS, Checkpoint
from engine.speculation.heads.config import MedusaConfig
from engine.speculation.heads.fields import Fields, read_fields
from engine.speculation.heads.filling import count_of, fill, listed_ids
from engine.speculation.heads.medusa import MedusaHeads
from engine.speculation.heads.medusa_tree import check_choices
from engine.speculation.heads.target import TargetShape

logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"medusa_heads?\.")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_OUR_BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.weight")
_OUR_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")


def read_medusa_heads(
    folder: Path, target: TargetShape, *, dtype: torch.dtype = torch.float32
) -> MedusaHeads:
    """Medusa heads from a folder with their config.json and weights, on the CPU and without gradients.

    A full Medusa-2 model may stand in the folder: only its heads are read.

    Args:
        folder: Where they are.
        target: The model that they are to draft for.
        dtype: The type their weights get.

    Raises:
        ModelNotFound: The folder holds no heads.
        ModelNotSupported: They are of another kind, or were trained for another target.
        StartupError: They are damaged, or tensors are missing, left over or of a wrong shape.
    """
    fields = read_fields(folder)
    tensors = _named(_heads_alone(Checkpoint.open(folder, MEDUSA_WEIGHTS)))
    config = _config(fields, tensors, target)
    ids = _draft_ids(fields, tensors, config)
    with torch.device("meta"):
        heads = MedusaHeads(config)
    fill(heads, _weights(tensors, config, ids), dtype)
    heads.draft_to_target = ids
    logger.info("%s: %d Medusa heads of %d blocks", tensors.what, config.num_heads, config.num_layers)
    return heads


def _heads_alone(stored: Checkpoint) -> Checkpoint:
    """Without the model around the heads, whose tensors have a prefix then."""
    if not any(_PREFIX.match(name) for name in stored.names):
        return stored

    def rename(name: str) -> str | None:
        if (match := _PREFIX.match(name)) is not None:
            return name[match.end() :]
        return name if name == "token_map" else None

    return stored.renamed(rename)


def _named(stored: Checkpoint) -> Checkpoint:
    """With the names of the modules."""
    num_layers: dict[str, int] = {}
    for name in stored.names:
        if (match := _BLOCK.fullmatch(name)) is not None:
            head, layer = match[1] or match[4], match[2] or match[5]
            num_layers[head] = max(num_layers.get(head, 0), int(layer) + 1)

    def rename(name: str) -> str:
        if (match := _BLOCK.fullmatch(name)) is not None:
            head, layer, kind = match[1] or match[4], match[2] or match[5], match[3] or match[6]
            return f"blocks.{head}.{layer}.linear.{kind}"
        if (match := _OUTPUT.fullmatch(name)) is not None and int(match[2]) == num_layers.get(match[1]):
            return f"lm_heads.{match[1]}.weight"  # Behind the last block of its head.
        return "lm_heads.0.weight" if name == "lm_head.weight" else name

    return stored.renamed(rename)


def _config(fields: Fields, tensors: Checkpoint, target: TargetShape) -> MedusaConfig:
    """What is there: configs in circulation name fewer heads than their files hold."""
    blocks = [match for name in tensors.names if (match := _OUR_BLOCK.fullmatch(name)) is not None]
    if not blocks:
        raise ModelNotSupported(
            f"{tensors.what} is no Medusa head: no tensor is a block's, such as 0.0.linear.weight"
        )
    num_heads = count_of((int(match[1]) for match in blocks), "head", tensors)
    num_layers = count_of((int(match[2]) for match in blocks), "block", tensors)
    outputs = sorted(name for name in tensors.names if _OUR_OUTPUT.fullmatch(name))
    rows = _output_rows(tensors, outputs)
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=rows,
        num_heads=num_heads,
        num_layers=num_layers,
        block_bias=fields.flag("medusa_fc_bias") or "blocks.0.0.linear.bias" in tensors.names,
        shared_lm_head=fields.flag("original_lm_head") and outputs == ["lm_heads.0.weight"],
        choices=check_choices(
            fields.paths("medusa_choices"),
            num_heads,
            target.vocab_size if rows is None else rows,
            fields.where,
        ),
    )
    _check_target(tensors, config, outputs)
    return config


def _output_rows(tensors: Checkpoint, outputs: list[str]) -> int | None:
    if "token_map" in tensors.names:
        return tensors.rows("token_map")
    return tensors.rows(outputs[0]) if outputs else None


def _check_target(tensors: Checkpoint, config: MedusaConfig, outputs: list[str]) -> None:
    width = tensors.shape("blocks.0.0.linear.weight")
    if width != (config.hidden_size, config.hidden_size):
        raise ModelNotSupported(
            f"{tensors.what} reads hidden states of width {width[-1] if width else 1}, but the target's are "
            f"{config.hidden_size} wide: it was trained for another model"
        )
    if "token_map" in tensors.names:
        return
    for name in outputs:
        if (rows := tensors.rows(name)) != config.vocab_size:
            raise ModelNotSupported(
                f"{name} of {tensors.what} scores {rows} tokens, but the target has {config.vocab_size}: it "
                "was trained for another vocabulary, or its token_map is missing"
            )


def _draft_ids(fields: Fields, tensors: Checkpoint, config: MedusaConfig) -> torch.Tensor | None:
    if "token_map" not in tensors.names:
        truncated = fields.optional_size("truncated_vocab_size")
        if truncated is not None and truncated < config.vocab_size:
            raise StartupError(f"{tensors.what} lacks token_map: its vocabulary is cut to {truncated} tokens")
        return None
    return listed_ids(tensors, "token_map", config.draft_vocab_size or 0, config.vocab_size)


def _weights(tensors: Checkpoint, config: MedusaConfig, ids: torch.Tensor | None) -> Checkpoint:
    """The tensors of the module alone."""
    if ids is not None:
        # vLLM's form: rows of the whole vocabulary, of which the map tells which are meant.
        table = (config.vocab_size, config.hidden_size)
        whole = [
            name for name in tensors.names if _OUR_OUTPUT.fullmatch(name) and tensors.shape(name) == table
        ]
        tensors = tensors.picking(whole, ids)
    return tensors.without("token_map")
