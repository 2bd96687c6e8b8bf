"""The rules that decide which draft tokens stand: pure functions, randomness comes in as an argument.

`engine/acceptance.py` says which of them may verify which draft. All but the last are lossless: what is
emitted has the law of the target alone. p is the target's distribution at a row, q the draft's.

Match. The target chooses a token at each row; the walk follows the child that equals the choice, and the
first choice without a child is emitted and ends the walk. Lossless for any tree, however it was made, because
the emitted tokens are the target's choices and nothing else. At temperature 0 this is greedy verification.

Siblings. Each child is tried in the order drawn. With q the law it was drawn from, given those before it, and
p what the target still wants, it stands with probability min(1, p(x) / q(x)); if it falls, the target wants
norm(max(p - q, 0)), and that is what the next token is drawn from if all of them fall.
  - A chain is rejection sampling (Leviathan et al. 2023, Chen et al. 2023).
  - Drawn independently, q stays the same for all of them: multi-step speculative sampling (Miao et al. 2024,
    "SpecInfer", section 4.3).
  - Drawn without replacement, q loses those that fell: recursive rejection sampling (Jeon et al. 2024,
    "Recursive speculative decoding"; Chen et al. 2024, "Sequoia").

Block. A chain is judged from its end (Sun et al. 2024, "Block verification accelerates speculative
decoding"): never fewer tokens on average than token by token.

Typical. Medusa's lossy rule (Cai et al. 2024, section 2.3.1): a token stands where the target finds it likely
enough.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.token_tree import TokenTree

# Medusa's settings: a token needs this probability, or less where the target is unsure.
TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3

LawAt = Callable[[int], torch.Tensor]
"""The target's distribution at a node, [vocab_size]; called for the nodes that a walk reaches."""

Accepts = Callable[[int, float], bool]
"""Whether a node stands, given the chance that it should: a coin, or all of its sides one after the other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a draft.

    Attributes:
        accepted: The accepted nodes from the root's child downwards.
        residual: The law of the next token, [vocab_size]; None: the target's own at the last of them.
    """

    accepted: tuple[int, ...]
    residual: torch.Tensor | None = None


def follow_choices(
    tree: TokenTree, choices: Mapping[int, int], accepted: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], int | None]:
    """The match rule, as far as the target has chosen.

    Args:
        tree: The draft.
        choices: The target's choice per node, the root being 0; it need not have chosen everywhere yet.
        accepted: The nodes that the walk came through so far.

    Returns:
        The accepted nodes from the root's child downwards, and the choice without a child that ended the
        walk; None where a choice is missing: the one at the last of the nodes, or at the root.
    """
    while (node := accepted[-1] if accepted else 0) in choices:
        token = choices[node]
        child = next((child for child in tree.children(node) if tree.tokens[child - 1] == token), None)
        if child is None:
            return accepted, token
        accepted = (*accepted, child)
    return accepted, None


def acceptance_chance(p: torch.Tensor, q: torch.Tensor, token: int) -> float:
    """min(1, p(x) / q(x)); 0 where q(x) is 0, since such a token was not drawn from q."""
    drawn = float(q[token])
    return min(1.0, float(p[token]) / drawn) if drawn > 0.0 else 0.0


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the target still wants once a token drawn from q has fallen: norm(max(p - q, 0)).

    Args:
        p: What it wanted before, [vocab_size]; with a factor below 1 in block verification.
        q: The distribution that the token was drawn from, [vocab_size].

    Returns:
        A distribution [vocab_size]; p itself where nothing of p exceeds q, as when the two are equal.
    """
    excess = (p - q).clamp_(min=0)
    total = excess.sum()
    return excess / total if total > 0 else p


def drawn_independently(tokens: Sequence[int], laws: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The law of each sibling drawn with replacement, given those before it: its own, whatever came."""
    return iter(laws)


def drawn_distinct(tokens: Sequence[int], laws: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The law of each sibling drawn without replacement, given those before it.

    Args:
        tokens: The siblings' tokens in the order drawn.
        laws: Per sibling the draft's distribution [vocab_size], nothing taken out.

    Yields:
        norm(q without the tokens before). Once that leaves nothing, a sibling was not drawn but is just
        there, and the law that says so is 1 at its token: it stands with the chance that the target gives it.
    """
    for rank, (token, law) in enumerate(zip(tokens, laws, strict=True)):
        if rank == 0:
            yield law
            continue
        left = law.clone()
        left[list(tokens[:rank])] = 0.0
        total = left.sum()
        if total > 0:
            yield left.div_(total)
        else:
            left[token] = 1.0
            yield left


SiblingLaws = Callable[[Sequence[int], Iterable[torch.Tensor]], Iterator[torch.Tensor]]


def verify_siblings(
    tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, sibling_laws: SiblingLaws, accepts: Accepts
) -> Verdict:
    """Verifies a tree whose tokens were drawn, level by level.

    Args:
        tree: The draft, siblings in the order drawn.
        law_at: p per node.
        draft_law_of: Per draft node the q that its parent's row had.
        sibling_laws: How siblings were drawn: `drawn_independently` or `drawn_distinct`.
        accepts: The coins.
    """
    accepted: tuple[int, ...] = ()
    node = 0
    while children := tree.children(node):
        wanted = law_at(node)
        tokens = [tree.tokens[child - 1] for child in children]
        laws = sibling_laws(tokens, map(draft_law_of, children))
        for child, token, law in zip(children, tokens, laws, strict=True):
            if accepts(child, acceptance_chance(wanted, law, token)):
                node = child
                accepted = (*accepted, child)
                break
            wanted = residual(wanted, law)
        else:
            return Verdict(accepted, wanted)
    return Verdict(accepted)


def verify_block(tree: TokenTree, law_at: LawAt, draft_law_of: LawAt, accepts: Accepts) -> Verdict:
    """Verifies a drawn chain as a whole.

    With r_0 = 1 and r_i = min(1, r_{i-1} p_i(x_i) / q_i(x_i)), the first i tokens can stand with chance
    h_i = R_i / (R_i + 1 - r_i), where R_i = sum_x max(r_i p_{i+1}(x) - q_{i+1}(x), 0); the whole chain with
    r_gamma. The most that can stand do. Behind fewer than all the next token's law is
    norm(max(r_i p_{i+1} - q_{i+1}, 0)).

    Args:
        tree: The draft, a chain.
        law_at: p per node.
        draft_law_of: q per draft node.
        accepts: The coins; asked from the end until one says yes.
    """
    length = len(tree)
    target = [law_at(node) for node in range(length)]
    draft = [draft_law_of(node) for node in range(1, length + 1)]
    ratios = [1.0]
    for p, q, token in zip(target, draft, tree.tokens, strict=True):
        drawn = float(q[token])
        ratios.append(min(1.0, ratios[-1] * float(p[token]) / drawn) if drawn > 0.0 else 0.0)
    whole = tuple(range(1, length + 1))
    if accepts(length, ratios[length]):
        return Verdict(whole)
    for count in range(length - 1, 0, -1):
        if accepts(count, block_chance(target[count], draft[count], ratios[count])):
            break
    else:
        count = 0
    return Verdict(whole[:count], residual(ratios[count] * target[count], draft[count]))


def block_chance(p: torch.Tensor, q: torch.Tensor, ratio: float) -> float:
    """h_i of block verification, from p_{i+1}, q_{i+1} and r_i; 1 where r_i is 1."""
    if ratio == 1.0:
        return 1.0
    excess = float((ratio * p - q).clamp_(min=0).sum())
    return excess / (excess + 1.0 - ratio)


def follow_typical(tree: TokenTree, law_at: LawAt) -> Verdict:
    """Medusa's typical acceptance: the longest path whose tokens the target all finds likely enough.

    Of several such paths the one that the target finds likeliest is taken, the first among equals. Lossy:
    which of the likely tokens are said is up to the draft, and what is unlikely is said too seldom.
    """
    best = (0, 0.0)
    accepted: tuple[int, ...] = ()
    reached: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for path, likelihood in reached:
        if (len(path), likelihood) > best:
            best, accepted = (len(path), likelihood), path
        children = tree.children(path[-1] if path else 0)
        if not children:
            continue
        p = law_at(path[-1] if path else 0)
        threshold = typical_threshold(p)
        for child in children:
            chance = float(p[tree.tokens[child - 1]])
            if chance > threshold:
                reached.append(((*path, child), likelihood + math.log(chance)))
    return Verdict(accepted)


def typical_threshold(p: torch.Tensor) -> float:
    """min(epsilon, delta * exp(-H(p))), H the entropy in nats: above it a token is likely enough."""
    entropy = float(torch.special.entr(p).sum())
    return min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-entropy))
