"""Word problems of one or two calculations, short enough for a small model."""

from __future__ import annotations

import random

from lightning.types import Task

from lightning_examples.word_problems import describe, take

__all__ = ["describe", "make_task", "tasks", "val_tasks"]

NAMES = (
    "Ada",
    "Bo",
    "Cleo",
    "Dan",
    "Elif",
    "Finn",
    "Gita",
    "Hugo",
    "Ines",
    "Jon",
    "Kai",
    "Lea",
    "Milo",
    "Nia",
    "Otto",
    "Pia",
)
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "stones", "tickets")


def tasks(n: int, seed: int) -> list[Task]:
    """`n` different training tasks."""
    return take(make_task, n, f"calculator {seed}", held_out=False)


def val_tasks(n: int) -> list[Task]:
    """`n` different held-out tasks, always the same: from a seed of their own, and questions that are never trained on."""
    return take(make_task, n, "calculator held out", held_out=True)


def make_task(rng: random.Random) -> Task:
    """One problem of six kinds: each operation alone, and two of two operations."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    many, few, some = rng.randint(12, 98), rng.randint(2, 11), rng.randint(2, 30)
    kinds = (
        (f"{name} has {many} {things}. {name} gives away {few}.", "are left", many - few),
        (f"{name} has {many} {things} and buys {some} more.", f"does {name} have now", many + some),
        (f"There are {few} boxes with {many} {things} each.", "are there in all", few * many),
        (f"{name} shares {few * many} {things} equally among {few} friends.", "does each friend get", many),
        (
            f"{name} has {many} {things}, finds {some} more and then loses {few}.",
            f"does {name} have now",
            many + some - few,
        ),
        (f"{name} has {many} {things} and buys {few} bags of {some} more.", f"does {name} have now", many + few * some),
    )
    story, question, expected = rng.choice(kinds)
    return Task(f"{story} How many {things} {question}?", expected)
