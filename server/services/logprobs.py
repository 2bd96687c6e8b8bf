"""Log probabilities in the two formats of the API."""

import codecs
import math
from collections.abc import Iterable, Sequence

from engine.outputs import TokenLogprob
from server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from server.protocol.completion import CompletionLogprobs
from server.protocol.usage import PromptLogprob

# JSON has no minus infinity; this is what OpenAI sends instead.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Chat's format."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=entry.token,
                logprob=_finite(entry.logprob),
                bytes=list(entry.bytes),
                top_logprobs=[
                    ChatTopLogprob(token=top.token, logprob=_finite(top.logprob), bytes=list(top.bytes))
                    for top in entry.top
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(
    entries: Iterable[TokenLogprob | None], num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """A prompt's in the format of vLLM: each token and the likeliest ones at its place, by id."""
    return [None if entry is None else _ranked(entry, num_top) for entry in entries]


def _ranked(entry: TokenLogprob, num_top: int) -> dict[str, PromptLogprob]:
    assert entry.rank is not None, "the tokens of prompts are ranked"
    own = (entry.rank, entry)
    return {
        str(token.token_id): PromptLogprob(
            logprob=_finite(token.logprob), rank=rank, decoded_token=token.token
        )
        for rank, token in (own, *enumerate(entry.top[:num_top], start=1))
    }


class TextOffsets:
    """Where each token begins in the text, counted in characters, even where tokens split characters.

    Args:
        start: Offset of the first token; negative if the tokens begin with some, such as a BOS, that the
            text does not show.
    """

    def __init__(self, start: int = 0) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, token_bytes: bytes) -> int:
        """The next token's offset."""
        offset = max(0, self._offset)
        self._offset += len(self._decoder.decode(token_bytes))
        return offset


class CompletionLogprobsBuilder:
    """Builds the format of completions: parallel lists.

    Args:
        offsets: Where the tokens stand.
        with_top: Whether alternatives were asked for.
    """

    def __init__(self, offsets: TextOffsets, *, with_top: bool) -> None:
        self._offsets = offsets
        self._with_top = with_top

    def build(
        self, entries: Sequence[TokenLogprob | None], unpredicted: Iterable[bytes] = ()
    ) -> CompletionLogprobs:
        """The format for the next tokens.

        Args:
            entries: One per token; None where there was nothing to predict it from, as at a prompt's start.
            unpredicted: Bytes of the tokens whose entry is None, in order.
        """
        rest = iter(unpredicted)
        tokens = [next(rest) if entry is None else entry.bytes for entry in entries]
        return CompletionLogprobs(
            tokens=[_name(token) for token in tokens],
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
            top_logprobs=[entry and _top(entry) for entry in entries] if self._with_top else None,
            text_offset=[self._offsets.place(token) for token in tokens],
        )


def join_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Several stretches in a row."""
    tops = [part.top_logprobs for part in parts]
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=None if None in tops else [top for part in tops if part is not None for top in part],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _top(entry: TokenLogprob) -> dict[str, float]:
    return {_name(candidate.bytes): _finite(candidate.logprob) for candidate in (*entry.top, entry)}


def _name(token: bytes) -> str:
    """A token's text, or its bytes where they are no whole characters: those would all read alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
