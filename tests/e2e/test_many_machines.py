"""Servers, clients and a trainer in processes of their own, over one database: whichever is killed, the run goes on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from lightning.config import Config
from lightning.gateway import Upstream
from lightning.gateway.stages import NO_LINE
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.trainer.training_data import all_rollouts
from lightning.types import LLM, CallStatus, Lease, Rollout, Run, Status, Task
from lightning_server.client_agents import ClientAgents
from lightning_server.fleet.owner import Owner
from lightning_server.remote_runner import RemoteRunner

from tests.servers.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = """
import openai

def agent(task, llm):
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        for turn in range(3):
            messages = [{"role": "user", "content": f"{task.input}, turn {turn}"}]
            client.chat.completions.create(model=llm.model, messages=messages)
    return 1.0
"""


@dataclass
class Processes:
    """What a test has started; everything ends with it."""

    folder: Path
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning", *arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, env={**os.environ, **env},
                start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def said(self, name: str, pattern: str, seconds: float = 300) -> str:
        """The first group of a pattern in what a process says, as soon as it has said it."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.log(name).read_text())) is None:
            assert time.monotonic() < deadline, self.log(name).read_text()
            time.sleep(0.1)
        return found[1]

    def end(self) -> None:
        left = []
        for process in self.running:
            if process.poll() is None:
                left += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                process.kill()
                process.wait()
        for one in left:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=60)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    (tmp_path / "an_agent.py").write_text(AGENT)
    yield made
    made.end()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as resources:
        if request.param == "sqlite":
            yield f"sqlite:///{tmp_path / 'shared.db'}"
        else:
            yield resources.enter_context(PostgresServer()).url


@asynccontextmanager
async def training(url: str, count: int) -> AsyncIterator[tuple[Store, ClientAgents, list[Rollout]]]:
    """A trainer's part without its engine: a policy server that every server learns of, and rollouts to run."""
    async with FakeVLLM(default=Reply("yes", delay=0.15)) as fake:
        store = plugins().store(url)
        await store.open()
        await store.put_run(Run("run", "run"))
        owner = Owner(store, "run")
        await owner.open([Upstream(fake.url, fake.model)], 0)
        rollouts = [Rollout(f"run/{n}", "run", Task(n), "g", index=n, max_attempts=4) for n in range(count)]
        await store.create_rollouts(rollouts)
        agents = ClientAgents(store, "run", RemoteRunner(), Config().runner, _never, NO_LINE)
        agents.expect(rollouts)
        try:
            yield store, agents, rollouts
        finally:
            await owner.close()
            await store.close()


def _never(lease: Lease) -> LLM:
    raise AssertionError("nothing is leased here")


async def test_a_server_and_a_client_are_killed_and_the_run_goes_on(url: str, processes: Processes) -> None:
    names = ["server-0", "server-1"]
    servers = [processes.start(name, "serve", "--store", url, "--out", "tokens") for name in names[:1]]
    urls = [processes.said("server-0", r"ready at (http://\S+)")]
    token = (processes.folder / "tokens" / "runner-token").read_text().strip()
    assert (processes.folder / "tokens" / "runner-token").stat().st_mode & 0o777 == 0o600
    servers.append(processes.start("server-1", "serve", "--store", url, "--out", "tokens"))
    urls.append(processes.said("server-1", r"ready at (http://\S+)"))
    clients = [
        processes.start(
            f"client-{n}", "runner", "an_agent:agent", "--server", ",".join(urls), "--concurrency", "4",
            "--set", "runner.lease_ttl=3", LIGHTNING_TOKEN=token,
        )
        for n in range(2)
    ]  # fmt: skip
    async with training(url, 24) as (store, agents, _):
        told: list[Rollout] = []
        killed = asyncio.create_task(_kill_after(told, 6, servers[0]))
        killed_too = asyncio.create_task(_kill_after(told, 12, clients[0]))
        async with asyncio.timeout(400):
            await agents.work(told.append)
        await asyncio.gather(killed, killed_too)
        found = await all_rollouts(store, "run")
        assert len(told) == len({one.id for one in told}) == 24, "each is told once"
        assert {one.status for one in found} == {Status.SUCCEEDED}, [one.error for one in found if one.error]
        assert any(one.attempt > 1 for one in found), "something was lost with what was killed, and made again"
        for one in found:
            calls = await store.transitions(one.id)
            assert [call.status for call in calls] == [CallStatus.OK] * 3
    clients[1].send_signal(signal.SIGTERM)
    assert clients[1].wait(120) == 0, processes.log("client-1").read_text()
    assert "succeeded" in processes.log("client-1").read_text()
    servers[1].send_signal(signal.SIGTERM)
    assert servers[1].wait(120) == 0, processes.log("server-1").read_text()


async def _kill_after(told: list[Rollout], count: int, process: subprocess.Popen[bytes]) -> None:
    await _until(lambda: len(told) >= count)
    process.kill()
    process.wait()


async def _until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(400):
        while not what():
            await asyncio.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_real_training_goes_on_when_a_server_and_a_client_are_killed(processes: Processes) -> None:
    """The README's three processes with a real vLLM, over PostgreSQL, and a fourth to lose."""
    with PostgresServer() as database:
        trainer = processes.start(
            "trainer", "demo", "tiny", "--no-pages", "--runner", "remote", "--store", database.url, "--out", "run",
            "--steps", "2", "--held-out", "8", "--set", "trainer.tasks_per_step=4",
        )  # fmt: skip
        server = processes.start("server", "serve", "--store", database.url, "--out", "tokens")
        urls = [
            processes.said("server", r"ready at (http://\S+)"),
            processes.said("trainer", r"--server (http://\S+)", seconds=300),
        ]
        token = (processes.folder / "run" / "runner-token").read_text().strip()
        clients = [
            processes.start(
                f"client-{n}", "runner", "lightning_examples.raw_python.agent:agent", "--server", ",".join(urls),
                "--concurrency", "4", "--set", "runner.lease_ttl=5", LIGHTNING_TOKEN=token,
            )
            for n in range(2)
        ]  # fmt: skip
        processes.said("trainer", r"(step +1/2)", seconds=300)
        for lost in (server, clients[0]):
            lost.kill()
            lost.wait()
        assert trainer.wait(500) == 0, processes.log("trainer").read_text()
        audit = processes.start("audit", "audit", "run")
        assert audit.wait(300) == 0, processes.log("audit").read_text()
        assert re.search(r"2 steps.*as it was trained", processes.log("audit").read_text())
        clients[1].send_signal(signal.SIGTERM)
        assert clients[1].wait(120) == 0, processes.log("client-1").read_text()
        assert "0 failed" in processes.log("client-1").read_text()


async def test_a_second_signal_ends_a_client_at_once_and_its_work_is_given_back(processes: Processes) -> None:
    url = f"sqlite:///{processes.folder / 'shared.db'}"
    began = processes.folder / "began"
    slow = (
        f"import pathlib, time\ndef agent(task, llm):\n    pathlib.Path({str(began)!r}).touch()\n    time.sleep(200)\n"
    )
    (processes.folder / "slow_agent.py").write_text(slow)
    processes.start("server", "serve", "--store", url)
    server = await asyncio.to_thread(processes.said, "server", r"ready at (http://\S+)")
    store = plugins().store(url)
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("run/0", "run", Task(0), "g", max_attempts=1)])
    fake = FakeVLLM()  # nothing is leased of a run that nobody serves
    await fake.start()
    await Owner(store, "run").open([Upstream(fake.url, fake.model)], 0)
    client = processes.start("client", "runner", "slow_agent:agent", "--server", server, "--token-file", "runner-token")
    async with asyncio.timeout(300):
        while not began.exists():  # before that the lease is given back at once, and the client ends
            await asyncio.sleep(0.1)
    client.send_signal(signal.SIGTERM)
    await asyncio.sleep(1)
    assert client.poll() is None, "its agent has runner.drain seconds"
    client.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(client.wait, 25) == 130
    found = await store.get_rollout("run/0")
    await store.close()
    await fake.close()
    assert found is not None
    assert found.status is Status.PENDING, "and the only attempt it may have is not spent"
