"""What a plugin brings to SQL databases for its operations: functions of a transaction, and tables of its own.

The invariant: the names of a plugin's tables begin with that of its group, so that nobody's are another's. They are made when
the group is first asked for something, in the order of their steps, each step once and with its number in the same transaction;
tables of a later step than the plugin knows are refused, untouched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lightning.errors import SchemaError, StoreError
from lightning.store.relational.transaction import Transaction

SELECT_VERSION: Final = "SELECT version FROM operation_groups WHERE name = ?"
KEEP_VERSION: Final = (
    "INSERT INTO operation_groups (name, version) VALUES (?, ?) "
    "ON CONFLICT (name) DO UPDATE SET version = excluded.version"
)
_MADE: Final = re.compile(r"\s*(?:CREATE|ALTER|DROP)\s+(?:UNIQUE\s+)?(TABLE|INDEX)\s+(\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SqlPart:
    """A plugin's part for SQL databases. Functions stand by the names of the operations, and get a transaction and the
    operation's arguments by name; one that takes `once` is given a name where an answer may get lost.

    `tables` are steps of statements, in SQLite's types. What a release adds or changes is one more step: a database
    that has the earlier ones gets that one alone. `whole` are the `reads` whose statements must see one moment.
    """

    reads: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    writes: Mapping[str, Callable[..., Coroutine[Any, Any, Any]]] = field(default_factory=dict)
    tables: Sequence[Sequence[str]] = ()
    whole: Collection[str] = ()

    @property
    def functions(self) -> Mapping[str, Callable[..., Coroutine[Any, Any, Any]]]:
        """Those that read and those that write."""
        return {**self.reads, **self.writes}

    def names(self) -> list[str]:
        """The tables, those first that were made first."""
        made = (_MADE.match(statement) for step in self.tables for statement in step)
        return list(dict.fromkeys(found[2] for found in made if found and found[1].upper() == "TABLE"))


async def version_of(transaction: Transaction, group: str) -> int:
    """How many steps of a group's tables a database has."""
    row = await transaction.one(SELECT_VERSION, (group,))
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
        found = _MADE.match(statement)
        if found and found[2] != group and not found[2].startswith(f"{group}_"):
            raise StoreError(
                f"the plugin that brings {group!r} would make {found[2]!r} in {where!r}: its tables and indexes are called "
                f"{group} or {group}_..."
            )
        await transaction.define(statement)
    if there < len(tables):
        await transaction.run(KEEP_VERSION, (group, len(tables)))
