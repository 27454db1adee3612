"""The settings in a Redis URL: the server, the user, the prefix of keys, and how durable writes must be.

The invariant: impossible settings are refused before anything is sent, and no error and no `repr` has a password.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from lightning.errors import ConfigError
from lightning.store.url import parse, redacted, split_userinfo
from lightning_db.server_url import split_port

DURABILITIES: Final = ("process", "power", "everysec", "none")
OPTIONS: Final = ("prefix", "durability", "timeout", "ca")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The address of the database, and the guarantees that are demanded of it.

    `durability` says what the server must guarantee for an acknowledged write: `process`: it survives a kill of the server;
    `power`: also a power failure; `everysec`: at most the last two seconds are lost; `none`: nothing. `timeout` is how many
    seconds an operation waits for a server that does not answer. `ca` is a file of certificates to trust instead of the
    system's.
    """

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    prefix: str = "lightning"
    durability: str = "process"
    timeout: float = 30.0
    ca: str = ""

    def __post_init__(self) -> None:
        if self.durability not in DURABILITIES:
            raise ConfigError(
                f"durability={self.durability!r} is not known for the redis store: use {', '.join(DURABILITIES)}"
            )
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(f"prefix={self.prefix!r} cannot begin keys: use letters, digits and . _ -")
        if not 0 <= self.timeout <= 600:
            raise ConfigError(f"timeout={self.timeout!r} must be seconds between 0 and 600")
        if self.ca and not self.tls:
            raise ConfigError("the option ca is for TLS: write rediss:// instead of redis://")

    @property
    def place(self) -> str:
        """The store's name in errors, without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}?prefix={self.prefix}"


def from_url(url: str) -> Settings:
    """Parse `redis[s]://[[user]:password@]host[:port][/db][?option=value&...]`. Raises `ConfigError`.

    A password that is not in the URL is taken from `REDISCLI_AUTH`, as `redis-cli` does.
    """
    userinfo, rest = split_userinfo(url)
    shown = redacted(url)
    where = parse(rest)
    where.check_options(OPTIONS)
    name, port = split_port(where.host, 6379, shown, "redis://host:6379/0")
    if not name:
        raise ConfigError(f"{shown!r} names no host: write redis://host:6379/0")
    user, _, password = userinfo.partition(":")
    if where.path and not where.path.isdecimal():
        raise ConfigError(f"{shown!r} names no database: write its number after the host, for example redis://host/0")
    try:
        timeout = float(where.options.get("timeout", "30"))
    except ValueError as error:
        raise ConfigError(f"timeout in {shown!r} must be a number of seconds") from error
    return Settings(
        host=name,
        port=port,
        db=int(where.path or 0),
        user=unquote(user),
        password=unquote(password) or os.environ.get("REDISCLI_AUTH", ""),
        tls=where.scheme == "rediss",
        prefix=where.options.get("prefix", "lightning"),
        durability=where.options.get("durability", "process"),
        timeout=timeout,
        ca=where.options.get("ca", ""),
    )
