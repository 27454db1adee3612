"""Hands the metrics of each step, alarms and finished rollouts to every tracker of a run, each tracker in a thread of its own.

The invariant: training neither waits for a tracker nor fails with one. A tracker that cannot start is left out. A later call
that fails loses what it carried and nothing else, because a full disk or a broken backend may recover during a run.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, cast

from lightning.config import Config
from lightning.errors import MissingExtraError
from lightning.plugins import plugins
from lightning.redaction import redacted_json
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.tracking.protocol import AlertTracker, AttemptRecord, RolloutTracker, Tracker
from lightning.types import Json, Rollout

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0
"""Seconds that the end of a run waits for a tracker that is behind; then a quarter of it more, for metrics and alarms alone."""
MAX_WAITING = 4096
"""Most finished rollouts that wait for one tracker. Further ones are dropped, since a broken backend may stay so for long."""

_Told: TypeAlias = "tuple[int, dict[str, float]] | dict[str, Json] | Rollout"
"""The metrics of a step, an alarm, or a rollout that has ended."""


def names_of(config: Config) -> Sequence[str]:
    """Return the names of a run's trackers: those in its settings, or else the usual ones."""
    named = config.trainer.trackers
    return plugins().usual("trackers") if named is None else named


class Trackers:
    """The trackers of one run, as a context. Each is told the settings, without credentials, and the values of `about`. Raises
    `PluginError` for a name that no plugin registers."""

    def __init__(
        self,
        names: Sequence[str],
        config: Config,
        *,
        run: str,
        folder: Path,
        store: Store,
        about: Mapping[str, Json] | None = None,
    ) -> None:
        factories = [
            (name, cast("Callable[[Config], Tracker]", plugins().get("trackers", name)))
            for name in dict.fromkeys(names)
        ]
        said = redacted_json({**(about or {}), **config.model_dump(mode="json")}, "settings") if factories else {}
        described = cast("Mapping[str, Json]", said)
        self._feeds = [_Feed(name, factory, config, run, described, folder, store) for name, factory in factories]

    def __enter__(self) -> Self:
        for feed in self._feeds:
            feed.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for feed in self._feeds:
            feed.put(None)
        for feed in self._feeds:
            feed.join()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the metrics of a step on; returns at once."""
        for feed in self._feeds:
            feed.put((step, dict(values)))

    def alert(self, alert: dict[str, Json]) -> None:
        """Pass an alarm on to the trackers that take alarms; returns at once."""
        for feed in self._feeds:
            feed.put(alert)

    def finished(self, rollout: Rollout) -> None:
        """Tell trackers that a rollout has ended for good; those that take rollouts read it from the store in their own
        thread."""
        for feed in self._feeds:
            feed.finished(rollout)


class _Feed:
    """One tracker, its thread, and the queue of what it is to be told."""

    def __init__(
        self,
        name: str,
        factory: Callable[[Config], Tracker],
        config: Config,
        run: str,
        described: Mapping[str, Json],
        folder: Path,
        store: Store,
    ) -> None:
        self._name, self._factory, self._config, self._store = name, factory, config, store
        self._run, self._described, self._folder = run, described, folder
        self._queue: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        self._wants_rollouts = True  # unknown until the tracker is made
        self._missed, self._failed = 0, 0
        self._late = False  # the run has ended, and its store closes soon: no rollout is told any more
        # A daemon: a tracker that hangs for ever must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"lightning-tracker-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: _Told | None) -> None:
        if self._thread.is_alive():
            self._queue.put(item)

    def finished(self, rollout: Rollout) -> None:
        if not self._wants_rollouts:
            return
        if self._queue.qsize() < MAX_WAITING:
            self.put(rollout)
        else:
            self._missed += 1

    def join(self) -> None:
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._late = True
            self._thread.join(CLOSE_SECONDS / 4)
        if self._missed:
            logger.warning(
                "the tracker %r was too slow: it was not told of %s", self._name, counted(self._missed, "rollout")
            )
        if self._failed > 1:
            logger.warning(
                "the tracker %r failed %d times in all: what it was told then may be missing", self._name, self._failed
            )
        if self._thread.is_alive():
            logger.warning(
                "the tracker %r is not done after %g s: its last values may be missing", self._name, CLOSE_SECONDS
            )

    def _work(self) -> None:
        try:
            tracker = self._factory(self._config)
            self._wants_rollouts = isinstance(tracker, RolloutTracker)
            tracker.start(self._run, self._described, self._folder)
            try:
                with asyncio.Runner() as loop:
                    while (item := self._queue.get()) is not None:
                        self._tell(tracker, item, loop)
            finally:
                tracker.close()
        except Exception as error:  # noqa: BLE001 — a tracker is a stranger's code and no reason to stop training
            unasked = isinstance(error, MissingExtraError) and self._config.trainer.trackers is None
            level = logging.INFO if unasked else logging.WARNING
            text = "the tracker %r failed and is left out from here on: %s"
            logger.log(level, text, self._name, error or repr(error))

    def _tell(self, tracker: Tracker, item: _Told, loop: asyncio.Runner) -> None:
        if self._late and isinstance(item, Rollout):
            self._missed += self._wants_rollouts
            return
        try:
            if isinstance(item, tuple):
                tracker.log(*item)
            elif isinstance(item, dict):
                if isinstance(tracker, AlertTracker):
                    tracker.alert(item)
            elif isinstance(tracker, RolloutTracker):
                for record in loop.run(attempts_of(self._store, item)):
                    loop.run(tracker.attempt(record, self._store))
        except Exception as error:  # noqa: BLE001 — as above; the next call may find the disk or the backend well again
            self._failed += 1
            if self._failed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: one that is down for days fills no log
                logger.warning(
                    "the tracker %r failed (%d so far) and goes on: %s", self._name, self._failed, error or repr(error)
                )


async def attempts_of(store: Store, rollout: Rollout) -> list[AttemptRecord]:
    """Return the attempts of a rollout in order; an attempt before the last only if it called the model."""
    records = []
    numbers = range(1, rollout.attempt + 1)
    for attempt, ended in zip(
        numbers, await store.attempts_of([(rollout.id, number) for number in numbers]), strict=True
    ):
        record = AttemptRecord(
            rollout,
            attempt,
            await store.transitions(rollout.id, attempt),
            list(ended.tool_events),
            list(ended.step_rewards),
        )
        if attempt == rollout.attempt or record.transitions:
            records.append(record)
    return records
