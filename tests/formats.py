"""Answers of random formats, schemas and calls of functions, and whether they are what they should be."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema

from engine.llm import LLM, Completion
from engine.model.loaded_model import LoadedModel
from engine.outputs import FinishReason
from engine.sampling_params import Constraint, ConstraintKind, SamplingParams
from server.protocol.tools import Function
from server.tools.formats import FORMATS
from server.tools.grammar import CallsGrammar, Mark
from server.tools.parser import ToolCallParser
from tests.engines import build_llm, load_tiny
from tests.schemas import random_schema, wide_schema
from tests.tiny import EOS

PROMPT = list(b"one two one two")
MAX_MODEL_LEN = 512
OPTIONS = (
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.4, top_p=0.9, logprobs=2),
    SamplingParams(seed=3, top_k=5, min_p=0.05, repetition_penalty=1.3),
    SamplingParams(seed=4, frequency_penalty=0.7, presence_penalty=0.4, choice=2),
    SamplingParams(seed=5, logit_bias=((ord("a"), 8.0), (ord("{"), -100.0), (EOS, -100.0))),
    SamplingParams(temperature=0, min_tokens=25, logprobs=0),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request with a format.

    Attributes:
        name: For the report of a fault.
        params: What to ask.
        check: Raises if a whole answer is not of the format.
    """

    name: str
    params: SamplingParams
    check: Callable[[str], object]


def schema_case(number: int) -> Case:
    """An answer that a schema describes: narrow and wide ones in turn."""
    schema = random_schema(number) if number % 2 else wide_schema(number)
    constraint = Constraint(ConstraintKind.JSON, json.dumps(schema), "response_format")
    return Case(
        f"schema {number}",
        _asked(number, constraint),
        lambda text: jsonschema.validate(json.loads(text), schema),
    )


def tool_case(number: int) -> Case:
    """An answer that calls functions: each format in turn, required calls, and free text with strict ones."""
    chance = random.Random(f"tools {number}")
    tool_format = [*FORMATS.values()][number % len(FORMATS)]
    functions = [
        Function(name=f"f{place}", parameters=_parameters(number + place), strict=True)
        for place in range(chance.randint(1, 3))
    ]
    is_parallel = bool(number % 3)
    opening, closing = Mark(tool_format.opening), Mark(tool_format.closing)
    middle = Mark(tool_format.arguments_mark) if tool_format.arguments_mark else None
    grammar = CallsGrammar(tool_format, opening, closing, functions, is_parallel, middle)
    is_free = number % 4 == 0
    source = grammar.free() if is_free else grammar.required()

    def check(text: str) -> None:
        parser = ToolCallParser(tool_format, {function.name for function in functions})
        calls: dict[int, list[str]] = {}
        content = ""
        for parsed in (parser.feed(text), parser.finish()):
            content += parsed.content
            for call in parsed.calls:
                calls.setdefault(call.index, [call.name or "", ""])[1] += call.arguments
        schemas = {function.name: function.parameters for function in functions}
        for name, arguments in calls.values():
            jsonschema.validate(json.loads(arguments), schemas[name])
        if not is_free:
            assert calls
            assert not content
            assert is_parallel or len(calls) == 1

    constraint = Constraint(ConstraintKind.GRAMMAR, source, "tools")
    # Free text ends when it likes, which is never for some models.
    params = replace(_asked(number, constraint), max_tokens=120 if is_free or is_parallel else None)
    return Case(f"tools {number} ({tool_format.name})", params, check)


def _parameters(number: int) -> dict[str, object]:
    schema = random_schema(number)
    definitions = schema.pop("$defs")
    return {
        "type": "object",
        "properties": {"x": schema, "y": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _asked(number: int, constraint: Constraint) -> SamplingParams:
    options = OPTIONS[number % len(OPTIONS)]
    return replace(options, constraint=constraint, seed=None if options.is_greedy else number)


@cache
def target() -> LoadedModel:
    """The model that answers."""
    return load_tiny(max_model_len=MAX_MODEL_LEN)


def engine(method: str = "none") -> LLM:
    """An engine with room for a batch of long answers."""
    return build_llm(method, target=target(), num_kv_blocks=4096, max_num_seqs=24)


def answers(llm: LLM, cases: Sequence[Case]) -> list[Completion]:
    """What it says to each."""
    return llm.generate([PROMPT] * len(cases), [case.params for case in cases])


def faults(cases: Sequence[Case], found: Sequence[Completion], plain: Sequence[Completion]) -> list[str]:
    """Whole answers that are not of their format, answers that failed, and those unlike the plain ones."""
    wrong = []
    for case, answer, expected in zip(cases, found, plain, strict=True):
        if (answer.text, answer.token_ids, answer.finish_reason) != (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        ):
            wrong.append(f"{case.name}: {answer.text!r} instead of {expected.text!r}")
            continue
        if answer.finish_reason is FinishReason.LENGTH:
            continue  # Cut, and so no whole answer.
        try:
            assert answer.finish_reason is FinishReason.STOP, answer.finish_reason
            case.check(answer.text)
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{case.name}: {answer.text!r}: {str(error).splitlines()[:1]}")
    return wrong


def whole(found: Sequence[Completion]) -> int:
    """Answers that ended by themselves."""
    return sum(answer.finish_reason is FinishReason.STOP for answer in found)


def cases(numbers: Sequence[int], make: Callable[[int], Any]) -> list[Case]:
    """Several of a kind."""
    return [make(number) for number in numbers]
