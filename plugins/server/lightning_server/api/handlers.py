"""Handlers of the requests for which a server does more than ask the store: leases with access to the model, the judging of
outcomes, lists of what an attempt was completed with, waiting for changes; and what a server says of itself.

The invariant: a client that runs agents can end the attempts that it leased and can write no calls: gateways write calls. Only
admins change what belongs to the whole store. Answers that need no token do not say what the server holds, where it is, or
which release it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lightning import __version__
from lightning.errors import DataError, LightningError
from lightning.plugins.stages import StageError
from lightning.store.operation import ANY, LOOK
from lightning.store.protocol import Attempt, Page
from lightning.store.rollout_state import unknown_rollout
from lightning.trainer.context import is_over
from lightning.types import Fault, Json, Lease, Outcome, Rollout, StepReward, StepState, ToolEvent

from lightning_server import json_codec, messages
from lightning_server.api.change_waiters import LONGEST_WAIT
from lightning_server.api.store_routes import page_of_attempt
from lightning_server.api.table import ApiCall, NoQuery, Paging, Route, nothing_there
from lightning_server.auth import ALL_PROJECTS
from lightning_server.operations import QUERY, RUNS

log = logging.getLogger(__name__)

LARGEST_LEASE = 1000
"""At most this many rollouts are leased by one request."""


@dataclass(frozen=True, slots=True)
class OfAttempt(Paging):
    """The query of a list of one attempt: a page, and the attempt of the rollout."""

    attempt: int | None = field(default=None, metadata={"doc": QUERY["attempt"]})


@dataclass(frozen=True, slots=True)
class WatchQuery:
    """The query of `watch`: the run, and how long to wait for its next change."""

    run: str = field(default="", metadata={"doc": QUERY["run"]})
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


async def lease(call: ApiCall[NoQuery, messages.LeaseRequest]) -> messages.Leases:
    """Lease pending rollouts of a run, each with access to the model. No new ones are leased while the run's model cannot be
    called."""
    asked = call.body
    limit = min(asked.limit, LARGEST_LEASE)
    if await call.store.get_run(asked.run) is None:
        raise nothing_there(f"run {asked.run!r}", RUNS)
    served = call.services.served
    if served is not None and not await served(asked.run):  # agents without a model would only use up their attempts
        if not call.once:
            return messages.Leases((), await is_over(call.store, asked.run))
        limit = 0  # a repeated request still gets the leases of its first time, whose answer was lost; or nobody would run them
    leases = await call.store.lease(asked.run, asked.worker, limit=limit, ttl=asked.ttl, once=call.once)
    found = [await _with_llm(call, held) for held in leases]
    given = tuple([held for held in found if held is not None])
    return messages.Leases(given, not leases and await is_over(call.store, asked.run))


async def _with_llm(call: ApiCall[Any, Any], held: Lease) -> messages.LeasedRollout | None:
    """Return the lease with access to the model. When that access fails, end the attempt as an infrastructure fault and return
    None, so that the other leases are still answered. The attempt is counted only where a plugin's stage failed."""
    llm_for = call.services.llm_for
    if llm_for is None:
        return messages.LeasedRollout(held)
    spend = False
    try:
        return messages.LeasedRollout(held, await llm_for(held, call.store))
    except LightningError as error:
        spend = isinstance(error, StageError)  # it fails again, wherever the attempt is made
        log.warning("rollout %s, attempt %d cannot be run: %s", held.rollout.id, held.attempt, error)
        ending = Outcome(
            fault=Fault.INFRASTRUCTURE, error=f"what the agent needs to call the model is not there: {error}"
        )
    try:
        await call.store.complete(held.rollout.id, held.attempt, ending, spend=spend)
    except LightningError as error:
        log.warning("rollout %s waits until its lease expires: %s", held.rollout.id, error)
    return None


async def renew(call: ApiCall[NoQuery, messages.Renewal]) -> messages.Expiry:
    """Prolong the lease of a running attempt, and return the lease's new end."""
    name = call.path["rollout"]
    rollout = await call.store.get_rollout(name)
    if rollout is None:
        raise unknown_rollout(name)
    held = Lease(replace(rollout, attempt=call.attempt), call.body.worker, 0.0)
    return messages.Expiry((await call.store.renew(held, ttl=call.body.ttl)).expires_at)


async def complete(call: ApiCall[NoQuery, Any]) -> Rollout:
    """End an attempt with its outcome, and return the rollout."""
    return await call.services.finish(call.store, call.path["rollout"], call.attempt, call.body.outcome)


def _of_attempt(told: Callable[[Attempt], Sequence[Any]], name: str, noun: Any, doc: str) -> Route:
    """Make the route `GET /rollouts/{rollout}/NAME` for a list that an attempt was completed with; `told` reads the list from
    the attempt."""

    async def handle(call: ApiCall[OfAttempt, None]) -> Page[Any]:
        async def read(rollout: str, attempt: int | None) -> Sequence[Any]:
            return told((await call.store.attempts_of([(rollout, attempt)]))[0])

        return await page_of_attempt(call, read)

    handle.__name__, handle.__doc__ = name, doc
    return Route("GET", f"/rollouts/{{rollout}}/{name}", handle, LOOK, Page[noun], query=OfAttempt, heavy=True)


async def watch(call: ApiCall[WatchQuery, None]) -> messages.Changed:
    """Wait until something of a run may have changed: rollouts created, leased, ended or given back, steps, state. Ask without
    `since` first, read the data, then ask with the `since` of the last answer. No change is missed; some answers may report a
    change where there is none. With `Accept: text/event-stream` the answers come as server-sent events, one for each change."""
    asked = call.query
    if not asked.run:
        call.principal.require()
    key = (call.principal.project, asked.run)
    return await call.services.watchers.wait(call.store, key, asked.run, asked.since, asked.timeout)


async def health(call: ApiCall[NoQuery, None]) -> messages.Health:
    """200 while the store answers, else 503."""
    await call.store.get_run("health")
    return messages.Health("ok")


async def version(call: ApiCall[NoQuery, None]) -> messages.Version:
    """The release of the server, and the scope and project of the token that asks."""
    asking = call.principal
    project = ALL_PROJECTS if asking.project is None else asking.project
    return messages.Version(__version__, "v1", asking.scope.value, project)


async def openapi(call: ApiCall[NoQuery, None]) -> Json:
    """The OpenAPI description of this API."""
    return call.services.describe()


HANDLERS: Final[Mapping[str, Callable[[ApiCall[Any, Any]], Awaitable[Any]]]] = {
    "lease": lease,
    "renew": renew,
    "complete": complete,
}
"""Handlers of operations that do more than ask the store, by the operation's name."""
WATCH = Route("GET", "/watch", watch, ANY, messages.Changed, query=WatchQuery)
ROUTES = (
    Route("GET", "/health", health, None, messages.Health),
    Route("GET", "/version", version, ANY, messages.Version),
    Route("GET", "/openapi.json", openapi, None, json_codec.AnyJson),
    _of_attempt(
        lambda told: told.tool_events, "tool_events", ToolEvent, "The tool events that an attempt was completed with."
    ),
    _of_attempt(
        lambda told: told.step_rewards,
        "step_rewards",
        StepReward,
        "The step rewards that an attempt was completed with.",
    ),
    _of_attempt(
        lambda told: told.step_states, "step_states", StepState, "The states that an attempt was completed with."
    ),
    WATCH,
)
