"""Which model call was the last one, as the code that asks sees it; and who started the thread that runs here.

The invariant: no clock is asked, since the agent's and the gateway's may differ. A call is known by the id that the gateway
gave its reply, and a flow (a thread, or an asyncio task) by what it has made: its own calls and those of the flows that it
started. Only while there are none of these it sees what the flow around it sees, so flows side by side take no calls from each
other. Nobody can say who started a thread that was given no context. The agent itself started it in any case, directly or not,
so the agent's own flow sees what it calls; another one that may have started it names no call rather than a wrong one.

A thread knows its starter only while the rollout that it was started in goes on; one that is started by what a rollout has left
behind knows that for good, and is nobody's.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from lightning.instrument.context import ActiveAttempt

T = TypeVar("T")


class Starter(NamedTuple):
    """The code that started a thread, or gave work to a pool's."""

    context: Context
    """A copy: what was set there by then."""
    attempt: ActiveAttempt
    components: tuple[str, ...]
    left_behind: bool = False
    """Whether the rollout had ended by then."""


starter: ContextVar[Starter | None] = ContextVar("lightning_starter", default=None)


def starter_here() -> Starter | None:
    """Who started this thread; None without a starter, and where the rollout has ended since."""
    found = starter.get()
    return found if found is not None and (found.attempt.open or found.left_behind) else None


DEEPEST = 64
"""Flows inside one another; deeper ones stand beside the one that started them. Tasks that each start the next and end must not
make an ever longer chain."""
MOST_AGENTS = 1000
"""Agents whose last call a flow knows; the one that has not called for longest is forgotten."""
MOST_AWAITING = 1000
"""States of a flow that wait for its next call."""
NOBODY = 0
"""No thread and no task."""


class AnsweredCall(NamedTuple):
    """An answered call; its number says how many of the rollout had been answered by then."""

    number: int
    response_id: str


@dataclass(slots=True, eq=False)
class Flow:
    """A thread or task of one rollout, with the last call of each agent, the latest at the end."""

    trail: Trail
    ident: int
    around: Flow | None = None
    depth: int = 0
    last: dict[str, AnsweredCall] = field(default_factory=dict)
    awaiting: list[Callable[[str], None]] = field(default_factory=list)

    def outwards(self) -> Iterator[Flow]:
        """This flow, the one that started it, and so on."""
        flow: Flow | None = self
        while flow is not None:
            yield flow
            flow = flow.around


_here: ContextVar[Flow | None] = ContextVar("lightning_flow", default=None)
_lock = threading.RLock()  # a finalizer that reports may run while it is held


def _unlock() -> None:
    """In a process that was just forked: the thread that held the lock is not in it, and will never let go."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


@contextmanager
def known_as(variable: ContextVar[T], value: T) -> Iterator[None]:
    """In the block, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def started_in(context: Context) -> AbstractContextManager[None]:
    """What the block makes, in another thread, is made by what the flow of `context` has started."""
    return known_as(_here, context.get(_here))


class Trail:
    """The answered calls of one rollout. Safe to use from any thread.

    The agent's own flow is the one that makes it, or the last that said `begin`.
    """

    def __init__(self) -> None:
        self._first = Flow(self, flow_ident())
        self._adrift = Flow(self, NOBODY, self._first, 1)  # around all flows that were given no context
        self._answered = 0

    def given(self) -> AbstractContextManager[None]:
        """What is started in this context, inside the block, is told from what is started without."""
        return known_as(_here, self._first)

    def begin(self) -> None:
        """This thread or task is the agent's own: whatever the rollout calls is called by it, or by what it started."""
        self._first.ident = flow_ident()

    def open(self) -> Flow:
        """The flow that this code runs in; what it makes from now on is told from what others make."""
        flow, ident = _here.get(), flow_ident()
        if flow is None or flow.trail is not self:
            flow = self._first if self._first.ident == ident else self._adrift
        if flow.ident != ident:
            around = flow if flow.depth < DEEPEST else flow.around or flow
            flow = Flow(self, ident, around, around.depth + 1)
            _here.set(flow)
        return flow

    def await_next(self, told: Callable[[str], None]) -> None:
        """Tell `told` the id of the next call that this flow makes, or what it starts."""
        with _lock:
            flow = self.open()
            if len(flow.awaiting) < MOST_AWAITING:
                flow.awaiting.append(told)

    def add(self, response_id: str, agent: str) -> None:
        """A call that this flow made for `agent` has been answered."""
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
        """The id of the last call that this flow sees: this agent's if there is one, else anyone's.

        Empty when there is none, and when a later one may be this flow's as well, made in a thread without a context.
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
    """What tells the running flow from all others that are alive."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop here
        task = None
    return -threading.get_ident() if task is None else id(task)
