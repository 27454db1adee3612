"""The vLLMs of a policy on nodes of a Ray cluster: what is refused, and how one is started, lost and started again. Actors are
scripted, and vLLM's HTTP side is a stand-in."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
from lightning.config import Config, config_model, with_settings
from lightning.errors import ConfigError, MissingExtraError, PolicyServerError
from lightning.policy_server import vllm_server
from lightning.policy_server.auto_settings import Demand, shares_gpu
from lightning.policy_server.servers import settings_of_servers
from lightning.policy_server.vllm_server import check_policy_server, make_policy_server
from lightning.policy_server.weights import FromDisk
from lightning_ray import vllm_on_ray as module
from lightning_ray.cluster import ActorLostError
from lightning_ray.config import RayServersConfig
from lightning_ray.vllm_actor import VLLMHost, digest_of_model
from lightning_ray.vllm_on_ray import VLLMOnRay, check_room

FAR = ("", "far", "127.0.0.2")


def config(**settings: Any) -> Config:
    given = {"placement": "ray", "device": "cpu", **settings}
    return with_settings(config_model()(), {f"policy_server.{name}": value for name, value in given.items()})


class Actor:
    """Notes how it is called; its cluster's script answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.asked, self.killed = cluster, dict[str, tuple[Any, ...]](), False

    def __getattr__(self, method: str) -> Any:
        def remote(*given: Any) -> Any:
            self.asked[method] = given
            return self, method

        return SimpleNamespace(remote=remote)


class Cluster:
    """Stands for the connection to a cluster of two nodes, which the first server that connects has made."""

    def __init__(self, url: str) -> None:
        self.actors, self.closed, self.up = list[Actor](), 0, True
        self.thread: object = object()
        self.ray = SimpleNamespace(is_initialized=lambda: self.up)
        self.room = asyncio.Event()
        self.room.set()
        self.replies: dict[str, Any] = {"look": FAR, "start": ("", url, "policy-1"), "more": b"", "stop": None}

    def here(self) -> str:
        return "near"

    def nodes(self) -> dict[str, dict[str, float]]:
        return {"near": {"CPU": 1.0}, "far": {"CPU": 1.0}}

    def actor(self, kind: type, settings: RayServersConfig, num_gpus: float) -> Any:
        assert (kind, num_gpus) == (VLLMHost, 0)

        def remote(folder: str) -> Actor:
            self.actors.append(Actor(self))
            return self.actors[-1]

        return SimpleNamespace(remote=remote)

    async def answer(self, reference: tuple[Actor, str], seconds: float | None) -> Any:
        actor, method = reference
        async with asyncio.timeout(seconds):
            await self.room.wait()
        if actor.killed:
            raise ActorLostError("the node is gone")
        found = self.replies[method]
        if isinstance(found := found() if callable(found) else found, Exception):
            raise found
        if method == "more":
            self.replies["more"] = b""
        return found

    def kill(self, actor: Actor) -> None:
        actor.killed = True

    async def close(self) -> None:
        self.closed, self.up = self.closed + 1, False


Made = Callable[..., VLLMOnRay]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Cluster:
    found = Cluster(fake.url)

    async def connected(settings: RayServersConfig, actors: int) -> Any:
        thread, found.thread = found.thread, None
        return found if thread is None else _Owner(found)

    monkeypatch.setattr(module, "connected", connected)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.01)
    return found


class _Owner:
    """The connection as the server has it that made it."""

    thread = object()

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


@pytest.fixture
def made(model: Path, tmp_path: Path) -> Made:
    def make(version: int = 0, servers: int = 1, **settings: Any) -> VLLMOnRay:
        demand = Demand(servers=servers)
        server = make_policy_server(
            model, config(**settings), log=tmp_path / "vllm.log", version=version, demand=demand
        )
        assert isinstance(server, VLLMOnRay)
        return server

    return make


async def test_vllm_is_started_on_a_node_with_the_trainers_settings(
    cluster: Cluster,
    made: Made,
    model: Path,
    fake: Any,
    tmp_path: Path,
) -> None:
    server, cluster.replies["more"] = made(version=3, max_model_len=64), b"what vLLM wrote\n"
    await server.start()
    (actor,) = cluster.actors
    release, digest, file = actor.asked["look"]
    assert (release, digest) == (lightning.__version__, digest_of_model(model))
    assert Path(file).parent == tmp_path
    section, secret, (args, extension), demand, version, updates = actor.asked["start"]
    settings = json.loads(section)
    assert (settings["host"], settings["max_model_len"], settings["device"]) == ("127.0.0.2", 64, "cpu")
    assert (args, extension.rpartition(".")[2], demand["servers"], version, updates) == (
        (),
        "WorkerExtension",
        1,
        3,
        True,
    )
    assert len(secret) > 20
    assert (server.url, server.model, server.alias, server.version) == (fake.url, "policy", "policy-1", 3)
    while not (tmp_path / "vllm.log").exists():
        await asyncio.sleep(0.01)
    assert (tmp_path / "vllm.log").read_text() == "what vLLM wrote\n"
    await server.update(model / "model.safetensors", 4)
    assert (server.version, fake.version) == (4, 4)
    await server.close()
    assert (actor.killed, "stop" in actor.asked, cluster.closed) == (True, True, 1)


async def test_on_the_trainers_machine_vllm_listens_on_loopback(cluster: Cluster, made: Made) -> None:
    cluster.replies["look"] = ("", "near", "10.0.0.7")
    server = made(weight_transfer="gloo")
    await server.start()
    section, _, (args, extension), *_ = cluster.actors[0].asked["start"]
    assert "host" not in json.loads(section), "it is the default, which is loopback"
    assert cluster.actors[0].asked["look"][2] == "", "over the network no folder is shared"
    assert ("--weight-transfer-config" in args, extension.rpartition(".")[2]) == (True, "NetworkExtension")
    await server.close()


async def test_a_lost_server_is_started_elsewhere_with_the_newest_weights(
    cluster: Cluster,
    made: Made,
    model: Path,
    fake: Any,
) -> None:
    server = made()
    await server.start()
    died = asyncio.create_task(server.wait_died())
    await asyncio.sleep(0.05)
    assert not died.done()
    cluster.actors[0].killed = True
    await asyncio.sleep(0.05)
    assert not died.done(), "vLLM answers, and Ray alone does not reach its actor"
    fake.health = 503
    await asyncio.wait_for(died, 60)
    fake.health = 200
    cluster.replies["start"] = ("", fake.url.replace("127.0.0.1", "localhost"), "policy-2")
    await server.restart(model / "model.safetensors", 7)
    assert (len(cluster.actors), server.version, fake.version) == (2, 7, 7)
    assert (server.url, server.alias) == (fake.url.replace("127.0.0.1", "localhost"), "policy-2")
    await server.close()


async def test_an_actor_that_is_lost_before_vllm_runs_is_replaced(
    cluster: Cluster, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray may give one a place on a node that has just died."""
    dead = [ActorLostError("the node has died"), ActorLostError("the node has died"), FAR]
    cluster.replies["look"] = lambda: dead.pop(0)
    server = made()
    with caplog.at_level(logging.WARNING):
        await server.start()
    assert (len(cluster.actors), [actor.killed for actor in cluster.actors]) == (3, [True, True, False])
    assert "another one is tried: the node has died" in caplog.text
    await server.close()


async def test_weights_that_cannot_be_put_back_end_the_actor(
    cluster: Cluster,
    made: Made,
    model: Path,
    fake: Any,
) -> None:
    server = made()
    await server.start()
    fake.fail["lightning_load"] = 2
    with pytest.raises(PolicyServerError, match="could not be put back"):
        await server.update(model / "model.safetensors", 4)
    assert cluster.actors[0].killed
    fake.health = 503
    await asyncio.wait_for(server.wait_died(), 60)
    await server.close()


async def test_the_connection_ends_with_the_last_server(cluster: Cluster, made: Made) -> None:
    first, second = made(servers=2), made(servers=2)
    await first.start()
    await second.start()
    await first.close()
    assert cluster.closed == 0
    await second.close()
    assert (cluster.closed, [actor.killed for actor in cluster.actors]) == (1, [True, True])


async def test_what_is_wrong_with_a_node_is_told_and_nothing_is_left(
    cluster: Cluster,
    made: Made,
    fake: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refused(told: str, **settings: Any) -> None:
        server = made(**settings)
        with pytest.raises(PolicyServerError, match=told):
            await server.start()
        await server.close()
        cluster.up = True

    cluster.replies["look"] = ("it has lightning 9.9", "far", "10.0.0.9")
    await refused(r"on the node 10\.0\.0\.9 of the Ray cluster: it has lightning 9\.9")
    cluster.replies |= {"look": FAR, "start": ("vLLM ended at its start", "", "")}
    await refused(r"on the node 127\.0\.0\.2 of the Ray cluster: vLLM ended at its start")
    cluster.replies["start"] = ActorLostError("the node is gone")
    await refused("the node is gone")
    cluster.replies["start"], fake.health = ("", fake.url, "policy-1"), 503
    await refused(r"does not answer the trainer at http://127\.0\.0\.1:\d+ \(health: dead\).*policy_server\.port")
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    cluster.room.clear()
    with caplog.at_level(logging.WARNING):
        await refused(
            r"no room for a vLLM for 0\.05 s \(policy_server\.ray\.start_timeout\): it needs 1 CPU, and others",
            **{"ray.start_timeout": 0.05},
        )
    assert "a vLLM waits for room in the Ray cluster, 0.05 s at most: it needs 1 CPU" in caplog.text
    assert all(actor.killed for actor in cluster.actors)


async def test_more_servers_than_the_cluster_holds_are_refused_before_one_starts(cluster: Cluster, made: Made) -> None:
    server = made(servers=3)
    with pytest.raises(
        ConfigError, match=r"to start 3 vLLMs, each with 1 CPU on one node, .* at this machine can hold 2:"
    ):
        await server.start()
    await server.close()
    assert cluster.actors == []


def test_the_room_of_a_cluster_is_counted_by_node() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 4.0}, "b": {"CPU": 8.0, "GPU": 3.0}, "c": {"CPU": 64.0}}
    cuda, settings = config(device="cuda").policy_server, RayServersConfig(address="auto")
    check_room(nodes, cuda, settings, 2, 3)
    with pytest.raises(
        ConfigError, match=r"4 vLLMs, each with 2 GPU, 1 CPU on one node.*hold 3.*have 4 GPU, 8 CPU; 3 GPU"
    ):
        check_room(nodes, cuda, settings, 2, 4)
    check_room(nodes, cuda, RayServersConfig(num_cpus=0.0), 0, 100)
    with pytest.raises(ConfigError, match=r"each with 1 CPU, 1 tpu on one node.*can hold 0: its nodes have nothing"):
        check_room({}, cuda, RayServersConfig(resources={"tpu": 1.0}), 0, 1)


def test_gpus_that_only_the_cluster_has_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version_of", lambda name: None)
    nodes, settings = {"a": {"CPU": 8.0, "GPU": 4.0}}, RayServersConfig(address="auto")
    with pytest.raises(
        ConfigError, match=r"'auto' found no GPU on the trainer's machine.*set policy_server\.device to 'cuda'"
    ):
        check_room(nodes, config(device="auto").policy_server, settings, 0, 1)
    check_room(nodes, config(device="cpu").policy_server, settings, 0, 1)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"weight_transfer": "shared_memory"}, "'shared_memory' reaches no other machine"),
        ({"device": "cuda"}, r"policy_server\.ray\.address is empty, and a Ray started on this machine"),
        ({"device": "cuda", "ray.address": "auto", "gpus": (2, 3)}, r"policy_server\.gpus = \[2, 3\] names GPUs of this"),
        ({"host": "0.0.0.0"}, r"policy_server\.host = '0\.0\.0\.0'"),
        ({"attach": "http://gpu:8000"}, r"policy_server\.placement = 'ray' says where .* leave out one of the two"),
        ({"placement": "moon"}, r"policy_server\.placement = 'moon'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_when_the_server_is_made(
    made: Made, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(lightning.errors.LightningError, match=told):
        made(**settings)


async def test_without_ray_the_extra_is_named(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    server = made()
    with pytest.raises(MissingExtraError, match="ray"):
        await server.start()
    await server.close()


async def test_nothing_at_the_address_is_told_at_once(made: Made) -> None:
    server = made(**{"ray.address": "127.0.0.1:1"})
    with pytest.raises(
        PolicyServerError, match=r"no Ray cluster at 127\.0\.0\.1:1: .*Check policy_server\.ray\.address, and"
    ):
        await server.start()
    await server.close()


def test_replicas_on_ray_have_the_first_gpus_that_they_see() -> None:
    whole = config(device="cuda", replicas=3, gpus_each=2)
    each = [one.policy_server for one in settings_of_servers(whole)]
    assert [(one.gpus, one.args, one.gpu_memory_utilization) for one in each] == [
        ((0, 1), ("--tensor-parallel-size", "2"), 0.9)
    ] * 3
    (one,) = settings_of_servers(config(device="cuda"))
    assert (one.policy_server.gpus, one.policy_server.gpu_memory_utilization) == ((0,), 0.9)
    assert settings_of_servers(one) == [one]
    assert not shares_gpu(whole)
    check_policy_server(whole.policy_server)
    with pytest.raises(ConfigError, match=r"policy_server\.gpus = \[1, 2\] names GPUs of this machine"):
        settings_of_servers(config(device="cuda", replicas=2, gpus=(1, 2)))


def test_a_node_must_have_the_release_the_model_and_the_folder(model: Path, tmp_path: Path) -> None:
    def wrong(folder: Path, release: str, digest: str, file: str) -> str:
        return VLLMHost(str(folder))._why_not(release, digest, file)

    own, digest = lightning.__version__, digest_of_model(model)
    assert wrong(model, own, digest, "") == ""
    assert wrong(model, own, digest, str(model / "config.json")) == ""
    assert f"it has lightning {own}, the trainer 9.9" in wrong(model, "9.9", digest, "")
    assert "under the same path: copy it there" in wrong(tmp_path / "none", own, digest, "")
    assert "is another one there" in wrong(model, own, "0" * 64, "")
    assert f"does not see the run's folder {tmp_path}" in wrong(model, own, digest, str(tmp_path / "none"))


async def test_a_node_without_vllm_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_server, "require_vllm", lambda device: (_ for _ in ()).throw(MissingExtraError("vllm", "vllm"))
    )
    monkeypatch.setenv("LIGHTNING_VLLM_SECRET", "before")
    host, logger = VLLMHost(str(model)), logging.getLogger("lightning")
    before, level = list(logger.handlers), logger.level
    assert host.more(0) == b""
    try:
        said, *rest = await host.start('{"device": "cpu"}', "secret", ((), "x.Extension"), {"servers": 2}, 0, True)
    finally:
        logger.setLevel(level)
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)
            handler.close()
    assert ("vllm" in said, rest) == (True, ["", ""])
    log = host._log
    assert log is not None
    log.write_bytes(b"what vLLM wrote")
    assert (host.more(0), host.more(10)) == (b"what vLLM wrote", b"wrote")
    await host.stop()
    assert not log.parent.exists()


def test_several_policies_are_refused_by_name(tmp_path: Path) -> None:
    class Several(FromDisk):
        def models(self, alias: str) -> list[tuple[str, str]]:
            return [("writer", f"{alias}/writer")]

    settings = with_settings(Config(), {"policy_server.placement": "ray", "policy_server.device": "cpu"}).policy_server
    with pytest.raises(ConfigError, match=r"\[policies\] gives a vLLM on this machine .*leave out one of the two"):
        VLLMOnRay(tmp_path, settings, Several(), log=tmp_path / "vllm.log")
