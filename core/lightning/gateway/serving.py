"""uvicorn inside a running event loop, without its grip on signals and logging.

The invariant: the port is bound before anything runs, so a port in use is one clear error, and stopping waits for calls
in flight before it cuts them off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from lightning.addresses import is_loopback
from lightning.config import LimitsConfig
from lightning.errors import GatewayError
from lightning.gateway.auth.access_control import Guard
from lightning.gateway.client_timeouts import patient

log = logging.getLogger(__name__)

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

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: LimitsConfig) -> None:
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self.url = f"http://{reachable(host)}:{port}"
        config = uvicorn.Config(
            Guard(app, limits, loopback=is_loopback(host)),
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
        allow_many_files()
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
