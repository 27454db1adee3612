"""What a client may take of a port: how often it may ask, how slow it may be, how many connections it may have.

The invariant: no token can take more than its share of requests, and nobody learns anything by trying tokens quickly, nor can
that keep a good token, an open path or the share of one that is known from anybody; what is remembered of clients is bounded,
and holds none of their secrets. A request costs three look-ups in dictionaries.

A client that sends its headers or its body too slowly, sends headers without end, or leaves answers unread, holds a
connection for a bounded time and a bounded number of bytes; one that only waits for its answer is left alone. A request that
arrives in one piece, as most do, costs no timer. Connections that wait for nothing cannot keep others out.
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

from lightning_server.content_encoding import unpacking

log = logging.getLogger(__name__)

CLIENTS = 16_384
"""Tokens and addresses that are remembered at most."""
OPEN = frozenset({"/health", "/api/v1/health", "/api/v1/openapi.json"})
"""The paths that need no token, so that an answer there says nothing of one."""


@dataclass(slots=True)
class Share:
    """What is left to one client: `allowance` of `most` requests at the time `at` (the monotonic clock). `good` tokens were
    let in before."""

    most: float
    allowance: float
    at: float
    in_flight: int = 0
    good: bool = False

    def wait(self, rate: float, now: float) -> float:
        """The seconds until a request is left, of `rate` (not 0) per second and at most `most` at once; 0 for now."""
        self.allowance = min(self.most, self.allowance + (now - self.at) * rate)
        self.at = now
        return 0.0 if self.allowance >= 1.0 else (1.0 - self.allowance) / rate


class Shares(Bounded[bytes, Share]):
    """The shares of those who asked lately. The one that asked longest ago is forgotten first, unless it still waits."""

    def __init__(self, most: float) -> None:
        super().__init__(CLIENTS)
        self._share = most

    def of(self, client: bytes, now: float) -> Share:
        """The share of a client, which asks now."""
        return self.keep(client, self.get(client) or Share(self._share, self._share, now))

    def keep(self, client: bytes, share: Share) -> Share:
        """Remember a share."""
        self[client] = share
        self.move_to_end(client)
        oldest = next(iter(self))
        if len(self) > self.most and self[oldest].in_flight:
            self.move_to_end(oldest)
        elif len(self) > self.most:
            del self[oldest]
        return share


class Guard:
    """An ASGI application before another one, behind `lightning.gateway.connections.Entrance`."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig) -> None:
        self._app, self._limits = app, limits
        self._rate, self._failures = limits.requests_per_second, limits.failures_per_minute / 60.0
        self._tokens, self._untried = Shares(2.0 * self._rate), Shares(2.0 * self._rate)
        # Apart, so that any number of tokens that open nothing makes nobody forget one that does.
        self._strangers = Shares(limits.failures_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or say why not."""
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
        """The shares of the token and of the address. Raises `RefusalError` (429)."""
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
        """`send`, with an eye on the answer: a token that opens something is good, one that does not costs its address.

        An address that has nothing left is told of its wrong tokens with 429. The request is asked all the same, since a good
        token from there, such as that of another machine behind one proxy, is to be let in.
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


def open_files() -> int:
    """How many files this process may have open; 0 for any number."""
    try:
        import resource
    except ImportError:
        return 0
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 if soft == resource.RLIM_INFINITY else soft
