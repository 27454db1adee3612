"""Weight updates: requests wait, and every token knows its version."""

from __future__ import annotations

import asyncio

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import GatewayError
from lightning.gateway.dialects import Capture
from lightning.gateway.policy import LiveCall, Policy
from lightning.gateway.upstream import Upstream
from lightning.policy_server.control import client_key
from lightning.policy_server.protocol import Update
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import UNSERVED, CallStatus, VersionRun

HI = [{"role": "user", "content": "hi there"}]
TEN = Reply("a b c d e f g h i", token_delay=0.005)


async def update(house, version: int) -> Update:
    """What the trainer does: hold, freeze, update, account, go on."""
    async with house.gateway.hold():
        house.fake.pause()
        await asyncio.sleep(0.02)
        done = Update(version, house.fake.in_flight())
        house.fake.resume()
        house.gateway.own.update(done)
    return done


async def test_a_request_that_arrives_during_an_update_waits(house):
    client = await house.client()
    async with house.gateway.hold():
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
        await house.until(lambda: house.gateway.own.gate.waiting == 1)
        await asyncio.sleep(0.05)
        assert not house.fake.requests
        house.gateway.own.update(Update(1))
    await asking
    (step,) = await house.transitions()
    assert step.versions == (VersionRun(0, 1),)


async def test_holds_may_overlap(house):
    client = await house.client()
    outer, inner = house.gateway.hold(), house.gateway.hold()
    await outer.__aenter__()
    await inner.__aenter__()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await outer.__aexit__(None, None, None)
    await asyncio.sleep(0.05)
    assert not house.fake.requests
    await inner.__aexit__(None, None, None)
    await asking


async def test_too_long_a_hold_is_a_503_with_the_cure(build):
    house = await build(hold_timeout=0.1)
    client = await house.client()
    async with house.gateway.hold():
        with pytest.raises(openai.InternalServerError, match=r"gateway\.hold_timeout") as caught:
            await client.chat.completions.create(model="policy", messages=HI)
    assert caught.value.status_code == 503
    (step,) = await house.transitions()
    assert step.status is CallStatus.ERROR


async def test_a_client_that_leaves_during_a_hold_was_not_served(house):
    client = await house.client()
    async with house.gateway.hold():
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
        await house.until(lambda: house.gateway.own.gate.waiting)
        asking.cancel()
        (step,) = await house.recorded()
    assert (step.status, step.finish_reason) == (CallStatus.ERROR, UNSERVED)
    assert not house.fake.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_split_where_vllm_was_frozen(house, stream):
    house.fake.queue(TEN)
    client = await house.client()

    async def ask() -> None:
        answer = await client.chat.completions.create(model="policy", messages=HI, stream=stream)
        if stream:
            _ = [chunk async for chunk in answer]

    asking = asyncio.create_task(ask())
    await house.until(lambda: any(house.fake.in_flight().values()))
    first = (await update(house, 1)).in_flight
    second = (await update(house, 2)).in_flight
    await asking
    (step,) = await house.transitions()
    (a,), (b,) = first.values(), second.values()
    assert 0 < a <= b < len(step.response_ids)
    middle = [VersionRun(a, 1)] if a < b else []
    assert step.versions == (VersionRun(0, 0), *middle, VersionRun(b, 2))


async def test_a_call_that_had_no_token_yet_is_wholly_new(house):
    house.fake.queue(Reply("a b", delay=0.2))
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI))
    await house.until(lambda: house.fake.requests)
    await update(house, 4)
    await asking
    (step,) = await house.transitions()
    assert step.versions == (VersionRun(0, 4),)


async def test_choices_are_split_each_by_itself(house):
    house.fake.queue(Reply("a"), TEN)
    client = await house.client()
    asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=HI, n=2))
    await house.until(lambda: max([0, *house.fake.in_flight().values()]) >= 3)
    done = await update(house, 1)
    await asking
    short, long = await house.transitions()
    frozen = {key[:2]: tokens for key, tokens in done.in_flight.items()}
    assert frozen["0_"] == len(short.response_ids)
    assert short.versions == (VersionRun(0, 0),)
    assert long.versions == (VersionRun(0, 0), VersionRun(frozen["1_"], 1))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_ends_between_resume_and_the_account_is_split_too(house, stream):
    """The server probes after resuming; a call may end meanwhile, and its last tokens are the new version's."""
    house.fake.queue(TEN)
    http = await house.http()
    asking = asyncio.create_task(http.post("/chat/completions", json={"messages": HI, "stream": stream}))
    await house.until(lambda: max([0, *house.fake.in_flight().values()]) >= 3)
    async with house.gateway.hold():
        house.fake.pause()
        await asyncio.sleep(0.02)
        done = Update(1, house.fake.in_flight())
        house.fake.resume()
        await house.until(lambda: not house.fake.in_flight())
        await asyncio.sleep(0.05)
        assert not asking.done()
        house.gateway.own.update(done)
    assert (await asking).status_code == 200
    (step,) = await house.transitions()
    assert step.versions == (VersionRun(0, 0), VersionRun(next(iter(done.in_flight.values())), 1))


@pytest.mark.parametrize(("n", "prompts"), [(1, 1), (3, 1), (1, 3), (2, 3)])
def test_choices_are_named_as_the_policy_server_names_them(n, prompts):
    """Round trip through the policy server's own reading of vLLM's engine ids."""
    call = LiveCall("abc123", n * prompts, n, 0, Capture("x"))
    for prefix, with_prompt in (("chatcmpl-", False), ("cmpl-", True)):
        if prompts > 1 and not with_prompt:
            continue
        for index in range(n * prompts):
            prompt, choice = divmod(index, n)
            name = f"{prefix}abc123" + (f"-{prompt}" if with_prompt else "") + "-0a1b2c3d"
            engine_id = f"{choice}_{name}" if n > 1 else name
            assert client_key(engine_id) == call.key(index)


async def test_finished_calls_keep_their_version(house):
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI)
    await update(house, 1)
    await client.chat.completions.create(model="policy", messages=HI)
    assert [step.version for step in await house.transitions()] == [0, 1]


async def test_servers_are_updated_one_after_another(build):
    """An update of one server splits that server's calls alone, and new calls have the version of the server they go to."""
    async with FakeVLLM() as first, FakeVLLM() as second:
        upstreams = [Upstream(fake.url, fake.model) for fake in (first, second)]
        house = await build(upstreams=upstreams)
        slots = house.gateway.own.pool.slots
        clients = {}
        while len(clients) < 2:  # one rollout that stays with each server
            client = await house.client()
            lease = house.leases[-1]
            clients.setdefault(slots.index(house.gateway.own.pool.choose(lease.rollout.id)), (client, lease))

        async def ask(number):
            return await clients[number][0].chat.completions.create(model="policy", messages=HI)

        for fake in (first, second):
            fake.queue(TEN)
        asking = [asyncio.create_task(ask(number)) for number in (0, 1)]
        await house.until(lambda: all(max([0, *fake.in_flight().values()]) >= 3 for fake in (first, second)))
        async with house.gateway.hold():
            for fake in (first, second):
                fake.pause()
            await asyncio.sleep(0.02)
            done = Update(1, first.in_flight())
            for fake in (first, second):
                fake.resume()
            house.gateway.own.update(done, upstreams[0])
        await asyncio.gather(*asking)
        for number in (0, 1):
            await ask(number)
        async with house.gateway.hold():
            house.gateway.own.update(Update(1), upstreams[1])
        await ask(1)
        found = [await house.store.transitions(clients[number][1].rollout.id) for number in (0, 1)]
        (tokens,) = done.in_flight.values()
        assert [step.versions for step in found[0]] == [(VersionRun(0, 0), VersionRun(tokens, 1)), (VersionRun(0, 1),)]
        assert [step.versions for step in found[1]] == [(VersionRun(0, 0),), (VersionRun(0, 0),), (VersionRun(0, 1),)]
        with pytest.raises(GatewayError, match="is not one of the gateway's upstreams"):
            house.gateway.own.update(Update(2), Upstream("http://127.0.0.1:1", "m"))
        assert house.gateway.own.version == 1
        house.gateway.own.update(Update(2), upstreams[0])
        restarted = Upstream(second.url, "another")  # a server that is started again has the newest weights
        house.gateway.own.pool.replace(upstreams[1], restarted)
        assert [slot.version for slot in slots] == [2, 2]


@given(
    length=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_runs_say_for_each_token_who_sampled_it(length, cuts):
    """Against the plain definition: update k, frozen at n tokens, owns every token from n on until a later one does."""
    cuts = sorted(cuts)
    policy = Policy([Upstream("http://127.0.0.1:1", "m")], 1.0)
    call = LiveCall("x", 1, 1, 0, Capture("chatcmpl-x"))
    policy.calls.add(call)
    call.dispatch(policy.pool.slots[0], now=0.0)
    for number, tokens in enumerate(cuts, 1):
        policy.update(Update(number, {"x": tokens}))
    runs = call.versions(0, length)
    owner = [max([0, *(number for number, tokens in enumerate(cuts, 1) if tokens <= place)]) for place in range(length)]
    said = [[run.version for run in runs if run.start <= place][-1] for place in range(length)]
    assert said == owner
    starts = [run.start for run in runs]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert all(start < max(length, 1) for start in starts)
