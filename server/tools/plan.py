"""What the tools of one request mean: for the prompt, for the grammar, and for reading the answer."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.client import ChatMessage, EngineClient
from engine.errors import InvalidRequest
from engine.sampling_params import Constraint, ConstraintKind, SamplingParams
from server.protocol.chat import ChatCompletionRequest
from server.protocol.tools import Function, NamedTool
from server.services.generation import Choice
from server.tools.conversation import described, for_tools, without_tools
from server.tools.formats import FORMATS, ToolFormat, ToolParserName, format_of, knows_tools
from server.tools.grammar import CallsGrammar, Mark
from server.tools.parser import ToolCallParser

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How the answers to one request are written and read.

    Attributes:
        tool_format: How calls are written.
        names: The functions that may be called.
        max_calls: Calls of an answer at most; None is no limit.
        constraint: What the answers must obey, if calls are enforced.
        shown_token_ids: Marks that the text must show though they may be special tokens.
    """

    tool_format: ToolFormat
    names: frozenset[str]
    max_calls: int | None
    constraint: Constraint | None
    shown_token_ids: tuple[int, ...]

    def applied(self, params: SamplingParams) -> SamplingParams:
        """A request's parameters with what its tools ask for."""
        return replace(
            params, constraint=self.constraint or params.constraint, shown_token_ids=self.shown_token_ids
        )

    def parser(self) -> ToolCallParser:
        """Reads one answer."""
        return ToolCallParser(self.tool_format, self.names, self.max_calls)

    def call_id(self, choice: Choice, number: int) -> str:
        """The id of an answer's call: a function of prompt, seed and place, as the text is."""
        key = f"{choice.prompt_token_ids} {choice.params.seed} {choice.params.choice} {number}"
        value = int.from_bytes(hashlib.sha256(key.encode()).digest())
        letters = []
        for _ in range(self.tool_format.id_length):
            value, place = divmod(value, len(_ALPHABET))
            letters.append(_ALPHABET[place])
        return self.tool_format.id_prefix + "".join(letters)


class ToolPlanner:
    """Makes plans.

    Args:
        engine: Its model's chat template says how the model writes calls.
        parser_name: The format to expect instead.
    """

    def __init__(self, engine: EngineClient, parser_name: ToolParserName | None) -> None:
        template = engine.model.tool_template or engine.model.chat_template
        self._engine = engine
        # A model may have one template for conversations with tools and another for all others.
        self._knows_tools = knows_tools(template)
        self._knows_calls = knows_tools(engine.model.chat_template)
        self._format = FORMATS[parser_name] if parser_name else format_of(template)

    def conversation(
        self, request: ChatCompletionRequest
    ) -> tuple[Sequence[ChatMessage], Sequence[Mapping[str, object]]]:
        """Messages and tools as the model's chat template takes them."""
        functions = [] if request.tool_choice == "none" else [tool.function for tool in request.tools]
        if self._knows_tools if functions else self._knows_calls:
            return for_tools(request.messages), [described(function) for function in functions]
        return without_tools(request.messages, functions, self._format), []

    async def plan(self, request: ChatCompletionRequest) -> ToolPlan | None:
        """The plan of a request; None if no tool may be used.

        Raises:
            InvalidRequest: The choice names a function that there is not, or the answer cannot have both its
                format and calls.
        """
        choice = request.tool_choice
        if not request.tools or choice == "none":
            return None
        functions = [tool.function for tool in request.tools]
        if isinstance(choice, NamedTool):
            functions = [each for each in functions if each.name == choice.function.name]
            if not functions:
                raise InvalidRequest(
                    f"tool_choice names the function {choice.function.name!r}, but tools does not have it",
                    "tool_choice",
                )
        shape = self._format
        opening, closing = await self._mark(shape.opening), await self._mark(shape.closing)
        middle = await self._mark(shape.arguments_mark) if shape.arguments_mark else None
        is_parallel = request.parallel_tool_calls and not isinstance(choice, NamedTool)
        grammar = CallsGrammar(self._format, opening, closing, functions, is_parallel, middle)
        of_id = await self._mark(shape.id_mark)
        marks = (opening.token_id, closing.token_id, middle.token_id if middle else None, of_id.token_id)
        return ToolPlan(
            self._format,
            frozenset(function.name for function in functions),
            None if is_parallel else 1,
            await asyncio.to_thread(_constraint, request, grammar, functions),
            tuple(token_id for token_id in marks if token_id is not None),
        )

    async def _mark(self, text: str) -> Mark:
        token_ids = await self._engine.encode(text, add_special_tokens=False) if text else []
        return Mark(text, token_ids[0] if len(token_ids) == 1 else None)


def _constraint(
    request: ChatCompletionRequest, grammar: CallsGrammar, functions: Sequence[Function]
) -> Constraint | None:
    if request.tool_choice not in (None, "auto"):
        return Constraint(ConstraintKind.GRAMMAR, grammar.required(), "tools")
    wanted = request.response_format
    if request.structured_outputs is not None:
        raise InvalidRequest(
            "structured_outputs cannot be had with tools that the model may or may not use: "
            f"set tool_choice, or give the format as {request.names.response_format}",
            "structured_outputs",
        )
    if wanted is not None and wanted.type != "text":
        schema = wanted.json_schema.schema_ if wanted.json_schema else {}
        return Constraint(ConstraintKind.GRAMMAR, grammar.or_json({"type": "object", **schema}), "tools")
    if any(function.strict for function in functions):
        return Constraint(ConstraintKind.GRAMMAR, grammar.free(), "tools")
    return None
