"""Helpers of several trackers: remember the tracker's id of a run, describe an attempt, and turn errors into sentences.

The invariant: only the core and the reader of recorded texts are imported, so that a tracker needs its own library and no other
tracker's.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from lightning.errors import LightningError, PluginError
from lightning.store.protocol import Store
from lightning.tracking.protocol import AttemptRecord
from lightning.types import Json, Span, Transition
from lightning_record.exchanges import Exchange, parents_of, read

PROJECT: Final = "lightning"
"""The project, or experiment, of a run if the environment names none."""
LOST: Final = "the attempt was lost through no fault of the agent, and the rollout was tried again"


class Quiet(logging.Filter):
    """A log filter for a library's `logger`: it passes the first `lines` lines that the thread of its creation logs, and drops
    later ones, such as those about retries. Lines of other threads pass."""

    def __init__(self, logger: str, lines: int) -> None:
        super().__init__()
        self._logger, self._left = logging.getLogger(logger), lines
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Add the filter to the logger."""
        self._logger.addFilter(self)

    def end(self) -> None:
        """Remove the filter from the logger."""
        self._logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line passes, and count it if it is of this thread."""
        if record.thread != self._thread:
            return True
        self._left -= 1
        return self._left >= 0


@contextmanager
def cured(what: str, cure: str) -> Iterator[None]:
    """Turn an exception of a tracker's library into a one-line `PluginError` that says what failed, why, and how to mend it."""
    try:
        yield
    except LightningError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
        raise PluginError(f"{what}: {reason.removesuffix('.')}. {cure}") from error


def known_run(folder: Path, tracker: str) -> str:
    """Read the tracker's id of this run from the run's folder; empty if there is none yet."""
    file = _file(folder, tracker)
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def remember_run(folder: Path, tracker: str, name: str) -> None:
    """Write the tracker's id of this run into the run's folder, so that a resume continues the same run of the tracker."""
    folder.mkdir(parents=True, exist_ok=True)
    _file(folder, tracker).write_text(name + "\n", encoding="utf-8")


def new_name(run: str) -> str:
    """Return a unique id for a run: its name with a random suffix."""
    return f"{run}-{uuid4().hex[:8]}"


def _file(folder: Path, tracker: str) -> Path:
    return folder / f"{tracker}-run.txt"


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values."""
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}


def nanoseconds(seconds: float) -> int:
    """Convert a time in seconds to whole nanoseconds, at least 0."""
    return max(round(seconds * 1e9), 0)


def flat(settings: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Return settings by the dotted names that `--set` takes; lists and empty sections become JSON texts."""
    found: dict[str, Json] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(value) if isinstance(value, list | dict) else value
    return found


def facts_of(record: AttemptRecord) -> dict[str, Json]:
    """Return the names of an attempt (rollout, task, ...) and, for the last attempt, its status, reward and fault. Unknown
    facts are left out."""
    rollout = record.rollout
    facts: dict[str, Json] = {
        "rollout": rollout.id,
        "attempt": record.attempt,
        "task": rollout.task.id,
        "group": rollout.group,
        "step": rollout.step,
        "split": rollout.split,
    }
    if record.attempt == rollout.attempt:
        facts |= {"status": rollout.status.value, "reward": rollout.reward, "fault": rollout.fault}
        facts |= {f"reward.{name}": value for name, value in rollout.rewards.items()}
    return {name: value for name, value in facts.items() if value is not None}


def error_of(record: AttemptRecord) -> str:
    """Return why an attempt has no reward; empty if it has one."""
    if record.attempt != record.rollout.attempt:
        return LOST
    return "" if record.rollout.reward is not None else record.rollout.error or record.rollout.status.value


def times_of(record: AttemptRecord, spans: Sequence[Span] = ()) -> tuple[float, float]:
    """Return when an attempt began and ended (Unix seconds), from its calls, spans and tools, and from the rollout's duration,
    because its start is not recorded."""
    happened: list[Transition | Span] = [*record.transitions, *spans]
    begins = [one.started_at for one in happened]
    ends = [*(one.ended_at for one in happened), *(event.at for event in record.tool_events)]
    end = max(ends, default=time.time())
    seconds = record.rollout.seconds if record.attempt == record.rollout.attempt else 0.0
    return min([*begins, end - seconds]), end


async def calls_of(record: AttemptRecord, store: Store) -> list[tuple[Transition, Exchange | None]]:
    """Return the model calls of an attempt, each with its exchange (None if not recorded). Raises `StoreError` for exchanges
    that cannot be read."""
    (parent,) = await parents_of(store, [record.rollout])
    pairs = zip(record.transitions, read(record.transitions, parent), strict=True)
    return [(call, exchange) for call, exchange in pairs if call.choice == 0]


def messages_of(exchange: Exchange) -> list[dict[str, Any]]:
    """Return the messages of a call, those of the answer last, in the form of the API that was used."""
    request = exchange.request if isinstance(exchange.request, dict) else {}
    sent: Any = request.get("messages") or request.get("input") or request.get("prompt") or []
    asked = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    return [one for one in [*asked, *_answered(exchange.reply)] if isinstance(one, dict) and one]


def _answered(reply: Any) -> list[Any]:
    match reply:
        case {"choices": [{"message": message}, *_]}:
            return [message]
        case {"choices": [{"text": text}, *_]}:
            return [{"role": "assistant", "content": text}]
        case {"output": [first, *others]}:
            return [first, *others]
        case dict() | None:
            return [reply]
        case _:  # what a proxy said in the place of JSON
            return [{"role": "assistant", "content": reply}]
