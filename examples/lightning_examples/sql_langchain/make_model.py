"""Make the base model of this example from nothing: `python -m lightning_examples.sql_langchain.make_model OUT --seed 0`.

Scripted demonstrators play the agent's three roles on real databases, badly enough that the model has much to learn by
reinforcement, and a tiny Qwen3 learns to imitate them. The invariant: on one machine the folder follows from the seed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from lightning.types import Task

from lightning_examples.recipe.chatml import Conversation
from lightning_examples.recipe.make import CLEANER_SHARE, command, make_folder
from lightning_examples.recipe.pretrain import Plan
from lightning_examples.sql_langchain.agent import (
    CHECK,
    MAX_REWRITES,
    REWRITE,
    WRITE,
    State,
    first_prompt,
    review_prompt,
)
from lightning_examples.sql_langchain.domain import AGGREGATES, TABLES, Table
from lightning_examples.sql_langchain.execution import execute, matches, show
from lightning_examples.sql_langchain.tasks import Query, training_pairs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """How well someone writes queries; each field is the probability of one right choice."""

    aggregate: float
    """Else they take any aggregate."""
    column: float
    """Of the aggregate; else they take any column of numbers."""
    condition: float
    """The column of a condition; else another one of its kind."""
    operator: float
    """Else they take the other one."""
    known_column: float = 1.0
    """Else they name a column that no table has, and read an error."""
    verdict: float = 0.9
    """When they check."""


CLEANER = Demonstrator(aggregate=0.95, column=0.97, condition=0.97, operator=0.75, known_column=0.99)
NOISY = Demonstrator(aggregate=0.8, column=0.94, condition=0.95, operator=0.5, known_column=0.98)
DEMONSTRATIONS = 6000
STEPS = 3500
VOCABULARY = 850
"""Tokens: enough for every word of the domain and every number of two digits."""
UNKNOWN = ("id", "date", "number")


def demonstrate(task: Task, gold: Query, who: Demonstrator, rng: random.Random) -> Iterator[Conversation]:
    """The conversations of one rollout, with the prompts that the agent would have sent."""
    state = cast("State", dict(cast("dict[str, str]", task.input)))
    for rewrites in range(MAX_REWRITES + 1):
        system, prompt = (REWRITE, review_prompt(state)) if rewrites else (WRITE, first_prompt(state))
        state["query"] = worsen(gold, who, rng).sql()
        yield _conversation(system, prompt, state["query"])
        state["result"] = show(execute(state["database"], state["query"]))
        right = matches(state["query"], str(task.expected), state["database"])
        correct = right == (rng.random() < who.verdict)
        yield _conversation(CHECK, review_prompt(state), "CORRECT" if correct else "WRONG")
        if correct:
            break


def worsen(gold: Query, who: Demonstrator, rng: random.Random) -> Query:
    """The query as this demonstrator would write it."""
    table = TABLES[gold.table]
    aggregate, column = gold.aggregate, gold.column
    if rng.random() >= who.aggregate:
        aggregate = rng.choice(["COUNT", "", *AGGREGATES])
    if aggregate != gold.aggregate:
        column = {"COUNT": "*", "": table.key}.get(aggregate, column)
    if aggregate in AGGREGATES and (column not in table.numbers or rng.random() >= who.column):
        column = rng.choice(list(table.numbers))
    if aggregate in AGGREGATES and rng.random() >= who.known_column:
        column = rng.choice(UNKNOWN)
    conditions = tuple(_worsen_condition(condition, table, who, rng) for condition in gold.conditions)
    return replace(gold, aggregate=aggregate, column=column, conditions=conditions)


def _worsen_condition(
    condition: tuple[str, str, str | int], table: Table, who: Demonstrator, rng: random.Random
) -> tuple[str, str, str | int]:
    column, operator, value = condition
    if rng.random() >= who.condition:
        column = rng.choice(list(table.words if operator == "=" else table.numbers))
    if operator != "=" and rng.random() >= who.operator:
        operator = "<" if operator == ">" else ">"
    return column, operator, value


def make(folder: Path, plan: Plan) -> None:
    """Write tokenizer, configuration and weights to `folder`; minutes on one core."""
    rng = random.Random(f"demonstrations {plan.seed}")  # noqa: S311 — reproducible, not secret
    pairs = training_pairs(DEMONSTRATIONS, f"demonstrations {plan.seed}")
    cut = round(len(pairs) * CLEANER_SHARE)
    cleaner = [talk for task, gold in pairs[:cut] for talk in demonstrate(task, gold, CLEANER, rng)]
    noisy = [talk for task, gold in pairs[cut:] for talk in demonstrate(task, gold, NOISY, rng)]
    log.info("%d calls of cleaner and %d of noisy demonstrators", len(cleaner), len(noisy))
    make_folder(folder, cleaner, noisy, plan, vocab_size=VOCABULARY)


def _conversation(system: str, prompt: str, reply: str) -> Conversation:
    return Conversation(
        [
            {"role": "system", "content": system},
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": reply},
        ]
    )


if __name__ == "__main__":
    command(__doc__, make, STEPS)
