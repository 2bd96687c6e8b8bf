"""Tokenizer: the model's tokenizer as the engine uses it, with the exact bytes of every token."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from engine.chat_options import DEFAULT_CHAT, ChatOptions
from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequest, ModelNotSupported
from engine.infill import Infill, find_markers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Tokens that decide how a text behind them is split; words of most vocabularies are shorter.
_NUM_CONTEXT = 16
# A character that merges with nothing behind it.
_LEAD = "\u263a"
# What transformers calls a model's templates, where it has several.
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """A fast tokenizer behind a narrow, thread-safe face.

    The backend's truncation and padding are switched off here once and nothing changes the backend later,
    so encoding in worker threads and decoding on the engine's thread need no lock. Decoding never goes
    through transformers' clean-up of spaces, which would take back text that was already streamed.

    Args:
        tokenizer: A tokenizer of transformers with a Rust backend.
        chat_template: Jinja source to use instead of the model's own template.

    Raises:
        ModelNotSupported: The tokenizer has no Rust backend.
        StartupError: The chat template does not parse.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        if not tokenizer.is_fast:
            raise ModelNotSupported(
                f"{type(tokenizer).__name__} has no fast (Rust) form, which Outrider needs: "
                "convert it to a tokenizer.json with transformers and serve that folder"
            )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
        sources = _template_sources(tokenizer) if chat_template is None else {_DEFAULT: chat_template}
        templates = {name: ChatTemplate(tokenizer, source) for name, source in sources.items() if source}
        self._chat_template = templates.get(_DEFAULT)
        self._tool_template = templates.get(_WITH_TOOLS)
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        }
        steps = _decoder_steps(self._backend.decoder)
        self._spell = _spelling(steps)
        self._strips_start = any(
            step["type"] == "Strip" or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
            for step in steps
        )
        self._bytes: dict[int, bytes] = {}
        self._infill = find_markers(self._backend.token_to_id)
        self._bos_token_id = tokenizer.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be turned into prompts."""
        return self._chat_template is not None

    @property
    def is_bytewise(self) -> bool:
        """Whether a text is its tokens' bytes strung together, as in byte-level BPE and sentencepiece.

        Otherwise (WordPiece, BPE with word ends) a token's text depends on its neighbours.
        """
        return self._spell is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: The text holds half of a surrogate pair, which no encoding can express.
        """
        return self._encode(text, add_special_tokens, "prompt")

    def encode_continuation(self, text: str, before: Sequence[int]) -> list[int]:
        """Token ids of a text as the model would write it behind other tokens.

        Where the tokens of the text would merge with those before it, which stand, it is encoded by itself.

        Raises:
            InvalidRequest: The text holds half of a surrogate pair, which no encoding can express.
        """
        lead = self.decode(before[-_NUM_CONTEXT:], skip_special_tokens=False)
        lead_ids = self._encode(lead, False, "prediction")
        token_ids = self._encode(lead + text, False, "prediction")
        if token_ids[: len(lead_ids)] == lead_ids:
            return token_ids[len(lead_ids) :]
        return self._encode(text, False, "prediction")

    def encode_infill(self, before: str, behind: str) -> Infill:
        """The texts around a gap as a prompt for models that fill it.

        Raises:
            InvalidRequest: The model knows no gaps, or a text holds half of a surrogate pair.
        """
        if self._infill is None:
            raise InvalidRequest(
                "suffix is not supported: the model has no tokens for filling in the middle; leave it out",
                "suffix",
            )
        encoded = self._infill.around(
            self._encode(before, False, "prompt"), self._encode_inside(behind, "suffix")
        )
        lead = [token for token in self.encode("")[:1] if token == self._bos_token_id]
        return Infill((*lead, *encoded.token_ids), encoded.end_token_ids)

    def _encode_inside(self, text: str, param: str) -> list[int]:
        """A text that does not begin anew, so that sentencepiece puts no space in front of it."""
        if not self._strips_start:
            return self._encode(text, False, param)
        lead_ids = self._encode(_LEAD, False, param)
        return self._encode(_LEAD + text, False, param)[len(lead_ids) :]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids, with U+FFFD where bytes are no character."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        visible = [token_id for token_id in token_ids if token_id not in hidden]
        if not self.is_bytewise or not visible:
            return self._backend_text(visible)
        parts = [self.leading_bytes(visible[0]), *map(self.token_bytes, visible[1:])]
        return b"".join(parts).decode("utf-8", "replace")

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; empty without one."""
        return self._chat_template.source if self._chat_template else ""

    @property
    def tool_template(self) -> str:
        """The source of the template for conversations with tools; empty if there is none of its own."""
        return self._tool_template.source if self._tool_template else ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: ChatOptions = DEFAULT_CHAT,
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant is to speak or go on; see EngineClient.

        Raises:
            InvalidRequest: There is no template, or it refuses or would leave out some of the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "the model has no chat template: use /v1/completions, "
                "or start the server with --chat-template",
                "messages",
            )
        template = (self._tool_template if tools else None) or self._chat_template
        # The template writes the special tokens itself.
        return self._encode(template.render(messages, tools, options), False, "messages")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text it does not begin; empty for ids outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spelled(token_id)
        return found

    def spelling(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token adds to the text that they make together."""
        return [*map(self.leading_bytes, token_ids[:1]), *map(self.token_bytes, token_ids[1:])]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where they are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def leading_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that begins a text: sentencepiece drops the space it put in front."""
        raw = self.token_bytes(token_id)
        return self._backend_text([token_id]).encode() if self._strips_start and raw[:1] == b" " else raw

    def _spelled(self, token_id: int) -> bytes:
        if self._spell is None:
            return self._backend_text([token_id]).encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spell(token)

    def _backend_text(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} holds half of a surrogate pair, U+{ord(text[error.start]):04X}, "
                f"at character {error.start}: send whole characters",
                param,
            ) from error
        # A batch of one, because only batches are encoded without Python's global lock: a text of some
        # megabytes takes seconds, in which the event loop and the engine must go on.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def _template_sources(tokenizer: PreTrainedTokenizerBase) -> dict[str, str | None]:
    """The templates that are used, by name; others that a model may have are for other purposes."""
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        return {name: template.get(name) for name in (_DEFAULT, _WITH_TOOLS)}
    return {_DEFAULT: template}


def _decoder_steps(decoder: object) -> list[dict[str, object]]:
    """The steps of a backend's decoder, as its tokenizer.json would list them."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())  # type: ignore[arg-type]
    steps: list[dict[str, object]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _spelling(steps: Sequence[Mapping[str, object]]) -> Callable[[str], bytes] | None:
    """How a vocabulary entry spells bytes, where that does not depend on its neighbours."""
    types = [step["type"] for step in steps]
    if types[:1] == ["ByteLevel"] and set(types[1:]) <= {"Fuse"}:
        return _byte_level_spelling()
    if not types or not set(types) <= _SENTENCEPIECE_STEPS:
        return None
    # Behind Fuse a step sees the whole text: only taking spaces off its start stays a matter of one token.
    fused = types.index("Fuse") if "Fuse" in types else len(types)
    replaced: list[tuple[str, str]] = []
    for index, step in enumerate(steps):
        if step["type"] == "Strip" and (index < fused or step["content"] != " " or step["stop"] != 0):
            return None
        if step["type"] == "Metaspace":
            replaced.append((str(step["replacement"]), " "))
        if step["type"] == "Replace":
            pattern = step["pattern"]
            if index > fused or not isinstance(pattern, dict) or "String" not in pattern:
                return None
            replaced.append((pattern["String"], str(step["content"])))
    return _sentencepiece_spelling(replaced, byte_fallback="ByteFallback" in types)


def _byte_level_spelling() -> Callable[[str], bytes]:
    """GPT-2's alphabet (Radford et al. 2019, encoder.py): a printable stand-in for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    values = {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }

    def spell(token: str) -> bytes:
        # A token with any other character in it, such as an added one, is plain text.
        if all(char in values for char in token):
            return bytes(values[char] for char in token)
        return token.encode()

    return spell


def _sentencepiece_spelling(
    replaced: Iterable[tuple[str, str]], *, byte_fallback: bool
) -> Callable[[str], bytes]:
    """Pieces of text with a stand-in for the space, and <0xNN> for bytes that have no piece."""
    pairs = tuple(replaced)

    def spell(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for pattern, content in pairs:
            token = token.replace(pattern, content)
        return token.encode()

    return spell
