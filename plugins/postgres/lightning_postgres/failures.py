"""Decides what to do about a failure of PostgreSQL: try again, wait for the server, or raise an error that names the cure.

The invariant: no exception of asyncpg leaves this package, and no error contains a password.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import asyncpg
from lightning.errors import DataError, LightningError, SchemaError, StoreError, UnavailableError

from lightning_postgres.settings import Settings


class Failure(Enum):
    """What to do about an exception."""

    LOST = "the server is away or the connection is broken: wait, connect anew, try again"
    CLASHED = "another transaction was in the way: try again"
    FINAL = "trying again would not help"


_CLASHES: Final = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "55P03",  # a lock was not available in time
    "23505",  # somebody inserted the same key at the same moment: the next try finds it
}
_AWAY: Final = {
    "25006",  # read-only: a standby that is to become the primary
    "25P03",  # idle in a transaction for too long
    "53300",  # too many connections
    "57P01",  # the server shuts down
    "57P02",  # it crashed
    "57P03",  # it starts
    "57P05",  # idle for too long
}
_CAUSES: Final = {
    "28": "the server refuses this user or password: check them in the store URL, PGPASSWORD or ~/.pgpass",
    "3D": "there is no such database: create it with createdb, or correct the store URL",
    "42501": "this user lacks the right: grant it CREATE on the database, or on a schema that ?schema= names",
    "53100": "its disk is full: free some space there; everything acknowledged is kept",
    "53200": "it is out of memory: try again later; everything acknowledged is kept",
    "58": "its disk refused to read or write: check it; everything acknowledged is kept",
}


def kind(error: BaseException) -> Failure:
    """Return what to do about an exception of an operation or of a try to connect."""
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state in _CLASHES or isinstance(error, asyncpg.InvalidCachedStatementError):
            return Failure.CLASHED
        return Failure.LOST if state in _AWAY or state.startswith("08") else Failure.FINAL
    # asyncpg raises an InterfaceError for a closed connection, and its DataError for a value that cannot be stored.
    if isinstance(error, asyncpg.InterfaceError) and not isinstance(error, ValueError):
        return Failure.LOST
    # It raises an InternalClientError for an unexpected message, which a server sends that goes down.
    broken = isinstance(error, OSError | TimeoutError | EOFError | asyncpg.InternalClientError)
    return Failure.LOST if broken else Failure.FINAL


def in_doubt(error: BaseException) -> bool:
    """Return whether a COMMIT that failed with this error may still have been done. It was not done if a working server says
    so."""
    state = (error.sqlstate or "") if isinstance(error, asyncpg.PostgresError) else ""
    return not state or kind(error) is Failure.LOST or state[:2] in ("57", "58", "XX")


def translate(error: BaseException, settings: Settings, *, slow: bool = False) -> BaseException:
    """Return the error to raise to the caller. `slow` says that the server answers, but took too long for this statement."""
    if isinstance(error, LightningError) or not isinstance(error, Exception):
        return error
    where = f"store {settings.place}"
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        if state.startswith(("22", "54")):  # data exception; limits, such as an id too long for its index
            return DataError(f"{where} cannot hold this value: {error}")
        if state in ("XX001", "XX002"):
            return SchemaError(f"{where} is corrupt ({error}): restore it from a backup")
        cause = _CAUSES.get(state) or _CAUSES.get(state[:2])
        if cause is not None:
            return StoreError(f"{where}: {cause} ({error})")
    if isinstance(error, ValueError | OverflowError):  # asyncpg's own DataError is a ValueError
        return DataError(f"{where} cannot hold this value: {error}")
    if slow:
        return UnavailableError(
            f"{where} answers, but a statement took longer than {settings.timeout:g} s (?timeout=): look what else the server "
            "is busy with, or raise ?timeout= in the store URL; everything acknowledged is kept"
        )
    if kind(error) is Failure.LOST:
        return UnavailableError(
            f"{where} could not be reached for {settings.timeout:g} s ({_words(error)}): start it, check the network, or raise "
            "?timeout= in the store URL; everything acknowledged is kept"
        )
    if isinstance(error, asyncpg.PostgresError):
        return StoreError(f"{where} refused the operation ({_words(error)})")
    return error


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
