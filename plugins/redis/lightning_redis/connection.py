"""One connection to Redis, and the errors for what Redis refuses.

The invariant: no exception of the client library leaves this package. Each becomes an error that names the store and the cure.
Errors that mean that the server is away are distinguished from refusals.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from lightning.errors import LightningError, SchemaError, StoreError, UnavailableError
from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection

from lightning_redis.settings import Settings

_WAIT: Final = ("READONLY", "MASTERDOWN", "BUSY ", "NOREPLICAS")
_WAIT_KINDS: Final = (exceptions.ReadOnlyError, exceptions.MasterDownError)
"""Errors that a server gives, for a command or from a script, during a failover, during a long script, or with fewer replicas
than its `min-replicas-to-write`."""

_NO_RIGHTS: Final = ("ACL failure in script", "The user executing the script can't")
"""Errors of Redis 7 and of Redis 6.2 when a script runs a command that the user may not run."""
_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"

Command = Sequence[bytes]
Reply = Any
"""A reply: bytes, integers, None, lists of these, or the error of a command."""

CONNECT_SECONDS: Final = 5.0
REPLY_SECONDS: Final = 30.0
"""A server counts as away after this many seconds without an answer, or after the URL's timeout if that is shorter."""
LEAST_SECONDS: Final = 1.0
"""Seconds that a server always has to answer, whatever the timeout: a flush of its disk may take that long."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""The first and the longest pause in seconds between attempts to reach the server. Pauses double, and are shortened at random
so that clients do not come back all at once."""


def away(error: BaseException) -> bool:
    """Whether an error means that the server is away: the same call may be answered later."""
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError) or _UNTRUSTED in str(error):
        return False
    if isinstance(error, exceptions.ResponseError):
        return any(word in str(error) for word in _WAIT) or isinstance(error, _WAIT_KINDS)
    return isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError | EOFError)


def translate(error: BaseException, settings: Settings) -> LightningError:
    """Return the caller's error for an error of Redis or its client."""
    where, text = f"store {settings.place}", str(error) or type(error).__name__
    if isinstance(error, LightningError):
        return error
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError) or text.startswith(
        "WRONGPASS"
    ):
        return StoreError(
            f"{where} refused the user or the password: put them in the URL, redis://user:password@host/0"
        )
    if _UNTRUSTED in text:
        return StoreError(
            f"{where} has a certificate that is not trusted ({text}): name the file of who signed it with ?ca=FILE"
        )
    if isinstance(error, exceptions.NoPermissionError) or any(word in text for word in _NO_RIGHTS):
        return StoreError(f"{where} does not let this user do what a store does ({text}): grant it ~prefix:* and +@all")
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text:
        return StoreError(
            f"{where} is out of memory: raise its maxmemory or delete old runs; everything acknowledged is kept ({text})"
        )
    if "MISCONF" in text:
        return StoreError(
            f"{where} cannot write to its disk: free some space there; everything acknowledged is kept ({text})"
        )
    if isinstance(error, exceptions.MovedError | exceptions.ClusterError):
        return StoreError(f"{where} is a Redis Cluster, which cannot keep a store: use a single server ({text})")
    if away(error):
        return UnavailableError(
            f"{where} cannot be reached or does not answer: check that Redis runs there; what was acknowledged is kept, "
            f"asking again may help ({text})"
        )
    if "WRONGTYPE" in text or "cjson" in text or "user_script" in text:
        return SchemaError(f"{where} is damaged or holds what is not its own ({text}): restore it from a backup")
    return StoreError(f"{where} refused the operation ({text})")


def pause(attempt: int) -> float:
    """Seconds to wait after the attempt with this number (0, 1, ...) failed."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)  # noqa: S311 — no secret


def _packed(commands: Sequence[Command]) -> bytes:
    """Return commands in Redis' protocol. The client's own packing checks the type of every part, and took most of a call's
    time."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for part in command:
            parts += (b"$%d\r\n" % len(part), part, b"\r\n")
    return b"".join(parts)


class Wire:
    """A connection that is made when it is needed, for one user at a time.

    `seconds` is how long the server may take to answer; None: as long as the settings say.
    """

    def __init__(self, settings: Settings, seconds: float | None = None) -> None:
        self._settings = settings
        self._seconds = min(REPLY_SECONDS, max(settings.timeout, LEAST_SECONDS)) if seconds is None else seconds
        self._connection: Connection | None = None

    @property
    def connected(self) -> bool:
        """Whether a connection was made; the server may be gone meanwhile."""
        return self._connection is not None

    async def connect(self) -> None:
        """Make the connection. Raises the client's errors."""
        settings = self._settings
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "db": settings.db,
            "username": settings.user or None,
            "password": settings.password or None,
            "socket_timeout": self._seconds,
            "socket_connect_timeout": min(CONNECT_SECONDS, self._seconds),
            "protocol": 2,
        }
        if settings.tls:
            connection: Connection = SSLConnection(**options, ssl_ca_certs=settings.ca or None)
        else:
            connection = Connection(**options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._connection = connection

    async def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Send all commands, then return all replies. The error of a command is returned as its reply."""
        connection = self._connection
        assert connection is not None, "connect() comes first"
        await connection.send_packed_command(_packed(commands), check_health=False)
        replies: list[Reply] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except exceptions.ResponseError as error:
                replies.append(error)
        return replies

    async def disconnect(self) -> None:
        """Drop the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
