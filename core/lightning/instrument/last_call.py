"""The last model call before the current code, and the code that started the current thread.

The invariant: no clock is used, since the agent's and the gateway's may differ. A call is identified by the id that the gateway
gave its reply. A flow (a thread or an asyncio task) sees its own calls and those of the flows that it started. Only while it
has none of these, it sees the calls that the flow around it sees; so flows side by side do not see each other's calls. The
starter of a thread without context is unknown. But the agent itself started it, directly or not, so the agent's own flow sees
its calls; for another flow, which may have started it, there is no last call rather than a wrong one.

A thread knows its starter only while the rollout that it was started in goes on. A thread that was started by code which an
ended rollout had left running knows its starter for good, and belongs to no rollout.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from lightning.instrument.context import ActiveAttempt

T = TypeVar("T")


class Starter(NamedTuple):
    """The code that started a thread, or submitted work to a thread of a pool: its context, rollout and components."""

    context: Context
    """A copy of the context at that time."""
    attempt: ActiveAttempt
    components: tuple[str, ...]
    left_behind: bool = False
    """Whether the rollout had ended at that time."""


starter: ContextVar[Starter | None] = ContextVar("lightning_starter", default=None)


def starter_here() -> Starter | None:
    """Return the starter of this thread; None if it is unknown, or if its rollout has ended since."""
    found = starter.get()
    return found if found is not None and (found.attempt.open or found.left_behind) else None


DEEPEST = 64
"""The largest depth of flows inside one another; a deeper flow is put beside the flow that started it. Without it, tasks that
each start the next and end would make an ever longer chain."""
MOST_AGENTS = 1000
"""The largest number of agents whose last call a flow keeps; the agent that has not called for longest is dropped."""
MOST_AWAITING = 1000
"""The largest number of states of a flow that wait for its next call."""
NOBODY = 0
"""The ident of a flow that is no thread and no task."""


class AnsweredCall(NamedTuple):
    """An answered call: its number in the order in which the rollout's calls were answered, from 1, and its response id."""

    number: int
    response_id: str


@dataclass(slots=True, eq=False)
class Flow:
    """A thread or task of one rollout. `around` is the flow that started it; `last` holds the last call of each agent, the
    latest call at the end; `awaiting` are functions to be called with the id of the next call."""

    trail: Trail
    ident: int
    around: Flow | None = None
    depth: int = 0
    last: dict[str, AnsweredCall] = field(default_factory=dict)
    awaiting: list[Callable[[str], None]] = field(default_factory=list)

    def outwards(self) -> Iterator[Flow]:
        """Yield this flow, the flow that started it, and so on outwards."""
        flow: Flow | None = self
        while flow is not None:
            yield flow
            flow = flow.around


_here: ContextVar[Flow | None] = ContextVar("lightning_flow", default=None)
_lock = threading.RLock()  # a finalizer that reports may run while it is held


def renew_lock_in_forks(module: dict[str, Any]) -> None:
    """Give each process that is forked from this one a new `_lock` in the globals of a module: the thread that held the old one
    does not exist there to release it."""

    def renew() -> None:
        module["_lock"] = threading.RLock()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


renew_lock_in_forks(globals())


@contextmanager
def known_as(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside the block, the context variable has this value, and after it the one that it had before."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)


def started_in(context: Context) -> AbstractContextManager[None]:
    """Inside the block, which runs in another thread, the code counts as started by the flow of `context`."""
    return known_as(_here, context.get(_here))


class Trail:
    """The answered calls of one rollout. Safe to use from any thread.

    The agent's own flow is the thread or task that makes the trail, or that called `begin` last.
    """

    def __init__(self) -> None:
        self._first = Flow(self, flow_ident())
        self._adrift = Flow(self, NOBODY, self._first, 1)  # around all flows without a context
        self._answered = 0

    def given(self) -> AbstractContextManager[None]:
        """Inside the block, this context has the agent's own flow, so flows that are started here know which flow started
        them."""
        return known_as(_here, self._first)

    def begin(self) -> None:
        """Make this thread or task the agent's own flow, which sees all calls of the rollout."""
        self._first.ident = flow_ident()

    def open(self) -> Flow:
        """Return the flow of this thread or task; make one if there is none, so that its calls are kept apart from now on."""
        flow, ident = _here.get(), flow_ident()
        if flow is None or flow.trail is not self:
            flow = self._first if self._first.ident == ident else self._adrift
        if flow.ident != ident:
            around = flow if flow.depth < DEEPEST else flow.around or flow
            flow = Flow(self, ident, around, around.depth + 1)
            _here.set(flow)
        return flow

    def await_next(self, told: Callable[[str], None]) -> None:
        """Call `told` with the id of the next call that this flow, or a flow that it starts, makes."""
        with _lock:
            flow = self.open()
            if len(flow.awaiting) < MOST_AWAITING:
                flow.awaiting.append(told)

    def add(self, response_id: str, agent: str) -> None:
        """Add an answered call that this flow made for `agent`."""
        with _lock:
            self._answered += 1
            for flow in self.open().outwards():
                for told in flow.awaiting:
                    told(response_id)
                flow.awaiting.clear()
                flow.last.pop(agent, None)
                flow.last[agent] = AnsweredCall(self._answered, response_id)
                if len(flow.last) > MOST_AGENTS:
                    del flow.last[next(iter(flow.last))]

    def last(self, agent: str = "") -> str:
        """Return the id of the last call that this flow sees: of this agent if there is one, else of any agent.

        Empty if there is none, or if a thread without a context, which this flow may have started, made a later call.
        """
        with _lock:
            here = self.open()
            flows = list(here.outwards())
            seen = [flow.last for flow in flows if flow.last and flow is not self._adrift]
            found = next((calls[agent] for calls in seen if agent in calls), None)
            adrift = self._adrift.last.get(agent)
            if found is None and seen:
                found, adrift = _latest(seen[0]), _latest(self._adrift.last)
            sees_all = here is self._first or self._adrift in flows
            if found is None or (adrift is not None and adrift.number >= found.number and not sees_all):
                return ""
            return found.response_id


def _latest(calls: dict[str, AnsweredCall]) -> AnsweredCall | None:
    return next(reversed(calls.values()), None)


def flow_ident() -> int:
    """Return a number that identifies the current thread or task among all that are alive."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop here
        task = None
    return -threading.get_ident() if task is None else id(task)
