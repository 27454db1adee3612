"""An agent on a quest: eight choices of one word, of which the first two decide which gates open at the end.

Each choice is a prompt of its own that says the quest, what is carried and what is there, and nothing of how it came to that.
So rollouts of one quest come to the same prompts. Nothing in this file knows that it is being trained: `llm` only says where
the model is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import lightning
from openai import OpenAI

from lightning_examples.quest_python.tasks import quest_of
from lightning_examples.quest_python.world import (
    GATES,
    Quest,
    State,
    choices,
    choose,
    is_over,
    opened,
    opens,
    worth,
)

if TYPE_CHECKING:
    from lightning import LLM, Task
    from openai.types.chat import ChatCompletionMessageParam

SYSTEM = "You are on a quest. Answer with one word."
WINE, WOOD = "Quest: a gate of wine, then a gate of water.\n", "Quest: a gate of wood, then a gate of cherries.\n"
EXAMPLES = (
    (f"{WINE}You carry a red key and a blue key. Go left, ahead or right.\nThe jewels are ahead", "ahead"),
    (f"{WINE}You carry a red key.\nFor the gate of water take red, blue or green", "blue"),
    (f"{WOOD}You carry nothing.\nFor the gate of wood take red, blue or green", "green"),
    (f"{WOOD}You carry a green key and a red key. Go left, ahead or right.\nThe furs are right", "right"),
    (f"{WOOD}You carry a green key.\nFor the gate of cherries take red, blue or green", "red"),
    (f"{WINE}You carry a red key and a blue key. Go left, ahead or right.\nThe swords are left", "left"),
)
"""Answers of all kinds, so that the untrained model knows the form. All prompts share them, so they cost next to nothing."""
MAX_TOKENS = 2
"""A word, and the token that ends the answer. Every choice is one token of SmolLM2's."""
MAX_CALLS = 12
"""Answers that are no choice are wasted moves: the same is asked again, and after so many answers the quest is over."""


def agent(task: Task, llm: LLM) -> dict[str, float]:
    """Go on one quest. `reached` says whether both gates opened, `treasures` which part of the treasures was found."""
    client, quest, state = _client(llm.base_url).with_options(api_key=llm.api_key), quest_of(task), State()
    for _ in range(MAX_CALLS):
        reply = client.chat.completions.create(
            model=llm.model, messages=messages(quest, state), max_tokens=MAX_TOKENS, temperature=1.0
        )
        choice = read(reply.choices[0].message.content or "", state)
        if choice is not None:
            state = act(quest, state, choice)
        if is_over(quest, state):
            meet_gates(quest, state)
            break
    return {
        "reward": worth(quest, state),
        "reached": float(opened(quest, state) == len(quest.gates)),
        "treasures": state.treasures / len(quest.rooms),
    }


def messages(quest: Quest, state: State) -> list[ChatCompletionMessageParam]:
    """The prompt of a state: all that is to be known for the choice, and nothing of the way to it."""
    shown: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]
    for question, answer in EXAMPLES:
        shown += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*shown, {"role": "user", "content": ask(quest, state)}]


def ask(quest: Quest, state: State) -> str:
    """A state in words."""
    carried = " and ".join(f"a {key} key" for key in state.keys) or "nothing"
    start = "Quest: a gate of {}, then a gate of {}.\nYou carry {}.".format(*quest.gates, carried)
    named = "{}, {} or {}".format(*choices(state))
    if len(state.keys) < GATES:
        return f"{start}\nFor the gate of {quest.gates[len(state.keys)]} take {named}"
    room = quest.rooms[state.room]
    return f"{start} Go {named}.\n{look(room.treasure, room.side)}"


def read(reply: str, state: State) -> str | None:
    """The choice that a reply names; None for any other reply."""
    word = reply.strip().rstrip(".").lower()
    return word if word in choices(state) else None


def act(quest: Quest, state: State, choice: str) -> State:
    """Do what was chosen, with the tool for it."""
    if len(state.keys) < GATES:
        take(choice)
    else:
        search(choice, quest.rooms[state.room].side)
    return choose(quest, state, choice)


def meet_gates(quest: Quest, state: State) -> None:
    """Go through the gates, until one stays closed."""
    for key, gate in zip(state.keys, quest.gates, strict=True):
        if not open_gate(gate, key):
            break


@functools.cache
def _client(base_url: str) -> OpenAI:
    # A new client builds a connection pool (tens of ms); a new key on the same client costs next to nothing.
    return OpenAI(base_url=base_url, api_key="set per call")


# --- tools ------------------------------------------------------------------------------------------------------------


@lightning.tool
def take(key: str) -> str:
    """Take a key along; the others stay behind for good."""
    return f"taken: the {key} key"


@lightning.tool
def look(treasure: str, side: str) -> str:
    """What there is to see in a room."""
    return f"The {treasure} are {side}"


@lightning.tool
def search(side: str, lies: str) -> bool:
    """Go to one side of a room, and out of it: whether the treasure lay there."""
    return side == lies


@lightning.tool
def open_gate(gate: str, key: str) -> bool:
    """Whether a gate opens."""
    return opens(key, gate)
