"""The `trackio` tracker: write a Trackio run, with each attempt of a finished rollout as a trace, and alarms as alerts.

The invariant: `TRACKIO_DIR`, `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` decide where the run is stored; without them, it is a
database on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import trackio
from lightning.store.protocol import Store
from lightning.tracking.protocol import AttemptRecord
from lightning.types import Json, ToolEvent, Transition
from lightning_record.exchanges import Exchange

from lightning_trackers.shared import (
    PROJECT,
    calls_of,
    cured,
    error_of,
    facts_of,
    finite,
    flat,
    known_run,
    messages_of,
    new_name,
    remember_run,
    times_of,
)

CURE: Final = (
    "Look at TRACKIO_SERVER_URL and TRACKIO_WRITE_TOKEN, or TRACKIO_SPACE_ID; without them it keeps a local database"
)


class Trackio:
    """The tracker `trackio`. It writes metrics by step, settings, alarms as alerts, and each attempt as a trace: its messages,
    model calls and tools."""

    _run: trackio.Run

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Begin a Trackio run, or continue the one whose name is in the run's folder."""
        name = known_run(folder, "trackio") or new_name(run)
        with cured("Trackio did not begin the run", CURE):
            project = os.environ.get("TRACKIO_PROJECT") or PROJECT
            self._run = trackio.init(project, name=name, config=flat(config), resume="allow", embed=False)
        remember_run(folder, "trackio", name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        self._run.log(dict(finite(values)), step=step)

    async def attempt(self, record: AttemptRecord, store: Store) -> None:
        """Write an attempt as a Trackio trace: the messages of its last call, its model calls and its tools."""
        calls, (begin, end) = await calls_of(record, store), times_of(record)
        said = [exchange for _, exchange in calls if exchange is not None]
        messages = messages_of(said[-1]) if said else []
        trace = trackio.Trace(
            messages=messages or [{"role": "user", "content": str(record.rollout.task.input)}],
            metadata={
                **facts_of(record),
                "status": "error" if error_of(record) else "ok",
                "error": error_of(record),
                "duration_ms": (end - begin) * 1000,
            },
            spans=[*(_call(*pair) for pair in calls), *(_tool(*one) for one in enumerate(record.tool_events))],
        )
        self._run.log({"rollout": trace}, step=record.rollout.step)

    def alert(self, alert: Mapping[str, Json]) -> None:
        """Write an alarm as an alert of Trackio."""
        step = alert["step"]
        assert isinstance(step, int), "the loop counts them"
        self._run.alert(str(alert["cause"]), str(alert["text"]), level=trackio.AlertLevel.WARN, step=step)

    def close(self) -> None:
        """Finish the Trackio run, which writes the remaining data."""
        self._run.finish()


def _call(call: Transition, exchange: Exchange | None) -> dict[str, Any]:
    """Return a model call as a span; input and output are None if its exchange is not recorded."""
    tokens = {"input_tokens": len(call.prompt_ids), "output_tokens": len(call.response_ids)}
    return {
        "id": f"call-{call.seq}",
        "name": call.caller.name,
        "kind": "generation",
        "start_time": _time(call.started_at),
        "end_time": _time(call.ended_at),
        "duration_ms": (call.ended_at - call.started_at) * 1000,
        "status": "ok" if call.status.answered else "error",
        "error": call.error,
        "input": exchange.request if exchange is not None else None,
        "output": exchange.reply if exchange is not None else None,
        "model": "policy",
        "usage": tokens,
        "metadata": {"policy_version": call.version, "finish_reason": call.finish_reason},
    }


def _tool(number: int, event: ToolEvent) -> dict[str, Any]:
    """Return a tool run as a span without duration, because only the time of its end is known."""
    return {
        "id": f"tool-{number}",
        "name": event.name,
        "kind": "tool",
        "start_time": _time(event.at),
        "end_time": _time(event.at),
        "status": event.status,
        "error": event.error,
        "input": event.arguments,
        "output": event.output,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
