"""A policy with several servers: which of them are held, what happens when one dies or refuses weights, and every token's
version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from lightning.config import Config, with_settings
from lightning.errors import PolicyServerError
from lightning.policy_server.protocol import Probe
from lightning.runner.inline import InlineRunner
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import Reply
from lightning.trainer import stack as trainer_stack
from lightning.trainer.stack import Stack, open_stack
from lightning.types import LLM, CallStatus, Rollout, Run, Task, Transition

from tests.servers.replica import Replica

TEN = Reply("a b c d e f g h i", token_delay=0.01)


@dataclass
class House:
    """An open stack over replicas, and rollouts that stay with one of them each."""

    stack: Stack
    servers: list[Replica]
    store: MemoryStore
    made: int = 0

    def llm(self, rollout: Rollout, server: int) -> LLM:
        gateway = self.stack.gateway
        return LLM(f"{gateway.url}/v1", gateway.issue(rollout.id, 1, run="run", server=server), "policy")

    async def lease(self) -> Rollout:
        self.made += 1
        await self.store.create_rollouts([Rollout(f"run/{self.made}", "run", Task("q"), "g")])
        (lease,) = await self.store.lease("run", "worker")
        return lease.rollout

    async def ask(self, server: int) -> Transition:
        """A call of a rollout whose home is this server, and how it was recorded."""
        rollout = await self.lease()
        await ask(self.llm(rollout, server))
        (call,) = await self.store.transitions(rollout.id)
        return call

    def truth(self, call: Transition) -> list[int]:
        """The versions of the servers' weights that really sampled a call's tokens."""
        name = call.id.removeprefix("chatcmpl-")
        (found,) = [server.truth[name] for server in self.servers if name in server.truth]
        return found


def believed(call: Transition) -> list[int]:
    places = range(len(call.response_ids))
    return [[run.version for run in call.versions if run.start <= place][-1] for place in places]


async def ask(llm: LLM) -> int:
    body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(timeout=30) as http:
        return (await http.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)).status_code


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def open_house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as resources:

        async def make(count: int = 2, **settings: Any) -> House:
            store = MemoryStore()
            await store.open()
            resources.push_async_callback(store.close)
            await store.put_run(Run("run", "run"))
            servers = [Replica(lambda body: TEN, load_seconds=0.05, start_seconds=0.05) for _ in range(count)]
            left = iter(servers)
            monkeypatch.setattr(trainer_stack, "make_policy_server", lambda *_, **__: next(left))
            monkeypatch.setattr(trainer_stack, "settings_of_servers", lambda config: [config] * count)
            config = with_settings(Config(), {name.replace("__", "."): value for name, value in settings.items()})
            stack = await open_stack(
                resources,
                run=Run("run", "run"),
                config=config,
                folder=tmp_path,
                model=tmp_path,
                store=store,
                runner=InlineRunner(lambda task, llm: 1.0, config.runner),
                restores=False,
            )
            return House(stack, servers, store)

        yield make


def weights(folder: Path, version: int) -> Path:
    file = folder / f"version-{version}"
    file.touch()
    return file


@pytest.mark.parametrize("staleness", [0, 1])
async def test_every_token_has_the_version_of_its_server_over_updates(
    open_house: Callable[..., Any], tmp_path: Path, staleness: int
) -> None:
    """With staleness one server is updated after the other, so that servers have different versions for a while."""
    house = await open_house(trainer__max_staleness=staleness)
    calls, mixed = list[Transition](), False

    async def agent(server: int) -> None:
        while house.stack.version < 4:
            calls.append(await house.ask(server))

    agents = [asyncio.create_task(agent(number % 2)) for number in range(6)]
    for version in range(1, 5):
        updating = asyncio.create_task(house.stack.update(weights(tmp_path, version), version))
        while not updating.done():
            mixed |= house.servers[0].version != house.servers[1].version
            await asyncio.sleep(0.005)
        assert len(await updating) == 2
    await asyncio.gather(*agents)
    assert {call.status for call in calls} == {CallStatus.OK}
    assert [believed(call) for call in calls] == [house.truth(call) for call in calls]
    assert any(len(call.versions) > 1 for call in calls), "no call was split"
    assert [server.version for server in house.servers] == [4, 4]
    assert mixed or not staleness


async def test_while_one_server_is_updated_the_other_goes_on(open_house: Callable[..., Any], tmp_path: Path) -> None:
    house = await open_house(trainer__max_staleness=1)
    for server in house.servers:
        server._load = 0.3
    gate = house.stack.gateway.own.gate
    updating = asyncio.create_task(house.stack.update(weights(tmp_path, 1), 1))
    await until(lambda: gate.closes(0))
    waits = asyncio.create_task(house.ask(0))
    call = await house.ask(1)
    assert (gate.closes(0), gate.closes(1), waits.done()) == (True, False, False)
    assert {run.version for run in call.versions} == {0}
    await updating
    assert {run.version for run in (await waits).versions} == {1}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("how", ["clean", "lost"])
async def test_a_server_that_refuses_what_the_other_takes_is_started_again_with_it(
    open_house: Callable[..., Any], tmp_path: Path, how: str, staleness: int
) -> None:
    house = await open_house(trainer__max_staleness=staleness)
    first, second = house.servers
    asking = asyncio.create_task(house.ask(1))
    await until(lambda: second.requests)
    second.refuses = how
    assert len(await house.stack.update(weights(tmp_path, 1), 1)) == 1
    await until(lambda: house.stack.complete and house.stack.restarts)
    assert (second.starts, first.starts, second.version, house.stack.restarts) == (2, 1, 1, 1)
    call = await asking
    assert call.status is not CallStatus.OK or believed(call) == house.truth(call)
    assert {run.version for run in (await house.ask(1)).versions} == {1}
    assert second.requests > 1


async def test_weights_that_no_server_takes_are_an_error_and_nothing_is_started_again(
    open_house: Callable[..., Any], tmp_path: Path
) -> None:
    house = await open_house()
    for server in house.servers:
        server.refuses = "clean"
    with pytest.raises(PolicyServerError, match="the file does not fit"):
        await house.stack._update(weights(tmp_path, 1), 1, None)
    assert (house.stack.version, house.stack.restarts) == (0, 0)
    assert {run.version for run in (await house.ask(1)).versions} == {0}


async def test_a_dead_servers_rollouts_go_to_the_other_and_it_comes_back_with_the_newest_weights(
    open_house: Callable[..., Any], tmp_path: Path
) -> None:
    house = await open_house()
    first, second = house.servers
    second._start = 0.4
    old = weights(tmp_path, 1)
    await house.stack.update(old, 1)
    await second.kill()
    await until(lambda: not house.stack.complete)
    moved = await house.ask(1)
    assert (set(believed(moved)), first.requests) == ({1}, 1)
    await house.stack.update(weights(tmp_path, 2), 2)  # does not wait for the dead one
    assert (second.starts, house.stack.complete) == (1, False)
    await until(lambda: house.stack.complete)
    assert [server.version for server in house.servers] == [2, 2]
    home = await house.ask(1)
    assert (set(believed(home)), believed(home), second.starts, second.requests) == ({2}, house.truth(home), 2, 1)


async def test_calls_wait_while_all_servers_are_dead(open_house: Callable[..., Any]) -> None:
    house = await open_house()
    for server in house.servers:
        server._start = 0.3
        await server.kill()
    await until(lambda: house.stack.gateway.own.gate.closed)
    assert (await house.ask(0)).status is CallStatus.OK
    assert [server.starts for server in house.servers] == [2, 2]


async def test_each_server_is_probed(open_house: Callable[..., Any], tmp_path: Path) -> None:
    house = await open_house()
    house.servers[1].prober = lambda probe: [-9.0]
    updates = await house.stack.update(weights(tmp_path, 1), 1, [Probe([1, 2], [0.0, -1.0])])
    assert [[*update.served] for update in updates] == [[[-1.0]], [[-9.0]]]


async def test_a_step_on_a_gpu_of_theirs_begins_when_all_sleep_also_one_that_was_started_again(
    open_house: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await open_house(policy_server__device="cuda")
    told: list[tuple[str, int]] = []

    def noting(number: int, name: str) -> None:
        async def note() -> None:
            if house.stack._served[number].away:
                raise PolicyServerError("nobody listens")
            told.append((name, number))

        monkeypatch.setattr(house.servers[number], name, note, raising=False)

    for number in (0, 1):
        noting(number, "sleep")
        noting(number, "wake")
    monkeypatch.setattr(house.servers[1], "_start", 0.3)
    await house.servers[1].kill()
    await until(lambda: not house.stack.complete)
    async with asyncio.timeout(30), house.stack.resting():
        assert sorted(told) == [("sleep", 0), ("sleep", 1)]
    assert sorted(told[2:]) == [("wake", 0), ("wake", 1)]


async def test_calls_that_wait_for_an_update_go_to_another_server_if_theirs_dies_in_it(
    open_house: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await open_house(trainer__max_staleness=1)
    first, second = house.servers
    first._load = 0.3
    starts = asyncio.Event()
    restart = first.restart

    async def late(*asked: Any) -> None:
        await starts.wait()
        await restart(*asked)

    monkeypatch.setattr(first, "restart", late)
    gate = house.stack.gateway.own.gate
    updating = asyncio.create_task(house.stack.update(weights(tmp_path, 1), 1))
    await until(lambda: gate.closes(0))
    waits = asyncio.create_task(house.ask(0))
    await until(lambda: gate.waiting)
    await first.kill()
    async with asyncio.timeout(20):
        call = await waits
    assert call.status is CallStatus.OK
    assert len(second.fake.requests) == 1
    starts.set()
    await updating
    await until(lambda: house.stack.complete)
