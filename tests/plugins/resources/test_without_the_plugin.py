"""What needs the plugin is refused by its name where the plugin is not there; a training without it is told of nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning import Trainer
from lightning.cli import app
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, PluginError
from lightning.plugins import Plugins, stages
from lightning.store.memory import MemoryStore
from lightning.trainer import run_stages
from lightning.trainer.run_stages import RunStage
from lightning.types import Rollout, Run, Task
from lightning_resources.prompts import ResourcesOfRun

RUN = Run("run", "run")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "resources")
    found = Plugins()
    for module in (app, run_stages, stages):
        monkeypatch.setattr(module, "plugins", lambda: found)
    return found


def agent(task: object, llm: object) -> float:
    return 1.0


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("begin", ["train", "dev"])
def test_a_prompt_by_its_resource_is_refused_before_anything_is_started(begin: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = with_settings(Config(), {"engine.lr": 1e-4, "runner.prompts": {"writer": "resource:writer@live"}})
    trainer = Trainer(tmp_path, config=config, out=tmp_path / "run", runner="inline")
    named = (
        r"^runner\.prompts\.writer is 'resource:writer@live', which names a prompt, and no plugin is there that finds it\. "
        r"The plugin 'resources' brings it\. Run: pip install .* is disabled.* Or give the text itself$"
    )
    with pytest.raises(ConfigError, match=named):
        trainer.fit(agent, [Task("a")]) if begin == "train" else trainer.dev(agent, [Task("a")])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
async def test_texts_need_no_plugin(tmp_path: Path) -> None:
    store = MemoryStore()
    line = run_stages.run_line(Config())
    prompts = await line.prompts(store, RUN, {"writer": "Write."})
    assert prompts.of(Rollout("a", "run", Task("a"), "g")) == {"writer": "Write."}
    await line.exported(store, RUN, tmp_path, {})


@pytest.mark.usefixtures("without")
def test_the_command_is_refused_with_what_brings_it() -> None:
    with pytest.raises(PluginError, match=r"there is no command 'resources'.*disabled"):
        app.build("resources")


class Broken(ResourcesOfRun):
    async def exported(self, *given: object) -> None:
        raise OSError("no disk")


class Known:
    """Plugins of which one, `odd`, registers these stages."""

    def __init__(self, **stages: RunStage) -> None:
        self._stages = stages

    def names(self, kind: str) -> list[str]:
        return sorted(self._stages)

    def owner(self, kind: str, name: str) -> Any:
        return SimpleNamespace(name="odd", version="1")

    def get(self, kind: str, name: str) -> Any:
        return lambda config: self._stages[name]


async def test_a_stage_that_fails_ends_the_run_by_its_plugins_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "plugins", lambda: Known(late=Broken()))
    with pytest.raises(
        PluginError, match=r"the stage 'late' of the plugin 'odd' failed \(exported: OSError: no disk\)"
    ):
        await run_stages.run_line(Config()).exported(MemoryStore(), RUN, tmp_path, {})


def test_two_stages_that_find_prompts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "plugins", lambda: Known(late=ResourcesOfRun(), early=ResourcesOfRun()))
    with pytest.raises(PluginError, match=r"'early' of the plugin 'odd' and 'late' .* both find the prompts of runs"):
        run_stages.run_line(Config())


def test_a_stage_for_another_contract_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = type("Other", (RunStage,), {"api": 2})
    monkeypatch.setattr(stages, "plugins", lambda: Known(late=other()))
    with pytest.raises(PluginError, match=r"'late' .* was written for API 2; this trainer has API 1"):
        run_stages.run_line(Config())
