"""Texts and logprobs with speculation, held against plain decoding of each prompt alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from server.bench.prompts import Prompt
from server.verify.cases import Case, Hint, text_cases
from server.verify.comparing import find_divergence, judge_unclear, logprob_difference
from server.verify.results import Bounds, Divergence, Equality, TextRow, Verdict
from server.verify.subject import Answer, Ask, OnDone, Subject

NUM_LOGPROBS = 5
PLAIN = SpeculationParams(enabled=False)

WithBar = Callable[[str, int], OnDone]
"""From a title and a number of answers to come to what is told of each."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One request and its plain answers.

    Attributes:
        case: The sampling options.
        ask: The request, plain and with logprobs.
        params: The parameters as the case has them.
        answers: What plain decoding of this request alone says.
    """

    case: Case
    ask: Ask
    params: SamplingParams
    answers: tuple[Answer, ...]

    @property
    def is_refused(self) -> bool:
        """Whether it is not served at all, speculation or not."""
        return any(answer.is_refused for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Plain decoding, each prompt alone.

    Attributes:
        hints: By prompt, what it says greedily.
        greedy: By prompt, that answer.
        expected: Every case of every prompt.
    """

    hints: dict[str, Hint]
    greedy: dict[str, Answer]
    expected: tuple[Expected, ...]


def speculating(rule: Acceptance) -> SpeculationParams:
    """Speculation under a rule, all else as the server is set."""
    return SpeculationParams(acceptance=rule)


def take_baseline(
    subject: Subject, prompts: Sequence[Prompt], base: SamplingParams, with_bar: WithBar
) -> Baseline:
    """Asks everything plainly; the greedy answers come first, since other cases are made of them.

    Args:
        subject: Who is asked.
        prompts: What is asked.
        base: Tokens per answer and the first seed.
        with_bar: Shows how far it is.
    """
    first, *others = text_cases()
    wanted = [(first, prompt, Hint("", ())) for prompt in prompts]
    greedy = _ask_plainly(subject, "plain, greedy", wanted, base, with_bar)
    hints = {item.ask.prompt.name: _hint(item.answers[0]) for item in greedy}
    wanted = [(case, prompt, hints[prompt.name]) for case in others for prompt in prompts]
    expected = (*greedy, *_ask_plainly(subject, "plain, alone", wanted, base, with_bar))
    return Baseline(hints, {item.ask.prompt.name: item.answers[0] for item in greedy}, expected)


def compare_texts(
    subject: Subject, rule: Acceptance | None, baseline: Baseline, bounds: Bounds, with_bar: WithBar
) -> list[TextRow]:
    """A row per case: all requests in one batch, and one prompt per case alone.

    Args:
        subject: Who is asked.
        rule: How drafts are verified; None decodes plainly, in the batch only. Under another rule than match
            a sampled text depends on the draft, so only the greedy cases are compared.
        baseline: What is expected.
        bounds: What is a fault.
        with_bar: Shows how far it is.
    """
    wanted = [
        item
        for item in baseline.expected
        if not item.is_refused and (rule in (None, Acceptance.MATCH) or item.params.is_greedy)
    ]
    speculation = PLAIN if rule is None else speculating(rule)
    label = "plain" if rule is None else f"{subject.method}, {rule}"
    batched = [(item, _with(item, speculation, item.params.logprobs)) for item in wanted]
    alone = (
        []
        if rule is None
        else [(item, _with(item, speculation, item.ask.params.logprobs)) for item in _one_prompt_each(wanted)]
    )
    results = [
        *_compare(subject, batched, bounds, with_bar(f"{label}, batched", _count(batched)), is_batch=True),
        *_compare(subject, alone, bounds, with_bar(f"{label}, alone", _count(alone)), is_batch=False),
    ]
    cases = dict.fromkeys(item.case.name for item in wanted)
    heading = ("plain", "") if rule is None else (subject.method, rule.value)
    return [_row(heading, [result for result in results if result.case == case], bounds) for case in cases]


@dataclass(frozen=True, slots=True)
class _Result:
    """One request that was compared."""

    case: str
    is_batch: bool
    num_answers: int
    num_tokens: int
    divergences: tuple[Divergence, ...]
    logprob_difference: float | None
    drafted: int
    accepted: int
    errors: tuple[str, ...]


def _ask_plainly(
    subject: Subject,
    title: str,
    wanted: Iterable[tuple[Case, Prompt, Hint]],
    base: SamplingParams,
    with_bar: WithBar,
) -> list[Expected]:
    made: list[tuple[Case, Ask, SamplingParams]] = []
    for number, (case, prompt, hint) in enumerate(wanted):
        seed = (base.seed or 0) + number
        params = case.make(replace(base, seed=seed), hint)
        if params is not None:
            logprobs = max(NUM_LOGPROBS, params.logprobs or 0)
            plain = replace(params, logprobs=logprobs, speculation=PLAIN)
            made.append((case, Ask(prompt, plain, case.n), params))
    on_done = with_bar(title, sum(ask.n for _, ask, _ in made))
    answers = subject.answer([ask for _, ask, _ in made], 1, on_done)
    return [
        Expected(case, ask, params, said) for (case, ask, params), said in zip(made, answers, strict=True)
    ]


def _hint(answer: Answer) -> Hint:
    # Over HTTP tokens are texts, and no ids.
    return Hint(answer.text, tuple(token for token in answer.tokens if isinstance(token, int)))


def _with(item: Expected, speculation: SpeculationParams, logprobs: int | None) -> Ask:
    return replace(item.ask, params=replace(item.params, logprobs=logprobs, speculation=speculation))


def _one_prompt_each(wanted: Sequence[Expected]) -> list[Expected]:
    """One request per case, of another prompt each time."""
    by_case: dict[str, list[Expected]] = {}
    for item in wanted:
        by_case.setdefault(item.case.name, []).append(item)
    return [items[number % len(items)] for number, items in enumerate(by_case.values())]


def _count(asks: Sequence[tuple[Expected, Ask]]) -> int:
    return sum(ask.n for _, ask in asks)


def _compare(
    subject: Subject,
    asks: Sequence[tuple[Expected, Ask]],
    bounds: Bounds,
    on_done: OnDone,
    *,
    is_batch: bool,
) -> list[_Result]:
    said = subject.answer([ask for _, ask in asks], subject.at_once if is_batch else 1, on_done)
    return [
        _result(subject, item, ask, answers, bounds, is_batch=is_batch)
        for (item, ask), answers in zip(asks, said, strict=True)
    ]


def _result(
    subject: Subject,
    item: Expected,
    ask: Ask,
    answers: Sequence[Answer],
    bounds: Bounds,
    *,
    is_batch: bool,
) -> _Result:
    pairs = list(zip(item.answers, answers, strict=True))
    errors = tuple(answer.error for pair in pairs for answer in pair if answer.error is not None)
    divergences: list[Divergence] = []
    differences: list[float] = []
    for choice, pair in enumerate(() if errors else pairs):
        found = find_divergence(subject, ask, pair, choice, bounds)
        if found is not None:
            divergences.append(replace(found, batched=is_batch))
        difference = logprob_difference(pair[0].entries, pair[1].entries)
        if difference is not None:
            differences.append(difference)
    return _Result(
        case=item.case.name,
        is_batch=is_batch,
        num_answers=len(pairs),
        num_tokens=sum(answer.num_tokens for answer in answers),
        divergences=tuple(divergences),
        logprob_difference=max(differences, default=None),
        drafted=sum(answer.drafts.drafted for answer in answers),
        accepted=sum(answer.drafts.accepted for answer in answers),
        errors=errors,
    )


def _row(heading: tuple[str, str], results: Sequence[_Result], bounds: Bounds) -> TextRow:
    divergences = tuple(item for result in results for item in result.divergences)
    differences = [r.logprob_difference for r in results if r.logprob_difference is not None]
    errors = tuple(dict.fromkeys(error for result in results for error in result.errors))
    verdicts = {item.verdict for item in divergences}
    if Verdict.UNCLEAR in verdicts:
        verdicts.add(judge_unclear(divergences, sum(result.num_tokens for result in results), bounds))
    if errors or max(differences, default=0.0) > bounds.tolerance:
        verdicts.add(Verdict.FAULT)
    order = (Verdict.FAULT, Verdict.UNCLEAR, Verdict.NEAR_TIE)
    return TextRow(
        method=heading[0],
        rule=heading[1],
        case=results[0].case,
        alone=_equality([result for result in results if not result.is_batch]),
        batched=_equality([result for result in results if result.is_batch]),
        divergences=divergences,
        logprob_difference=max(differences, default=None),
        drafted=sum(result.drafted for result in results),
        accepted=sum(result.accepted for result in results),
        errors=errors,
        verdict=next((verdict for verdict in order if verdict in verdicts), Verdict.EQUAL),
    )


def _equality(results: Sequence[_Result]) -> Equality:
    total = sum(result.num_answers for result in results)
    failed = sum(result.num_answers for result in results if result.errors)
    return Equality(total - failed - sum(len(result.divergences) for result in results), total)
