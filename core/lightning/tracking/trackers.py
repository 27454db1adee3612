"""Hands the metrics of each step to every tracker of a run, each in a thread of its own.

The invariant: training neither waits for a tracker nor fails with one: who raises is logged and hears no more.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from lightning.config import Config
from lightning.plugins import plugins
from lightning.tracking.protocol import Tracker
from lightning.types import Json

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0
"""How long the end of a run waits for a tracker that is behind."""


class Trackers:
    """The trackers of one run, as a context. Raises `PluginError` for a name that no plugin registers."""

    def __init__(self, names: Sequence[str], config: Config, *, run: str, folder: Path) -> None:
        factories = [(name, plugins().tracker(name)) for name in dict.fromkeys(names)]
        described: Mapping[str, Json] = config.model_dump(mode="json")
        self._feeds = [_Feed(name, factory, config, run, described, folder) for name, factory in factories]

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


class _Feed:
    """One tracker and the queue before it."""

    def __init__(
        self,
        name: str,
        factory: Callable[[Config], Tracker],
        config: Config,
        run: str,
        described: Mapping[str, Json],
        folder: Path,
    ) -> None:
        self._name, self._factory, self._config = name, factory, config
        self._run, self._described, self._folder = run, described, folder
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        # A daemon: a tracker that hangs for ever must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"lightning-tracker-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, item: tuple[int, dict[str, float]] | None) -> None:
        if self._thread.is_alive():
            self._queue.put(item)

    def join(self) -> None:
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "the tracker %r is not done after %g s: its last values may be missing", self._name, CLOSE_SECONDS
            )

    def _work(self) -> None:
        try:
            tracker = self._factory(self._config)
            tracker.start(self._run, self._described, self._folder)
            try:
                while (item := self._queue.get()) is not None:
                    tracker.log(*item)
            finally:
                tracker.close()
        except Exception as error:  # noqa: BLE001 — a tracker is a stranger's code and no reason to stop training
            logger.warning("the tracker %r failed and is left out from here on: %s", self._name, error or repr(error))
