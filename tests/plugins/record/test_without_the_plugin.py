"""What is asked for by name and needs the plugin is refused or said where the plugin is not there; all else goes on."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from lightning import Trainer
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import load, load_config, plugin_settings, with_settings
from lightning.config.plugin_settings import Config, GatewayConfig
from lightning.errors import ConfigError, PluginError
from lightning.plugins import Plugins
from lightning.plugins import stages as named
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.samplers import Asked
from lightning_branching.tree_sampling import check_tree
from lightning_record.config import ProviderConfig
from lightning_server import serving

ASK = {"messages": [{"role": "user", "content": "hi there"}]}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "record")
    found = Plugins()
    for module in (named, serving, load, plugin_settings):
        monkeypatch.setattr(module, "plugins", lambda: found)


@pytest.mark.usefixtures("without")
def test_a_provider_is_refused_with_the_plugin_that_is_switched_off() -> None:
    said = r"unknown setting 'gateway\.providers\.judge\.base_url'\. The plugin 'record' brings it\. .* is disabled"
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=["gateway.providers.judge.base_url=https://host/v1"], env={})


@pytest.mark.usefixtures("without")
def test_keeping_texts_is_refused_with_the_plugin_that_is_switched_off() -> None:
    said = r"unknown setting 'gateway\.record_requests'\. The plugin 'record' brings it\. .* is disabled"
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=["gateway.record_requests=true"], env={})


@pytest.mark.usefixtures("without")
async def test_a_gateway_that_cannot_keep_texts_answers(build) -> None:
    house = await build()
    reply = await (await house.http()).post("/chat/completions", json=ASK)
    assert reply.status_code == 200
    (call,) = await house.recorded()
    assert "texts" not in call.extras


@pytest.mark.usefixtures("without")
async def test_nobody_is_served_where_conversations_are_not_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=r"no plugin is there that tells them apart: .* plugin 'record' .* is disabled"
    ):
        async with serving.serve(tmp_path, Config(), tmp_path / "served"):
            pass
    assert not (tmp_path / "served").exists()


@pytest.mark.usefixtures("without")
def test_trees_need_texts() -> None:
    config = with_settings(Config(), {"trainer.sampling": "tree"})
    with pytest.raises(
        ConfigError, match=r"trainer\.sampling = tree: .* no plugin .* plugin 'record' brings it\. .* disabled"
    ):
        check_tree(Asked(config, AlgorithmSchedule.of(LightningRL("grpo", group_size=8))))


def test_a_provider_without_its_key_is_refused_before_a_run_starts(tmp_path: Path) -> None:
    lost = {"judge": ProviderConfig(base_url="https://host/v1", api_key_env="NOT_THERE")}
    config = Config(gateway=GatewayConfig(providers=lost))
    with pytest.raises(ConfigError, match=r"gateway\.providers\.judge\.api_key_env names NOT_THERE, which is not set"):
        Trainer(tmp_path, config=config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
async def test_a_key_of_many_conversations_is_refused_where_nobody_tells_them_apart(build) -> None:
    house = await build()
    key = house.gateway.issue("served", 1, session="run")
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{house.gateway.url}/v1", headers=headers) as http:
        reply = await http.post("/chat/completions", json=ASK)
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "no_stage")
    assert "no stage of this gateway answers the calls of many conversations: its stages are branches" in reply.text
    assert [asked for asked in house.fake.requests if "completions" in asked.path] == []
