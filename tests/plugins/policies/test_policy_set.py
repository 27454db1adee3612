"""The policies of a run as the trainer sees them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from lightning.config import Config, LoraConfig, load_config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.policy_server.model_folder import folder_tensors
from lightning.policy_server.weights import FromDisk
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.model import default_rate, with_one_policy
from lightning.trainer.needs import adapter_weights, disk_need
from lightning.trainer.trainer import Trainer
from lightning_policies.engine import PolicyEngine, TrainedPolicy
from lightning_policies.policy_set import Policies
from lightning_policies.transfer import PolicyAdapters

AGENTS = (
    'policies.writer.agents=["writer"]',
    'policies.editor.agents=["editor"]',
    'policies.judge.agents=["judge"]',
    "policies.judge.train=false",
)
LORA = "engine.lora.rank=8"


def made(*overrides: str) -> Config:
    return load_config(overrides=overrides, env={})


def policies(*overrides: str) -> Policies:
    found = plugins().policy_set(made(*AGENTS, *overrides))
    assert isinstance(found, Policies)
    return found


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        plugins().policy_set(made(*overrides))
    return str(error.value)


def test_a_run_without_policies_has_no_set() -> None:
    assert plugins().policy_set(Config()) is None
    assert plugins().policy_set(made(LORA)) is None


def test_a_policys_own_adapters_win_over_those_of_all() -> None:
    found = policies(LORA, "policies.editor.lora.rank=4")
    assert found.adapters == {"writer": LoraConfig(rank=8), "editor": LoraConfig(rank=4)}
    assert found.untrained == ("judge", "base")


def test_a_trained_policy_without_adapters_is_refused_with_the_cure() -> None:
    said = refused(*AGENTS, "policies.writer.lora.rank=4")
    assert said.startswith(
        "policies.editor has no adapters to train: all policies share the weights of the run's model"
    )
    assert "--set engine.lora.rank=8, or this one with --set policies.editor.lora.rank=8" in said


def test_a_server_of_one_model_has_no_policies() -> None:
    config = made(*AGENTS, LORA, 'trainer.policy_turns="writer:1,editor:1"', "trainer.steps=3")
    assert with_one_policy(config) == made(LORA, "trainer.steps=3")


def test_policies_take_turns_again_and_again() -> None:
    assert policies(LORA).resting(1) == ()
    found = policies(LORA, 'trainer.policy_turns="writer:2, editor:1"')
    assert [found.resting(step) for step in range(1, 6)] == [
        ("editor",),
        ("editor",),
        ("writer",),
        ("editor",),
        ("editor",),
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.policy_turns=writer:1"], "has a turn of 'writer', and [policies.NAME] names no policy"),
        ([*AGENTS, LORA, 'trainer.policy_turns="writer:1,judge:1"'], "'judge', and the trained policies are writer, editor"),
        ([*AGENTS, LORA, "trainer.policy_turns=writer:1"], "has no turn of 'editor', which would never be trained"),
    ],
)  # fmt: skip
def test_turns_are_those_of_all_trained_policies(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize("turns", ["writer", "writer:0", "writer:-1", ":3", "writer:2;editor:2"])
def test_turns_of_another_form_are_refused_when_they_are_read(turns: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.policy_turns = .* write each policy with the number of its steps"):
        made(f'trainer.policy_turns="{turns}"')


def test_the_engine_trains_the_adapters_of_each_trained_policy() -> None:
    config = made(*AGENTS, LORA, "policies.editor.lr=0.5")
    engine = plugins().engine("torch")(config)
    assert isinstance(engine, PolicyEngine)
    assert engine._policies == {
        "editor": TrainedPolicy(LoraConfig(rank=8), 0.5),
        "writer": TrainedPolicy(LoraConfig(rank=8)),
    }
    with pytest.raises(ConfigError, match="trains one policy"):
        plugins().engine("verl")(config)


def test_weights_come_into_vllm_as_adapters_of_the_model(tmp_path: Path) -> None:
    found = policies(LORA).transfer(FromDisk(), tmp_path)
    assert isinstance(found, PolicyAdapters)
    assert dict(found.models("a")) == {"writer": "a/writer", "editor": "a/editor", "judge": "a", "base": "a"}


def test_a_trainer_leaves_out_what_is_never_trained_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    settings = {"policies.writer.agents": ["writer"], "engine.lora.rank": 8}
    trainer = Trainer("org/model", out=tmp_path / "run", config=settings, train_agents=["w*"])
    assert trainer.train_agents == ("w*", "!policy:base")
    del settings["engine.lora.rank"]
    with pytest.raises(ConfigError, match=r"policies\.writer has no adapters"):
        Trainer("org/model", out=tmp_path / "run", config=settings)


def test_the_disk_and_the_rate_of_a_run_are_those_of_its_policies_adapters(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    named = ("policies.writer.lora.rank=2", "policies.editor.lora.rank=4", "trainer.keep_checkpoints=1")
    several, one = made(*AGENTS, *named), made("engine.lora.rank=6", "trainer.keep_checkpoints=1")
    needs = [disk_need(tmp_path, model, config) for config in (several, one)]
    numbers = sum(math.prod(spec.shape) for spec in folder_tensors(model).values())
    assert needs[0] is not None
    assert needs[1] is not None
    adapters = adapter_weights([spec.shape for spec in folder_tensors(model).values()], several)
    exported = 4 * numbers + 2 * 4 * adapters
    assert needs[0].bytes - needs[1].bytes == exported, "each trained policy has a model, and its adapters twice"
    assert default_rate(several, model) == default_rate(one, model)
