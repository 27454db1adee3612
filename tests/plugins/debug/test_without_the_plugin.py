"""What needs the plugin is refused by its name where it is not there; a training without it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning import Trainer
from lightning.cli import app
from lightning.config import Config, load, plugin_settings, with_settings
from lightning.errors import ConfigError
from lightning.plugins import Plugins
from lightning.plugins import stages as named
from lightning.trainer import stages

from tests.core.trainer.conftest import open_bench

ABSENT = r"the stages of steps here are record\. The plugin 'debug' brings it\. Run: pip install .*disabled"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "debug")
    found = Plugins()
    for module in (app, stages, named, load, plugin_settings):
        monkeypatch.setattr(module, "plugins", lambda: found)


def make_trainer(folder: Path, **settings: object) -> Trainer:
    (folder / "config.json").write_text("{}")
    config = with_settings(Config(), {"engine.lr": 1e-4, **settings})
    return Trainer(folder, config=config, out=folder / "run", runner="inline")


@pytest.mark.usefixtures("without")
def test_alerts_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    why = r"unknown setting 'trainer.alerts'\. The plugin 'debug' brings it\. .* is disabled: "
    with pytest.raises(ConfigError, match=why):
        make_trainer(tmp_path, **{"trainer.alerts": ("command:true",)})
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
def test_a_dry_run_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^a dry run needs a plugin that makes it, and there is none: {ABSENT}"):
        make_trainer(tmp_path).dev(lambda task, llm: 1.0, [{"q": 1}])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
def test_a_command_of_the_plugin_says_that_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning", "advise"])
    with pytest.raises(SystemExit):
        app.main()
    said = " ".join(capsys.readouterr().err.split())
    assert "no command 'advise'" in said
    assert "'debug'" in said


@pytest.mark.usefixtures("without")
async def test_a_training_without_it_says_why_it_learns_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_bench(tmp_path, stages=stages.step_line) as made:
        made.loop.train_agents = ("somebody else",)
        await made.loop.run({})
        assert len(await made.store.steps("run")) == 3
    assert "train_agents ['somebody else'] matches none of the agents seen: agent" in caplog.text
