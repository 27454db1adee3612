"""Real vLLMs on the nodes of a real Ray, all of one machine: a node dies, and a trainer is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.config import config_model, with_settings
from lightning.policy_server.auto_settings import Demand
from lightning.policy_server.vllm_server import make_policy_server
from lightning_ray.vllm_on_ray import VLLMOnRay

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # Ray lets go of its servers' objects before these have ended.
    pytest.mark.filterwarnings(r"ignore:subprocess \d+ is still running:ResourceWarning"),
]
TRAINER = """
import asyncio, sys
from pathlib import Path
from tests.plugins.ray.test_vllm_nodes import server_of

async def main():
    server = server_of(*map(Path, sys.argv[1:3]), sys.argv[3])
    await server.start()
    print(server.alias, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def server_of(model: Path, log: Path, address: str, servers: int = 1) -> VLLMOnRay:
    settings = {
        "placement": "ray",
        "ray.address": address,
        "device": "cpu",
        "weight_transfer": "gloo",
        "max_model_len": 64,
    }
    config = with_settings(config_model()(), {f"policy_server.{name}": value for name, value in settings.items()})
    made = make_policy_server(model, config, log=log, demand=Demand(1, servers=servers))
    assert isinstance(made, VLLMOnRay)
    return made


def running(alias: str) -> list[int]:
    """The processes of the vLLM that was started under this name."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if alias in (one.info["cmdline"] or ())]


async def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        await asyncio.sleep(0.2)
    return holds()


async def test_a_vllm_on_each_node_of_which_one_dies_and_then_the_trainer(tmp_path: Path, model: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1))}
        servers = [server_of(model, tmp_path / f"vllm-{number}.log", cluster.address, 2) for number in range(2)]
        try:
            await asyncio.gather(*(server.start() for server in servers))
            at = [(await server._cluster.answer(server._actor.look.remote("", "", ""), 60))[1] for server in servers]  # type: ignore[union-attr]
            assert set(at) == nodes.keys(), "one on each"
            logs = [tmp_path / "vllm-0.log", tmp_path / "vllm-1.log"]
            assert await within(30, lambda: all("Application startup complete" in log.read_text() for log in logs))
            weights = model / "model.safetensors"
            for server in servers:
                assert (await server.update(weights, 1)).version == await server._running().attach() == 1

            first = servers[1].alias
            died = asyncio.create_task(servers[1].wait_died())
            await asyncio.to_thread(cluster.remove_node, nodes[at[1]], False)
            await asyncio.wait_for(died, 120)
            assert await within(30, lambda: not running(first))
            back = asyncio.create_task(servers[1].restart(weights, 1))
            await asyncio.sleep(3)
            assert not back.done(), "no other node has room"
            other = cluster.add_node(num_cpus=1)
            await back
            where = (await servers[1]._cluster.answer(servers[1]._actor.look.remote("", "", ""), 60))[1]  # type: ignore[union-attr]
            assert (where, await servers[1]._running().attach(), servers[1].alias == first) == (other.node_id, 1, False)
            aliases = [server.alias for server in servers]
            assert all(running(alias) for alias in aliases)
        finally:
            for server in servers:
                await server.close()
        assert not any(running(alias) for alias in aliases)

        command = [sys.executable, "-c", TRAINER, str(model), str(tmp_path / "vllm.log"), cluster.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None
            alias = (await asyncio.to_thread(trainer.stdout.readline)).strip()
            assert alias
            assert running(alias)
            trainer.send_signal(signal.SIGKILL)
        assert await within(60, lambda: not running(alias))
    finally:
        cluster.shutdown()
