"""Pages of a test's own, in the place of those of the plugin."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from lightning_console import router
from lightning_console.blocks import Action, Actions, Cell, Column, Link, Notice, Notices, Page, Table
from lightning_console.places import Places
from lightning_console.router import Address

MARKUP = '<img src=x onerror="window.pwned=1"></script>\u2028\''


async def runs(places: Places, address: Address) -> Page:
    rows = [
        [Cell(run.id, f"run/{run.id}")]
        for store in (await places.stores()).values()
        for run in await store.list_runs(places.project)
    ]
    return Page(str(address), "Runs", [Table([Column("run")], rows, keys=[row[0].text for row in rows])])


async def run(places: Places, address: Address) -> Page:
    located = await places.find(address.about[0])
    rows = [
        [Cell(rollout.id, str(Address("rollout", (located.key, rollout.id))))]
        for rollout in (await located.store.list_rollouts(located.run.id)).items
    ]
    blocks = [
        Notices([Notice(MARKUP)]),
        Table([Column("rollout")], rows),
        Actions([Action("note", "Note", {"run": located.key})]),
    ]
    return Page(str(address), located.run.name, blocks, (Link("Runs", "runs"),), live=True)


async def rollout(places: Places, address: Address) -> Page:
    located = await places.find(address.about[0])
    title = (await located.store.get_rollout(address.about[1])).id  # type: ignore[union-attr]
    sorted_so = Table([Column("call", sort=str(address.having(sort="call")))], [])
    return Page(str(address), title, [sorted_so], (Link("Runs", "runs"), Link("run", f"run/{located.key}")))


async def broken(places: Places, address: Address) -> Page:
    raise ZeroDivisionError("a fault of this page")


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the router find these pages and no others."""
    pages = {"runs": runs, "run": run, "rollout": rollout, "step": broken}
    monkeypatch.setattr(router, "PAGES", tuple(pages))
    for name, function in pages.items():
        module = ModuleType(f"lightning_console.pages.{name}")
        module.page = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
