"""The rules that decide which draft tokens stand: randomness comes in as an argument.

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

What the laws say of a node is the same whatever the coins show, so that each rule but match has two halves:
its odds (`odds.py`), tensors that nobody waits for, and a walk over plain numbers. Where a copy is cheap the
walk asks for the numbers as it comes to them (`verdict`); on other devices all of them are fetched at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.sampling.odds import Accepts, Odds
from engine.token_tree import TokenTree


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


def verdict(odds: Odds, accepts: Accepts) -> Verdict:
    """Verifies a draft by any rule but match, asking for each number as the walk comes to it.

    Args:
        odds: What the rule makes of the draft.
        accepts: The coins.
    """
    accepted = odds.walk(lambda node: float(odds.chance(node)), accepts)
    return Verdict(accepted, odds.ending(accepted[-1] if accepted else 0))
