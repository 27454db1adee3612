"""An object of a script is a plugin of this process: recorded by its source, replaced when it is registered again."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning
import pytest
from lightning.config import Config
from lightning.errors import PluginError
from lightning.plugins import Plugins
from lightning.trainer.context import named_stages, other_stages
from lightning.trainer.stages import Added, StepStage, StepTaken, step_line
from lightning.types import StepRecord


class Lengths(StepStage):
    api, after = 1, ("advice",)

    async def taken(self, step: StepTaken) -> Added:
        return Added({"longest": 1.0})


class Mine:
    def __init__(self) -> None:
        self.heard: list[int] = []

    @lightning.hookimpl
    def step_finished(self, record: StepRecord) -> None:
        self.heard.append(record.step)

    @lightning.hookimpl
    def register_step_stages(self, register: Callable[[str, Callable[[Config], StepStage]], None]) -> None:
        register("mine", lambda config: Lengths())


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """The plugins of a process of its own."""
    found = Plugins()
    monkeypatch.setattr("lightning.plugins.stages.plugins", lambda: found)
    return found


def test_its_hooks_are_called_and_its_stages_are_recorded_with_their_source(process: Plugins) -> None:
    mine = Mine()
    info = process.register(mine)
    assert info.name == f"{__name__}:Mine"
    assert info.hooks == ("register_step_stages", "step_finished")
    process.hook.step_finished(record=StepRecord("run", 7, 7, (), (), ""))
    assert mine.heard == [7]
    line = step_line(Config()).versions
    assert line["mine"] == info.version != ""
    context = {"stages": named_stages({"steps": line})}
    left = {name: version for name, version in line.items() if name != "mine"}
    assert other_stages(context, {"steps": left}) == {"steps": f"'mine' ({info.version}) is missing"}
    assert other_stages(context, {"steps": {**line, "mine": "edited"}}) == {
        "steps": f"'mine' is edited and was {info.version}"
    }


def test_the_same_cell_again_replaces_it(process: Plugins) -> None:
    first, second = Mine(), Mine()
    for each in (first, second):
        process.register(each)
        assert "mine" in process.names("step_stages")
    process.hook.step_finished(record=StepRecord("run", 1, 1, (), (), ""))
    assert (first.heard, second.heard) == ([], [1])


def test_a_module_may_be_given(process: Plugins) -> None:
    module = types.ModuleType("my_script")
    heard: list[StepRecord] = []
    module.step_finished = lightning.hookimpl(lambda record: heard.append(record))  # type: ignore[attr-defined]
    assert process.register(module).name == "my_script"
    process.hook.step_finished(record=StepRecord("run", 1, 1, (), (), ""))
    assert len(heard) == 1


def test_what_cannot_work_is_refused_with_the_cure(process: Plugins) -> None:
    class Elsewhere:
        @lightning.hookimpl
        def lightning_redact(self, text: str, where: str) -> str:
            return ""

    class Misspelt:
        @lightning.hookimpl
        def step_finishd(self, record: Any) -> None: ...

    class Wrong:
        @lightning.hookimpl
        def step_finished(self, recrod: Any) -> None: ...

    for given, said in (
        (Mine, r"Mine is a class: register an object of it, Mine\(\)"),
        (Elsewhere(), r"the hook lightning_redact of .*Elsewhere is also called in processes .*entry point"),
        (Misspelt(), r"'step_finishd', which is no hook; did you mean 'step_finished'"),
        (Wrong(), r"step_finished takes 'recrod'; the hook is step_finished\(record\)"),
        (object(), r"object has no hook: put @lightning.hookimpl above its methods"),
    ):
        with pytest.raises(PluginError, match=said):
            process.register(given)
