"""What tools were given and returned, which AutoGen's spans do not say: from its event log, `autogen_core.events`.

The invariant: the log's handlers get the records that they would get without us.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace

import lightning
from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import ToolCallEvent

LEVEL = logging.INFO - 1
"""Lets AutoGen's events (INFO) through, and is nobody's choice: another level on the logger was set by the user since."""

Pending = tuple[lightning.ToolEvent, Callable[[lightning.ToolEvent], None]]
_pending: ContextVar[list[Pending] | None] = ContextVar("lightning_autogen_pending", default=None)
_log = logging.getLogger(EVENT_LOGGER_NAME)


class Results(logging.Filter):
    """Sees the log's records before its handlers do."""

    _before = logging.NOTSET

    def start(self) -> None:
        """Listen. Again: does nothing."""
        if self not in _log.filters:
            self._before = _log.level
            _log.setLevel(LEVEL)
            _log.addFilter(self)

    def stop(self) -> None:
        """Leave the log as it was."""
        _log.removeFilter(self)
        if _log.level == LEVEL:
            _log.setLevel(self._before)

    def complete(self, event: lightning.ToolEvent, emit: Callable[[lightning.ToolEvent], None]) -> None:
        """Emit the event of a tool that has just returned, with arguments and output if AutoGen logs them.

        It does so right after the tool's span has closed, without an await between. Tools of MCP servers are not logged, and
        their spans close alike whether the server answered well or that the tool failed: nobody knows their status.
        """
        if self not in _log.filters or not _log.isEnabledFor(logging.INFO):
            emit(event)
            return
        pending: list[Pending] = [(event, emit)]
        _pending.set(pending)
        asyncio.get_running_loop().call_soon(_emit, pending)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record would be there without us."""
        if isinstance(record.msg, ToolCallEvent):
            _emit(_pending.get() or [], record.msg)
        if _log.level != LEVEL:
            return True
        above = _log.parent.getEffectiveLevel() if _log.parent else logging.WARNING
        return record.levelno >= (self._before or above)


def _emit(pending: list[Pending], logged: ToolCallEvent | None = None) -> None:
    if pending:
        event, emit = pending.pop()
        if logged is None:
            emit(replace(event, status="unknown"))
        else:
            emit(replace(event, arguments=logged.kwargs["arguments"], output=logged.kwargs["result"]))


results = Results()
