"""What an agent reports after a call belongs to that call, whatever the clocks of its machine and the gateway's say."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import httpx
import httpx2
import lightning
import pytest
from lightning.credit import call_rewards, with_tool_rewards
from lightning.instrument import activate, context, emit, install_tap
from lightning.plugins import plugins
from lightning.runner.outcomes import returned, sanitized
from lightning.trainer.training_data import load_groups
from lightning.types import Status

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi there"}]},
    "completions": {"prompt": "hi there"},
    "responses": {"input": "hi there"},
    "messages": {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 50},
}


@pytest.fixture(params=[-30.0, 0.0, 30.0])
def tapped(request, monkeypatch):
    """The tap and the raw adapter, in an agent's process whose clock is wrong by some seconds."""
    monkeypatch.setattr(context, "time", SimpleNamespace(time=lambda: time.time() + request.param))
    undo = [install_tap(), plugins().install_adapters(emit, ["raw"])]
    yield
    for each in undo:
        each()


@lightning.tool
def search(found: bool) -> str:
    if not found:
        raise LookupError
    return "found"


def step(value: float) -> None:
    """A reward, and a tool run that fails."""
    lightning.reward(value)
    with pytest.raises(LookupError):
        search(False)


async def earned(house, session) -> dict[str, float]:
    """What the calls of the first rollout earned, by the text that they were asked."""
    (lease,) = house.leases
    await house.store.complete(lease.rollout.id, 1, sanitized(returned(1.0, session, 0.0)))
    rollout = await house.store.get_rollout(lease.rollout.id)
    assert rollout.status is Status.SUCCEEDED
    ((trajectory,),) = [group.trajectories for group in await load_groups(house.store, [rollout], [])]
    found = call_rewards(with_tool_rewards(trajectory, {"error": 0.25}))
    return dict(zip([call.id for call in trajectory.transitions], found.tolist(), strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_each_reward_and_tool_run_belongs_to_the_call_before_it(house, tapped, path, stream):
    llm = await house.llm()
    ids = []
    with activate(llm) as session:
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {llm.api_key}"}) as client:
            for value in (1.0, 2.0, 4.0):
                body = {"model": "policy", **BODIES[path], "stream": stream}
                reply = await client.post(f"{llm.base_url}/{path}", json=body)
                ids.append(reply.raise_for_status().headers["x-request-id"])
                step(value)
    assert await earned(house, session) == dict(zip(ids, (1.25, 2.25, 4.25), strict=True))


@pytest.mark.parametrize("threads", [False, True])
async def test_components_at_the_same_time_are_rewarded_for_their_own_calls(house, tapped, threads):
    """Every branch has called before any of them is rewarded."""
    llm = await house.llm()
    headers, body = {"authorization": f"Bearer {llm.api_key}"}, {"model": "policy", **BODIES["chat/completions"]}
    url, ids, values = f"{llm.base_url}/chat/completions", {}, (1.0, 2.0, 4.0, 8.0)
    turn, together = threading.Barrier(len(values), timeout=30), asyncio.Barrier(len(values))

    def in_thread(value: float) -> None:
        with lightning.component("solver"), httpx.Client(headers=headers) as client:
            ids[value] = client.post(url, json=body).headers["x-request-id"]
            turn.wait()
            step(value)

    async def in_task(value: float) -> None:
        with lightning.component("solver"):
            async with httpx.AsyncClient(headers=headers) as client:
                reply = await asyncio.wait_for(client.post(url, json=body), 30)
            ids[value] = reply.headers["x-request-id"]
            await together.wait()
            step(value)

    with activate(llm) as session:
        branches = [asyncio.to_thread(in_thread, value) if threads else in_task(value) for value in values]
        await asyncio.gather(*branches)
    found = await earned(house, session)
    assert {value: found[ids[value]] for value in values} == {value: value + 0.25 for value in values}


async def test_a_client_that_the_tap_does_not_see_leaves_it_to_time(house):
    llm = await house.llm()
    with activate(llm) as session:
        http = await house.http(llm)
        for value in (1.0, 2.0):
            await http.post("/chat/completions", json={"model": "policy", **BODIES["chat/completions"]})
            lightning.reward(value)
    assert [given.response_id for given in session.step_rewards] == ["", ""]
    assert list((await earned(house, session)).values()) == [1.0, 2.0]
