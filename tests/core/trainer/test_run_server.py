"""Where a plugin lets others in: a stranger's, and two that quarrel about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.errors import ConfigError, PluginError
from lightning.plugins import Plugins
from lightning.trainer import agents

from tests.conftest import Install
from tests.core.trainer.test_opening import House, Idle, house  # noqa: F401 — a fixture

STRANGER = """
import lightning
from lightning.config import with_settings
from lightning.errors import ConfigError
from lightning.trainer.agents import Agents
from starlette.responses import PlainTextResponse

told = []


class Those(Agents):
    pass


class Door:
    def __init__(self, config):
        self.config = with_settings(config, {"gateway.host": "127.0.0.2"})

    def open(self, store, gateway):
        gateway.mount(PlainTextResponse("come in"), "doorbell")

    async def agents(self, stack):
        told.append(f"invited to {stack.run.id}")
        those = Those(stack.store, stack.run.id, stack.runner, stack.config.runner, stack.llm, stack.gateway.parts.line)
        those.how_to_join = f"knock at {stack.gateway.url}"
        return those

    async def close(self):
        told.append("closed")


class Server:
    def door(self, runner, config):
        return Door(config)

    async def check_exposure(self, store, host):
        raise ConfigError(f"not at {host}")

    def project(self, config):
        return "the stranger's"

    def of_project(self, store, project):
        return (store, project)


@lightning.hookimpl
def register_servers(register):
    register("NAME", Server)
"""


@pytest.fixture
def strangers(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "server")
    install("stranger", {"stranger": "stranger_server"}, {"stranger_server": STRANGER})
    found = Plugins()
    monkeypatch.setattr(agents, "plugins", lambda: found)


@pytest.mark.usefixtures("strangers")
async def test_a_stranger_lets_clients_in(
    house: House,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Idle, "concurrency", 0)
    stack = await house.open(tmp_path, restores=False)
    assert stack.gateway.url.startswith("http://127.0.0.2:")
    assert stack.agents.how_to_join == f"knock at {stack.gateway.url}"
    from stranger_server import Those, told

    assert isinstance(stack.agents, Those)

    assert told == ["invited to run"]
    await house._resources.aclose()
    assert told == ["invited to run", "closed"]


@pytest.mark.usefixtures("strangers")
async def test_a_stranger_says_who_may_listen_where_and_what_a_project_is(house: House) -> None:  # noqa: F811
    assert agents.of_project(house.store, "other") == (house.store, "other")
    with pytest.raises(ConfigError, match=r"not at 10\.0\.0\.1"):
        await agents.check_exposure(house.store, "10.0.0.1")


def test_two_that_let_clients_in_are_refused_by_name(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "server")
    for name in ("one", "another"):
        install(name, {name: f"{name}_server"}, {f"{name}_server": STRANGER.replace("NAME", name)})
    found = Plugins()
    monkeypatch.setattr(agents, "plugins", lambda: found)
    with pytest.raises(
        PluginError, match=r"server\.port = 1 needs one server, and there are two: 'another' .* and 'one' "
    ):
        agents.run_server("server.port = 1")
