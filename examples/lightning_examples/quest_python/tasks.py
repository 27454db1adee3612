"""Quests from a seed; the text of one decides whether it is held out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import cast

from lightning.types import Task

from lightning_examples.quest_python.world import ROOMS, SIDES, WAYS, WEAPONS, Quest, Room
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
    danger = rng.choice([name for names in WAYS.values() for name in names])
    guard = rng.choice([name for names in WEAPONS.values() for name in names])
    rooms = [[treasure, rng.choice(SIDES)] for treasure in rng.sample(TREASURES, ROOMS)]
    text = f"A {danger}, then a {guard}. Rooms: {', '.join(' '.join(room) for room in rooms)}."
    return Task(text, metadata={"danger": danger, "guard": guard, "rooms": rooms})


def quest_of(task: Task) -> Quest:
    """The quest of a task."""
    parts = cast("Mapping[str, str]", task.metadata)
    rooms = cast("Sequence[Sequence[str]]", task.metadata["rooms"])
    return Quest(parts["danger"], parts["guard"], tuple(Room(treasure, side) for treasure, side in rooms))


def describe(task: Task) -> str:
    """The task in words."""
    return str(task.input)
