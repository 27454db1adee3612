"""Weights over the network: a stand-in for vLLM receives them in a real gloo group; the real one is in test_vllm.py."""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import json
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from aiohttp import web
from lightning.config.sections import PolicyServerConfig
from lightning.errors import ConfigError, PolicyServerError
from lightning.policy_server.auto_settings import Chosen
from lightning.policy_server.vllm_arguments import server_args
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning_attach import links
from lightning_attach.attached import AttachedVLLM
from lightning_attach.links import Door, GlooGroup, Spec, join
from lightning_attach.sending import Meeting
from lightning_attach.transfer import LocalSender, OverNetwork
from lightning_attach.worker import NetworkExtension
from safetensors.torch import load_file

Alter = Callable[[Path, Callable[[dict[str, Any]], object]], Path]
JOIN = ["get_world_size", "init_weight_transfer_engine", "transfer"]
LOAD = ["transfer", "expect", "start_weight_update", "update_weights", "transfer", "finish_weight_update"]
ORDER = ["attach", "transfer", "attach", "pause", "in_flight", *LOAD, "reset_prefix_cache", "set_version", "resume"]


class Worker(NetworkExtension):
    """As vLLM makes it, with a transfer engine, and with what vLLM's own refuses."""

    _weight_update_active = False

    def __init__(self, config: Any, engine: Any) -> None:
        self.vllm_config = SimpleNamespace(weight_transfer_config=config)
        self.weight_transfer_engine = engine
        self.model_runner = SimpleNamespace(requests={})

    def execute_model(self, scheduler_output: object) -> None: ...

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._weight_update_active, self._weight_update_is_draft = True, False

    def update_weights(self, told: Any) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.weight_transfer_engine.update_weights(told)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False


class Engine:
    """What vLLM's transfer engines have in common."""

    def __init__(self) -> None:
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        self.model = self.model_config = self.device = None
        self.finished = 0

    def update_weights(self, told: Any) -> None: ...

    def finish_weight_update(self) -> None:
        self.finished += 1

    def shutdown(self) -> None: ...


@pytest.fixture(scope="module")
def receiver() -> Any:
    """The module of vLLM's end, without vLLM, which takes seconds."""
    base = SimpleNamespace(WeightTransferEngine=Engine, WeightTransferInitInfo=object, WeightTransferUpdateInfo=object)
    path = ["vllm", "vllm.distributed", "vllm.distributed.weight_transfer"]
    with patch.dict(sys.modules, {**{name: SimpleNamespace() for name in path}, f"{path[-1]}.base": base}):
        return importlib.import_module("lightning_attach.receiver")


class Workers:
    """The workers of a stand-in for vLLM: one, with our extension and our receiver, which keeps what comes."""

    def __init__(self, fake: Any, backend: str, engine: Any) -> None:
        self.fake, self.rpc = fake, fake.rpc
        self.worker = Worker(SimpleNamespace(backend=backend), engine)
        self.told: list[dict[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.ignore = 0
        """So often weights are refused before any is received."""
        fake.rpc = self.answer
        fake.answers = {
            "/get_world_size": self.size,
            "/init_weight_transfer_engine": self.init,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
        }

    @property
    def engine(self) -> Any:
        """As the fake's present owner finds it."""
        self.worker._lightning_known().claim = self.fake.claim
        return self.worker.weight_transfer_engine

    def answer(self, method: str, args: list[str]) -> dict[str, object]:
        answer: dict[str, object] = self.rpc(method, args)
        assert self.engine
        if method == "lightning_expect":
            assert self.fake.paused
            self.fake.version = None
        if method in ("lightning_transfer", "lightning_group", "lightning_expect", "lightning_leave"):
            answer = getattr(self.worker, method)(*args)
        return answer

    def leave(self) -> None:
        self.worker.lightning_leave()

    async def size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        self.told.append(info)
        if hasattr(self.engine, "init_transfer_engine"):
            await asyncio.to_thread(self.engine.init_transfer_engine, self.engine.parse_init_info(info))
        return web.json_response({})

    async def start(self, request: web.Request) -> web.Response:
        return await self.do(self.worker.start_weight_update)

    async def update(self, request: web.Request) -> web.Response:
        assert self.fake.version is None
        info = (await request.json())["update_info"]
        self.told.append(info)
        assert self.engine

        def take() -> None:
            self.ignore -= 1
            if self.ignore >= 0:
                self.worker._weight_update_active = False
                raise RuntimeError("it does not want them")
            self.worker.update_weights(info)

        return await self.do(take)

    async def finish(self, request: web.Request) -> web.Response:
        return await self.do(self.worker.finish_weight_update)

    async def do(self, what: Callable[[], None]) -> web.Response:
        try:
            await asyncio.to_thread(what)
        except RuntimeError as error:
            return web.Response(status=500, text=str(error))
        return web.json_response({})

    def have(self, file: Path) -> bool:
        expected = load_file(file)
        return expected.keys() == self.weights.keys() and all(
            torch.equal(value, self.weights[name]) for name, value in expected.items()
        )


async def attached(fake: Any, model: Path, sender: Any = None, backend: str = "gloo") -> AttachedVLLM:
    transfer = OverNetwork(backend, sender or LocalSender(), 30)
    server = AttachedVLLM(model, PolicyServerConfig(attach=fake.url), transfer)
    await server.start()
    fake.calls.clear()
    return server


@pytest.fixture
def workers(fake: Any, receiver: Any, monkeypatch: pytest.MonkeyPatch) -> Workers:
    workers = Workers(fake, "lightning_gloo", receiver.GlooReceiver())

    def keep(model: Any, config: Any, device: Any, tensors: Any) -> None:
        workers.weights = dict(tensors)

    monkeypatch.setattr(receiver, "replace_weights", keep)
    return workers


async def test_the_workers_join_once_and_get_every_tensor(
    fake: Any, workers: Workers, model: Path, alter: Alter
) -> None:
    server = await attached(fake, model)
    await server.update(model / "model.safetensors", 1)
    assert fake.calls == ["attach", "transfer", *JOIN, *ORDER[2:]]
    assert workers.have(model / "model.safetensors")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((workers.told[0]["master_address"], workers.told[0]["master_port"]), 5)
    fake.calls.clear()
    other = alter(model, lambda t: t.update({name: value.bfloat16() + 1 for name, value in t.items()}))
    await server.update(other, 2)
    assert fake.calls == ORDER
    assert workers.have(other)
    assert server.version == fake.version == 2


async def test_a_group_is_made_anew_when_either_side_was_started_again(
    fake: Any, workers: Workers, model: Path
) -> None:
    sender = LocalSender()
    server = await attached(fake, model, sender)
    for side in (None, sender, workers):
        if side is not None:
            side.leave()
        fake.calls.clear()
        await server.update(model / "model.safetensors", 1)
        assert "init_weight_transfer_engine" in fake.calls
    assert len({told["master_port"] for told in workers.told if "master_port" in told}) == 3


@pytest.mark.parametrize(("backend", "has"), [("", "was not started for that"), ("nccl", "takes weights over nccl")])
async def test_a_vllm_that_was_not_started_for_it_is_not_even_paused(
    fake: Any, model: Path, backend: str, has: str
) -> None:
    Workers(fake, backend, Engine())
    server = await attached(fake, model)
    with pytest.raises(
        PolicyServerError, match=rf"version 0 goes on: .*{has}: start it with --weight-.*lightning_gloo"
    ):
        await server.update(model / "model.safetensors", 1)
    assert fake.calls == ["attach", "transfer"]


async def test_weights_that_vllm_refuses_twice_free_the_sender_and_the_old_ones_are_put_back(
    fake: Any, workers: Workers, model: Path, alter: Alter
) -> None:
    server = await attached(fake, model)
    old = alter(model, lambda t: t.update({name: value + 1 for name, value in t.items()}))
    await server.update(old, 1)
    workers.ignore, workers.weights = 2, {}
    with pytest.raises(PolicyServerError, match=r"version 1 goes on: .*over gloo: .*it does not want them"):
        await asyncio.wait_for(server.update(model / "model.safetensors", 2), 20)
    assert workers.have(old)
    assert not fake.paused
    assert server.version == fake.version == 1
    await server.update(model / "model.safetensors", 2)
    assert workers.have(model / "model.safetensors")


async def test_an_update_that_a_killed_trainer_has_begun_stops_no_other(
    fake: Any, workers: Workers, model: Path, alter: Alter
) -> None:
    server = await attached(fake, model)
    await server.update(alter(model, lambda t: t), 1)
    assert workers.worker.lightning_expect(fake.claim) == {"version": None}
    workers.worker.start_weight_update()
    fake.version, fake.claim = None, ""
    other = await attached(fake, model)
    assert other.version == -1
    await other.update(model / "model.safetensors", 2)
    assert workers.have(model / "model.safetensors")
    assert (fake.version, workers.worker._weight_update_active) == (2, False)


async def test_a_trainer_that_loses_the_vllm_while_it_sends_changes_nothing(
    fake: Any, workers: Workers, model: Path, alter: Alter
) -> None:
    server = await attached(fake, model)
    await server.update(alter(model, lambda t: t), 1)
    workers.weights = {}
    start = workers.worker.start_weight_update

    def stolen() -> None:
        fake.claim = "thief"
        start()

    workers.worker.start_weight_update = stolen  # type: ignore[method-assign]
    with pytest.raises(PolicyServerError, match=r"another trainer has attached .*its claim is thief"):
        await asyncio.wait_for(server.update(model / "model.safetensors", 2), 20)
    assert workers.weights == {}


class Breaking(LocalSender):
    """Breaks off in the middle, so often."""

    breaks = 0

    def send(self, files: Sequence[Path]) -> None:
        self.breaks -= 1
        if self.breaks >= 0:
            self.leave()
            raise PolicyServerError("the sender was killed")
        super().send(files)


async def test_a_group_that_has_broken_since_is_made_anew_for_the_new_weights(
    fake: Any, workers: Workers, model: Path, alter: Alter
) -> None:
    sender = Breaking()
    server = await attached(fake, model, sender)
    await server.update(alter(model, lambda t: t.update({name: value + 1 for name, value in t.items()})), 1)
    sender.breaks = 1
    await server.update(model / "model.safetensors", 2)
    assert workers.have(model / "model.safetensors")
    assert fake.version == 2
    assert len({told["group"] for told in workers.told if "master_port" in told}) == 2


@pytest.mark.parametrize("breaks", [2, 3])
async def test_a_sender_that_breaks_off(fake: Any, workers: Workers, model: Path, alter: Alter, breaks: int) -> None:
    sender = Breaking()
    server = await attached(fake, model, sender)
    await server.update(model / "model.safetensors", 1)
    sender.breaks = breaks
    update = server.update(alter(model, lambda t: t.update({name: value + 1 for name, value in t.items()})), 2)
    with pytest.raises(
        PolicyServerError, match="the sender was killed.*could not be put" if breaks > 2 else "1 goes on"
    ):
        await update
    assert fake.paused is (breaks > 2), "nothing is sampled from what is left"
    assert fake.version == (None if breaks > 2 else 1)
    assert (breaks > 2) or workers.have(model / "model.safetensors")


async def test_nobody_comes(fake: Any, workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "JOIN_SECONDS", 0.2)
    server = await attached(fake, model)
    fake.fail["/init_weight_transfer_engine"] = 1
    with pytest.raises(
        PolicyServerError, match=r"0 goes on: vLLM could not join the trainer's gloo group at 127\.0\.0\.1:\d+"
    ):
        await server.update(model / "model.safetensors", 1)
    assert "pause" not in fake.calls
    assert (await server.update(model / "model.safetensors", 1)).version == 1


class Recorder:
    """A sender without a network."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.word = ""
        self.held, self.busy = False, 1

    def check(self, backend: str) -> None:
        self.calls.append(backend)

    def hold(self) -> bool:
        assert not self.held
        self.busy -= 1
        self.held = self.busy < 0
        return self.held

    def release(self) -> None:
        assert self.held
        self.held = False

    def listen(self, backend: str, towards: str, world: int, seconds: float) -> Meeting:
        assert self.held, "vLLM would wait while it does something else"
        self.calls.append((backend, towards, world, seconds))
        return Meeting("192.0.2.1", 4711, world, seconds)

    def join(self, group: str) -> None:
        self.word = group

    def group(self) -> str:
        return self.word

    def send(self, files: Sequence[Path]) -> None:
        assert self.held
        self.calls.append(list(files))

    def leave(self) -> None:
        self.word = ""


async def test_what_vllms_own_nccl_is_told(fake: Any, model: Path) -> None:
    workers, sender = Workers(fake, "nccl", Engine()), Recorder()
    server = await attached(fake, model, sender, "nccl")
    await server.update(model / "model.safetensors", 1)
    assert fake.calls == ["attach", "transfer", *JOIN[:-1], "group", JOIN[-1], *ORDER[2:]]
    assert sender.calls == ["nccl", ("nccl", "127.0.0.1", 2, 30.0), [model / "model.safetensors"]]
    joined, described = workers.told
    assert joined == {
        "master_address": "192.0.2.1", "master_port": 4711, "world_size": 2, "rank_offset": 1, "packed": True,
        "packed_buffer_size_bytes": 256 * 2**20, "packed_num_buffers": 2,
    }  # fmt: skip
    weights = load_file(model / "model.safetensors")
    assert described == {
        "names": sorted(weights),
        "dtype_names": ["float32"] * len(weights),
        "shapes": [list(weights[name].shape) for name in sorted(weights)],
    }


def fields(module: str, name: str) -> list[str]:
    """Of a dataclass of vLLM's, from its source: importing it takes many seconds."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(folder) / "distributed" / "weight_transfer" / f"{module}.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


async def test_this_vllm_knows_what_it_is_told(fake: Any, model: Path) -> None:
    """No GPU has run it."""
    workers = Workers(fake, "nccl", Engine())
    await (await attached(fake, model, Recorder(), "nccl")).update(model / "model.safetensors", 1)
    joined, described = workers.told
    assert joined.keys() <= {*fields("nccl_common", "NCCLWeightTransferInitInfo")}
    assert [*described] == fields("nccl_engine", "NCCLWeightTransferUpdateInfo")
    del joined["rank_offset"]
    assert fields("nccl_engine", "NCCLTrainerInitInfo") == ["backend", *joined]


async def test_nccl_without_cuda_is_refused_at_the_start(fake: Any, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_transfer = 'nccl' needs a CUDA device.*'gloo'.*'file'"):
        await attached(fake, model, backend="nccl")
    transfer = OverNetwork("nccl", Recorder(), 30)
    owned = OwnedVLLM(model, PolicyServerConfig(device="cpu"), transfer, log=tmp_path / "log")
    with pytest.raises(ConfigError, match="needs a CUDA device for vLLM"):
        await owned.start()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("way", "backend"), [("gloo", "lightning_gloo"), ("nccl", "nccl")])
def test_how_weights_come_over_the_network(way: str, backend: str) -> None:
    config, chosen = PolicyServerConfig(), Chosen("float32", 300.0)
    transfer = OverNetwork(way, LocalSender(), 30)
    args = server_args(Path("/m"), config, chosen, device="cuda", names=["p"], port=1, transfer=transfer)
    assert json.loads(args[args.index("--weight-transfer-config") + 1]) == {"backend": backend}
    assert args.count("--worker-extension-cls") == 1
    module, _, name = args[args.index("--worker-extension-cls") + 1].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert "--weight-transfer-config" not in server_args(Path("/m"), config, chosen, device="cpu", names=["p"], port=1)


def test_a_sender_that_was_started_again_says_so(tmp_path: Path) -> None:
    with pytest.raises(PolicyServerError, match=r"sending weights failed: .*was started again, and is in no group"):
        LocalSender().send([tmp_path / "file"])


TENSORS = {
    "matrix": torch.arange(600.0).reshape(20, 30).t(),
    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "numbers": torch.arange(7),
    "nothing": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
}
SPECS = [Spec(name, value.dtype, tuple(value.shape)) for name, value in TENSORS.items()]


@pytest.mark.parametrize("piece", [64, 64 * 2**20])
def test_two_receivers_get_the_same_bytes_however_they_are_cut(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(links, "PIECE_BYTES", piece)
    door = Door("127.0.0.1", 3, 30.0)
    found: dict[int, dict[str, torch.Tensor]] = {}

    def receive(rank: int) -> None:
        found[rank] = dict(join(door.meeting, rank).receive(SPECS))

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    door.enter().send(TENSORS.values(), SPECS)
    for thread in threads:
        thread.join()
    for own in found.values():
        assert own.keys() == TENSORS.keys()
        assert all(torch.equal(value, TENSORS[name]) for name, value in own.items())


@pytest.fixture
def pair() -> tuple[GlooGroup, GlooGroup]:
    door, joined = Door("127.0.0.1", 2, 0.3), list[GlooGroup]()
    thread = threading.Thread(target=lambda: joined.append(join(door.meeting, 1)))
    thread.start()
    sender = door.enter()
    thread.join()
    return sender, joined[0]


def test_who_is_kept_waiting_and_who_was_left_hear_of_it(pair: tuple[GlooGroup, GlooGroup]) -> None:
    sender, receiver = pair
    with pytest.raises(PolicyServerError, match=r"the connection broke: .*Timed out waiting 300ms"):
        list(receiver.receive(SPECS))
    receiver.leave()
    with pytest.raises(PolicyServerError, match="the connection broke"):
        sender.send(TENSORS.values(), SPECS)
    with pytest.raises(PolicyServerError, match="the group was left"):
        list(receiver.receive(SPECS))


def test_the_extension_tells_the_group_and_lets_only_the_owner_begin() -> None:
    left: list[bool] = []
    engine = SimpleNamespace(problem="it broke", shutdown=lambda: left.append(True))
    worker = Worker(SimpleNamespace(backend="lightning_gloo"), engine)
    assert worker.lightning_transfer() == {"backend": "lightning_gloo", "group": "", "problem": "it broke"}
    worker.lightning_group("word")
    assert worker.lightning_transfer()["group"] == "word"
    worker.lightning_claim("mine")
    assert worker.lightning_expect("another's") == {"owner": "mine"}
    assert worker.lightning_attach()["version"] == 0
    worker.lightning_expect("mine")
    assert worker.lightning_attach()["version"] is None
    worker.lightning_leave()
    assert (worker.lightning_transfer()["group"], left) == ("", [True])
    assert Worker(None, None).lightning_transfer()["backend"] == ""


def test_the_receiver_raises_nothing_and_leaves_the_group_of_another_trainer_alone(
    receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one of several workers raised would leave the others' answers to be taken for those of later calls."""
    monkeypatch.setattr(links, "JOIN_SECONDS", 0.1)
    engine = receiver.GlooReceiver()
    worker = Worker(SimpleNamespace(backend="lightning_gloo"), engine)

    def problem() -> str:
        return str(worker.lightning_transfer()["problem"])

    engine.init_transfer_engine(engine.parse_init_info({"claim": ""}))
    assert "nobody has attached" in engine.problem
    worker.lightning_claim("mine")
    place = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "seconds": 1.0, "group": "ours"}
    engine.init_transfer_engine({"claim": "mine", "colour": "red"})
    assert "colour" in problem()
    engine.init_transfer_engine({**place, "claim": "mine"})
    assert "127.0.0.1:1 cannot be reached" in problem()
    told = {"names": [], "dtype_names": [], "shapes": [], "group": "", "claim": "mine"}
    engine.update_weights(told)
    assert "is in no group" in problem()
    engine.update_weights({"names": [], "claim": "mine"})
    assert "TypeError" in problem()

    left: list[bool] = []
    engine._group, engine.lightning_state.group = SimpleNamespace(leave=lambda: left.append(True)), "ours"
    engine.init_transfer_engine({**place, "group": "theirs", "claim": "theirs"})
    engine.update_weights({**told, "group": "theirs", "claim": "theirs"})
    assert (worker.lightning_transfer()["group"], left) == ("ours", [])
    engine.update_weights({**told, "group": "ours", "claim": "theirs"})
    assert ("another trainer's" in problem(), worker.lightning_transfer()["group"], left) == (True, "", [True])


def test_over_nccl_what_lies_open_is_closed_before_the_next_weights_come() -> None:
    engine = Engine()
    worker = Worker(SimpleNamespace(backend="nccl"), engine)
    assert worker.lightning_expect("") == {"version": None}
    assert engine.finished == 0, "nothing was ever begun"
    worker.start_weight_update()
    engine.update_weights = lambda told: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        worker.update_weights({})
    worker.lightning_expect("")
    assert (engine.finished, worker._weight_update_active) == (1, False), (
        "vLLM's flag is gone, the layers are still open"
    )
    worker.start_weight_update()
    engine.finish_weight_update = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    assert "ZeroDivisionError" in str(worker.lightning_expect("")["error"])
    worker.start_weight_update()


async def test_answers_of_another_call_are_told_from_those_that_were_asked_for(fake: Any, model: Path) -> None:
    workers = Workers(fake, "lightning_gloo", Engine())
    server = await attached(fake, model)
    workers.worker.lightning_transfer = lambda: {"version": 0}  # type: ignore[method-assign]
    with pytest.raises(PolicyServerError, match=r"without backend: .*late by one.* start it again"):
        await server.update(model / "model.safetensors", 1)
