"""How a draft model's children are drawn from its rows: the way that serves the request's rule best."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.acceptance import proposal_for
from engine.sampling.device_rows import DeviceRows
from engine.sampling.logits import RowOperators, chunks
from engine.sampling.noise import NoiseKey, Stream, gumbel_noise, noise_starts, uniform_rows
from engine.sampling.uploading import upload
from engine.sampling_params import SamplingParams
from engine.speculation.draft_ids import DraftIds
from engine.token_tree import Proposal

STREAMS = {
    # Without noise the stream does not matter.
    Proposal.DETERMINISTIC: Stream.TARGET,
    Proposal.COUPLED: Stream.TARGET,
    Proposal.SAMPLED: Stream.DRAFT,
    Proposal.SAMPLED_DISTINCT: Stream.DRAFT,
}


@dataclass(frozen=True, slots=True)
class DrawingStyle:
    """What the settings leave open.

    Attributes:
        couples: Under the match rule, draw with the noise that the target will use (Daliri et al. 2024);
            otherwise take the likeliest tokens.
        with_replacement: Under the rejection rule, draw siblings independently (SpecInfer's multi-step
            sampling) and not one after another without replacement (recursive rejection sampling).
        branches: Whether nodes may have siblings at all.
    """

    couples: bool = True
    with_replacement: bool = False
    branches: bool = False

    def proposal(self, params: SamplingParams) -> Proposal:
        """How a request's tokens are drawn."""
        proposal = proposal_for(params, distinct=self.branches and not self.with_replacement)
        if proposal is Proposal.COUPLED and not self.couples:
            return Proposal.DETERMINISTIC
        return proposal


@dataclass(frozen=True, slots=True)
class RowWish:
    """What is wanted of one row.

    Attributes:
        proposal: How the children are drawn.
        width: How many.
        key: The row's noise; None takes the likeliest tokens.
        needs_probabilities: Whether the children's probabilities are wanted.
    """

    proposal: Proposal
    width: int
    key: NoiseKey | None
    needs_probabilities: bool = False


@dataclass(frozen=True, slots=True)
class Child:
    """A token drawn from a row.

    Attributes:
        token_id: The token.
        log_probability: Its share of the scores it was picked by, as a logarithm: of the draft's own
            distribution where there is no noise. With the target's noise it says how far it is ahead of the
            others under that very noise, which is what makes the target pick it too. 0 if nobody asked.
        distribution: What it was drawn from, float32 [vocab_size], if it was drawn with noise of its own;
            siblings share it.
    """

    token_id: int
    log_probability: float = 0.0
    distribution: torch.Tensor | None = None


def draw_children(
    processed: torch.Tensor,
    wishes: Sequence[RowWish],
    operators: RowOperators | None = None,
    ids: DraftIds | None = None,
    far: DeviceRows | None = None,
) -> list[list[Child]]:
    """Draws the children of each row; fewer than wanted where no more tokens can be chosen.

    The top m of log q plus Gumbel noise are m draws without replacement, in order (Kool et al. 2019); with
    the target's noise they are the tokens it is likeliest to choose (Gumbel coupling).

    Args:
        processed: The draft's logits after `process_logits`, [num_rows, vocab_size], or a row's entries as
            `ids` says.
        wishes: One per row.
        operators: What to do it with; None takes plain torch.
        ids: What the entries of a row stand for; None where they are the target's ids.
        far: What to do it with on a device that it takes long to hear from.
    """
    children: list[list[Child]] = []
    for chunk in chunks(range(len(wishes)), processed.shape[1]):
        part = slice(chunk[0], chunk[-1] + 1)
        children += _draw(processed[part], wishes[part], operators, ids, far)
    return children


def _draw(
    rows: torch.Tensor,
    wishes: Sequence[RowWish],
    operators: RowOperators | None,
    ids: DraftIds | None,
    far: DeviceRows | None,
) -> list[list[Child]]:
    width = max(wish.width for wish in wishes)
    totals = None
    to_target = None if ids is None else ids.to_target
    if far is not None:
        ranking = far.rank(rows, [wish.key for wish in wishes], width, ids)
        highest, scored, totals, to_target = ranking.tokens, ranking.scores, ranking.totals, None
    elif operators is not None and all(wish.key and not wish.needs_probabilities for wish in wishes):
        starts = noise_starts([wish.key for wish in wishes if wish.key is not None], rows.device)
        highest, scored = operators.top_rows(rows, starts, width, to_target)
    else:
        scores = _scores(rows, [wish.key for wish in wishes], ids)
        if any(wish.needs_probabilities for wish in wishes):
            totals = scores.logsumexp(dim=-1).tolist()
        highest, scored = _highest(scores, width)
    tokens = (highest if to_target is None else to_target[highest]).tolist()
    values = scored.tolist()
    children: list[list[Child]] = []
    for place, wish in enumerate(wishes):
        if not values[place][0] > -torch.inf:  # Nor is it where nothing can be chosen and it is no number.
            children.append([])
            continue
        drawn = wish.proposal.is_drawn and wish.key is not None
        distribution = _distribution(rows[place], ids) if drawn else None
        if distribution is not None and wish.width > 1 and wish.proposal is Proposal.SAMPLED:
            children.append(_draw_independently(distribution, wish))
            continue
        total = 0.0 if totals is None else totals[place]
        children.append(
            [
                Child(token, min(value - total, 0.0) if wish.needs_probabilities else 0.0, distribution)
                for token, value in zip(tokens[place], values[place], strict=True)
                if value > -torch.inf
            ][: wish.width]
        )
    return children


def _distribution(row: torch.Tensor, ids: DraftIds | None) -> torch.Tensor:
    """Over the target's ids."""
    shares = row.softmax(dim=-1)
    return shares if ids is None else ids.spread(shares, 0.0)


def _scores(rows: torch.Tensor, keys: Sequence[NoiseKey | None], ids: DraftIds | None) -> torch.Tensor:
    """The rows with their noise; rows of one key, such as all nodes of a depth, share one row of it."""
    places = [place for place, key in enumerate(keys) if key is not None]
    if not places:
        return rows
    distinct = {
        key: number for number, key in enumerate(dict.fromkeys(key for key in keys if key is not None))
    }
    vocab_size = rows.shape[1] if ids is None else ids.vocab_size
    noise = gumbel_noise(list(distinct), vocab_size, rows.device)
    if ids is not None:
        noise = noise[:, ids.to_target]
    scores = rows.to(torch.float64)
    index = upload(places, torch.int64, rows.device)
    which = [distinct[key] for key in keys if key is not None]
    return scores.index_add_(0, index, noise[upload(which, torch.int64, rows.device)])


def _highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the `count` highest scores of each row, the first among equals first, and the scores.

    Not by topk, whose order among equals is nowhere promised: the target's argmax takes the lowest id.
    """
    tokens: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    left = scores.clone() if count > 1 else scores
    for _ in range(min(count, scores.shape[1])):
        best = left.argmax(dim=-1, keepdim=True)
        tokens.append(best)
        values.append(left.gather(1, best))
        if len(tokens) < count:
            left.scatter_(1, best, -torch.inf)
    return torch.cat(tokens, dim=1), torch.cat(values, dim=1)


def _draw_independently(distribution: torch.Tensor, wish: RowWish) -> list[Child]:
    """Draws with replacement, each by a number of its own: where it falls among added-up probabilities."""
    assert wish.key is not None, "drawn tokens have noise"
    borders = distribution.double().cumsum(dim=-1)
    numbers = uniform_rows([wish.key], wish.width, distribution.device)[0] * borders[-1]
    tokens = torch.searchsorted(borders, numbers, right=True).clamp_(max=len(borders) - 1)
    return [Child(token, 0.0, distribution) for token in tokens.tolist()]
