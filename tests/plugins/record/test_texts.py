"""What an agent sends and gets is recorded as it was, in every API, streamed or not, and told against earlier calls."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading

import anthropic
import openai
import pytest
from lightning.config import GatewayConfig
from lightning.gateway import calls
from lightning.gateway.gateway import spoken
from lightning.memory_budget import Holder
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import CallStatus, Transition, logprobs, token_ids
from lightning_record import conversation, exchanges
from lightning_record import texts as recorded
from lightning_record.exchanges import TEXTS

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi there"}]},
    "completions": {"prompt": "hi there"},
    "responses": {"input": "hi there"},
    "messages": {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 50},
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SECRET = "sk-" + "a1B2" * 10
every = pytest.mark.parametrize("path", BODIES)


async def exchanged(house, count=1, number=0):
    await house.recorded(count)
    return exchanges.read(await house.transitions(number))


@every
async def test_a_request_and_its_reply_are_what_the_agent_sent_and_got(house, path):
    http = await house.http()
    body = {**BODIES[path], "model": "mine", "temperature": 0.25, "metadata": {"b": 1, "a": "é"}}
    body |= {"metadata": {"user_id": "x"}} if path == "messages" else {}
    reply = await http.post(f"/{path}", json=body)
    assert reply.status_code == 200
    (found,) = await exchanged(house)
    assert found == exchanges.Exchange(f"/{path}", body, reply.json(), 200)


async def test_a_streamed_chat_is_recorded_as_the_whole_answer(house):
    house.fake.queue(Reply("one two three", tool_calls=[ToolCall("look", '{"at": "sky"}'), ToolCall("look", "{}")]))
    client = await house.client()
    request = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "tools": TOOLS}
    stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    seen, text, arguments, usage = set(), "", {}, None
    async for chunk in stream:
        seen.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                entry = arguments.setdefault(call.index, ["", ""])
                entry[0] = call.id or entry[0]
                entry[1] += call.function.arguments or ""
    (found,) = await exchanged(house)
    whole = openai.types.chat.ChatCompletion.model_validate(found.reply)
    (choice,) = whole.choices
    assert {whole.id} == seen
    assert choice.message.content == text
    assert [[call.id, call.function.arguments] for call in choice.message.tool_calls] == list(arguments.values())
    assert (choice.finish_reason, whole.usage.total_tokens) == ("tool_calls", usage.total_tokens)
    assert found.request["stream"] is True
    assert whole.object == "chat.completion"
    assert choice.model_extra["token_ids"] is None


async def test_a_streamed_response_and_message_are_recorded_as_the_client_puts_them_together(house):
    client = await house.client()
    async with client.responses.stream(input="hi", model="m") as stream:
        final = await stream.get_final_response()
    llm = await house.llm()
    theirs = anthropic.AsyncAnthropic(base_url=llm.base_url.removesuffix("/v1"), api_key=llm.api_key)
    await house.stack.enter_async_context(theirs)
    async with theirs.messages.stream(messages=BODIES["messages"]["messages"], max_tokens=9, model="m") as events:
        message = await events.get_final_message()
    (response,) = await exchanged(house)
    assert response.reply["id"] == final.id
    assert response.reply["output"][0]["content"][0]["text"] == final.output_text
    house.leases.reverse()
    (told,) = await exchanged(house)
    assert anthropic.types.Message.model_validate(told.reply).content[0].text == message.content[0].text
    assert (told.reply["id"], told.reply["stop_reason"]) == (message.id, message.stop_reason)
    assert told.reply["usage"]["output_tokens"] == message.usage.output_tokens


async def test_completions_with_several_choices_are_recorded_once_and_put_together(house):
    http = await house.http()
    async with http.stream("POST", "/completions", json={"prompt": ["a", "b"], "n": 2, "stream": True}) as reply:
        events = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: {")]
    calls = await house.recorded(4)
    found = exchanges.read(calls)
    assert [each is None for each in found] == [False, True, True, True]
    texts = {}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert {choice["index"]: choice["text"] for choice in found[0].reply["choices"]} == texts


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_that_the_agent_asked_for_are_put_back_from_the_row(house, stream):
    http = await house.http()
    body = {**BODIES["chat/completions"], "return_token_ids": True, "logprobs": True, "stream": stream}
    reply = await http.post("/chat/completions", json=body)
    (call,) = await house.recorded()
    assert exchanges.flags_of(call) == exchanges.Flag.IDS
    (found,) = exchanges.read([call])
    (choice,) = found.reply["choices"]
    assert choice["token_ids"] == list(call.response_ids)
    assert found.reply["prompt_token_ids"] == list(call.prompt_ids)
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(list(call.logprobs))
    if not stream:
        assert found.reply == reply.json()


async def test_a_refused_call_is_recorded_with_its_error(house):
    house.fake.queue(Reply(status=400, message="no such tool"))
    http = await house.http()
    reply = await http.post("/chat/completions", json=BODIES["chat/completions"])
    (found,) = await exchanged(house)
    assert (found.status, found.reply) == (400, reply.json())


async def test_a_call_that_broke_off_keeps_its_request_alone(house):
    house.fake.queue(Reply(die_after=1))
    http = await house.http()
    assert (await http.post("/chat/completions", json=BODIES["chat/completions"])).status_code == 502
    (call,) = await house.recorded()
    assert call.status is CallStatus.ERROR
    assert exchanges.read([call])[0] == exchanges.Exchange("/chat/completions", BODIES["chat/completions"], None, 0)


async def test_a_long_conversation_is_told_in_what_each_turn_adds(house):
    http = await house.http()
    messages, sent = [{"role": "system", "content": " ".join(map(str, range(3000)))}], []
    for turn in range(6):
        messages.append({"role": "user", "content": f"question {turn}"})
        sent.append({"messages": [*messages], "model": "m"})
        reply = await http.post("/chat/completions", json=sent[-1])
        messages.append(reply.json()["choices"][0]["message"])
    found = await exchanged(house, 6)
    assert [each.request for each in found] == sent
    sizes = [len(call.extras[TEXTS]) for call in await house.transitions()]
    assert max(sizes[1:]) < sizes[0] / 5
    assert max(sizes[1:]) < 1000


async def test_agents_that_take_turns_are_told_against_their_own_calls(house):
    http = await house.http()
    talks = {name: [{"role": "system", "content": f"{name} " * 2000}] for name in ("writer", "critic")}
    sent = []
    for turn in range(4):
        for name, talk in talks.items():
            talk.append({"role": "user", "content": f"{name} {turn}"})
            sent.append({"messages": [*talk]})
            await http.post("/chat/completions", json=sent[-1])
    found = await exchanged(house, 8)
    assert [each.request for each in found] == sent
    assert max(len(call.extras[TEXTS]) for call in (await house.transitions())[2:]) < 1000


async def test_a_request_that_comes_again_is_told_against_the_last_of_its_kind():
    """What an agent sends next quotes the answer to that one."""
    made = recorded.Exchanges()
    answers = [hashlib.sha512(bytes([n])).hexdigest() for n in range(2)]
    asked = made.asked("/chat/completions", {"messages": ["hi"]}, 10)
    for seq, answer in enumerate(answers):
        packed = await made.pack(("r", 1), asked, recorded.Shown(200, json.dumps({"text": answer}).encode()))
        made.keep(("r", 1), seq, packed)
    sizes = []
    for answer in answers:
        later = made.asked("/chat/completions", {"messages": ["hi", answer]}, 10)
        sizes.append(len((await made.pack(("r", 1), later, recorded.Shown())).stored))
    made.close()
    assert sizes[1] < sizes[0] - 50


async def test_what_a_branch_inherits_is_bounded_and_given_once():
    made = recorded.Exchanges(most_bytes=1000)
    calls = [exchanges.Said(n, b'{"messages":["%d"]}' % n, b"{}", of_parent=True) for n in range(9)]
    made.inherit(("b", 1), calls)
    made.inherit(("b", 1), [exchanges.Said(0, b"x" * 400, b"", of_parent=True)])
    last = made.asked("/chat/completions", {"messages": ["8"]}, 10)
    packed = await made.pack(("b", 1), last, recorded.Shown())
    assert packed.stored[1] == exchanges.Flag.OF_PARENT
    made.inherit(
        ("c", 1), [exchanges.Said(0, b"x" * 990, b"", of_parent=True)]
    )  # the one that has waited longest is forgotten
    packed = await made.pack(("b", 1), last, recorded.Shown())
    assert packed.stored[1] == exchanges.WHOLE
    made.close()


async def test_what_branches_share_is_remembered_once():
    """All branches of a call fit where one of them does, and what the last of them lets go of is gone."""
    made = recorded.Exchanges(most_bytes=1000)
    shared = exchanges.Said(0, exchanges.canonical({"messages": ["a" * 400]}), b"{}", of_parent=True)
    asked = made.asked("/chat/completions", {"messages": ["a" * 400, "b"]}, 500)

    async def told_against_parent(name):
        return (await made.pack((name, 1), asked, recorded.Shown())).stored[1] == exchanges.Flag.OF_PARENT

    names = [f"b{n}" for n in range(20)]
    for name in names:
        made.inherit((name, 1), [shared])
    assert all([await told_against_parent(name) for name in names])
    for n in range(recorded.MOST_BODIES):  # its own calls take the place of what it inherits
        packed = recorded.PackedExchange(b"", b"%d" % n, b"", frozenset())
        made.keep((names[0], 1), n, packed)
    assert [name for name in names if not await told_against_parent(name)] == names[:1]
    made.inherit(("c", 1), [exchanges.Said(0, b"x" * 990, b"", of_parent=True)])
    assert not any([await told_against_parent(name) for name in names])
    for name in names[1:]:
        made.inherit((name, 1), [shared])
    assert all([await told_against_parent(name) for name in names[1:]])
    made.close()


async def test_calls_that_overlap_are_read_back_whichever_ends_first(house):
    house.fake.queue(Reply("slow", delay=0.3), Reply("fast"))
    http = await house.http()
    bodies = [{"messages": [{"role": "user", "content": f"{name} " * 200}]} for name in ("slow", "fast")]
    slow = asyncio.create_task(http.post("/chat/completions", json=bodies[0]))
    await house.until(lambda: len(house.fake.requests) == 1)
    await http.post("/chat/completions", json=bodies[1])
    await slow
    found = await exchanged(house, 2)
    assert [each.request for each in found] == bodies
    assert [each.reply["choices"][0]["message"]["content"] for each in found] == ["slow", "fast"]


async def test_an_error_in_plain_text_with_a_credential_is_stored_without_it(house):
    """As a proxy before vLLM may answer: JSON, but no object."""
    packer, body = recorded.Exchanges(), BODIES["chat/completions"]
    said = recorded.as_json(f"upstream said: Authorization: Bearer {SECRET}".encode())
    packed = await packer.pack(("r", 1), packer.asked("/chat", body, 10), recorded.Shown(502, said, has_ids=False))
    packer.close()
    call = Transition("r", 1, 0, "c", token_ids(), token_ids(), logprobs(), extras={TEXTS: packed.stored})
    (found,) = exchanges.read([call])
    assert (found.status, found.redacted, found.request) == (502, True, body)
    assert found.reply.startswith("upstream said: Authorization: [redacted]")


async def test_what_cannot_be_packed_costs_no_call(house, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(recorded, "_pack", broken)
    http = await house.http()
    assert (await http.post("/chat/completions", json=BODIES["chat/completions"])).status_code == 200
    (call,) = await house.recorded()
    assert (call.status, call.extras) == (CallStatus.OK, {})
    assert "are not recorded" in caplog.text


async def test_a_gateway_that_knows_nothing_of_the_attempt_records_the_whole_request(house, monkeypatch):
    http = await house.http()
    await http.post("/chat/completions", json=BODIES["chat/completions"])
    house.gateway.parts.line.named("texts").exchanges = recorded.Exchanges()
    await http.post("/chat/completions", json=BODIES["chat/completions"])
    _, second = await house.recorded(2)
    assert exchanges.read([second])[0].request == BODIES["chat/completions"]


async def test_a_credential_is_left_out_and_said_so_in_every_call_that_repeats_it(house):
    house.fake.queue(Reply("ok"), Reply("ok"), Reply(f"your key is {SECRET}"))
    http = await house.http()
    said = [{"role": "user", "content": f"use {SECRET}"}, {"role": "user", "content": "a token, a password: none"}]
    for body in ({"messages": said}, {"messages": [*said, said[1]]}, {"messages": said[1:]}, {"messages": said[1:]}):
        await http.post("/chat/completions", json=body)
    calls = await house.recorded(4)
    found = exchanges.read(calls)
    assert [each.redacted for each in found] == [True, True, True, False]
    assert [bool(exchanges.flags_of(call) & exchanges.Flag.REDACTED) for call in calls] == [True, True, True, False]
    assert found[0].request["messages"][0]["content"] == "use [redacted]"
    assert SECRET not in json.dumps([(each.request, each.reply) for each in found])


SAID = {"role": "user", "content": f"use {SECRET}"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [*[{"role": "user", "content": "hi"}] * 500, SAID, *[{"role": "user", "content": "hi"}] * 500]},
        {"prompt": "hi", "password": ["hunter2", "hunter2"]},
        {"prompt": "hi", "stop": ["a", SECRET]},
        {"prompt": "hi", "tools": [{"api_key": "hunter2"}] * 100},
        {"prompt": "hi", **{f"field{n:03}": n for n in range(200)}, "password": "hunter2"},
    ],
    ids=["among small ones", "list under a name", "in a list of texts", "named in small ones", "among fields"],
)
async def test_a_credential_is_left_out_wherever_it_stands(body):
    packer = recorded.Exchanges()
    for seq in range(2):  # nor is it taken for known the second time
        packed = await packer.pack(("r", 1), packer.asked("/chat", body, 10), recorded.Shown())
        packer.keep(("r", 1), seq, packed)
        assert exchanges.Flag(packed.stored[1]) == exchanges.Flag.REDACTED
        assert b"hunter2" not in packed.request
        assert SECRET.encode() not in packed.request
    packer.close()


@pytest.mark.parametrize(
    "many",
    [{"stop": [f"password={n}" for n in range(60)]}, {"stop": ["password=1"], "x": {f"n{n}": n for n in range(60)}}],
    ids=["texts", "names"],
)
@pytest.mark.parametrize("where", ["request", "reply"])
async def test_more_texts_than_can_be_looked_through_are_left_out(where, many, monkeypatch):
    monkeypatch.setattr(conversation, "MOST_TEXTS", 50)
    packer = recorded.Exchanges()
    looked = []
    monkeypatch.setattr(recorded, "redacted_json", lambda value, what: looked.append(what) or value)
    asked = packer.asked("/chat", many if where == "request" else {}, 10)
    said = json.dumps(many if where == "reply" else {}).encode()
    packed = await packer.pack(("r", 1), asked, recorded.Shown(200, said))
    packer.close()
    assert exchanges.Flag(packed.stored[1]) == exchanges.Flag.REDACTED | exchanges.Flag.TOO_LARGE
    assert (packed.request, packed.reply, looked) == (b"", b"", [])


async def test_a_reply_with_ids_is_looked_through_only_where_a_credential_may_be(monkeypatch):
    """Its logprobs have more texts than any conversation, and are no reason to leave the call out."""
    monkeypatch.setattr(conversation, "MOST_TEXTS", 50)
    looked, look = [], recorded.redacted_json
    monkeypatch.setattr(recorded, "redacted_json", lambda value, what: looked.append(what) or look(value, what))
    packer = recorded.Exchanges()
    for said, times in (([f"token {n}" for n in range(60)], 0), ([f"api_key={SECRET}"], 1)):
        reply = json.dumps({"choices": [{"token_ids": [1, 2], "said": said}]}).encode()
        packed = await packer.pack(("r", 1), packer.asked("/chat", {}, 10), recorded.Shown(200, reply, has_ids=True))
        assert looked == ["reply"] * times
        assert bool(exchanges.Flag(packed.stored[1]) & exchanges.Flag.REDACTED) is bool(times)
        assert exchanges.Flag(packed.stored[1]) & exchanges.Flag.IDS
        assert (b"token 59" in packed.reply, SECRET.encode() in packed.reply) == (not times, False)
    packer.close()


@every
async def test_a_large_body_is_worked_on_beside_the_calls(house, path, monkeypatch):
    """Parsed, cut and made ready for the policy server in a thread: `/health` is answered meanwhile."""
    worked = {}
    dialect = type(next(each for each in spoken(GatewayConfig()) if each.path == f"/{path}"))
    for owner, name in ((calls, "read_object"), (recorded, "cut"), (dialect, "translate"), (dialect, "plan")):
        do = getattr(owner, name)

        def noted(*given, name=name, do=do):
            worked[name] = threading.current_thread().name
            return do(*given)

        monkeypatch.setattr(owner, name, noted)
    http = await house.http()
    small = (await http.post(f"/{path}", json=BODIES[path])).status_code
    assert (small, {*worked.values()}) == (200, {threading.current_thread().name})
    await http.post(f"/{path}", json={**BODIES[path], "extra_list": [0] * 30_000})
    assert {*worked.values()} == {"lightning-parse_0"}


@pytest.mark.parametrize(("words", "values", "trips"), [(10, 0, 0), (500, 0, 2), (10, 30_000, 3), (5_000, 0, 3)])
async def test_a_large_body_takes_few_trips_to_the_thread(house, monkeypatch, words, values, trips):
    """Parsed in one, kept and made ready in another; what reads names alone takes a third for many values, or many bytes."""
    monkeypatch.setattr("lightning.gateway.http.LONG", 1000)
    done, work = [], Holder.work
    monkeypatch.setattr(Holder, "work", lambda holder, do: done.append(do) or work(holder, do))
    asked = {
        **BODIES["chat/completions"],
        "messages": [{"role": "user", "content": "word " * words}],
        "extra_list": [0] * values,
    }
    await (await house.http()).post("/chat/completions", json=asked)
    assert len(done) == trips


async def test_a_request_that_is_too_large_is_left_out_and_said_so(house, monkeypatch):
    monkeypatch.setattr(exchanges, "LARGEST", 2000)
    http = await house.http()
    long = {"messages": [{"role": "user", "content": "x" * 3000}]}
    for body in (long, BODIES["chat/completions"]):
        await http.post("/chat/completions", json=body)
    first, second = await exchanged(house, 2)
    assert (first.too_large, first.request, first.reply, first.status) == (True, None, None, 200)
    assert not second.too_large
    assert second.request == BODIES["chat/completions"]


async def test_nothing_is_recorded_where_it_is_not_wanted(build):
    house = await build(record_requests=False)
    http = await house.http()
    await http.post("/chat/completions", json=BODIES["chat/completions"])
    (call,) = await house.recorded()
    assert call.extras == {}
    assert len(call.response_ids) > 0
    assert exchanges.read([call]) == [None]
