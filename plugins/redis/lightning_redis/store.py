"""`RedisStore`: the `Store` protocol over one Redis.

The invariant: methods may be awaited on any event loop of the process that opened the store. A write that was awaited is as
durable as the URL demands, and every later read sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from lightning.store.operation import Operation, Operations
from lightning.store.threads import LookingWatch, check_process, closed_error

from lightning_redis import records
from lightning_redis import rollouts as rollout_ops
from lightning_redis import transitions as transition_ops
from lightning_redis.change_listener import entry_of, newest
from lightning_redis.handshake import Ask, check_mark, check_same, check_server
from lightning_redis.keys import Keys
from lightning_redis.loop_client import Link
from lightning_redis.settings import Settings, from_url

FUNCTIONS: Final[Mapping[str, Callable[..., Awaitable[Any]]]] = {
    "put_run": records.put_run,
    "get_run": records.get_run,
    "list_runs": records.list_runs,
    "create_rollouts": rollout_ops.create,
    "get_rollout": rollout_ops.get,
    "list_rollouts": rollout_ops.page,
    "count_rollouts": rollout_ops.count,
    "lease": rollout_ops.lease,
    "renew": rollout_ops.renew,
    "complete": rollout_ops.complete,
    "release": rollout_ops.release,
    "append": transition_ops.append,
    "next_seq": transition_ops.next_seq,
    "transitions": transition_ops.read,
    "transitions_of": transition_ops.read_many,
    "attempts_of": records.attempts_of,
    "commit_step": records.commit_step,
    "steps": records.steps,
    "last_step": records.last_step,
    "log_metrics": records.log_metrics,
    "metrics": records.metrics,
    "put_state": records.put_state,
    "keep_state": records.keep_state,
    "get_state": records.get_state,
}
"""The function of each operation, called with the loop's link and the operation's arguments by name."""


class RedisStore(Operations):
    """A store in one Redis, in the keys that begin with `settings.prefix`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = Keys(settings.prefix)
        self._lock = threading.Lock()
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self._database = ""
        self._make = True
        self._process = 0

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """Make the store of a URL: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, with `?prefix=`,
        `?durability=`, `?timeout=` (seconds) and `?ca=FILE`. Raises `ConfigError`."""
        return cls(from_url(url))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.place!r})"

    async def open(self, *, make: bool = True) -> None:
        """Connect, and check the server and the database. With `make` the database is created if there is none. Idempotent."""
        if self._process != os.getpid():  # a forked process must not use its parent's connections
            self._links, self._database, self._process = {}, "", os.getpid()
        if self._database:
            return
        self._make = make
        link = self._link_here()
        try:
            with link.in_use():
                await link.writes.read((b"PING",))  # the greeting of its connection says which database it is
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the connections of all loops."""
        with self._lock:
            links, self._links = self._links, {}
            self._database = ""
        if self._process != os.getpid():
            return
        here = asyncio.get_running_loop()
        for loop, link in links.items():
            if loop is here:
                await link.close()
            elif loop.is_running():  # a stopped loop's tasks have ended with it
                closed = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(link.close(), loop))
                with contextlib.suppress(TimeoutError):  # it may stop running at this very moment
                    await asyncio.wait_for(closed, self._settings.timeout + 1.0)

    async def _greet(self, ask: Ask) -> None:
        """Check the server of a new connection, and that it has the database that was opened."""
        await check_server(ask, self._settings)
        if self._database:
            await check_same(ask, self._settings, self._keys, self._database)
        else:
            self._database = await check_mark(ask, self._settings, self._keys, self._make)

    def _link_here(self) -> Link:
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other, link in self._links.items() if other.is_closed() or link.ended]:
                del self._links[other]
            if loop not in self._links:
                self._links[loop] = Link(self._settings, self._keys, self._greet)
            return self._links[loop]

    @contextlib.contextmanager
    def _link(self) -> Iterator[Link]:
        if not self._database:
            raise closed_error(self._settings.place)
        check_process(self._settings.place, self._process)
        link = self._link_here()
        with link.in_use():
            yield link

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation on this loop's link."""
        with self._link() as link:
            return await self._function(operation)(link, **arguments)

    def _function(self, operation: Operation) -> Callable[..., Awaitable[Any]]:
        group = operation.group
        if group is None:
            return FUNCTIONS[operation.name]
        function: Callable[..., Awaitable[Any]] = group.function(operation, group.part(operation, "redis", self), self)
        return function

    @contextlib.asynccontextmanager
    async def watch(self, run: str) -> AsyncIterator[LookingWatch[bytes]]:
        """Watch a run, by comparing the last entry of its stream."""
        stream = self._keys("changes", run)

        async def look() -> bytes:
            with self._link() as link:
                (entries,) = await link.reads.read(newest(stream))
                return entry_of(entries)

        known = await look()
        async with self._link_here().listeners.listening(stream) as event:
            yield LookingWatch(look, event, known)
