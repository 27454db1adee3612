"""One connection to Redis, and the words for what Redis refuses.

The invariant: no exception of the client library leaves this package; each becomes an error that names the store and the cure,
and what only says that the server is away is told apart from what it refuses.
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
"""What a server answers, to a command or from inside a script, while another takes over from it, a script takes long, or fewer
replicas are there than its `min-replicas-to-write`."""

_NO_RIGHTS: Final = ("ACL failure in script", "The user executing the script can't")
"""What Redis 7, and Redis 6.2, answers when a script runs a command that the user may not."""
_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"

Command = Sequence[bytes]
Reply = Any
"""Bytes, integers, None, lists of them, or the error that a command was answered with."""

CONNECT_SECONDS: Final = 5.0
REPLY_SECONDS: Final = 30.0
"""A server that does not answer for this long counts as away, or for the timeout of the URL, if that is shorter."""
LEAST_SECONDS: Final = 1.0
"""How long a server may take to answer, whatever the timeout: a flush of its disk takes a part of it."""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between attempts to reach the server; they double, and are shortened at random so that not all come at once."""


def away(error: BaseException) -> bool:
    """Whether the server could not be asked, or cannot answer now: the same call may be answered later."""
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError) or _UNTRUSTED in str(error):
        return False
    if isinstance(error, exceptions.ResponseError):
        return any(word in str(error) for word in _WAIT) or isinstance(error, _WAIT_KINDS)
    return isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError | EOFError)


def translate(error: BaseException, settings: Settings) -> LightningError:
    """The error to give to the caller for what Redis or its client raised."""
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
    """As Redis reads them. The client's own packing looks at the type of every part, and took most of a call's time."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for part in command:
            parts += (b"$%d\r\n" % len(part), part, b"\r\n")
    return b"".join(parts)


class Wire:
    """A connection that is made when it is needed. Whoever uses it has it alone.

    `seconds` is how long the server may take to answer; without it, as long as the settings say.
    """

    def __init__(self, settings: Settings, seconds: float | None = None) -> None:
        self._settings = settings
        self._seconds = min(REPLY_SECONDS, max(settings.timeout, LEAST_SECONDS)) if seconds is None else seconds
        self._connection: Connection | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection; the server may be gone all the same."""
        return self._connection is not None

    async def connect(self) -> None:
        """Make the connection. Raises what the client raises."""
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
        """Send all, then read all replies; an error that answers one command is returned in its place."""
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
