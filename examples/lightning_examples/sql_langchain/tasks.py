"""Questions about the shipped databases, each with the query that answers it.

The invariant: a hash of the question's text alone decides whether it is held out, so no question is ever in both sets.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import eq, gt, lt
from typing import Any, cast

from lightning.types import Task

from lightning_examples.sql_langchain import DATABASES
from lightning_examples.sql_langchain.domain import AGGREGATES, DOMAIN, GENERIC, TABLES, Table
from lightning_examples.sql_langchain.execution import gold_rows
from lightning_examples.word_problems import distinct, is_held_out

COUNTING = ("How many {plural} {conditions}?", "What is the number of {plural} {conditions}?")
LISTING = ("Which {plural} {conditions}?", "What are the {plural} {conditions}?")
AGGREGATING = ("What is the {word} {noun} of {plural} {conditions}?", "Which {word} {noun} have {plural} {conditions}?")

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {"=": eq, ">": gt, "<": lt}


@dataclass(frozen=True, slots=True)
class Query:
    """One SELECT. `aggregate` is COUNT, AVG, SUM, MAX, MIN, or nothing: then `column` itself is selected.

    `conditions` are (column, operator, value), joined by AND.
    """

    table: str
    aggregate: str
    column: str
    conditions: tuple[tuple[str, str, str | int], ...]

    def sql(self) -> str:
        """The query as text."""
        column = f"{self.aggregate}({self.column})" if self.aggregate else self.column
        conditions = " AND ".join(
            f"{name} {operator} " + (f"'{value}'" if isinstance(value, str) else str(value))
            for name, operator, value in self.conditions
        )
        return f"SELECT {column} FROM {self.table} WHERE {conditions}"  # noqa: S608 — made of this package's words


def tasks(n: int, seed: int) -> list[Task]:
    """`n` different training tasks."""
    return [task for task, _ in training_pairs(n, f"train {seed}")]


def training_pairs(n: int, seed: str) -> list[tuple[Task, Query]]:
    """`n` different training tasks with their reference queries, which demonstrations are made from."""
    return _take(n, seed, held_out=False)


def val_tasks(n: int) -> list[Task]:
    """`n` different held-out tasks, always the same."""
    return [task for task, _ in _take(n, "held out", held_out=True)]


def describe(task: Task) -> str:
    """The task in words, with its reference query."""
    return f"{cast('dict[str, str]', task.input)['question']} (reference: {task.expected})"


def make_task(rng: random.Random) -> tuple[Task, Query]:
    """One question and its query; the answer is never empty, and no aggregate of a single row."""
    while True:
        database, tables = rng.choice(list(DOMAIN.items()))
        question, query = _ask(rng.choice(tables), rng)
        path = str(DATABASES / database / f"{database}.sqlite")
        if _fits(path, query) > 1:
            break
    name = hashlib.sha256(f"{database}/{question}".encode()).hexdigest()[:16]
    given = {"question": question, "schema": schema(tables), "database": path}
    return Task(given, query.sql(), {"db_id": database}, f"sql-{name}"), query


def _fits(database: str, query: Query) -> int:
    """How many rows fulfil the conditions; counted here, since opening the database anew each time takes longer."""
    rows = gold_rows(database, f"SELECT * FROM {query.table}")  # noqa: S608 — made of this package's words
    places = {name: place for place, name in enumerate(TABLES[query.table].columns)}
    return sum(
        all(OPERATORS[operator](row[places[name]], value) for name, operator, value in query.conditions) for row in rows
    )


def schema(tables: Sequence[Table]) -> str:
    """The tables as the agent's prompt shows them."""
    return "\n".join(f"{table.name}({', '.join(table.columns)})" for table in tables)


def _ask(table: Table, rng: random.Random) -> tuple[str, Query]:
    aggregate = rng.choice(["COUNT", "", *AGGREGATES])
    column = {"COUNT": "*", "": table.key}.get(aggregate) or rng.choice(list(table.numbers))
    kinds = rng.choice(["t", "n", "n", "tn", "tn", "nt", "nt"])
    asked = [_ask_words(table, rng) if kind == "t" else _ask_number(table, column, rng) for kind in kinds]
    template = rng.choice({"COUNT": COUNTING, "": LISTING}.get(aggregate, AGGREGATING))
    question = template.format(
        plural=table.plural,
        conditions=" and ".join(phrase for phrase, _ in asked),
        word=rng.choice(AGGREGATES.get(aggregate, ("",))),
        noun=table.numbers[column].noun if aggregate in AGGREGATES else "",
    )
    return question, Query(table.name, aggregate, column, tuple(condition for _, condition in asked))


def _ask_words(table: Table, rng: random.Random) -> tuple[str, tuple[str, str, str]]:
    column, words = rng.choice(list(table.words.items()))
    value = rng.choice(words.values)
    return words.phrase.format(value), (column, "=", value)


def _ask_number(table: Table, asked_for: str, rng: random.Random) -> tuple[str, tuple[str, str, int]]:
    column, numbers = rng.choice([item for item in table.numbers.items() if item[0] != asked_for])
    margin = (numbers.high - numbers.low) // 5
    value = rng.randint(numbers.low + margin, numbers.high - margin)
    more = rng.random() < 0.5
    phrases = (numbers.more if more else numbers.less, GENERIC[not more].format(noun=numbers.noun))
    return rng.choice(phrases).format(value), (column, ">" if more else "<", value)


def _take(n: int, seed: str, *, held_out: bool) -> list[tuple[Task, Query]]:
    rng = random.Random(seed)  # noqa: S311 — reproducible, not secret
    made = distinct(lambda: make_task(rng), _question)
    return list(islice((pair for pair in made if is_held_out(_question(pair)) == held_out), n))


def _question(pair: tuple[Task, Query]) -> str:
    return cast("dict[str, str]", pair[0].input)["question"]
