from collections.abc import Sequence

from engine.core.request import Request
from engine.core.stopping import StopRules
from engine.sampling_params import SamplingParams

EOS = 0


def make_request(
    request_id: str, tokens: Sequence[int], *, max_tokens: int = 1000, params: SamplingParams | None = None
) -> Request:
    """A request with the given prompt; EOS is token 0."""
    return Request(
        request_id=request_id,
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        params=params or SamplingParams(),
        stop_rules=StopRules(frozenset({EOS}), frozenset(), False, 0, max_tokens),
    )


def prompt(length: int, start: int = 1) -> list[int]:
    """Consecutive token ids, none of which is EOS."""
    return list(range(start, start + length))
