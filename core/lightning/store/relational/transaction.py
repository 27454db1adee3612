"""What an operation sees of a database while its transaction is open, and operations that are done once however often they are
asked for, because an answer was lost.

The invariant: an operation touches the database through these methods only, and it may be run again from its beginning:
whatever it did before was rolled back with its transaction. What a call changes and what it is answered are committed together;
whoever makes the same call while the first one is on its way waits for its end.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from lightning.store import sql
from lightning.store.protocol import KNOWN_SECONDS
from lightning.store.rows import Row, Value
from lightning.types import Json

if TYPE_CHECKING:
    from lightning.store.relational.prefix_parents import KnownTransition


T = TypeVar("T")


class Parents(Protocol):
    """Recently written calls by attempt and by group: what a new call may be stored against."""

    async def get(
        self, key: Hashable, load: Callable[[], Awaitable[Iterable[KnownTransition]]]
    ) -> list[KnownTransition]:
        """The candidates under a key, loaded from the database if they are not at hand."""

    def add(self, key: Hashable, known: KnownTransition, extended: KnownTransition | None = None) -> None:
        """Remember a new transition under a key that was asked for before, in place of the one that it extends."""

    def drop(self, key: Hashable) -> None:
        """Forget what is remembered under a key: some of it is not in the database any more."""


class Transaction(Protocol):
    """An open transaction. Parameters of a statement are written `?`."""

    @property
    def parents(self) -> Parents:
        """Recently written calls. Only writing transactions have them."""

    async def now(self) -> float:
        """Unix time by the database's clock, the same for the whole transaction."""

    async def one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """The first row, or None."""

    async def all(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row."""

    async def locked(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Every row as it stands, which nobody else changes before this transaction ends; waits for those who do now."""

    async def free(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """As `locked`, without waiting: rows that another transaction holds are left out."""

    async def kept(self, sql: str, values: Sequence[Value] = ()) -> bool:
        """Whether there is such a row, which nobody removes before this transaction ends; waits for those who do now."""

    async def alone(self, *names: str) -> None:
        """Wait until no other transaction has asked for these names, and keep them until this one ends."""

    async def run(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Execute; return how many rows changed."""

    async def define(self, sql: str) -> None:
        """Execute what makes or changes a table, in SQLite's types."""

    async def many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Execute for each row."""

    async def insert(self, sql: str, values: Sequence[Value]) -> int | None:
        """Insert one row; return its `n`, None when the statement leaves it out because it exists."""

    async def insert_new(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Insert rows by a statement that leaves out those that exist; return how many were new."""

    async def changed(self, run: str) -> None:
        """Whoever watches the run is to hear of this transaction when it is committed."""


Operation: TypeAlias = Callable[[Transaction], Coroutine[Any, Any, T]]
"""One unit of work."""
Again: TypeAlias = Callable[[Transaction, T], Coroutine[Any, Any, T]]
"""What is run when nobody knows whether the operation that would have given this result was committed."""


FORGOTTEN_AT_ONCE: Final = 8
"""Old answers that go whenever one is added: they never become many, and nobody waits for their removal."""


async def done_once(transaction: Transaction, known_as: str, run: str, work: Callable[[], Awaitable[Json]]) -> Json:
    """What `work` is answered, which is done once for each `rules.known_as`; each time for a call without a name.

    `run` is the one that the answer goes with, empty for none.
    """
    if not known_as:
        return await work()
    # The row keeps others out who make the same call, from here on.
    if not await _keep_if_new(transaction, known_as, run, KNOWN_SECONDS, None):
        return await kept_answer(transaction, known_as)
    answer = await work()
    if answer is not None:
        await keep_answer(transaction, known_as, run, KNOWN_SECONDS, answer)
    return answer


async def kept_answer(transaction: Transaction, known_as: str) -> Json:
    """What a call of this name was answered; None when nobody made it, when it was answered nothing, or too long ago."""
    row = await transaction.one(sql.SELECT_ANSWER, (known_as, await transaction.now()))
    answer: Json = None if row is None else json.loads(row[0])
    return answer


async def keep_answer(transaction: Transaction, known_as: str, run: str, seconds: float, answer: Json) -> None:
    """Keep for `seconds` what the call of this name is answered, in place of what it was answered before."""
    until = await transaction.now() + seconds
    if not await transaction.run(sql.KEEP_ANSWER, (json.dumps(answer), until, known_as)):
        await _keep_if_new(transaction, known_as, run, seconds, answer)


async def _keep_if_new(transaction: Transaction, known_as: str, run: str, seconds: float, answer: Json) -> bool:
    """Whether nothing was known under this name, or no more."""
    now = await transaction.now()
    for (old,) in await transaction.free(sql.SELECT_OLD_ANSWERS, (now, FORGOTTEN_AT_ONCE)):
        await transaction.run(sql.FORGET_ANSWER, (old,))
    return bool(await transaction.run(sql.INSERT_ANSWER, (known_as, run, now + seconds, json.dumps(answer), now)))
