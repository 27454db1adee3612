"""Reads the host and the port of a database's server from a URL."""

from __future__ import annotations

from lightning.errors import ConfigError


def split_port(host: str, default: int, shown: str, example: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address is in brackets. Raises `ConfigError`, which shows `shown` and an `example`."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, str(default)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{shown!r} has no port that could be: write {example}")
    return name.removeprefix("[").removesuffix("]"), int(port)
