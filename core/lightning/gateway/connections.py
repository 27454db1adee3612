"""A port: uvicorn in a running event loop, without its signal handlers and logging, and the checks in front of every route.

The invariant: the port is bound before anything runs, so a port in use is one clear error. Stopping waits for calls in flight
before it cuts them off. A port on loopback answers only to loopback's names; a port beyond this machine needs a plugin that
guards it. The memory of all requests' bodies together is bounded, and each token has its share of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias, cast

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning.addresses import is_loopback, reachable
from lightning.asyncio_utils import allow_many_files
from lightning.config import LimitsConfig
from lightning.errors import GatewayError
from lightning.gateway.http import JSON_TYPE, KEY, RefusalError, RequestBody, send_bytes
from lightning.gateway.identity import KEYS, ROLLOUT_HEADER, bearer, keys_in
from lightning.memory_budget import Budget, Holders
from lightning.plugins import plugins
from lightning.safe_text import counted

log = logging.getLogger(__name__)

PortGuard: TypeAlias = "Callable[[ASGIApp, LimitsConfig], tuple[ASGIApp, type[asyncio.Protocol]]]"
"""Returns, for a port's application, an application that guards it, and the HTTP protocol of the port's connections."""
KeyOf = Callable[[Sequence[str]], str]
CLIENT: Final = "lightning.client"
"""The key of a request's ASGI scope with a digest of its token; empty for a request without a token."""
NO_WEBSOCKET = RefusalError(
    426,
    "no_websocket",
    "There are no WebSockets here; send the request by POST over HTTP.",
    [(b"upgrade", b"HTTP/1.1")],
)
"""The answer after which clients that try a WebSocket first, such as Codex, use HTTP."""
CREDENTIALS = frozenset({b"authorization", *KEYS, ROLLOUT_HEADER})


def guard_of(host: str) -> PortGuard | None:
    """Return a plugin's guard for a port on `host`; None if there is none. Raises `PluginError` if a host beyond this machine
    has none."""
    wanted = "a port" if is_loopback(host) else f"to listen on {host!r}, beyond this machine,"
    needed = not is_loopback(host) or plugins().names("ports")
    return cast("PortGuard", plugins().sole("ports", wanted)) if needed else None


class Entrance:
    """An ASGI application in front of another one. It refuses requests for other host names, and counts the body of each
    request in its token's share of the memory. With `loopback` the port is bound to this machine only. `key_of` returns which
    of several API keys in a request counts; the first by default."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig, *, loopback: bool, key_of: KeyOf | None = None) -> None:
        self._key_of = key_of or (lambda keys: next(iter(keys), ""))
        self._app, self._values = app, limits.json_values
        self._hosts = frozenset(host.lower() for host in limits.hosts)
        self._loopback, self._checks_host = loopback, loopback or bool(limits.hosts)
        self._budget = Budget(limits.body_memory)
        self._holders = Holders(self._budget)
        self._is_ours = lru_cache(256)(self._means_us)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            scope[CLIENT] = client = self._client(scope)
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, refusal.body, [JSON_TYPE, *refusal.headers])
            return
        holder = self._holders.of(client or (scope["client"] or ("",))[0].encode())
        scope[KEY] = body = RequestBody(self._budget, holder, self._values, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()
            self._holders.done(holder)

    def close(self) -> None:
        """Close the memory budget, after the last request has been answered."""
        self._budget.close()

    def _client(self, scope: Scope) -> bytes:
        """Return a digest of the request's token; empty for a request without a token.

        Raises `RefusalError`: 421 for a wrong host name, 400 for two tokens in one kind of header.
        """
        host, sent = b"", {}
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name in CREDENTIALS:
                if name in sent:
                    raise RefusalError(400, "two_tokens", f"The request has two headers {name.decode()}; send one.")
                sent[name] = value
        if host and self._checks_host and not self._is_ours(host):
            text = (
                f"This server is not called {host.decode('latin-1')[:200]!r}; name it in gateway.limits.hosts if it is."
            )
            raise RefusalError(421, "wrong_host", text)
        credential = self._credential(scope["path"], sent)
        return hashlib.blake2b(credential, digest_size=16).digest() if credential else b""

    def _means_us(self, host: bytes) -> bool:
        """Return whether a request may be for this host name: a configured name, or one of loopback's. This refuses pages of
        other sites whose names point to this machine (DNS rebinding)."""
        name = host.decode("latin-1").lower()
        if not name.endswith("]"):
            before, colon, port = name.rpartition(":")
            name = before if colon and port.isdecimal() else name
        return name in self._hosts or (self._loopback and is_loopback(name.strip("[]")))

    def _credential(self, path: str, sent: Mapping[bytes, bytes]) -> bytes:
        """Return the token that the route will use, found in the same order and read in the same way, so that an ignored header
        or a stripped space makes no other client of one. Empty if there is none."""
        if path.startswith("/api/"):
            return bearer(sent.get(b"authorization", b"")).encode("latin-1")
        if ROLLOUT_HEADER in sent:
            return sent[ROLLOUT_HEADER]
        if path.startswith("/r/"):
            return path.split("/", 3)[2].encode("utf-8", "surrogatepass")
        return self._key_of(keys_in(sent)).encode("latin-1")


BACKLOG = 4096
KEEP_ALIVE = 75
DRAIN = 30
"""The most seconds for which calls in flight may go on when the gateway stops."""
LOOK = 0.005
"""Seconds between two checks whether they have ended."""


class Front:
    """The ASGI application of the gateway. Calls of the `endpoints` skip Starlette's routing; `app` answers all other
    requests."""

    def __init__(self, app: Starlette, endpoints: Mapping[str, ASGIApp]) -> None:
        self.app, self._endpoints = app, endpoints
        self.mounted: dict[str, ASGIApp] = {}
        """Other applications on the same port, by the first part of the path, such as `api`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or connection (ASGI)."""
        if scope["type"] == "http" and scope["method"] == "GET" and _wants_websocket(scope):
            await send_bytes(send, NO_WEBSOCKET.status, NO_WEBSOCKET.body, (JSON_TYPE, *NO_WEBSOCKET.headers))
            return
        if self.mounted and scope["type"] == "http":
            other = self.mounted.get(scope["path"][1:].partition("/")[0])
            if other is not None:
                await other(scope, receive, send)
                return
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self.app)(scope, receive, send)


def _wants_websocket(scope: Scope) -> bool:
    return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Sleep until told to end; uvicorn's own loop wakes ten times a second for headers that are not sent here."""
        await self.ended.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and wait for the calls in flight, up to `DRAIN` seconds. Unlike uvicorn's own method it does not sleep
        for a tenth of a second each time."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        connections, tasks = self.server_state.connections, self.server_state.tasks
        try:
            async with asyncio.timeout(DRAIN):
                while connections or tasks:
                    for connection in list(connections):
                        connection.shutdown()  # closes it now if it is idle, else after its answer
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            log.warning("%s not ended after %g s: cut off", counted(len(tasks), "call had", "calls had"), DRAIN)
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the process's signal handlers belong to the program that runs the loop."""
        yield


class Serving:
    """An application on a socket. Every port of lightning is one, so that all have the same limits. Raises `PluginError` if a
    guard is needed and no plugin has one."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, limits: LimitsConfig, key_of: KeyOf | None = None
    ) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://{reachable(host)}:{port}"
        allow_many_files()
        guard = guard_of(host)
        guarded, protocol = (app, "h11") if guard is None else guard(app, limits)  # h11 bounds headers by itself
        self._entrance = Entrance(guarded, limits, loopback=is_loopback(host), key_of=key_of)
        config = uvicorn.Config(
            self._entrance,
            http=protocol,
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
        """Start the server, and return when it accepts connections. Raises `GatewayError` if it ends before."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="lightning-gateway")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise GatewayError("The gateway's server ended while it was starting.")
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Accept no more connections, wait for the calls in flight, and cut off those that take longer than `DRAIN` seconds."""
        if self._task is not None:
            self._server.ended.set()
            await self._task
            self._task = None
            self._entrance.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises `GatewayError`, with the setting to change, if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, because asyncio would else not treat it as TCP, and each answer would wait 40 ms for an
    # acknowledgement.
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
