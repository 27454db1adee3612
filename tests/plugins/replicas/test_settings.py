"""The settings of several policy servers: which GPUs, ports and addresses each has, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config, config_model, load_config, with_settings
from lightning.errors import ConfigError, LightningError, PolicyServerError
from lightning.policy_server.auto_settings import Machine, shares_gpu
from lightning.policy_server.servers import check_servers, settings_of_servers
from lightning.testing.tiny_models import make_tiny_model
from lightning_deploy import deploy_plan
from lightning_planner import needs
from lightning_planner.needs import memory_need
from lightning_replicas import server_set
from lightning_replicas.server_set import Replicas
from lightning_server.serving import serve

CUDA = {"device": "cuda"}
URLS = ("http://a:8000", "http://b:8000/v1")


def config(**settings: Any) -> Config:
    engine = {"engine.device": settings.pop("engine")} if "engine" in settings else {}
    return with_settings(
        config_model()(), {f"policy_server.{name}": value for name, value in settings.items()} | engine
    )


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_set, "visible_gpus", lambda: 8)


def test_one_server_has_the_settings_of_the_run() -> None:
    plain = config()
    assert settings_of_servers(plain) == [plain]
    assert settings_of_servers(plain)[0] is plain
    (attached,) = settings_of_servers(config(attach="http://a:8000"))
    assert attached.policy_server.attach == "http://a:8000"


def test_replicas_on_a_cpu_have_ports_of_their_own_and_are_single_servers() -> None:
    each = settings_of_servers(config(replicas=3, port=8100, device="cpu"))
    assert [one.policy_server.port for one in each] == [8100, 8101, 8102]
    assert [settings_of_servers(one) for one in each] == [[one] for one in each]
    assert [one.policy_server.port for one in settings_of_servers(config(replicas=2, device="cpu"))] == [0, 0]


@pytest.mark.parametrize(
    ("given", "dealt"),
    [
        ({"replicas": 3}, [(1,), (2,), (3,)]),
        ({"replicas": 3, "gpus_each": 2}, [(1, 2), (3, 4), (5, 6)]),
        ({"replicas": 2, "engine": "cuda:1"}, [(0,), (2,)]),
        ({"replicas": 8, "engine": "cpu"}, [(number,) for number in range(8)]),
        ({"replicas": 2, "gpus_each": 2, "gpus": (0, 5, 6, 7)}, [(0, 5), (6, 7)]),
        ({"replicas": 1, "gpus_each": 4}, [(1, 2, 3, 4)]),
    ],
)
def test_gpus_are_dealt_and_the_trainers_is_left_out(given: dict[str, Any], dealt: list[tuple[int, ...]]) -> None:
    whole = config(**CUDA, **given)
    each = [one.policy_server for one in settings_of_servers(whole)]
    assert [one.gpus for one in each] == dealt
    parallel = ("--tensor-parallel-size", str(len(dealt[0]))) if len(dealt[0]) > 1 else ()
    assert {one.args for one in each} == {parallel}
    assert {one.gpu_memory_utilization for one in each} == {0.9}
    assert shares_gpu(whole) is (dealt[0][0] == 0 and "engine" not in given)


def test_what_is_set_by_hand_stays() -> None:
    args = ("-tp", "1", "--pipeline-parallel-size=2")
    (one, _) = settings_of_servers(config(**CUDA, replicas=2, gpus_each=2, args=args, gpu_memory_utilization=0.4))
    assert (one.policy_server.args, one.policy_server.gpu_memory_utilization) == (args, 0.4)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**CUDA, "replicas": 8}, r"1 GPU each need 8 GPUs, and 8 are visible .* the trainer has one .*replicas to 7, or"),
        ({**CUDA, "replicas": 2, "gpus_each": 9}, r"need 18 GPUs.*lower policy_server\.gpus_each"),
        ({**CUDA, "replicas": 3, "gpus": (1, 2)}, r"policy_server\.gpus names 2: set policy_server\.replicas to 2"),
        ({**CUDA, "replicas": 2, "gpus": (1, 1)}, r"policy_server\.gpus = \[1, 1\] names a GPU twice"),
        ({"device": "cpu", "replicas": 2, "gpus_each": 1}, r"gpus_each = 1 counts GPUs, and vLLM runs on the CPU"),
        ({"device": "cpu", "replicas": 5, "port": 65532}, r"leaves 4 ports for policy_server\.replicas = 5"),
        ({"replicas": 2, "attach": URLS}, r"leave out one of the two"),
        ({"attach": ("http://a:1", "http://a:1/v1/")}, r"names http://a:1 twice"),
        ({"attach": ("http://a:1", "")}, r"has an empty URL"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name_and_cure(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings_of_servers(config(**given))


def test_several_running_servers_are_one_each() -> None:
    assert [one.policy_server.attach for one in settings_of_servers(config(attach=URLS))] == list(URLS)
    loaded = load_config(overrides=['policy_server.attach=["http://a:1", "http://b:1"]'])
    assert loaded.policy_server.attach == ("http://a:1", "http://b:1")


class Told:
    """A policy server that tells facts."""

    models = ()

    def __init__(self, url: str, **facts: object) -> None:
        self.url, self._facts = url, facts

    async def facts(self) -> dict[str, object]:
        return self._facts


async def test_servers_of_other_models_dtypes_or_contexts_are_refused() -> None:
    facts = {"model": "tiny", "dtype": "torch.float32", "context": 4096}
    await Replicas().check([Told("http://a", **facts), Told("http://b", **facts), Told("http://c")])  # type: ignore[list-item]
    for name, other in (("model", "big"), ("dtype", "torch.bfloat16"), ("context", 2048)):
        servers: Any = [Told("http://a", **facts), Told("http://b", **{**facts, name: other})]
        with pytest.raises(
            PolicyServerError, match=f"http://a and http://b .* their {name} is {facts[name]} and {other}"
        ):
            await check_servers(servers)
    twins: Any = [Told("http://a"), Told("http://a")]
    with pytest.raises(LightningError, match="http://a is named twice"):
        await check_servers(twins)


def test_a_deployment_has_gpus_for_the_trainer_and_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it asks for the model, and waits

    def machine(**settings: Any) -> deploy_plan.MachineNeeds:
        return deploy_plan.estimate("no-such-model", config(**CUDA, **settings), "torch", "h100")

    assert [machine().gpus, machine(replicas=3).gpus, machine(replicas=3, gpus_each=2).gpus] == [1, 4, 7]
    assert machine(replicas=8, placement="ray").gpus == 1, "the others are elsewhere"
    with pytest.raises(ConfigError, match=r"1 GPUs for training and 8 for vLLMs: .* Lower policy_server\.replicas"):
        machine(replicas=8)


def test_the_gpus_of_replicas_are_counted_apart_from_the_trainers(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "tiny"))
    found = deploy_plan.estimate(model, config(**CUDA, replicas=2), "torch", "h100")
    assert [use.role for use in found.uses] == ["training", "serving"]


async def test_a_served_model_has_one_vllm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lightning serve serves a model by one vLLM, and the settings name 2"):
        async with serve(tmp_path, config(replicas=2, device="cpu"), tmp_path / "out"):
            pass
    assert not (tmp_path / "out").exists()


def test_each_of_several_processes_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(needs, "this_machine", lambda: Machine(2, 10**10))
    model, given = make_tiny_model(tmp_path / "tiny"), {"device": "cpu", "dtype": "float32", "engine": "cpu"}
    one, three = (memory_need(model, config(replicas=count, **given), "torch", 6) for count in (1, 3))
    assert one is not None
    assert three is not None
    alone = memory_need(model, config(attach="http://a", **given), "torch", 6)
    assert alone is not None
    assert three.bytes - alone.bytes == 3 * (one.bytes - alone.bytes)
    assert "in each of 3 processes" in three.parts
