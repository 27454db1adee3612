"""Runs, committed steps, metrics, what attempts were completed with, and small state.

The invariant: a step and the marks of its trained rollouts are written together or not at all. A rollout is marked once, with
its first step; further steps must declare it, and its state has their count.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning.errors import StoreError
from lightning.store import rollout_state, rows
from lightning.store.protocol import Attempt, MetricPoint
from lightning.types import Json, Run, StepRecord

from lightning_redis import lua_scripts
from lightning_redis.keys import encoded
from lightning_redis.loop_client import Link, done
from lightning_redis.rollout_codec import listed, stand

STEPS_AT_ONCE: Final = 50
"""The most step records that are read at once."""


def time_text(at: float) -> str:
    """Return a time of the caller as text; empty when Redis is to set it."""
    return repr(float(at)) if at else ""


def numbered(value: bytes, what: str, numbers: int = 1) -> tuple[list[float], str]:
    """Divide a value into the numbers before a text, and the text. Raises `StoreError` when the numbers are damaged."""
    *found, text = value.decode(errors="replace").split(" ", numbers)
    try:
        times = [float(number) for number in found]
    except ValueError as error:
        raise StoreError(f"{what} is corrupt in the database: {error}. Restore the database from a backup") from error
    return times, text


def stamped(value: bytes, what: str, numbers: int = 1) -> tuple[list[float], list[Any]]:
    """Divide a value into the numbers before a list in JSON, and the list. Raises `StoreError` when it is damaged."""
    times, text = numbered(value, what, numbers)
    return times, listed(text, what)


def extras_to_text(packed: rows.Value) -> str:
    """Return packed extras as text for JSON that scripts read and write; empty where there are none."""
    return base64.b64encode(packed if isinstance(packed, bytes) else b"").decode()


def _extras_from_text(text: object, what: str) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except ValueError as error:
        raise StoreError(f"{what} are corrupt in the database: {error}. Restore the database from a backup") from error


# runs -----------------------------------------------------------------------------------------------------------


async def put_run(link: Link, run: Run) -> Run:
    """Create a run, now if it has no time, or return the one with its id."""
    config = rows.dump(dict(run.config), f"the configuration of run {run.id!r}")
    text = rows.dump([run.name, config, run.project])
    rest = done(
        await link.run(lua_scripts.of_store("put_run"), [link.keys("runs")], *(run.id, time_text(run.created_at), text))
    )
    return _run(run.id, rest[0])


async def get_run(link: Link, run: str) -> Run | None:
    """Return a run by its id; None where there is none."""
    (value,) = await link.reads.read((b"HGET", link.keys("runs"), encoded(run)))
    return None if value is None else _run(run, value)


async def list_runs(
    link: Link, project: str | None = None, after: str = "", limit: int | None = None, brief: bool = False
) -> list[Run]:
    """Return runs, newest first. The configurations of runs that are left out are not parsed, since they are long."""
    rollout_state.check_page(limit)
    (flat,) = await link.reads.read((b"HGETALL", link.keys("runs")))
    kept = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    if after and (after not in kept or project not in (None, _run(after, kept[after], brief=True).project)):
        raise rollout_state.no_cursor(after)
    newest_first = sorted(kept, key=lambda run: numbered(kept[run], f"run {run!r}", 2)[0], reverse=True)
    behind = newest_first[newest_first.index(after) + 1 if after else 0 :]
    found = (_run(run, kept[run], brief) for run in behind)
    return list(itertools.islice((run for run in found if project in (None, run.project)), limit))


def _run(run: str, value: bytes, brief: bool = False) -> Run:
    (at, _), (name, config, project) = stamped(value, f"run {run!r}", 2)
    return rows.RUNS.read((run, name, "{}" if brief else config, at, project))


# what attempts were completed with ------------------------------------------------------------------------------


async def attempts_of(link: Link, attempts: Sequence[tuple[str, int | None]]) -> list[Attempt]:
    """Return what attempts were completed with, in the order asked; an attempt that is None is the rollout's current one."""
    if not attempts:
        return []
    names = list(dict.fromkeys(rollout for rollout, _ in attempts))
    (standings,) = await link.reads.read((b"HMGET", link.keys("standing"), *map(encoded, names)))
    current: dict[str, int] = {}
    for name, standing in zip(names, standings, strict=True):
        if standing is None:
            raise rollout_state.unknown_rollout(name)
        current[name] = int(stand(standing, name)["attempt"])
    asked = [(rollout, current[rollout] if attempt is None else attempt) for rollout, attempt in attempts]
    fields = [encoded(f"{rollout}:{attempt}") for rollout, attempt in asked]
    (texts,) = await link.reads.read((b"HMGET", link.keys("attempts"), *fields))
    return [_attempt(rollout, attempt, text) for (rollout, attempt), text in zip(asked, texts, strict=True)]


def _attempt(rollout: str, attempt: int, text: bytes | None) -> Attempt:
    if text is None:
        return Attempt(rollout, attempt)
    found = rows.load(text.decode(errors="replace"), f"an attempt of rollout {rollout!r}")
    names = ("tool_events", "step_rewards", "step_states")
    events, rewards, states = (str(found.get(name, "[]")) if isinstance(found, Mapping) else "" for name in names)
    extras = found.get("extras", "") if isinstance(found, Mapping) else ""
    packed = _extras_from_text(extras, f"the extras of attempt {attempt} of rollout {rollout!r}")
    return rows.ATTEMPTS.read((rollout, attempt, events, rewards, states, packed))


# steps ----------------------------------------------------------------------------------------------------------


async def commit_step(link: Link, record: StepRecord) -> None:
    """Commit a step, now if its record has no time, and mark its rollouts trained."""
    *columns, extras = rows.STEPS.values(record, without=("run", "step", "at"))
    text, reuse = rows.dump([*columns, extras_to_text(extras)]), rollout_state.reuse_of(record)
    done(
        await link.run(
            lua_scripts.of_store("commit"),
            [link.keys("standing"), *(link.keys(name, record.run) for name in ("steps", "proofs", "changes"))],
            *(record.run, record.step, record.digest, time_text(record.at), text, len(record.rollouts), reuse.limit),
            *(part for name, attempt in record.rollouts for part in (name, attempt, int(name in reuse.rollouts))),
        ),
        conflict=lambda rest: rollout_state.committed_otherwise(record, rest[0].decode()),
        unknown=lambda rest: rollout_state.unknown_rollout(rest[0].decode()),
        untrainable=lambda rest: _untrainable(record, *record.rollouts[int(rest[0])], rest[1], reuse),
    )


def _untrainable(
    record: StepRecord, rollout: str, attempt: int, standing: bytes, reuse: rollout_state.Reuse
) -> StoreError:
    found = stand(standing, rollout)
    rollout_state.check_trainable(
        record, rollout, attempt, found["run"], found["status"], found.get("fault", ""), found["attempt"]
    )
    steps, declared = int(found.get("steps", 1)), rollout in reuse.rollouts
    if declared and steps > reuse.limit:
        return rollout_state.used_up(record, rollout, steps, reuse.limit)
    return rollout_state.not_new(record, rollout, found.get("trained"), declared=declared)


async def steps(link: Link, run: str, after: int, limit: int | None, brief: bool) -> list[StepRecord]:
    """Return the committed steps after a step. Records are read a few at a time, since those of a long run have gigabytes
    before they are made brief."""
    rollout_state.check_page(limit)
    (names,) = await link.reads.read((b"HKEYS", link.keys("steps", run)))
    asked = sorted(number for number in map(int, names) if number > after)[:limit]
    found: list[StepRecord] = []
    for start in range(0, len(asked), STEPS_AT_ONCE):
        some = asked[start : start + STEPS_AT_ONCE]
        (values,) = await link.reads.read((b"HMGET", link.keys("steps", run), *(b"%d" % step for step in some)))
        kept = [_step(run, step, value) for step, value in zip(some, values, strict=True) if value is not None]
        found += [replace(step, rollouts=(), digests=(), groups=(), extras={}) if brief else step for step in kept]
    return found


async def last_step(link: Link, run: str) -> StepRecord | None:
    """Return the committed step with the largest number; None without any."""
    (names,) = await link.reads.read((b"HKEYS", link.keys("steps", run)))
    found = await steps(link, run, max(map(int, names)) - 1, 1, brief=False) if names else []
    return found[0] if found else None


def _step(run: str, step: int, value: bytes) -> StepRecord:
    (at,), (*columns, extras) = stamped(value, f"step {step} of run {run!r}")
    row = [run, step, *columns, _extras_from_text(extras, f"the extras of step {step} of run {run!r}")]
    row.insert(rows.STEPS.fields.index("at"), at)
    return rows.STEPS.read(row)


# metrics and state ----------------------------------------------------------------------------------------------


async def log_metrics(link: Link, run: str, step: int, values: Mapping[str, float], once: str) -> None:
    """Store metrics of a step, once for calls with the same id."""
    if not values:
        return
    pairs: list[str] = []
    for name, value in values.items():
        pairs += [name, repr(float(value))]
    known_as = rollout_state.known_as(once, "log_metrics", run, step, *pairs)
    done(
        await link.run_once(
            lua_scripts.of_store("log_metrics"), [link.keys("metrics", run)], known_as, step, len(values), rest=pairs
        )
    )


async def metrics(link: Link, run: str) -> list[MetricPoint]:
    """Return the metrics of a run by step."""
    (flat,) = await link.reads.read((b"HGETALL", link.keys("metrics", run)))
    steps: dict[int, dict[str, tuple[float, float]]] = {}
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        step, _, name = field.decode().partition(":")
        number, at = value.split()
        steps.setdefault(int(step), {})[name] = (float(number), float(at))
    return [
        MetricPoint(step, {name: found[name][0] for name in sorted(found)}, max(at for _, at in found.values()))
        for step, found in sorted(steps.items())
    ]


async def put_state(link: Link, run: str, key: str, value: Json, once: str | None) -> None:
    """Store a small value under a key."""
    text = rows.dump(value, f"the state {key!r}")
    known_as = rollout_state.known_as(once or "", "put_state", run, key, text)
    keys = [link.keys("state", run), link.keys("changes", run)]
    done(await link.run_once(lua_scripts.of_store("put_state"), keys, known_as, key, text))


async def keep_state(link: Link, run: str, key: str, value: Json) -> Json:
    """Store a small value unless the key has one; return the stored one."""
    text = rows.dump(value, f"the state {key!r}")
    rest = done(
        await link.run(
            lua_scripts.of_store("keep_state"), [link.keys("state", run), link.keys("changes", run)], *(key, text)
        )
    )
    return rows.load(rest[0].decode(errors="replace"), f"the state {key!r} of run {run!r}")


async def get_state(link: Link, run: str, key: str) -> Json:
    """Return the value under a key; None without one."""
    (text,) = await link.reads.read((b"HGET", link.keys("state", run), encoded(key)))
    return None if text is None else rows.load(text.decode(errors="replace"), f"the state {key!r} of run {run!r}")
