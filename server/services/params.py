"""From a request's fields to the engine's SamplingParams."""

from collections.abc import Sequence

from engine.client import ModelInfo
from engine.errors import ContextTooLong, InvalidRequest
from engine.sampling_params import Acceptance, SamplingParams, SpeculationParams
from server.protocol.base import GenerationRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completion import CompletionRequest
from server.services.constraints import constraint_of

DEFAULT_COMPLETION_TOKENS = 16


def completion_params(
    request: CompletionRequest, prompt_len: int, model: ModelInfo, max_logprobs: int
) -> SamplingParams:
    """Parameters of a completion, its prompt's length given.

    Raises:
        InvalidRequest: A field is out of range.
        ContextTooLong: Prompt and answer do not fit.
    """
    max_tokens = request.max_tokens
    _check_prompt(prompt_len, max_tokens, model, request.names.prompt)
    _check_answer(request.names.max_tokens, max_tokens, prompt_len, model)
    _check_answer("min_tokens", request.min_tokens, prompt_len, model)
    if max_tokens is None:
        # The default is ours, not the client's wish: it yields to min_tokens and to the context's end.
        wanted_tokens = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens)
        max_tokens = min(wanted_tokens, model.max_model_len - prompt_len)
    _check_logprobs(request.logprobs, max_logprobs, "logprobs")
    _check_logprobs(request.prompt_logprobs, max_logprobs, "prompt_logprobs")
    wanted = (request.prompt_logprobs, request.logprobs if request.echo else None)
    prompt_logprobs = max((count for count in wanted if count is not None), default=None)
    return _params(request, model, max_tokens, request.logprobs, prompt_logprobs)


def chat_params(
    request: ChatCompletionRequest, prompt_len: int, model: ModelInfo, max_logprobs: int
) -> SamplingParams:
    """Parameters of a chat completion, its prompt's length given.

    Raises:
        InvalidRequest: A field is out of range.
        ContextTooLong: Prompt and answer do not fit.
    """
    param, max_tokens = request.names.max_tokens, request.max_completion_tokens
    if max_tokens is None:
        param, max_tokens = "max_tokens", request.max_tokens
    _check_prompt(prompt_len, max_tokens, model, request.names.prompt)
    _check_answer(param, max_tokens, prompt_len, model)
    _check_answer("min_tokens", request.min_tokens, prompt_len, model)
    _check_logprobs(request.top_logprobs, max_logprobs, "top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    _check_logprobs(request.prompt_logprobs, max_logprobs, "prompt_logprobs")
    return _params(request, model, max_tokens, logprobs, request.prompt_logprobs)


def _check_prompt(prompt_len: int, max_tokens: int | None, model: ModelInfo, param: str) -> None:
    """Refuses a prompt that leaves no room for an answer, or, where none is wanted, does not fit itself."""
    if prompt_len + (max_tokens != 0) <= model.max_model_len:
        return
    # Clients know by these words what to do: "prompt is too long", "this model's maximum context length is".
    raise ContextTooLong(
        f"the prompt is too long: this model's maximum context length is {model.max_model_len} tokens, the "
        f"answer included, but there are {prompt_len} in the {param}; shorten the {param}",
        param,
    )


def _check_answer(param: str, count: int | None, prompt_len: int, model: ModelInfo) -> None:
    """Refuses to promise more tokens than the prompt leaves room for."""
    room = model.max_model_len - prompt_len
    if count is None or count <= room:
        return
    raise ContextTooLong(
        f"this model's maximum context length is {model.max_model_len} tokens, of which the prompt takes "
        f"{prompt_len} and leaves {room}, but {param} is {count}; lower {param} or shorten the prompt",
        param,
    )


def check_token_ids(token_ids: Sequence[int], model: ModelInfo, param: str) -> None:
    """Refuses ids that the model does not have."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{param} has token id {token_id}; the model's are 0 to {model.vocab_size - 1}", param
            )


def _check_logprobs(count: int | None, limit: int, param: str) -> None:
    if count is not None and count > limit:
        raise InvalidRequest(f"{param} is at most {limit} on this server, got {count}", param)


def _params(
    request: GenerationRequest,
    model: ModelInfo,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    check_token_ids(request.stop_token_ids, model, "stop_token_ids")
    check_token_ids(request.allowed_token_ids, model, "allowed_token_ids")
    check_token_ids([token_id for token_id, _ in request.logit_bias], model, "logit_bias")
    acceptance = request.speculation.acceptance
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),  # -1 is off too, as in other servers
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
        allowed_token_ids=tuple(request.allowed_token_ids),
        seed=request.seed,
        stop=request.stop,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
        constraint=constraint_of(request),
        priority=request.priority,
        speculation=SpeculationParams(
            enabled=request.speculation.enabled,
            num_draft_tokens=request.speculation.num_draft_tokens,
            acceptance=None if acceptance is None else Acceptance(acceptance),
        ),
    )
    return model.acceptance.resolved(params)
