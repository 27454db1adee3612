"""Word problems of one to three steps, with sentences and numbers that do not matter.

The invariant: a hash of the question's text alone decides whether it is held out, so no question is ever in both sets.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from lightning.types import Task

T = TypeVar("T")
NAMES = ("Mia", "Tom", "Ann", "Leo", "Eva", "Max", "Zoe", "Ben", "Ida", "Sam")
THINGS = ("pens", "coins", "books", "cards", "shells", "stamps", "apples", "beads")
EVENTS = {
    "+": ("buys {} more", "finds {} more", "gets {} as a gift", "wins {} in a game", "collects {} more"),
    "-": ("loses {}", "gives away {}", "sells {}", "breaks {}", "donates {}"),
    "*": (
        "makes {} times as many",
        "fills {} boxes like that",
        "grows them {} fold",
        "copies them for {} friends",
        "stacks {} such piles",
    ),
}
DISTRACTORS = ("{name} is {n} years old.", "The shop opens at {n}.", "It is day {n}.", "The bus number is {n}.")

_HELD_OUT = 8
"""One question in so many is held out."""


def tasks(n: int, seed: int) -> list[Task]:
    """`n` different training tasks."""
    return take(make_task, n, f"train {seed}", held_out=False)


def val_tasks(n: int) -> list[Task]:
    """`n` different held-out tasks, always the same."""
    return take(make_task, n, "held out", held_out=True)


def describe(task: Task) -> str:
    """The task in words, with its answer."""
    return f"{task.input} (answer: {task.expected})"


def is_held_out(question: str) -> bool:
    """Whether a question may only be used for evaluation."""
    return hashlib.sha256(question.encode()).digest()[0] % _HELD_OUT == 0


def make_task(rng: random.Random) -> Task:
    """One problem. `metadata` holds how it was built: `start`, `steps` (operator, number), `distractor`."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start = value = rng.randint(10, 99)
    sentences = [f"{name} has {start} {thing}."]
    steps: list[list[str | int]] = []
    for _ in range(rng.randint(1, 3)):
        # One multiplication at most keeps results short; nobody gives away more than there is.
        multiplied = any(operator == "*" for operator, _ in steps)
        operator = rng.choice("+-" if multiplied else "+-*")
        if operator == "-" and value <= 3:
            operator = "+"
        number = {
            "+": lambda: rng.randint(2, 99),
            "-": lambda: rng.randint(2, min(value - 1, 99)),  # noqa: B023 — called at once
            "*": lambda: rng.randint(2, 9),
        }[operator]()
        value = {"+": value + number, "-": value - number, "*": value * number}[operator]
        steps.append([operator, number])
        when = ("First", "Then", "Finally")[len(steps) - 1]
        sentences.append(f"{when} {name} {rng.choice(EVENTS[operator]).format(number)}.")
    distractor = rng.randint(2, 40)
    if rng.random() < 0.3:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(DISTRACTORS).format(name=name, n=distractor))
    return Task(
        input=" ".join(sentences) + f" How many {thing} now?",
        expected=value,
        metadata={"start": start, "steps": steps, "distractor": distractor},
    )


def take(make: Callable[[random.Random], Task], n: int, seed: str, *, held_out: bool) -> list[Task]:
    """`n` tasks of `make` with different questions, all of them held out or none."""
    rng = random.Random(seed)  # noqa: S311 — reproducible, not secret
    made = distinct(lambda: make(rng), lambda task: str(task.input))
    return list(islice((task for task in made if is_held_out(str(task.input)) == held_out), n))


def distinct(make: Callable[[], T], asked: Callable[[T], str]) -> Iterator[T]:
    """What `make` makes, again and again, each question once; `asked` is its question."""
    seen: set[str] = set()
    while True:
        made = make()
        if asked(made) not in seen:
            seen.add(asked(made))
            yield made
