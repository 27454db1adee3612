"""Quests from a seed; the text of one decides whether it is held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import cast

from lightning.types import Task

from lightning_examples.quest_python.world import GATES, KEYS, ROOMS, SIDES, Quest, Room
from lightning_examples.word_problems import take

TREASURES = ("gems", "crowns", "coins", "pearls", "rings", "cups", "books", "silks")
"""A quest has none of them twice, so that a prompt tells its room."""


def tasks(n: int, seed: int) -> list[Task]:
    """`n` different training tasks."""
    return take(make_task, n, f"quest {seed}", held_out=False)


def val_tasks(n: int) -> list[Task]:
    """`n` different held-out tasks, always the same."""
    return take(make_task, n, "quest held out", held_out=True)


def make_task(rng: random.Random) -> Task:
    """One quest: the input says it in words, `metadata` holds its parts."""
    gates = rng.sample([name for names in KEYS.values() for name in names], GATES)
    rooms = [[treasure, rng.choice(SIDES)] for treasure in rng.sample(TREASURES, ROOMS)]
    text = f"Gates of {' and '.join(gates)}. Rooms: {', '.join(' '.join(room) for room in rooms)}."
    return Task(text, metadata={"gates": gates, "rooms": rooms})


def quest_of(task: Task) -> Quest:
    """The quest of a task."""
    first, second = cast("Sequence[str]", task.metadata["gates"])
    rooms = cast("Sequence[Sequence[str]]", task.metadata["rooms"])
    return Quest((first, second), tuple(Room(treasure, side) for treasure, side in rooms))


def describe(task: Task) -> str:
    """The task in words."""
    return str(task.input)
