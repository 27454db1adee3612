"""The hosts that an agent in a sandbox may reach: listening sockets are made inside, and the runner serves them outside.

The invariant: only the named hosts can be reached, whatever the sandbox sends. The runner connects to the hosts of its
settings, never to an address from the sandbox. A sandbox has no network but its own loopback; a socket stays in the network in
which it was made, whichever process holds it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from lightning.addresses import LOOPBACK_NAMES, is_loopback
from lightning.errors import ConfigError, RunnerError

FIRST_FREE_PORT = 1024
"""Below this port a process needs a capability to listen."""
MOST_CONNECTIONS = 64
"""Connections of one sandbox that are served at a time; further ones wait."""
MOST_WAITING = 192
"""Connections of one sandbox that may wait. Further ones are closed at once, or one agent could use up the runner's open
files."""
CHUNK = 65536
"""Bytes that are passed on at a time."""
CONNECT_TIMEOUT = 30.0


class AllowedHost(NamedTuple):
    """A host that agents may reach, by the name and port that they use, and the address that stands for it in the sandbox."""

    host: str
    port: int
    inside: str


def targets(base_url: str, network: Sequence[str]) -> tuple[AllowedHost, ...]:
    """Return the hosts that a sandbox may reach: the gateway, unless `base_url` is empty, and those of `runner.sandbox_network`
    (`host:port`).

    Raises `ConfigError` for an entry that is no host name and port.
    """
    found: list[AllowedHost] = []
    url = urlsplit(base_url)
    if url.hostname:
        default = 443 if url.scheme == "https" else 80
        found.append(AllowedHost(url.hostname, url.port or default, _inside(url.hostname, 0)))
    for number, entry in enumerate(network, 1):
        host, _, port = entry.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"runner.sandbox_network has {entry!r}: write host:port, such as api.example.com:443")
        if not is_loopback(host) and _is_address(host):
            raise ConfigError(
                f"runner.sandbox_network has {entry!r}: write the host's name, addresses cannot be opened"
            )
        found.append(AllowedHost(host, int(port), _inside(host, number)))
    return tuple(dict.fromkeys(found))


def hosts_file(network: Sequence[AllowedHost]) -> str:
    """Return the content of `/etc/hosts` in the sandbox: the names of the hosts that can be reached."""
    named = [
        f"{each.inside} {each.host}" for each in network if not is_loopback(each.host) and not _is_address(each.host)
    ]
    return "\n".join(("127.0.0.1 localhost", "::1 localhost ip6-localhost", *named, ""))


def url_inside(base_url: str, network: Sequence[AllowedHost]) -> str:
    """Return the gateway's URL for agents in the sandbox: the same, unless its host is an address, which the sandbox does not
    have."""
    host = urlsplit(base_url).hostname or ""
    if is_loopback(host) or not _is_address(host):
        return base_url
    literal = f"[{host}]" if ":" in host else host
    return base_url.replace(literal, network[0].inside, 1)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Runs inside the sandbox: makes a listening socket at each address and port, passes all to the runner, and closes its own
    copies."""

    addresses: tuple[tuple[str, int], ...]

    def __call__(self, control: socket.socket) -> None:
        """Make the sockets and pass them over `control`, a socket to the runner."""
        passed: list[int] = []
        with ExitStack() as made:
            for host, port in self.addresses:
                sock = made.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
                sock.bind((host, port))
                sock.listen()
                passed.append(sock.fileno())
            socket.send_fds(control, [b"."], passed)


async def receive_listeners(control: socket.socket, network: Sequence[AllowedHost]) -> Network:
    """Runs outside the sandbox: receive the sockets that `Listeners` passes over `control`, a non-blocking socket, and serve
    them. Raises `RunnerError` when it gets anything else."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(control, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(control)
    _, descriptors, _, _ = socket.recv_fds(control, 1, len(network))
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    serving = Network()
    try:
        if len(listeners) != len(network) or not all(map(_listens, listeners)):
            raise RunnerError(
                "a sandbox has not opened its way to the gateway: see the output of the agent's process above"
            )
        for each, target in zip(listeners, network, strict=True):
            await serving.add(each, target)
    except BaseException:
        serving.close()
        for each in listeners:
            each.close()
        raise
    return serving


class Network:
    """Serves the listening sockets of one sandbox. End it with `close`."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._passing: set[asyncio.Task[None]] = set()

    async def add(self, listener: socket.socket, target: AllowedHost) -> None:
        """Pass connections to `listener` on to a host."""

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(self._passing) >= MOST_CONNECTIONS + MOST_WAITING:
                writer.transport.abort()
                return
            passing = asyncio.create_task(self._serve(reader, writer, target))
            self._passing.add(passing)
            passing.add_done_callback(self._passing.discard)

        self._servers.append(await asyncio.start_server(connected, sock=listener, limit=CHUNK))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: AllowedHost) -> None:
        try:
            async with self._room:
                await _pass_on(reader, writer, target)
        finally:
            writer.close()

    def close(self) -> None:
        """End every connection. Idempotent."""
        for server in self._servers:
            server.close()
        for task in self._passing:
            task.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: AllowedHost) -> None:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            theirs, to_them = await asyncio.open_connection(target.host, target.port, limit=CHUNK)
    except OSError:  # also a TimeoutError: the agent sees a closed connection
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, to_them))
            both.create_task(_copy(theirs, writer))
    except* OSError:
        pass  # either side may go at any time; then the other one's connection ends as well
    finally:
        to_them.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def _listens(sock: socket.socket) -> bool:
    """Whether a socket from a sandbox is a listening IP socket."""
    try:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and bool(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    except OSError:
        return False


def _inside(host: str, number: int) -> str:
    if host.lower() in LOOPBACK_NAMES:
        return "127.0.0.1"
    return host if is_loopback(host) else f"127.0.1.{number + 1}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
