"""Which model call was the last one, as the code that asks sees it.

The invariant: no clock is asked, since the agent's and the gateway's may differ. A call is known by the id that the gateway
gave its reply, and a flow (a thread, or an asyncio task) by what it has made: its own calls and those of the flows that it
started. Only while there are none of these it sees what the flow around it sees, so flows side by side take no calls from each
other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

DEEPEST = 64
"""Flows inside one another; deeper ones stand beside the one that started them. Tasks that each start the next and end must not
make an ever longer chain."""
MOST_AGENTS = 1000
"""Agents whose last call a flow knows; the one that has not called for longest is forgotten."""


@dataclass(slots=True, eq=False)
class Flow:
    """A thread or task of one rollout, with the last call of each agent, the latest at the end."""

    trail: Trail
    ident: int
    around: Flow | None = None
    depth: int = 0
    last: dict[str, str] = field(default_factory=dict)

    def outwards(self) -> Iterator[Flow]:
        """This flow, the one that started it, and so on."""
        flow: Flow | None = self
        while flow is not None:
            yield flow
            flow = flow.around


_here: ContextVar[Flow | None] = ContextVar("lightning_flow", default=None)
_lock = threading.RLock()  # a finalizer that reports may run while it is held


class Trail:
    """The answered calls of one rollout, made in the flow that it begins in. Safe to use from any thread."""

    def __init__(self) -> None:
        self._first = Flow(self, _ident())

    def open(self) -> Flow:
        """The flow that this code runs in; what it makes from now on is told from what others make."""
        flow, ident = _here.get(), _ident()
        if flow is None or flow.trail is not self:
            flow = self._first
        if flow.ident != ident:
            around = flow if flow.depth < DEEPEST else flow.around or flow
            flow = Flow(self, ident, around, around.depth + 1)
            _here.set(flow)
        return flow

    def add(self, response_id: str, agent: str) -> None:
        """A call that this flow made for `agent` has been answered."""
        with _lock:
            for flow in self.open().outwards():
                flow.last.pop(agent, None)
                flow.last[agent] = response_id
                if len(flow.last) > MOST_AGENTS:
                    del flow.last[next(iter(flow.last))]

    def last(self, agent: str = "") -> str:
        """The id of the last call that this flow sees: this agent's if there is one, else anyone's, else an empty string."""
        with _lock:
            seen = [flow.last for flow in self.open().outwards() if flow.last]
            for calls in seen:
                if agent in calls:
                    return calls[agent]
            return next(reversed(seen[0].values())) if seen else ""


def _ident() -> int:
    """What tells the running flow from all others that are alive."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop here
        task = None
    return -threading.get_ident() if task is None else id(task)
