"""What needs the plugin is refused by its name where the plugin is not there; which engine can send, it says before a start."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning import Trainer
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, PluginError
from lightning.plugins import Plugins
from lightning.policy_server import vllm_server
from lightning.policy_server.vllm_server import make_policy_server


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "attach")
    found = Plugins()
    monkeypatch.setattr(vllm_server, "plugins", lambda: found)
    return found


def make_trainer(folder: Path, **settings: object) -> Trainer:
    (folder / "config.json").write_text("{}")
    config = with_settings(Config(), {"engine.lr": 1e-4, **settings})
    return Trainer(folder, config=config, out=folder / "run", runner="inline")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("way", ["auto", "file", "shared_memory"])
def test_a_vllm_of_ours_needs_no_plugin(way: str, tmp_path: Path) -> None:
    make_trainer(tmp_path, **{"policy_server.weight_transfer": way})


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("attach", "http://127.0.0.1:1", "there is no policy server 'http'"),
        ("weight_transfer", "gloo", "there is no weight transfer 'gloo'"),
        ("weight_transfer", "nccl", "there is no weight transfer 'nccl'"),
    ],
)
def test_a_setting_is_refused_before_anything_is_started(setting: str, value: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=rf"^policy_server\.{setting} = '{value}': {named}.* The plugin 'attach' brings it\. Run: pip"
    ) as refused:
        make_trainer(tmp_path, **{f"policy_server.{setting}": value})
    assert "which might have it, is disabled" in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without")
def test_a_server_that_is_only_made_is_refused_too(tmp_path: Path) -> None:
    config = with_settings(Config(), {"policy_server.attach": "http://127.0.0.1:1"})
    with pytest.raises(PluginError, match=r"^policy_server\.attach = .* The plugin 'attach' brings it"):
        make_policy_server(tmp_path, config, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("attach", "127.0.0.1:8000", r"is not a policy server's URL: it begins with http://, https://"),
        ("attach", "grpc://127.0.0.1:1", r"there is no policy server 'grpc'"),
        ("weight_transfer", "glooo", r"did you mean 'gloo'\? Known: auto, file, gloo, nccl, shared_memory"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(setting: str, value: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=named):
        make_trainer(tmp_path, **{f"policy_server.{setting}": value})


def test_an_engine_elsewhere_that_cannot_send_is_refused(tmp_path: Path) -> None:
    config = with_settings(Config(), {"policy_server.weight_transfer": "gloo"})
    with pytest.raises(
        ConfigError, match=r"weight_transfer = 'gloo' needs an engine .* a object cannot: set it to 'file'"
    ):
        make_policy_server(tmp_path, config, log=tmp_path / "log", sender=object())
