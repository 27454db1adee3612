"""Questions about the people of a world: one in four needs one document, the others need two.

The invariant: a hash of a person's name alone decides whether questions about them are held out, so neither a held-out
question nor its person is ever in training.
"""

from __future__ import annotations

import functools
import hashlib
import random
from itertools import islice

from lightning.types import Task

from lightning_examples.rag_openai_agents.world import World, make_world
from lightning_examples.word_problems import distinct

ONE_HOP = {
    "company": ("Where does {} work?", "Who employs {}?", "Which company is the employer of {}?"),
    "city": ("Where does {} live?", "Which city is home to {}?", "What is the home town of {}?"),
}
BRIDGES = {
    "company": ("the employer of {}", "the company that employs {}", "the firm where {} works"),
    "city": ("the home town of {}", "the city that is home to {}", "the town where {} lives"),
}
TWO_HOPS = {
    "company": {
        "product": "What does {} make?",
        "base": "Where is {} based?",
        "founder": "Who founded {}?",
    },
    "city": {
        "river": "Which river runs through {}?",
        "country": "Which country does {} belong to?",
        "mayor": "Who leads {}?",
    },
}
"""The second document's relation, by the first one's."""
ONE_HOP_SHARE = 0.25

_HELD_OUT = 4
"""One person in so many is held out."""


def tasks(n: int, seed: int) -> list[Task]:
    """`n` different training tasks about the people of the shipped corpus."""
    return take(shipped_world(), n, f"train {seed}", held_out=False)


def val_tasks(n: int) -> list[Task]:
    """`n` different held-out tasks, always the same."""
    return take(shipped_world(), n, "held out", held_out=True)


def describe(task: Task) -> str:
    """The task in words, with its answer."""
    return f"{task.input} (answer: {' or '.join(task.expected)})"  # type: ignore[arg-type]


@functools.cache
def shipped_world() -> World:
    """The world of the shipped corpus."""
    return make_world(0)


def is_held_out(person: str) -> bool:
    """Whether questions about a person may only be used for evaluation."""
    return hashlib.sha256(person.encode()).digest()[0] % _HELD_OUT == 0


def make_task(rng: random.Random, world: World, person: str) -> Task:
    """One question. `metadata` says how it is answered: `person`, then `relations` followed one after the other."""
    first = rng.choice(list(BRIDGES))
    found = world.people[person][first]
    if rng.random() < ONE_HOP_SHARE:
        relations, question, answer = [first], rng.choice(ONE_HOP[first]).format(person), found
    else:
        second = rng.choice(list(TWO_HOPS[first]))
        relations = [first, second]
        question = TWO_HOPS[first][second].format(rng.choice(BRIDGES[first]).format(person))
        answer = (world.companies if first == "company" else world.cities)[found][second]
    return Task(input=question, expected=[answer], metadata={"person": person, "relations": relations})


def take(world: World, n: int, seed: str, *, held_out: bool) -> list[Task]:
    """`n` different tasks in that world."""
    rng = random.Random(seed)  # noqa: S311 — reproducible, not secret
    people = [person for person in world.people if is_held_out(person) == held_out]
    return list(islice(distinct(lambda: make_task(rng, world, rng.choice(people)), lambda task: str(task.input)), n))
