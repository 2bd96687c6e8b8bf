"""The rules that decide which draft tokens stand: pure functions, randomness comes in as an argument.

Two rules, both lossless: what is emitted has the law of the target alone.

Match. The target chooses a token at each row; the walk follows the child that equals the choice. The first
choice without a child is emitted and ends the walk. Lossless for any tree, however it was made, because the
emitted tokens are the target's choices and nothing else.

Rejection (Leviathan et al. 2023, Chen et al. 2023). A chain whose tokens x_i were drawn from recorded
distributions q_i: x_i stands with probability min(1, p_i(x_i) / q_i(x_i)); the first that falls is replaced
by a draw from norm(max(p_i - q_i, 0)), and after the last one a bonus token is drawn from p. Lossless only if
x_i really was drawn from q_i.
"""

from collections.abc import Sequence

import torch

from engine.token_tree import TokenTree


def follow_choices(tree: TokenTree, choices: Sequence[int]) -> tuple[int, ...]:
    """The match rule.

    Args:
        tree: The draft.
        choices: The target's choice at the root and at each node, in node order.

    Returns:
        The accepted nodes from the root's child downwards. The next token is the choice at the last of them,
        or at the root (0) if there is none.
    """
    accepted: list[int] = []
    node = 0
    while (child := _child_with_token(tree, node, choices[node])) is not None:
        accepted.append(child)
        node = child
    return tuple(accepted)


def acceptance_probabilities(p: torch.Tensor, q: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    """The rejection rule's chance of each draft token, given that those before it stand.

    Args:
        p: The target's distributions, [num_drafts + 1, vocab_size].
        q: The distributions the draft tokens were drawn from, [num_drafts, vocab_size].
        token_ids: The draft tokens.

    Returns:
        min(1, p(x) / q(x)) per draft token; 0 where q(x) is 0, since such a token was not drawn from q.
    """
    columns = torch.tensor(token_ids, dtype=torch.int64, device=p.device)[:, None]
    target = p[: len(token_ids)].gather(1, columns)[:, 0].tolist()
    draft = q.gather(1, columns)[:, 0].tolist()
    return [
        min(1.0, target_x / draft_x) if draft_x > 0.0 else 0.0
        for target_x, draft_x in zip(target, draft, strict=True)
    ]


def count_accepted(probabilities: Sequence[float], uniforms: Sequence[float]) -> int:
    """How many leading draft tokens stand.

    Args:
        probabilities: The chance of each, from `acceptance_probabilities`.
        uniforms: A number strictly between 0 and 1 for each.
    """
    count = 0
    for probability, u in zip(probabilities, uniforms, strict=True):
        if u >= probability:
            break
        count += 1
    return count


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The law of the token that replaces a rejected one: norm(max(p - q, 0)).

    Args:
        p: The target's distribution, [vocab_size].
        q: The distribution that the rejected token was drawn from, [vocab_size].

    Returns:
        A distribution [vocab_size]; p itself where nothing of p exceeds q, as when the two are equal.
    """
    excess = (p - q).clamp_(min=0)
    total = excess.sum()
    return excess / total if total > 0 else p


def _child_with_token(tree: TokenTree, node: int, token: int) -> int | None:
    return next((child for child in tree.children(node) if tree.tokens[child - 1] == token), None)
