"""The settings that plugins add: read and checked as the core's own, never without effect, never two of one key."""

import importlib
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.config import Config, load_config, recorded_config, settings, with_settings
from lightning.config.plugin_settings import config_model
from lightning.errors import ConfigError, PluginError
from lightning.plugins import plugins
from lightning.trainer.runs import check_run, differences, not_loadable, plan_epochs
from lightning.types import Run, StepRecord

SOURCE = '''
from typing import ClassVar

import lightning
from pydantic import Field
from lightning.config import PluginSettings
from lightning.errors import ConfigError


class Notes(PluginSettings):
    """Notes."""

    place: ClassVar[str] = "PLACE"
    size: int = Field(default=3, ge=1)
    """Number of notes."""
    colour: str = "red"
    """Their colour."""

    def check(self):
        if self.size > 9 and self.colour == "red":
            raise ConfigError("so many red notes hurt the eye: set colour = blue")


@lightning.hookimpl
def register_settings(register):
    register("NAME", lambda: Notes)
'''


@pytest.fixture
def fresh() -> Iterator[None]:
    """The plugins of this process are looked for again after the test, when its environment is gone."""
    yield
    plugins.cache_clear()
    plugins().plugins()


@pytest.fixture
def plugin(fresh: None, install: Any) -> Any:
    """Install a plugin with settings at a place: `plugin(name, place)`; returns their class, where there is one."""

    def add(name: str, place: str, source: str = SOURCE) -> Any:
        module = f"{name}_plugin"
        install(f"{name}-notes", {name: module}, {module: source.replace("PLACE", place).replace("NAME", name)})
        plugins.cache_clear()
        return importlib.import_module(module).Notes

    return add


@pytest.mark.parametrize("place", ["notes", "runner.notes", "runner"])
def test_settings_of_a_plugin_stand_where_it_says(plugin: Any, place: str) -> None:
    notes = plugin("notes", place)
    config = load_config(
        overrides=[f"{place}.size=5"], env={"LIGHTNING_" + place.upper().replace(".", "__") + "__COLOUR": "blue"}
    )
    assert (notes.of(config).size, notes.of(config).colour) == (5, "blue")
    assert notes.of(Config()).size == 3
    if place != "notes":
        assert notes.of(config.runner).size == 5
    (size,) = [setting for setting in settings() if setting.key == f"{place}.size"]
    assert (size.accepts, size.default, size.help) == ("an integer >= 1", "3", "Number of notes.")
    with pytest.raises(ConfigError, match=rf"{place}\.size cannot be 0; it accepts an integer >= 1"):
        load_config(overrides=[f"{place}.size=0"], env={})
    with pytest.raises(ConfigError, match="hurt the eye"):
        load_config(overrides=[f"{place}.size=10"], env={})


NAMED = (
    SOURCE.replace("class Notes(PluginSettings)", "class Note(Section)")
    .replace('    place: ClassVar[str] = "PLACE"\n', "")
    .replace("import PluginSettings", "import NamedSettings, Section")
    .partition("    def check")[0]
    + '''
class Notes(NamedSettings):
    """Notes by name."""

    place: ClassVar[str] = "PLACE"
    of_run: ClassVar = ("colour",)
    __pydantic_extra__: dict[str, Note] = Field(init=False)


@lightning.hookimpl
def register_settings(register):
    register("NAME", lambda: Notes)
'''
)


@pytest.mark.parametrize("place", ["notes", "runner.notes"])
async def test_a_table_of_names_that_the_user_gives(plugin: Any, place: str) -> None:
    notes = plugin("notes", place, NAMED)
    prefix = f"LIGHTNING_{place.upper().replace('.', '__')}"
    config = load_config(overrides=[f"{place}.mine.size=5"], env={f"{prefix}__YOURS__COLOUR": "blue"})
    found = {name: (note.size, note.colour) for name, note in notes.of(config).by_name.items()}
    assert found == {"yours": (3, "blue"), "mine": (5, "red")}
    assert notes.of(recorded_config(config.model_dump(mode="json"))[0]) == notes.of(config)
    assert notes.of(pickle.loads(pickle.dumps(config))) == notes.of(config)
    assert notes.of(Config()).by_name == {}
    listed = [setting.key for setting in settings() if setting.key.startswith(f"{place}.")]
    assert listed == [f"{place}.NAME.size", f"{place}.NAME.colour"]
    for key, said in (
        (f"{place}.mine.sice", f"did you mean '{place}.mine.size'?"),
        (f"{place}.size", f"did you mean '{place}.NAME.size'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"unknown setting {key!r}; {said}")):
            load_config(overrides=[f"{key}=5"], env={})
    with pytest.raises(ConfigError, match=rf"{place}\.mine\.size cannot be 0; it accepts an integer >= 1"):
        load_config(overrides=[f"{place}.mine.size=0"], env={})


async def test_a_resumed_run_keeps_the_settings_under_which_its_calls_were_answered(plugin: Any) -> None:
    plugin("notes", "notes", NAMED)
    before = {"config": load_config(overrides=["notes.mine.size=5"], env={}).model_dump(mode="json"), "head": ""}
    async with plugins().opened_store("memory://") as store:
        run = await store.put_run(Run("run", "a run", before))
        for override, kept in (
            ("notes.mine.size=6", True),
            ("notes.mine.colour=blue", False),
            ("notes.other={}", False),
        ):
            now = load_config(overrides=["notes.mine.size=5", override], env={}).model_dump(mode="json")
            if kept:
                assert await check_run(store, "run", {**before, "config": now}, resume=True) == run
                continue
            with pytest.raises(ConfigError, match=r"answered under other settings of notes\.\w+\.colour: resume it"):
                await check_run(store, "run", {**before, "config": now}, resume=True)


def test_each_plugins_check_is_made_also_of_two_in_one_section(plugin: Any) -> None:
    plugin("notes", "runner")
    derived = "class Base(PluginSettings):\n    pass\n\n\nclass Notes(Base)"
    source = SOURCE.replace("class Notes(PluginSettings)", derived).replace("size", "length").replace("colour", "shade")
    plugin("other", "runner", source)
    for key in ("size", "length"):
        with pytest.raises(ConfigError, match="hurt the eye"):
            load_config(overrides=[f"runner.{key}=10"], env={})


@pytest.mark.parametrize("place", ["runner.notes", "runner"])
def test_settings_survive_a_configuration_of_the_cores_own_class(plugin: Any, place: str) -> None:
    notes = plugin("notes", place)
    loaded = load_config(overrides=[f"{place}.size=5"], env={})
    for config in (Config(runner=loaded.runner), Config().model_copy(update={"runner": loaded.runner})):
        assert notes.of(config).size == 5
        assert notes.of(with_settings(config, {"trainer.steps": 3})).size == 5
        assert notes.of(load_config(base=config, env={})).size == 5


def test_a_run_goes_on_whatever_plugins_came_and_went_since(plugin: Any) -> None:
    before = {"config": load_config(env={}).model_dump(mode="json")}
    plugin("notes", "engine.notes")
    after = {"config": load_config(env={}).model_dump(mode="json")}
    changed = {"config": load_config(overrides=["engine.notes.size=4"], env={}).model_dump(mode="json")}
    assert differences(before, after) == differences(after, before) == {}
    assert differences(before, changed) == {"engine.notes.size": (3, 4)}


async def test_a_training_state_is_not_loaded_with_other_values_of_the_keys_that_a_plugin_names(plugin: Any) -> None:
    place = "place: ClassVar[str]"
    plugin("notes", "engine.notes", SOURCE.replace(place, f'of_training_state: ClassVar = ("size",)\n    {place}'))
    before = {"config": load_config(env={}).model_dump(mode="json")}
    for key, value, lost in (("size", "4", ["engine.notes.size"]), ("colour", "blue", [])):
        changed = load_config(overrides=[f"engine.notes.{key}={value}"], env={}).model_dump(mode="json")
        assert await not_loadable(before, {"config": changed}, []) == lost


async def test_a_resume_says_once_which_recorded_settings_nothing_here_carries_out(warnings_of: Any) -> None:
    settings = load_config(env={}).model_dump(mode="json")
    settings["runner"] |= {"pace": {"seconds": 1}, "notes": 3}
    run = Run("run", "a run", {"config": settings})
    async with plugins().opened_store("memory://") as store:
        await store.put_run(run)
        await plan_epochs(store, run, run.config)
        assert warnings_of() == []
        await store.commit_step(StepRecord("run", 1, 1, (), (), ""))
        await plan_epochs(store, run, run.config)
    (said,) = warnings_of()
    assert said.startswith(
        "the run was recorded with settings that are unknown here, and goes on without them: runner."
    )
    assert "runner.pace" in said
    assert "runner.notes" in said


def test_settings_of_plugins_come_through_a_pickle() -> None:
    config = load_config(overrides=["trainer.steps=3"], env={})
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(config.runner)) == config.runner


def test_a_key_of_two_plugins_or_of_the_core_names_them(plugin: Any) -> None:
    plugin("notes", "runner.notes")
    plugin("other", "runner.notes")
    with pytest.raises(
        PluginError, match=r"'notes' \(notes-notes 1.0\) and the plugin 'other' .* both have the setting runner.notes"
    ):
        config_model()


def test_a_key_of_the_core_is_the_cores(plugin: Any) -> None:
    plugin("notes", "runner", SOURCE.replace("size: int", "concurrency: int").replace("self.size", "self.concurrency"))
    with pytest.raises(
        PluginError, match=r"the core and the plugin 'notes' .* both have the setting runner.concurrency"
    ):
        config_model()


def test_settings_stand_in_for_a_table_of_the_core_if_they_have_its_keys(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "server")
    derived = SOURCE.replace("import PluginSettings", "import LimitsConfig, PluginSettings")
    derived = derived.replace("Notes(PluginSettings)", "Notes(PluginSettings, LimitsConfig)")
    notes = plugin("notes", "gateway.limits", derived)
    config = load_config(overrides=["gateway.limits.size=5", "gateway.limits.json_values=7"], env={})
    assert (notes.of(config).size, config.gateway.limits.json_values) == (5, 7)
    assert notes.of(Config()).size == notes.of(Config().gateway).size == 3
    assert Config().gateway.limits.json_values > 7
    plugin("other", "gateway.limits", derived)
    with pytest.raises(PluginError, match=r"'notes' .* and the plugin 'other' .* both have the setting gateway.limits"):
        config_model()


def test_settings_without_the_keys_of_a_table_do_not_stand_in_for_it(plugin: Any) -> None:
    plugin("notes", "gateway.limits")
    with pytest.raises(PluginError, match=r" and the plugin .* both have the setting gateway.limits"):
        config_model()


@pytest.mark.parametrize(
    ("place", "source", "said"),
    [
        ("engin.notes", SOURCE, r"belong to the section 'engin', and there is none: sections are trainer, engine"),
        ("notes", SOURCE.replace("lambda: Notes", "lambda: 3"), r"are 3: register a function that returns a class"),
        (
            "notes",
            SOURCE.replace("lambda: Notes", "lambda: 1 / 0"),
            r"cannot be made \(ZeroDivisionError.*DISABLE_PLUGINS=notes",
        ),
    ],
)
def test_settings_that_cannot_stand_name_the_plugin(plugin: Any, place: str, source: str, said: str) -> None:
    plugin("notes", place, source)
    with pytest.raises(PluginError, match=rf"the settings 'notes' of the plugin 'notes' .*{said}"):
        config_model()


@pytest.mark.usefixtures("fresh")
def test_a_key_of_an_absent_plugin_is_refused_by_its_name_and_kept_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "verl,sandbox")
    plugins.cache_clear()
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=["engine.verl.world_size=2", "runner.tool_limits={browser=1}"], env={})
    for key, name in (("engine.verl.world_size", "verl"), ("runner.tool_limits.browser", "sandbox")):
        said = next(line for line in str(refused.value).splitlines() if key in line)
        assert f"unknown setting '{key}'. The plugin '{name}' brings it. Run: " in said
        assert "'verl', 'sandbox'" in said or "'sandbox', 'verl'" in said
    with pytest.raises(ConfigError, match=r"'trainer\.stps'; did you mean 'trainer\.steps'\?$"):
        load_config(overrides=["trainer.stps=3"], env={})
    record = {"engine": {"verl": {"world_size": 2}, "lr": 0.5}, "runner": {"tool_limits": {"browser": 1}}}
    config, unknown = recorded_config(record)
    assert (config.engine.lr, unknown) == (0.5, ["engine.verl", "runner.tool_limits"])
    assert record["engine"] == {"verl": {"world_size": 2}, "lr": 0.5}
