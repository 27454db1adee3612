"""The rules of the quest: what can be chosen where, what a choice does, and what a whole quest is worth.

The invariant: a state follows from the quest and the choices alone, a thing that was packed is never put back, and nothing but
what was packed decides which dangers can be passed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

WAYS: Final[Mapping[str, Sequence[str]]] = {
    "boat": ("river", "lake", "sea"),
    "horse": ("desert", "plain", "steppe"),
    "map": ("forest", "maze", "cave"),
}
"""The first thing to pack, and the dangers on the way that it helps against."""
WEAPONS: Final[Mapping[str, Sequence[str]]] = {
    "shield": ("dragon", "knight", "giant"),
    "light": ("ghost", "shadow", "spirit"),
    "bread": ("dog", "wolf", "bear"),
}
"""The second thing to pack, and the guards of the castle that it helps against."""
SIDES: Final = ("left", "ahead", "right")
ROOMS: Final = 6
TREASURES: Final = 0.3
"""What all treasures of the rooms are worth together."""
PASSED: Final = (0.0, 0.2, 0.7)
"""What it is worth to pass none of the dangers, the first, and both."""


@dataclass(frozen=True, slots=True)
class Room:
    """A treasure, and the side on which it lies."""

    treasure: str
    side: str


@dataclass(frozen=True, slots=True)
class Quest:
    """A danger on the way, a guard at the end, and rooms between the packing and both."""

    danger: str
    guard: str
    rooms: tuple[Room, ...]

    @property
    def dangers(self) -> tuple[str, str]:
        """Those that are met at the end, in this order."""
        return self.danger, self.guard


@dataclass(frozen=True, slots=True)
class State:
    """How far somebody is: what was packed, how many rooms are behind, and how many treasures were found there."""

    packed: tuple[str, ...] = ()
    room: int = 0
    treasures: int = 0


SHELVES: Final = (tuple(WAYS), tuple(WEAPONS))
"""What there is to pack, first and second."""


def choices(state: State) -> tuple[str, ...]:
    """What can be chosen in a state, always in the same order."""
    return SHELVES[len(state.packed)] if len(state.packed) < len(SHELVES) else SIDES


def choose(quest: Quest, state: State, choice: str) -> State:
    """The state after one of its `choices`. Raises ValueError for anything else, and after the last room."""
    if is_over(quest, state) or choice not in choices(state):
        raise ValueError(f"{choice!r} cannot be chosen in {state}")
    if len(state.packed) < len(SHELVES):
        return replace(state, packed=(*state.packed, choice))
    found = quest.rooms[state.room].side == choice
    return replace(state, room=state.room + 1, treasures=state.treasures + found)


def is_over(quest: Quest, state: State) -> bool:
    """Whether all rooms are behind, so that the dangers come."""
    return state.room == len(quest.rooms)


def helps(thing: str, danger: str) -> bool:
    """Whether with this thing one passes this danger."""
    return danger in {**WAYS, **WEAPONS}[thing]


def passed(quest: Quest, state: State) -> int:
    """How many dangers are passed one after the other; none before the last room."""
    if not is_over(quest, state):
        return 0
    met = takewhile(lambda danger: any(helps(thing, danger) for thing in state.packed), quest.dangers)
    return len(tuple(met))


def worth(quest: Quest, state: State) -> float:
    """The reward, from 0 to 1, of a quest that ends in this state."""
    return PASSED[passed(quest, state)] + TREASURES * state.treasures / len(quest.rooms)


def best(quest: Quest, state: State) -> str:
    """The choice of somebody who knows the rules."""
    if len(state.packed) < len(SHELVES):
        danger = quest.dangers[len(state.packed)]
        return next(thing for thing in choices(state) if helps(thing, danger))
    return quest.rooms[state.room].side
