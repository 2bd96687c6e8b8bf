"""From tokens to streamed text: whole characters only, and nothing that a stop string may still claim."""

import codecs
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import islice

from engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one answer, token by token, as it reads behind its prompt.

    The pieces joined are what decoding prompt and answer together shows behind the prompt, and every piece
    is final: bytes of a character are held until it is whole. The cost of a token does not depend on
    the length of the answer.

    Args:
        tokenizer: The model's.
        prompt_token_ids: What the answer continues; only its last few tokens matter.
        skip_special_tokens: Leave special tokens out of the text.
        shown_token_ids: Those that are shown all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown_token_ids: Sequence[int] = (),
    ) -> None:
        hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._hidden: Set[int] = hidden.difference(shown_token_ids)
        before = _last_visible(prompt_token_ids, self._hidden)
        self._stream: _ByteStream | _ContextStream = (
            _ByteStream(tokenizer, before) if tokenizer.is_bytewise else _ContextStream(tokenizer, before)
        )

    def push(self, token_id: int) -> str:
        """The text that a token completes; empty while a character is incomplete."""
        return "" if token_id in self._hidden else self._stream.push(token_id)

    def finish(self) -> str:
        """What is still held: U+FFFD for a character that the answer's end cuts."""
        return self._stream.finish()


# A character has at most four bytes and a visible token at least one.
_NUM_CONTEXT = 4


def _last_visible(token_ids: Sequence[int], hidden: Set[int]) -> list[int]:
    visible = (token_id for token_id in reversed(token_ids) if token_id not in hidden)
    return list(islice(visible, _NUM_CONTEXT))[::-1]


class _ByteStream:
    """Text of tokens whose bytes do not depend on their neighbours."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._begins_text = not before
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt of token ids may end inside a character, which the answer then completes. If it does not,
        # the replacement character is the prompt's.
        self._utf8.decode(b"".join(map(tokenizer.token_bytes, before)))
        self._prompt_is_cut = bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        if self._begins_text:
            self._begins_text = False
            return self._utf8.decode(self._tokenizer.leading_bytes(token_id))
        return self._behind_prompt(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        return self._behind_prompt(self._utf8.decode(b"", final=True))

    def _behind_prompt(self, text: str) -> str:
        if self._prompt_is_cut and text:
            self._prompt_is_cut = False
            return text.removeprefix(_REPLACEMENT)
        return text


class _ContextStream:
    """Text of tokens that only the backend can join: what a token adds to the few before it."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(before)
        self._shown = self._decode()
        self._num_held = 0

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        self._num_held += 1
        text = self._decode()
        if text.endswith(_REPLACEMENT) and self._num_held < _NUM_CONTEXT:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._decode())

    def _release(self, text: str) -> str:
        added = text[len(self._shown) :]
        self._token_ids = self._token_ids[-_NUM_CONTEXT:]
        self._shown = self._decode()
        self._num_held = 0
        return added

    def _decode(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Matched:
    """What a piece of text brought: the text that may go out, and the stop string that it completed."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Finds stop strings in text that comes piece by piece, and holds back only what may become one.

    Of the stop strings that one piece completes, the one that starts first wins, and of two that start
    together the one that ends first. A piece costs a pass over its own characters, whatever came before
    (Knuth, Morris and Pratt 1977), and next to nothing when no stop string can start in it.

    Args:
        stops: The stop strings, none empty.
        include_stop: Let the stop string itself out.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> Matched:
        """Takes the next piece.

        Args:
            text: The piece; what follows a stop string in it is dropped.
            may_stop: Whether a stop string that this piece completes counts.
        """
        if not self._held and self._first_chars.isdisjoint(text):
            return Matched(text)
        window = self._held + text
        matches: list[tuple[int, int, str]] = []
        for pattern in self._patterns:
            end = pattern.advance(text, may_stop=may_stop)
            if end is not None:
                end += len(self._held)
                matches.append((end - len(pattern.stop), end, pattern.stop))
        if matches:
            start, end, stop = min(matches)
            self._held = ""
            return Matched(window[: end if self._include_stop else start], stop)
        released = len(window) - max(pattern.num_matched for pattern in self._patterns)
        self._held = window[released:]
        return Matched(window[:released])

    def finish(self) -> str:
        """The text still held back, when the answer ends without completing a stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """One stop string, and how much of it the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # Entry n: the longest proper prefix of stop[:n + 1] that is also its suffix. Grown only as far as
        # the text ever matched, so that a long stop string costs nothing up front.
        self._borders = [0]

    def advance(self, text: str, *, may_stop: bool) -> int | None:
        """Where in `text` the stop string is first completed, as the index behind it."""
        index = 0
        while index < len(text):
            if not self.num_matched:
                index = text.find(self.stop[0], index)
                if index < 0:
                    break
            self._step(text[index])
            index += 1
            if self.num_matched == len(self.stop):
                self.num_matched = self._border(self.num_matched)
                if may_stop:
                    return index
        return None

    def _step(self, char: str) -> None:
        matched = self.num_matched
        while matched and self.stop[matched] != char:
            matched = self._border(matched)
        self.num_matched = matched + (self.stop[matched] == char)

    def _border(self, length: int) -> int:
        """The longest proper prefix of stop[:length] that is also its suffix."""
        while len(self._borders) < length:
            char = self.stop[len(self._borders)]
            border = self._borders[-1]
            while border and self.stop[border] != char:
                border = self._borders[border - 1]
            self._borders.append(border + (self.stop[border] == char))
        return self._borders[length - 1]
