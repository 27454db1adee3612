"""The pods' command is one that there is: what the runner puts into a cluster is started here, against a real server."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from lightning.config.plugin_settings import Config, RunnerConfig
from lightning.errors import RunnerError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.identity import gateway_secret
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer import stack
from lightning.trainer.trainer import Trainer
from lightning.types import Rollout, Run, Scope, Status, Task
from lightning_k8s import runner as runner_module
from lightning_k8s.config import KubernetesConfig
from lightning_k8s.health import Pace
from lightning_k8s.runner import KubernetesRunner
from lightning_server.auth import issue_token
from lightning_server.control import Control
from lightning_server.fleet.owner import Owner
from lightning_server.protocol import Site
from lightning_server.tokens import put_token

pytestmark = pytest.mark.slow

AGENT = """
import json, os, time, urllib.request

def agent(task, llm):
    assert "LIGHTNING_TOKEN" not in os.environ, "not for agents"
    body = json.dumps({"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}]}).encode()
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{llm.base_url}/chat/completions", body, headers)).read()
    if not os.path.exists(os.environ["SEEN"]):  # the first one waits to be killed
        open(os.environ["SEEN"], "x").close()
        time.sleep(60)
    return 1.0
"""


class Kubelet:
    """Runs the client of each pod as a process of this machine."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def __call__(self, pod: dict[str, Any]) -> None:
        self.tasks.append(asyncio.create_task(self.serve(pod)))

    async def serve(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        (container,) = pod["spec"]["containers"]
        env = dict(os.environ, PYTHONPATH=str(self.folder))
        for item in container["env"]:
            source = item.get("valueFrom", {}).get("secretKeyRef")
            if source:
                data = self.cluster.objects["secrets"][source["name"]]["data"][source["key"]]
                env[item["name"]] = base64.b64decode(data).decode()
            else:
                env[item["name"]] = item["value"]
        assert container["command"][0] == "lightning"
        process = self.running[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *container["command"], env=env
        )
        self.cluster.say(name, self.cluster.RUNNING)
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
            del self.running[name]
        if name in self.cluster.objects["pods"]:
            self.cluster.say(name, self.cluster.ended(abs(code)))

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(FakeVLLM())
        store = MemoryStore()
        await store.open()
        resources.push_async_callback(store.close)
        await store.put_run(Run("run-1", "run-1"))
        await Owner(store, "run-1").open([Upstream(fake.url, fake.model)], 0)
        gateway = Gateway(store, [], Config().gateway, secret=await gateway_secret(store), shared=True)
        resources.push_async_callback(gateway.close)
        control = Control(store, gateway)
        resources.push_async_callback(control.close)
        await gateway.start()
        token, plain = issue_token(Scope.RUNNER)
        await put_token(store, token)
        yield Site(control.url, plain, "run-1", store)


@pytest.fixture
async def kubelet(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kubelet]:
    monkeypatch.setattr(runner_module, "leads_to_itself", lambda url: False)  # these pods are on this machine
    (tmp_path / "their_agents.py").write_text(AGENT)
    cluster.kubelet = Kubelet(cluster, tmp_path)
    yield cluster.kubelet
    await cluster.kubelet.close()


def settings(cluster: Any, folder: Path, **k8s: Any) -> RunnerConfig:
    place = {"image": "agents:1", "agent": "their_agents:agent", "kubeconfig": cluster.kubeconfig(folder)}
    env = {"SEEN": str(folder / "seen")}
    return RunnerConfig(
        concurrency=2,
        lease_ttl=2.0,
        drain=0.0,
        timeout=30.0,
        adapters=(),
        k8s=KubernetesConfig(**place, env=env, **k8s),
    )


async def test_a_job_that_is_killed_is_made_again(cluster: Any, kubelet: Kubelet, site: Site, tmp_path: Path) -> None:
    await site.store.create_rollouts([Rollout(f"run-1/{i}", "run-1", Task(i), "g", max_attempts=5) for i in range(2)])
    runner = KubernetesRunner(lambda task, llm: 0.0, settings(cluster, tmp_path, mode="job"), Pace(look=0.2, pause=0.1))
    await runner.start()
    attending = asyncio.create_task(runner.attend(site))

    async def until(true: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(90):
            while not await true():
                if attending.done():
                    attending.result()
                await asyncio.sleep(0.1)

    async def seen() -> bool:
        return (tmp_path / "seen").exists()

    async def ended() -> bool:
        return len((await site.store.list_rollouts("run-1", status=Status.SUCCEEDED)).items) == 2

    try:
        await until(seen)
        for process in list(kubelet.running.values()):  # the node goes away
            process.kill()
        await until(ended)
    finally:
        attending.cancel()
        await asyncio.gather(attending, return_exceptions=True)
        await runner.close()
    assert max(one.attempt for one in (await site.store.list_rollouts("run-1")).items) > 1
    assert sum(body["kind"] == "Job" for body in cluster.made) >= 3  # every rollout once, what was killed again
    assert not any(cluster.objects.values())


class FakePolicy:
    """A scripted vLLM as a trainer's policy server."""

    version = 0

    def __init__(self) -> None:
        self.fake = FakeVLLM()
        self.start, self.close = self.fake.start, self.fake.close

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def model(self) -> str:
        return self.fake.model

    alias, models, claim = model, (), ""

    async def wait_died(self) -> None:
        await asyncio.Event().wait()


async def test_a_trainer_has_its_agents_in_a_pool_of_pods(
    cluster: Any, kubelet: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "make_policy_server", lambda *_, **__: FakePolicy())
    (tmp_path / "seen").touch()  # nobody is to be killed here
    model = make_tiny_model(tmp_path / "model")
    config = Config(runner=settings(cluster, tmp_path))
    trainer = Trainer(model, runner="k8s", out=tmp_path / "run", config=config, progress=False)
    report = await asyncio.to_thread(trainer.dev, None, [1, 2, 3])
    assert [row.reward for row in report.rows] == [1.0] * 3
    assert sum(body["kind"] == "Pod" for body in cluster.made) == 1
    assert not any(cluster.objects.values())

    # what no cluster can cure ends the trainer, with the cluster's words
    cluster.always_refuse.append(("POST", "pods", 403, "violates PodSecurity"))
    with pytest.raises(RunnerError, match="violates PodSecurity"):
        await asyncio.to_thread(trainer.dev, None, [1])
