"""What `previous_response_id` goes on with is found by every gateway over the store, by a restarted one too, and by no other
attempt; and it is stored once, however often the agent sends it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.config.sections import GatewayConfig
from lightning.errors import StoreError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.http import RefusalError, write_object
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.testing.fake_vllm import Reply, ToolCall
from lightning.types import CallStatus, Conversation, Transition, logprobs, token_ids
from lightning_record import conversations
from lightning_record.conversation import CONVERSATION, conversation_in, pack, storable
from lightning_record.conversations import Entry, History, Known, put_together

from tests.core.gateway.conftest import SECRET

TWO = [ToolCall("add", '{"a": 1}', id="call_x"), ToolCall("add", '{"a": 2}', id="call_y")]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
HI = {"role": "user", "content": "hi there"}
CALLS = [{"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.arguments}} for call in TWO]
RESULTS = [{"role": "tool", "content": "3", "tool_call_id": call.id} for call in TWO]
EMPTY = token_ids(), token_ids(), logprobs()


def extras_of(said: Conversation | None) -> dict[str, bytes]:
    return {} if said is None else {CONVERSATION: pack(said)}


SECRET_TEXT = "it says password=hunter2-and-more"


async def ask(client: openai.AsyncOpenAI, stream: bool, **asked):
    """A response, whole or the last event's."""
    if not stream:
        return await client.responses.create(model="policy", **asked)
    async with client.responses.stream(model="policy", **asked) as events:
        return await events.get_final_response()


@pytest.fixture
async def another(build):
    """Open one more gateway before the policy server of a house, and a client that has the same key as its agent."""
    opened: list[Gateway] = []

    async def make(house, llm, store=None) -> openai.AsyncOpenAI:
        served = [Upstream(house.fake.url, house.fake.model)]
        gateway = Gateway(store or house.store, served, GatewayConfig(), secret=SECRET)
        await gateway.start()
        opened.append(gateway)
        made = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=llm.api_key, max_retries=0)
        return await house.stack.enter_async_context(made)

    yield make
    for gateway in opened:
        await gateway.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_any_gateway_over_the_store_goes_on_with_a_response(build, another, tmp_path, stream):
    house = await build(store=SqliteStore(tmp_path / "store.db"))
    llm = await house.llm()
    first, second = await house.client(llm), await another(house, llm)
    house.fake.queue(Reply(tool_calls=TWO), Reply("three"), Reply("bye"), Reply("what?"))
    called = await ask(first, stream, input="hi there", instructions="one", tools=[ADD])
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in called.output]
    said = await ask(second, stream, input=results, instructions="two", previous_response_id=called.id)
    last = await ask(first, stream, input="thanks", previous_response_id=said.id)  # it knows half of this itself

    restarted = SqliteStore(tmp_path / "store.db")
    await restarted.open()
    third = await another(house, llm, restarted)
    await house.gateway.close()
    await ask(third, stream, input="still there?", previous_response_id=last.id)
    whole = [HI, {"role": "assistant", "tool_calls": CALLS}, *RESULTS, {"role": "assistant", "content": "three"}]
    whole += [{"role": "user", "content": "thanks"}, {"role": "assistant", "content": "bye"}]
    sent = [request.body["messages"] for request in house.fake.requests]
    assert sent[1] == [{"role": "system", "content": "two"}, *whole[:4]]
    assert sent[2] == whole[:6]
    assert sent[3] == [*whole, {"role": "user", "content": "still there?"}]

    added = [conversation_in(call) for call in await house.transitions()]
    assert [(one.after, one.kept) for one in added] == [("", 0), (called.id, 2), (said.id, 5), (last.id, 7)]
    await restarted.close()


async def test_an_attempt_finds_nothing_of_another_at_any_gateway(house, another):
    llm, other = await house.llm(), await house.llm()
    client = await house.client(llm)
    kept = await client.responses.create(model="policy", input="a")
    gone = await client.responses.create(model="policy", input="a", store=False)
    for key, response in ((other, kept), (llm, gone)):
        with pytest.raises(openai.NotFoundError, match="Send the whole conversation as input"):
            await (await another(house, key)).responses.create(
                model="policy", input="b", previous_response_id=response.id
            )


async def test_a_conversation_that_is_sent_whole_each_time_is_stored_once(house):
    client = await house.client()
    house.fake.queue(*(Reply(f"answer {number}") for number in range(4)))
    asked = []
    for number in range(4):
        asked.append({"role": "user", "content": f"question {number}"})
        said = await client.responses.create(model="policy", input=asked)
        asked += [item.model_dump(exclude_none=True) for item in said.output]
    steps = await house.transitions()
    assert [conversation_in(step) for step in steps] == [
        Conversation(
            (
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"answer {number}"},
            ),
            steps[number - 1].id if number else "",
            2 * number,
        )
        for number in range(4)
    ]


async def test_only_answers_that_may_be_continued_have_a_conversation(house):
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=[HI])
    await client.responses.create(model="policy", input="a", store=False)
    house.fake.queue(Reply("one two three four", error_after=2, message="engine is dead"))
    with pytest.raises(openai.APIError, match="engine is dead"):
        await ask(client, True, input="x")
    house.fake.queue(Reply("a b c d e f g h", token_delay=0.05))
    async with client.responses.stream(model="policy", input="hi") as events:
        async for _ in events:
            break
    steps = await house.recorded(4)
    assert [(step.status, conversation_in(step)) for step in steps] == [
        (status, None) for status in (CallStatus.OK, CallStatus.OK, CallStatus.ERROR, CallStatus.ABORTED)
    ]


async def test_an_answer_whose_policy_version_is_not_known_can_be_continued(house, another):
    llm = await house.llm()
    house.fake.queue(Reply("one two three", token_delay=0.02))
    asking = asyncio.create_task((await house.client(llm)).responses.create(model="policy", input="a"))
    await house.until(lambda: house.fake.requests)
    house.gateway.own.lose()
    said = await asking
    await (await another(house, llm)).responses.create(model="policy", input="b", previous_response_id=said.id)
    assert [message["content"] for message in house.fake.requests[1].body["messages"]] == ["a", "one two three", "b"]
    assert [step.status for step in await house.transitions()] == [CallStatus.ERROR, CallStatus.OK]


async def test_what_may_not_be_stored_is_continued_as_it_was_or_not_at_all(house, another):
    llm = await house.llm()
    client, second = await house.client(llm), await another(house, llm)
    first = await client.responses.create(model="policy", input="hi")
    said = await client.responses.create(model="policy", input=SECRET_TEXT, previous_response_id=first.id)
    last = await client.responses.create(model="policy", input="go on", previous_response_id=said.id)
    assert house.fake.requests[-1].body["messages"][2]["content"] == SECRET_TEXT
    with pytest.raises(openai.NotFoundError, match="Response '' is not known"):
        await second.responses.create(model="policy", input="b", previous_response_id="")
    for response in (said, last):
        with pytest.raises(openai.NotFoundError, match="a text that may not be stored"):
            await second.responses.create(model="policy", input="b", previous_response_id=response.id)
    await second.responses.create(model="policy", input="another way", previous_response_id=first.id)
    answered = [step for step in await house.transitions() if step.status is CallStatus.OK]
    assert [conversation_in(step) is None for step in answered] == [False, True, True, False]


async def test_an_answer_waits_for_no_thread_that_an_agent_may_hold(house):
    """The agents of the inline runner hold the loop's threads until they are answered."""
    loop, held, client = asyncio.get_running_loop(), threading.Event(), await house.client()
    await client.responses.create(model="policy", input="a")  # connected: looking up names takes such a thread
    loop.set_default_executor(ThreadPoolExecutor(1))
    holding = loop.run_in_executor(None, held.wait)
    asking = client.responses.create(model="policy", input="long " * 10_000)
    try:
        said = await asyncio.wait_for(asking, 20)
    finally:
        held.set()
        await holding
    last = (await house.transitions())[-1]
    assert (last.id, conversation_in(last) is None) == (said.id, False)


async def test_what_follows_on_a_text_that_may_not_be_stored_is_not_looked_through(monkeypatch):
    looked: list[int] = []

    def look(added: Conversation) -> Conversation | None:
        looked.append(len(added.messages))
        return storable(added)

    monkeypatch.setattr(conversations, "storable", look)
    kept, said = History(Rows()), [turn("hi"), turn(SECRET_TEXT)]
    for number in range(3):
        kept.keep(await kept.entry(("a", 1), f"resp_{number}", said))
        said = [*said, turn("go on")]
    assert looked == [2]
    entry = await kept.entry(("a", 1), "resp_x", [turn("hi"), turn("another way")])
    assert entry.stored is not None
    kept.close()


async def test_a_store_that_cannot_tell_is_asked_again(build):
    class Away(MemoryStore):
        away = True

        async def transitions(self, rollout: str, attempt: int | None = None) -> list[Transition]:
            if self.away:
                raise StoreError("the database is away")
            return await super().transitions(rollout, attempt)

    house = await build(store=Away())
    client = await house.client()
    with pytest.raises(openai.InternalServerError, match=r"the database is away\. Send the call again") as caught:
        await client.responses.create(model="policy", input="a", previous_response_id="resp_x")
    assert caught.value.status_code == 503
    house.store.away = False
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="policy", input="a", previous_response_id="resp_x")


class Rows:
    """What a store has of attempts, and how often it was asked."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], list[Transition]] = {}
        self.reads: list[str] = []

    def add(self, entry: Entry) -> None:
        rollout, attempt = entry.attempt
        seq = len(self.calls.setdefault(entry.attempt, []))
        self.calls[entry.attempt].append(
            Transition(rollout, attempt, seq, entry.id, *EMPTY, extras=extras_of(entry.stored))
        )

    async def transitions(self, rollout: str, attempt: int) -> list[Transition]:
        self.reads.append(rollout)
        return self.calls.get((rollout, attempt), [])


def turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_what_was_used_least_recently_is_read_from_the_store_again():
    rows = Rows()
    known = History(rows, most_bytes=4000)

    async def said(rollout: str) -> None:
        entry = await known.entry((rollout, 1), "resp", [turn(rollout * 1000)])
        rows.add(entry)
        known.keep(entry)

    for rollout in "abc":
        await said(rollout)
    assert await known.before(("a", 1), "resp") == [turn("a" * 1000)]
    await said("d")
    assert rows.reads == []
    for rollout in "dab":
        assert await known.before((rollout, 1), "resp") == [turn(rollout * 1000)]
    assert rows.reads == ["b"]
    with pytest.raises(RefusalError, match="resp_1"):
        await known.before(("a", 1), "resp_1")


TEXTS = st.sampled_from(["a", "b", "not to be stored"])
STEPS = st.lists(st.tuples(st.integers(0, 20), st.lists(TEXTS, min_size=1, max_size=3), st.booleans()), max_size=12)


@given(STEPS)
def test_every_conversation_is_put_together_as_it_was(steps: list[tuple[int, list[str], bool]]) -> None:
    """Conversations branch off from wherever earlier ones have been, and end in any order."""
    known, made = Known(), [[]]
    rows: list[Transition] = []
    running: list[tuple[str, list[dict[str, str]], Conversation | None]] = []

    def end() -> None:
        name, said, stored = running.pop()
        rows.append(Transition("r", 1, len(rows), name, *EMPTY, extras=extras_of(stored)))
        known.add(name, [write_object(message) for message in said], stored=stored is not None)
        assert known.conversation(name) == said
        assert put_together(rows, name) == (None if "not to be stored" in str(said) else said)

    for number, (base, texts, at_once) in enumerate(steps):
        said = [*made[base % len(made)], *map(turn, texts)]
        made += [said, said[: len(said) // 2]]
        after, kept = known.shared([write_object(message) for message in said])
        added = said[kept:]
        stored = None if "not to be stored" in str(added) else Conversation(tuple(added), after, kept)
        running.append((f"resp_{number}", said, stored))
        while running and at_once:
            end()
    while running:
        end()


@pytest.mark.parametrize(
    "said",
    [Conversation(({"role": "user", "content": "\ud800 \0 é", "n": [2**70, None]},), "call-0", 3), Conversation(())],
)
def test_what_a_response_adds_is_kept_as_it_was(said: Conversation) -> None:
    assert conversation_in(Transition("r", 1, 0, "c", *EMPTY, extras=extras_of(said))) == said


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"{}", b"[]", b'["a"]', b"[1, 2]", b'["a", "b"]'])
def test_a_damaged_conversation_is_none_of_the_policys(damaged: bytes) -> None:
    call = Transition("r", 1, 0, "c", *EMPTY, extras={CONVERSATION: damaged})
    with pytest.raises(StoreError, match=r"the conversation of transition \('r', 1, 0\) is corrupt"):
        put_together([call], "c")
