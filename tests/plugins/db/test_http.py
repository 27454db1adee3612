"""Status and exports of a store that is reached through a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lightning.store.memory import MemoryStore
from lightning.types import Scope
from lightning_db.export import TABLES, ExportScope, chosen_runs, read_table
from lightning_db.keeper import look
from lightning_server.http_store import HttpStore

from tests.servers.control import ControlServer


@asynccontextmanager
async def served(control: ControlServer, behind: MemoryStore, scope: Scope) -> AsyncIterator[HttpStore]:
    url, token = control.add(behind, scope=scope)
    store = HttpStore(url, token=token)
    try:
        await store.open()
        yield store
    finally:
        await store.close()
        control.remove(url)


def listed(row: Mapping[str, object]) -> dict[str, str]:
    """A row's cells as texts, token arrays as lists."""
    return {name: repr(cell.tolist() if isinstance(cell, memoryview) else cell) for name, cell in row.items()}


async def test_status_and_export_through_a_server(control: ControlServer, filled: Callable[..., Any]) -> None:
    behind = MemoryStore()
    async with served(control, behind, Scope.ADMIN) as store:
        await filled(store)
        found = await look(store, "http://server")
        assert (found.runs, found.rollouts, found.steps) == (1, {"succeeded": 9, "failed": 1}, 2)
        assert (found.schema, found.bytes, found.calls) == (None, None, None)
        for name in TABLES:
            seen, kept = [
                [listed(row) async for row in read_table(of, name, await chosen_runs(of, ()), ExportScope())]
                for of in (store, behind)
            ]
            assert seen == kept


async def test_who_may_not_see_tokens_sees_the_rest(control: ControlServer) -> None:
    async with served(control, MemoryStore(), Scope.VIEWER) as store:
        found = await look(store, "http://server")
        assert (found.runs, found.tokens) == (0, None)
