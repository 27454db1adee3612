"""`lightning runs` reads what is there and says where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_list(lightning, runs: Path) -> None:
    (row,) = json.loads(lightning("runs", "--runs", str(runs), "--json").out)
    assert (row["id"], row["steps"], row["rollouts_ok"], row["rollouts_failed"]) == ("small", 1, 2, 1)
    assert row["rewards"] == [0.5, 0.5]
    table = lightning("runs", "--runs", str(runs)).out
    assert "small" in table
    assert "0.500 → 0.500" in table


def test_a_place_can_be_a_folder_of_runs_a_run_a_file_or_a_url(lightning, runs: Path) -> None:
    file = runs / "small" / "lightning.db"
    for place in (runs, runs / "small", file, f"sqlite:///{file}"):
        rows = json.loads(lightning("runs", "--runs", str(place), "--json").out)
        assert [row["id"] for row in rows] == ["small"], place


def test_the_default_place_is_runs_and_may_be_missing(lightning, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    assert "no runs in runs yet; `lightning demo` makes one" in lightning("runs").out
    assert lightning("runs", "--json").out == "[]\n"
    monkeypatch.chdir(runs.parent)
    assert [row["id"] for row in json.loads(lightning("runs", "--json").out)] == ["small"]


def test_show(lightning, runs: Path) -> None:
    shown = json.loads(lightning("runs", "show", "small", "--runs", str(runs), "--json").out)
    assert shown["run"]["config"]["model"] == "models/tiny"
    assert [step["digest"] for step in shown["steps"]] == ["c"]
    assert [(item["status"], item["reward"]) for item in shown["rollouts"]] == [
        ("succeeded", 0.0),
        ("succeeded", 1.0),
        ("failed", None),
        ("pending", None),
    ]
    table = lightning("runs", "--runs", str(runs), "show", "small").out
    assert "models/tiny" in table
    assert "ValueError: [no] number" in table
    assert "line 2" not in table


def test_show_can_be_narrowed(lightning, runs: Path) -> None:
    place = ("--runs", str(runs), "--json")
    assert len(json.loads(lightning("runs", "show", "small", "--failed", *place).out)["rollouts"]) == 1
    assert len(json.loads(lightning("runs", "show", "small", "--limit", "2", *place).out)["rollouts"]) == 2
    assert json.loads(lightning("runs", "show", "small", "--step", "9", *place).out)["rollouts"] == []


def test_what_is_not_there_is_said(lightning, runs: Path) -> None:
    ran = lightning("runs", "show", "smal", "--runs", str(runs))
    assert ran.code == 2
    assert ran.err.startswith("error: there is no run 'smal'")
    ran = lightning("runs", "--runs", str(runs / "nowhere"))
    assert ran.code == 2
    assert "is neither a folder nor a database" in ran.err


def test_a_corrupt_database_does_not_hide_the_others(lightning, runs: Path) -> None:
    (runs / "bad").mkdir()
    (runs / "bad" / "lightning.db").write_bytes(b"not a database" * 100)
    ran = lightning("runs", "--runs", str(runs), "--json")
    assert [row["id"] for row in json.loads(ran.out)] == ["small"]
    assert "bad/lightning.db" in ran.err
