"""The policies of a run as the trainer sees them."""

from __future__ import annotations

import math
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from lightning.config import Config, LoraConfig, load_config
from lightning.engines.protocol import SendsWeights
from lightning.errors import ConfigError, PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.model_folder import folder_tensors
from lightning.policy_server.servers import settings_of_servers
from lightning.policy_server.weights import FromDisk
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.model import default_rate, with_one_policy
from lightning.trainer.needs import disk_need, ranks_of_adapters
from lightning.trainer.trainer import Trainer
from lightning.types import Run
from lightning_attach.transfer import LocalSender, OverNetwork
from lightning_branching.policies import EvaluatedModel, _policies_here
from lightning_policies.engine import PolicyEngine, TrainedPolicy
from lightning_policies.policy_set import Policies
from lightning_policies.transfer import PolicyAdapters
from lightning_replicas import server_set

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
    def begin() -> None:
        found = plugins().policy_set(made(*overrides))
        assert found is not None
        found.check()

    with pytest.raises(ConfigError) as error:
        begin()
    return str(error.value)


def test_a_run_without_policies_has_no_set() -> None:
    assert plugins().policy_set(Config()) is None
    assert plugins().policy_set(made(LORA)) is None


def test_a_policys_own_adapters_win_over_those_of_all() -> None:
    found = policies(LORA, "policies.editor.lora.rank=4")
    assert found.adapters == {"writer": LoraConfig(rank=8), "editor": LoraConfig(rank=4)}
    assert found.untrained == ("judge", "base")


def test_policies_of_branches_and_evaluations_are_described_without_a_learning_rate() -> None:
    assert policies(LORA).described["writer"] == "answers writer; trained with adapters of rank 8"


def test_policies_share_the_servers_of_their_base_but_for_those_trained_whole(tmp_path: Path) -> None:
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    (tmp_path / "link").symlink_to(other)
    found = policies(
        "policies.writer.lora.rank=4",
        f"policies.judge.base={other}",
        'policies.critic.agents=["critic"]',
        f"policies.critic.base={tmp_path / 'link'}",
        "policies.critic.lora.rank=2",
    )
    assert found.count == 3
    served = found.models(model)
    assert [each.folder for each in served] == [model, other, model]
    ways = [each.transfer(FromDisk()) for each in served]
    assert [dict(way.models("a")) for way in ways] == [
        {"writer": "a/writer", "base": "a"},
        {"critic": "a/critic", "judge": "a"},
        {"editor": "a"},
    ]
    assert [each.trained for each in served] == [[LoraConfig(rank=4)], [LoraConfig(rank=2)], [None]]
    assert [bool(way.args("a")) for way in ways] == [True, True, False]
    for way, part in zip(ways, ("writer", "critic", "editor"), strict=True):
        with pytest.raises(PolicyServerError, match=f"has no weights of the policy '{part}'"):
            way.part(tmp_path)
        (tmp_path / f"{part}.safetensors").touch()
        assert way.part(tmp_path) == tmp_path / f"{part}.safetensors"
        with pytest.raises(
            ConfigError, match=r"policy_server\.attach names a vLLM that was not started for the policies"
        ):
            way.check(None)
    with pytest.raises(ConfigError, match="weights of several policies come into vLLM as files"):
        served[2].transfer(OverNetwork("gloo", LocalSender(), 1.0))


def test_it_is_said_that_policies_of_one_base_without_adapters_share_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    for overrides, said in (((), True), (("policies.editor.lora.rank=2",), False), ((LORA,), False)):
        engine = plugins().engine("torch")(made(*AGENTS, *overrides))
        assert isinstance(engine, PolicyEngine)
        assert ("all weights of the policies editor, writer are trained" in engine.check(model)) is said


def test_servers_where_no_policy_is_trained_get_no_weights(tmp_path: Path) -> None:
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    found = policies(LORA, f"policies.judge.base={other}").models(model)
    own, judge = (each.transfer(FromDisk()) for each in found)
    assert isinstance(own, PolicyAdapters), "one file has all that is trained"
    assert (judge.part(tmp_path), dict(judge.models("a"))) == (None, {"judge": "a"})


def test_the_untrained_model_is_served_where_a_policy_needs_it() -> None:
    def names(*overrides: str) -> list[tuple[str, ...]]:
        found = plugins().policy_set(made('policies.a.agents=["a"]', *overrides))
        assert isinstance(found, Policies)
        return [each.untrained for each in found._served]

    assert names(LORA) == [("base",)]
    assert names() == [()], "all weights of the only policy are trained"
    assert names('policies.b.agents=["b"]', "policies.b.train=false") == [("b", "base"), ()]
    assert names("policies.a.base=other/model", LORA) == [()]


def test_a_base_that_cannot_be_is_refused_with_the_cure(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    assert "policies.judge.base: the model folder ./none does not exist" in refused(
        *AGENTS, "policies.judge.base=./none"
    )
    assert "policies.judge.base: " + str(tmp_path) in refused(*AGENTS, f"policies.judge.base={tmp_path}")
    with pytest.raises(ConfigError, match=f"policies.NAME.base = '{model}' is the run's model: leave it out"):
        policies(LORA, f"policies.judge.base={model}").models(model)
    assert "needs vLLMs of 3 models, and policy_server.attach names running ones" in _refused_servers(
        'policy_server.attach="http://127.0.0.1:1"'
    )


def test_each_server_has_its_own_port_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    each = settings_of_servers(made(*AGENTS, "policy_server.port=8100", "policy_server.device=cpu"))
    assert [one.policy_server.port for one in each] == [8100, 8101, 8102]
    gpus = ("policy_server.device=cuda", "engine.device=cuda", "policy_server.gpus_each=2")
    monkeypatch.setattr(server_set, "visible_gpus", lambda: 8)
    each = settings_of_servers(made(*AGENTS, *gpus))
    assert [one.policy_server.gpus for one in each] == [(1, 2), (3, 4), (5, 6)]
    monkeypatch.setattr(server_set, "visible_gpus", lambda: 4)
    said = (
        "policy_server.replicas = 1 for each of 3 models of [policies] with 2 GPUs each need 6 GPUs, and 4 are visible"
    )
    assert said in _refused_servers(*gpus)


def _refused_servers(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        settings_of_servers(made(*AGENTS, *overrides))
    return str(error.value)


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
    of_workers = plugins().engine("verl")(config)
    assert isinstance(of_workers, PolicyEngine)
    assert (isinstance(engine, SendsWeights), isinstance(of_workers, SendsWeights)) == (False, True)


def test_weights_come_into_vllm_as_adapters_of_the_model(tmp_path: Path) -> None:
    (served,) = policies(LORA).models(tmp_path)
    found = served.transfer(FromDisk())
    assert isinstance(found, PolicyAdapters)
    assert dict(found.models("a")) == {"writer": "a/writer", "editor": "a/editor", "judge": "a", "base": "a"}


def test_a_trainer_leaves_out_what_is_never_trained_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    settings = {"policies.writer.agents": ["writer"], "engine.lora.rank": 8}
    trainer = Trainer("org/model", out=tmp_path / "run", config=settings, train_agents=["w*"])
    assert trainer.train_agents == ("w*", "!policy:base")
    settings["policies.writer.base"] = "./none"
    with pytest.raises(ConfigError, match=r"policies\.writer\.base: the model folder \./none does not exist"):
        Trainer("org/model", out=tmp_path / "run", config=settings)


def test_the_disk_and_the_rate_of_a_run_are_those_of_its_policies_adapters(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    named = ("policies.writer.lora.rank=2", "policies.editor.lora.rank=4", "trainer.keep_checkpoints=1")
    several, one = made(*AGENTS, *named), made("engine.lora.rank=6", "trainer.keep_checkpoints=1")
    needs = [disk_need(tmp_path, model, config) for config in (several, one)]
    numbers = sum(math.prod(spec.shape) for spec in folder_tensors(model).values())
    assert needs[0] is not None
    assert needs[1] is not None
    weights = 6 * sum(sum(spec.shape) for spec in folder_tensors(model).values() if len(spec.shape) == 2)
    assert needs[0].bytes - needs[1].bytes == 4 * numbers + 2 * 4 * weights, (
        "each trained policy has an exported model, and its adapters alone twice"
    )
    assert default_rate(several, model) == default_rate(one, model)
    mixed = made(*AGENTS, "policies.writer.lora.rank=2")
    assert default_rate(mixed, model) == default_rate(made(), model), "a rate for adapters is too high for all weights"
    assert (ranks_of_adapters(several), ranks_of_adapters(mixed)) == (6, 0)


def test_policies_with_other_models_are_other_ones_to_evaluate(tmp_path: Path) -> None:
    model, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=1)
    begins = (policies(LORA), policies(LORA), policies(LORA, f"policies.judge.base={other}"))
    one, same, beside = (EvaluatedModel("run@0", model, several=each) for each in begins)
    assert one.serves_as(same)
    assert not one.serves_as(beside)
    assert not one.serves_as(EvaluatedModel("run@0", model))


def test_a_record_names_models_of_this_machine_and_fetches_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder may come from a stranger."""
    asked = []

    def download(name: str, *, local_files_only: bool = False) -> str:
        asked.append(local_files_only)
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    other = make_tiny_model(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    for base in ("other", "far/away"):
        config = made(*AGENTS, LORA, f"policies.judge.base={base}")
        several = plugins().policy_set(config)
        assert several is not None
        run = Run("run", "run", {"config": config.model_dump(mode="json")})
        if base == "other":
            assert _policies_here(run, several).bases == {"judge": str(other)}
            continue
        with pytest.raises(
            ConfigError, match=r"the policy judge of the run run: .* fetch it first \(hf download far/away"
        ):
            _policies_here(run, several)
    assert asked == [True]
