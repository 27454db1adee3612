"""Gateways in processes of their own: how many, which refusals, and that a killed one costs nothing that was answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from lightning.config import Config, config_model, with_settings
from lightning.errors import ConfigError, GatewayError
from lightning.gateway import Gateway, Upstream
from lightning.memory_budget import SHARE_OF_MEMORY, memory
from lightning.plugins import plugins
from lightning.store.sqlite import SqliteStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.trainer import stack as trainer_stack
from lightning.types import Lease, Rollout, Run, Task
from lightning_server import gateway_process, gateway_processes
from lightning_server.gateway_processes import Processes, processes_for

from tests.core.trainer.test_opening import House, ask

SQLITE = "sqlite:///runs/x/lightning.db"


def config(**settings: object) -> Config:
    return with_settings(Config(), {"engine.device": "cpu", **settings})


@pytest.mark.parametrize(
    ("url", "settings", "count"),
    [
        (SQLITE, {}, 0),
        (SQLITE, {"gateway.processes": 3}, 3),
        (SQLITE, {"gateway.processes": 0, "engine.device": "cuda"}, 0),
        (SQLITE, {"engine.device": "cuda"}, 2),
        ("postgresql://x/y", {"engine.device": "cuda:1"}, 2),
        ("memory://", {"engine.device": "cuda"}, 0),
        (SQLITE, {"engine.device": "cuda", "server.public_url": "https://x"}, 0),
        (SQLITE, {"engine.device": "cuda", "gateway.port": 8000}, 0),
        (SQLITE, {"engine.device": "cuda", "gateway.host": "0.0.0.0"}, 0),
    ],
)
def test_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    url: str,
    settings: dict[str, object],
    count: int,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20)), raising=False)
    assert processes_for(config(**settings), url) == count
    chosen = count and "gateway.processes" not in settings
    assert [line for line in caplog.messages if "chosen for 20 cores" in line] == caplog.messages
    assert len(caplog.messages) == bool(chosen)


@pytest.mark.parametrize(
    ("url", "settings", "why"),
    [
        ("memory://", {}, r"no other process can open the store 'memory://': use sqlite.*or set gateway.processes = 0"),
        ("https://:secret@x", {}, r"no other process can open the store 'https://\*+@x'"),
        (SQLITE, {"server.public_url": "https://x"}, "clients know one address, server.public_url"),
    ],
)
def test_a_number_that_cannot_be_met_is_refused(url: str, settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=f"gateway.processes is 2, but {why}"):
        processes_for(config(**{"gateway.processes": 2, **settings}), url)


@pytest.mark.parametrize("number", [-1, 65, "many"])
def test_a_number_that_is_none_is_refused(number: object) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.processes"):
        config(**{"gateway.processes": number})


def test_a_taken_port_is_said_and_no_other_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(GatewayError, match=rf"port {port} .*in use.*one of 1 gateway processes"):
            Processes(config(**{"gateway.port": port - 1}), SQLITE, 1)
    processes = Processes(config(**{"gateway.port": port - 1}), SQLITE, 1)
    assert [member.url for member in processes._members] == [f"http://127.0.0.1:{port}"]
    processes._forget()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with plugins().opened_store("memory://") as store:
        made = Gateway(store, [Upstream("http://127.0.0.1:1", "tiny")], Config().gateway, secret=b"s" * 32)
        yield made
        await made.close()


async def test_a_rollout_stays_with_one_process_and_rollouts_are_spread(gateway: Gateway) -> None:
    gateway.url = "http://own"
    lease = Lease(Rollout("run/0", "run", Task(0), "g", attempt=1), "w", 0.0)
    leases = [replace(lease, rollout=replace(lease.rollout, id=f"run/{number}")) for number in range(400)]
    assert {gateway.llm(each).base_url for each in leases} == {"http://own/v1"}
    gateway.addresses = ["http://a", "http://b"]
    chosen = [gateway.llm(each).base_url for each in leases]
    assert chosen == [gateway.llm(each).base_url for each in leases]
    assert min(Counter(chosen).values()) > 150


async def test_a_plugin_that_is_in_one_process_alone_is_refused_or_told(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def start(self: gateway_processes._Member) -> None:
        self.stands = [*gateway_process.what_stands(gateway), "the stage other 1"]

    monkeypatch.setattr(gateway_processes._Member, "start", start)
    why = "the stage other 1 is not in both processes"
    processes = Processes(config(**{"gateway.processes": 1}), SQLITE, 1)
    with pytest.raises(GatewayError, match=f"{why}.*or set gateway.processes = 0"):
        await processes.start(gateway)
    await processes.close()
    await Processes(config(), SQLITE, 1).start(gateway)
    assert f"the trainer's process answers all calls, since {why}" in caplog.text
    assert not gateway.addresses


async def test_the_processes_divide_the_memory_for_bodies(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: gateway_processes._Member) -> None:
        self.stands = gateway_process.what_stands(gateway)

    monkeypatch.setattr(gateway_processes._Member, "start", start)
    for asked, each in ((1 << 30, 1 << 28), (1 << 20, 1 << 20), (None, memory() // SHARE_OF_MEMORY // 4)):
        processes = Processes(config(**{"gateway.limits.body_memory": asked}), SQLITE, 4)
        await processes.start(gateway)
        given = [config_model().model_validate(member.given["config"]) for member in processes._members]
        assert [one.gateway.limits.body_memory for one in given] == [each] * 4
        processes._forget()


async def test_the_same_stands_in_a_gateway_that_has_no_policy_of_its_own(gateway: Gateway) -> None:
    async with plugins().opened_store("memory://") as store:
        theirs = Gateway(store, [], Config().gateway, secret=b"s" * 32, shared=True)
        assert gateway_process.what_stands(theirs) == gateway_process.what_stands(gateway)
        await theirs.close()


async def test_whatever_a_process_prints_is_read_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Or it would wait for ever for somebody who reads on, with all its calls."""
    caplog.set_level(logging.INFO)
    processes = Processes(config(), SQLITE, 1)
    (member,) = processes._members
    said = asyncio.StreamReader(limit=gateway_processes.LONGEST_LINE)
    text = "\N{GRINNING FACE}" * gateway_process.LONGEST_TEXT
    longest = json.dumps({"level": logging.ERROR, "logger": "lightning", "text": text}).encode()
    too_long = b"x" * (gateway_processes.LONGEST_LINE + 1)
    for line in (b"5", b"{}", b"null", too_long, longest, b'{"stands": ["the stage x 1"]}'):
        said.feed_data(line + b"\n")
    said.feed_eof()
    await member._read(SimpleNamespace(stdout=said))  # type: ignore[arg-type]
    assert member.stands == ["the stage x 1"]
    assert f"{text} (gateway process 1)" in caplog.messages
    assert [message for message in caplog.messages if len(message) < 100] == [
        "gateway process 1: 5",
        "gateway process 1: {}",
        "gateway process 1: null",
        f"gateway process 1 printed more than {gateway_processes.LONGEST_LINE} bytes without an end of line",
    ]
    processes._forget()


async def test_a_process_that_never_stays_up_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Dead:
        async def wait(self) -> int:
            return -signal.SIGKILL

    async def start(self: gateway_processes._Member) -> None:
        self._process = Dead()  # type: ignore[assignment]

    monkeypatch.setattr(gateway_processes._Member, "start", start)
    monkeypatch.setattr(gateway_processes, "STEADY_SECONDS", float("inf"))
    processes = Processes(config(), SQLITE, 1)
    await start(processes._members[0])
    with pytest.raises(GatewayError, match="gateway process 1 ended 6 times in a row, at last with signal SIGKILL"):
        await processes.attend()
    assert caplog.text.count("ended with signal SIGKILL and is started again") == 5
    processes._forget()


# with real processes ----------------------------------------------------------------------------------------------
@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[House]:
    async with AsyncExitStack() as resources:
        fake = await resources.enter_async_context(FakeVLLM(default=Reply("yes", delay=0.05)))
        url = f"sqlite:///{tmp_path / 'run.db'}"
        store = await resources.enter_async_context(plugins().opened_store(url))
        assert isinstance(store, SqliteStore)
        await store.put_run(Run("run", "run"))
        made = House(resources, fake, store, url)
        monkeypatch.setattr(trainer_stack, "make_policy_server", lambda *_, **__: made.policy)
        yield made


@pytest.mark.slow
async def test_two_processes_answer_and_a_killed_one_comes_back(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Agents that send a lost call again get every answer; each answer that they got is stored; versions are exact."""
    stack = await house.open(tmp_path, restores=False, **{"gateway.processes": 2})
    assert len(stack.gateway.addresses) == 2
    rollouts = [Rollout(f"run/{number}", "run", Task(0), "g", index=number) for number in range(12)]
    await house.store.create_rollouts(rollouts)
    leases = await house.store.lease("run", "client", limit=12)
    llms = {lease.rollout.id: stack.llm(lease) for lease in leases}
    assert {llm.base_url for llm in llms.values()} == {f"{url}/v1" for url in stack.gateway.addresses}
    assert stack.gateways is not None
    victim = stack.gateways._members[0]._process  # type: ignore[attr-defined]
    got: dict[str, list[str]] = {name: [] for name in llms}

    async def agent(name: str) -> None:
        llm = llms[name]
        headers = {"authorization": f"Bearer {llm.api_key}"}
        body = {"model": llm.model, "messages": [{"role": "user", "content": name}]}
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            while len(got[name]) < 8:
                try:
                    answer = await http.post(f"{llm.base_url}/chat/completions", json=body)
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
                    continue
                assert answer.status_code == 200, answer.text
                got[name].append(answer.json()["id"])
                if sum(map(len, got.values())) == 20:
                    os.kill(victim.pid, signal.SIGKILL)

    async with asyncio.timeout(120):
        await asyncio.gather(*(agent(name) for name in llms))
    assert "gateway process 1 ended with signal SIGKILL and is started again" in caplog.text
    async with asyncio.timeout(60):
        await stack.update(Path("good"), 1)
        assert [await ask(llm) for llm in llms.values()] == [200] * 12
    for name, ids in got.items():
        stored = await house.store.transitions(name)
        answered = [call.id for call in stored if call.status.answered]
        assert [each for each in answered if each in ids] == ids, "what an agent got was durable first"
        # The call after the update, and one that may have been durable when the process was killed before its last byte.
        assert len(answered) - len(ids) in (1, 2)
        assert [call.version for call in stored if call.id in ids] == [0] * 8
        assert [call.version for call in stored][-1] == 1
        assert [call.seq for call in stored] == list(range(len(stored)))
    assert stack._supervisor is not None
    assert not stack._supervisor.done()


@pytest.mark.slow
async def test_a_process_that_cannot_open_the_store_says_why(tmp_path: Path, gateway: Gateway) -> None:
    processes = Processes(config(), f"sqlite:///{tmp_path / 'none' / 'run.db'}", 1)
    with pytest.raises(GatewayError, match=r"gateway process 1 did not start: .*run\.db"):
        await processes.start(gateway)
    await processes.close()
