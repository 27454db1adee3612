"""The rules of the quest: what can be chosen where, what a choice does, and what a whole quest is worth.

The invariant: a state follows from the quest and the choices alone, a key that was taken is never put back, and nothing but
the keys decides which gates open at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

KEYS: Final[Mapping[str, Sequence[str]]] = {
    "red": ("fire", "blood", "roses", "rubies"),
    "blue": ("ice", "rain", "sky", "waves"),
    "green": ("grass", "leaves", "moss", "ivy"),
}
"""The keys, and what the gates are made of that each opens."""
COLOURS: Final = tuple(KEYS)
SIDES: Final = ("left", "ahead", "right")
GATES: Final = 2
ROOMS: Final = 6
TREASURES: Final = 0.3
"""What all treasures of the rooms are worth together."""
OPENED: Final = (0.0, 0.2, 0.7)
"""What it is worth to come through none of the gates, the first, and both."""


@dataclass(frozen=True, slots=True)
class Room:
    """A treasure, and the side on which it lies."""

    treasure: str
    side: str


@dataclass(frozen=True, slots=True)
class Quest:
    """What the two gates at the end are made of, and the rooms before them."""

    gates: tuple[str, str]
    rooms: tuple[Room, ...]


@dataclass(frozen=True, slots=True)
class State:
    """How far somebody is: the keys that were taken, how many rooms are behind, and how many treasures were found there."""

    keys: tuple[str, ...] = ()
    room: int = 0
    treasures: int = 0


def choices(state: State) -> tuple[str, ...]:
    """What can be chosen in a state, always in the same order: a key for each gate, then a side in each room."""
    return COLOURS if len(state.keys) < GATES else SIDES


def choose(quest: Quest, state: State, choice: str) -> State:
    """The state after one of its `choices`. Raises ValueError for anything else, and after the last room."""
    if is_over(quest, state) or choice not in choices(state):
        raise ValueError(f"{choice!r} cannot be chosen in {state}")
    if len(state.keys) < GATES:
        return replace(state, keys=(*state.keys, choice))
    found = quest.rooms[state.room].side == choice
    return replace(state, room=state.room + 1, treasures=state.treasures + found)


def is_over(quest: Quest, state: State) -> bool:
    """Whether all rooms are behind, so that the gates come."""
    return state.room == len(quest.rooms)


def opens(key: str, gate: str) -> bool:
    """Whether this key opens a gate that is made of this."""
    return gate in KEYS[key]


def opened(quest: Quest, state: State) -> int:
    """How many gates open one after the other, each by the key that was taken for it; none before the last room."""
    if not is_over(quest, state):
        return 0
    return sum(1 for _ in takewhile(lambda pair: opens(*pair), zip(state.keys, quest.gates, strict=True)))


def worth(quest: Quest, state: State) -> float:
    """The reward, from 0 to 1, of a quest that ends in this state."""
    return OPENED[opened(quest, state)] + TREASURES * state.treasures / len(quest.rooms)


def best(quest: Quest, state: State) -> str:
    """The choice of somebody who knows the rules."""
    if len(state.keys) < GATES:
        return next(key for key in COLOURS if opens(key, quest.gates[len(state.keys)]))
    return quest.rooms[state.room].side
