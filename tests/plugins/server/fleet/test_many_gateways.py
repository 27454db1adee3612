"""Several gateways over one store, before one policy: whichever an agent asks, its calls are recorded as they were sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import httpx
import pytest
from lightning.asyncio_utils import end
from lightning.config.sections import GatewayConfig
from lightning.errors import GatewayError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.identity import gateway_secret
from lightning.gateway.policy import UNKNOWN
from lightning.instrument.context import root_span_id, trace_id_of
from lightning.plugins import plugins
from lightning.policy_server.protocol import Update
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import LLM, CallStatus, Rollout, Run, Task, Transition, VersionRun
from lightning_server.fleet.owner import Owner

HI = {"messages": [{"role": "user", "content": "hi there"}]}
TEN = Reply("a b c d e f g h i", token_delay=0.01)


@dataclass
class Fleet:
    """A trainer with its own gateway and policy server, and servers that have none, over one store."""

    store: MemoryStore
    fake: FakeVLLM
    owner: Owner
    trainers: Gateway
    servers: list[Gateway]
    resources: AsyncExitStack
    made: list[Rollout] = field(default_factory=list)

    async def llm(self, gateway: Gateway, run: str = "run") -> LLM:
        rollout = Rollout(f"{run}/{len(self.made)}", run, Task(len(self.made)), "g")
        self.made.append(rollout)
        await self.store.create_rollouts([rollout])
        (lease,) = await self.store.lease(run, "worker")
        return gateway.llm(lease)

    async def ask(self, llm: LLM, **asked: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        async with httpx.AsyncClient(timeout=30) as http:
            return await http.post(f"{llm.base_url}/chat/completions", json={**HI, **asked}, headers=headers)

    async def update(self, version: int) -> Update:
        """As the trainer does it."""
        async with self.owner.hold() as hold, self.trainers.hold():
            self.fake.pause()
            await asyncio.sleep(0.02)
            hold.update = Update(version, self.fake.in_flight())
            self.fake.resume()
            self.trainers.own.update(hold.update)
        return hold.update

    async def calls(self, number: int = 0) -> list[Transition]:
        return await self.store.transitions(self.made[number].id)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
async def open_server() -> AsyncIterator[Callable[..., object]]:
    async with AsyncExitStack() as resources:

        async def make(store: MemoryStore, upstreams: list[Upstream], **kwargs: object) -> Gateway:
            settings = GatewayConfig(**kwargs.pop("settings", {}))  # type: ignore[arg-type]
            secret = await gateway_secret(store)
            gateway = Gateway(store, upstreams, settings, secret=secret, shared=True, **kwargs)  # type: ignore[arg-type]
            await gateway.start()
            resources.push_async_callback(gateway.close)
            return gateway

        yield make


@pytest.fixture
async def fleet(open_server) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as resources:
        store = MemoryStore()
        await store.open()
        resources.push_async_callback(store.close)
        await store.put_run(Run("run", "run"))
        fake = await resources.enter_async_context(FakeVLLM())
        served = [Upstream(fake.url, fake.model)]
        owner = Owner(store, "run")
        await owner.open(served, 0)
        trainers = await open_server(store, served, run="run")
        servers = [await open_server(store, []) for _ in range(2)]
        yield Fleet(store, fake, owner, trainers, servers, resources)
        await owner.close()


async def test_a_server_that_knows_only_the_store_finds_the_policy(fleet):
    llm = await fleet.llm(fleet.servers[0])
    assert (await fleet.ask(llm)).status_code == 200
    await fleet.update(1)
    assert (await fleet.ask(llm)).status_code == 200
    assert [call.versions for call in await fleet.calls()] == [(VersionRun(0, 0),), (VersionRun(0, 1),)]


async def test_calls_in_flight_at_every_server_are_split_where_vllm_was_frozen(fleet):
    gateways = [fleet.trainers, *fleet.servers]
    llms = [await fleet.llm(gateway) for gateway in gateways]
    fleet.fake.default = TEN
    asking = [asyncio.create_task(fleet.ask(llm)) for llm in llms]
    await fleet.until(lambda: len(counts := fleet.fake.in_flight()) == 3 and all(counts.values()))
    update = await fleet.update(5)
    for number, asked in enumerate(asking):
        assert (await asked).status_code == 200
        (call,) = await fleet.calls(number)
        frozen = update.in_flight[call.id.removeprefix("chatcmpl-")]
        assert 0 < frozen < len(call.response_ids)
        assert call.versions == (VersionRun(0, 0), VersionRun(frozen, 5))
        assert call.status is CallStatus.OK


async def test_policy_servers_are_updated_one_after_another(fleet, open_server):
    """A gateway elsewhere splits the calls at the server that was updated, and no others."""
    second = await fleet.resources.enter_async_context(FakeVLLM())
    served = [Upstream(fleet.fake.url, fleet.fake.model), Upstream(second.url, second.model)]
    await fleet.owner.serve(served, 0)
    gateway, fakes = fleet.servers[0], (fleet.fake, second)
    policy = gateway._policies.of("run")
    await fleet.until(lambda: len(policy.pool.slots) == 2)
    llms: dict[int, tuple[LLM, int]] = {}
    while len(llms) < 2:  # a rollout that stays with each server
        llm = await fleet.llm(gateway)
        number = gateway._signer.verify(llm.api_key).server  # chosen by the plugin `replicas`
        llms.setdefault(number, (llm, len(fleet.made) - 1))
    for fake in fakes:
        fake.default = TEN
    asking = [asyncio.create_task(fleet.ask(llms[number][0])) for number in (0, 1)]
    await fleet.until(lambda: all(max([0, *fake.in_flight().values()]) >= 3 for fake in fakes))
    async with fleet.owner.hold(served[0]) as hold:
        for fake in fakes:
            fake.pause()
        await asyncio.sleep(0.02)
        hold.update = Update(1, fleet.fake.in_flight())
        for fake in fakes:
            fake.resume()
    for answer in asyncio.as_completed(asking):
        assert (await answer).status_code == 200
    for number in (0, 1):
        assert (await fleet.ask(llms[number][0])).status_code == 200
    joined = await fleet.llm(fleet.servers[1])
    assert (await fleet.ask(joined)).status_code == 200  # a gateway that comes later knows each server's version, too
    assert [slot.version for slot in fleet.servers[1]._policies.of("run").pool.slots] == [1, 0]
    unbegun = asyncio.create_task(fleet.ask(llms[0][0]))  # at the first server while the second is updated
    await fleet.until(lambda: fleet.fake.in_flight())
    async with fleet.owner.hold(served[1]) as hold:
        hold.update = Update(2, second.in_flight())
    assert (await unbegun).status_code == 200
    for number in (0, 1):
        assert (await fleet.ask(llms[number][0])).status_code == 200
    found = [await fleet.calls(llms[number][1]) for number in (0, 1)]
    at_first, at_second = ([[run.version for run in call.versions] for call in calls] for calls in found)
    assert (at_first, at_second) == ([[0, 1], [1], [1], [1]], [[0], [0], [2]])
    with pytest.raises(GatewayError, match="is none of the policy servers of run run"):
        async with fleet.owner.hold(Upstream("http://127.0.0.1:1", "m")) as hold:
            hold.update = Update(3)


async def test_one_server_of_two_is_held_or_away_and_the_other_goes_on(fleet):
    """At a gateway elsewhere: calls of the held server wait, those of one that is away go to the other."""
    second = await fleet.resources.enter_async_context(FakeVLLM())
    served = [Upstream(fleet.fake.url, fleet.fake.model), Upstream(second.url, second.model)]
    await fleet.owner.serve(served, 0)
    gateway = fleet.servers[0]
    policy = gateway._policies.of("run")
    await fleet.until(lambda: len(policy.pool.slots) == 2)
    llms = {}
    while len(llms) < 2:
        llm = await fleet.llm(gateway)
        llms[gateway._signer.verify(llm.api_key).server] = llm
    async with fleet.owner.hold(served[1]) as hold:
        waits = asyncio.create_task(fleet.ask(llms[1]))
        await fleet.until(lambda: policy.gate.closes(1) and policy.gate.waiting)
        assert (await fleet.ask(llms[0])).status_code == 200
        assert not waits.done()
        assert not second.requests
        hold.update = Update(1)
    assert (await waits).status_code == 200
    await fleet.until(lambda: not policy.gate.held)
    await fleet.owner.away(served[1])
    await fleet.until(lambda: policy.pool.slots[1].vacant)
    assert not policy.gate.closed
    assert (await fleet.ask(llms[1])).status_code == 200
    assert (len(fleet.fake.requests), len(second.requests)) == (2, 1)
    async with fleet.owner.hold() as hold:  # an update of all does not reach the server that is away
        hold.update = Update(2)
    again = Upstream(second.url, "another")
    second.aliases = ("another",)
    await fleet.owner.back(served[1], again, 2)
    await fleet.until(lambda: policy.pool.slots[1].upstream == again and not policy.gate.held)
    assert [slot.version for slot in policy.pool.slots] == [2, 2]
    assert (await fleet.ask(llms[1])).status_code == 200
    assert len(second.requests) == 2
    other = fleet.servers[1]
    joined = other._policies.of("run")
    async with fleet.owner.hold(again) as hold:  # a gateway that comes during a hold sends calls to the other server
        await fleet.until(lambda: len(joined.pool.slots) == 2 and joined.gate.closes(1))
        assert not joined.gate.closed
        waits = asyncio.create_task(fleet.ask(llms[1]))
        await fleet.until(lambda: policy.gate.waiting)
        hold.away = (again,)
    assert (await waits).status_code == 200  # at the other server, too
    assert len(second.requests) == 2
    await fleet.until(lambda: joined.pool.slots[1].vacant)
    await fleet.owner.away(served[0])
    await fleet.until(lambda: joined.gate.closed)


async def test_calls_at_a_server_that_may_have_taken_weights_alone_are_of_no_known_version(fleet):
    """It took them and did not say so. Until it is started again, it goes on with its calls."""
    second = await fleet.resources.enter_async_context(FakeVLLM())
    served = [Upstream(fleet.fake.url, fleet.fake.model), Upstream(second.url, second.model)]
    await fleet.owner.serve(served, 0)
    gateway, fakes = fleet.servers[0], (fleet.fake, second)
    policy = gateway._policies.of("run")
    await fleet.until(lambda: len(policy.pool.slots) == 2)
    llms: dict[int, tuple[LLM, int]] = {}
    while len(llms) < 2:
        llm = await fleet.llm(gateway)
        llms.setdefault(gateway._signer.verify(llm.api_key).server, (llm, len(fleet.made) - 1))
    for fake in fakes:
        fake.default = TEN
    asking = [asyncio.create_task(fleet.ask(llms[number][0])) for number in (0, 1)]
    await fleet.until(lambda: all(max([0, *fake.in_flight().values()]) >= 2 for fake in fakes))
    async with fleet.owner.hold(served[1]) as hold:
        for fake in fakes:
            fake.pause()
        hold.away = (served[1],)
    await fleet.until(lambda: policy.pool.slots[1].vacant)
    for fake in fakes:
        fake.resume()
    for answer in asyncio.as_completed(asking):
        assert (await answer).status_code == 200
    (at_first,), (at_second,) = [await fleet.calls(llms[number][1]) for number in (0, 1)]
    assert (at_first.status, at_first.versions) == (CallStatus.OK, (VersionRun(0, 0),))
    assert at_second.status is not CallStatus.OK


async def test_a_server_that_was_not_restored_yet_gets_no_calls_when_another_one_was(fleet):
    """A resumed trainer updates one server after another, and before the first of these updates has named no weights."""
    second = await fleet.resources.enter_async_context(FakeVLLM())
    served = [Upstream(fleet.fake.url, fleet.fake.model), Upstream(second.url, second.model)]
    await fleet.owner.serve(served, UNKNOWN)
    gateway = fleet.servers[0]
    policy = gateway._policies.of("run")
    await fleet.until(lambda: policy.told)
    async with fleet.owner.hold(served[0]) as hold:
        hold.update = Update(7)
    await fleet.until(lambda: len(policy.pool.slots) == 2)
    assert (policy.gate.closes(0), policy.gate.closes(1), policy.gate.closed) == (False, True, False)
    async with fleet.owner.hold(served[1]) as hold:
        hold.update = Update(7)
    await fleet.until(lambda: not policy.gate.held)
    assert [slot.version for slot in policy.pool.slots] == [7, 7]


async def test_a_gateway_outlives_a_restart_that_leaves_no_server(fleet):
    """Its places are vacant then, and no server is named; the next one that is named is found."""
    llm = await fleet.llm(fleet.servers[0])
    assert (await fleet.ask(llm)).status_code == 200
    policy = fleet.servers[0]._policies.of("run")
    served = [Upstream(fleet.fake.url, fleet.fake.model)]
    await fleet.owner.away(served[0])
    await fleet.until(lambda: policy.pool.slots[0].vacant)
    await fleet.owner.serve((), 0)
    await fleet.until(lambda: not policy.gate.closed)  # it has heard that there is none
    await fleet.owner.serve(served, 0)
    assert (await fleet.ask(llm)).status_code == 200


async def test_requests_wait_at_every_server_while_weights_change(fleet):
    llms = [await fleet.llm(gateway) for gateway in (fleet.trainers, *fleet.servers)]
    for llm in llms:
        await fleet.ask(llm)
    async with fleet.owner.hold() as hold, fleet.trainers.hold():
        asking = [asyncio.create_task(fleet.ask(llm)) for llm in llms]
        gates = [gateway._policies.of("run").gate for gateway in (fleet.trainers, *fleet.servers)]
        await fleet.until(lambda: sum(gate.waiting for gate in gates) == 3)
        assert len(fleet.fake.requests) == 3
        hold.update = Update(1)
        fleet.trainers.own.update(hold.update)
    assert {(await asked).status_code for asked in asking} == {200}
    assert [(await fleet.calls(number))[1].version for number in range(3)] == [1, 1, 1]


async def test_a_server_follows_the_policy_server_to_another_address(fleet):
    llm = await fleet.llm(fleet.servers[0])
    await fleet.ask(llm)
    async with FakeVLLM() as other:
        moved = [Upstream(other.url, other.model)]
        before = Upstream(fleet.fake.url, fleet.fake.model)
        await fleet.owner.away(before)
        await fleet.until(lambda: fleet.servers[0]._policies.of("run").gate.closed)
        asking = asyncio.create_task(fleet.ask(llm))
        await fleet.until(lambda: fleet.servers[0]._policies.of("run").gate.waiting)
        await fleet.owner.back(before, *moved, 0)
        assert (await asking).status_code == 200
        assert (len(fleet.fake.requests), len(other.requests)) == (1, 1)


async def test_each_runs_calls_go_to_its_own_policy_server(fleet):
    await fleet.store.put_run(Run("other", "other"))
    async with FakeVLLM() as another:
        owner = Owner(fleet.store, "other")
        await owner.open([Upstream(another.url, another.model)], 7)
        for gateway in (fleet.servers[0], fleet.trainers):
            assert (await fleet.ask(await fleet.llm(gateway, "other"))).status_code == 200
            assert (await fleet.ask(await fleet.llm(gateway, "run"))).status_code == 200
        assert (len(fleet.fake.requests), len(another.requests)) == (2, 2)
        assert [(await fleet.calls(number))[0].version for number in range(4)] == [7, 0, 7, 0]


async def test_calls_wait_for_a_trainer_that_has_not_begun(fleet):
    await fleet.store.put_run(Run("late", "late"))
    asking = asyncio.create_task(fleet.ask(await fleet.llm(fleet.servers[0], "late")))
    await asyncio.sleep(0.1)
    owner = Owner(fleet.store, "late")
    await owner.open([Upstream(fleet.fake.url, fleet.fake.model)], 3)
    assert (await asking).status_code == 200
    assert [call.version for call in await fleet.calls()] == [3]


async def test_a_run_whose_trainer_has_ended_is_a_503_with_the_cure(fleet, open_server):
    server = await open_server(fleet.store, [], settings={"hold_timeout": 0.3})
    llm = await fleet.llm(server)
    assert (await fleet.ask(llm)).status_code == 200
    await fleet.owner.close()
    async with asyncio.timeout(120):
        while (answer := await fleet.ask(llm)).status_code == 200:  # it hears of it in a moment
            await asyncio.sleep(0.01)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert "the trainer that owns it" in answer.json()["error"]["message"]


async def test_a_key_that_names_no_run_is_told_so_by_a_server_without_a_policy(fleet):
    server = fleet.servers[0]
    llm = LLM(f"{server.url}/v1", server.issue("somebody", 1), "policy")
    answer = await fleet.ask(llm)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "key_without_run")


async def test_a_call_whose_version_nobody_knows_is_answered_and_not_trained_on(fleet, caplog):
    llm = await fleet.llm(fleet.servers[0])
    fleet.fake.default = TEN
    asking = asyncio.create_task(fleet.ask(llm))
    await fleet.until(lambda: any(fleet.fake.in_flight().values()))
    with pytest.raises(asyncio.CancelledError):
        async with fleet.owner.hold():
            raise asyncio.CancelledError
    assert (await asking).status_code == 200
    (call,) = await fleet.calls()
    assert call.status is CallStatus.ERROR
    assert "its tokens' policy version is not known" in caplog.text
    assert (await asyncio.wait_for(fleet.store.get_state("", "policy/run"), 5))["version"] == -1


@pytest.mark.slow
async def test_two_servers_serve_one_attempt_at_once(fleet):
    """Both count from 0, in bursts: every call gets a number of its own, and none is refused."""
    llm = await fleet.llm(fleet.servers[0])
    elsewhere = replace(llm, base_url=f"{fleet.servers[1].url}/v1")
    for _ in range(2):
        answers = await asyncio.gather(*(fleet.ask(one) for one in (llm, elsewhere) * 30))
        assert {answer.status_code for answer in answers} == {200}
    calls = await fleet.calls()
    assert len({call.id for call in calls}) == len({call.seq for call in calls}) == 120


async def test_a_span_finds_its_attempt_at_a_server_that_never_saw_the_key(fleet):
    spans = next(one for one in plugins().operations() if one.name == "spans")
    llm = await fleet.llm(fleet.servers[0])
    trace_id = trace_id_of(llm.api_key)
    span = {
        "traceId": trace_id,
        "spanId": "00000000000000aa",
        "parentSpanId": root_span_id(trace_id),
        "name": "look",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
    }
    strange = {**span, "traceId": "ab" * 16}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span, strange]}]}]}
    async with httpx.AsyncClient() as http:

        async def send() -> object:
            headers = {"content-type": "application/json"}
            url = f"{fleet.servers[1].url}/v1/traces"
            return (await http.post(url, content=json.dumps(body), headers=headers)).json()

        async with asyncio.timeout(120):
            while not await spans(fleet.store, fleet.made[0].id):
                said = await send()
    assert said["partialSuccess"]["rejectedSpans"] == "1"  # type: ignore[index]
    (kept,) = await spans(fleet.store, fleet.made[0].id)
    assert (kept.name, kept.attempt) == ("look", 1)


async def test_health_of_a_server_without_a_policy(fleet):
    async with httpx.AsyncClient() as http:
        fresh = await http.get(f"{fleet.servers[0].url}/health")
        assert (fresh.status_code, fresh.json()["policy_version"]) == (200, None)
        await fleet.ask(await fleet.llm(fleet.servers[0]))
        busy = (await http.get(f"{fleet.servers[0].url}/health")).json()
        assert busy["policy_servers"] == {"healthy": 1, "total": 1}


async def test_seeds_follow_from_the_place_in_the_run(fleet, open_server):
    """Two runs of one plan, at the trainer's own gateway and elsewhere: the same seeds, but for another run's seed."""
    seeds: list[list[int]] = []
    for run, seed in (("first", 1), ("second", 1), ("third", 2)):
        await fleet.store.put_run(Run(run, run))
        fleet.made.clear()
        served = [Upstream(fleet.fake.url, fleet.fake.model)]
        await Owner(fleet.store, run, seed=seed).open(served, 0)
        own = await open_server(fleet.store, served, run=run, seed=seed)
        fleet.fake.requests.clear()
        llm = await fleet.llm(own, run)
        for place in (llm, replace(llm, base_url=f"{fleet.servers[0].url}/v1")):
            await fleet.ask(place)
            await fleet.ask(place, seed=11)
        await fleet.ask(await fleet.llm(own, run))
        seeds.append([request.body["seed"] for request in fleet.fake.requests])
    first, second, third = seeds
    assert first == second
    assert first[1] == first[3] == 11, "an agent's own is kept"
    assert len({*first, *third}) == 3 + 3 + 1
    assert all(0 <= seed < 2**63 for seed in first)


async def test_a_run_from_which_nothing_is_heard_is_left_and_joined_again(fleet, monkeypatch):
    monkeypatch.setattr("lightning_server.fleet.member.IDLE", 0.2)
    server = fleet.servers[0]
    llm = await fleet.llm(server)
    await fleet.ask(llm)
    await fleet.until(lambda: not server._policies.known)
    await fleet.until(lambda: not server._policies.others._staying | server._policies.others._leaving)
    assert (await fleet.store.get_state("", "gateway/run/0"))["left"] is True
    await fleet.update(1)
    assert fleet.owner.others == 0
    assert (await fleet.ask(llm)).status_code == 200
    assert [call.version for call in await fleet.calls()] == [0, 1]


async def test_a_call_that_comes_while_a_run_is_left_joins_it_anew(fleet, monkeypatch):
    monkeypatch.setattr("lightning_server.fleet.member.IDLE", 0.2)
    server = fleet.servers[0]
    llm = await fleet.llm(server)
    before, asked = server._policies.of("run"), []

    async def ends_late(*tasks: asyncio.Task[object]) -> None:
        if not asked:
            asked.append(asyncio.create_task(fleet.ask(llm)))
            await fleet.until(lambda: server._policies.known)
        await end(*tasks)

    monkeypatch.setattr("lightning_server.fleet.member.end", ends_late)
    await fleet.until(lambda: asked)
    monkeypatch.setattr("lightning_server.fleet.member.IDLE", 300.0)
    async with asyncio.timeout(120):
        assert (await asked[0]).status_code == 200
    await fleet.until(lambda: len(server._policies.others._staying) == 1 and not server._policies.others._leaving)
    assert server._policies.known == [server._policies.of("run")] != [before], "the old one's end takes nothing along"


async def test_calls_wait_from_the_takeover_until_the_servers_are_named(fleet):
    server = fleet.servers[0]
    llm = await fleet.llm(server)
    await fleet.ask(llm)
    owner = Owner(fleet.store, "run")
    await owner.open((), UNKNOWN)
    await fleet.until(lambda: not server._policies.of("run").pool.slots)
    asking = asyncio.create_task(fleet.ask(llm))
    await asyncio.sleep(0.1)
    assert len(await fleet.calls()) == 1
    await owner.serve([Upstream(fleet.fake.url, fleet.fake.model)], 7)
    assert (await asking).status_code == 200
    assert [call.version for call in await fleet.calls()] == [0, 7]


async def test_an_interrupted_end_of_a_hold_announces_what_the_servers_have(fleet, monkeypatch):
    """Ctrl-C comes while the hold's heartbeat is being ended."""

    async def interrupted(*tasks: asyncio.Task[object]) -> None:
        updating.cancel()
        await asyncio.sleep(0)
        await end(*tasks)

    async def update() -> None:
        async with fleet.owner.hold() as hold:
            hold.update = Update(4, {})
            monkeypatch.setattr("lightning_server.fleet.owner.end", interrupted)

    updating = asyncio.create_task(update())
    with pytest.raises(asyncio.CancelledError):
        await updating
    monkeypatch.undo()
    notice = await fleet.store.get_state("", "policy/run")
    assert (notice["version"], notice["updated"], notice["stance"], notice["taken"]) == (4, 2, "open", [])
    assert notice["servers"]
