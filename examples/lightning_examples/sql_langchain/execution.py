"""Runs queries that a model wrote, and says whether two results are the same.

The invariant: whatever the query is, it changes nothing, ends in time, takes bounded memory, and what is wrong with it
comes back as text. Two results are the same if their rows are, as a bag, in some order of the columns; in sequence where
order was asked for. That is Spider's execution match (Zhong et al., 2020, https://arxiv.org/abs/2010.02840).
"""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

TIME_LIMIT = 5.0
"""Seconds a query may run."""
MAX_ROWS = 10_000
"""A query with more rows than this is refused."""
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,  # bytes of one value or row
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,  # a long pattern is one long instruction, which no clock can stop
}
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
INSTRUCTIONS = 10_000
"""SQLite's virtual machine looks at the clock every so many of its instructions."""

Value: TypeAlias = "str | int | float | bytes | None"
Row: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """`rows`, or what was wrong in `error` (then there are no rows)."""

    rows: tuple[Row, ...] = ()
    error: str = ""


def execute(database: str | Path, query: str) -> Result:
    """Run one SELECT. A file that is no database is an error too; one that does not exist raises `FileNotFoundError`."""
    path = Path(database).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no database {path}: is the data set complete?")
    try:
        with contextlib.closing(_open(path)) as connection:
            cursor = connection.execute(query)
            if cursor.description is None:
                return Result(error="not a query")
            rows = cursor.fetchmany(MAX_ROWS + 1)
    except sqlite3.OperationalError as error:
        return Result(error=f"over {TIME_LIMIT:g} seconds" if str(error) == "interrupted" else str(error))
    except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
        return Result(error=str(error))
    if len(rows) > MAX_ROWS:
        return Result(error=f"more than {MAX_ROWS} rows")
    return Result(tuple(rows))


def _open(path: Path) -> sqlite3.Connection:
    # Immutable: nobody writes while agents read, so no locks are taken and no journal is looked for.
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.text_factory = _text
    deadline = time.monotonic() + TIME_LIMIT
    connection.set_progress_handler(lambda: time.monotonic() > deadline, INSTRUCTIONS)
    connection.set_authorizer(_authorize)
    return connection


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Reading alone: no ATTACH (which would open other files), no PRAGMA, no extensions."""
    allowed = action in READING and (action != sqlite3.SQLITE_FUNCTION or second != "load_extension")
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _text(raw: bytes) -> str:
    # Some of Spider's databases hold text that is not UTF-8.
    return raw.decode(errors="ignore")


@functools.lru_cache(maxsize=4096)
def gold_rows(database: str, query: str) -> tuple[Row, ...]:
    """The rows of a reference query. Raises `ValueError` when it fails: then the data are at fault, not the agent."""
    result = execute(database, query)
    if result.error:
        raise ValueError(f"the reference query {query!r} fails on {database}: {result.error}. Leave its task out")
    return result.rows


def matches(query: str, gold: str, database: str) -> bool:
    """Whether a query's result is that of the reference query; one that fails never is."""
    expected = gold_rows(database, gold)
    result = execute(database, query)
    return not result.error and same_rows(result.rows, expected, ordered=bool(re.search(r"\border\s+by\b", gold, re.I)))


def same_rows(one: Sequence[Row], other: Sequence[Row], *, ordered: bool = False) -> bool:
    """Whether two results are the same, in some order of the columns."""
    if len(one) != len(other):
        return False
    if not one:
        return True
    left, right = _columns(one), _columns(other)
    if len(left) != len(right):
        return False
    wanted = _bag(right, ordered=ordered)
    return any(
        _bag([left[place] for place in order], ordered=ordered) == wanted for order in _orders(left, right, ordered)
    )


def _columns(rows: Sequence[Row]) -> list[tuple[Value, ...]]:
    # Sums of floats depend on the order of addition in their last digits.
    return [
        tuple(float(f"{value:.9g}") if isinstance(value, float) else value for value in column)
        for column in zip(*rows, strict=True)
    ]


def _bag(columns: Sequence[tuple[Value, ...]], *, ordered: bool) -> list[Row] | Counter[Row]:
    rows = list(zip(*columns, strict=True))
    return rows if ordered else Counter(rows)


def _orders(
    left: Sequence[tuple[Value, ...]], right: Sequence[tuple[Value, ...]], ordered: bool
) -> Iterator[tuple[int, ...]]:
    """Ways to choose for each column on the right another one on the left with the same values."""
    keys = [[column if ordered else frozenset(Counter(column).items()) for column in side] for side in (left, right)]
    candidates = [[place for place, key in enumerate(keys[0]) if key == wanted] for wanted in keys[1]]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(candidates):
            yield chosen
            return
        tried: list[tuple[Value, ...]] = []
        for place in candidates[len(chosen)]:
            # Of equal columns any will do: trying each of them would take factorial time.
            if place not in chosen and left[place] not in tried:
                tried.append(left[place])
                yield from extend((*chosen, place))

    return extend(())


def show(result: Result) -> str:
    """A result in one short line, as an agent reads it."""
    if result.error:
        return f"error: {result.error}"
    first = "; ".join(", ".join(_word(value) for value in row) for row in result.rows[:3])
    return first if len(result.rows) == 1 else f"{len(result.rows)} rows" + (f": {first}" if first else "")


def _word(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
