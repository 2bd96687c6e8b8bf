"""From a request's predicted text to what the engine drafts from."""

from collections.abc import Sequence
from dataclasses import replace

from engine.client import EngineClient
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams


async def with_prediction(
    params: SamplingParams, engine: EngineClient, text: str, prompt_token_ids: Sequence[int]
) -> SamplingParams:
    """The parameters with a predicted text as tokens, as the model would write it behind the prompt.

    Raises:
        InvalidRequest: The server takes no predictions, or the text is longer than any answer.
    """
    if not text:
        return params
    model = engine.model
    if not model.takes_predictions:
        raise InvalidRequest(
            "prediction is not supported: this server is set to draft from no predictions; leave it out",
            "prediction",
        )
    token_ids = await engine.encode_continuation(text, prompt_token_ids)
    if len(token_ids) > model.max_model_len:
        raise InvalidRequest(
            f"prediction has {len(token_ids)} tokens, but the model's context holds {model.max_model_len}: "
            "send the part that the answer is to resemble",
            "prediction",
        )
    return replace(params, speculation=replace(params.speculation, prediction=tuple(token_ids)))
