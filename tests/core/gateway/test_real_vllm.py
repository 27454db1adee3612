"""The gateway before a real vLLM on a CPU; and the fake held against it, so that it stays true."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from lightning.config.sections import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.gateway.dialects import Capture, Chat, Dialect
from lightning.gateway.http import EventCutter, data_of
from lightning.policy_server.packed_logprobs import HEADER, IDS_HEADER, WANTED
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import CallStatus, Rollout, Run, Task, VersionRun

from tests.core.gateway.test_calls import contents

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "Write a long story about the number 42."}]
FEW = {"seed": 3, "max_tokens": 12}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
        },
    }
]


@pytest.fixture
def vllm(served) -> OwnedVLLM:
    return served.vllm


@pytest.fixture
async def real(build, vllm):
    return await build(upstreams=[Upstream(vllm.url, vllm.model)], version=vllm.version)


def chunks_of(payload: bytes) -> list[dict]:
    """A stream's chunks without what differs between two calls."""
    found = []
    for event in EventCutter().feed(payload):
        if (data := data_of(event)) not in (None, b"[DONE]"):
            chunk = json.loads(data)
            del chunk["id"], chunk["created"]
            found.append(chunk)
    return found


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_the_fake_refuses_what_does_not_fit_as_vllm_does(real, vllm, limit):
    length, _, through, step = await too_long(
        real, vllm, "chat/completions", lambda length: {"messages": HI, limit: length + 1}
    )
    # answered with the room that is left
    assert (step.status, step.max_tokens_asked) == (CallStatus.OK, length + 1)
    assert 0 < through.json()["usage"]["completion_tokens"] == len(step.response_ids) < length


async def too_long(real, vllm, path, asked):
    """The fake refuses it as vLLM does. Also the model's length, vLLM's refusal, the gateway's answer and what was recorded."""
    http = await real.http()
    (card, *_) = (await http.get(f"{vllm.url}/v1/models")).json()["data"]
    real.fake.max_model_len = length = card["max_model_len"]
    said = await http.post(f"{vllm.url}/v1/{path}", json={"model": vllm.model, **asked(length)})
    fakes = await http.post(f"{real.fake.url}/v1/{path}", json={"model": real.fake.model, **asked(length)})
    assert (said.status_code, said.json()["error"]) == (400, fakes.json()["error"])
    through = await http.post(f"/{path}", json=asked(length), timeout=120.0)  # all the room may be filled
    (step,) = await real.transitions()
    return length, said, through, step


async def test_streamed_ids_are_the_plain_ones_and_vllms(real, vllm):
    client = await real.client()
    plain = await client.chat.completions.create(model="policy", messages=HI, **FEW)
    stream = await client.chat.completions.create(model="policy", messages=HI, stream=True, **FEW)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    first, second = await real.transitions()
    assert first.response_ids == second.response_ids
    assert first.prompt_ids == second.prompt_ids
    assert list(first.logprobs) == pytest.approx(list(second.logprobs), abs=1e-4)
    assert len(first.logprobs) == len(first.response_ids) == plain.usage.completion_tokens > 0
    assert len(first.prompt_ids) == plain.usage.prompt_tokens
    assert text == plain.choices[0].message.content
    assert first.id == plain.id
    asked = {"model": vllm.model, "messages": HI, "return_token_ids": True, **FEW}
    async with httpx.AsyncClient() as http:
        direct = (await http.post(f"{vllm.url}/v1/chat/completions", json=asked)).json()
    assert list(first.response_ids) == direct["choices"][0]["token_ids"]
    assert list(first.prompt_ids) == direct["prompt_token_ids"]


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
    ],
)
async def test_the_agent_sees_what_vllm_would_have_said(real, vllm, asked):
    body = {"model": vllm.model, "messages": HI, **FEW, **asked, "max_tokens": 40}
    http = await real.http()
    ours = (await http.post("/chat/completions", json=body)).json()
    direct = (await http.post(f"{vllm.url}/v1/chat/completions", json=body)).json()
    for answer in (ours, direct):
        del answer["id"], answer["created"], answer["usage"]["prompt_tokens_details"]  # the second's prompt is cached
        for choice in answer["choices"]:
            assert choice.pop("logprobs") is None or "logprobs" in asked
            for call in choice["message"].get("tool_calls", ()):
                del call["id"]
    assert ours == direct
    for step in await real.transitions():
        assert len(step.response_ids) == len(step.logprobs) > 0
        assert step.constrained == ("tool_choice" in asked)


@pytest.mark.parametrize("asked", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}, {"tools": TOOLS}])
async def test_the_agent_sees_the_stream_vllm_would_have_sent(real, vllm, asked):
    """Chunk by chunk for one choice; for several, choice by choice, since vLLM interleaves them as it likes."""
    body = {"model": vllm.model, "messages": HI, "stream": True, **FEW, **asked}
    http = await real.http()
    ours = chunks_of((await http.post("/chat/completions", json=body)).content)
    direct = chunks_of((await http.post(f"{vllm.url}/v1/chat/completions", json=body)).content)

    def told(chunks: list[dict]) -> list[object]:
        said: dict[int, list] = {0: ["", []], 1: ["", []]}
        for chunk in chunks:
            (chunk.get("usage") or {}).pop("prompt_tokens_details", None)  # the second's prompt is cached
            for choice in chunk["choices"]:
                said[choice["index"]][0] += choice["delta"].pop("content", None) or ""
                rest = {**choice, "frame": {key: value for key, value in chunk.items() if key != "choices"}}
                if choice["delta"] or choice["finish_reason"]:
                    said[choice["index"]][1].append(rest)
        return [*said.values(), [chunk for chunk in chunks if not chunk["choices"]]]

    assert told(ours) == told(direct)
    for step in await real.transitions():
        assert len(step.response_ids) == len(step.logprobs) == 12


async def test_forced_tool_call_through_the_client(real):
    client = await real.client()
    choice = {"type": "function", "function": {"name": "add"}}
    asked = {"model": "policy", "messages": HI, "tools": TOOLS, "tool_choice": choice, "max_tokens": 60, "seed": 1}
    answer = await client.chat.completions.create(**asked)
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    stream = await client.chat.completions.create(**asked, stream=True)
    names = [
        call.function.name
        async for chunk in stream
        for call in chunk.choices[0].delta.tool_calls or []
        if call.function.name
    ]
    assert names == ["add"]
    plain, streamed = await real.transitions()
    assert plain.response_ids == streamed.response_ids
    assert plain.constrained
    assert streamed.constrained


async def test_vllms_own_refusals_come_through(real):
    client = await real.client()
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        await client.chat.completions.create(model="policy", messages=HI, extra_body={"top_logprobs": 2})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="policy", messages=HI, temperature=-1)
    refused = await real.transitions()
    assert [step.status for step in refused] == [CallStatus.REFUSED] * 2
    assert "top_logprobs" in refused[0].error
    assert "temperature" in refused[1].error


async def test_an_update_inside_a_call_splits_its_tokens(real, served):
    """The real thing: hold, pause, load, resume, account; the call goes on and knows which token was whose."""
    vllm, length = served.vllm, 1500
    http = await real.http()
    asked = {"messages": HI, "max_tokens": length, "ignore_eos": True, "n": 2, "stream": True}
    for _ in range(5):  # vLLM may have all tokens before a busy machine lets us read the first
        old, update = vllm.version, None
        async with http.stream("POST", "/chat/completions", json=asked) as answer:
            assert answer.status_code == 200
            async for begun in _choices_begun(answer):
                if begun == {0, 1} and update is None:
                    async with real.gateway.hold():
                        update = await vllm.update(served.second / "model.safetensors", old + 1)
                        real.gateway.own.update(update)
        assert update is not None
        steps = (await real.transitions())[-2:]
        request_id = steps[0].id.removeprefix("chatcmpl-")
        frozen = [update.in_flight.get(f"{choice}_{request_id}", length) for choice in range(2)]
        if max(frozen) < length:
            break
    assert [step.versions for step in steps] == [(VersionRun(0, old), VersionRun(n, old + 1)) for n in frozen]
    assert all(0 < tokens < length for tokens in frozen)


async def _choices_begun(answer):
    """After each piece of a streamed reply, the choices that have some text."""
    begun, cutter = set(), EventCutter()
    async for payload in answer.aiter_bytes():
        for event in cutter.feed(payload):
            data = data_of(event)
            chunk = {"choices": []} if data in (None, b"[DONE]") else json.loads(data)
            begun |= {choice["index"] for choice in chunk["choices"] if choice["delta"].get("content")}
        yield begun


async def test_a_client_that_leaves_ends_vllms_work(real, vllm):
    client = await real.client()
    stream = await client.chat.completions.create(
        model="policy", messages=HI, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    (step,) = await real.recorded()
    assert step.status is CallStatus.ABORTED
    assert 0 < len(step.response_ids) < 1500

    async with httpx.AsyncClient() as http:

        async def running() -> float:
            lines = (await http.get(f"{vllm.url}/metrics")).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

        async with asyncio.timeout(20):
            while await running():
                await asyncio.sleep(0.05)


async def test_two_runs_with_one_seed_sample_the_same_tokens(vllm):
    """`gateway.seed_calls`: another run of the same plan, calls one after another; another seed gives other tokens."""
    sampled: list[list[list[int]]] = []
    for run, seed in (("first", 1), ("second", 1), ("third", 2)):
        store = MemoryStore()
        await store.open()
        await store.put_run(Run(run, run))
        rollouts = [Rollout(f"{run}/0/0/{index}", run, Task("t"), f"{run}/0/0", index=index) for index in range(2)]
        await store.create_rollouts(rollouts)
        upstream = Upstream(vllm.url, vllm.model)
        gateway = Gateway(store, [upstream], GatewayConfig(), secret=b"s" * 32, run=run, seed=seed)
        await gateway.start()
        for lease in await store.lease(run, "worker", limit=2):
            llm = gateway.llm(lease)
            async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
                for _ in range(2):
                    await client.chat.completions.create(model="policy", messages=HI, max_tokens=24)
        calls = await store.transitions_of([(rollout.id, 1) for rollout in rollouts])
        sampled.append([list(call.response_ids) for of_rollout in calls for call in of_rollout])
        await gateway.close()
        await store.close()
    first, second, third = sampled
    assert first == second
    assert len({tuple(ids) for ids in (*first, *third)}) == 8, "each call has a seed of its own"


def shape(value: object) -> object:
    """What kind of thing is where; lists by their first item, numbers and texts alike."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return None if value is None else "bool" if isinstance(value, bool) else "value"


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("ids", [False, True])
async def test_the_fake_has_vllms_shapes(vllm, path, ids):
    asked = (
        {"max_tokens": 4, "ignore_eos": True, "messages": HI} if path[0:2] == "ch" else {"max_tokens": 4, "prompt": "a"}
    )
    if ids:
        asked |= {"return_token_ids": True, "logprobs": 0 if "prompt" in asked else True}
    said_by_one = {"usage", "system_fingerprint", "top_logprobs", "tokens", "bytes"}

    def same(value: object, ignored: set[str]) -> object:
        if isinstance(value, dict):
            return {key: same(item, ignored) for key, item in value.items() if key not in ignored | said_by_one}
        return [same(item, ignored) for item in value] if isinstance(value, list) else value

    async with FakeVLLM() as fake, httpx.AsyncClient() as http:
        answers = []
        for url, model in ((vllm.url, vllm.model), (fake.url, fake.model)):
            body = {"model": model, **asked}
            whole = (await http.post(f"{url}/v1/{path}", json=body)).json()
            chunks = chunks_of((await http.post(f"{url}/v1/{path}", json={**body, "stream": True})).content)
            # a busy vLLM puts several tokens in one chunk: the first may be the last as well
            first = same(shape(chunks[0]), {"finish_reason"})
            last = same(shape(chunks[-1]), {"prompt_token_ids", "delta"})
            answers.append((same(shape(whole), set()), first, last))
        real, ours = answers
        assert ours == real


@pytest.mark.parametrize("stream", [False, True])
async def test_packed_logprobs_are_vllms_own(real, vllm, stream):
    """The same tokens, asked for packed and as JSON: numbers bit for bit, and no other difference in the answer."""
    await packed_as_json(real, vllm, Chat(), stream, logprobs=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_packed_prompt_ids_are_vllms_own(real, vllm, stream):
    asked = {"model": vllm.model, "messages": HI, "return_token_ids": True, "stream": stream, **FEW}
    http = await real.http()
    found, texts = [], []
    for headers in ({IDS_HEADER: WANTED}, {}):
        answer = await http.post(f"{vllm.url}/v1/chat/completions", json=asked, headers=headers)
        capture = Capture("x")
        for chunk in contents(answer):
            Chat().read(chunk, capture)
        found.append(list(capture.prompt_ids))
        texts.append(contents(answer)[0]["prompt_token_ids"])
    assert found[0] == found[1] == texts[1]
    assert isinstance(texts[0], str)


async def packed_as_json(real, vllm, dialect: Dialect, stream: bool, **given: object) -> None:
    asked = {
        "model": vllm.model,
        "messages": HI,
        "prompt": "once",
        "return_token_ids": True,
        "n": 2,
        "stream": stream,
        **FEW,
        **given,
    }
    http = await real.http()
    found = []
    for headers in ({HEADER: WANTED}, {}):
        answer = await http.post(f"{vllm.url}/v1{dialect.path}", json=asked, headers=headers)
        capture = Capture("x")
        for chunk in contents(answer):
            dialect.read(chunk, capture)
        found.append(capture.choices)
    packed, plain = found
    assert len(packed) == 2
    for index, choice in packed.items():
        other = plain[index]
        assert (choice.packed, choice.aligned, other.packed, other.aligned) == (True, True, False, True)
        assert list(choice.response_ids) == list(other.response_ids)
        assert list(choice.logprobs) == list(other.logprobs)
