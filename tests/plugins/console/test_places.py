"""Where runs are: the files that are there now, whoever made or replaced them, and whether a trainer holds them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.trainer.runs import claim_folder
from lightning.types import Run
from lightning_console.places import Places
from lightning_console.queries import runs
from lightning_console.queries.runs import is_held


async def make(folder: Path, run: str) -> Path:
    """A run's folder with its database."""
    folder.mkdir(parents=True, exist_ok=True)
    store = plugins().store(sqlite_url(folder / "lightning.db"))
    await store.open()
    await store.put_run(Run(run, run, {}, 1.0))
    await store.close()
    return folder


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[Places]:
    """A folder with the runs a and b."""
    for name in ("a", "b"):
        await make(tmp_path / "runs" / name, name)
    places = Places(str(tmp_path / "runs"))
    yield places
    await places.close()


async def seen(places: Places) -> list[str]:
    return sorted([run.id for store in (await places.stores()).values() for run in await store.list_runs()])


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open, also those that are there no more."""
    found = []
    for opened in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(opened.readlink()))
        except OSError:
            continue
    return [file for file in found if file.startswith(str(folder))]


async def test_a_store_that_is_as_it_was_is_opened_once(places: Places) -> None:
    first = await places.stores()
    assert await places.stores() == first


async def test_a_database_that_was_replaced_is_read_anew(places: Places, tmp_path: Path) -> None:
    assert await seen(places) == ["a", "b"]
    before = await places.stores()
    await make(tmp_path / "new", "c")
    for end in ("", "-wal", "-shm"):
        (tmp_path / "runs" / "a" / f"lightning.db{end}").unlink(missing_ok=True)
    (tmp_path / "new" / "lightning.db").rename(tmp_path / "runs" / "a" / "lightning.db")
    assert await seen(places) == ["b", "c"]
    kept = [store for store in (await places.stores()).values() if store in before.values()]
    assert len(kept) == 1, "the other one stays open"


async def test_a_run_that_was_removed_is_let_go(places: Places, tmp_path: Path) -> None:
    assert await seen(places) == ["a", "b"]
    assert open_files(tmp_path / "runs" / "a")
    shutil.rmtree(tmp_path / "runs" / "a")
    assert await seen(places) == ["b"]
    assert open_files(tmp_path / "runs" / "a") == []
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(ConfigError, match="neither a folder nor a database"):
        await places.stores()
    assert open_files(tmp_path / "runs") == []
    await make(tmp_path / "runs" / "d", "d")
    assert await seen(places) == ["d"]


async def test_a_folder_is_held_while_a_trainer_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = sqlite_url(tmp_path / "run" / "lightning.db")
    assert not is_held(url)
    with claim_folder(tmp_path / "run"):
        assert is_held(url)
    assert not is_held(url)
    inode = (tmp_path / "run" / ".lock").stat().st_ino
    elsewhere = tmp_path / "locks"
    elsewhere.write_text(f"1: FLOCK  ADVISORY  WRITE 77 ff:ff:{inode} 0 EOF\n")
    monkeypatch.setattr(runs, "LOCKS", elsewhere)
    assert not is_held(url), "a file of the same number, on another device"
