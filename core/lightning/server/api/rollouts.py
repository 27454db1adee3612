"""Routes about runs and rollouts: creating, leasing, ending, and reading what was recorded.

The invariant: whoever runs agents can end the attempts it leased and can write no call: calls come from gateways.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lightning.errors import LightningError
from lightning.gateway.redaction import redacted, redacted_span, storable
from lightning.server.api.paging import page
from lightning.server.api.table import (
    ApiCall,
    NoQuery,
    Paging,
    Route,
    nothing_there,
)
from lightning.server.auth import ANY, LOOK, RUN, TRAIN
from lightning.store import messages
from lightning.store.epochs import is_over
from lightning.store.json_codec import Slice
from lightning.store.protocol import Attempt
from lightning.store.rollout_state import no_cursor, unknown_rollout
from lightning.types import (
    Conversation,
    Fault,
    Lease,
    Outcome,
    Rollout,
    Run,
    Span,
    Status,
    StepReward,
    StepState,
    ToolEvent,
    Transition,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

PAGE_BYTES = 16 * 1024 * 1024
"""Bytes of one answer, about; an attempt, a call or an event that is longer comes alone."""
READ_AT_ONCE = 16
"""Attempts read from the store at once: what does not fit into the answer was read for nothing."""
ATTEMPT_CURSOR = re.compile(r"([0-9]{1,18})\.(.+)")
"""The attempt of a page whose request names none, and the cursor within it."""
LARGEST_LEASE = 1000
"""Rollouts leased by one request."""


@dataclass(frozen=True, slots=True)
class RunFilter(Paging):
    """Which runs are wanted."""

    project: str | None = field(default=None, metadata={"doc": "Runs of this project only."})
    brief: bool = field(
        default=False, metadata={"doc": "`true` leaves their configurations out, which may be long: `config` is empty."}
    )


@dataclass(frozen=True, slots=True)
class RolloutFilter(Paging):
    """Which rollouts of a run are wanted."""

    split: str | None = field(
        default=None, metadata={"doc": "Of this split only: `train` or the name of an evaluation."}
    )
    step: int | None = field(default=None, metadata={"doc": "Sampled for this optimizer step only."})
    status: Status | None = field(default=None, metadata={"doc": "With this status only."})


@dataclass(frozen=True, slots=True)
class OfAttempt(Paging):
    """Which attempt of a rollout is meant."""

    attempt: int | None = field(default=None, metadata={"doc": "The attempt; by default the rollout's current one."})


async def list_runs(call: ApiCall[RunFilter, None]) -> Slice[Run]:
    """Runs, newest first."""
    asked = call.query
    found = await call.store.list_runs(asked.project, after=asked.cursor, limit=asked.limit + 1, brief=asked.brief)
    return Slice(tuple(found[: asked.limit]), found[asked.limit - 1].id if len(found) > asked.limit else "")


async def put_run(call: ApiCall[NoQuery, Run]) -> Run:
    """Create a run, or get the one that has the id already, unchanged. Without `created_at` it is created now."""
    return await call.store.put_run(call.body)


async def get_run(call: ApiCall[NoQuery, None]) -> Run:
    """One run."""
    found = await call.store.get_run(call.path["run"])
    if found is None:
        raise nothing_there(f"run {call.path['run']!r}", "GET /runs lists those there are")
    return found


async def list_rollouts(call: ApiCall[RolloutFilter, None]) -> Slice[Rollout]:
    """Rollouts of a run in the order in which they were created."""
    asked = call.query
    found = await call.store.list_rollouts(
        call.path["run"],
        split=asked.split,
        step=asked.step,
        status=asked.status,
        cursor=asked.cursor,
        limit=asked.limit,
    )
    return Slice(found.rollouts, found.cursor)


async def count_rollouts(call: ApiCall[NoQuery, None]) -> messages.RolloutCounts:
    """How many rollouts of a run there are, by split and status."""
    return messages.RolloutCounts(tuple(await call.store.count_rollouts(call.path["run"])))


async def create_rollouts(call: ApiCall[NoQuery, messages.NewRollouts]) -> messages.Created:
    """Create rollouts with ids of the caller's choice; repeating it changes nothing. All or none are created."""
    return messages.Created(await call.store.create_rollouts(call.body.rollouts))


async def get_rollout(call: ApiCall[NoQuery, None]) -> Rollout:
    """One rollout as it stands."""
    found = await call.store.get_rollout(call.path["rollout"])
    if found is None:
        raise nothing_there(f"rollout {call.path['rollout']!r}", "POST /rollouts creates one")
    return found


async def lease(call: ApiCall[NoQuery, messages.LeaseRequest]) -> messages.Leases:
    """Take pending rollouts of a run, or running ones whose lease has expired, each as a new attempt, with what its agent
    needs to call the model. No new ones while no policy server of the run answers: ask again. 404 for a run that nobody has
    created; `over` says that there will be no more."""
    asked = call.body
    limit = min(asked.limit, LARGEST_LEASE)
    if await call.store.get_run(asked.run) is None:
        raise nothing_there(f"run {asked.run!r}", "GET /runs lists those there are")
    if not await _is_served(call, asked.run):
        if not call.once:
            return messages.Leases((), await is_over(call.store, asked.run))
        limit = 0  # what this very request was given before its answer was lost is given all the same, or nobody would run it
    leases = await call.store.lease(asked.run, asked.worker, limit=limit, ttl=asked.ttl, once=call.once)
    found = [await _with_llm(call, held) for held in leases]
    given = tuple([held for held in found if held is not None])
    return messages.Leases(given, not leases and await is_over(call.store, asked.run))


async def _is_served(call: ApiCall[Any, Any], run: str) -> bool:
    """Whether agents of a run would find the model: without it they would only spend their attempts."""
    served = call.services.served
    return served is None or await served(run)


async def _with_llm(call: ApiCall[Any, Any], held: Lease) -> messages.LeasedRollout | None:
    """The lease with its model. One whose model cannot be had is given back: its fault must not cost the others, and is no
    agent's."""
    llm_for = call.services.llm_for
    if llm_for is None:
        return messages.LeasedRollout(held)
    try:
        return messages.LeasedRollout(held, await llm_for(held, call.store))
    except LightningError as error:
        log.warning("rollout %s, attempt %d cannot be run: %s", held.rollout.id, held.attempt, error)
        ending = Outcome(
            fault=Fault.INFRASTRUCTURE, error=f"what the agent needs to call the model is not there: {error}"
        )
    try:
        await call.store.complete(held.rollout.id, held.attempt, ending, spend=False)
    except LightningError as error:
        log.warning("rollout %s waits until its lease expires: %s", held.rollout.id, error)
    return None


async def renew(call: ApiCall[NoQuery, messages.Renewal]) -> messages.Expiry:
    """Prolong the lease of the running attempt. 409 when it was superseded or has ended: stop its agent."""
    name = call.path["rollout"]
    rollout = await call.store.get_rollout(name)
    if rollout is None:
        raise unknown_rollout(name)
    held = Lease(replace(rollout, attempt=call.attempt), call.body.worker, 0.0)
    return messages.Expiry((await call.store.renew(held, ttl=call.body.ttl)).expires_at)


async def complete(call: ApiCall[NoQuery, messages.Completion]) -> Rollout:
    """End an attempt with a reward or a fault, judged by the calls that were recorded. Repeating it changes nothing; 409 when
    the attempt was superseded or has ended otherwise: drop the work."""
    return await call.services.finish(call.store, call.path["rollout"], call.attempt, call.body.outcome)


async def release(call: ApiCall[NoQuery, messages.Release]) -> messages.Released:
    """Give back everything that a worker holds, without spending a retry. For a worker that starts again, or drains."""
    return messages.Released(await call.store.release(call.body.worker, once=call.once))


async def append(call: ApiCall[NoQuery, messages.Transitions]) -> messages.Appended:
    """Store calls durably. A repeated one changes nothing; 409 for another content under the same key."""
    given = call.body.transitions
    if any(item.conversation or item.error for item in given):
        given = await asyncio.to_thread(lambda: tuple(map(_storable, call.body.transitions)))
    return messages.Appended(await call.store.append(given))


def _storable(call: Transition) -> Transition:
    said = call.conversation and storable(call.conversation)
    return replace(call, conversation=said, error=call.error and redacted(call.error, "error"))


async def next_seq(call: ApiCall[NoQuery, None]) -> messages.NextSeq:
    """The first unused `seq` of an attempt."""
    return messages.NextSeq(await call.store.next_seq(call.path["rollout"], call.attempt))


async def transitions(call: ApiCall[OfAttempt, None]) -> Slice[Transition]:
    """The model calls of an attempt in `seq` order."""
    return await _page_of_attempt(call, call.store.transitions, lambda item: str(item.seq), _size)


async def transitions_of(call: ApiCall[NoQuery, messages.Attempts]) -> messages.TransitionsOf:
    """The model calls of several attempts, of as many of the first ones as fit into one answer."""
    found: list[tuple[Transition, ...]] = []
    used = 0
    for start in range(0, len(call.body.attempts), READ_AT_ONCE):
        for calls in await call.store.transitions_of(call.body.attempts[start : start + READ_AT_ONCE]):
            used += sum(map(_size, calls))
            if found and used > PAGE_BYTES:
                return messages.TransitionsOf(tuple(found))
            found.append(tuple(calls))
    return messages.TransitionsOf(tuple(found))


def _size(call: Transition) -> int:
    said = 0 if call.conversation is None else _text_size(call.conversation)
    arrays = 4 * (len(call.prompt_ids) + len(call.response_ids) + len(call.logprobs))
    return arrays + 500 + said + len(call.exchange or b"") + len(call.error)


def _text_size(told: ToolEvent | StepState | Span | Conversation) -> int:
    """About; what agents tell may be long anywhere."""
    return len(repr(told))


async def tool_events(call: ApiCall[OfAttempt, None]) -> Slice[ToolEvent]:
    """The tool events that an attempt was completed with."""

    async def read(rollout: str, attempt: int | None) -> Sequence[ToolEvent]:
        return (await call.store.attempts_of([(rollout, attempt)]))[0].tool_events

    return await _page_of_attempt(call, read, size=_text_size)


async def step_rewards(call: ApiCall[OfAttempt, None]) -> Slice[StepReward]:
    """The step rewards that an attempt was completed with."""

    async def read(rollout: str, attempt: int | None) -> Sequence[StepReward]:
        return (await call.store.attempts_of([(rollout, attempt)]))[0].step_rewards

    return await _page_of_attempt(call, read)


async def step_states(call: ApiCall[OfAttempt, None]) -> Slice[StepState]:
    """The states that an attempt was completed with."""

    async def read(rollout: str, attempt: int | None) -> Sequence[StepState]:
        return (await call.store.attempts_of([(rollout, attempt)]))[0].step_states

    return await _page_of_attempt(call, read, size=_text_size)


async def attempts_of(call: ApiCall[NoQuery, messages.AnyAttempts]) -> messages.AttemptsOf:
    """What several attempts were completed with, of as many of the first ones as fit into one answer."""
    found: list[Attempt] = []
    used = 0
    for start in range(0, len(call.body.attempts), READ_AT_ONCE):
        for attempt in await call.store.attempts_of(call.body.attempts[start : start + READ_AT_ONCE]):
            used += sum(map(_text_size, attempt.tool_events)) + sum(map(_text_size, attempt.step_states))
            used += 100 * len(attempt.step_rewards)
            if found and used > PAGE_BYTES:
                return messages.AttemptsOf(tuple(found))
            found.append(attempt)
    return messages.AttemptsOf(tuple(found))


async def append_spans(call: ApiCall[NoQuery, messages.Spans]) -> messages.Stored:
    """Store spans durably. Those of unknown rollouts and of other than current attempts are not taken."""
    storable = await asyncio.to_thread(lambda: [redacted_span(span) for span in call.body.spans])
    return messages.Stored(await call.store.append_spans(storable))


async def spans(call: ApiCall[OfAttempt, None]) -> Slice[Span]:
    """The spans of an attempt in the order they began."""
    return await _page_of_attempt(call, call.store.spans, lambda span: span.span_id, _text_size)


async def _page_of_attempt(
    call: ApiCall[OfAttempt, None],
    read: Callable[[str, int | None], Awaitable[Sequence[T]]],
    identity: Callable[[T], str] | None = None,
    size: Callable[[T], int] | None = None,
) -> Slice[T]:
    """A page of what an attempt has. Where none was named its cursors name it: the next attempt may begin between two pages."""
    asked, rollout = call.query, call.path["rollout"]
    if asked.attempt is not None:
        return page(await read(rollout, asked.attempt), asked, identity, size=size, most=PAGE_BYTES)
    attempt, cursor = await _place(call)
    found = page(await read(rollout, attempt), Paging(cursor, asked.limit), identity, size=size, most=PAGE_BYTES)
    return replace(found, cursor=f"{attempt}.{found.cursor}") if found.cursor else found


async def _place(call: ApiCall[OfAttempt, None]) -> tuple[int | None, str]:
    """The attempt whose pages are asked for, and the cursor within it. Raises `DataError` for a cursor of something else.

    The attempt is None for a rollout that is not there: reading from it says so.
    """
    if not call.query.cursor:
        rollout = await call.store.get_rollout(call.path["rollout"])
        return (None if rollout is None else rollout.attempt), ""
    said = ATTEMPT_CURSOR.fullmatch(call.query.cursor)
    if said is None:
        raise no_cursor(call.query.cursor)
    return int(said[1]), said[2]


ROUTES = (
    Route("GET", "/runs", list_runs, ANY, Slice[Run], query=RunFilter, heavy=True),
    Route("POST", "/runs", put_run, TRAIN, Run, Run),
    Route("GET", "/runs/{run}", get_run, ANY, Run),
    Route("GET", "/runs/{run}/rollouts", list_rollouts, ANY, Slice[Rollout], query=RolloutFilter),
    Route("GET", "/runs/{run}/rollout_counts", count_rollouts, ANY, messages.RolloutCounts),
    Route("POST", "/rollouts", create_rollouts, TRAIN, messages.Created, messages.NewRollouts),
    Route("GET", "/rollouts/{rollout}", get_rollout, ANY, Rollout),
    Route("POST", "/leases", lease, RUN, messages.Leases, messages.LeaseRequest, once=True),
    Route("POST", "/leases/release", release, RUN, messages.Released, messages.Release, once=True),
    Route("POST", "/rollouts/{rollout}/attempts/{attempt}/renew", renew, RUN, messages.Expiry, messages.Renewal),
    Route("POST", "/rollouts/{rollout}/attempts/{attempt}/complete", complete, RUN, Rollout, messages.Completion),
    Route("GET", "/rollouts/{rollout}/attempts/{attempt}/next_seq", next_seq, TRAIN, messages.NextSeq),
    Route("GET", "/rollouts/{rollout}/transitions", transitions, LOOK, Slice[Transition], query=OfAttempt, heavy=True),
    Route("POST", "/transitions", append, TRAIN, messages.Appended, messages.Transitions),
    Route("POST", "/transitions/read", transitions_of, LOOK, messages.TransitionsOf, messages.Attempts, heavy=True),
    Route("POST", "/attempts/read", attempts_of, LOOK, messages.AttemptsOf, messages.AnyAttempts, heavy=True),
    Route("GET", "/rollouts/{rollout}/tool_events", tool_events, LOOK, Slice[ToolEvent], query=OfAttempt, heavy=True),
    Route("GET", "/rollouts/{rollout}/step_rewards", step_rewards, LOOK, Slice[StepReward], query=OfAttempt),
    Route("GET", "/rollouts/{rollout}/step_states", step_states, LOOK, Slice[StepState], query=OfAttempt, heavy=True),
    Route("GET", "/rollouts/{rollout}/spans", spans, LOOK, Slice[Span], query=OfAttempt, heavy=True),
    Route("POST", "/spans", append_spans, RUN, messages.Stored, messages.Spans),
)
