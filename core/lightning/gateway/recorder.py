"""From what a call has shown to durable transitions.

The invariant: `(rollout, attempt, seq)` is given to one call's choice only, in the order calls began, and `append`
returns only when the store has the transitions. Nothing is kept for a finished call, and an idle attempt's counter is
forgotten: the store knows where to go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lightning.bounded import Bounded
from lightning.errors import ConflictError, StaleAttemptError, StoreError
from lightning.gateway.dialects import Choice
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import Claims
from lightning.printable import printable
from lightning.redaction import redacted
from lightning.store.protocol import Store
from lightning.types import EXPIRED, UNSERVED, Caller, CallStatus, Transition, logprobs, token_ids

if TYPE_CHECKING:
    from lightning.gateway.call import Call

log = logging.getLogger(__name__)

COUNTERS = 8192
"""Attempts whose counter is remembered at most, and expired keys."""
CONFLICT_RETRIES = 5
STORE_FAILED = "store_failed"
LONGEST_ERROR = 2000
"""Characters kept of what an agent is told of a call that is refused; it may quote the request."""


@dataclass(slots=True, eq=False)
class Counter:
    """The next numbers of one attempt: the store's first free one (known, or being asked for), then `used` more."""

    base: int | asyncio.Task[int]
    used: int
    touched: float

    @property
    def failed(self) -> bool:
        """Whether the store could not say."""
        base = self.base
        return not isinstance(base, int) and base.done() and (base.cancelled() or base.exception() is not None)

    async def first(self) -> int:
        """The base. Raises `StoreError`."""
        if not isinstance(self.base, int):
            self.base = await asyncio.shield(self.base)
        return self.base


@dataclass(frozen=True, slots=True)
class Ticket:
    """Numbers reserved for one call, `offset` after the attempt's base."""

    rollout: str
    attempt: int
    caller: Caller
    counter: Counter
    offset: int
    started_at: float
    appended: list[Transition] = field(default_factory=list)
    """What the store was given of the call, whether or not it has said that it took it."""


class Recorder:
    """Numbers calls and writes them to the store."""

    def __init__(self, store: Store, ttl: float) -> None:
        self._store, self._ttl = store, ttl
        self._counters = Bounded[tuple[str, int], Counter](COUNTERS)
        self._expired = Bounded[tuple[str, int, float], None](COUNTERS)

    def expect(self, rollout: str, attempt: int) -> None:
        """A new attempt has been leased: its numbers begin at 0, without asking the store.

        Should that be wrong (another gateway has served the attempt), the store says so and the call is renumbered.
        """
        now = time.monotonic()
        if (rollout, attempt) not in self._counters:
            self._counters.keep((rollout, attempt), Counter(0, 0, now))
        self._forget_idle(now)

    def begin(self, rollout: str, attempt: int, choices: int, caller: Caller) -> Ticket:
        """Reserve numbers for a call that begins now. Does not wait for the store: `append` does."""
        now = time.monotonic()
        key = (rollout, attempt)
        counter = self._counters.used(key)
        if counter is None or counter.failed:
            base = asyncio.ensure_future(self._store.next_seq(rollout, attempt))
            base.add_done_callback(_retrieve)
            counter = self._counters.keep(key, Counter(base, 0, now))
        counter.touched = now
        self._forget_idle(now)
        ticket = Ticket(rollout, attempt, caller, counter, counter.used, time.time())
        counter.used += choices
        return ticket

    def _forget_idle(self, now: float) -> None:
        while self._counters and now - next(iter(self._counters.values())).touched > self._ttl:
            self._counters.popitem(last=False)

    async def append(self, call: Call, status: CallStatus) -> None:
        """Make a call's transitions durable; its ticket has them then. Raises `StoreError`; a number that was taken meanwhile
        is replaced."""
        ticket = call.ticket
        await self._append(ticket, build(call, await ticket.counter.first() + ticket.offset, status))

    async def take_back(self, ticket: Ticket) -> None:
        """The answer to a call that was appended did not arrive: it was aborted. One that had no answer is what it was; it is
        stored again, which changes nothing where it is there. Raises `StoreError`."""
        taken = [replace(item, status=CallStatus.ABORTED) if item.status.answered else item for item in ticket.appended]
        await self._store.append(taken)

    async def record_refused(self, claims: Claims, caller: Caller, call: str, refusal: RefusalError) -> None:
        """Record that the gateway refused the call with this id: an agent that goes on without an answer has made a call, and
        why it got none is told. Of an expired key it is the first call alone, since an agent may go on asking. What fails is
        only logged."""
        try:
            await self._append_refused(claims, caller, call, refusal)
        except StoreError as error:
            log.warning("that a call of %s was refused (%s) was not recorded: %s", claims.rollout, refusal.code, error)
        except Exception:
            log.exception("the gateway failed to record that a call of %s was refused", claims.rollout)

    async def _append_refused(self, claims: Claims, caller: Caller, call: str, refusal: RefusalError) -> None:
        key = (claims.rollout, claims.attempt, claims.expires_at)
        if refusal.code == EXPIRED and key in self._expired:
            return
        ticket = self.begin(claims.rollout, claims.attempt, 1, caller)
        with contextlib.suppress(StaleAttemptError):  # nobody asks any more why that attempt failed
            await self._append(ticket, [_refused(ticket, await ticket.counter.first() + ticket.offset, call, refusal)])
        if refusal.code == EXPIRED:
            self._expired.keep(key, None)

    async def _append(self, ticket: Ticket, transitions: list[Transition]) -> None:
        for _ in range(CONFLICT_RETRIES):
            ticket.appended[:] = transitions
            try:
                await self._store.append(transitions)
            except ConflictError:
                first = await self._renumber(ticket, len(transitions))
                log.info("calls of %s attempt %d renumbered from %d", ticket.rollout, ticket.attempt, first)
                transitions = [replace(item, seq=first + offset) for offset, item in enumerate(transitions)]
            else:
                return
        ticket.appended[:] = transitions
        await self._store.append(transitions)

    async def _renumber(self, ticket: Ticket, count: int) -> int:
        free = await self._store.next_seq(ticket.rollout, ticket.attempt)
        counter = ticket.counter
        base = await counter.first()
        first = max(free, base + counter.used)
        counter.used = first - base + count
        return first


def build(call: Call, first: int, status: CallStatus) -> list[Transition]:
    """One transition per choice, or a single empty one for a call that ended before any choice was seen."""
    plan, live, ticket = call.plan, call.live, call.ticket
    capture = live.capture
    choices: Sequence[tuple[int, Choice]] = sorted(capture.choices.items()) or [(0, Choice())]
    empty = token_ids()
    ended_at = time.time()
    return [
        Transition(
            rollout=ticket.rollout,
            attempt=ticket.attempt,
            seq=first + offset,
            id=capture.id,
            prompt_ids=choice.prompt_ids or capture.prompt_ids or empty,
            response_ids=choice.response_ids,
            logprobs=choice.logprobs if choice.aligned else logprobs(),
            caller=ticket.caller,
            versions=live.versions(index, len(choice.response_ids)),
            status=status,
            finish_reason=UNSERVED if live.unserved else choice.finish_reason,
            choice=index,
            temperature=plan.temperature,
            constrained=plan.constrained,
            started_at=ticket.started_at,
            ended_at=ended_at,
            tool_calls=tuple(choice.tool_calls),
            extras=dict(call.extras) if not offset else {},
            error=capture.refused,
            max_tokens_asked=plan.max_tokens_asked,
            requested_model=plan.requested_model,
        )
        for offset, (index, choice) in enumerate(choices)
    ]


def _refused(ticket: Ticket, seq: int, call: str, refusal: RefusalError) -> Transition:
    """A call that no policy server has seen: nothing was sampled."""
    return Transition(
        ticket.rollout,
        ticket.attempt,
        seq,
        call,
        token_ids(),
        token_ids(),
        logprobs(),
        ticket.caller,
        status=CallStatus.ERROR if refusal.code == EXPIRED or refusal.status >= 500 else CallStatus.REFUSED,
        finish_reason=UNSERVED if refusal.status >= 500 else refusal.code,
        started_at=ticket.started_at,
        ended_at=time.time(),
        error=described(refusal.error),
    )


def refuse_unstored(error: StoreError) -> RefusalError:
    """The refusal of a call that cannot be made durable."""
    message = f"The store did not take the call, so it is not answered: {error}. Send it again."
    return RefusalError(503, STORE_FAILED, message)


def described(error: Mapping[str, object]) -> str:
    """What an error object tells, as it is stored: with the field that it is about, and without credentials."""
    field, message = error.get("param"), str(error.get("message", ""))
    text = f"{field}: {message}" if field and str(field) not in message else message
    return printable(redacted(text[:LONGEST_ERROR], "error"))


def _retrieve(task: asyncio.Task[int]) -> None:
    """Look at the outcome, so that a failure nobody waited for is not reported as forgotten."""
    if not task.cancelled():
        task.exception()
