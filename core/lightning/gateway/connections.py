"""A port: uvicorn inside a running event loop, without its grip on signals and logging, and what stands before every route.

The invariant: the port is bound before anything runs, so a port in use is one clear error, and stopping waits for calls
in flight before it cuts them off. On loopback it answers to loopback's names alone; beyond it a plugin must guard it. The
bodies of all requests together have a bounded memory, and each token has its share of it.
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
from typing import Final, TypeAlias

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

log = logging.getLogger(__name__)

PortGuard: TypeAlias = "Callable[[ASGIApp, LimitsConfig], tuple[ASGIApp, type[asyncio.Protocol]]]"
"""Makes of a port's application the one that stands before it, and the HTTP protocol that its connections speak."""
KeyOf = Callable[[Sequence[str]], str]
OF_THE_CORE: Final = frozenset({"hosts", "body_memory", "json_values"})
"""The settings of `gateway.limits` that need no `PortGuard`."""
CLIENT: Final = "lightning.client"
"""Under this name the scope of a request has a word for its token; empty without one."""
NO_WEBSOCKET = RefusalError(
    426,
    "no_websocket",
    "There are no WebSockets here; send the request by POST over HTTP.",
    [(b"upgrade", b"HTTP/1.1")],
)
"""What clients that try a WebSocket first (Codex) take for the word to go on without."""
CREDENTIALS = frozenset({b"authorization", *KEYS, ROLLOUT_HEADER})


def guard_of(limits: LimitsConfig, host: str) -> PortGuard | None:
    """What guards a port on `host`, if a plugin does. Raises `PluginError` where none does and one is needed: beyond this
    machine, and for settings that a guard carries out."""
    plain, wanted = LimitsConfig(), "a port"
    for name in LimitsConfig.model_fields.keys() - OF_THE_CORE:
        if (value := getattr(limits, name)) != getattr(plain, name):
            wanted = f"gateway.limits.{name} = {value!r}"
    if not is_loopback(host):
        wanted = f"to listen on {host!r}, beyond this machine,"
    return plugins().port(wanted) if wanted != "a port" or plugins().names("ports") else None


class Entrance:
    """An ASGI application before another one: it answers to its own names alone, and holds the body of each request in its
    token's share of the memory. `loopback` says that the port is bound to this machine alone, `key_of` which of several API
    keys in one request the application looks at (the first, unless it says otherwise)."""

    def __init__(self, app: ASGIApp, limits: LimitsConfig, *, loopback: bool, key_of: KeyOf | None = None) -> None:
        self._key_of = key_of or (lambda keys: next(iter(keys), ""))
        self._app, self._values = app, limits.json_values
        self._hosts = frozenset(host.lower() for host in limits.hosts)
        self._loopback, self._checks_host = loopback, loopback or bool(limits.hosts)
        self._budget = Budget(limits.body_memory)
        self._holders = Holders(self._budget)
        self._is_ours = lru_cache(256)(self._means_us)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or say why not."""
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
        """Let go of what it works with, once the last request has been answered."""
        self._budget.close()

    def _client(self, scope: Scope) -> bytes:
        """The token's name here, which is none of its secrets; empty without one.

        Raises `RefusalError`: 421 for a wrong name, 400 for two tokens.
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
        """Whether a request may be for this name: one of loopback's, or one that was given. Pages of other sites, whose names
        were pointed here, are not (DNS rebinding)."""
        name = host.decode("latin-1").lower()
        if not name.endswith("]"):
            before, colon, port = name.rpartition(":")
            name = before if colon and port.isdecimal() else name
        return name in self._hosts or (self._loopback and is_loopback(name.strip("[]")))

    def _credential(self, path: str, sent: Mapping[bytes, bytes]) -> bytes:
        """The token that the route will look at, in its order and as it reads it: neither a header that it ignores nor a space
        that it strips must make another client of one. Empty where there is none."""
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
"""Seconds calls in flight get to end when the gateway stops."""
LOOK = 0.005
"""Seconds between two looks at whether they have."""


class Front:
    """`app` answers everything; calls to `/v1` go straight to their endpoints, past what Starlette does for each request."""

    def __init__(self, app: Starlette, endpoints: Mapping[str, ASGIApp]) -> None:
        self.app, self._endpoints = app, endpoints
        self.mounted: dict[str, ASGIApp] = {}
        """What answers on the same port beside the gateway, by the first part of the path: `api`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
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
    """One application on one socket. Every port of lightning is one of these, so that all have the same limits. Raises
    `PluginError` where a guard is needed and no plugin is one."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, limits: LimitsConfig, key_of: KeyOf | None = None
    ) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://{reachable(host)}:{port}"
        allow_many_files()
        guard = guard_of(limits, host)
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
            self._entrance.close()


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
