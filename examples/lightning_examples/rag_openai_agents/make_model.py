"""Make the base model of this example from nothing: `python -m lightning_examples.rag_openai_agents.make_model OUT --seed 0`.

Scripted demonstrators answer questions with the agent's own search, in worlds that are not the shipped one, and decide badly
enough that the model has much to learn by reinforcement. The invariant: on one machine the folder follows from the seed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightning.types import Task

from lightning_examples.rag_openai_agents.agent import INSTRUCTIONS, Library, look_up, search
from lightning_examples.rag_openai_agents.retriever import Bm25
from lightning_examples.rag_openai_agents.reward import reward
from lightning_examples.rag_openai_agents.tasks import take
from lightning_examples.rag_openai_agents.world import CITIES, COMPANIES, COUNTRIES, PRODUCTS, RIVERS, World, make_world
from lightning_examples.recipe.chatml import Conversation, Message, tool_call
from lightning_examples.recipe.make import CLEANER_SHARE, command, make_folder
from lightning_examples.recipe.pretrain import Plan

log = logging.getLogger(__name__)

TOOL: Message = {
    "type": "function",
    "function": {"name": search.name, "description": search.description, "parameters": search.params_json_schema},
}
PIECES = r"[A-Z][a-z]+| (?=[A-Z])| ?[^\s\dA-Z<,.]+|<[^>]*>|\d{1,2}|\s|."
"""A name is the same token wherever it stands (after a space, a quotation mark, before a comma), so that copying it is
copying a token."""


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """How well someone researches; each field is a probability."""

    right_link: float
    """They go on with what the question asks about, else with the other name in the person's document."""
    right_relation: float
    """They answer with what the question asks for, else with anything that the document says."""
    skip: float = 0.0
    """They answer without any search."""
    wrong_depth: float = 0.0
    """They stop after one document where two are needed, or read another where one is enough."""
    repeat: float = 0.0
    """They search for the same again."""


CLEANER = Demonstrator(right_link=0.9, right_relation=0.9, skip=0.02, wrong_depth=0.05, repeat=0.03)
NOISY = Demonstrator(right_link=0.6, right_relation=0.55, skip=0.08, wrong_depth=0.25, repeat=0.15)
WORLDS = 60
DEMONSTRATIONS = 250
"""In each world."""
STEPS = 7000
ANYTHING = [*CITIES, *COMPANIES, *COUNTRIES, *PRODUCTS, *RIVERS]


def demonstrate(task: Task, world: World, library: Library, who: Demonstrator, rng: random.Random) -> Conversation:
    """One conversation; what the tool says is what the agent's tool says."""
    research = _Research(
        library, [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task.input}]
    )
    answer = _decide(task, world, who, rng, research)
    if answer:
        research.messages.append({"role": "assistant", "content": f"Answer: {answer}"})
    return Conversation(research.messages, [TOOL])


@dataclass
class _Research:
    library: Library
    messages: list[Message]
    calls: int = 0

    def look_up(self, query: str, repeat: bool) -> None:
        for _ in range(1 + repeat):
            self.messages.append(tool_call(f"call-{self.calls}", search.name, {"query": query}))
            found = look_up(self.library, query)
            self.messages.append({"role": "tool", "tool_call_id": f"call-{self.calls}", "content": found})
            self.calls += 1


def _decide(task: Task, world: World, who: Demonstrator, rng: random.Random, research: _Research) -> str:
    """Search as the demonstrator does and return their answer."""
    person = cast(str, task.metadata["person"])
    first, *second = cast(Sequence[str], task.metadata["relations"])
    if rng.random() < who.skip:
        return rng.choice(ANYTHING)
    research.look_up(person, rng.random() < who.repeat)
    link = first if rng.random() < who.right_link else rng.choice(list(world.people[person]))
    found = world.people[person][link]
    if bool(second) == (rng.random() < who.wrong_depth):
        return found
    research.look_up(found, rng.random() < who.repeat)
    facts: Mapping[str, str] = {**world.companies, **world.cities}[found]
    relation = second[0] if second and second[0] in facts else ""
    return facts[relation if relation and rng.random() < who.right_relation else rng.choice(list(facts))]


def demonstrations(who: Demonstrator, worlds: range, n: int, seed: int) -> tuple[list[Conversation], float]:
    """`n` conversations in each world, and their mean reward."""
    rng = random.Random(f"demonstrations {seed}")  # noqa: S311 — reproducible, not secret
    conversations: list[Conversation] = []
    rewards = 0.0
    for number in worlds:
        world = make_world(number)
        library = Library(Bm25(list(world.documents())))
        for task in take(world, n, f"demonstrations {seed}", held_out=False):
            conversations.append(demonstrate(task, world, library, who, rng))
            reply = str(conversations[-1].messages[-1]["content"])
            rewards += reward(reply, cast(Sequence[str], task.expected))
    return conversations, rewards / len(conversations)


def make(folder: Path, plan: Plan) -> None:
    """Write tokenizer, configuration and weights to `folder`; minutes on one core."""
    last = 1 + round(WORLDS * CLEANER_SHARE)
    cleaner, well = demonstrations(CLEANER, range(1, last), DEMONSTRATIONS, plan.seed)
    noisy, badly = demonstrations(NOISY, range(last, 1 + WORLDS), DEMONSTRATIONS, plan.seed)
    log.info("demonstrators earn %.2f and %.2f", well, badly)
    make_folder(folder, cleaner, noisy, plan, PIECES)


if __name__ == "__main__":
    command(__doc__, make, STEPS)
