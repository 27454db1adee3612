"""What `lightning console` takes for a place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from lightning.cli.app import build
from lightning.errors import ConfigError, DataError
from lightning.store.sqlite import SqliteStore
from lightning.types import Run
from lightning_console.command import _serve, find
from typer.testing import CliRunner


@pytest.fixture
async def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        store = SqliteStore(tmp_path / "runs" / name / "lightning.db")
        await store.open()
        await store.put_run(Run(name, name))
        await store.close()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("place", "where", "start"),
    [
        ("runs", "runs", "runs"),
        ("runs/a", "runs/a", "run/a"),
        ("a", "runs/a", "run/a"),
        ("runs/a/lightning.db", "runs/a/lightning.db", "runs"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000?patience=5", "runs"),
        ("http://a,b?patience=60", "http://a,b?patience=60", "runs"),
        ("redis://127.0.0.1/0", "redis://127.0.0.1/0", "runs"),
    ],
)
async def test_a_place(runs: Path, place: str, where: str, start: str) -> None:
    found = find(place)
    assert (found.where, found.start) == (where, start)
    assert find(place, "step/a/1").start == "step/a/1"


async def test_a_folder_without_runs_is_shown_before_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find("runs").start == "runs"


async def test_a_place_that_is_none(runs: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder nor a database"):
        find("nowhere")
    with pytest.raises(DataError, match="begins with the name of a page"):
        find("runs", "/")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "neither a folder nor a database"),
        (["--mcp", "--export", "out"], "one of the three"),
        (["http://127.0.0.1:1?patience=0", "--no-browser"], "LIGHTNING_TOKEN"),
        (["runs/a", "--page", "run/b", "--export", "out"], "no run 'b'"),
    ],
)
async def test_what_is_wrong_is_said_before_a_page_opens(
    runs: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.delenv("LIGHTNING_TOKEN", raising=False)
    import asyncio

    result = await asyncio.to_thread(CliRunner().invoke, build("console"), ["console", *arguments])
    assert result.exit_code != 0
    assert said in str(result.exception)


def test_a_browser_is_given_a_file_that_nobody_else_reads_and_a_token_for_one_use(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each user of a machine reads the command lines of all processes, and a browser's has what it opens."""
    opened: list[tuple[str, int, int, str]] = []

    def start(address: str) -> bool:
        file = Path(unquote(urlsplit(address).path))
        opened.append((address, file.stat().st_mode, file.parent.stat().st_mode, file.read_text()))
        return True

    monkeypatch.setattr("webbrowser.open", start)
    asyncio.run(_serve(find(str(runs)), 0, browser=True, seconds=0.0))
    ((address, mode, folder, page),) = opened
    assert address.startswith("file:///")
    assert (oct(mode & 0o777), oct(folder & 0o777)) == ("0o600", "0o700")
    token = page.partition("token=")[2].partition('"')[0]
    assert len(token) > 30
    assert token not in address
    assert token not in capsys.readouterr().out
    assert not Path(unquote(urlsplit(address).path)).exists(), "it is gone with the console"
