"""An EAGLE head as one operator: a pass over committed tokens or a level of a tree, or whole chains.

A pass of a head takes a fraction of a millisecond, and so does calling it: laying out its batch, its twenty
operators, the drawing of a token. A chain of four would take four times that, so it is drafted in one go:

    tokens and features ─▶ pass ─▶ token ─▶ pass ─▶ token ─▶ ...        one call, no Python in between
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from engine.model.attention.cpu import CpuPlan
from engine.model.cpu_ops.build import CpuOperators
from engine.model.fused_layers import FusedMlp, FusedNorm
from engine.model.input_batch import InputBatch, SequenceSlice
from engine.model.kv_cache import PagedKVCache
from engine.model.merging import MergedLinear
from engine.model.packing import NarrowEmbedding
from engine.model.panel_linear import PanelLinear
from engine.sampling.noise import noise_starts
from engine.speculation.chain import ChainWish
from engine.speculation.heads.config import EagleConfig
from engine.speculation.heads.eagle import EagleHead
from engine.speculation.target_ends import TargetEnds

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary positions whose angles depend on the position alone, and not on the length of the text."""


@dataclass(frozen=True, slots=True)
class HeadParts:
    """A head as its operators take it; see heads.h.

    Attributes:
        parameters, sizes, factors: What it is made of, in the order in which they are read there.
        embeddings: [vocab_size, hidden_size], float32 or of 16 bits.
    """

    parameters: list[torch.Tensor]
    sizes: list[int]
    factors: list[float]
    embeddings: torch.Tensor


class HeadStack:
    """Runs a head.

    Args:
        head: In evaluation mode on a CPU; its rotary positions are static.
        parts: The same head.
        cache: Its keys and values.
        operators: The C++ operators.
    """

    def __init__(
        self, head: EagleHead, parts: HeadParts, cache: PagedKVCache, operators: CpuOperators
    ) -> None:
        self._rotary = head.rotary
        self._ids = head.draft_to_target
        self._parts = parts
        self._cache = cache
        self._operators = operators
        self._rotation = self._angles(1024)

    def run(self, batch: InputBatch, plan: CpuPlan, hidden: torch.Tensor) -> torch.Tensor:
        """A pass over a batch.

        Args:
            batch: Laid out for the head.
            plan: Of the batch, for the head's cache.
            hidden: float32 [T, hidden_size], what `fuse` or `carried` gave.

        Returns:
            float32 [T, hidden_size], as EagleHead.forward.
        """
        parts = self._parts
        out: torch.Tensor = self._operators.run_head(
            hidden[None],
            batch.input_ids,
            batch.positions,
            parts.embeddings,
            *self._rotation_up_to(max(span.num_slots for span in batch.spans)),
            parts.parameters,
            parts.sizes,
            parts.factors,
            self._cache.keys,
            self._cache.values,
            *plan.tables,
        )
        return out[0]

    def draft(
        self, slices: Sequence[SequenceSlice], hidden: torch.Tensor, wishes: Sequence[ChainWish | None]
    ) -> list[tuple[list[int], list[float], torch.Tensor | None]]:
        """A pass over committed tokens, and the chains of drafts behind them.

        Args:
            slices: Committed tokens alone, `start` counted from the text's first token.
            hidden: float32 [T, hidden_size], what `fuse` gave.
            wishes: Per slice what chain is wanted; None for none. At least one is.

        Returns:
            Per chain its tokens, how sure the head was of each, and if wanted their truncated rows, float32.
        """
        parts = self._parts
        asked = [wish for wish in wishes if wish is not None]
        longest = max(wish.plan.length for wish in asked)
        starts = noise_starts([key for wish in asked for key in wish.padded_keys(longest)], hidden.device)
        wants_rows = any(wish.needs_rows for wish in asked)
        pieces, num_positions = self._lay_out(slices, wishes)
        tokens, confidences, rows = self._operators.draft_chains(
            hidden[None],
            torch.tensor([token for piece in slices for token in piece.token_ids]),
            pieces,
            torch.tensor([block for piece in slices for block in piece.block_table]),
            self._cache.block_size,
            torch.tensor([(*wish.truncation, wish.plan.least) for wish in asked], dtype=torch.float64),
            torch.tensor([wish.plan.chances for wish in asked], dtype=torch.float64),
            starts.view(len(asked), longest),
            self._ids,
            wants_rows,
            parts.embeddings,
            *self._rotation_up_to(num_positions),
            parts.parameters,
            parts.sizes,
            parts.factors,
            self._cache.keys,
            self._cache.values,
        )
        chains: list[tuple[list[int], list[float], torch.Tensor | None]] = []
        for place, wish in enumerate(asked):
            shares = list(filter(None, confidences[place].tolist()))
            kept = (place, slice(len(shares)))
            chains.append((tokens[kept].tolist(), shares, rows[kept] if wish.needs_rows else None))
        return chains

    def _lay_out(
        self, slices: Sequence[SequenceSlice], wishes: Sequence[ChainWish | None]
    ) -> tuple[torch.Tensor, int]:
        """The pieces as the operator takes them, and how many positions they reach."""
        pieces: list[tuple[int, int, int, int]] = []
        num_blocks = num_positions = 0
        for piece, wish in zip(slices, wishes, strict=True):
            length = 0 if wish is None else wish.plan.length
            end = piece.start + len(piece) + max(0, length - 1)
            if end > len(piece.block_table) * self._cache.block_size:
                raise ValueError(
                    f"{end} slots wanted, but {len(piece.block_table)} blocks of {self._cache.block_size}"
                )
            pieces.append((len(piece), piece.start, length, num_blocks))
            num_blocks += len(piece.block_table)
            num_positions = max(num_positions, end)
        return torch.tensor(pieces), num_positions

    def _rotation_up_to(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of cosines and sines, [num_positions or more, head_dim] each."""
        known = len(self._rotation[0])
        if known < num_positions:
            self._rotation = self._angles(max(num_positions, 2 * known))
        return self._rotation

    def _angles(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=torch.float32)
        cosines, sines = self._rotary(like, torch.arange(num_positions)[None])
        return cosines[0].contiguous(), sines[0].contiguous()


def stack_head(
    head: EagleHead, ends: TargetEnds, cache: PagedKVCache, operators: CpuOperators | None
) -> HeadStack | None:
    """The head as one operator; None where its parts are not all packed as the operator takes them.

    Args:
        head: In evaluation mode, its parts fused and packed where that is possible.
        ends: The target's embedding and output layer.
        cache: The head's keys and values.
        operators: The C++ operators, if there are any.
    """
    if operators is None or head.config.rope["rope_type"] not in _STATIC_ROPE:
        return None
    parts = _parts_of(head, ends)
    return None if parts is None else HeadStack(head, parts, cache, operators)


class _Unfit(Exception):
    """A part is of another kind than the operator takes."""


def _parts_of(head: EagleHead, ends: TargetEnds) -> HeadParts | None:
    try:
        return _read(head, ends)
    except _Unfit:
        return None


def _read(head: EagleHead, ends: TargetEnds) -> HeadParts:
    config = head.config
    is_first = config.family == "eagle"
    children = dict(head.named_children())
    norms = (
        ("embedding_layernorm", "hidden_states_layernorm", "pre_lm_head_layernorm")
        if is_first
        else ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
    )
    fc = _linear(children["fc"]) if is_first else None
    lm_head = _linear(ends.plain_lm_head if head.lm_head is None else head.lm_head)
    num_outputs = ends.vocab_size if head.lm_head is None else lm_head.out_features
    if head.lm_head is None and config.tied_lm_head and head.embed_tokens is not None:
        raise _Unfit
    if head.draft_to_target is None:
        num_outputs = min(num_outputs, ends.vocab_size)
    elif int(head.draft_to_target.max()) >= ends.vocab_size:
        raise _Unfit
    parameters = [
        *(_norm(_submodule(head, name)) for name in norms),
        *(_NOTHING if fc is None else fc.packed),
        *lm_head.packed,
    ]
    sizes = [
        int(is_first),
        int(config.input_norm),
        int(config.norm_before_residual),
        int(config.norm_output and not is_first),
        0 if fc is None else fc.out_features,
        lm_head.out_features,
        num_outputs,
    ]
    factors = [config.rms_norm_eps]
    for index, layer in enumerate(cast("nn.ModuleList", children["layers"])):
        more = _layer(layer, config, index)
        parameters += more[0]
        sizes += more[1]
        factors += more[2]
    embedding = ends.embed if head.embed_tokens is None else head.embed_tokens
    return HeadParts(parameters, sizes, factors, _table(embedding))


def _layer(
    layer: nn.Module, config: EagleConfig, index: int
) -> tuple[list[torch.Tensor], list[int], list[float]]:
    """Parameters, sizes and factors of a decoder layer, as `run_layers` takes them."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    merged = dict(attention.named_children()).get("qkv_proj")
    if config.qk_norm or not isinstance(merged, MergedLinear) or not isinstance(mlp, FusedMlp):
        raise _Unfit
    linears = [
        _linear(each)
        for each in (merged.linear, attention.get_submodule("o_proj"), mlp.gate_up_proj, mlp.down_proj)
    ]
    qkv, out, gate_up, down = (linear.packed for linear in linears)
    first, second = (_norm(_submodule(layer, f"{name}_layernorm")) for name in ("input", "post_attention"))
    gelu = mlp.settings.activation == "gelu_tanh"
    return (
        [first, *qkv, *out, second, *gate_up, *down],
        [
            config.num_heads,
            config.num_kv_heads,
            config.window(index) or 0,
            int(gelu),
            *(linear.out_features for linear in linears),
        ],
        [config.rms_norm_eps, config.rms_norm_eps, config.scale, 0.0],
    )


_NOTHING = (torch.empty(0),) * 3


def _submodule(parent: nn.Module, name: str) -> nn.Module | None:
    """A part that may be missing."""
    *path, last = name.split(".")
    return dict(parent.get_submodule(".".join(path)).named_children()).get(last)


def _norm(module: nn.Module | None) -> torch.Tensor:
    """A norm's weight; empty where there is none."""
    if module is None:
        return _NOTHING[0]
    if not isinstance(module, FusedNorm):
        raise _Unfit
    return module.weight.detach()


def _linear(module: object) -> PanelLinear:
    if not isinstance(module, PanelLinear):
        raise _Unfit
    return module


def _table(embedding: object) -> torch.Tensor:
    """The rows of an embedding that does no more than look up."""
    if type(embedding) not in (nn.Embedding, NarrowEmbedding):
        raise _Unfit
    return cast("nn.Embedding", embedding).weight.detach()
