"""What needs the plugin is refused by its name where the plugin is not there; a training on one machine asks for none of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lightning import Trainer
from lightning.cli import app
from lightning.config import Config, with_settings
from lightning.errors import PluginError
from lightning.plugins import Plugins
from lightning.store.memory import MemoryStore
from lightning.trainer import run_server, trainer

from tests.core.trainer.test_opening import House, house  # noqa: F401 — a fixture

ABSENT = r"needs a plugin that lets clients in, and there is none\. The plugin 'server' brings it\. Run: pip install .*disabled"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "server")
    found = Plugins()
    for module in (app, run_server, trainer):
        monkeypatch.setattr(module, "plugins", lambda: found)
    return found


def make_trainer(folder: Path, runner: str = "inline", **settings: object) -> Trainer:
    (folder / "config.json").write_text("{}")
    config = with_settings(Config(), {"engine.lr": 1e-4, **settings})
    return Trainer(folder, config=config, out=folder / "run", runner=runner)


@pytest.mark.usefixtures("without")
def test_one_machine_needs_no_server(tmp_path: Path) -> None:
    assert make_trainer(tmp_path).config.trainer.project == "default"


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("server.port", 8000, r"server\.port = 8000"),
        ("gateway.host", "0.0.0.0", r"gateway\.host = '0\.0\.0\.0', beyond this machine,"),
        ("trainer.project", "team-a", r"trainer\.project = 'team-a'"),
    ],
)
def test_a_setting_is_refused_before_anything_is_started(
    setting: str, value: object, named: str, tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=f"^{named} {ABSENT}"):
        make_trainer(tmp_path, **{setting: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
def test_the_runner_of_clients_is_refused_with_what_brings_it(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"no runner 'remote'.*plugin 'server' brings it.*pip install.*is disabled"):
        make_trainer(tmp_path, "remote")


@pytest.mark.usefixtures("without")
async def test_a_runner_of_another_plugin_whose_agents_run_in_clients_is_refused(
    house: House,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.core.trainer.test_opening.Idle.concurrency", 0)
    with pytest.raises(PluginError, match=f"^a runner whose agents run in clients {ABSENT}"):
        await house.open(tmp_path, restores=False)
    assert house.policy.notice is None, "nothing was started"


@pytest.mark.usefixtures("without")
async def test_the_names_of_another_project_are_never_those_of_the_default_one() -> None:
    store = MemoryStore()
    assert run_server.of_project(store, "default") is store
    with pytest.raises(PluginError, match=f"^the project 'team-a' {ABSENT}"):
        run_server.of_project(store, "team-a")
    await run_server.check_exposure(store, "localhost")
    with pytest.raises(PluginError, match=f"^to listen on '10.0.0.1', beyond this machine, {ABSENT}"):
        await run_server.check_exposure(store, "10.0.0.1")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_store_over_http_is_refused_with_what_brings_it(without: Plugins, scheme: str) -> None:
    with pytest.raises(PluginError, match=rf"no store '{scheme}'.*plugin 'server' brings it.*pip install.*is disabled"):
        without.store(f"{scheme}://there:8000")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("command", ["runner", "serve", "token", "pull"])
def test_a_command_of_the_plugin_says_that_it_is_switched_off(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning", command])
    with pytest.raises(SystemExit):
        app.main()
    assert f"no command '{command}'" in (said := " ".join(capsys.readouterr().err.split()))
    assert "'server'" in said
    assert "is disabled: LIGHTNING_DISABLE_PLUGINS lists it" in said
