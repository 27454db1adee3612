"""uvicorn inside a running event loop, without its grip on signals and logging, and with an end to every client's slowness.

The invariant: the port is bound before anything runs, so a port in use is one clear error, and stopping waits for calls
in flight before it cuts them off.

A client that sends its headers or its body too slowly, sends headers without end, or leaves answers unread, holds a
connection for a bounded time and a bounded number of bytes; one that only waits for its answer is left alone. A request that
arrives in one piece, as most do, costs no timer. Connections that wait for nothing cannot keep others out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightning.addresses import is_loopback
from lightning.config import LimitsConfig
from lightning.errors import GatewayError
from lightning.gateway.access_control import Guard, KeyOf
from lightning.gateway.http import RefusalError

log = logging.getLogger(__name__)

LONGEST_HEAD = 65_536
"""Bytes of a request's line and headers."""
FILES_FOR_ONE = 3
"""Open files for a connection: itself, one to vLLM, and what else the process opens."""
MOST_IGNORED = 64 << 20
"""Bytes of a body that are read after its request was refused; then the connection is closed. Common clients read no answer
before they have sent all, and lose it with the connection."""
TELL_AGAIN = 60.0
"""Seconds between two warnings that there are too many connections."""


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
    opened: Connections
    _owed: tuple[Owed, int] = (Owed.HEAD, 0)
    _timed: tuple[Owed, int] = (Owed.NOTHING, 0)
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _head_bytes = _ignored = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if why := self.opened.add(self):
            self._cut(RefusalError(503, "too_many_connections", why, [(b"retry-after", b"1")]))
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.opened.remove(self)
        self._owed = (Owed.NOTHING, 0)
        self._watch()
        super().connection_lost(exc)
        self.resume_writing()

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered over HTTP; uvicorn would advise whoever reads the log to install WebSockets."""
        log.debug("a client asked for another protocol than HTTP/1.1")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()
        if self._owed[0] is Owed.HEAD:
            self._head_bytes = len(data) + (self._head_bytes if self._owed == self._timed else 0)
            if self._head_bytes > LONGEST_HEAD:
                text = f"The request's headers have more than {LONGEST_HEAD} bytes; send fewer."
                self._cut(RefusalError(431, "headers_too_large", text))
        if self._owed[0] is Owed.BODY and self.cycle is not None and self.cycle.response_complete:
            self._ignored += len(data)
            if self._ignored > MOST_IGNORED:
                self.transport.close()
        else:
            self._ignored = 0
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

    @property
    def address(self) -> str:
        """Of the client; empty where it has none."""
        return self.client[0] if self.client else ""

    def make_room(self) -> bool:
        """Close, if nobody waits for an answer here."""
        if self._answering() or self.transport.is_closing():
            return False
        self.transport.close()
        return True

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


class Connections:
    """The open connections of one port. `most` at a time (0: any number), and so many from one address that is not loopback."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._open: dict[_Patience, str] = {}
        self._of_address: Counter[str] = Counter()
        self._told_at = -math.inf

    def add(self, connection: _Patience) -> str:
        """Count a connection; or say why there can be no further one. The oldest that waits for nothing makes room."""
        address = connection.address
        if self._most_of_one and self._of_address[address] >= self._most_of_one and not is_loopback(address):
            return (
                f"{self._most_of_one} connections from your address are open (gateway.limits.connections_per_address)."
            )
        if self._most and len(self._open) >= self._most:
            self._tell()
            if not any(other.make_room() for other in self._open):
                return (
                    f"{self._most} connections are open, all in use (gateway.limits.connections). Wait and try again."
                )
        self._open[connection] = address
        self._of_address[address] += 1
        return ""

    def remove(self, connection: _Patience) -> None:
        """It has ended."""
        address = self._open.pop(connection, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    def _tell(self) -> None:
        if time.monotonic() - self._told_at > TELL_AGAIN:
            self._told_at = time.monotonic()
            log.warning(
                "%d connections are open, as many as there may be: idle ones are closed for new ones. Raise "
                "gateway.limits.connections (and the limit of open files, ulimit -n) if your agents need more",
                self._most,
            )


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
    files = open_files()
    most = min(limits.connections, files // FILES_FOR_ONE) if limits.connections and files else limits.connections
    opened = Connections(most, limits.connections_per_address)
    return type(base.__name__.strip("_"), (base,), {"limits": limits, "opened": opened})


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


BACKLOG = 4096
KEEP_ALIVE = 75
DRAIN = 30
"""Seconds calls in flight get to end when the gateway stops."""
LOOK = 0.005
"""Seconds between two looks at whether they have."""
FILES = 65536


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Sleep until told to end; uvicorn's own loop wakes ten times a second for headers that are not sent here."""
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, which sleeps for a tenth of a second first, and again while anybody calls."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        try:
            async with asyncio.timeout(DRAIN):
                while connections or tasks:
                    for connection in list(connections):
                        connection.shutdown()  # those at rest are closed, the others when they have been answered
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            log.warning("%d calls had not ended after %g s and are cut off", len(tasks), DRAIN)
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone: they belong to whoever runs the loop."""
        yield


class Serving:
    """One application on one socket. Every port of lightning is one of these, so that all have the same limits."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, limits: LimitsConfig, key_of: KeyOf | None = None
    ) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://{reachable(host)}:{port}"
        allow_many_files()
        self._guard = Guard(app, limits, loopback=is_loopback(host), key_of=key_of)
        config = uvicorn.Config(
            self._guard,
            http=patient(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="lightning-gateway")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise GatewayError("The gateway's server ended while it was starting.")
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Stop accepting, let calls in flight end, then cut off what is left."""
        if self._task is not None:
            self._server.ended.set()
            await self._task
            self._task = None
            self._guard.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening address. Raises `GatewayError` that says what to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Said in full, or asyncio does not take its connections for TCP: each answer would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise GatewayError(
                f"The gateway's port {port} on {host} is in use by another process. Stop that process, or choose "
                "another port: server.port if that is set, else gateway.port (0 takes a free one)."
            ) from error
        raise GatewayError(f"The gateway cannot bind {host}:{port}: {error}. Check gateway.host.") from error
    return listener


def reachable(host: str) -> str:
    """An address at which a client of this machine reaches a server bound to `host`."""
    if host in {"0.0.0.0", ""}:  # noqa: S104 — compared, not bound
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def open_files() -> int:
    """How many files this process may have open; 0 for any number."""
    try:
        import resource
    except ImportError:
        return 0
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 if soft == resource.RLIM_INFINITY else soft


def allow_many_files() -> None:
    """Raise the soft limit of open files: a thousand calls in flight are two thousand sockets."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            log.debug("raised the limit of open files from %d to %d", soft, wanted)
