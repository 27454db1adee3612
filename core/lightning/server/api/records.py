"""Routes about what a run leaves behind: optimizer steps, metrics, small state, and word of its changes.

The invariant: state that belongs to the whole store is for admins alone, and secrets are for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning.errors import DataError
from lightning.server.api.change_waiters import LONGEST_WAIT
from lightning.server.api.paging import page
from lightning.server.api.table import ApiCall, NoQuery, Paging, Route
from lightning.server.auth import ANY, LOOK, TRAIN
from lightning.store import messages
from lightning.store.json_codec import Slice
from lightning.store.protocol import MetricPoint
from lightning.store.rollout_state import no_cursor
from lightning.types import StepRecord

WHOLE_STORE = "The run; empty for what belongs to the whole store, which is for admins."


@dataclass(frozen=True, slots=True)
class OfRun:
    """Which run's state is meant."""

    run: str = field(default="", metadata={"doc": WHOLE_STORE})


@dataclass(frozen=True, slots=True)
class WatchQuery(OfRun):
    """What to wait for."""

    since: str = field(default="", metadata={"doc": "The `since` of the answer before; empty asks for one, at once."})
    timeout: float = field(
        default=30.0,
        metadata={
            "doc": f"Wait so long at most; longer than {LONGEST_WAIT:g} is cut to that.",
            "minimum": 0,
            "unit": "s",
        },
    )

    def __post_init__(self) -> None:
        if not 0 <= self.timeout < float("inf"):
            raise DataError(f"timeout={self.timeout} must be a number of seconds, 0 or more")


@dataclass(frozen=True, slots=True)
class StepFilter(Paging):
    """Which steps are wanted."""

    brief: bool = field(
        default=False,
        metadata={
            "doc": "`true` leaves out the names of what was trained: `rollouts`, `digests` and `groups` are empty."
        },
    )
    last: bool = field(default=False, metadata={"doc": "`true` asks for the last step alone."})


async def list_steps(call: ApiCall[StepFilter, None]) -> Slice[StepRecord]:
    """Committed optimizer steps in order."""
    asked, run = call.query, call.path["run"]
    if asked.last:
        last = await call.store.last_step(run)
        return Slice(() if last is None else (last,))
    if asked.cursor and not (asked.cursor.isascii() and asked.cursor.isdecimal() and len(asked.cursor) < 19):
        raise no_cursor(asked.cursor)
    after = int(asked.cursor or -1)
    found = await call.store.steps(run, after=after, limit=asked.limit + 1, brief=asked.brief)
    return Slice(tuple(found[: asked.limit]), str(found[asked.limit - 1].step) if len(found) > asked.limit else "")


async def commit_step(call: ApiCall[NoQuery, StepRecord]) -> StepRecord:
    """Record an optimizer step and mark its rollouts trained, all or nothing; repeating it changes nothing. 409 when the step
    exists with another batch, when one of the rollouts was trained already, or when its attempt is another."""
    await call.store.commit_step(call.body)
    return call.body


async def list_metrics(call: ApiCall[Paging, None]) -> Slice[MetricPoint]:
    """Metrics of a run by step."""
    return page(await call.store.metrics(call.path["run"]), call.query, lambda point: str(point.step))


async def log_metrics(call: ApiCall[NoQuery, messages.Metrics]) -> messages.Metrics:
    """Merge values into the metrics of a step."""
    await call.store.log_metrics(call.path["run"], call.body.step, call.body.values, once=call.once)
    return call.body


async def get_state(call: ApiCall[OfRun, None]) -> messages.StateValue:
    """The value kept under a key, null when there is none."""
    _check_whole_store(call)
    return messages.StateValue(await call.store.get_state(call.query.run, call.path["key"]))


async def put_state(call: ApiCall[OfRun, messages.StateValue]) -> messages.StateValue:
    """Keep a small value under a key, in place of an older one."""
    _check_whole_store(call)
    await call.store.put_state(call.query.run, call.path["key"], call.body.value, once=call.once or None)
    return call.body


async def keep_state(call: ApiCall[OfRun, messages.StateValue]) -> messages.StateValue:
    """Keep a small value unless the key has one; the answer has the one that is kept."""
    _check_whole_store(call)
    return messages.StateValue(await call.store.keep_state(call.query.run, call.path["key"], call.body.value))


async def watch(call: ApiCall[WatchQuery, None]) -> messages.Changed:
    """Wait until something of a run may have changed: rollouts created, leased, ended or given back, steps, state. Ask without
    `since` first, look at what is to be known, then ask with the last answer's `since`: no change is missed, and some answers
    may be mistaken about one. With `Accept: text/event-stream` the answers come as server-sent events, one for each change."""
    _check_whole_store(call)
    asked = call.query
    key = (call.principal.project, asked.run)
    return await call.services.watchers.wait(call.store, key, asked.run, asked.since, asked.timeout)


def _check_whole_store(
    call: ApiCall[OfRun, messages.StateValue] | ApiCall[OfRun, None] | ApiCall[WatchQuery, None],
) -> None:
    if not call.query.run:
        call.principal.require()


WATCH = Route("GET", "/watch", watch, ANY, messages.Changed, query=WatchQuery)
ROUTES = (
    Route("GET", "/runs/{run}/steps", list_steps, LOOK, Slice[StepRecord], query=StepFilter),
    Route("POST", "/steps", commit_step, TRAIN, StepRecord, StepRecord),
    Route("GET", "/runs/{run}/metrics", list_metrics, LOOK, Slice[MetricPoint], query=Paging),
    Route("POST", "/runs/{run}/metrics", log_metrics, TRAIN, messages.Metrics, messages.Metrics, once=True),
    Route("GET", "/state/{key}", get_state, TRAIN, messages.StateValue, query=OfRun),
    Route("PUT", "/state/{key}", put_state, TRAIN, messages.StateValue, messages.StateValue, query=OfRun, once=True),
    Route("POST", "/state/{key}/keep", keep_state, TRAIN, messages.StateValue, messages.StateValue, query=OfRun),
    WATCH,
)
