"""How one request wants its tokens chosen: validated once, frozen after."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.errors import InvalidRequest

MAX_DRAFT_TOKENS = 63
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
MAX_BAD_WORDS = 256
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


class Acceptance(StrEnum):
    """Which rule decides whether a draft token stands; `engine/acceptance.py` says which fits which draft.

    MATCH keeps a draft token when the target, drawing with noise keyed by (seed, position, token), chooses
    the same one: the text is a function of prompt, parameters and seed alone, whatever the drafter.
    REJECTION is the ratio rule: Leviathan et al. 2023 for chains, SpecInfer's multi-step form for siblings
    drawn independently, recursive rejection for siblings drawn without replacement. The law is the target's
    own, acceptance is often higher, but the text of a seed depends on the draft.
    BLOCK judges a drawn chain as a whole (Sun et al. 2024): the same law, never fewer tokens than REJECTION.
    TYPICAL is Medusa's rule, and lossy: it keeps what the target finds likely enough. Only servers that allow
    it serve it.

    At temperature 0 each of them keeps a draft token when it is the most likely one, and nothing is lost.
    """

    MATCH = "match"
    REJECTION = "rejection"
    BLOCK = "block"
    TYPICAL = "typical"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """One request's say in its speculation.

    Attributes:
        enabled: False decodes this request plainly.
        num_draft_tokens: Draft nodes per step, at most MAX_DRAFT_TOKENS; None takes the server's setting.
        acceptance: The rule that verifies this request's drafts; None takes the server's, which is match
            unless it is set otherwise.
        prediction: Tokens that the answer is likely to resemble. Drafted first, in chains of up to
            MAX_DRAFT_TOKENS nodes unless num_draft_tokens says otherwise.
    """

    enabled: bool = True
    num_draft_tokens: int | None = None
    acceptance: Acceptance | None = None
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            _check_range("speculation.num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)


class ConstraintKind(StrEnum):
    """What a constraint is written in.

    JSON: a JSON schema. REGEX: a regular expression for the whole answer. CHOICE: a JSON list of strings, one
    of which is the answer. GRAMMAR: a context-free grammar, Lark's or GBNF.
    """

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A format that the whole answer must have.

    Attributes:
        kind: What it is written in.
        source: The text of it.
        param: The request field it comes from, for errors.
    """

    kind: ConstraintKind
    source: str
    param: str = "structured_outputs"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything about a request but its prompt.

    The order in which the options act on a row of logits is fixed and documented in `sampling/logits.py`.

    Attributes:
        max_tokens: Tokens to generate at most; None: to the end of the context; 0: only read the prompt.
        min_tokens: Tokens before which no EOS or stop id may be chosen.
        temperature: 0 takes the most likely token (ties: the lowest id).
        top_p, top_k, min_p: Truncations of the distribution; 1.0, 0 and 0.0 are off.
        presence_penalty, frequency_penalty: OpenAI's, over the output; -2 to 2.
        repetition_penalty: Hugging Face's, over prompt and output; greater than 0, 1.0 is off.
        logit_bias: (token id, bias) pairs, added to the logits; -100 to 100.
        bad_words: Token sequences that the answer must not have, at most MAX_BAD_WORDS: the last token of
            each is kept away where the others stand at its end.
        allowed_token_ids: The only ids that may be chosen, an end of the answer included; empty allows all.
            Where bad_words or min_tokens would leave none of them, they yield.
        seed: Any signed 64-bit integer; None lets the engine draw one at admission.
        choice: Which of n answers to one prompt this is; part of the noise's key.
        stop: Strings that end the answer; the text is cut before the first of them.
        stop_token_ids: Ids that end the answer, like EOS.
        ignore_eos: Treat the model's EOS ids as ordinary tokens.
        logprobs: Alternatives to report per token, 0 for the chosen one alone; None is off.
        prompt_logprobs: The same for the prompt's tokens.
        skip_special_tokens: Leave special tokens out of the text.
        shown_token_ids: Special tokens that the text shows all the same.
        include_stop_str_in_output: Keep the stop string that ended the answer.
        constraint: The format that the answer must have; None leaves it free.
        speculation: This request's say in its speculation.
        priority: Lower ones leave the waiting queue first; equal ones in the order they came.
        cache_scope: Whose request this is, opaque: what the engine keeps of its text to draft from serves
            later requests of the same scope and no others.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    choice: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    constraint: Constraint | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    cache_scope: str = ""

    def __post_init__(self) -> None:
        _check_lengths(self.max_tokens, self.min_tokens)
        _check_range("temperature", self.temperature, 0.0, 2.0)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be above 0 and at most 1, got {self.top_p}", "top_p")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be at least 0 (0 is off), got {self.top_k}", "top_k")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise InvalidRequest(
                f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}",
                "repetition_penalty",
            )
        for token_id, bias in self.logit_bias:
            _check_range(f"logit_bias of token {token_id}", bias, -100.0, 100.0, param="logit_bias")
        if self.seed is not None:
            _check_range("seed", self.seed, SEED_MIN, SEED_MAX)
        _check_stop(self.stop)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        _check_bad_words(self.bad_words)
        if self.constraint is not None:
            _check_beside(self.constraint, self)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature == 0.0


def _check_range(name: str, value: float, low: float, high: float, *, param: str | None = None) -> None:
    # A NaN fails both comparisons and so is refused here too.
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param or name)


def _check_lengths(max_tokens: int | None, min_tokens: int) -> None:
    if max_tokens is not None and max_tokens < 0:
        raise InvalidRequest(f"max_tokens must be at least 0, got {max_tokens}", "max_tokens")
    if min_tokens < 0:
        raise InvalidRequest(f"min_tokens must be at least 0, got {min_tokens}", "min_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({min_tokens}) must not exceed max_tokens ({max_tokens}): lower the first or raise "
            "the second",
            "min_tokens",
        )


def _check_bad_words(words: Sequence[Sequence[int]]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words are at most {MAX_BAD_WORDS} token sequences, got {len(words)} (a word that is spelt "
            "otherwise behind a space makes two)",
            "bad_words",
        )
    if not all(words):
        raise InvalidRequest("bad_words must not contain an empty word: it would ban everything", "bad_words")


def _check_beside(constraint: Constraint, params: SamplingParams) -> None:
    """Refuses what could leave an answer of a prescribed format nothing to go on with."""
    if params.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos cannot be had with {constraint.param}: the answer ends with its format", "ignore_eos"
        )
    for name, wanted in (("bad_words", params.bad_words), ("allowed_token_ids", params.allowed_token_ids)):
        if wanted:
            raise InvalidRequest(
                f"{name} cannot be had with {constraint.param}: say in the format what is allowed", name
            )


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stop)}", "stop")
    if any(not text for text in stop):
        raise InvalidRequest("stop must not contain an empty string: it would match at once", "stop")
