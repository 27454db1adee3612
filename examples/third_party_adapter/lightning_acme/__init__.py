"""Lets lightning train agents of Acme Agents: which agent is calling the model, which tool ran, and how that ended."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import acme_agents
import lightning
from lightning.instrument import check_supported

SUPPORTED = {"acme-agents": ("1.0", "2")}
"""Distribution -> (first version this works with, first that it does not)."""

_innermost: ContextVar[acme_agents.Run | None] = ContextVar("lightning_acme", default=None)


class LightningListener(acme_agents.Listener):
    """Remembers the run that is going on, in each task by itself; reports tools to `emit` as they end."""

    def __init__(self, emit: Callable[[lightning.ToolEvent], None]) -> None:
        self.emit = emit

    def on_start(self, run: acme_agents.Run) -> None:
        """Acme calls this in the task that is about to send the request."""
        _innermost.set(run)

    def on_end(self, run: acme_agents.Run) -> None:
        """Acme calls this for every run that started, also for one that was cancelled."""
        _innermost.set(run.parent)
        if run.kind == "tool":
            status, error = ("ok", "") if run.error is None else ("error", repr(run.error))
            self.emit(
                lightning.ToolEvent(run.name, status, run.call_id, run.input, str(run.output), error, caller(run))
            )


def caller(run: acme_agents.Run) -> lightning.Caller:
    """The agent that a run belongs to, with the agents and tools around it."""
    chain = [run]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    agent = next(item for item in chain if item.kind == "agent")
    path = tuple(item.name for item in reversed(chain[chain.index(agent) :]))
    return lightning.Caller(agent.name, path, span_id=run.id, parent_id=agent.id, framework="acme")


@lightning.hookimpl
def lightning_install(emit: Callable[[lightning.ToolEvent], None]) -> Callable[[], None]:
    """Attach, and return what detaches. Raises `PluginError` for a version out of range."""
    check_supported(SUPPORTED)
    listener = LightningListener(emit)
    acme_agents.add_listener(listener)
    return lambda: acme_agents.remove_listener(listener)


@lightning.hookimpl
def lightning_identify() -> lightning.Caller | None:
    """The agent that is about to call the model, if it is one of Acme's."""
    run = _innermost.get()
    return None if run is None else caller(run)
