"""One table of columns for each noun: a new field of it is one line in `lightning.types` and one column, in every store."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from lightning.store import rows
from lightning.store.relational import operations
from lightning.store.rows import Columns
from lightning.store.sqlite import SqliteStore

TABLES = {
    "runs": rows.RUNS,
    "rollouts": rows.ROLLOUTS,
    "transitions": rows.CALLS,
    "steps": rows.STEPS,
}


@pytest.mark.parametrize("table", TABLES)
async def test_the_schema_has_a_column_for_each_field(sqlite: SqliteStore, table: str) -> None:
    columns: Columns[object] = TABLES[table]
    found = await sqlite._read(lambda tx: tx.all(f"PRAGMA table_info({table})"))
    assert set(columns.columns) <= {row[1] for row in found}
    assert set(columns.fields) <= {field.name for field in fields(columns._noun)}  # type: ignore[arg-type]


def test_statements_have_as_many_places_as_columns() -> None:
    inserts = [
        text for name, text in vars(operations).items() if name.startswith("INSERT_") and name != "INSERT_ANSWER"
    ]
    assert len(inserts) >= 5
    for text in inserts:
        names = text.partition("(")[2].partition(")")[0]
        assert text.count("?") == len(names.split(",")), text


ADDED = """
    import asyncio, dataclasses, sys
    import lightning.types as types

    # One line in `lightning.types` ...
    Old = types.Rollout

    @dataclasses.dataclass(frozen=True, slots=True)
    class Rollout(Old):
        ancestor: str = ""

    types.Rollout = Rollout

    # ... and one column.
    from lightning.store.sqlite import connection
    made = connection.STATEMENTS
    connection.STATEMENTS = [each.replace("TABLE rollouts (", "TABLE rollouts (ancestor TEXT NOT NULL,") for each in made]

    from lightning.store import rows
    from lightning.store.sqlite import SqliteStore
    from lightning.types import Outcome, Run, Task

    async def main(path):
        store = SqliteStore(path)
        await store.open()
        await store.put_run(Run("run", "run"))
        first = Rollout("a", "run", Task("q"), "g", ancestor="first")
        await store.create_rollouts([first, Rollout("b", "run", Task("q"), "g")])
        for lease in await store.lease("run", "w", limit=2):
            await store.complete(lease.rollout.id, 1, Outcome(reward=1.0))
        a, b = (await store.list_rollouts("run")).items
        assert (a.ancestor, b.ancestor, a.reward) == ("first", "", 1.0)
        await store.close()
        print("kept")

    asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def run_script() -> Callable[[str, Path], str]:
    def run(script: str, path: Path) -> str:
        command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def test_a_new_field_of_a_rollout_reaches_the_database(tmp_path: Path, run_script: Callable[[str, Path], str]) -> None:
    assert run_script(ADDED, tmp_path / "store.db") == "kept\n"
