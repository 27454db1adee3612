"""Clients that hang up, servers that die, stores that were ahead."""

from __future__ import annotations

import asyncio
import logging
import socket

import aiohttp
import openai
import pytest
from lightning.config.sections import GatewayConfig
from lightning.errors import ConflictError, GatewayError, UnavailableError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.upstream import Forwarder
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import UNSERVED, CallStatus, Fault, Outcome

from tests.servers.ports import free_port

HI = [{"role": "user", "content": "hi there"}]
SLOW = Reply("a b c d e f g h", token_delay=0.02)


def content_of(answer) -> str:
    return answer.choices[0].message.content


async def test_a_client_that_leaves_a_stream_aborts_the_call(house):
    house.fake.queue(Reply(SLOW.text * 50, token_delay=0.02))
    client = await house.client()
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
    seen = 0
    async for chunk in stream:
        seen += bool(chunk.choices[0].delta.content)
        if seen == 3:
            break
    await stream.close()
    await house.until(lambda: house.fake.aborted)
    (step,) = await house.recorded()
    assert step.status is CallStatus.ABORTED
    assert 3 <= len(step.response_ids) < 20
    assert len(step.logprobs) == len(step.response_ids)


async def test_a_client_that_leaves_while_waiting_aborts_the_call(house):
    house.fake.queue(Reply(delay=30))
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: house.fake.requests)
    asking.cancel()
    await house.until(lambda: house.fake.aborted)
    (step,) = await house.recorded()
    assert step.status is CallStatus.ABORTED
    assert not step.response_ids


ASKED = {
    "chat/completions": {"messages": HI},
    "completions": {"prompt": "hi there"},
    "responses": {"input": "hi there"},
    "messages": {"messages": HI, "max_tokens": 50},
}


class SlowStore(MemoryStore):
    """Answers an append when it is `told` to, and has the calls then, or `at_once`; with an error, if there is one."""

    def __init__(self, *, at_once: bool, error: bool = False) -> None:
        super().__init__()
        self.asked, self.told, self._at_once, self._error = asyncio.Event(), asyncio.Event(), at_once, error

    async def append(self, transitions):
        if self.told.is_set():
            return await super().append(transitions)
        if self._at_once:
            await super().append(transitions)
        self.asked.set()
        await self.told.wait()
        if self._error:
            raise UnavailableError("the answer was lost")
        return await super().append(transitions)


async def statuses(house, *expected):
    """The statuses of the first rollout's calls, once they are these."""
    async with asyncio.timeout(30):
        while True:
            found = await house.transitions()
            if [call.status for call in found] == list(expected):
                return found
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("at_once", [False, True], ids=["taken late", "told late"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ASKED)
async def test_an_answer_that_did_not_arrive_and_is_asked_for_again_is_one(build, path, stream, at_once):
    """The agent's patience ends while the store is slow: one call is answered, the other was aborted."""
    store = SlowStore(at_once=at_once)
    house = await build(store=store)
    llm = await house.llm()
    asked = {**ASKED[path], "model": "policy", "stream": stream}
    impatient = await house.http(llm)
    asking = asyncio.create_task(impatient.post(f"/{path}", json=asked))
    await store.asked.wait()
    asking.cancel()
    await house.until(lambda: not house.gateway._serving._server.server_state.connections)
    store.told.set()
    await statuses(house, CallStatus.ABORTED)
    again = await (await house.http(llm)).post(f"/{path}", json=asked)
    assert again.status_code == 200
    first, second = await statuses(house, CallStatus.ABORTED, CallStatus.OK)
    assert first.prompt_ids == second.prompt_ids
    assert len(first.response_ids) > 0, "what was sampled is kept"


async def test_a_call_that_the_store_took_without_a_word_is_aborted(build):
    """It was answered with 503: had it stayed as it was, the next try would be a second call with one answer."""
    store = SlowStore(at_once=True, error=True)
    house = await build(store=store)
    http = await house.http()
    asking = asyncio.create_task(http.post("/chat/completions", json={"messages": HI}))
    await store.asked.wait()
    store.told.set()
    assert (await asking).status_code == 503
    assert (await http.post("/chat/completions", json={"messages": HI})).status_code == 200
    await statuses(house, CallStatus.ABORTED, CallStatus.OK)


@pytest.mark.parametrize("reply", [400, 500])
@pytest.mark.parametrize("lost", [False, True], ids=["stored", "lost"])
async def test_a_call_without_an_answer_stays_what_it_was_when_that_does_not_arrive(build, reply, lost, warnings_of):
    store = SlowStore(at_once=not lost, error=lost)
    house = await build(store=store)
    house.fake.queue(Reply(status=reply))
    asking = asyncio.create_task((await house.http()).post("/chat/completions", json={"messages": HI}))
    await store.asked.wait()
    if not lost:
        asking.cancel()
        await house.until(lambda: not house.gateway._serving._server.server_state.connections)
    store.told.set()
    await statuses(house, CallStatus.REFUSED if reply == 400 else CallStatus.ERROR)
    await house.until(lambda: not house.gateway._serving._server.server_state.tasks)
    assert not [line for line in warnings_of() if "did not arrive" in line]


async def test_a_call_that_is_cut_off_while_it_is_stored_is_one_row(build):
    store = SlowStore(at_once=True)
    house = await build(store=store)
    asking = asyncio.create_task((await house.http()).post("/chat/completions", json={"messages": HI}))
    await store.asked.wait()
    (serving,) = house.gateway._serving._server.server_state.tasks
    store.told.set()
    serving.cancel()  # as the server does that has waited long enough for its calls to end
    await statuses(house, CallStatus.ABORTED)
    asking.cancel()


class BuggyStore(SlowStore):
    """Fails in its own way once it was `told` to answer."""

    async def append(self, transitions):
        if self.told.is_set():
            raise RuntimeError("a bug of the store")
        return await super().append(transitions)


@pytest.mark.parametrize("cut_off", [False, True], ids=["hung up", "cut off"])
async def test_a_store_that_fails_when_an_answer_did_not_arrive_is_logged_and_no_more(build, caplog, cut_off):
    store = BuggyStore(at_once=True)
    house = await build(store=store)
    asking = asyncio.create_task((await house.http()).post("/chat/completions", json={"messages": HI}))
    await store.asked.wait()
    (serving,) = house.gateway._serving._server.server_state.tasks
    if cut_off:
        serving.cancel()
    else:
        asking.cancel()
        await house.until(lambda: not house.gateway._serving._server.server_state.connections)
    store.told.set()
    await asyncio.wait({serving})
    asking.cancel()
    said = [(record.name, record.exc_info[0]) for record in caplog.records if record.levelno >= logging.ERROR]
    cancelled = [("uvicorn.error", asyncio.CancelledError)] if cut_off else []
    assert said == [("lightning.gateway.calls", RuntimeError), *cancelled]


async def test_a_call_that_ends_with_its_attempt_is_no_warning(house, caplog):
    """Who interrupts a run ends its attempts, and each agent hangs up: a line for each is noise."""
    house.fake.queue(Reply(delay=30))
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: house.fake.requests)
    await house.store.release("worker")
    with caplog.at_level(logging.INFO, "lightning.gateway.calls"):
        asking.cancel()
        await house.until(lambda: "was not recorded" in caplog.text)
    (said,) = [record for record in caplog.records if "was not recorded" in record.getMessage()]
    assert said.levelno == logging.INFO


@pytest.mark.parametrize("die_after", [0, 2])
async def test_a_server_that_dies_is_a_502(house, die_after):
    house.fake.queue(Reply("a b c d", die_after=die_after))
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match="broke off") as caught:
        await client.chat.completions.create(model="policy", messages=HI)
    assert caught.value.status_code == 502
    (step,) = await house.recorded()
    assert step.status is CallStatus.ERROR


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_that_the_server_let_go_of_is_replaced_once(house, stream):
    """As under load, when both ends' idle times run out together: the call goes out again, over a new connection."""
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI)
    house.fake.queue(Reply(die_after=0), Reply("second try"))
    answer = await client.chat.completions.create(model="policy", messages=HI, stream=stream)
    said = [chunk.choices[0].delta.content or "" async for chunk in answer] if stream else [content_of(answer)]
    assert "".join(said) == "second try"
    assert len(house.fake.requests) == 3
    assert [step.status for step in await house.transitions()] == [CallStatus.OK] * 2
    house.fake.queue(Reply(die_after=0), Reply(die_after=0))
    with pytest.raises(openai.InternalServerError, match="broke off"):
        await client.chat.completions.create(model="policy", messages=HI)
    assert len(house.fake.requests) == 5
    assert [step.status for step in await house.transitions()] == [CallStatus.OK] * 2 + [CallStatus.ERROR]


async def test_a_kept_connection_that_ends_within_an_answer_is_a_502(house):
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI)
    house.fake.queue(Reply("a b c d", die_after=2))
    with pytest.raises(openai.APIError, match="broke off"):
        _ = [chunk async for chunk in await client.chat.completions.create(model="policy", messages=HI, stream=True)]
    assert len(house.fake.requests) == 2


@pytest.mark.parametrize(
    ("reply", "stream", "well", "reason"),
    [
        (Reply("a b c d", die_after=2), False, True, UNSERVED),
        (Reply("a b c d", die_after=2), True, True, UNSERVED),
        (Reply(status=500), False, True, ""),
        (Reply(status=500), False, False, UNSERVED),
        (Reply("a b c d", error_after=2), True, True, ""),
        (Reply("a b c d", error_after=2), True, False, UNSERVED),
        (Reply(raw=b"<html>"), False, True, ""),
    ],
)
async def test_the_record_says_whether_the_server_was_gone(house, reply, stream, well, reason):
    """An engine that has died lets its server answer for a moment: with 500, and `/health` with 503."""

    def script(body):
        house.fake.healthy = well
        return reply

    house.fake.script = script
    client = await house.client()

    async def ask() -> None:
        answer = await client.chat.completions.create(model="policy", messages=HI, stream=stream)
        _ = [chunk async for chunk in answer]

    with pytest.raises(openai.APIError):
        await ask()
    (step,) = await house.recorded()
    assert (step.status, step.finish_reason) == (CallStatus.ERROR, reason)


async def test_an_agent_that_hangs_up_while_there_is_no_server_is_not_at_fault(build):
    house = await build()
    await house.fake.close()
    client = await house.client(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="policy", messages=HI)
    (step,) = await house.recorded()
    assert (step.status, step.finish_reason) == (CallStatus.ERROR, UNSERVED)


async def test_an_agent_that_hangs_up_during_an_update_is_not_at_fault(house):
    client = await house.client()
    async with house.gateway.hold():
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
        await house.until(lambda: house.gateway.own.gate.waiting)
        asking.cancel()
        (step,) = await house.recorded()
    assert (step.status, step.finish_reason) == (CallStatus.ERROR, UNSERVED)


async def test_a_server_that_dies_in_a_stream_is_an_error_event(house):
    house.fake.queue(Reply("a b c d", die_after=2))
    client = await house.client()
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        _ = [chunk async for chunk in stream]
    (step,) = await house.recorded()
    assert step.status is CallStatus.ERROR
    assert len(step.response_ids) <= 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_whose_engine_stands_still_is_a_502(build, stream):
    house = await build(upstream_timeout=0.1)
    house.fake.hang()
    client = await house.client()

    async def ask() -> None:
        answer = await client.chat.completions.create(model="policy", messages=HI, stream=stream)
        _ = [chunk async for chunk in answer]

    with pytest.raises(openai.APIError, match=r"gateway\.upstream_timeout"):
        await ask()
    (step,) = await house.recorded()
    assert step.status is CallStatus.ERROR


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_takes_longer_than_the_timeout_is_answered(build, stream):
    """No byte comes before the last token of a whole answer, nor of a stream whose call waits for its turn."""
    house = await build(upstream_timeout=0.05)
    house.fake.queue(Reply("a b", delay=0.4))
    http = await house.http()
    asked = {"model": "policy", "messages": HI, "stream": stream}
    answer = await http.post("/chat/completions", json=asked)
    assert answer.status_code == 200
    assert ("a" in answer.text, "broke off" in answer.text) == (True, False)
    (step,) = await house.recorded()
    assert (step.status, len(step.response_ids)) == (CallStatus.OK, 3)


async def test_a_silent_call_of_a_server_that_was_replaced_ends(build):
    """The one in its place, at whichever address, says nothing about it."""
    house = await build(upstream_timeout=0.1)
    house.fake.queue(Reply("a b", delay=30))
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: house.fake.requests)
    house.gateway.own.pool.replace(Upstream(house.fake.url, "tiny"), Upstream(house.fake.url, "tiny"))
    with pytest.raises(openai.APIError, match=r"gateway\.upstream_timeout"):
        await asking
    (step,) = await house.recorded()
    assert (step.status, step.finish_reason) == (CallStatus.ERROR, UNSERVED)


async def test_a_silent_call_of_a_dead_engine_ends(build):
    house = await build(upstream_timeout=0.1)
    house.fake.queue(Reply("a b", delay=30))
    house.fake.healthy = False
    client = await house.client()
    with pytest.raises(openai.APIError, match=r"gateway\.upstream_timeout"):
        await client.chat.completions.create(model="policy", messages=HI)


async def test_a_silent_call_ends_when_its_server_cannot_be_asked(build, monkeypatch):
    async def broken(*_: object) -> bool:
        raise ValueError("no answer is read like this")

    monkeypatch.setattr(Forwarder, "works", broken)
    house = await build(upstream_timeout=0.1)
    house.fake.queue(Reply("a b", delay=30))
    client = await house.client()
    with pytest.raises(openai.APIError, match=r"could not be asked \(ValueError\)"):
        await client.chat.completions.create(model="policy", messages=HI)


@pytest.mark.parametrize("raw", [b"<html>", b"[]", b'{"choices": 4}', b'{"choices": [{"token_ids": ["x"]}]}'])
async def test_what_is_not_vllms_shape_is_a_502(house, raw):
    house.fake.queue(Reply(raw=raw))
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match="not shaped like vLLM"):
        await client.chat.completions.create(model="policy", messages=HI)


async def test_a_dead_server_is_left_for_a_living_one(build):
    """Connect fails before anything was answered: another server takes the call, nothing is recorded twice."""
    async with FakeVLLM() as alive:
        dead = Upstream(f"http://127.0.0.1:{free_port()}", "tiny")
        house = await build(upstreams=[dead, Upstream(alive.url, "tiny")])
        for _ in range(8):
            client = await house.client()
            await client.chat.completions.create(model="policy", messages=HI)
        assert len(alive.requests) == 8
        assert [len(await house.transitions(number)) for number in range(8)] == [1] * 8


@pytest.mark.slow
async def test_rollouts_stick_to_a_server_and_spread_over_all(build):
    async with FakeVLLM() as a, FakeVLLM() as b, FakeVLLM() as c:
        fakes = [a, b, c]
        house = await build(upstreams=[Upstream(fake.url, fake.model) for fake in fakes])
        for _ in range(20):
            client = await house.client()
            before = [len(fake.requests) for fake in fakes]
            for _ in range(3):
                await client.chat.completions.create(model="policy", messages=HI)
            grown = [len(fake.requests) - old for fake, old in zip(fakes, before, strict=True)]
            assert sorted(grown) == [0, 0, 3]
        assert all(fake.requests for fake in fakes)


async def test_each_server_gets_its_own_model_name(build):
    async with FakeVLLM(model="lora-7") as fake:
        house = await build(upstreams=[Upstream(fake.url, "lora-7")])
        client = await house.client()
        await client.chat.completions.create(model="policy:writer", messages=HI)
        assert fake.requests[0].body["model"] == "lora-7"


async def test_requests_wait_for_a_restarted_server(build):
    house = await build()
    await house.fake.close()
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: not house.gateway.own.pool.healthy)
    async with FakeVLLM(model="tiny") as other:
        house.gateway.own.pool.replace(Upstream(house.fake.url, "tiny"), Upstream(other.url, "tiny"))
        await asking
    assert len(await house.transitions()) == 1


async def test_a_server_that_comes_back_at_its_address_is_found_by_the_health_check(build):
    house = await build()
    house.gateway.own.pool.check_every = 0.02
    await house.fake.close()
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: not house.gateway.own.pool.healthy)
    await house.fake.start()
    await asking
    assert len(await house.transitions()) == 1


async def test_a_sick_server_gets_nothing(build):
    async with FakeVLLM() as sick, FakeVLLM() as well:
        house = await build(upstreams=[Upstream(sick.url, "tiny"), Upstream(well.url, "tiny")])
        house.gateway.own.pool.check_every = 0.02
        sick.healthy = False
        await (await house.client()).models.list()  # health checks begin with the first request
        await house.until(lambda: house.gateway.own.pool.healthy == 1)
        for _ in range(5):
            await (await house.client()).chat.completions.create(model="policy", messages=HI)
        assert (len(sick.requests), len(well.requests)) == (0, 5)


async def test_no_server_at_all_is_a_503_with_the_cure(build):
    house = await build(upstreams=[Upstream(f"http://127.0.0.1:{free_port()}", "tiny")], hold_timeout=0.3)
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match="policy server's log") as caught:
        await client.chat.completions.create(model="policy", messages=HI)
    assert caught.value.status_code == 503
    (step,) = await house.transitions()
    assert step.status is CallStatus.ERROR, "the record says whose fault the agent's failure is"
    assert step.finish_reason == UNSERVED
    assert not step.response_ids


async def test_a_restart_may_take_longer_than_a_server_is_waited_for(build):
    house = await build()
    house.gateway.own.pool.grace = 0.2
    await house.fake.close()
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: not house.gateway.own.pool.healthy)
    async with FakeVLLM(model="tiny") as other:
        async with house.gateway.hold():
            await asyncio.sleep(0.5)
            assert not asking.done()
            house.gateway.own.pool.replace(Upstream(house.fake.url, "tiny"), Upstream(other.url, "tiny"))
        await asking
    (step,) = await house.transitions()
    assert step.status is CallStatus.OK


async def test_a_late_call_of_an_ended_attempt_is_a_409(house):
    client = await house.client()
    lease = house.leases[0]
    await house.store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
    with pytest.raises(openai.ConflictError, match="attempt of the rollout is over"):
        await client.chat.completions.create(model="policy", messages=HI)
    assert await house.transitions() == []


async def test_a_second_gateway_goes_on_counting(build):
    """Restart: the new gateway's numbers follow those in the store, and old tokens still work."""
    house = await build()
    llm = await house.llm()
    await (await house.client(llm)).chat.completions.create(model="policy", messages=HI)
    upstream = Upstream(house.fake.url, house.fake.model)
    other = await build(store=house.store, upstreams=[upstream])
    moved = type(llm)(f"{other.gateway.url}/v1", llm.api_key, llm.model)
    await (await house.client(moved)).chat.completions.create(model="policy", messages=HI)
    assert [step.seq for step in await house.transitions()] == [0, 1]


async def test_a_key_issued_again_does_not_start_over(house):
    for _ in range(2):
        llm = house.gateway.llm(house.leases[0]) if house.leases else await house.llm()
        await (await house.client(llm)).chat.completions.create(model="policy", messages=HI)
    assert [step.seq for step in await house.transitions()] == [0, 1]


async def test_a_new_attempt_counts_from_zero_although_the_old_one_has_calls(build):
    house = await build()
    await (await house.client()).chat.completions.create(model="policy", messages=HI)
    lost = house.leases[0]
    await house.store.complete(lost.rollout.id, lost.attempt, Outcome(fault=Fault.INFRASTRUCTURE))
    (again,) = await house.store.lease("run", "worker")
    client = await house.client(house.gateway.llm(again))
    await client.chat.completions.create(model="policy", messages=HI)
    assert [step.key for step in await house.transitions()] == [(again.rollout.id, again.attempt, 0)]


async def test_a_restarted_gateway_that_issues_again_does_not_lose_calls(build):
    """It believes that the attempt is new, is told otherwise by the store, and goes on behind what is there."""
    house = await build()
    llm = await house.llm()
    for _ in range(3):
        await (await house.client(llm)).chat.completions.create(model="policy", messages=HI)
    other = await build(store=house.store, upstreams=[Upstream(house.fake.url, house.fake.model)])
    again = other.gateway.llm(house.leases[0])
    for _ in range(2):
        await (await house.client(again)).chat.completions.create(model="policy", messages=HI)
    steps = await house.transitions()
    assert [step.seq for step in steps] == [0, 1, 2, 3, 4]
    assert len({step.id for step in steps}) == 5


async def test_taken_numbers_are_replaced(build):
    """Two gateways over one store: both believe number 0 is free; one of them takes the next."""
    house = await build()
    llm = await house.llm()
    other = await build(store=house.store, upstreams=[Upstream(house.fake.url, house.fake.model)])
    moved = type(llm)(f"{other.gateway.url}/v1", llm.api_key, llm.model)
    house.fake.queue(*[Reply("a b c", delay=0.1)] * 2)
    clients = [await house.client(llm), await house.client(moved)]
    await asyncio.gather(*(client.chat.completions.create(model="policy", messages=HI) for client in clients))
    steps = await house.transitions()
    assert [step.seq for step in steps] == [0, 1]
    assert len({step.id for step in steps}) == 2


class StubbornStore(MemoryStore):
    """Every number is always taken."""

    async def append(self, transitions):
        raise ConflictError("taken")


async def test_endless_conflicts_are_a_503(build):
    house = await build(store=StubbornStore())
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match="taken"):
        await client.chat.completions.create(model="policy", messages=HI)


async def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway = Gateway(MemoryStore(), [Upstream("http://x", "m")], GatewayConfig(port=port), secret=b"s" * 32)
        with pytest.raises(GatewayError, match=rf"port {port} on 127.0.0.1 is in use .*gateway\.port"):
            await gateway.start()


async def test_bad_upstreams_are_named():
    with pytest.raises(GatewayError, match=r"at least one Upstream\(url, model\)"):
        Gateway(MemoryStore(), [], GatewayConfig(), secret=b"s" * 32).own.lose()
    with pytest.raises(GatewayError, match="localhost:8000"):
        Gateway(MemoryStore(), [Upstream("localhost:8000", "m")], GatewayConfig(), secret=b"s" * 32)


async def test_closing_lets_calls_end(build):
    house = await build()
    house.fake.queue(Reply("late", delay=0.5))
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: house.fake.requests)
    await house.gateway.close()
    assert (await asking).choices[0].message.content == "late"
    await house.gateway.close()


async def test_nothing_is_kept_for_finished_calls(house):
    client = await house.client()
    await asyncio.gather(*(client.chat.completions.create(model="policy", messages=HI) for _ in range(20)))
    await house.until(lambda: not house.gateway.own.calls)


@pytest.mark.slow
async def test_a_thousand_calls_at_once(build):
    """No cap anywhere: a thousand wait out a hold, a thousand are at vLLM together, a thousand are recorded."""
    house = await build()
    llm = await house.llm()
    headers = {"authorization": f"Bearer {llm.api_key}"}
    url = f"{llm.base_url}/chat/completions"

    async def ask(http: aiohttp.ClientSession) -> int:
        async with http.post(url, json={"messages": HI}, headers=headers) as answer:
            await answer.read()
            return answer.status

    house.fake.pause()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with house.gateway.hold():
            calls = [asyncio.create_task(ask(http)) for _ in range(1000)]
            await house.until(lambda: house.gateway.own.gate.waiting == 1000)
        await house.until(lambda: len(house.fake.in_flight()) == 1000)
        assert len(house.gateway.own.calls) == 1000
        house.fake.resume()
        assert set(await asyncio.gather(*calls)) == {200}
    assert [step.seq for step in await house.transitions()] == list(range(1000))
