"""Queries that a model wrote: they change nothing, end in time, and are right when their rows are."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning_examples.sql_langchain import DATABASES, execution
from lightning_examples.sql_langchain.execution import Result, execute, matches, same_rows, show

COMPANY = DATABASES / "company" / "company.sqlite"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"

values = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from(["a", "b", ""]), st.floats(-2, 2, width=16))
tables = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[values] * width), max_size=6))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    file = tmp_path / "some folder?" / "a#b.sqlite"
    file.parent.mkdir()
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE t (a INTEGER, b TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(1, "x"), (2, "y"), (2, "z")])
        connection.execute("INSERT INTO t VALUES (9, CAST(x'61ff62' AS TEXT))")
    return file


def test_rows_come_back(database: Path) -> None:
    assert execute(database, "SELECT a, b FROM t WHERE a < 3 ORDER BY b DESC").rows == ((2, "z"), (2, "y"), (1, "x"))
    assert execute(database, "SELECT a FROM t WHERE a > 99") == Result()
    assert execute(database, "WITH u AS (SELECT a FROM t) SELECT MAX(a) FROM u;").rows == ((9,),)
    assert execute(database, "SELECT b FROM t WHERE a = 9").rows == (("ab",),)  # text that is not UTF-8


@pytest.mark.parametrize(
    "query",
    [
        "",
        "SELECT",
        "SELEC a FROM t",
        "SELECT nothing FROM t",
        "SELECT a FROM nowhere",
        "SELECT a FROM t; SELECT b FROM t",
        "INSERT INTO t VALUES (3, 'q')",
        "DELETE FROM t",
        "DROP TABLE t",
        "CREATE TABLE u (a)",
        "CREATE TEMP TABLE u (a)",
        "ATTACH DATABASE 'stolen.sqlite' AS s",
        "PRAGMA query_only = 0",
        "VACUUM INTO 'copy.sqlite'",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT zeroblob(100000000)",
        "SELECT a FROM t WHERE b LIKE '" + "%a" * 200 + "'",
        "SELECT '\0'",
        "SELECT '\ud800'",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT '" + "a" * 30_000 + "'",
    ],
)
def test_what_is_wrong_is_said_and_nothing_changes(
    database: Path, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = database.read_bytes()
    monkeypatch.chdir(tmp_path)
    result = execute(database, query)
    assert result.error
    assert not result.rows
    assert not matches(query, "SELECT a FROM t", str(database))
    assert database.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["some folder?"]


def test_an_endless_query_ends(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "TIME_LIMIT", 0.05)
    started = time.monotonic()
    assert execute(database, ENDLESS).error == "over 0.05 seconds"
    assert time.monotonic() - started < 5


def test_too_many_rows_are_refused(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MAX_ROWS", 3)
    assert execute(database, "SELECT a FROM t").error == "more than 3 rows"
    assert len(execute(database, "SELECT a FROM t LIMIT 3").rows) == 3


def test_a_missing_file_is_the_data_s_fault_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no database .*gone\.sqlite"):
        execute(tmp_path / "gone.sqlite", "SELECT 1")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.sqlite").write_text("not a database at all, but long enough to be looked at " * 9)
    assert "not a database" in execute(tmp_path / "notes.sqlite", "SELECT * FROM t").error


def test_a_reference_that_fails_is_the_data_s_fault(database: Path) -> None:
    with pytest.raises(ValueError, match="reference query 'SELECT c FROM t' fails"):
        matches("SELECT a FROM t", "SELECT c FROM t", str(database))


@pytest.mark.parametrize(
    ("query", "gold", "right"),
    [
        ("SELECT COUNT(*) FROM t", "SELECT COUNT(a) FROM t", True),
        ("SELECT 4", "SELECT COUNT(a) FROM t", True),
        ("SELECT 4.0", "SELECT COUNT(a) FROM t", True),
        ("SELECT '4'", "SELECT COUNT(a) FROM t", False),
        ("SELECT b, a FROM t", "SELECT a, b FROM t", True),
        ("SELECT a, b, 1 FROM t", "SELECT a, b FROM t", False),
        ("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t", True),
        ("SELECT a FROM t", "SELECT a FROM t ORDER BY a DESC", False),
        ("SELECT a FROM t", "select a from t order  by a", True),
        ("SELECT DISTINCT a FROM t", "SELECT a FROM t", False),
        ("SELECT a FROM t WHERE a > 50", "SELECT a, b FROM t WHERE a > 60", True),  # both empty, as Spider has it
        ("SELECT SUM(x) FROM (SELECT 0.1 AS x UNION ALL SELECT 0.2)", "SELECT 0.3", True),
    ],
)
def test_execution_match(database: Path, query: str, gold: str, right: bool) -> None:
    assert matches(query, gold, str(database)) is right


@given(tables, st.randoms(use_true_random=False))
def test_order_of_rows_and_of_columns_does_not_matter(rows: list[tuple[object, ...]], rng: random.Random) -> None:
    columns = list(range(len(rows[0]))) if rows else []
    rng.shuffle(columns)
    shuffled = [tuple(row[place] for place in columns) for row in rows]
    assert same_rows(rows, shuffled, ordered=True)  # type: ignore[arg-type]
    rng.shuffle(shuffled)
    assert same_rows(rows, shuffled)  # type: ignore[arg-type]
    assert same_rows(shuffled, rows)  # type: ignore[arg-type]


@given(tables.filter(bool), st.data())
def test_another_value_is_another_result(rows: list[tuple[object, ...]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[0]) - 1))
    changed = [list(one) for one in rows]
    changed[row][column] = "no value of the table"
    assert not same_rows(rows, [tuple(one) for one in changed])  # type: ignore[arg-type]
    assert not same_rows(rows, [*rows, rows[0]])  # type: ignore[arg-type]


def test_rows_are_compared_whole_not_column_by_column() -> None:
    assert not same_rows([(1, "a"), (2, "b")], [(1, "b"), (2, "a")])


def test_many_equal_columns_take_no_time() -> None:
    one = [(1,) * 14 + (2,)] * 3
    started = time.monotonic()
    assert same_rows(one, [(1,) * 14 + (2,)] * 3)
    assert not same_rows(one, [(1,) * 13 + (2, 2)] * 3)
    assert time.monotonic() - started < 5


def test_a_result_is_shown_in_one_short_line() -> None:
    assert show(Result(((43.5166666,),))) == "43.5167"
    assert show(Result((("name 1", 3), ("name 2", None)))) == "2 rows: name 1, 3; name 2, None"
    assert show(Result((("a",),) * 5)) == "5 rows: a; a; a"
    assert show(Result()) == "0 rows"
    assert show(Result(error="no such column: pay")) == "error: no such column: pay"
    assert len(show(Result((("x" * 9999,),)))) == 40


def test_the_shipped_databases_answer() -> None:
    assert execute(COMPANY, "SELECT COUNT(*) FROM staff").rows == ((80,),)
