"""Quests from a seed; the text of one decides whether it is held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from typing import cast

from lightning.types import Task

from lightning_examples.quest_python.world import KEYS, ROOMS, SIDES, Quest, Room
from lightning_examples.word_problems import take

TREASURES = ("gems", "crowns", "coins", "pearls", "rings", "cups", "books", "silks")
"""A quest has none of them twice, so that a prompt tells its room."""


PAIRS = tuple(permutations(KEYS, 2))
"""The colours of the two gates."""


def tasks(n: int, seed: int) -> list[Task]:
    """`n` different training tasks."""
    return _in_turns(n, f"quest {seed}", held_out=False)


def val_tasks(n: int) -> list[Task]:
    """`n` different held-out tasks, always the same."""
    return _in_turns(n, "quest held out", held_out=True)


def _in_turns(n: int, seed: str, *, held_out: bool) -> list[Task]:
    """Each six tasks have each pair of colours once, so that a step of six is no reason to prefer a colour."""
    each = -(-n // len(PAIRS))
    made = [take(partial(make_task, colours=pair), each, f"{seed} {pair}", held_out=held_out) for pair in PAIRS]
    return [task for turn in zip(*made, strict=True) for task in turn][:n]


def make_task(rng: random.Random, colours: tuple[str, str]) -> Task:
    """One quest with gates of these colours: the input says it in words, `metadata` holds its parts."""
    gates = [rng.choice(KEYS[colour]) for colour in colours]
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
