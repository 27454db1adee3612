"""Limits on what a client may use of a port: the rate of its requests, how slowly it may send and read, and how many
connections it may have.

The invariant: no token gets more than its share of requests. Guessing tokens quickly reveals nothing, and takes nothing from
valid tokens, from paths that need no token or from the shares of known clients. What is remembered of clients is bounded and
has none of their secrets. A request costs three dictionary look-ups.

A client that sends headers or a body too slowly, sends headers without end, or does not read its answers, holds a connection
only for a bounded time and a bounded number of bytes. A client that only waits for its answer is left alone. A request that
arrives in one piece, as most do, costs no timer. Idle connections cannot keep new ones out.
"""

from __future__ import annotations

import asyncio
import http
import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import h11
from lightning.addresses import is_loopback
from lightning.bounded import Bounded
from lightning.config import LimitsConfig
from lightning.gateway.connections import CLIENT
from lightning.gateway.http import JSON_TYPE, KEY, RefusalError, packed_with, send_bytes
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lightning_server.config import PortLimits
from lightning_server.content_encoding import unpacking

log = logging.getLogger(__name__)

CLIENTS = 16_384
"""At most this many tokens, and as many addresses, are remembered."""
OPEN = frozenset({"/health", "/api/v1/health", "/api/v1/openapi.json"})
"""The paths that need no token: an answer there does not show whether a token is valid."""


@dataclass(slots=True)
class Share:
    """What one client may still use: `allowance` requests, of at most `most`, at the time `at` (monotonic clock). `good` says
    that a request with this token was answered without an error before."""

    most: float
    allowance: float
    at: float
    in_flight: int = 0
    good: bool = False

    def wait(self, rate: float, now: float) -> float:
        """Refill the allowance at `rate` requests per second (not 0), and return the seconds until one request is allowed; 0
        for now."""
        self.allowance = min(self.most, self.allowance + (now - self.at) * rate)
        self.at = now
        return 0.0 if self.allowance >= 1.0 else (1.0 - self.allowance) / rate


class Shares(Bounded[bytes, Share]):
    """The shares of clients that asked lately. Beyond `CLIENTS` of them the one that asked longest ago is forgotten, unless a
    request of it is in progress."""

    def __init__(self, most: float) -> None:
        super().__init__(CLIENTS)
        self._share = most

    def of(self, client: bytes, now: float) -> Share:
        """Return the share of a client that asks now; a new one where it is not known."""
        return self.keep(client, self.get(client) or Share(self._share, self._share, now))

    def keep(self, client: bytes, share: Share) -> Share:
        """Remember a client's share as the one that asked last, and return it."""
        self[client] = share
        self.move_to_end(client)
        oldest = next(iter(self))
        if len(self) > self.most and self[oldest].in_flight:
            self.move_to_end(oldest)
        elif len(self) > self.most:
            del self[oldest]
        return share


class Guard:
    """Limits the requests that reach the ASGI application `app`. It stands behind `lightning.gateway.connections.Entrance`."""

    def __init__(self, app: ASGIApp, limits: PortLimits) -> None:
        self._app, self._limits = app, limits
        self._rate, self._failures = limits.requests_per_second, limits.failures_per_minute / 60.0
        self._tokens, self._untried = Shares(2.0 * self._rate), Shares(2.0 * self._rate)
        # The untried tokens are kept apart from the valid ones, so that they cannot displace them.
        self._strangers = Shares(limits.failures_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it (429)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            token, address = self._admit(scope)
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, refusal.body, [JSON_TYPE, *refusal.headers])
            return
        token.in_flight += 1
        if scope["path"].startswith("/api/"):
            scope[KEY].is_no_call()
        try:
            judged = send if token.good else self._judging(scope, send, scope[CLIENT], token, address)
            if packed := packed_with(scope):
                receive = unpacking(scope, receive, packed)
            await self._app(scope, receive, judged)
        finally:
            token.in_flight -= 1

    def _admit(self, scope: Scope) -> tuple[Share, Share]:
        """Count a request, and return the shares of its token and of its address. Raises `RefusalError` (429)."""
        where = (scope["client"] or ("",))[0].encode()
        client, now = scope[CLIENT], time.monotonic()
        token = (self._tokens if client in self._tokens else self._untried).of(client or where, now)
        address = self._strangers.of(where, now)
        limit = self._limits.concurrent_requests
        if limit and token.in_flight >= limit:
            raise _too_many(f"This token has {limit} requests in progress (gateway.limits.concurrent_requests)", 1.0)
        if self._rate and (wait := token.wait(self._rate, now)):
            rate = f"{self._rate:g} requests per second (gateway.limits.requests_per_second)"
            raise _too_many(f"This token asks more often than {rate}", wait)
        token.allowance -= 1.0
        return token, address

    def _judging(self, scope: Scope, send: Send, client: bytes, token: Share, address: Share) -> Send:
        """Return a `send` that learns from the answer: a token that is accepted becomes good, one that is refused (401) costs
        its address.

        An address that has nothing left gets 429 instead of 401. The request is still passed on, because a valid token from the
        same address, such as another machine's behind one proxy, must be let in.
        """
        refused = False

        async def judge(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                if message["status"] == 401 and self._failures:
                    if wait := address.wait(self._failures, time.monotonic()):
                        refused = True
                        refusal = _too_many("Too many requests with wrong tokens came from this address", wait)
                        await send_bytes(send, refusal.status, refusal.body, [JSON_TYPE, *refusal.headers])
                        return
                    address.allowance -= 1.0
                elif client and message["status"] < 400 and scope["path"] not in OPEN:
                    token.good = True
                    self._untried.pop(client, None)
                    self._tokens.keep(client, token)
            if not refused:
                await send(message)

        return judge


def _too_many(what: str, seconds: float) -> RefusalError:
    wait = str(max(1, math.ceil(seconds))).encode()
    return RefusalError(429, "too_many_requests", f"{what}. Wait and send it again.", [(b"retry-after", wait)])


LONGEST_HEAD = 65_536
"""The most bytes of a request's line and headers."""
FILES_FOR_ONE = 3
"""Open files counted for a connection: itself, one to vLLM, and another of the process."""
MOST_IGNORED = 64 << 20
"""Bytes of a body that are read after its request was refused; then the connection is closed. Common clients read the answer
only after they have sent the whole body, and lose it if the connection is closed before."""
TELL_AGAIN = 60.0
"""Seconds between two warnings that there are too many connections."""


class Owed(Enum):
    """What a client must send next; `NOTHING` while it may wait for its answer."""

    HEAD = "headers"
    BODY = "body"
    NOTHING = "nothing"


if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = object


class _Patience(_Base):
    """What the protocols of h11 and httptools share. `_owed` says what the client must send next, and for which request; a
    timer runs unless that is nothing."""

    limits: PortLimits
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
        """Log an upgrade request only at debug level: it is answered over HTTP, and uvicorn's own warning would advise to
        install WebSockets."""
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
        """Set `_owed` where the parser's callbacks do not."""

    def _watch(self) -> None:
        """Replace the timer by the one for what is owed now; without anything owed there is none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = self._owed
        what = self._owed[0]
        if what is not Owed.NOTHING and not self.transport.is_closing():
            seconds = self.limits.header_timeout if what is Owed.HEAD else self.limits.body_timeout
            self._timer = self.loop.call_later(seconds, self._too_slow, what, seconds)

    def _too_slow(self, what: Owed, seconds: float) -> None:
        if what is Owed.HEAD and self._answering():  # part of the next request, sent while one is answered
            self._watch()
            return
        setting = "header_timeout" if what is Owed.HEAD else "body_timeout"
        text = (
            f"The request's {what.value} did not come within {seconds:g} s (gateway.limits.{setting}); send it again."
        )
        self._cut(RefusalError(408, "request_timeout", text))

    @property
    def address(self) -> str:
        """The client's address; empty where it has none."""
        return self.client[0] if self.client else ""

    def make_room(self) -> bool:
        """Close the connection if no request on it is being answered; return whether it was closed."""
        if self._answering() or self.transport.is_closing():
            return False
        self.transport.close()
        return True

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _cut(self, refusal: RefusalError) -> None:
        """Answer with the refusal, if no answer has begun, and close; the application is told that its client has gone."""
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
    """The open connections of one port: at most `most` (0: any number), and at most `most_of_one` from one address (0: any
    number), which does not count for loopback."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._open: dict[_Patience, str] = {}
        self._of_address: Counter[str] = Counter()
        self._told_at = -math.inf

    def add(self, connection: _Patience) -> str:
        """Count a connection and return an empty text, or return why it is refused. When the port is full, the oldest idle
        connection is closed for it."""
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
        """Forget a connection that has ended."""
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
    """The protocol where httptools is not installed."""

    def _look(self) -> None:
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            what = Owed.BODY
        elif state is h11.IDLE and (self.conn.trailing_data[0] or self.cycle is None):
            what = Owed.HEAD
        else:
            what = Owed.NOTHING
        self._owed = (what, id(self.cycle))


def patient(limits: PortLimits, *, pure: bool = False) -> type[asyncio.Protocol]:
    """Return the HTTP protocol for `uvicorn.Config(http=...)`: httptools' where it is installed, else (and when `pure`)
    h11's."""
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
        """The protocol of httptools, whose parser calls back at each part of a request."""

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


def open_files() -> int:
    """Return how many files this process may have open; 0 for any number."""
    try:
        import resource
    except ImportError:
        return 0
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 if soft == resource.RLIM_INFINITY else soft


def guarded(app: ASGIApp, limits: LimitsConfig) -> tuple[ASGIApp, type[asyncio.Protocol]]:
    """Return the application behind a `Guard`, and the protocol of its port: the plugin's `PortGuard`. Settings that were made
    without the plugin have the usual limits."""
    own = limits if isinstance(limits, PortLimits) else PortLimits()
    return Guard(app, own), patient(own)
