"""Random schemas and functions under every method: valid, and the same as without speculation.

A few of each here; `python -m tests.bench.formats` takes hundreds.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from engine.grammar import Matcher
from engine.llm import Completion
from engine.outputs import FinishReason
from tests.engine.answers import assert_clean
from tests.engines import HEADS, METHODS, TREES
from tests.formats import Case, answers, engine, faults, schema_case, tool_case, whole

EVERY_METHOD = (*METHODS, *TREES, *HEADS)
SCHEMAS, TOOLS = 4, 2


@cache
def plainly(number: int) -> tuple[tuple[Case, ...], tuple[Completion, ...]]:
    """The cases of one method, and what the target alone says to them."""
    asked = [schema_case(1000 + number * SCHEMAS + place) for place in range(SCHEMAS)]
    asked += [tool_case(1000 + number * TOOLS + place) for place in range(TOOLS)]
    return tuple(asked), tuple(answers(engine(), asked))


@pytest.mark.parametrize("number", range(len(EVERY_METHOD)), ids=EVERY_METHOD)
def test_answers_fit_and_no_method_changes_them(number: int) -> None:
    asked, plain = plainly(number)
    assert faults(asked, plain, plain) == []
    llm = engine(EVERY_METHOD[number])
    found = answers(llm, asked)
    assert faults(asked, found, plain) == []
    assert whole(found) > len(asked) / 2
    assert sum(answer.speculation.num_accepted_tokens for answer in found) > 10
    assert_clean(llm)


def test_a_format_that_is_not_enforced_would_be_found() -> None:
    asked, _ = plainly(0)
    free = [replace(case, params=replace(case.params, constraint=None, max_tokens=40)) for case in asked]
    said = [replace(answer, finish_reason=FinishReason.STOP) for answer in answers(engine(), free)]
    assert len(faults(asked, said, said)) > len(asked) / 2


def test_drafts_that_pass_by_the_mask_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = plainly(5)
    truth = Matcher.masks

    def at_the_root_only(self: Matcher, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        return [truth(self, [()])[0] if not path else None for path in paths]

    monkeypatch.setattr(Matcher, "masks", at_the_root_only)
    assert faults(asked, answers(engine(EVERY_METHOD[5]), asked), plain) != []
