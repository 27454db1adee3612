"""The connections of one process to the database, and the repetition of operations that fail.

The invariant: an operation takes effect once. An operation that clashed with another transaction is run again; one whose
connection was lost is run again on a new connection. If it is unknown whether an operation was committed, it is run again in a
form that finds that out first (`AGAIN`), unless it may be done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Generic, TypeVar

from lightning.errors import StoreError
from lightning.store.codec import ParentCache
from lightning.store.relational import operations
from lightning.store.relational.transaction import Operation, Transaction
from lightning.types import Lease
from lightning_db.parents_view import ParentsView

from lightning_postgres import failures
from lightning_postgres.connection import PostgresTransaction, connect
from lightning_postgres.failures import Failure
from lightning_postgres.settings import Settings

T = TypeVar("T")
log = logging.getLogger(__name__)
CLASHES: Final = 20
"""How often an operation is run again because of a clash with another transaction."""
FIRST_DELAY, LAST_DELAY = 0.02, 2.0
"""Seconds before the second try to reach a server that is away, and the most seconds between later tries."""


async def _or_lost(transaction: Transaction, lost: int, again: Operation[int]) -> int:
    """Repeat an operation that counts new rows, after a try that counted `lost` and of which it is unknown whether it was
    committed. Return the count; if nothing is new now, the try was committed and `lost` is the count."""
    return await again(transaction) or lost


async def _lease_again(transaction: Transaction, lost: list[Lease], again: Operation[list[Lease]]) -> list[Lease]:
    """Repeat a lease, after a try that gave the leases `lost` and of which it is unknown whether it was committed. Return
    `lost` if it was; lease again if it was not."""
    for held in sorted(lost, key=lambda held: held.rollout.id):
        # Waits for the earlier try if it is still running.
        await operations.standing(transaction, held.rollout.id, held=True)
        if await transaction.one(_TAKEN, (held.rollout.id, held.attempt, held.worker, held.expires_at)):
            return lost
    return await again(transaction)


_TAKEN: Final = "SELECT 1 FROM rollouts WHERE id = ? AND attempt = ? AND worker = ? AND lease_until = ?"
AGAIN: Final[Mapping[Callable[..., Any], Callable[..., Coroutine[Any, Any, Any]]]] = {
    operations.create_rollouts: _or_lost,
    operations.append: _or_lost,
    operations.lease: _lease_again,
}
"""The functions that repeat an operation whose result was lost, by the operation's function, for operations that must not
simply be run twice."""


class _Doubt(Exception, Generic[T]):  # noqa: N818 — not a failure of its own: it carries one
    """A COMMIT was sent and its answer did not come. `result` is the operation's result."""

    def __init__(self, result: T) -> None:
        super().__init__()
        self.result = result


class Connections:
    """A pool of connections, which runs operations and repeats them after failures. It belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[Any] = []
        self._slots = asyncio.Semaphore(settings.pool)
        self._parents = ParentCache[int]()

    async def write(self, operation: Operation[T]) -> T:
        """Run an operation, commit it, and return its result. Raises the operation's errors, and errors of
        `lightning.errors`."""
        run = operation
        patience = Patience(self._settings)
        while True:
            try:
                async with self._connection(patience) as connection:
                    return await self._transact(connection, run)
            except _Doubt as unknown:
                if isinstance(operation, partial) and operation.func in AGAIN:
                    run = partial(AGAIN[operation.func], lost=unknown.result, again=operation)
                await patience.wait(unknown.__cause__ or unknown)
            except Exception as error:  # noqa: BLE001 — `patience` raises what cannot be helped
                await patience.wait(error)

    async def read(self, operation: Operation[T], *, whole: bool) -> T:
        """Run an operation that changes nothing, and return its result. Each statement sees all that was committed before it;
        with `whole` all statements see one snapshot."""
        patience = Patience(self._settings)
        while True:
            try:
                async with self._connection(patience) as connection:
                    transaction = PostgresTransaction(connection, self._settings)
                    return await (_on_snapshot(connection, transaction, operation) if whole else operation(transaction))
            except Exception as error:  # noqa: BLE001 — likewise
                await patience.wait(error)

    async def close(self) -> None:
        """Close all connections. No operation may be running."""
        while self._idle:
            with contextlib.suppress(Exception):  # a server that is gone has noticed
                await self._idle.pop().close(timeout=2)

    @contextlib.asynccontextmanager
    async def _connection(self, patience: Patience) -> AsyncIterator[Any]:
        """A context with one of the pool's connections. Raises `TimeoutError` if none is free or can be made in time."""
        patience.anew = patience.answered = False
        async with self._slot(patience.deadline):
            while self._idle and self._idle[-1].is_closed():
                self._idle.pop()
            if self._idle:
                connection = self._idle.pop()
            else:
                patience.anew = True
                async with asyncio.timeout_at(patience.deadline):
                    connection = await connect(self._settings, statement_seconds=self._settings.timeout)
                patience.answered = True
            try:
                yield connection
            except BaseException as error:
                if _is_usable(connection, error):
                    self._idle.append(connection)
                else:
                    connection.terminate()
                    self.distrust()
                raise
            self._idle.append(connection)

    @contextlib.asynccontextmanager
    async def _slot(self, deadline: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise TimeoutError(f"all {self._settings.pool} connections, see ?pool=, were busy") from None
        try:
            yield
        finally:
            self._slots.release()

    def distrust(self) -> None:
        """Close all idle connections and clear the cache of parents, because the server went away. After a failover it may have
        lost committed calls."""
        for connection in self._idle:
            connection.terminate()
        self._idle.clear()
        self._parents.clear()

    async def _transact(self, connection: Any, operation: Operation[T]) -> T:
        parents = ParentsView(self._parents)
        transaction = PostgresTransaction(connection, self._settings, parents)
        async with _begun(connection, "BEGIN"):
            result = await operation(transaction)
        try:
            status = await connection.execute(transaction.commit)
        except Exception as error:
            if failures.in_doubt(error):
                raise _Doubt(result) from error
            if (
                not connection.is_closed() and connection.is_in_transaction()
            ):  # NOTIFY failed: the transaction is neither committed nor ended
                connection.terminate()
            raise
        if status != "COMMIT":
            raise StoreError(
                f"store {self._settings.place} rolled back what it was to commit ({status}): nothing was changed"
            )
        parents.keep()
        return result


async def _on_snapshot(connection: Any, transaction: PostgresTransaction, operation: Operation[T]) -> T:
    async with _begun(connection, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"):
        result = await operation(transaction)
    await connection.execute("COMMIT")
    return result


@contextlib.asynccontextmanager
async def _begun(connection: Any, begin: str) -> AsyncIterator[None]:
    """A context with a transaction that is begun by `begin`. It is rolled back if the block fails and the connection is
    usable."""
    await connection.execute(begin)
    try:
        yield
    except Exception as error:
        if _is_usable(connection, error):
            await connection.execute("ROLLBACK")
        raise


def _is_usable(connection: Any, error: BaseException) -> bool:
    """Return whether a connection may serve the next operation after an operation failed with this error."""
    return (
        not connection.is_closed()
        and isinstance(error, Exception)
        and not isinstance(error, _Doubt)
        and (failures.kind(error) is Failure.FINAL or failures.kind(error) is Failure.CLASHED)
    )


class Patience:
    """Waits between the tries of one operation, and decides when to give up.

    `anew` says that the last try was on a new connection, and `answered` that a server accepted that connection.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.deadline = asyncio.get_running_loop().time() + settings.timeout
        self.anew = self.answered = False
        self._prolonged = False
        self._warned = False
        self._delay = FIRST_DELAY
        self._clashes = 0

    async def wait(self, error: BaseException) -> None:
        """Return when it is time for the next try. If there is no next try, raise the error as `failures.translate` gives
        it."""
        what = failures.kind(error)
        now = asyncio.get_running_loop().time()
        if what is Failure.CLASHED and self._clashes < CLASHES:
            self._clashes += 1
            await asyncio.sleep(random.uniform(0, 0.001 * 2 ** min(self._clashes, 6)))  # noqa: S311 — jitter
            return
        if what is Failure.LOST:
            if not self._warned:
                self._warned = True
                log.warning("store %s does not answer (%s): waiting for it", self._settings.place, type(error).__name__)
            if not self.anew and not self._prolonged:
                # A server that vanishes, as in a failover, leaves connections on which nothing is ever answered. A statement on
                # one of them may take all of the time, although there is another server now: so the time begins anew, once.
                self._prolonged = True
                self.deadline = now + self._settings.timeout
            if now < self.deadline:
                await asyncio.sleep(min(self._delay * random.uniform(0.5, 1.0), self.deadline - now))  # noqa: S311
                self._delay = min(self._delay * 2, LAST_DELAY)
                return
        slow = self.answered and isinstance(error, TimeoutError)
        refused = failures.translate(error, self._settings, slow=slow)
        raise refused from (None if refused is error else error)
