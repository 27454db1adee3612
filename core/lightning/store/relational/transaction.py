"""The open transaction that an operation works with; calls that take effect once although they are repeated; and the functions
and tables that a plugin brings for its own operations.

The invariant: an operation touches the database through the methods of `Transaction` only. It may be run again from its
beginning, because a failed run was rolled back. The changes of a named call and its answer are committed together; the same
call made meanwhile waits until the first one ends.

The names of a plugin's tables begin with the name of its group, so that no two plugins have a table in common. Tables are made
when the group writes for the first time, step by step, each step in one transaction with its number. Tables of a later step
than the plugin knows are refused and not touched. A process that only reads makes no tables.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from lightning.errors import SchemaError, StoreError
from lightning.store import rollout_state
from lightning.store.codec import ParentCache
from lightning.store.protocol import KNOWN_SECONDS
from lightning.store.rows import Row, Value
from lightning.types import Json

T = TypeVar("T")


class Transaction(Protocol):
    """An open transaction. Parameters of a statement are written `?`."""

    @property
    def parents(self) -> ParentCache[int]:
        """The cache of recently written calls, the possible parents of a new call. Only a writing transaction has it."""

    async def now(self) -> float:
        """Return the Unix time by the database's clock, which is the same for the whole transaction."""

    async def one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """Return the first row, or None without rows."""

    async def all(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return all rows."""

    async def locked(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return all rows, locked: no other transaction changes them before this one ends. Wait for transactions that hold a
        lock."""

    async def free(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Return and lock the rows that no other transaction has locked, without waiting."""

    async def kept(self, sql: str, values: Sequence[Value] = ()) -> bool:
        """Return whether there is a row, and keep other transactions from removing it before this one ends. Wait for
        transactions that are removing it."""

    async def alone(self, *names: str) -> None:
        """Lock these names until this transaction ends. Wait for transactions that have locked one of them."""

    async def run(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Execute a statement and return how many rows it changed."""

    async def define(self, sql: str) -> None:
        """Execute a statement, written in SQLite's types, that makes or changes a table."""

    async def many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Execute a statement once for each row of values."""

    async def insert(self, sql: str, values: Sequence[Value]) -> int | None:
        """Insert one row and return its `n`; return None if the row exists and the statement leaves out existing rows."""

    async def insert_new(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Insert rows with a statement that leaves out existing rows, and return how many were new."""

    async def changed(self, run: str) -> None:
        """Tell the watches of a run about this transaction when it is committed."""


Operation: TypeAlias = Callable[[Transaction], Coroutine[Any, Any, T]]
"""A coroutine function that does one unit of work in the transaction it is given."""

FORGOTTEN_AT_ONCE: Final = 8
"""How many expired answers are deleted when one is added, so that they stay few and no call takes long to delete them."""


async def done_once(transaction: Transaction, known_as: str, run: str, work: Callable[[], Awaitable[Json]]) -> Json:
    """Do `work` once for all calls with the name `known_as` (`rollout_state.known_as`), and return the answer of that one time.
    Do it each time if the name is empty.

    `run` is the run with which the kept answer is deleted; empty for no run.
    """
    if not known_as:
        return await work()
    kept = await kept_answers(transaction, known_as)
    if not kept:
        kept = [await work()]
        await keep_answer(transaction, known_as, run, KNOWN_SECONDS, kept[0])
    return kept[0]


def once_only(function: Callable[..., Coroutine[Any, Any, Json]]) -> Callable[..., Coroutine[Any, Any, Json]]:
    """Give a function of a transaction the argument `once`: calls with the same `once` and the same arguments are done once.
    The function is done at each call if `once` is empty or None."""

    @wraps(function)
    async def done(transaction: Transaction, *, once: str | None, **arguments: Any) -> Json:
        known_as = rollout_state.known_as(once or "", function.__name__, arguments)
        return await done_once(
            transaction, known_as, arguments.get("run", ""), lambda: function(transaction, **arguments)
        )

    whole = inspect.signature(function)
    named = inspect.Parameter("once", inspect.Parameter.KEYWORD_ONLY)
    done.__signature__ = whole.replace(parameters=[*whole.parameters.values(), named])  # type: ignore[attr-defined]
    return done


async def kept_answers(transaction: Transaction, known_as: str) -> list[Json]:
    """Return the kept answer of the call with this name, in a list; an empty list if no answer is kept, or no longer. Keep
    other transactions from making the same call until this one ends."""
    await transaction.alone(f"call {known_as}")
    found = await transaction.all(
        "SELECT answer FROM answers WHERE id = ? AND until >= ?", (known_as, await transaction.now())
    )
    return [json.loads(text) for (text,) in found]


async def keep_answer(transaction: Transaction, known_as: str, run: str, seconds: float, answer: Json) -> None:
    """Keep the answer of the call with this name for `seconds`, in place of an earlier answer."""
    now = await transaction.now()
    for (old,) in await transaction.free(
        "SELECT id FROM answers WHERE until < ? ORDER BY until LIMIT ?", (now, FORGOTTEN_AT_ONCE)
    ):
        await transaction.run("DELETE FROM answers WHERE id = ?", (old,))
    await transaction.run(
        "INSERT INTO answers (id, run, until, answer) VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE "
        "SET run = excluded.run, until = excluded.until, answer = excluded.answer",
        (known_as, run, now + seconds, json.dumps(answer)),
    )


KEEP_VERSION: Final = (
    "INSERT INTO operation_groups (name, version) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET version = excluded.version"
)
MADE: Final = re.compile(r"\s*(?:CREATE|ALTER|DROP)\s+(?:UNIQUE\s+)?(TABLE|INDEX)\s+(\w+)", re.IGNORECASE)
"""Matches a statement that makes, changes or drops a table or an index: which of the two, and its name."""


@dataclass(frozen=True)
class SqlPart:
    """The functions and tables of some operations in SQL databases. `reads` and `writes` give the function of each operation by
    its name. A function gets a transaction and the operation's arguments by name; `once_only` gives it the argument `once`.

    `tables` are steps, each a sequence of statements in SQLite's types. A release that changes tables adds a step, and a
    database that has the earlier steps gets the new one. `whole` names the `reads` whose statements must see one snapshot.
    """

    reads: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    writes: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    tables: Sequence[Sequence[str]] = ()
    whole: Collection[str] = ()

    @cached_property
    def functions(self) -> Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]:
        """The functions of both kinds, by the names of the operations."""
        return {**self.reads, **self.writes}


async def version_of(transaction: Transaction, group: str) -> int:
    """Return how many steps of a group's tables the database has."""
    row = await transaction.one("SELECT version FROM operation_groups WHERE name = ?", (group,))
    return 0 if row is None else int(row[0])


async def make_tables(transaction: Transaction, group: str, tables: Sequence[Sequence[str]], where: object) -> None:
    """Take the steps of a group's tables that the database does not have. `where` names the database in errors. Raises
    `SchemaError` if it has more steps than `tables`, and `StoreError` for a table whose name does not begin with the
    group's."""
    await transaction.alone(f"tables of {group}")
    there = await version_of(transaction, group)
    if there > len(tables):
        raise SchemaError(
            f"{where!r} has tables of {group!r} of step {there}, and the plugin that is installed here knows {len(tables)}: "
            "install the newer release of the plugin, with which they were made"
        )
    for statement in (statement for step in tables[there:] for statement in step):
        found = MADE.match(statement)
        if found and found[2] != group and not found[2].startswith(f"{group}_"):
            raise StoreError(
                f"the plugin that brings {group!r} would make {found[2]!r} in {where!r}: its tables and indexes are called "
                f"{group} or {group}_..."
            )
        await transaction.define(statement)
    if there < len(tables):
        await transaction.run(KEEP_VERSION, (group, len(tables)))
