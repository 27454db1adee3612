"""The pictures of docs/architecture.md show the house as it is; `make golden` draws them anew."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from lightning.store.sqlite import SqliteStore
from lightning.types import Fault, Outcome, Rollout, Run, Status, Task

from tests.house import pictures

DOCS = pictures.ROOT / "docs"


def check(name: str, drawn: str) -> None:
    """The picture is the one that is in the docs, and the page shows it."""
    file = DOCS / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(drawn)
    assert drawn == file.read_text(), f"docs/{name} is out of date: run `make golden` and commit it"
    assert f"({name})" in (DOCS / "architecture.md").read_text()


def test_rooms() -> None:
    drawn = pictures.rooms()
    rooms = {path.name for path in (pictures.ROOT / "core" / "lightning").iterdir() if (path / "__init__.py").exists()}
    assert [room for room in sorted(rooms) if f">{room}</text>" not in drawn] == []
    check("architecture-rooms.svg", drawn)


async def test_tables(tmp_path: Path) -> None:
    store = SqliteStore.from_url(f"sqlite:///{tmp_path}/store.db")
    await store.open()
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        columns = pictures.columns(database)
        drawn = pictures.tables(database)
    shown = {name for names in pictures.COLUMNS_OF_TABLES for name in names}
    assert shown == columns.keys() - {"schema_version"}
    for column, target in pictures.REFERENCES.items():
        for table, name in (column.split("."), target.split(".")):
            assert name in {each for each, _ in columns[table]}, f"{table} has no column {name}"
    check("architecture-tables.svg", drawn)


async def test_states(tmp_path: Path) -> None:
    """Each arrow of the picture is walked in a real store, and no other pair of states is."""
    walked: set[tuple[Status, Status]] = set()
    store = SqliteStore.from_url(f"sqlite:///{tmp_path}/store.db")
    await store.open()

    async def status(rollout: str) -> Status:
        found = await store.get_rollout(rollout)
        assert found is not None
        return found.status

    try:
        await store.put_run(Run("run", "run", {}))
        outcomes = {
            "rewarded": Outcome(reward=1.0),
            "faulty": Outcome(fault=Fault.AGENT, error="a bug"),
            "slow": Outcome(fault=Fault.TIMEOUT, error="too slow"),
            "unwanted": Outcome(fault=Fault.CANCELLED, error="the group was complete"),
            "lost": Outcome(fault=Fault.INFRASTRUCTURE, error="the machine died"),
        }
        created = [Rollout(name, "run", Task(name, {}), name, max_attempts=3) for name in outcomes]
        await store.create_rollouts(created)
        for lease in await store.lease("run", "worker", limit=len(created)):
            walked.add((Status.PENDING, Status.RUNNING))
            await store.complete(lease.rollout.id, lease.attempt, outcomes[lease.rollout.id])
            walked.add((Status.RUNNING, await status(lease.rollout.id)))
        (lease,) = await store.lease("run", "worker", limit=9)
        assert lease.rollout.id == "lost"
        await store.release("worker")
        walked.add((Status.RUNNING, await status("lost")))
    finally:
        await store.close()
    assert walked == {(Status(before), Status(then)) for before, then, _ in pictures.CHANGES}
    check("architecture-states.svg", pictures.states())
