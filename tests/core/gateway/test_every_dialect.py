"""What holds for every call holds through every dialect: durable first, aborted and failed calls recorded, retries apart."""

from __future__ import annotations

import asyncio
import json

import anthropic
import httpx
import openai
import pytest
from lightning.errors import StaleAttemptError
from lightning.gateway import identity
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import Claims, TokenSigner
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import Reply
from lightning.types import CallStatus

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi there"}]},
    "responses": {"input": "hi there"},
    "messages": {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 50},
}
LAST = {"chat/completions": b"[DONE]", "responses": b"response.completed", "messages": b"message_stop"}
every = pytest.mark.parametrize("path", BODIES)


class SlowStore(MemoryStore):
    """A store whose append waits until it is let go, and then may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def append(self, transitions):
        self.entered.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return await super().append(transitions)


async def read_into(response: httpx.Response, received: bytearray) -> None:
    async for data in response.aiter_raw():
        received.extend(data)


@every
async def test_the_last_events_leave_after_the_append(build, path):
    store = SlowStore()
    house = await build(store=store)
    http = await house.http()
    received = bytearray()
    async with http.stream("POST", f"/{path}", json={**BODIES[path], "stream": True}) as response:
        reading = asyncio.create_task(read_into(response, received))
        await store.entered.wait()
        await house.until(lambda: b" policy" in received)
        await asyncio.sleep(0.05)
        assert LAST[path] not in received
        for last in (b'"finish_reason":"stop"', b"message_delta", b"content_block_stop", b"output_item.done"):
            assert last not in received
        assert not reading.done()
        store.go.set()
        await reading
    assert LAST[path] in received
    assert len(await house.transitions()) == 1


@every
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_store_refuses_is_not_answered(build, path, stream):
    store = SlowStore()
    store.error = StaleAttemptError("attempt 1 is over")
    store.go.set()
    house = await build(store=store)
    http = await house.http()
    answer = await http.post(f"/{path}", json={**BODIES[path], "stream": stream})
    assert answer.status_code == (200 if stream else 409)
    assert stream or answer.headers["x-should-retry"] == "false"
    said = json.loads([line for line in answer.text.splitlines() if line][-1].removeprefix("data: "))
    assert "attempt 1 is over" in said["error"]["message"]
    assert LAST[path].decode() not in answer.text
    if path == "messages":
        assert said["type"] == "error"
    else:
        assert said["error"]["code"] == "stale_attempt"


@every
@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_that_was_refused_once_reaches_no_policy_server_again(house, path, stream):
    """The first call shows that the attempt is over; each API then knows it, and the next attempt's key is none of these."""
    old = await house.llm()
    await house.store.release("worker")
    (lease,) = await house.store.lease("run", "worker")
    http = await house.http(old)
    await http.post(f"/{path}", json={**BODIES[path], "stream": stream})
    assert len(house.fake.requests) == 1
    for again in BODIES:
        answer = await http.post(f"/{again}", json={**BODIES[again], "stream": stream})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
        assert "attempt 2 has taken its place" in answer.json()["error"]["message"]
        assert "the new llm.api_key" in answer.json()["error"]["message"]
    assert len(house.fake.requests) == 1
    assert await house.transitions() == []
    new = await house.http(house.gateway.llm(lease))
    assert (await new.post(f"/{path}", json=BODIES[path])).status_code == 200


async def test_of_refused_keys_the_last_ones_are_kept(monkeypatch):
    monkeypatch.setattr(identity, "STALE", 2)
    known = identity.Identity(TokenSigner(b"s" * 32))
    first, second, third = (Claims(f"rollout-{number}", 1, 100.0) for number in range(3))
    for claims in (first, second):
        known.over(claims, "it has ended")
    with pytest.raises(RefusalError):  # it is asked for again, so that the other one goes
        known.check_over(first)
    known.over(third, "it has ended")
    known.check_over(second)
    for claims in (first, third):
        with pytest.raises(RefusalError, match="it has ended"):
            known.check_over(claims)


@every
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_dies_is_an_error_in_the_dialects_shape(house, path, after, stream):
    house.fake.queue(Reply("one two three four", die_after=after))
    http = await house.http()
    answer = await http.post(f"/{path}", json={**BODIES[path], "stream": stream})
    said = json.loads([line for line in answer.text.splitlines() if line][-1].removeprefix("data: "))
    assert "The policy server broke off" in said["error"]["message"]
    if path == "messages":
        assert (said["type"], said["error"]["type"]) == ("error", "api_error")
    else:
        assert said["error"]["code"] == "upstream_failed"
    assert answer.status_code == (200 if stream and after else 502)
    (step,) = await house.recorded()
    assert step.status is CallStatus.ERROR
    assert len(step.response_ids) == (after if stream else 0)


async def ask(path: str, llm, timeout: float) -> object:
    """A call through the dialect's own client, which retries once when its time is over."""
    own = {"api_key": llm.api_key, "max_retries": 1, "timeout": timeout}
    if path == "messages":
        async with anthropic.AsyncAnthropic(base_url=llm.base_url.removesuffix("/v1"), **own) as client:
            return await client.messages.create(model="policy", **BODIES[path])
    async with openai.AsyncOpenAI(base_url=llm.base_url, **own) as client:
        if path == "responses":
            return await client.responses.create(model="policy", **BODIES[path])
        return await client.chat.completions.create(model="policy", **BODIES[path])


@pytest.mark.slow
@every
async def test_a_client_that_times_out_and_retries_is_answered_once(house, path):
    house.fake.queue(Reply(delay=30), Reply("four is it"))
    answer = await ask(path, await house.llm(), 2.0)
    assert "four is it" in answer.model_dump_json()
    await house.recorded(2)
    steps = {step.status: step for step in await house.transitions()}
    assert steps.keys() == {CallStatus.OK, CallStatus.ABORTED}
    assert steps[CallStatus.OK].id == answer.id
    await house.until(lambda: house.fake.aborted)
    assert len(house.fake.aborted) == 1


@every
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_that_is_not_to_be_shown_is_recorded_all_the_same(house, path, stream):
    """vLLM gives no ids of a call that hides its reasoning: it is asked for it, and the gateway takes it out."""
    house.fake.queue(Reply("it is four", reasoning="two plus two"))
    asked = {**BODIES[path], "stream": stream, "include_reasoning": False}
    if path == "responses":
        asked["include"] = ["message.output_text.logprobs"]
    http = await house.http()
    answer = await http.post(f"/{path}", json=asked)
    assert answer.status_code == 200
    assert "four" in answer.text
    assert not [word for word in ("two", "plus", "thinking", "reasoning_text") if word in answer.text]
    (step,) = await house.transitions()
    assert (step.status, len(step.response_ids), len(step.logprobs)) == (CallStatus.OK, 7, 7)


@every
@pytest.mark.parametrize(
    "asked",
    [
        {"include_reasoning": "no"},
        {"include_reasoning": False, "structured_outputs": {"regex": "a"}},
        {"temperature": "0.2"},
        {"temperature": True},
        {"temperature": [0.2]},
        {"temperature": 10**400},
    ],
)
async def test_what_the_record_could_not_tell_is_refused(house, path, asked):
    http = await house.http()
    answer = await http.post(f"/{path}", json={**BODIES[path], **asked})
    assert answer.status_code == 422
    assert f"'{next(iter(asked))}' " in answer.json()["error"]["message"]
    assert not house.fake.requests
    (step,) = await house.transitions()
    assert (step.status, step.finish_reason) == (CallStatus.REFUSED, "invalid_parameter")
    assert f"'{next(iter(asked))}' " in step.error


@every
@pytest.mark.parametrize(("asked", "sampled"), [(None, 1.0), (0, 0.0), (2, 2.0), (0.004, 0.01), (1e-6, 0.01)])
async def test_the_temperature_that_vllm_samples_at_is_recorded(house, path, asked, sampled):
    """It takes 0.01 for whatever is between that and 0."""
    http = await house.http()
    assert (await http.post(f"/{path}", json={**BODIES[path], "temperature": asked})).status_code == 200
    (step,) = await house.transitions()
    assert (step.temperature, step.constrained) == (pytest.approx(sampled), asked == 0)


@every
async def test_a_client_that_leaves_a_stream_has_aborted(house, path):
    house.fake.queue(Reply("one two three four", token_delay=0.2))
    http = await house.http()
    async with http.stream("POST", f"/{path}", json={**BODIES[path], "stream": True}) as response:
        async for line in response.aiter_lines():
            if "two" in line:
                break
    (step,) = await house.recorded()
    assert step.status is CallStatus.ABORTED
    assert 2 <= len(step.response_ids) < 5
    await house.until(lambda: house.fake.aborted)


async def test_clients_do_not_send_again_what_is_over(build):
    """Each time vLLM would sample a whole answer for nobody; the clients retry a 409 of their own accord."""
    store = SlowStore()
    store.error = StaleAttemptError("attempt 1 is over")
    store.go.set()
    house = await build(store=store)
    for path in BODIES:
        llm = await house.llm()  # a key that was refused once is refused before vLLM is asked
        with pytest.raises((anthropic.ConflictError, openai.ConflictError)):
            await ask(path, llm, 20.0)
    assert len(house.fake.requests) == len(BODIES)


async def test_an_answer_without_a_choice_is_the_policy_servers_fault(build):
    """What is not shaped like vLLM's is a 502 and a recorded error, never a fault of the gateway that nobody recorded."""
    from aiohttp import web
    from lightning.gateway import Upstream

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"id": "x", "choices": []})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/health", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (port,) = [address[1] for address in runner.addresses]
    try:
        house = await build(upstreams=[Upstream(f"http://127.0.0.1:{port}", "tiny")])
        http = await house.http()
        said = await http.post("/messages", json=BODIES["messages"])
        assert (said.status_code, "not shaped like vLLM's" in said.text) == (502, True)
        (step,) = await house.recorded()
        assert step.status is CallStatus.ERROR
    finally:
        await runner.cleanup()


PNG = "data:image/png;base64,iVBORw0KGgo="
HEARD = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [ANTHROPIC]}
MEDIA = [
    ("chat/completions", "messages", {"type": "image_url", "image_url": {"url": PNG}}),
    ("chat/completions", "messages", {"image_url": PNG}),
    ("chat/completions", "messages", HEARD),
    ("chat/completions", "messages", {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}),
    ("chat/completions", "messages", {"type": "file", "file": {"file_id": "file-1"}}),
    ("responses", "input", {"type": "input_image", "image_url": PNG}),
    ("responses", "input", HEARD),
    ("messages", "messages", ANTHROPIC),
    ("messages", "messages", RESULT),
]


@pytest.mark.parametrize(("path", "field", "part"), MEDIA)
async def test_a_call_with_media_is_answered_and_recorded_as_such(house, path, field, part):
    """Its prompt's ids are placeholders: law 1 does not hold for it, so it is never trained."""
    http = await house.http()
    asked = {**BODIES[path], "model": "policy", field: [{"role": "user", "content": [part]}]}
    assert (await http.post(f"/{path}", json=asked)).status_code == 200
    (step,) = await house.transitions()
    assert (step.status, step.status.answered, len(step.response_ids)) == (CallStatus.MEDIA, True, 6)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("chat/completions", "text"),
        ("chat/completions", "input_text"),
        ("chat/completions", "output_text"),
        ("responses", "input_text"),
        ("messages", "text"),
    ],
)
async def test_text_in_parts_is_no_media(house, path, kind):
    http = await house.http()
    field = "input" if path == "responses" else "messages"
    part = {"type": kind, "text": "hi there"}
    asked = {**BODIES[path], "model": "policy", field: [{"role": "user", "content": [part]}]}
    assert (await http.post(f"/{path}", json=asked)).status_code == 200
    (step,) = await house.transitions()
    assert step.status is CallStatus.OK


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("responses", "input", {"type": "input_file", "file_id": "file-1"}),
        ("messages", "messages", {"type": "document", "source": {"type": "text", "data": "hi"}}),
    ],
)
async def test_files_that_lie_elsewhere_and_documents_are_refused(house, path, field, part):
    http = await house.http()
    asked = {**BODIES[path], "model": "policy", field: [{"role": "user", "content": [part]}]}
    answer = await http.post(f"/{path}", json=asked)
    assert answer.status_code == 422
    assert "send its text" in answer.text
