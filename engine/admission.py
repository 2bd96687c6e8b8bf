"""Admission: what a prompt and its parameters must satisfy before they become a Request."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.acceptance import ANY_LOSSLESS, AcceptancePolicy
from engine.core.request import Request
from engine.core.stopping import StopRules
from engine.errors import ContextTooLong, InvalidRequest
from engine.grammar import GrammarCompiler
from engine.sampling_params import SEED_MAX, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine checks a request against.

    Attributes:
        max_model_len: Tokens that prompt and answer share.
        vocab_size: Token ids are below it.
        eos_token_ids: Ids that end the model's turn.
        max_num_queued: Requests that may wait.
        grammars: Which formats it may ask for; any thread may compile one ahead of a request.
        acceptance: Which acceptance rules it may ask for.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_num_queued: int
    grammars: GrammarCompiler
    acceptance: AcceptancePolicy = ANY_LOSSLESS


def admit(
    request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, limits: EngineLimits
) -> Request:
    """Makes a Request, drawing a seed where none was given.

    Raises:
        InvalidRequest: The prompt is empty, an id is outside the vocabulary, or the acceptance rule cannot be
            had.
        ContextTooLong: Prompt and answer do not fit the context.
    """
    if not prompt_token_ids:
        raise InvalidRequest("the prompt is empty: there is nothing to continue", "prompt")
    _check_ids("prompt", prompt_token_ids, limits.vocab_size)
    _check_ids("logit_bias", [token for token, _ in params.logit_bias], limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids, limits.vocab_size)
    _check_ids("bad_words", [token for word in params.bad_words for token in word], limits.vocab_size)
    _check_ids("prediction", params.speculation.prediction, limits.vocab_size)
    room = limits.max_model_len - len(prompt_token_ids)
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted > room:
        raise ContextTooLong(
            f"the context holds {limits.max_model_len} tokens, but the prompt has {len(prompt_token_ids)} "
            f"and {wanted} more are to be generated: shorten the prompt or lower max_tokens",
            "prompt" if room < 1 else "max_tokens",
        )
    params = limits.acceptance.resolved(params)
    if params.seed is None:
        params = replace(params, seed=secrets.randbelow(SEED_MAX))
    return Request(
        request_id=request_id,
        token_ids=list(prompt_token_ids),
        num_prompt_tokens=len(prompt_token_ids),
        params=params,
        stop_rules=StopRules(
            eos_token_ids=limits.eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            # Where a format leaves nothing else to say, min_tokens yields in the sampler: what stops, stops.
            min_tokens=params.min_tokens if params.constraint is None else 0,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
        ),
    )


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} in {field} is outside 0 to {vocab_size - 1}", field)
