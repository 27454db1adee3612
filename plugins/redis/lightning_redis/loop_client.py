"""What one event loop has of the store: a lane to write, a lane to read, what it remembers, whom it wakes.

The invariant: nothing of a link is used from another loop, and what is remembered never changes in the database.
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
from lightning_redis.rollout_codec import Home, home_of
from lightning_redis.settings import Settings

CACHE_BYTES: Final = 32 << 20
"""Of tokens of recent calls, for each event loop that uses the store: usually one."""
MAX_HOMES = 100_000


class Link:
    """Made on its loop. `greeting` checks each new connection."""

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
        """Whether it is of no more use."""
        return self.writes.ended or self.reads.ended

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """For the length of the block, the link is not closed."""
        self._busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    async def close(self) -> None:
        """Let what is under way end, then disconnect."""
        await self.listeners.close()
        await self._idle.wait()
        await asyncio.gather(self.writes.close(), self.reads.close())

    async def run(self, script: Script, keys: Sequence[bytes], *arguments: str | float | bytes) -> list[Reply]:
        """Run a script; its reply begins with a word, which is returned as text."""
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
        """Run a script that takes effect once under the name of a call (`known_as`), which Redis knows for `seconds`.

        `more` and `rest` are keys and arguments that the script has beyond those that it names.
        """
        known = (known_as, max(1, math.ceil(min(seconds, KNOWN_SECONDS))))
        return await self.run(script, [*keys, self.keys("once", known_as), *more], *arguments, *known, *rest)

    async def home(self, rollout: str) -> Home:
        """Where a rollout belongs. Raises `StoreError` when nobody created it."""
        found = self._homes.get(rollout)
        if found is not None:
            return found
        (columns,) = await self.reads.read((b"HGET", self.keys("columns"), encoded(rollout)))
        if columns is None:
            raise rollout_state.unknown_rollout(rollout)
        return self._homes.keep(rollout, home_of(columns, rollout))

    def remember_home(self, rollout: Rollout) -> None:
        """Spare the next call a look."""
        self._homes.keep(rollout.id, Home(rollout.run, rollout.group, rollout.parent))


def done(reply: Sequence[Reply], **refusals: Callable[[list[Reply]], StoreError]) -> list[Reply]:
    """What a script replies behind its `ok`. Raises what there is for the word with which it refuses, `StoreError` for a word
    that is not known."""
    word, *rest = reply
    if word in refusals:
        raise refusals[word](rest)
    if word != "ok":
        raise unexpected(reply)
    return rest


def unexpected(reply: Sequence[Reply]) -> StoreError:
    """For a reply that no script of this release gives."""
    return StoreError(f"the redis store was answered {list(reply)!r}, which this release does not know")
