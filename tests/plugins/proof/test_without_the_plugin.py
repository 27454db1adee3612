"""The audit, forks and steps that have to be taken again are refused by their plugin's name where the plugin is not there."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.cli import app
from lightning.errors import ConfigError
from lightning.plugins import Plugins, stages

from tests.core.trainer.test_tiny_run import train as train


def test_the_command_says_that_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "proof")
    found = Plugins()
    monkeypatch.setattr(app, "plugins", lambda: found)
    monkeypatch.setattr(sys, "argv", ["lightning", "audit", "run"])
    with pytest.raises(SystemExit):
        app.main()
    assert "no command 'audit'" in (said := " ".join(capsys.readouterr().err.split()))
    assert "'proof'" in said
    assert "is disabled: LIGHTNING_DISABLE_PLUGINS lists it" in said


def test_a_fork_is_refused_and_so_is_its_resume(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("parent", 1)
    train("fork", 1, from_run="parent@1")
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "proof")
    found = Plugins()
    monkeypatch.setattr(stages, "plugins", lambda: found)
    brings = r"no plugin is there that carries it out: .* plugin 'proof' brings it\. .* is disabled: .*"
    brings += "Bring the plugin back,"
    with pytest.raises(
        ConfigError, match=rf"is to begin with the weights of parent@1 \(--from\), and {brings} or leave it out"
    ):
        train("other", 1, from_run="parent@1")
    assert not (tmp_path / "other" / "run.json").exists()
    with pytest.raises(
        ConfigError, match=rf"run 'fork' began with the weights of parent@1, and {brings} or give another `out`"
    ):
        train("fork", 2, resume=True)
    train("parent", 2, resume=True)


def test_fewer_checkpoints_than_steps_are_refused_and_so_is_a_resume_that_takes_steps_again(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train("run", 2, trainer__checkpoint_every=9)
    shutil.rmtree(folder / "checkpoints" / "step-00000002")  # as if it had been killed behind the commit
    with monkeypatch.context() as without:
        without.setenv("LIGHTNING_DISABLE_PLUGINS", "proof")
        found = Plugins()
        without.setattr(stages, "plugins", lambda: found)
        brings = r"no plugin is there that carries it out: .* plugin 'proof' brings it\. .* is disabled: .*"
        brings += "Bring the plugin back,"
        with pytest.raises(
            ConfigError,
            match=rf"trainer\.checkpoint_every = 9 leaves steps .*, and {brings} or set trainer\.checkpoint_every = 1",
        ):
            train("other", 2, trainer__checkpoint_every=9)
        assert not (tmp_path / "other").exists()
        with pytest.raises(
            ConfigError, match=rf"step 1 of 'run' has no checkpoint, .* and {brings} or give another `out`"
        ):
            train("run", 3, resume=True)
        alone = train("alone", 2, trainer__checkpoint_every=None)
        assert [place.name for place in sorted((alone / "checkpoints").iterdir())] == ["step-00000001", "step-00000002"]
    train("run", 3, resume=True)
    assert (folder / "checkpoints" / "step-00000003").is_dir()
