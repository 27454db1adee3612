"""Two players of one game. Both get the same prompt; the first shall name a low number, the second a high one.

Nothing in the prompt tells the players apart, so a policy that both share earns 0.5 on average, whatever it learns: each
number that helps one player hurts the other. With a policy for each player 1.0 can be earned.

Nothing in this file knows that it is being trained: `llm` only says where the model is.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import lightning
from openai import OpenAI

from lightning_examples.word_problems import NAMES, THINGS, take

if TYPE_CHECKING:
    from lightning import LLM

MIDDLE = 50
MAX_TOKENS = 24


def agent(task: lightning.Task, llm: LLM) -> dict[str, float]:
    """Play one round; the reward is the mean of both players' points."""
    client = OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    points = {}
    for player, wanted in (("low", range(MIDDLE)), ("high", range(MIDDLE, 100))):
        with lightning.component(player):
            reply = client.chat.completions.create(
                model=llm.model,
                messages=[{"role": "user", "content": str(task.input)}],
                max_tokens=MAX_TOKENS,
            )
        points[player] = float(number_in(reply.choices[0].message.content or "") in wanted)
    return {"reward": sum(points.values()) / len(points), **points}


def number_in(reply: str) -> int:
    """The number that a reply names; -1 if it names none."""
    found = re.search(r"answer is (\d{1,3})\.?\s*$", reply)
    return int(found[1]) if found else -1


def tasks(count: int, seed: int) -> list[lightning.Task]:
    """Return `count` different training rounds."""
    return take(_round, count, f"train {seed}", held_out=False)


def val_tasks(count: int) -> list[lightning.Task]:
    """Return `count` different held-out rounds, always the same."""
    return take(_round, count, "held out", held_out=True)


def describe(task: lightning.Task) -> str:
    """What the players are told."""
    return str(task.input)


def _round(rng: random.Random) -> lightning.Task:
    # The first sentence tells one round from another and is of no use to the players.
    (one, other, third), (thing, more) = rng.sample(NAMES, 3), rng.sample(THINGS, 2)
    return lightning.Task(f"{one} asks {other} for {thing} and {third} for {more}. Name a number.")
