"""The law of an answer's first tokens, cut into cells that a few hundred draws can fill.

    first token        second            third
    the  0.62 ┬ cat  0.50 ┬ sat 0.9      P(the, cat, sat) = 0.28   a cell
              │           └ others       P(the, cat, else) = 0.03  a cell
              └ others                   P(the, else)     = 0.31   a cell
    a    0.30                            too rare to follow: a cell of its own
    others                               P(else)          = 0.08   a cell

A cell is expected to be hit at least five times, so that Pearson's statistic has its chi-square law. What
would be rarer goes into one common cell.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from server.verify.chi_square import statistic, upper_tail
from server.verify.subject import History, Law

MIN_EXPECTED = 5.0
_WORTH_FOLLOWING = 4 * MIN_EXPECTED
_NOTHING = 1e-9

Laws = Callable[[Sequence[History]], Sequence[Law | None]]


@dataclass(frozen=True, slots=True)
class Cell:
    """Outcomes that are counted together.

    Attributes:
        history: How the answer begins.
        is_rest: Then comes a token that none of the cells with a longer beginning names; otherwise anything.
    """

    history: History
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class CellLaw:
    """A law over cells.

    Attributes:
        cells: The probability of each.
        rare: That of everything else, not below MIN_EXPECTED hits, or about 0.
        followed: Beginnings behind which cells are told apart.
    """

    cells: dict[Cell, float]
    rare: float
    followed: frozenset[History]

    @property
    def num_cells(self) -> int:
        """Cells that are counted."""
        return len(self.cells) + (self.rare > _NOTHING)

    @property
    def reaches_drafts(self) -> bool:
        """Whether cells tell second tokens apart: the first one comes with the prompt and is no draft."""
        return any(len(history) > 0 for history in self.followed)

    def cell_of(self, tokens: History) -> Cell | None:
        """The cell an answer falls in; None for the rare ones."""
        history: History = ()
        while history in self.followed:
            longer = tokens[: len(history) + 1]
            if len(longer) == len(history) or not (longer in self.followed or Cell(longer) in self.cells):
                rest = Cell(history, is_rest=True)
                return rest if rest in self.cells else None
            history = longer
        return Cell(history)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well draws fit a law.

    Attributes:
        num_draws: Draws.
        num_cells: Cells.
        statistic: Pearson's; infinite where something came that cannot come.
        p_value: How often chance alone would show as much.
    """

    num_draws: int
    num_cells: int
    statistic: float
    p_value: float


def build_law(laws: Laws, depth: int, num_draws: int) -> CellLaw:
    """Cuts the law of the first `depth` tokens into cells.

    Args:
        laws: The law of the token behind each of some histories; None where it is not known.
        depth: Tokens of an answer at most.
        num_draws: Draws to come.
    """
    cells: dict[Cell, float] = {}
    followed: set[History] = set()
    rare = 0.0
    level: dict[History, float] = {(): 1.0}
    for _ in range(depth):
        worth = [history for history, mass in level.items() if mass * num_draws >= _WORTH_FOLLOWING]
        known = dict(zip(worth, laws(worth), strict=True))
        deeper: dict[History, float] = {}
        for history, mass in level.items():
            law = known.get(history)
            if law is None:
                cells[Cell(history)] = mass
                continue
            followed.add(history)
            kept = {token: p for token, p in law.items() if p * mass * num_draws >= MIN_EXPECTED}
            deeper |= {(*history, token): p * mass for token, p in kept.items()}
            rest = max(0.0, 1.0 - sum(kept.values())) * mass
            if rest * num_draws >= MIN_EXPECTED:
                cells[Cell(history, is_rest=True)] = rest
            else:
                rare += rest
        level = deeper
    cells |= {Cell(history): mass for history, mass in level.items()}
    return CellLaw(cells, rare, frozenset(followed))


def fit(law: CellLaw, answers: Iterable[History]) -> Fit:
    """Holds draws against a law."""
    counts = dict.fromkeys(law.cells, 0)
    num_rare = num_draws = 0
    for tokens in answers:
        num_draws += 1
        cell = law.cell_of(tokens)
        if cell is None:
            num_rare += 1
        else:
            counts[cell] += 1
    if not num_draws:
        return Fit(0, law.num_cells, 0.0, 1.0)
    seen, expected = list(counts.values()), [num_draws * mass for mass in law.cells.values()]
    if law.rare <= _NOTHING:
        impossible = num_rare > 0
    else:
        impossible = False
        if num_draws * law.rare >= MIN_EXPECTED:
            seen.append(num_rare)
            expected.append(num_draws * law.rare)
        else:
            # Too few to be a cell: they are counted with the least likely one.
            least = min(range(len(expected)), key=expected.__getitem__)
            seen[least] += num_rare
            expected[least] += num_draws * law.rare
    if impossible:
        return Fit(num_draws, len(seen), math.inf, 0.0)
    value = statistic(seen, expected)
    return Fit(num_draws, len(seen), value, upper_tail(value, len(seen) - 1) if len(seen) > 1 else 1.0)
