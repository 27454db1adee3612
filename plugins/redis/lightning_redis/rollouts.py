"""Creating, listing, leasing and ending rollouts.

The invariant: of all processes one holds the running attempt of a rollout. Each lease raises the attempt number, so that the
holder of an earlier attempt can no longer write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from lightning.errors import StoreError
from lightning.store import rollout_state
from lightning.store.protocol import Page, RolloutCount
from lightning.types import Lease, Outcome, Rollout, Status

from lightning_redis import lua_scripts
from lightning_redis.keys import encoded
from lightning_redis.loop_client import Link, done, refused, unexpected
from lightning_redis.records import extras_to_text
from lightning_redis.rollout_codec import columns_of, position_of, read_rollout, stand, uses_of

LEASED_AT_ONCE: Final = 10_000
"""The most rollouts in one lease: Redis answers no other client meanwhile."""
SMALLEST_LOOK, LARGEST_LOOK = 100, 1000
"""The fewest and the most rollouts read at once when a page is filtered."""
_RELEASE_TRIES: Final = 100


async def create(link: Link, rollouts: Sequence[Rollout]) -> int:
    """Create rollouts, all or none, and return how many are new."""
    columns = [columns_of(rollout) for rollout in rollouts]
    if not rollouts:
        return 0
    places: dict[bytes, int] = {}  # positions of keys among the script's keys, from 1 on

    def place(name: str, *parts: str | int) -> int:
        return places.setdefault(link.keys(name, *parts), len(places) + 1)

    arguments: list[str | int] = [len(rollouts)]
    for rollout, text in zip(rollouts, columns, strict=True):
        run = rollout.run
        arguments += [rollout.id, run, rollout.max_attempts, text, uses_of(rollout)]
        arguments += [place("all", run), place("pending", run), place("step", rollout.step, run), place("changes", run)]
    tables = [link.keys(name) for name in ("counter", "standing", "columns", "uses")]
    (new,) = done(
        await link.run(lua_scripts.of_store("create"), (*tables, *places), *arguments),
        elsewhere=lambda rest: rollout_state.created_elsewhere(rollouts[int(rest[0])]),
    )
    for rollout in rollouts:
        link.remember_home(rollout)
    return int(new)


async def get(link: Link, rollout: str) -> Rollout | None:
    """Return a rollout by its id; None where there is none."""
    (found,) = await _read(link, [rollout])
    return found


async def _read(link: Link, names: Sequence[str]) -> list[Rollout | None]:
    if not names:
        return []
    fields = [encoded(name) for name in names]
    columns, standings = await link.reads.read(
        (b"HMGET", link.keys("columns"), *fields), (b"HMGET", link.keys("standing"), *fields)
    )
    return [
        None if text is None or standing is None else read_rollout(text, standing, name)
        for name, text, standing in zip(names, columns, standings, strict=True)
    ]


async def page(
    link: Link,
    run: str,
    split: str | None,
    step: int | None,
    status: Status | None,
    cursor: str,
    limit: int,
) -> Page[Rollout]:
    """Return a page of rollouts in the order of creation. The cursor is the number of the last rollout of the page before."""
    rollout_state.check_page(limit, cursor)
    index = link.keys("all", run)
    if step is not None:
        index = link.keys("step", step, run)
    elif status is not None:
        index = link.keys(Status(status).value, run)
    found: list[tuple[Rollout, int]] = []
    last = int(cursor or 0)
    count = min(max(limit + 1, SMALLEST_LOOK), LARGEST_LOOK)
    while len(found) <= limit:
        (members,) = await link.reads.read(
            (b"ZRANGEBYSCORE", index, b"(%d" % last, b"+inf", b"WITHSCORES", b"LIMIT", b"0", b"%d" % count)
        )
        names, numbers = [name.decode() for name in members[::2]], [int(number) for number in members[1::2]]
        for rollout, number in zip(await _read(link, names), numbers, strict=True):
            if rollout is not None and _fits(rollout, split, step, status):
                found.append((rollout, number))
        if len(numbers) < count:
            break
        last = numbers[-1]
    rollouts = tuple(rollout for rollout, _ in found[:limit])
    return Page(rollouts, str(found[limit - 1][1]) if len(found) > limit else "")


def _fits(rollout: Rollout, split: str | None, step: int | None, status: Status | None) -> bool:
    return (
        (split is None or rollout.split == split)
        and (step is None or rollout.step == step)
        and (status is None or rollout.status == status)
    )


async def count(link: Link, run: str) -> list[RolloutCount]:
    """Return a run's rollouts counted by split and status. Redis has no index by split, so every rollout is read, a page at a
    time."""
    counts: Counter[tuple[str, Status]] = Counter()
    cursor = ""
    while True:
        found = await page(link, run, None, None, None, cursor, LARGEST_LOOK)
        counts.update((rollout.split, rollout.status) for rollout in found.items)
        cursor = found.cursor
        if not cursor:
            return [RolloutCount(split, status, number) for (split, status), number in sorted(counts.items())]


async def lease(link: Link, run: str, worker: str, limit: int, ttl: float, once: str) -> list[Lease]:
    """Lease pending rollouts of a run, or running ones whose lease has expired."""
    rollout_state.check_lease(worker, limit, ttl)
    reply = await link.run_once(
        lua_scripts.of_store("lease"),
        [
            *(link.keys(name) for name in ("standing", "columns", "attempts", "uses", "held")),
            *(link.keys(name, run) for name in ("pending", "running", "failed", "leases", "changes")),
        ],
        rollout_state.known_as(once, "lease", run, worker, ttl),
        *(worker, min(limit, LEASED_AT_ONCE), float(ttl)),
        seconds=ttl,
    )
    till, *found = done(reply)
    leases = []
    for columns, standing in zip(found[::2], found[1::2], strict=True):
        rollout = read_rollout(columns, standing, "of a lease")
        link.remember_home(rollout)
        leases.append(Lease(rollout, worker, float(till)))
    return leases


async def renew(link: Link, lease: Lease, ttl: float) -> Lease:
    """Prolong a lease by `ttl` seconds from now, and return it."""
    rollout_state.check_ttl(ttl)
    rollout = lease.rollout.id
    run = (await link.home(rollout)).run
    word, *rest = await link.run(
        lua_scripts.of_store("renew"),
        (link.keys("standing"), link.keys("leases", run)),
        *(rollout, lease.attempt, lease.worker, float(ttl)),
    )
    if word == "ok":
        return Lease(lease.rollout, lease.worker, float(rest[0]))
    if word != "refused":
        raise refused(word, rest, rollout, lease.attempt)
    rollout_state.check_fence(position_of(rest[0], rollout), lease.attempt)
    raise rollout_state.not_holder(lease, stand(rest[0], rollout).get("worker", ""))


async def complete(link: Link, rollout: str, attempt: int, outcome: Outcome, spend: bool) -> Rollout:
    """End an attempt with its outcome, and return the rollout."""
    end = rollout_state.ending(rollout, outcome)
    events, rewards, labels, states, extras = end.kept
    run = (await link.home(rollout)).run
    word, *rest = await link.run(
        lua_scripts.of_store("complete"),
        [
            *(link.keys(name) for name in ("standing", "columns", "attempts", "labels", "uses", "held")),
            *(
                link.keys(name, run)
                for name in ("pending", "running", "succeeded", "failed", "cancelled", "leases", "changes")
            ),
        ],
        *(rollout, attempt, end.digest, "" if end.reward is None else end.reward, *end.standing[1:]),
        *(events, rewards, labels, 0 if spend else rollout_state.EXCUSED, states, extras_to_text(extras)),
    )
    if word != "ok":
        raise refused(word, rest, rollout, attempt)
    return read_rollout(rest[0], rest[1], rollout)


async def release(link: Link, worker: str, once: str) -> int:
    """Give back everything that a worker holds, and return how many leases that were."""
    known_as = rollout_state.known_as(once, "release", worker)
    name = encoded(worker)
    held = (b"ZRANGEBYLEX", link.keys("held"), b"[" + name + b"\0", b"(" + name + b"\1")
    for _ in range(_RELEASE_TRIES):
        (members,) = await link.reads.read(held)
        if not members and not once:
            return 0
        rollouts = [member[len(name) + 1 :].decode() for member in members]
        runs = sorted({(await link.home(rollout)).run for rollout in rollouts})
        keys = [link.keys(what, run) for run in runs for what in ("pending", "running", "leases", "changes")]
        word, *rest = await link.run_once(
            lua_scripts.of_store("release"),
            [link.keys(table) for table in ("standing", "attempts", "held")],
            known_as,
            worker,
            len(runs),
            more=keys,
            rest=runs,
        )
        if word == "ok":
            return int(rest[0])
        if word != "elsewhere":  # the worker has leased from another run meanwhile
            raise unexpected([word, *rest])
    raise StoreError(f"worker {worker!r} takes rollouts of ever more runs: let it stop before its work is given back")
