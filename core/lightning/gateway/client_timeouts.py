"""How long a connection is waited for: uvicorn's HTTP protocols with an end to everybody's slowness.

The invariant: a client that sends its headers or its body too slowly, sends headers without end, or leaves answers unread,
holds a connection for a bounded time and a bounded number of bytes; one that only waits for its answer is left alone. A request
that arrives in one piece, as most do, costs no timer.
"""

from __future__ import annotations

import asyncio
import http
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightning.config import LimitsConfig
from lightning.gateway.errors import RefusalError

log = logging.getLogger(__name__)

LONGEST_HEAD = 65_536
"""Bytes of a request's line and headers."""


class Owed(Enum):
    """What a client must still send before it may wait."""

    HEAD = "headers"
    BODY = "body"
    NOTHING = "nothing"


if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = object


class _Patience(_Base):
    """What both protocols share. `_owed` says what is owed of which request; a timer runs while something is."""

    limits: LimitsConfig
    _owed: tuple[Owed, int] = (Owed.HEAD, 0)
    _timed: tuple[Owed, int] = (Owed.NOTHING, 0)
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owed = (Owed.NOTHING, 0)
        self._watch()
        super().connection_lost(exc)
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()
        if self._owed[0] is Owed.HEAD:
            self._head_bytes = len(data) + (self._head_bytes if self._owed == self._timed else 0)
            if self._head_bytes > LONGEST_HEAD:
                text = f"The request's headers have more than {LONGEST_HEAD} bytes; send fewer."
                self._cut(RefusalError(431, "headers_too_large", text))
        if self._owed != self._timed:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.write_timeout, self._abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        super().resume_writing()

    def _look(self) -> None:
        """Set `_owed`, where the parser has not."""

    def _watch(self) -> None:
        """Wait for what is owed now, and for nothing else."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = self._owed
        what = self._owed[0]
        if what is not Owed.NOTHING and not self.transport.is_closing():
            seconds = self.limits.header_timeout if what is Owed.HEAD else self.limits.body_timeout
            self._timer = self.loop.call_later(seconds, self._too_slow, what, seconds)

    def _too_slow(self, what: Owed, seconds: float) -> None:
        if what is Owed.HEAD and self._answering():  # half a request behind one that is being served
            self._watch()
            return
        setting = "header_timeout" if what is Owed.HEAD else "body_timeout"
        text = (
            f"The request's {what.value} did not come within {seconds:g} s (gateway.limits.{setting}); send it again."
        )
        self._cut(RefusalError(408, "request_timeout", text))

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cut(self, refusal: RefusalError) -> None:
        """Say why, if that can still be said, and close; what serves the request hears that its client has gone."""
        log.info("a client was cut off: %s", refusal)
        if self._answering():
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        reason = http.HTTPStatus(refusal.status).phrase
        head = (
            f"HTTP/1.1 {refusal.status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(refusal.body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + refusal.body)
        self.transport.close()

    def _abort(self) -> None:
        log.info("a client that left its answer unread for %g s was cut off", self.limits.write_timeout)
        self.transport.abort()


class _PatientH11(_Patience, H11Protocol):
    """Where httptools is not installed."""

    def _look(self) -> None:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            what = Owed.BODY
        elif state is h11.IDLE and (self.conn.trailing_data[0] or self.cycle is None):
            what = Owed.HEAD
        else:
            what = Owed.NOTHING
        self._owed = (what, id(self.cycle))


def patient(limits: LimitsConfig, *, pure: bool = False) -> type[asyncio.Protocol]:
    """The HTTP protocol for `uvicorn.Config(http=...)`: httptools' where it is installed, else (and when `pure`) h11's."""
    base: type[Any] = _PatientH11 if pure else _fastest()
    return type(base.__name__.strip("_"), (base,), {"limits": limits})


def _fastest() -> type[Any]:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return _PatientH11

    class PatientHttpTools(_Patience, HttpToolsProtocol):  # type: ignore[misc]
        """Its parser says what has come."""

        def on_message_begin(self) -> None:
            self._owed = (Owed.HEAD, self._owed[1] + 1)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._owed = (Owed.BODY, self._owed[1])
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._owed = (Owed.NOTHING, self._owed[1])
            super().on_message_complete()

    return PatientHttpTools
