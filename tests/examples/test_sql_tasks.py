"""The questions about the shipped databases, and the ones that Spider's folder holds."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_examples.sql_langchain import DATABASES
from lightning_examples.sql_langchain.domain import TABLES
from lightning_examples.sql_langchain.execution import execute, matches
from lightning_examples.sql_langchain.make_databases import make
from lightning_examples.sql_langchain.spider import read_spider
from lightning_examples.sql_langchain.tasks import describe, make_task, tasks, training_pairs, val_tasks
from lightning_examples.word_problems import is_held_out

seeds = st.integers(0, 2**32)


@settings(max_examples=20)
@given(seeds)
def test_training_questions_are_never_held_out(seed: int) -> None:
    asked = [task.input["question"] for task in tasks(30, seed)]
    assert len(set(asked)) == 30
    assert not any(is_held_out(question) for question in asked)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_never_trains_on_what_it_is_evaluated_on(seed: int) -> None:
    train = {task.input["question"] for task in tasks(800, seed)}
    assert len(train) == 800
    assert not train & {task.input["question"] for task in val_tasks(100)}


def test_held_out_tasks_are_distinct_and_always_the_same() -> None:
    held_out = val_tasks(80)
    assert len({task.id for task in held_out}) == 80
    assert held_out == val_tasks(80)
    assert val_tasks(50) == held_out[:50]
    assert all(is_held_out(task.input["question"]) for task in held_out)


def test_a_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert tasks(20, 1) == tasks(20, 1)
    assert tasks(20, 1) != tasks(20, 2)


@settings(max_examples=60)
@given(seeds)
def test_a_reference_answers_its_question_with_something(seed: int) -> None:
    task, query = make_task(random.Random(seed))
    result = execute(task.input["database"], str(task.expected))
    assert result.rows
    assert result.rows[0][0] is not None
    assert matches(query.sql(), str(task.expected), task.input["database"])
    table = TABLES[query.table]
    assert table.plural in task.input["question"]
    assert f"{table.name}({', '.join(table.columns)})" in task.input["schema"]
    for name, _, value in query.conditions:
        assert name in table.columns
        assert str(value) in task.input["question"]
    assert task.input["question"] in describe(task)
    assert str(task.expected) in describe(task)


def test_a_question_has_one_meaning() -> None:
    meanings: dict[str, set[str]] = {}
    for task, query in training_pairs(1000, "meanings"):
        meanings.setdefault(task.input["question"], set()).add(query.sql())
    assert {len(queries) for queries in meanings.values()} == {1}
    assert len({query.split(" ")[1].split("(")[0] for queries in meanings.values() for query in queries}) > 6


def test_ids_are_the_same_wherever_the_package_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = [task.id for task in val_tasks(5)]
    make(tmp_path)
    monkeypatch.setattr("lightning_examples.sql_langchain.tasks.DATABASES", tmp_path)
    there = val_tasks(5)
    assert [task.id for task in there] == here
    assert str(tmp_path) in there[0].input["database"]


def test_the_shipped_databases_are_what_the_script_makes(tmp_path: Path) -> None:
    make(tmp_path)
    make(tmp_path)  # over what is there
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.sqlite"))
    assert made == sorted(path.relative_to(DATABASES) for path in DATABASES.rglob("*.sqlite"))
    for file in made:
        assert dump(tmp_path / file) == dump(DATABASES / file)


def dump(file: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return list(connection.iterdump())


# --- Spider -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    """A folder with Spider's layout and fields, as its archive has them: two databases, three questions."""
    for name, script in {
        "concert": "CREATE TABLE singer (Singer_ID INTEGER PRIMARY KEY, Name TEXT);"
        "CREATE TABLE concert (Concert_ID INTEGER, Singer INTEGER REFERENCES singer);"
        "INSERT INTO singer VALUES (1, 'Joe'), (2, 'Ann');"
        "INSERT INTO concert VALUES (7, 2);",
        "pets": "CREATE TABLE pets (Age INTEGER); INSERT INTO pets VALUES (3), (4);",
    }.items():
        file = tmp_path / "database" / name / f"{name}.sqlite"
        file.parent.mkdir(parents=True)
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            connection.executescript(script)
    write(
        tmp_path / "tables.json",
        [
            {
                "column_names": [[-1, "*"], [0, "singer id"], [0, "name"], [1, "concert id"], [1, "singer"]],
                "column_names_original": [
                    [-1, "*"],
                    [0, "Singer_ID"],
                    [0, "Name"],
                    [1, "Concert_ID"],
                    [1, "Singer"],
                ],
                "column_types": ["text", "number", "text", "number", "number"],
                "db_id": "concert",
                "foreign_keys": [[4, 1]],
                "primary_keys": [1],
                "table_names": ["singer", "concert"],
                "table_names_original": ["singer", "concert"],
            },
            {
                "column_names": [[-1, "*"], [0, "age"]],
                "column_names_original": [[-1, "*"], [0, "Age"]],
                "column_types": ["text", "number"],
                "db_id": "pets",
                "foreign_keys": [],
                "primary_keys": [],
                "table_names": ["pets"],
                "table_names_original": ["pets"],
            },
        ],
    )
    asked = [
        ("concert", "How many singers are there?", "SELECT count(*) FROM singer"),
        ("concert", "Who sang?", "SELECT T1.Name FROM singer AS T1 JOIN concert AS T2 ON T1.Singer_ID = T2.Singer"),
    ]
    write(tmp_path / "train_spider.json", [question(*one) for one in asked])
    write(tmp_path / "dev.json", [question("pets", "How old are the pets?", "SELECT Age FROM pets ORDER BY Age")])
    return tmp_path


def question(db_id: str, text: str, query: str) -> dict[str, Any]:
    return {
        "db_id": db_id,
        "query": query,
        "query_toks": query.split(),
        "query_toks_no_value": query.lower().split(),
        "question": text,
        "question_toks": text.split(),
        "sql": {"except": None, "from": {"conds": [], "table_units": [["table_unit", 0]]}, "limit": None},
    }


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def test_spider_is_read_from_its_folder(spider: Path) -> None:
    first, second = read_spider(spider, "train")
    assert first.input["question"] == "How many singers are there?"
    assert first.input["schema"] == (
        "singer(Singer_ID, Name)\nconcert(Concert_ID, Singer)\nconcert.Singer = singer.Singer_ID"
    )
    assert first.metadata == {"db_id": "concert"}
    assert (first.id, second.id) == ("spider-train-0", "spider-train-1")
    assert execute(first.input["database"], str(first.expected)).rows == ((2,),)
    right = "SELECT Name FROM singer WHERE Singer_ID IN (SELECT Singer FROM concert)"
    assert matches(right, str(second.expected), second.input["database"])
    assert not matches("SELECT Name FROM singer", str(second.expected), second.input["database"])
    (held_out,) = read_spider(str(spider), "dev")
    assert not matches("SELECT Age FROM pets ORDER BY Age DESC", str(held_out.expected), held_out.input["database"])
    assert len(read_spider(spider, "train", limit=1)) == 1


@pytest.mark.parametrize("name", ["tables.json", "train_spider.json", "database/concert/concert.sqlite"])
def test_what_spider_s_folder_lacks_is_named(spider: Path, name: str) -> None:
    (spider / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{Path(name).name}.*archive unpacks to"):
        read_spider(spider, "train")


def test_a_database_without_a_schema_is_named(spider: Path) -> None:
    schemas = json.loads((spider / "tables.json").read_text(encoding="utf-8"))
    write(spider / "tables.json", schemas[1:])
    with pytest.raises(ValueError, match=r"tables\.json has no schema of 'concert'"):
        read_spider(spider, "train")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("[{", "its start"),
        ('{"data": []}', "its start"),
        ('[{"db_id": "pets", "question": "?"}]', r"\[0\]\['query'\]"),
        ('[{"db_id": 3, "question": "?", "query": ""}]', r"\[0\]\['db_id'\]"),
    ],
)
def test_a_file_in_another_format_is_named_with_the_place(spider: Path, content: str, place: str) -> None:
    (spider / "dev.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"dev\.json is not in Spider's format: at {place}"):
        read_spider(spider, "dev")
