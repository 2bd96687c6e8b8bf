"""Attention of unrolled passes against one query at a time."""

import pytest
import torch

from engine.training.unrolled_attention import Chain, make_blocks, unrolled_attention

HEADS, KV_HEADS, DIM = 4, 2, 8


def draw(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chain: list[Chain],
    roots: list[int],
    starts: list[int],
) -> torch.Tensor:
    """Each query sees the keys from its sequence's start to its root, and its own of each link."""
    columns = []
    for place, (root, start) in enumerate(zip(roots, starts, strict=True)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            keys = [key[group, start : root + 1], *(link.key[group, place][None] for link in chain)]
            values = [value[group, start : root + 1], *(link.value[group, place][None] for link in chain)]
            shares = (torch.cat(keys) @ query[head, place]).softmax(dim=0)
            heads.append(shares @ torch.cat(values))
        columns.append(torch.stack(heads))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("num_links", [0, 1, 3])
def test_each_query_sees_its_own_text_and_chain(num_links: int) -> None:
    generator = torch.Generator().manual_seed(num_links)
    bounds = (0, 5, 6, 12)
    roots, starts = [0, 2, 3, 8, 9, 11], [0, 0, 0, 6, 6, 6]
    if not num_links:
        roots, starts = list(range(12)), [0] * 5 + [5] + [6] * 6
    inputs = [
        draw(HEADS, len(roots), DIM, generator=generator),
        *(draw(KV_HEADS, 12, DIM, generator=generator) for _ in range(2)),
        *(draw(KV_HEADS, len(roots), DIM, generator=generator) for _ in range(2 * num_links)),
    ]
    query, key, value, *links = inputs
    chain = [Chain(*links[index : index + 2]) for index in range(0, len(links), 2)]
    out = unrolled_attention(query, key, value, chain, make_blocks(torch.tensor(roots), bounds))
    expected = one_by_one(query, key, value, chain, roots, starts)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad(out, inputs, grad)
    for mine, plain in zip(found, torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(mine, plain)
