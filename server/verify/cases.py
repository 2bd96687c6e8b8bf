"""The grid of sampling options under which answers are compared."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.sampling_params import SamplingParams

# Any vocabulary has these ids; which tokens they are does not matter where the model's own are not known.
_SOME_IDS = (32, 40, 45, 48, 65, 97)


@dataclass(frozen=True, slots=True)
class Hint:
    """What a model says to a prompt plainly: options such as a stop are made to act on it.

    Attributes:
        text: The greedy answer.
        token_ids: Its ids; empty where they are not told.
    """

    text: str
    token_ids: tuple[int, ...]


Make = Callable[[SamplingParams, Hint], SamplingParams | None]
"""From the plain parameters to those of a case; None where the hint gives nothing to make it of."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way of sampling.

    Attributes:
        name: What reports call it.
        make: Its parameters for a prompt.
        n: Answers per request.
    """

    name: str
    make: Make
    n: int = 1


def text_cases() -> list[Case]:
    """The cases whose texts are compared, the plain greedy one first."""
    return [
        Case("greedy", _greedy()),
        Case("greedy, penalties up", _greedy(presence_penalty=1.0, frequency_penalty=1.5)),
        Case("greedy, penalties down", _greedy(presence_penalty=-0.5, frequency_penalty=-1.0)),
        Case("greedy, repetition 1.3", _greedy(repetition_penalty=1.3)),
        Case("greedy, repetition 0.8", _greedy(repetition_penalty=0.8)),
        Case("greedy, logit_bias", lambda params, hint: replace(_cold(params), logit_bias=_biases(hint))),
        Case("greedy, min_tokens", _min_tokens),
        Case("greedy, stop string", _stop_string),
        Case("greedy, stop id", _stop_id),
        Case("greedy, 20 logprobs", _greedy(logprobs=20)),
        Case("temperature 0.7", _seeded(temperature=0.7)),
        Case("temperature 1.5", _seeded(temperature=1.5)),
        Case("top_k 5", _seeded(top_k=5)),
        Case("top_p 0.8", _seeded(top_p=0.8)),
        Case("min_p 0.1", _seeded(min_p=0.1)),
        Case("sampled, penalties up", _seeded(presence_penalty=0.5, frequency_penalty=1.0)),
        Case("sampled, penalties down", _seeded(presence_penalty=-0.5, repetition_penalty=0.9)),
        Case("sampled, n=3", _seeded(temperature=0.9), n=3),
        Case("sampled, everything", _everything),
    ]


def law_cases(*, all_options: bool) -> list[Case]:
    """The cases whose distribution is tested.

    Args:
        all_options: Whether every option's effect on the law can be computed; without that only those whose
            law follows from 20 logprobs.
    """
    cases = [Case("top_k 4", _law(temperature=0.8, top_k=4)), Case("temperature 1", _law(temperature=1.0))]
    if all_options:
        cases.append(Case("everything", _law_everything))
    return cases


def is_bare(params: SamplingParams) -> bool:
    """Whether no option changes the model's own logits."""
    return (
        params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.logit_bias
        and params.min_tokens == 0
    )


def _cold(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=0.0)


def _greedy(**options: float) -> Make:
    return lambda params, hint: replace(_cold(params), **options)  # type: ignore[arg-type]


def _seeded(**options: float) -> Make:
    return lambda params, hint: replace(params, **{"temperature": 1.0, **options})  # type: ignore[arg-type]


def _law(**options: float) -> Make:
    return lambda params, hint: replace(params, ignore_eos=True, **options)  # type: ignore[arg-type]


def _biases(hint: Hint) -> tuple[tuple[int, float], ...]:
    """Every other token of the answer a little likelier, the others a little less likely."""
    ids = dict.fromkeys(hint.token_ids[:12] or _SOME_IDS)
    return tuple((token, 3.0 if index % 2 else -3.0) for index, token in enumerate(ids))


def _min_tokens(params: SamplingParams, hint: Hint) -> SamplingParams:
    """Tokens that would end the answer at once are kept away for a while."""
    least = max(1, (params.max_tokens or 16) * 2 // 3)
    return replace(_cold(params), min_tokens=least, stop_token_ids=hint.token_ids[2:5])


def _stop_string(params: SamplingParams, hint: Hint) -> SamplingParams | None:
    """A stop in the middle of the answer, that begins and ends within tokens where it can."""
    middle = len(hint.text) // 2
    stop = hint.text[middle : middle + 3]
    return replace(_cold(params), stop=(stop,)) if stop else None


def _stop_id(params: SamplingParams, hint: Hint) -> SamplingParams | None:
    if not hint.token_ids:
        return None
    return replace(_cold(params), stop_token_ids=(hint.token_ids[len(hint.token_ids) // 2],))


def _everything(params: SamplingParams, hint: Hint) -> SamplingParams:
    return replace(
        params,
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        min_p=0.02,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        repetition_penalty=1.1,
        logit_bias=_biases(hint),
        min_tokens=4,
        stop=("\n\n\n",),
        logprobs=5,
    )


def _law_everything(params: SamplingParams, hint: Hint) -> SamplingParams:
    """Few tokens to choose from, so that the second and third one's law can be told apart."""
    wishes = replace(_everything(params, hint), top_k=6, stop=(), logprobs=None, ignore_eos=True)
    return replace(wishes, min_tokens=0)
