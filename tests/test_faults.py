"""docs/faults.md: every fault that other servers had is held by tests that exist."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NUM_FAULTS = 37
LINK = re.compile(
    r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/(.+)/(?:issues|pull)/(\d+)\)"
    r"(?:, (?:[\w.-]+/[\w.-]+)?#\d+)*"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: the report, what is wrong elsewhere, what is right here, node ids of tests."""

    report: str
    elsewhere: str
    here: str
    tests: tuple[str, ...]


def read_rows() -> list[Row]:
    rows = []
    for line in (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines():
        if line.startswith("| ["):
            report, elsewhere, here, tests = line.removeprefix("| ").removesuffix(" |").split(" | ")
            rows.append(Row(report, elsewhere, here, tuple(node.strip("`") for node in tests.split("<br>"))))
    return rows


ROWS = read_rows()


@cache
def collected(file: str) -> frozenset[str]:
    """Names of the tests that pytest finds in a file and does not always skip."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_")
        if not any(re.search(r"\bmark\.(skip\b|xfail)", ast.unparse(mark)) for mark in node.decorator_list)
    )


def missing(nodes: tuple[str, ...]) -> list[str]:
    """Node ids without a test."""
    absent = []
    for node in nodes:
        file, _, name = node.partition("::")
        is_file = re.fullmatch(r"tests/(\w+/)*test_\w+\.py", file) and (ROOT / file).is_file()
        if not is_file or name not in collected(file):
            absent.append(node)
    return absent


def test_there_is_a_row_for_every_fault() -> None:
    links = [LINK.fullmatch(row.report) for row in ROWS]
    assert [row.report for row, link in zip(ROWS, links, strict=True) if link is None] == []
    names = {(link[1], link[2]) for link in links if link is not None}
    assert len(ROWS) == len(names) == NUM_FAULTS
    assert all(link is not None and (link[1], link[2]) == (link[3], link[4]) for link in links)
    assert all(row.elsewhere.endswith(".") and row.here.endswith(".") for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.report.partition("]")[0].removeprefix("["))
def test_its_tests_exist(row: Row) -> None:
    assert row.tests
    assert missing(row.tests) == []


@pytest.mark.parametrize(
    "node",
    [
        "tests/test_faults.py::test_that_was_renamed",
        "tests/test_faults.py::missing",
        "tests/test_that_is_gone.py::test_its_tests_exist",
        "docs/faults.md::test_its_tests_exist",
        "tests/test_faults.py",
        "",
    ],
)
def test_what_is_no_test_is_missing(node: str) -> None:
    assert missing((node,)) == [node]
