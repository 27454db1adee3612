"""A recorded run is asked by the rules again, and compared with past runs of its tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.app import main
from lightning.types import Json, Run
from lightning_debug.advise import Outcome, Past, compare, settings_of

from tests.core.trainer.test_fork import train as train


def past(reward: float, rollouts: int = 200, **settings: Json) -> Past:
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    return Past({"engine.lr": 1e-3, "trainer.order": "shuffled"} | changed, Outcome(reward, rollouts))


def test_a_setting_is_named_by_the_runs_that_differ_in_it_alone() -> None:
    others = [
        past(0.8, engine__lr=2e-3),
        past(0.82, engine__lr=2e-3),
        past(0.99, engine__lr=5e-3, trainer__order="given"),
    ]
    first, *_ = compare(past(0.5), others)
    assert (first.setting, first.mine, first.better, first.my_runs, first.better_runs, first.alone) == (
        "engine.lr", 1e-3, 2e-3, 1, 2, True,
    )  # fmt: skip
    assert first.better_reward == pytest.approx(0.81)
    named = {each.setting: each for each in compare(past(0.5), others[2:])}
    assert {name: each.alone for name, each in named.items()} == {"engine.lr": False, "trainer.order": False}


def test_differences_within_the_error_and_worse_runs_are_not_named() -> None:
    assert list(compare(past(0.5), [past(0.55, engine__lr=2e-3)])) == []
    assert list(compare(past(0.5), [past(0.2, engine__lr=2e-3)])) == []
    assert list(compare(past(0.5), [past(0.9)])) == [], "the same settings, a luckier seed"
    assert list(compare(past(0.5, 4), [past(0.9, 4, engine__lr=2e-3)])) == [], "of four rollouts nothing is known"


def test_settings_that_change_nothing_that_is_learned_are_no_settings() -> None:
    config: Json = {"trainer": {"seed": 3, "steps": 7}, "server": {"port": 1}, "engine": {"lr": 1.0, "threads": 2}}
    algorithm: Json = {"name": "x", "arguments": {"group_size": 8}}
    assert settings_of(Run("r", "r", {"config": config, "algorithm": algorithm, "model": "m"})) == {
        "trainer.steps": 7,
        "engine.lr": 1.0,
        "algorithm.name": "x",
        "algorithm.arguments.group_size": 8,
        "train_agents": None,
    }


def advised(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, what was printed, and what was said on standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["advise", *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_compares_with_the_other_runs_of_the_folder(
    train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("mine", 2)
    train("other", 1, engine__lr=3e-3)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "lightning.db").write_bytes(b"nothing")
    code, said, beside = advised(capsys, str(folder), "--runs", str(tmp_path), "--json")
    found = json.loads(said)
    assert (code, found["run"], found["steps"], found["compared_runs"]) == (0, "mine", 2, 2)
    assert (found["alarms"], found["tuning"], found["unread"]) == ([], [], "")
    assert "broken" in beside
    _, said, _ = advised(capsys, str(folder), "--runs", str(tmp_path))
    assert "mine: 2 steps\nno alarm\nnone of 1 other runs" in said


def test_what_cannot_be_advised_on_is_said(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, said = advised(capsys, str(train("empty", 0)), "--runs", str(tmp_path))
    assert (code, "the run empty has no committed step" in said) == (2, True)
