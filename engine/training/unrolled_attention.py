"""Attention of EAGLE's passes in training: what a chain of drafts from every place of a text would see.

Pass s of root i stands for the draft s places behind it. It sees what the head holds of the text, the keys
of pass 0 up to place i, and the keys of passes 1 to s that came from the same root: no other root's chain.

    query          keys of pass 0          of pass 1    of pass 2
    pass 0, i      0 ... i
    pass 1, i      0 ... i                 i
    pass 2, i      0 ... i                 i            i

(EAGLE-3, Li et al. 2025, section 3.2, "training-time test".) The backward pass is written out, so that no
more than the attention weights is kept, and nothing is computed for another sequence of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class Block:
    """A sequence's part of a batch.

    Attributes:
        queries: Which of the queries are its.
        keys: Which of the keys of pass 0 are its.
        hidden: bool [queries, keys], true where the key lies behind the query's root.
    """

    queries: slice
    keys: slice
    hidden: torch.Tensor


def make_blocks(roots: torch.Tensor, bounds: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of a batch.

    Args:
        roots: int64 [R], the place of each query's root, ascending.
        bounds: First place of each sequence, and the end of the last.
    """
    edges = torch.searchsorted(roots, torch.tensor(bounds, device=roots.device)).tolist()
    places = torch.arange(bounds[-1], device=roots.device)
    blocks = []
    for index in range(len(bounds) - 1):
        queries = slice(edges[index], edges[index + 1])
        if queries.start == queries.stop:
            continue
        # No query of the sequence sees beyond its last root.
        keys = slice(bounds[index], int(roots[queries.stop - 1]) + 1)
        blocks.append(Block(queries, keys, places[keys][None, :] > roots[queries][:, None]))
    return tuple(blocks)


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys and values of one pass behind pass 0, [num_kv_heads, R, head_dim] each."""

    key: torch.Tensor
    value: torch.Tensor


def unrolled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chain: Sequence[Chain],
    blocks: Sequence[Block],
) -> torch.Tensor:
    """Attends each root's query.

    Args:
        query: [num_heads, R, head_dim], rotated and scaled.
        key: [num_kv_heads, N, head_dim], of pass 0, rotated.
        value: [num_kv_heads, N, head_dim].
        chain: Of passes 1 to s, the query's own last; empty for pass 0.
        blocks: See `make_blocks`.

    Returns:
        [num_heads, R, head_dim].
    """
    flat = [tensor for link in chain for tensor in (link.key, link.value)]
    out: torch.Tensor = _UnrolledAttention.apply(blocks, query, key, value, *flat)  # type: ignore[no-untyped-call]
    return out


class _UnrolledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[Block],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *chain: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        grouped, result = (_grouped(tensor, len(key)) for tensor in (query, out))
        keys, values = chain[::2], chain[1::2]
        saved: list[torch.Tensor] = []
        for block in blocks:
            q, k, v = grouped[:, :, block.queries], key[:, block.keys], value[:, block.keys]
            # [num_kv_heads, group, queries, keys], and a score for each link of the chain.
            weights = (q @ k[:, None].mT).masked_fill_(block.hidden, float("-inf"))
            peak = weights.amax(dim=-1, keepdim=True)
            links = [(q * link[:, None, block.queries]).sum(dim=-1, keepdim=True) for link in keys]
            for score in links:
                peak = torch.maximum(peak, score)
            total = weights.sub_(peak).exp_().sum(dim=-1, keepdim=True)
            for score in links:
                total += score.sub_(peak).exp_()
            weights /= total
            seen = weights @ v[:, None]
            for score, link in zip(links, values, strict=True):
                seen += score.div_(total) * link[:, None, block.queries]
            result[:, :, block.queries] = seen
            saved += [weights, *links]
        ctx.blocks = blocks
        ctx.save_for_backward(query, key, value, out, *chain, *saved)
        ctx.num_links = len(keys)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, *rest = ctx.saved_tensors
        count = ctx.num_links
        chain, saved = rest[: 2 * count], rest[2 * count :]
        to_query, to_key, to_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        to_chain = [torch.zeros_like(link) for link in chain]
        grouped = {
            name: _grouped(tensor, len(key))
            for name, tensor in (("q", query), ("out", out), ("grad", grad.contiguous()), ("to_q", to_query))
        }
        for index, block in enumerate(ctx.blocks):
            weights, *links = saved[index * (count + 1) : (index + 1) * (count + 1)]
            q, o, g = (grouped[name][:, :, block.queries] for name in ("q", "out", "grad"))
            k, v = key[:, block.keys], value[:, block.keys]
            # d score = weight (d weight - sum over all it sees), and that sum is grad . out.
            common = (g * o).sum(dim=-1, keepdim=True)
            scores = (g @ v[:, None].mT).sub_(common).mul_(weights)
            to_q = scores @ k[:, None]
            to_key[:, block.keys] += (scores.mT @ q).sum(dim=1)
            to_value[:, block.keys] += (weights.mT @ g).sum(dim=1)
            for place, weight in enumerate(links):
                link_key, link_value = (chain[2 * place + i][:, None, block.queries] for i in (0, 1))
                score = ((g * link_value).sum(dim=-1, keepdim=True) - common) * weight
                to_q += score * link_key
                to_chain[2 * place][:, block.queries] = (score * q).sum(dim=1)
                to_chain[2 * place + 1][:, block.queries] = (weight * g).sum(dim=1)
            grouped["to_q"][:, :, block.queries] = to_q
        return (None, to_query, to_key, to_value, *to_chain)


def _grouped(tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[num_heads, ...] as [num_kv_heads, group, ...]; a view."""
    return tensor.view(num_kv_heads, -1, *tensor.shape[1:])
