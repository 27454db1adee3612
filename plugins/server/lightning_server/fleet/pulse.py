"""Heartbeats of a seat from a thread: a gateway whose event loop is busy with thousands of calls keeps its seat.

The invariant: the thread only says that the gateway lives. It acknowledges nothing, renews no seat that has expired, and stops
when the loop has not come round for `STILL` seconds, so that an owner does not wait for a gateway that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from types import TracebackType
from typing import Protocol

from lightning.asyncio_utils import new_loop
from lightning.errors import StoreError

from lightning_server.fleet.records import BEAT, now

log = logging.getLogger(__name__)

STILL = 30.0
"""Seconds after which a loop that has not come round counts as hanging."""


class Seated(Protocol):
    """A gateway with a seat."""

    @property
    def overdue(self) -> bool:
        """Whether the loop has missed a heartbeat of a seat that has not expired."""

    async def beat_beside(self, number: int) -> None:
        """Write a heartbeat that differs from all others by `number`. Raises `StoreError`."""


class Pulse:
    """Beats for a member while its loop is late. Use it with `with`, on the member's loop."""

    def __init__(self, member: Seated) -> None:
        self._member = member
        self._stop = threading.Event()
        self._round_at = now()

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._come_round()
        threading.Thread(target=self._beat, name="lightning-pulse", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._handle.cancel()

    def _come_round(self) -> None:
        self._round_at = now()
        self._handle = self._loop.call_later(BEAT, self._come_round)

    def _beat(self) -> None:
        number = 0
        with asyncio.Runner(loop_factory=new_loop) as runner:
            while not self._stop.wait(BEAT / 2):
                if self._member.overdue and now() - self._round_at < STILL:
                    number += 1
                    try:
                        runner.run(self._member.beat_beside(number))
                    except StoreError as error:
                        log.debug("a heartbeat of a busy gateway was not written: %s", error)
