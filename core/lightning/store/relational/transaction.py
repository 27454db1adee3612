"""What an operation sees of a database while its transaction is open, and operations that are done once however often they are
asked for, because an answer was lost; and what a plugin brings for its
operations: functions of a transaction, and tables of its own.

The invariant: an operation touches the database through these methods only, and it may be run again from its beginning:
whatever it did before was rolled back with its transaction. What a call changes and what it is answered are committed together;
whoever makes the same call while the first one is on its way waits for its end.

The names of a plugin's tables begin with that of its group, so that nobody's are another's. They are made when
the group first writes, in the order of their steps, each step once and with its number in the same transaction; tables
of a later step than the plugin knows are refused, untouched. Who only looks makes none.
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
        """Recently written calls, what a new one may be stored against. Only writing transactions have them."""

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

FORGOTTEN_AT_ONCE: Final = 8
"""Old answers that go whenever one is added: they never become many, and nobody waits for their removal."""


async def done_once(transaction: Transaction, known_as: str, run: str, work: Callable[[], Awaitable[Json]]) -> Json:
    """What `work` is answered, which is done once for each `rules.known_as`; each time for a call without a name.

    `run` is the one that the answer goes with, empty for none.
    """
    if not known_as:
        return await work()
    kept = await kept_answers(transaction, known_as)
    if not kept:
        kept = [await work()]
        await keep_answer(transaction, known_as, run, KNOWN_SECONDS, kept[0])
    return kept[0]


def once_only(function: Callable[..., Coroutine[Any, Any, Json]]) -> Callable[..., Coroutine[Any, Any, Json]]:
    """What does an operation with the argument `once`: the function, done once for each call that has a name."""

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
    """What a call of this name was answered; nothing when nobody made it, or too long ago. Keeps others out who make the same
    call, until the transaction ends."""
    await transaction.alone(f"call {known_as}")
    found = await transaction.all(
        "SELECT answer FROM answers WHERE id = ? AND until >= ?", (known_as, await transaction.now())
    )
    return [json.loads(text) for (text,) in found]


async def keep_answer(transaction: Transaction, known_as: str, run: str, seconds: float, answer: Json) -> None:
    """Keep for `seconds` what the call of this name is answered, in place of what it was answered before."""
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
    """A plugin's part for SQL databases. Functions stand by the names of the operations, and get a transaction and the
    operation's arguments by name; one that takes `once` is given a name where an answer may get lost (`once_only`).

    `tables` are steps of statements, in SQLite's types. What a release adds or changes is one more step: a database
    that has the earlier ones gets that one alone. `whole` are the `reads` whose statements must see one moment.
    """

    reads: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    writes: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    tables: Sequence[Sequence[str]] = ()
    whole: Collection[str] = ()

    @cached_property
    def functions(self) -> Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]:
        """Those that read and those that write."""
        return {**self.reads, **self.writes}


async def version_of(transaction: Transaction, group: str) -> int:
    """How many steps of a group's tables a database has."""
    row = await transaction.one("SELECT version FROM operation_groups WHERE name = ?", (group,))
    return 0 if row is None else int(row[0])


async def make_tables(transaction: Transaction, group: str, tables: Sequence[Sequence[str]], where: object) -> None:
    """Make those of a group's tables that are not there. Raises `SchemaError` for those of a later step, `StoreError` for what
    is not the group's by its name."""
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
