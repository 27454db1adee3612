"""Reads a PostgreSQL URL: the server, the user, the schema that holds the tables, and the timeouts.

The invariant: an invalid URL is refused before anything is sent. No error and no `repr` contains a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import unquote

from lightning.errors import ConfigError
from lightning.store.url import StoreURL, parse, redacted, split_userinfo
from lightning_db.server_url import split_port

N = TypeVar("N", int, float)
SSL: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
OPTIONS: Final = ("schema", "pool", "timeout", "ssl", "ca", "host")
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The address of the database and how to use it.

    `host` may be the folder of a Unix socket. `schema` holds the tables and is created with them. `pool` is the most
    connections of one process, besides one for watching. `timeout` is the most seconds that an operation waits for a server
    that is away or does not answer, and that one of its statements may take; an operation whose older connection was lost gets
    the time once more on a new one. `ssl` is one of libpq's modes. `ca` is a file of certificates to trust instead of the
    system's, and implies `verify-full`. Without user or password, `PGUSER`, `PGPASSWORD` and `~/.pgpass` give them.
    """

    host: str = "localhost"
    port: int = 5432
    database: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    schema: str = "lightning"
    pool: int = 8
    timeout: float = 60.0
    ssl: str = "prefer"
    ca: str = ""

    def __post_init__(self) -> None:
        if not _SCHEMA.fullmatch(self.schema) or self.schema.startswith("pg_"):
            raise ConfigError(
                f"schema={self.schema!r} cannot name a schema: use at most 63 lower-case letters, digits and _, not beginning "
                "with a digit or pg_"
            )
        if not 1 <= self.pool <= 500:
            raise ConfigError(f"pool={self.pool!r} must be a number of connections between 1 and 500")
        if not 0 < self.timeout <= 3600:
            raise ConfigError(f"timeout={self.timeout!r} must be seconds between 0 and 3600")
        if self.ssl not in SSL:
            raise ConfigError(f"ssl={self.ssl!r} is not known for the postgresql store: use {', '.join(SSL)}")

    @property
    def place(self) -> str:
        """The store's name in errors, without user and password."""
        if self.host.startswith("/"):
            return f"postgresql:///{self.database}?host={self.host}&schema={self.schema}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"postgresql://{host}:{self.port}/{self.database}?schema={self.schema}"


def from_url(url: str) -> Settings:
    """Read the settings of `postgresql://[user[:password]@]host[:port]/database[?option=value&...]`. Raises `ConfigError`."""
    userinfo, rest = split_userinfo(url)
    shown, where = redacted(url), parse(rest)
    where.check_options(OPTIONS)
    folder = where.options.get("host", "")
    if folder and not folder.startswith("/"):
        raise ConfigError(f"the option host of {shown!r} must be the folder of a Unix socket, such as /run/postgresql")
    host, port = split_port(where.host, 5432, shown, "postgresql://host:5432/database")
    if not where.path or "/" in where.path:
        raise ConfigError(f"{shown!r} names no database: write postgresql://host:5432/database")
    user, _, password = userinfo.partition(":")
    return Settings(
        host=folder or host or "localhost",
        port=port,
        database=where.path,
        user=unquote(user),
        password=unquote(password),
        schema=where.options.get("schema", "lightning"),
        pool=_number(where, "pool", 8, shown),
        timeout=_number(where, "timeout", 60.0, shown),
        ssl=where.options.get("ssl", "prefer"),
        ca=where.options.get("ca", ""),
    )


def _number(where: StoreURL, option: str, default: N, shown: str) -> N:
    """Return an option as a number of the same type as its default. Raises `ConfigError` for any other text."""
    try:
        return type(default)(where.options.get(option, default))
    except ValueError as error:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"the option {option} of the store URL {shown!r} must be {kind}") from error
