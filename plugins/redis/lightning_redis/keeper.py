"""`RedisKeeper`: maintenance of the keys of one prefix.

The invariant: the calls of a group are deleted in one script, which checks that all its rollouts have ended; a rollout's own
keys are deleted in one transaction. What is interrupted in between can be repeated. Appending makes Redis check the parent of a
call, so that a deleted call does not become a parent.

Redis makes copies itself, of all its prefixes together: `backup` and `restore` name its commands.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning.errors import ConfigError, StoreError
from lightning.plugins import plugins
from lightning.store import rows
from lightning.store.protocol import TRACES_RUN
from lightning.store.schema import SCHEMA
from lightning.store.url import redacted
from lightning.types import Status
from lightning_db import queries
from lightning_db.keeper import DatabaseStatus, Weight, count_tokens

from lightning_redis import lua_scripts, records
from lightning_redis.connection import Command, translate
from lightning_redis.handshake import Ask, check_mark, check_server
from lightning_redis.keys import Keys, encoded
from lightning_redis.loop_client import Link
from lightning_redis.rollout_codec import home_of, stand
from lightning_redis.settings import from_url

BATCH: Final = 500
"""The most commands that are sent at once."""
OWN_OF_RUN: Final = ("all", *Status, "leases", "steps", "proofs", "metrics", "state", "changes")


@dataclass(frozen=True, slots=True)
class _Member:
    """A rollout of a run: its number, group and step, and how many attempts it had. `worker` holds it; empty: none does."""

    rollout: str
    number: int
    group: str
    step: int
    attempts: int
    worker: str


class RedisKeeper:
    """Maintains the prefix that a `redis://` URL names."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._settings = from_url(url)
        self._keys = Keys(self._settings.prefix)

    async def status(self) -> DatabaseStatus:
        """Return the database's numbers. They are read key by key while others write; bytes are Redis' estimates. Raises
        `ConfigError` where there is no store."""
        async with self._link() as link:
            runs, tokens = await records.list_runs(link), await self._tokens(link)
            counts, size = await self._measure(link)
            rollouts: dict[str, int] = {}
            for status in Status:
                found = await _ask(link, [(b"ZCARD", self._keys(status.value, run.id)) for run in runs])
                rollouts[status.value] = sum(found)
        activity = await self.activity()
        return DatabaseStatus(
            store=redacted(self._url),
            schema=SCHEMA,
            bytes=size,
            runs=len(runs),
            rollouts={status: count for status, count in rollouts.items() if count},
            calls=counts["calls"],
            spans=counts["spans"],
            steps=counts["steps"],
            resources=counts["resources:versions"],
            tokens=tokens,
            oldest=min((run.created_at for run in runs), default=None),
            newest=max(activity.values(), default=None),
        )

    async def _tokens(self, link: Link) -> dict[str, int] | None:
        """Return the numbers of tokens by state; None where no plugin keeps tokens."""
        for asked in plugins().operations():
            if asked.name == "list_tokens" and asked.group is not None:
                every = asked.group.function(asked, asked.group.part(asked, "redis", self), self)
                return count_tokens([(token.expires_at, token.revoked_at) for token in await every(link)], time.time())
        return None

    async def backup(self, target: Path) -> None:
        """Raise `ConfigError`: Redis makes backups by its own commands."""
        raise ConfigError(
            f"{target} cannot be made of Redis, which copies itself: run `redis-cli --rdb {target}`, while runs go on; "
            "`lightning db export` writes the content to files"
        )

    async def restore(self, source: Path) -> None:
        """Raise `ConfigError`: Redis is restored by its own means."""
        raise ConfigError(
            f"{source} cannot be read into Redis: start Redis with a copy that it made itself (dbfilename), and restore a "
            "backup that this program made into PostgreSQL or a file"
        )

    async def activity(self) -> dict[str, float]:
        """Return the time of each run's last lease or ended attempt."""
        newest: dict[str, float] = {}

        def note(run: str | None, at: object) -> None:
            if run is not None and at is not None:
                newest[run] = max(newest.get(run, 0.0), float(str(at)))

        runs: dict[str, str] = {}
        async with self._link() as link:
            async for rollout, text in self._fields(link, "standing"):
                found = stand(text, rollout)
                runs[rollout] = found["run"]
                note(found["run"], found.get("leased_at"))
            async for place, text in self._fields(link, "attempts"):
                note(runs.get(place.rpartition(":")[0]), json.loads(text).get("ended_at"))
        return newest

    async def busy_runs(self) -> frozenset[str]:
        """Return the runs with a valid lease."""
        async with self._link() as link:
            (names, (seconds, micros)) = await _ask(link, [(b"HKEYS", self._keys("runs")), (b"TIME",)])
            now = b"(%d.%06d" % (int(seconds), int(micros))
            held = await _ask(link, [(b"ZCOUNT", self._keys("leases", name.decode()), now, b"+inf") for name in names])
        return frozenset(name.decode() for name, count in zip(names, held, strict=True) if count)

    async def branched_runs(self) -> frozenset[str]:
        """Return the runs with rollouts that are branches."""
        async with self._link() as link:
            homes = [home_of(text, rollout) async for rollout, text in self._fields(link, "columns")]
        return frozenset(home.run for home in homes if home.parent is not None)

    async def weigh(self, run: str, groups: Sequence[str]) -> list[Weight]:
        """Return the numbers of calls and spans of each group, and the calls' bytes."""
        async with self._link() as link:
            members = await self._members(link, run)
            found = []
            for group in groups:
                keys = [self._of_attempts(member) for member in members if member.group == group]
                calls = [key for each in keys for key in each[0]]
                spans = [key for each in keys for key in each[1]]
                sizes = await _ask(link, [(b"MEMORY", b"USAGE", key) for key in calls])
                found.append(
                    Weight(
                        sum(await _ask(link, [(b"HLEN", key) for key in calls])),
                        sum(await _ask(link, [(b"HLEN", key) for key in spans])),
                        sum(size or 0 for size in sizes),
                    )
                )
        return found

    async def forget_calls(self, run: str, groups: Sequence[str]) -> None:
        """Delete calls, spans, labels and what attempts were completed with, of those of these groups whose rollouts have all
        ended."""
        async with self._link() as link:
            members: dict[str, list[_Member]] = {}
            newest = await self._sort(link, run, members, 0)
            for group in groups:
                while not await self._forget(link, run, group, members.get(group, ()), newest):
                    newest = await self._sort(link, run, members, newest)

    async def forget_run(self, run: str) -> None:
        """Delete a run, rollout by rollout, and itself last. Raises `StoreError` while the run has a valid lease."""
        if run in await self.busy_runs():
            raise StoreError(f"somebody works on run {run!r}: end its trainer and its runners first")
        async with self._link() as link:
            members = await self._members(link, run)
            await self._forget_uses(link, run)
            await self._forget_servers_state(link, run, {member.rollout for member in members})
            for member in members:
                await self._transact(link, self._removal(run, member))
            steps = {member.step for member in members}
            groups = {member.group for member in members}
            own = [self._keys(name, run) for name in OWN_OF_RUN]
            own += [self._keys("step", step, run) for step in steps]
            own += [self._keys("roots", rows.dump([run, group])) for group in groups]
            await _ask(link, [(b"DEL", key) for key in own])
            await _ask(link, [(b"HDEL", self._keys("runs"), encoded(run))])

    async def vacuum(self) -> str:
        """Delete traces whose keys have expired or whose rollouts are gone, and seats without a run. Redis itself frees space,
        memory at once and its append-only file at the next rewrite, and removes old answers."""
        async with self._link() as link:
            traces = {name: queries.trace_of(value) for name, value in await self._state(link, TRACES_RUN)}
            there = [(b"HEXISTS", self._keys("standing"), encoded(rollout)) for rollout, _ in traces.values()]
            (seconds, _), *known = await _ask(link, [(b"TIME",), *there])
            gone = [
                name
                for (name, (_, expires_at)), exists in zip(traces.items(), known, strict=True)
                if expires_at < int(seconds) or not exists
            ]
            await self._forget_state(link, TRACES_RUN, gone)
            # Notices are read before runs, because a run is created before its notice.
            state = dict(await self._state(link, ""))
            (runs,) = await _ask(link, [(b"HKEYS", self._keys("runs"))])
            await self._forget_state(link, "", queries.empty_seats(state, {name.decode() for name in runs}))
        return ""

    # keys -------------------------------------------------------------------------------------------------------
    async def _members(self, link: Link, run: str, after: int = 0) -> list[_Member]:
        """Return the rollouts of a run with numbers beyond `after`, in the order of creation."""
        (found,) = await _ask(
            link, [(b"ZRANGEBYSCORE", self._keys("all", run), b"(%d" % after, b"+inf", b"WITHSCORES")]
        )
        names, numbers = found[::2], found[1::2]
        columns = await _ask(link, [(b"HGET", self._keys("columns"), name) for name in names])
        standings = await _ask(link, [(b"HGET", self._keys("standing"), name) for name in names])
        members = []
        for name, number, text, standing in zip(names, numbers, columns, standings, strict=True):
            rollout = name.decode()
            position = stand(standing, rollout)
            group = home_of(text, rollout).group
            step = int(json.loads(text)[4])
            worker = position.get("worker", "")
            members.append(_Member(rollout, int(number), group, step, position["attempt"], worker))
        return members

    async def _sort(self, link: Link, run: str, members: dict[str, list[_Member]], newest: int) -> int:
        """Add rollouts with numbers beyond `newest` to `members` by group, and return the largest number."""
        for member in await self._members(link, run, newest):
            members.setdefault(member.group, []).append(member)
            newest = member.number
        return newest

    def _of_attempts(self, member: _Member) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of a rollout's calls, and those of its spans."""
        attempts = range(1, member.attempts + 1)
        calls = [self._keys("calls", attempt, member.rollout) for attempt in attempts]
        return calls, [self._keys("spans", attempt, member.rollout) for attempt in attempts]

    async def _forget(self, link: Link, run: str, group: str, members: Sequence[_Member], newest: int) -> bool:
        """Do `forget_calls` for one group with these rollouts. Return False when the group may have more rollouts by now."""
        keys = [self._keys(name) for name in ("standing", "attempts", "labels")]
        keys += [self._keys("all", run), self._keys("roots", rows.dump([run, group]))]
        arguments: list[int | str] = [newest, len(members)]
        for member in members:
            keys += [key for each in self._of_attempts(member) for key in each]
            arguments += [member.rollout, member.attempts]
        (word, *_) = await link.run(lua_scripts.of_store("forget"), keys, *arguments)
        return bool(word != "grown")

    def _removal(self, run: str, member: _Member) -> list[Command]:
        """Return the commands that delete a rollout everywhere except in the counts of resources."""
        rollout = encoded(member.rollout)
        commands: list[Command] = [(b"DEL", key) for keys in self._of_attempts(member) for key in keys]
        for attempt in range(1, member.attempts + 1):
            place = encoded(f"{member.rollout}:{attempt}")
            commands += [(b"HDEL", self._keys(name), place) for name in ("attempts", "labels")]
        lists = [self._keys(name, run) for name in ("all", *Status, "leases")]
        commands += [(b"ZREM", key, rollout) for key in (*lists, self._keys("step", member.step, run))]
        commands.append((b"ZREM", self._keys("held"), encoded(f"{member.worker}\0{member.rollout}")))
        return [*commands, *((b"HDEL", self._keys(name), rollout) for name in ("standing", "columns"))]

    async def _state(self, link: Link, run: str) -> list[tuple[str, str]]:
        return [(name, value.decode()) async for name, value in self._fields(link, "state", run)]

    async def _forget_state(self, link: Link, run: str, names: Sequence[str]) -> None:
        await _ask(link, [(b"HDEL", self._keys("state", run), encoded(name)) for name in names])

    async def _forget_servers_state(self, link: Link, run: str, rollouts: Collection[str]) -> None:
        """Delete what gateways and trainers keep of a run in the state of the whole store."""
        names = [name for name, _ in await self._state(link, "")]
        await self._forget_state(link, "", queries.fleet_state(run, names))
        traces = await self._state(link, TRACES_RUN)
        await self._forget_state(link, TRACES_RUN, queries.traces_of(rollouts, traces))

    async def _forget_uses(self, link: Link, run: str) -> None:
        fields = [field async for field, _ in self._fields(link, "uses")]
        mine = [field for field in fields if json.loads(field.partition(" ")[2])[0] == run]
        await _ask(link, [(b"HDEL", self._keys("uses"), encoded(field)) for field in mine])

    async def _measure(self, link: Link) -> tuple[dict[str, int], int]:
        """Return how many entries the hashes of calls, spans, steps and versions of resources have, and the bytes of all
        keys."""
        counts = dict.fromkeys(("calls", "spans", "steps", "resources:versions"), 0)
        size, cursor = 0, b"0"
        start = len(self._settings.prefix) + 1
        while True:
            ((cursor, keys),) = await _ask(
                link, [(b"SCAN", cursor, b"MATCH", f"{self._settings.prefix}:*".encode(), b"COUNT", b"%d" % BATCH)]
            )
            sizes = await _ask(link, [(b"MEMORY", b"USAGE", key) for key in keys])
            size += sum(found or 0 for found in sizes)
            for kind in counts:
                mine = [key for key in keys if key[start:].startswith(f"{kind}:".encode())]
                counts[kind] += sum(await _ask(link, [(b"HLEN", key) for key in mine]))
            if cursor == b"0":
                return counts, size

    async def _fields(self, link: Link, name: str, *parts: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the fields of a table; some may come twice when it grows meanwhile."""
        table, cursor = self._keys(name, *parts), b"0"
        while True:
            ((cursor, flat),) = await _ask(link, [(b"HSCAN", table, cursor, b"COUNT", b"%d" % BATCH)])
            for field, value in zip(flat[::2], flat[1::2], strict=True):
                yield field.decode(), value
            if cursor == b"0":
                return

    # the connection ---------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        """Open a link to an existing store for the block. Raises `ConfigError` where there is none."""

        async def greet(ask: Ask) -> None:
            await check_server(ask, self._settings)
            await check_mark(ask, self._settings, self._keys, make=False)

        link = Link(self._settings, self._keys, greet)
        try:
            yield link
        finally:
            await link.close()

    async def _transact(self, link: Link, commands: Sequence[Command]) -> None:
        """Do all of the commands, or none."""
        *_, done = await link.writes.read((b"MULTI",), *commands, (b"EXEC",))
        for reply in done:
            if isinstance(reply, Exception):
                raise translate(reply, self._settings) from reply


async def _ask(link: Link, commands: Sequence[Command]) -> list[Any]:
    """Send commands that read or delete, in batches, and return the replies."""
    replies: list[Any] = []
    for begin in range(0, len(commands), BATCH):
        replies += await link.reads.read(*commands[begin : begin + BATCH])
    return replies
