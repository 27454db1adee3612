"""Several policies behind one gateway: each call carries its policy's model name, and its record the policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from lightning.gateway import Upstream, gateway
from lightning.gateway.stages import CallStage, Line, NamedStage
from lightning.policy_server.protocol import Update
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import VersionRun

HI = [{"role": "user", "content": "hi there"}]
FROZEN = ("checker",)


class Chooses(CallStage):
    """Takes the requested model for the policy's name."""

    api = 1

    async def models(self, claims):
        return {name: name for name in ("writer", "checker", "judge")}

    async def admitted(self, call, request):
        call.policy_name, call.frozen = request.model, request.model in FROZEN


@pytest.fixture
async def two(build: Callable[..., object], monkeypatch: pytest.MonkeyPatch):
    """A gateway before one server for the policies `writer` and `checker`, and one of its own for `judge`."""
    async with FakeVLLM(aliases=("a/writer",)) as shared, FakeVLLM() as own:
        servers = [
            Upstream(shared.url, shared.model, models=(("writer", "a/writer"), ("checker", shared.model))),
            Upstream(own.url, own.model, models=(("judge", own.model),)),
        ]
        line = Line([NamedStage("chooses", Chooses())])
        monkeypatch.setattr(gateway, "line_of", lambda parts: line)
        house = await build(upstreams=servers)
        yield house, shared, own, servers


async def test_a_call_goes_to_its_policys_server_under_its_model_name(two) -> None:
    house, shared, own, _ = two
    client = await house.client()
    for model in ("writer", "checker", "judge"):
        answer = await client.chat.completions.create(model=model, messages=HI)
        assert answer.model == "policy"
    carried = [[asked.body["model"] for asked in fake.requests if "chat" in asked.path] for fake in (shared, own)]
    assert carried == [["a/writer", shared.model], [own.model]]
    assert [call.policy for call in await house.transitions()] == ["writer", "checker", "judge"]


async def test_a_prompt_is_tokenized_by_a_server_of_its_own_policy(two) -> None:
    house, shared, own, _ = two
    forwarder, policy = house.gateway.parts.forwarder, house.gateway.own
    shared.max_model_len, own.max_model_len = 1111, 2222
    for name, known in (("checker", 1111), ("writer", 1111), ("judge", 2222)):
        status, payload = await forwarder.tokenize(policy, "r1", name, {"messages": HI})
        assert (status, json.loads(payload)["max_model_len"]) == (200, known)
    assert (await (await house.http()).get("/models")).status_code == 200, "any server has the model list"


async def test_a_policy_that_answers_nowhere_is_refused_at_once(two) -> None:
    house, *_ = two
    answer = await (await house.http()).post("/chat/completions", json={"model": "poet", "messages": HI})
    assert answer.status_code == 404
    assert "No policy server answers for the policy 'poet'" in answer.json()["error"]["message"]


async def test_models_lists_what_a_call_may_ask_for_as_its_server_has_it(two) -> None:
    house, shared, own, _ = two
    shared.max_model_len, own.max_model_len = 1111, 2222
    listed = (await (await house.client()).models.list()).data
    assert [(card.id, card.max_model_len) for card in listed] == [("writer", 1111), ("checker", 1111), ("judge", 2222)]


async def test_models_lists_also_the_names_whose_server_is_down(two) -> None:
    """A program asks for the list when it starts, and does not wait for a server that it may never call."""
    house, shared, *_ = two
    shared.max_model_len = 1111
    (_, own) = house.gateway.own.pool.slots
    own.healthy = False
    cards = (await (await house.http()).get("/models")).json()["data"]
    assert [(card["id"], card.get("max_model_len")) for card in cards] == [
        ("writer", 1111),
        ("checker", 1111),
        ("judge", None),
    ]


async def test_what_is_the_same_for_all_policies_is_asked_of_any_server(two) -> None:
    house, *_ = two
    status, answer = await house.gateway.parts.forwarder.tokenize(house.gateway.own, "run/0", None, {"messages": HI})
    assert (status, b"tokens" in answer) == (200, True)


async def test_an_update_splits_a_trained_policys_call_and_leaves_a_frozen_one_at_version_0(two) -> None:
    house, shared, _, _ = two
    shared.queue(*[Reply("a b c d e f g h i", token_delay=0.01)] * 2)
    client = await house.client()
    asking = [
        asyncio.create_task(client.chat.completions.create(model=model, messages=HI)) for model in ("writer", "checker")
    ]
    await house.until(lambda: len(shared.in_flight()) == 2 and all(shared.in_flight().values()))
    async with house.gateway.hold():
        shared.pause()
        await asyncio.sleep(0.02)
        counts = shared.in_flight()
        shared.resume()
        house.gateway.own.update(Update(5, counts))
    await asyncio.gather(*asking)
    found = {call.policy: call.versions for call in await house.transitions()}
    assert found["checker"] == (VersionRun(0, 0, "checker"),)
    first, second = found["writer"]
    assert (first, second.version, second.policy) == (VersionRun(0, 0, "writer"), 5, "writer")
