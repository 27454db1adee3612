"""Holds a process's network to the loopback address, for tests: any connection that would leave the machine is refused and
named.

The invariant: after the block `socket` is exactly as it was. Names are refused before they are looked up, since the query to a
name server leaves the machine as well. Event loops in C (uvloop) do not call Python's `socket` and are not held.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any


class NetworkHeldError(ConnectionError):
    """A connection beyond the loopback address, refused by `hold_network`."""

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"the test holds the network to the loopback address, and something wants to reach {host}: "
            "give its client the base URL of the test's server, or switch off what reports to it"
        )

    def __reduce__(self) -> tuple[type[NetworkHeldError], tuple[str]]:
        return (type(self), (self.host,))


@contextlib.contextmanager
def hold_network() -> Iterator[list[str]]:
    """Refuse connections and look-ups beyond the loopback address with `NetworkHeldError`, in all threads of the process.

    Yields the hosts that were refused, in order: many clients and exporters swallow the error, so look at the list.
    Blocks may be nested.
    """
    refused: list[str] = []

    def allow(host: object) -> None:
        if not is_local(host):
            name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
            refused.append(name)
            raise NetworkHeldError(name)

    with contextlib.ExitStack() as restoring:
        for name in ("connect", "connect_ex"):
            real = getattr(socket.socket, name)
            had = name in vars(socket.socket)
            setattr(socket.socket, name, _held_connect(real, allow))
            restoring.callback(_restore, name, real, had)
        lookup = socket.getaddrinfo

        def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
            allow(host)
            return lookup(host, *args, **kwargs)

        socket.getaddrinfo = getaddrinfo
        restoring.callback(setattr, socket, "getaddrinfo", lookup)
        yield refused


def is_local(host: object) -> bool:
    """Whether a host, as a socket takes it, is this machine: a loopback address, `localhost`, or None (any address of a
    server)."""
    text = host.decode(errors="replace") if isinstance(host, bytes) else host
    if text is None or text in ("", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(str(text).partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _held_connect(real: Callable[..., Any], allow: Callable[[object], None]) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            allow(address[0])
        return real(self, address)

    return connect


def _restore(name: str, real: object, had: bool) -> None:
    if had:
        setattr(socket.socket, name, real)
    else:
        delattr(socket.socket, name)
