"""`lightning db` as it is typed, on a folder with one run."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import seconds_of
from lightning.errors import ConfigError
from lightning.store.schema import SCHEMA
from lightning.store.sqlite import SqliteStore
from lightning.types import Rollout, Run

Command = Callable[..., Any]


def test_status(lightning: Command, runs: Path) -> None:
    shown = lightning("db", "status", str(runs / "small")).out
    for part in ("schema", "4 (1 failed, 1 pending, 2 succeeded)", "lightning.db"):
        assert part in shown
    found = json.loads(lightning("db", "status", str(runs / "small" / "lightning.db"), "--json").out)
    assert (found["runs"], found["steps"], found["calls"], found["schema"]) == (1, 1, 0, SCHEMA)
    ran = lightning("db", "status", str(runs))
    assert (ran.code, "there is no database at" in ran.err) == (2, True)


def test_each_command_refuses_a_database_of_another_schema(lightning: Command, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    path = folder / "lightning.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE schema_version (version)")
        connection.execute("INSERT INTO schema_version VALUES (11)")
        connection.commit()
    before = path.read_bytes()
    (tmp_path / "prompt.txt").write_text("Write.")
    for command in (
        ("runs", "--runs", str(tmp_path / "runs")),
        ("runs", "show", str(folder)),
        ("audit", str(folder)),
        ("plan", str(folder)),
        ("resources", "ls", str(path)),
        ("resources", "show", f"{path}#writer"),
        ("resources", "promote", f"{path}#writer@1"),
        ("resources", "put", f"{path}#writer", str(tmp_path / "prompt.txt")),
        ("token", "ls", "--store", str(path)),
        ("token", "create", "viewer", "--store", str(path)),
        ("token", "revoke", "t1", "--store", str(path)),
        ("db", "status", str(path)),
        ("db", "backup", str(path), str(tmp_path / "copy.db")),
        ("db", "prune", str(path)),
        ("db", "export", str(path), str(tmp_path / "out")),
    ):
        ran = lightning(*command)
        assert ran.code == 2, command
        assert (
            f"lightning.db has schema 11, but this version of lightning works with schema {SCHEMA} only:" in ran.err
        ), command
    assert path.read_bytes() == before
    path.write_bytes(b"")
    assert "is empty" in lightning("runs", "show", str(folder)).err
    assert lightning("token", "create", "viewer", "--store", str(path)).code == 0


def test_backup_and_restore(lightning: Command, runs: Path, tmp_path: Path) -> None:
    backup, new = str(tmp_path / "b.db"), str(tmp_path / "new.db")
    assert "b.db: " in lightning("db", "backup", str(runs / "small"), backup).out
    assert lightning("db", "backup", str(runs / "small"), backup).code == 2
    assert "1 run, 4 rollouts, 0 calls" in lightning("db", "restore", backup, new).out
    assert json.loads(lightning("runs", "--runs", new, "--json").out)[0]["id"] == "small"
    ran = lightning("db", "restore", str(tmp_path / "none.db"), str(tmp_path / "x.db"))
    assert (ran.code, "there is no database at" in ran.err) == (2, True)
    ran = lightning("db", "backup", "http://127.0.0.1:1", str(tmp_path / "c.db"))
    assert (ran.code, "is a server, not a database" in ran.err) == (2, True)


async def branch_elsewhere(database: Path) -> None:
    store = SqliteStore(database)
    await store.open()
    (parent,) = (await store.list_rollouts("small", limit=1)).items
    await store.put_run(Run("branches", "branches"))
    await store.create_rollouts([Rollout("b", "branches", parent.task, "g", split="branch", parent=(parent.id, 1, 0))])
    await store.close()


def test_prune_says_first_and_does_when_told(lightning: Command, runs: Path) -> None:
    place = str(runs / "small")
    said = json.loads(lightning("db", "prune", place, "--json").out)
    assert (said["applied"], said["runs"][0]["kept"]) == (False, "nothing in it can be spared")
    ran = lightning("db", "prune", place, "--whole")
    assert (ran.code, "say which with --run or --older-than" in ran.err) == (2, True)
    assert "have not ended" in lightning("db", "prune", place, "--whole", "--run", "small").out
    chosen = ("db", "prune", place, "--whole", "--older-than", "0s", "--unfinished")
    shown = lightning(*chosen).out
    assert "would be removed with --apply" in shown
    assert "the whole run" in shown
    assert json.loads(lightning("runs", "--runs", place, "--json").out)
    asyncio.run(branch_elsewhere(runs / "small" / "lightning.db"))
    only = ("db", "prune", place, "--whole", "--run", "small", "--unfinished")
    assert "the whole run; branches in other runs that lose what they sent and got: 1" in " ".join(
        lightning(*only).out.split()
    )
    assert "the whole run" in lightning(*chosen, "--apply").out
    assert json.loads(lightning("runs", "--runs", place, "--json").out) == []
    assert "no run was chosen" in lightning("db", "prune", place).out


def test_prune_under_a_server_leaves_the_size_of_the_file(lightning: Command, runs: Path) -> None:
    place = runs / "small" / "lightning.db"
    with closing(sqlite3.connect(place)) as server:
        server.execute("INSERT INTO state VALUES ('small', 'large', hex(zeroblob(100000)))")
        server.execute("DELETE FROM state WHERE name = 'large'")
        server.commit()
        ran = lightning("db", "prune", str(place), "--apply", "--json")
        assert (ran.code, json.loads(ran.out)["applied"], "lightning.db keeps its size" in ran.err) == (0, True, True)
    assert lightning("db", "prune", str(place), "--apply").err == ""


@pytest.mark.slow
def test_export(lightning: Command, runs: Path, tmp_path: Path) -> None:
    place, out = str(runs / "small"), tmp_path / "out"
    shown = lightning("db", "export", place, str(out)).out
    assert "rollouts: 4 rows" in shown
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [0.0, 1.0, None, None]
    ran = lightning("db", "export", place, str(out), "--table", "rollouts")
    assert (ran.code, "exists already" in ran.err) == (2, True)
    few = lightning(
        "db", "export", place, str(tmp_path / "p"), "--format", "parquet", "--table", "steps", "--run", "small"
    )
    assert (few.code, [file.name for file in (tmp_path / "p").iterdir()]) == (0, ["steps.parquet"])
    for wrong, why in (
        (("--table", "calls"), "is no table of an export: choose of runs, rollouts"),
        (("--run", "x"), "there is no run 'x'"),
    ):
        ran = lightning("db", "export", place, str(tmp_path / "q"), *wrong)
        assert (ran.code, why in ran.err) == (2, True)
    ran = lightning("db", "export", place, "-")
    assert (ran.code, "takes one table as JSON lines" in ran.err) == (2, True)


def test_export_to_standard_output_is_rows_and_nothing_else(lightning: Command, runs: Path) -> None:
    ran = lightning("db", "export", str(runs / "small"), "-", "--table", "steps")
    assert (ran.code, json.loads(ran.out)["metrics"]["loss"]) == (0, 0.125)


@pytest.mark.parametrize(("age", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5m", 90), ("2w", 1_209_600)])
def test_ages(age: str, seconds: float) -> None:
    assert seconds_of(age, "age") == seconds


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1y", "1 d", ""])
def test_what_is_no_age_is_refused(age: str) -> None:
    with pytest.raises(ConfigError, match="is no age"):
        seconds_of(age, "age")


def test_without_the_plugin_all_else_goes_on_and_the_command_says_what_brings_it(runs: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LIGHTNING_DISABLE_PLUGINS": "db", "COLUMNS": "200"}
        command = [sys.executable, "-m", "lightning", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)

    said = run("db", "status", str(runs / "small"))
    assert said.returncode == 2
    assert "The plugin 'db' (lightning " in said.stderr
    assert "is disabled: LIGHTNING_DISABLE_PLUGINS lists it" in said.stderr
    listed = run("runs", "--runs", str(runs))
    said = [line for line in listed.stderr.splitlines() if not line.startswith("Next: ")]
    assert (listed.returncode, "small" in listed.stdout, said) == (0, True, [])
    (tmp_path / "empty.db").touch()
    refused = run("runs", "--runs", str(tmp_path / "empty.db"))
    assert (refused.returncode, "is empty" in refused.stderr) == (2, True)
