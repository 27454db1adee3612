"""Caches of bounded size: the entries that were kept or used last, and a memory of what was logged already.

The invariant: never more than `most` entries are held, and the oldest is forgotten first. Reading an entry costs as much as in
a dict, because each call of a model reads several.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SAID = 4096
"""How many different things `Once` remembers; beyond them the oldest may be logged again."""


class Bounded(OrderedDict[K, V]):
    """A dict of at most `most` entries. `keep` adds an entry as the youngest, `used` makes one the youngest; `get` leaves the
    order."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """Keep a value under a key, in place of an earlier one, and return it."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
        return value

    def used(self, key: K) -> V | None:
        """Return the value under a key, which becomes the youngest; None if there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value


class Aging(Bounded[K, tuple[V, float]]):
    """Values that are valid for some seconds; each is kept with the time at which it was true."""

    def fresh(self, key: K, now: float, seconds: float) -> V | None:
        """Return the value under a key; None if there is none, or if it is at least `seconds` old at the time `now`."""
        known = self.get(key)
        return known[0] if known is not None and now - known[1] < seconds else None


class Once:
    """Tells of each thing whether it comes for the first time, so that a message that every call would cause is logged once."""

    def __init__(self) -> None:
        self._met = Bounded[Hashable, None](SAID)

    def first(self, what: Hashable = "") -> bool:
        """Whether this thing comes for the first time."""
        if what in self._met:
            return False
        self._met.keep(what, None)
        return True
