"""The grammar of an answer that calls functions, in Lark's notation as llguidance reads it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from server.protocol.tools import Function
from server.tools.formats import ToolFormat

# As in engine/grammar.py; here the schemas are parts of a grammar and carry the style with them.
_JSON_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}
_ANY_OBJECT: dict[str, object] = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of a format as a grammar may name it.

    Attributes:
        text: What it reads.
        token_id: The token that is the whole mark, if there is one.
    """

    text: str
    token_id: int | None = None

    def term(self, space: str) -> str:
        """The mark and the white space behind it."""
        if self.token_id is None:
            return _literal(self.text + space)
        return f"<[{self.token_id}]> {_literal(space)}"


@dataclass(frozen=True, slots=True)
class CallsGrammar:
    """Builds grammars of one format.

    Attributes:
        tool_format: How calls are written.
        opening: Its opening mark.
        closing: Its closing mark.
        functions: What may be called.
        is_parallel: Whether an answer may have several calls.
        middle: The mark between a name and its arguments, if the format has one.
    """

    tool_format: ToolFormat
    opening: Mark
    closing: Mark
    functions: Sequence[Function]
    is_parallel: bool
    middle: Mark | None = None

    def required(self) -> str:
        """At least one call, and nothing else."""
        return f"start: calls\n{self._calls()}"

    def or_json(self, schema: dict[str, object]) -> str:
        """Calls, or JSON that fits a schema."""
        return f"start: calls | format\nformat: %json {_styled(schema)}\n{self._calls()}"

    def free(self) -> str:
        """Any text, and calls in it; a call that is begun obeys its function's schema where it is strict."""
        if not self.tool_format.opening:
            return f"start: calls | TEXT?\nTEXT: /[^\\x7b\\x5b](?s:.*)/\n{self._calls(only_strict=True)}"
        head = f"head[lazy]: TEXT {_literal(self.opening.text)}\n"
        begin = "head"
        if self.opening.token_id is not None:
            begin = f"(head | TEXT <[{self.opening.token_id}]>)"
        body = f"{begin} {_literal(self.tool_format.after_opening)} {self._body()}"
        times = "*" if self.is_parallel else "?"
        rules = f"start: tool{times} TEXT\ntool: {body}\n{head}TEXT: /(?s:.*)/\n"
        return rules + self._functions(only_strict=True)

    def _calls(self, *, only_strict: bool = False) -> str:
        shape = self.tool_format
        opening = self.opening.term(shape.after_opening) if shape.opening else ""
        body, more = self._body(), ""
        if self.is_parallel and not shape.is_list:
            more = f" ({_literal(shape.separator)} call)*"
        return f"calls: call{more}\ncall: {opening} {body}\n{self._functions(only_strict=only_strict)}"

    def _body(self) -> str:
        """What stands behind the opening mark."""
        shape = self.tool_format
        if shape.is_list:
            more = f"({_literal(shape.separator)} function)*" if self.is_parallel else ""
            return f'"[" function {more} "]"'
        if not shape.closing:
            return "function"
        return f"function {_literal(shape.before_closing)} {self.closing.term('')}"

    def _functions(self, *, only_strict: bool = False) -> str:
        names = [f"function_{number}" for number in range(len(self.functions))]
        rules = [f"function: {' | '.join(names)}"]
        key = self.tool_format.arguments_key
        for name, function in zip(names, self.functions, strict=True):
            schema = _ANY_OBJECT if only_strict and not function.strict else _schema(function)
            if self.middle is not None:
                rules.append(
                    f"{name}: {_literal(function.name)} {self.middle.term('')} %json {_styled(schema)}"
                )
                continue
            head = f'{{"name": {json.dumps(function.name)}, "{key}": '
            rules.append(f'{name}: {_literal(head)} %json {_styled(schema)} "}}"')
        return "\n".join(rules) + "\n"


def _schema(function: Function) -> dict[str, object]:
    if function.parameters is None:
        return _NO_ARGUMENTS
    return _ANY_OBJECT | function.parameters


def _styled(schema: dict[str, object]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_STYLE})


def _literal(text: str) -> str:
    """A text as a term; nothing for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""
