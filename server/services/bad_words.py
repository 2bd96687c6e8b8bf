"""From words that an answer must not have to the token sequences that spell them."""

from collections.abc import Sequence
from dataclasses import replace

from engine.client import EngineClient
from engine.errors import InvalidRequest
from engine.sampling_params import MAX_BAD_WORDS, SamplingParams


async def with_bad_words(
    params: SamplingParams, engine: EngineClient, words: Sequence[str]
) -> SamplingParams:
    """The parameters with each word's tokens, as it is spelt by itself and behind a space.

    Raises:
        InvalidRequest: There are too many.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words are at most {MAX_BAD_WORDS}, got {len(words)}", "bad_words")
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            token_ids = await engine.encode(text, add_special_tokens=False)
            if token_ids:
                spellings[tuple(token_ids)] = None
    return replace(params, bad_words=tuple(spellings)) if spellings else params
