"""What a process keeps at hand of things that never end: the entries that were kept or used last, and what it said already.

The invariant: never more than `most` entries are held, and the oldest is forgotten first. To read one costs what it costs of a
dict: each call of a model reads several.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SAID = 4096
"""Things that are said once each: with more of them, the first may be said again."""


class Bounded(OrderedDict[K, V]):
    """At most `most` entries, each kept by `keep`, which makes it the youngest, as `used` does; `get` leaves the order."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """Keep a value under a key, in place of the one that is there."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
        return value

    def used(self, key: K) -> V | None:
        """The value under a key, which becomes the youngest; None where there is none."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value


class Aging(Bounded[K, tuple[V, float]]):
    """Values that are believed for some seconds; each is kept with the time at which it was true."""

    def fresh(self, key: K, now: float, seconds: float) -> V | None:
        """The value under a key; None where there is none, or one of so many seconds ago or more."""
        known = self.get(key)
        return known[0] if known is not None and now - known[1] < seconds else None


class Once:
    """Says of each thing whether it comes for the first time: what would come with every call is logged once."""

    def __init__(self) -> None:
        self._met = Bounded[Hashable, None](SAID)

    def first(self, what: Hashable = "") -> bool:
        """Whether it comes for the first time."""
        if what in self._met:
            return False
        self._met.keep(what, None)
        return True
