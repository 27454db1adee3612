"""`RedisStore`: the `Store` protocol over one Redis.

The invariant: methods may be awaited from any event loop of the process that opened the store; a write that was awaited is as
durable as the URL asks for, and every later read sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from lightning.errors import StoreError
from lightning.store import rollout_state
from lightning.store.protocol import (
    LATEST,
    Alias,
    Attempt,
    MetricPoint,
    Page,
    ResourceUse,
    RolloutCount,
    RunWatch,
)
from lightning.types import (
    Json,
    Lease,
    Outcome,
    Resource,
    Rollout,
    Run,
    Span,
    Status,
    StepRecord,
    Token,
    Transition,
)

from lightning_redis import records
from lightning_redis import resources as resource_ops
from lightning_redis import rollouts as rollout_ops
from lightning_redis import spans as span_ops
from lightning_redis import tokens as token_ops
from lightning_redis import transitions as transition_ops
from lightning_redis.change_listener import EntryWatch, entry_of, newest
from lightning_redis.handshake import Ask, check_mark, check_same, check_server
from lightning_redis.keys import Keys
from lightning_redis.loop_client import Link
from lightning_redis.settings import Settings, from_url


class RedisStore:
    """A store in one Redis, under the keys that begin with `settings.prefix`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = Keys(settings.prefix)
        self._lock = threading.Lock()
        self._links: dict[asyncio.AbstractEventLoop, Link] = {}
        self._database = ""
        self._process = 0

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """`redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, with `?prefix=`, `?durability=`, `?timeout=`
        (seconds) and `?ca=FILE`. Raises `ConfigError`."""
        return cls(from_url(url))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.place!r})"

    async def open(self) -> None:
        """See `Store.open`."""
        if self._process != os.getpid():  # connections of the process this one was forked from are not its own
            self._links, self._database, self._process = {}, "", os.getpid()
        if self._database:
            return
        link = self._link_here()
        try:
            with link.in_use():
                await link.writes.read((b"PING",))  # the greeting of its connection says which database it is
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            links, self._links = self._links, {}
            self._database = ""
        if self._process != os.getpid():
            return
        here = asyncio.get_running_loop()
        for loop, link in links.items():
            if loop is here:
                await link.close()
            elif loop.is_running():  # the tasks of one that is not have ended with it
                closed = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(link.close(), loop))
                with contextlib.suppress(TimeoutError):  # it may stop running at this very moment
                    await asyncio.wait_for(closed, self._settings.timeout + 1.0)

    async def _greet(self, ask: Ask) -> None:
        """Check the server at the other end of a new connection."""
        await check_server(ask, self._settings)
        if self._database:
            await check_same(ask, self._settings, self._keys, self._database)
        else:
            self._database = await check_mark(ask, self._settings, self._keys)

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
            raise StoreError(
                f"store {self._settings.place} is not open: await store.open() first, and use it before close()"
            )
        if self._process != os.getpid():
            raise StoreError(
                f"store {self._settings.place} was opened in process {self._process} and is used in its fork {os.getpid()}: "
                "open a store of its own in each process"
            )
        link = self._link_here()
        with link.in_use():
            yield link

    # runs -------------------------------------------------------------------------------------------------------
    async def put_run(self, run: Run) -> Run:
        """See `Store.put_run`."""
        with self._link() as link:
            return await records.put_run(link, run)

    async def get_run(self, run: str) -> Run | None:
        """See `Store.get_run`."""
        with self._link() as link:
            return await records.get_run(link, run)

    async def list_runs(
        self, project: str | None = None, *, after: str = "", limit: int | None = None, brief: bool = False
    ) -> list[Run]:
        """See `Store.list_runs`."""
        with self._link() as link:
            return await records.list_runs(link, project, after, limit, brief)

    def watch(self, run: str) -> AbstractAsyncContextManager[RunWatch]:
        """See `Store.watch`."""
        return self._watch(run)

    @contextlib.asynccontextmanager
    async def _watch(self, run: str) -> AsyncIterator[RunWatch]:
        stream = self._keys("changes", run)

        async def look() -> bytes:
            with self._link() as link:
                (entries,) = await link.reads.read(newest(stream))
                return entry_of(entries)

        known = await look()
        async with self._link_here().listeners.listening(stream) as listener:
            yield EntryWatch(look, listener, known)

    # rollouts ---------------------------------------------------------------------------------------------------
    async def create_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """See `Store.create_rollouts`."""
        with self._link() as link:
            return await rollout_ops.create(link, rollouts)

    async def get_rollout(self, rollout: str) -> Rollout | None:
        """See `Store.get_rollout`."""
        with self._link() as link:
            return await rollout_ops.get(link, rollout)

    async def list_rollouts(
        self,
        run: str,
        *,
        split: str | None = None,
        step: int | None = None,
        status: Status | None = None,
        cursor: str = "",
        limit: int = 1000,
    ) -> Page:
        """See `Store.list_rollouts`."""
        with self._link() as link:
            return await rollout_ops.page(link, run, split, step, status, cursor, limit)

    async def count_rollouts(self, run: str) -> list[RolloutCount]:
        """See `Store.count_rollouts`."""
        with self._link() as link:
            return await rollout_ops.count(link, run)

    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """See `Store.lease`."""
        with self._link() as link:
            return await rollout_ops.lease(link, run, worker, limit, ttl, once)

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """See `Store.renew`."""
        with self._link() as link:
            return await rollout_ops.renew(link, lease, ttl)

    async def complete(self, rollout: str, attempt: int, outcome: Outcome, *, spend: bool = True) -> Rollout:
        """See `Store.complete`."""
        end = rollout_state.ending(rollout, outcome)
        with self._link() as link:
            return await rollout_ops.complete(link, rollout, attempt, end, spend=spend)

    async def release(self, worker: str, *, once: str = "") -> int:
        """See `Store.release`."""
        with self._link() as link:
            return await rollout_ops.release(link, worker, once)

    # transitions ------------------------------------------------------------------------------------------------
    async def append(self, transitions: Sequence[Transition]) -> int:
        """See `Store.append`."""
        given = tuple(transitions)  # it is read after others have run, who may change a list of theirs
        with self._link() as link:
            return await transition_ops.append(link, given)

    async def next_seq(self, rollout: str, attempt: int) -> int:
        """See `Store.next_seq`."""
        with self._link() as link:
            return await transition_ops.next_seq(link, rollout, attempt)

    async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
        """See `Store.transitions`."""
        with self._link() as link:
            return await transition_ops.read(link, rollout, attempt)

    async def transitions_of(self, attempts: Sequence[tuple[str, int]]) -> list[list[Transition]]:
        """See `Store.transitions_of`."""
        with self._link() as link:
            return await transition_ops.read_many(link, attempts)

    async def attempts_of(self, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
        """See `Store.attempts_of`."""
        with self._link() as link:
            return await records.attempts_of(link, attempts)

    # spans ------------------------------------------------------------------------------------------------------
    async def append_spans(self, spans: Sequence[Span]) -> int:
        """See `Store.append_spans`."""
        with self._link() as link:
            return await span_ops.append(link, spans)

    async def spans(self, rollout: str, attempt: int | None = None) -> list[Span]:
        """See `Store.spans`."""
        with self._link() as link:
            return await span_ops.read(link, rollout, attempt)

    # steps and metrics ------------------------------------------------------------------------------------------
    async def commit_step(self, record: StepRecord) -> None:
        """See `Store.commit_step`."""
        with self._link() as link:
            await records.commit_step(link, record)

    async def steps(
        self, run: str, *, after: int = -1, limit: int | None = None, brief: bool = False
    ) -> list[StepRecord]:
        """See `Store.steps`."""
        with self._link() as link:
            return await records.steps(link, run, after, limit, brief)

    async def last_step(self, run: str) -> StepRecord | None:
        """See `Store.last_step`."""
        with self._link() as link:
            return await records.last_step(link, run)

    async def log_metrics(self, run: str, step: int, values: Mapping[str, float], *, once: str = "") -> None:
        """See `Store.log_metrics`."""
        with self._link() as link:
            await records.log_metrics(link, run, step, values, once)

    async def metrics(self, run: str) -> list[MetricPoint]:
        """See `Store.metrics`."""
        with self._link() as link:
            return await records.metrics(link, run)

    # small state ------------------------------------------------------------------------------------------------
    async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
        """See `Store.put_state`."""
        with self._link() as link:
            await records.put_state(link, run, key, value, once)

    async def keep_state(self, run: str, key: str, value: Json) -> Json:
        """See `Store.keep_state`."""
        with self._link() as link:
            return await records.keep_state(link, run, key, value)

    async def get_state(self, run: str, key: str) -> Json:
        """See `Store.get_state`."""
        with self._link() as link:
            return await records.get_state(link, run, key)

    # tokens -----------------------------------------------------------------------------------------------------
    async def put_token(self, token: Token, *, once: str = "") -> Token:
        """See `Store.put_token`."""
        with self._link() as link:
            return await token_ops.put(link, token, once)

    async def get_token(self, token: str) -> Token | None:
        """See `Store.get_token`."""
        with self._link() as link:
            return await token_ops.get(link, token)

    async def list_tokens(self) -> list[Token]:
        """See `Store.list_tokens`."""
        with self._link() as link:
            return await token_ops.every(link)

    async def revoke_token(self, token: str) -> Token:
        """See `Store.revoke_token`."""
        with self._link() as link:
            return await token_ops.revoke(link, token)

    # resources --------------------------------------------------------------------------------------------------
    async def put_resource(self, resource: Resource) -> Resource:
        """See `Store.put_resource`."""
        with self._link() as link:
            return await resource_ops.put(link, resource)

    async def get_resource(self, name: str, which: int | str = LATEST) -> Resource | None:
        """See `Store.get_resource`."""
        with self._link() as link:
            return await resource_ops.get(link, name, which)

    async def list_resources(self, name: str | None = None) -> list[Resource]:
        """See `Store.list_resources`."""
        with self._link() as link:
            return await resource_ops.versions(link, name)

    async def set_alias(self, name: str, alias: str, version: int, *, once: str = "") -> Alias:
        """See `Store.set_alias`."""
        with self._link() as link:
            return await resource_ops.set_alias(link, name, alias, version, once)

    async def roll_back_alias(self, name: str, alias: str, *, once: str = "") -> Alias:
        """See `Store.roll_back_alias`."""
        with self._link() as link:
            return await resource_ops.roll_back(link, name, alias, once)

    async def list_aliases(self, name: str | None = None) -> list[Alias]:
        """See `Store.list_aliases`."""
        with self._link() as link:
            return await resource_ops.aliases(link, name)

    async def alias_history(self, name: str, alias: str) -> list[Alias]:
        """See `Store.alias_history`."""
        with self._link() as link:
            return await resource_ops.history(link, name, alias)

    async def resource_uses(self, name: str) -> list[ResourceUse]:
        """See `Store.resource_uses`."""
        with self._link() as link:
            return await resource_ops.uses(link, name)
