"""What `make test` leaves to `make test-long` is listed with its reason, and holds no promise alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.test_promises import PAGES

ROOT = Path(__file__).parents[2]
MARK = "pytest.mark.long"


def marks(path: Path) -> Iterator[tuple[str, bool]]:
    """The tests of a file that are long, each with whether all its parameters are."""
    tree = ast.parse(path.read_text())
    whole = any(ast.unparse(node).startswith("pytestmark = ") and MARK in ast.unparse(node) for node in tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            if whole or any(MARK in one for one in decorators):
                yield f"{path.relative_to(ROOT)}::{node.name}", whole or MARK in decorators


@cache
def long_tests() -> dict[str, bool]:
    """All of them."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.long" in path.read_text()]
    return dict(found for path in files if path != Path(__file__) for found in marks(path))


def rows() -> list[list[str]]:
    """The cells of the table in tests/LONG.md: the test, why it is long, what stays in `make test`."""
    lines = [line for line in (ROOT / "tests/LONG.md").read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_is_listed_with_its_reason_and_with_what_stays() -> None:
    found = long_tests()
    assert len(found) > 3
    assert [re.sub(r"\[.*\]", "", test.strip("`")) for test, _, _ in rows()] == sorted(found)
    for test, reason, stays in rows():
        assert reason, test
        names = re.findall(r"`([\w/.]+::\w+)", stays)
        assert names, test
        for name in names:
            path, _, function = name.partition("::")
            assert f"def {function}(" in (ROOT / path).read_text(), name
            assert not found.get(name, False), f"{name} is long itself"


@pytest.mark.parametrize("test", sorted({test for page in PAGES.values() for tests in page.values() for test in tests}))
def test_what_holds_a_promise_is_in_make_test(test: str) -> None:
    assert not long_tests().get(test, False), f"{test} runs in `make test-long` alone"
