"""Make the databases of this example anew: `python -m lightning_examples.sql_langchain.make_databases OUT`.

The invariant: the rows follow from the seed, on every machine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sqlite3
from pathlib import Path

from lightning_examples.sql_langchain.domain import DOMAIN, Table

ROWS = 80
SEED = "databases"


def make(folder: Path) -> None:
    """Write `<db_id>/<db_id>.sqlite` for each database; one that exists is replaced."""
    for name, tables in DOMAIN.items():
        file = folder / name / f"{name}.sqlite"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            for table in tables:
                _fill(connection, table)


def _fill(connection: sqlite3.Connection, table: Table) -> None:
    rng = random.Random(f"{SEED} {table.name}")  # noqa: S311 — reproducible, not secret
    types = [f"{table.key} TEXT PRIMARY KEY", *(f"{name} TEXT" for name in table.words)]
    types.extend(f"{name} INTEGER" for name in table.numbers)
    connection.execute(f"CREATE TABLE {table.name} ({', '.join(types)})")
    rows = [
        [
            f"{table.key} {number}",
            *(rng.choice(words.values) for words in table.words.values()),
            *(rng.randint(numbers.low, numbers.high) for numbers in table.numbers.values()),
        ]
        for number in range(1, ROWS + 1)
    ]
    marks = ", ".join("?" * len(types))
    connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)  # noqa: S608 — names of this package


def main() -> None:
    """Read the command line and make the databases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    main()
