"""Distributions: many seeds of one request, held against the exact law of its first tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.sampling_params import Acceptance, SamplingParams
from server.bench.prompts import Prompt
from server.verify.cases import Case, Hint
from server.verify.law import MIN_EXPECTED, CellLaw, build_law, fit
from server.verify.results import Bounds, LawRow, Verdict
from server.verify.subject import Answer, Ask, Entry, History, Law, OnDone, Subject, Token
from server.verify.texts import PLAIN, speculating

DEPTH = 3
# One token more than is tested, so that tokens 2 and 3 can be drafts of one step.
NUM_TOKENS = DEPTH + 1
_ALL_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a distribution is tested.

    Attributes:
        case: The sampling options.
        ask: The request, without a seed and without speculation.
    """

    case: Case
    ask: Ask


def by_repetition(prompts: Sequence[Prompt], hints: Mapping[str, Hint]) -> list[Prompt]:
    """The prompts, those first whose text and answer repeat themselves, so that lookup finds something."""

    def repetition(prompt: Prompt) -> float:
        words = f"{prompt.text or prompt.messages} {hints[prompt.name].text}".split()
        pairs = list(pairwise(words))
        return 1 - len(set(pairs)) / max(1, len(pairs))

    return sorted(prompts, key=repetition, reverse=True)


def choose_spots(
    cases: Sequence[Case],
    prompts: Sequence[Prompt],
    greedy: Mapping[str, Answer],
    hints: Mapping[str, Hint],
) -> list[Spot]:
    """The requests whose distributions are tested.

    In process the prompt is given with the beginning of its own greedy answer, up to one token before a place
    where the model was unsure: the first token is then nearly certain, and the second, which is the first
    that can be a draft, is open.

    Args:
        cases: Sampling options.
        prompts: What is asked.
        greedy: By prompt, the plain greedy answer with logprobs.
        hints: By prompt, the same in ids; empty where these are not known.
    """
    spots: list[Spot] = []
    base = SamplingParams(max_tokens=NUM_TOKENS)
    for case in cases:
        for prompt in prompts:
            hint = hints[prompt.name]
            params = case.make(base, hint)
            begun = hint.token_ids[: _open_place(greedy[prompt.name].entries)]
            if params is not None:
                spots.append(Spot(case, Ask(prompt, params, begun=begun)))
    return spots


def hold_against(
    subject: Subject,
    rule: Acceptance | None,
    laws: Sequence[tuple[Spot, CellLaw]],
    num_seeds: int,
    bounds: Bounds,
    with_bar: Callable[[str, int], OnDone],
) -> list[LawRow]:
    """A row per spot: `num_seeds` answers against its law."""
    label = f"{subject.method}, {rule}" if rule else "plain"
    on_done = with_bar(f"{label}, draws", num_seeds * len(laws))
    rows = []
    for spot, law in laws:
        params = replace(spot.ask.params, speculation=PLAIN if rule is None else speculating(rule))
        if subject.laws(spot.ask, [], 1.0) is None:
            params = with_tokens(params)
        answers = draw(subject, spot, params, num_seeds, on_done)
        rows.append(_row((subject.method if rule else "plain", rule or ""), spot, law, answers, bounds))
    return rows


def with_tokens(params: SamplingParams) -> SamplingParams:
    """The same, and told each token: over HTTP these come with logprobs only."""
    return replace(params, logprobs=_ALL_LOGPROBS)


def draw(
    subject: Subject, spot: Spot, params: SamplingParams, num_seeds: int, on_done: OnDone
) -> list[Answer]:
    """An answer per seed."""
    asks = [replace(spot.ask, params=replace(params, seed=seed)) for seed in range(num_seeds)]
    return [answers[0] for answers in subject.answer(asks, subject.at_once, on_done)]


def exact_law(subject: Subject, spot: Spot, num_seeds: int) -> CellLaw:
    """The law by the engine's own rows."""

    def laws(histories: Sequence[History]) -> Sequence[Law]:
        return subject.laws(spot.ask, histories, MIN_EXPECTED / num_seeds) or []

    return build_law(laws, DEPTH, num_seeds)


def sampled_law(spot: Spot, answers: Sequence[Answer], num_seeds: int) -> CellLaw:
    """The law by the logprobs of plain answers: at each history of the first answer that went that way."""
    found: dict[History, Entry] = {}
    for answer in answers:
        for place, entry in enumerate(answer.entries):
            found.setdefault(answer.tokens[:place], entry)

    def laws(histories: Sequence[History]) -> Sequence[Law | None]:
        entries = (found.get(history) for history in histories)
        return [None if entry is None else law_of(entry.top, spot.ask.params) for entry in entries]

    return build_law(laws, DEPTH, num_seeds)


def law_of(top: Sequence[tuple[Token, float]], params: SamplingParams) -> Law:
    """The law of a token by its likeliest alternatives' logprobs.

    Exact for temperature 1 without truncations, and for a top_k of no more tokens than there are; equal
    logprobs at the border of top_k all stay.

    Raises:
        ValueError: It does not follow from them.
    """
    if params.top_p < 1 or params.min_p > 0 or (params.temperature != 1 and not params.top_k):
        raise ValueError(f"the law of {params} does not follow from {len(top)} logprobs")
    if not params.top_k:
        return {token: math.exp(logprob) for token, logprob in top}
    border = sorted((logprob for _, logprob in top), reverse=True)[min(params.top_k, len(top)) - 1]
    weights = {
        token: math.exp((logprob - top[0][1]) / params.temperature)
        for token, logprob in top
        if logprob >= border
    }
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _open_place(entries: Sequence[Entry]) -> int:
    """The place of a greedy answer whose token is likely and the one behind it is not."""

    def openness(place: int) -> float:
        return math.exp(entries[place].logprob) * (1 - math.exp(entries[place + 1].logprob))

    return max(range(len(entries) - 1), key=openness, default=0)


def _weight(law: CellLaw, drafted: int | None) -> Verdict:
    """What draws that fit say; `drafted` is None for plain decoding."""
    if law.num_cells < 2:
        return Verdict.ONE_OUTCOME
    if not law.reaches_drafts:
        return Verdict.TOO_FLAT
    return Verdict.NO_DRAFTS if drafted == 0 else Verdict.HOLDS


def _row(
    heading: tuple[str, str], spot: Spot, law: CellLaw, answers: Sequence[Answer], bounds: Bounds
) -> LawRow:
    errors = tuple(dict.fromkeys(answer.error for answer in answers if answer.error is not None))
    drafted = sum(answer.drafts.drafted for answer in answers)
    found = fit(law, [answer.tokens[:DEPTH] for answer in answers if answer.error is None])
    if errors or found.p_value < bounds.alarm_each:
        verdict = Verdict.FAULT
    else:
        verdict = _weight(law, drafted=drafted if heading[1] else None)
    return LawRow(
        method=heading[0],
        rule=str(heading[1]),
        case=spot.case.name,
        prompt=spot.ask.prompt.name,
        position=len(spot.ask.begun),
        num_draws=found.num_draws,
        num_cells=found.num_cells,
        p_value=found.p_value,
        drafted=drafted,
        accepted=sum(answer.drafts.accepted for answer in answers),
        errors=errors,
        verdict=verdict,
    )
