"""Reads the Spider data set (Yu et al., 2018, https://yale-lily.github.io/spider) from the folder that its archive unpacks to.

    train_spider.json  dev.json     questions: `db_id`, `question`, `query`
    tables.json                     schemas of all databases
    database/<db_id>/<db_id>.sqlite

The invariant: a task is read only if its schema and its database are there. Spider's own split is by database, so no
database of `dev` is ever trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from lightning.types import Task
from pydantic import BaseModel, TypeAdapter, ValidationError

FILES = {"train": "train_spider.json", "dev": "dev.json"}
ADVICE = "give the folder that Spider's archive unpacks to (https://yale-lily.github.io/spider)"


T = TypeVar("T")


class Question(BaseModel):
    """An entry of `train_spider.json` or `dev.json`; what else it holds is not needed."""

    db_id: str
    question: str
    query: str


class Schema(BaseModel):
    """An entry of `tables.json`. Column 0 is `*`, of table -1."""

    db_id: str
    table_names_original: list[str]
    column_names_original: list[tuple[int, str]]
    foreign_keys: list[tuple[int, int]] = []


def read_spider(folder: str | Path, split: Literal["train", "dev"], limit: int | None = None) -> list[Task]:
    """The tasks of a split, in the file's order; `limit` takes the first ones only.

    Raises `FileNotFoundError` for a missing file or database and `ValueError` for one that is not in Spider's format, both
    naming it.
    """
    root = Path(folder).resolve()
    questions = TypeAdapter(list[Question])
    schemas = {one.db_id: describe_schema(one) for one in _read(root / "tables.json", TypeAdapter(list[Schema]))}
    tasks = []
    for number, asked in enumerate(_read(root / FILES[split], questions)[:limit]):
        database = root / "database" / asked.db_id / f"{asked.db_id}.sqlite"
        if not database.is_file():
            raise FileNotFoundError(f"{FILES[split]} asks about {database}, which is missing: {ADVICE}")
        if asked.db_id not in schemas:
            raise ValueError(
                f"{root / 'tables.json'} has no schema of {asked.db_id!r}, which {FILES[split]} asks about"
            )
        given = {"question": asked.question, "schema": schemas[asked.db_id], "database": str(database)}
        tasks.append(Task(given, asked.query, {"db_id": asked.db_id}, f"spider-{split}-{number}"))
    return tasks


def describe_schema(schema: Schema) -> str:
    """`table(column, ...)` in one line each, then the foreign keys."""
    names = [f"{schema.table_names_original[table]}.{column}" for table, column in schema.column_names_original]
    lines = [
        f"{name}({', '.join(column for table, column in schema.column_names_original if table == place)})"
        for place, name in enumerate(schema.table_names_original)
    ]
    lines.extend(f"{names[one]} = {names[other]}" for one, other in schema.foreign_keys)
    return "\n".join(lines)


def _read(file: Path, form: TypeAdapter[list[T]]) -> list[T]:
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}: {ADVICE}")
    try:
        return form.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{key!r}]" for key in first["loc"])
        raise ValueError(
            f"{file} is not in Spider's format: at {place or 'its start'}: {first['msg']}; {ADVICE}"
        ) from error
