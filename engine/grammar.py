"""Grammars: which tokens an answer of a prescribed format may go on with, told by llguidance.

A Matcher knows the committed tokens of one request and nothing else. What it says of a row of a draft it
finds out by sending a copy along the row's path, so that a rejected token leaves no trace.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from engine.errors import InvalidRequest
from engine.sampling_params import Constraint, ConstraintKind
from engine.token_tree import TokenTree

_KEPT_GRAMMARS = 64
_MAX_MESSAGE = 300
_MAX_SHOWN = 40
_LARGE = 16384
"""Characters; what is longer is compiled in a lane of its own."""


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """What a grammar has to know of the tokenizer.

    Attributes:
        tokens: The bytes of every token id.
        special_token_ids: Those that are markers and say nothing.
        eos_token_ids: Ids that end the model's turn; at least one.
        encode: The tokens in which the tokenizer writes a text.
    """

    tokens: Sequence[bytes]
    special_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    encode: Callable[[str], list[int]]


class Matcher:
    """Follows one answer through its grammar.

    Args:
        matcher: A fresh one of llguidance's, for this request alone.
        eos_token_ids: Ids that end the model's turn.
        param: The request field that the grammar comes from.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int], param: str) -> None:
        self._committed = matcher
        self._param = param
        self._eos_token_ids = eos_token_ids
        self._ahead: tuple[int, ...] = ()  # Draft tokens behind what is committed ...
        self._walker = matcher.deep_copy()  # ... and who has walked along them.
        self._masks: dict[tuple[int, ...], bytes | None] = {}
        self._num_followed = 0

    @property
    def num_followed(self) -> int:
        """Tokens of the answer, an EOS excepted, that the grammar has allowed."""
        return self._num_followed

    def masks(self, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        """Behind each path of draft tokens, a bit per token id (the lowest first): whether it may come next.

        None where the grammar does not allow the path itself, or where it ends the answer: no answer comes by
        there. EOS is allowed where the grammar may end. No bit is set where the grammar has become too
        complex to follow.
        """
        for path in paths:
            if path not in self._masks:
                self._masks[path] = self._mask(path)
        return [self._masks[path] for path in paths]

    def advance(self, run: Sequence[int]) -> bool:
        """Follows committed tokens; whether the grammar allows them."""
        is_end = bool(run) and run[-1] in self._eos_token_ids
        said = list(run[:-1] if is_end else run)
        num_legal = self._committed.try_consume_tokens(said) if said else 0
        is_legal = num_legal == len(said)
        self._num_followed += num_legal
        self._ahead, self._walker = (), self._committed.deep_copy()
        self._masks.clear()
        return is_legal and (not is_end or self._committed.is_accepting())

    def dead_end(self, text: str) -> InvalidRequest:
        """What to tell the client whose answer cannot go on behind a text, the one followed so far."""
        where = f"behind {text[-_MAX_SHOWN:]!r}" if text else "at its very beginning"
        if self._committed.is_error():
            fault = f"has become too complex to follow ({self._committed.get_error().splitlines()[0]})"
        else:
            forced = self._committed.compute_ff_bytes().decode("utf-8", "replace")
            demanded = repr(forced[:_MAX_SHOWN]) if forced else "what"
            fault = f"allows only {demanded}{' next, which' if forced else ''} no token of the model writes"
        return InvalidRequest(f"{self._param}: {where} the format {fault}: change it", self._param)

    def forced_tokens(self) -> tuple[int, ...]:
        """Tokens that write what the grammar leaves no choice about, as the tokenizer would split it."""
        self._go(())
        return tuple(self._walker.compute_ff_tokens())

    def pruned(self, tree: TokenTree) -> TokenTree:
        """A draft without the nodes that the grammar does not allow, and what hangs off them.

        Only for trees whose tokens were not drawn: which of drawn tokens are looked at must not depend on
        what they are.
        """
        number = {0: 0}
        for node, parent in enumerate(tree.parents, start=1):
            if parent in number and self._reaches(tree.path_tokens(node)):
                number[node] = len(number)
        kept = list(number)[1:]
        if len(kept) == len(tree):
            return tree
        return TokenTree(
            tuple(tree.tokens[node - 1] for node in kept),
            tuple(number[tree.parents[node - 1]] for node in kept),
            tree.proposal,
            probabilities=tuple(tree.probabilities[node - 1] for node in kept) if tree.probabilities else (),
        )

    def _mask(self, path: tuple[int, ...]) -> bytes | None:
        if path and path[-1] in self._eos_token_ids:
            return None
        if not self._go(path):
            return None
        # In its error state the library would say that EOS may come, which would end the answer anywhere.
        mask: bytes = self._walker.compute_bitmask()
        return bytes(len(mask)) if self._walker.is_error() else mask

    def _reaches(self, path: tuple[int, ...]) -> bool:
        """Whether the grammar allows a path; an EOS ends it, and has no place in the library's books."""
        if path and path[-1] in self._eos_token_ids:
            return self._go(path[:-1]) and self._walker.is_accepting()
        return self._go(path)

    def _go(self, path: tuple[int, ...]) -> bool:
        """Walks to the end of a path, or as far as it is allowed.

        A copy starts anew where the path leaves the one walked before: it costs a few microseconds, and the
        library does not roll back over every kind of token.
        """
        if path[: len(self._ahead)] != self._ahead:
            self._ahead, self._walker = (), self._committed.deep_copy()
        missing = list(path[len(self._ahead) :])
        if missing:
            taken = self._walker.try_consume_tokens(missing)
            self._ahead = path[: len(self._ahead) + taken]
        return len(self._ahead) == len(path)


class GrammarCompiler:
    """Turns constraints into matchers; safe to use from any thread.

    A schema of 20,000 characters takes some 0.1 seconds, one of 131,072 up to several: the library's time
    grows with the square of the properties that may be left out. So there are two lanes, and large formats
    hold up none but each other. In a lane one is compiled at a time, since equal ones come together, n to a
    call, and the engine needs its processors.

    Args:
        read_vocabulary: Reads the tokenizer's vocabulary, which takes a while and is done when the first
            constraint comes; or says why this model's answers cannot be constrained.
    """

    def __init__(self, read_vocabulary: Callable[[], GrammarVocabulary] | str) -> None:
        self._read_vocabulary = read_vocabulary
        self._lanes = threading.Lock(), threading.Lock()
        self._reading = threading.Lock()
        self._books = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._eos_token_ids: frozenset[int] = frozenset()
        self._compiled: OrderedDict[tuple[ConstraintKind, str], LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> Matcher:
        """A matcher for an answer that has not begun.

        Raises:
            InvalidRequest: The grammar is wrong, or asks for what cannot be enforced; it names the keyword.
        """
        key = constraint.kind, constraint.source
        with self._lanes[len(constraint.source) > _LARGE]:
            compiled = self._recall(key)
            if compiled is None:
                compiled = self._new(constraint)
                self._keep(key, compiled)
            return Matcher(compiled.deep_copy(), self._eos_token_ids, constraint.param)

    def _recall(self, key: tuple[ConstraintKind, str]) -> LLMatcher | None:
        with self._books:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def _keep(self, key: tuple[ConstraintKind, str], compiled: LLMatcher) -> None:
        with self._books:
            self._compiled[key] = compiled
            if len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)

    def _new(self, constraint: Constraint) -> LLMatcher:
        with self._reading:
            tokenizer = self._tokenizer or self._read_tokenizer(constraint.param)
        try:
            grammar = _grammar_text(constraint)
        except ValueError as error:
            raise _refused(constraint, str(error)) from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise _refused(constraint, matcher.get_error())
        return matcher

    def _read_tokenizer(self, param: str) -> LLTokenizer:
        if isinstance(self._read_vocabulary, str):
            raise InvalidRequest(f"{param}: {self._read_vocabulary}", param)
        vocabulary = self._read_vocabulary()
        self._eos_token_ids = vocabulary.eos_token_ids
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Spelled(vocabulary)), eos_token=sorted(vocabulary.eos_token_ids)
        )
        return self._tokenizer


class _Spelled:
    """A vocabulary under the names that llguidance looks for."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self.eos_token_id = min(vocabulary.eos_token_ids)
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _grammar_text(constraint: Constraint) -> str:
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON:
            text = _json_grammar(source)
        case ConstraintKind.REGEX:
            text = LLMatcher.grammar_from_regex(source)
        case ConstraintKind.CHOICE:
            text = grammar_from("choice", source)
        case ConstraintKind.GRAMMAR:
            text = grammar_from("grammar", source)
    return text


def _json_grammar(schema: str) -> str:
    """A schema's grammar, in one way to write each value.

    Python's json.dumps writes so, and so do most of the texts that models learnt from. All but the values
    themselves is forced then, and a model cannot lose itself in white space. The options are given as
    overrides, so that no key of a schema can loosen what is checked.
    """
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "item_separator": ", ",
            "key_separator": ": ",
            "whitespace_flexible": False,
            "coerce_one_of": False,
            "lenient": False,
        },
    )


def _refused(constraint: Constraint, found: str) -> InvalidRequest:
    """The library's finding in our words; behind its first line it repeats what was given."""
    first, *rest = found.strip().splitlines() or [""]
    faults = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    found = " ".join([first, *faults])
    _, is_unknown, keys = found.partition("Unimplemented keys: ")
    if is_unknown:
        names = ", ".join(map(repr, json.loads(keys)))
        found = f"the schema's keyword {names} cannot be enforced; leave it out or say it in another way"
    return InvalidRequest(f"{constraint.param}: {found[:_MAX_MESSAGE]}", constraint.param)
