"""What one event loop has of the store: a lane for writes, a lane for reads, caches, and listeners for changes.

The invariant: a link is used only from its own loop, and what it caches never changes in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from lightning.bounded import Bounded
from lightning.errors import StoreError
from lightning.store import rollout_state
from lightning.store.codec import ParentCache
from lightning.store.protocol import KNOWN_SECONDS
from lightning.types import Rollout

from lightning_redis.calls import CallKey
from lightning_redis.change_listener import Listeners
from lightning_redis.connection import Reply
from lightning_redis.keys import Keys, encoded
from lightning_redis.lua_scripts import Script
from lightning_redis.pipeline import Greeting, Lane
from lightning_redis.rollout_codec import Home, home_of, position_of
from lightning_redis.settings import Settings

CACHE_BYTES: Final = 32 << 20
"""Bytes of recent calls' tokens that each event loop caches; usually one loop uses the store."""
MAX_HOMES = 100_000


class Link:
    """The parts of one event loop, made on that loop. `greeting` checks each new connection."""

    def __init__(self, settings: Settings, keys: Keys, greeting: Greeting) -> None:
        self.keys = keys
        self.writes = Lane(settings, keys, greeting)
        self.reads = Lane(settings, keys, greeting)
        self.parents = ParentCache[CallKey](CACHE_BYTES)
        self.listeners = Listeners(settings)
        self._homes = Bounded[str, Home](MAX_HOMES)
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ended(self) -> bool:
        """Whether the link can no longer be used."""
        return self.writes.ended or self.reads.ended

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the link from being closed for the length of the block."""
        self._busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def close(self) -> None:
        """Wait until the link is no longer in use, then disconnect."""
        await self.listeners.close()
        await self._idle.wait()
        await asyncio.gather(self.writes.close(), self.reads.close())

    async def run(self, script: Script, keys: Sequence[bytes], *arguments: str | float | bytes) -> list[Reply]:
        """Run a script, and return its reply with the first word as text."""
        word, *rest = await self.writes.run(script, keys, [encoded(argument) for argument in arguments])
        return [word.decode(), *rest]

    async def run_once(
        self,
        script: Script,
        keys: Sequence[bytes],
        known_as: str,
        *arguments: str | float | bytes,
        seconds: float = KNOWN_SECONDS,
        more: Sequence[bytes] = (),
        rest: Sequence[str | float | bytes] = (),
    ) -> list[Reply]:
        """Run a script that takes effect once for calls with the same name (`known_as`), which Redis remembers for `seconds`.

        `more` and `rest` are keys and arguments of the script besides those that it names.
        """
        known = (known_as, max(1, math.ceil(min(seconds, KNOWN_SECONDS))))
        return await self.run(script, [*keys, self.keys("once", known_as), *more], *arguments, *known, *rest)

    async def home(self, rollout: str) -> Home:
        """Return a rollout's run, group and parent. Raises `StoreError` for an unknown rollout."""
        found = self._homes.get(rollout)
        if found is not None:
            return found
        (columns,) = await self.reads.read((b"HGET", self.keys("columns"), encoded(rollout)))
        if columns is None:
            raise rollout_state.unknown_rollout(rollout)
        return self._homes.keep(rollout, home_of(columns, rollout))

    def remember_home(self, rollout: Rollout) -> None:
        """Cache the run, group and parent of a rollout."""
        self._homes.keep(rollout.id, Home(rollout.run, rollout.group, rollout.parent))


def done(reply: Sequence[Reply], **refusals: Callable[[list[Reply]], StoreError]) -> list[Reply]:
    """Return a script's reply after its word `ok`. Raises the error in `refusals` for another word, `StoreError` for an unknown
    one."""
    word, *rest = reply
    if word in refusals:
        raise refusals[word](rest)
    if word != "ok":
        raise unexpected(reply)
    return rest


def refused(word: str, rest: Sequence[Reply], rollout: str, attempt: int) -> StoreError:
    """Return the error for a word with which a script refuses the writer of an attempt; raise the reason that the rollout's
    state in `rest` shows, if there is one."""
    if word == "unknown":
        return rollout_state.unknown_rollout(rollout)
    if word != "refused":
        return unexpected([word, *rest])
    rollout_state.check_fence(position_of(rest[0], rollout), attempt)
    return StoreError(f"attempt {attempt} of rollout {rollout!r} was refused: ask again")


def unexpected(reply: Sequence[Reply]) -> StoreError:
    """Return the error for a reply that no script of this release gives."""
    return StoreError(f"the redis store was answered {list(reply)!r}, which this release does not know")
