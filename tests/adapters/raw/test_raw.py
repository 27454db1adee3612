"""The raw adapter names callers with real clients: openai (httpx2), plain httpx; sync, async, threads, streams."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import lightning
import lightning_raw
import openai
import pytest
import uvloop
from lightning.config import RunnerConfig
from lightning.instrument import ActiveAttempt, activate, emit, install_tap
from lightning.instrument.frames import MAX_DEPTH
from lightning.plugins import plugins
from lightning.runner.inline import InlineRunner
from lightning.runner.warmth import fill_caches
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Lease, Outcome, Rollout, Task


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def session(server: ChatServer) -> Iterator[ActiveAttempt]:
    undo_tap, undo_adapters = install_tap(), plugins().install_adapters(emit, ["raw"])
    with activate(server.llm("key-1")) as active:
        yield active
    undo_adapters()
    undo_tap()


def say(session: ActiveAttempt, text: str = "hi") -> str:
    with openai.OpenAI(base_url=session.llm.base_url, api_key=session.llm.api_key) as client:
        messages = [{"role": "user", "content": text}]
        reply = client.chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content)


async def say_async(session: ActiveAttempt, text: str = "hi", *, stream: bool = False) -> str:
    async with openai.AsyncOpenAI(base_url=session.llm.base_url, api_key=session.llm.api_key) as client:
        messages = [{"role": "user", "content": text}]
        if not stream:
            reply = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
            return str(reply.choices[0].message.content)
        chunks = await client.chat.completions.create(model="policy", messages=messages, stream=True)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def say_httpx(session: ActiveAttempt, text: str = "hi") -> str:
    body = {"messages": [{"role": "user", "content": text}]}
    with httpx.Client(headers={"authorization": f"Bearer {session.llm.api_key}"}) as client:
        answer = client.post(f"{session.llm.base_url}/chat/completions", json=body)
    return str(answer.json()["choices"][0]["message"]["content"])


SYNC = [say, say_httpx]


@pytest.mark.parametrize("ask", SYNC)
def test_an_explicit_component_wins_over_frames(
    ask: Callable[[ActiveAttempt], str], server: ChatServer, session: ActiveAttempt
) -> None:
    with lightning.component("boss"), lightning.component("writer"):
        assert ask(session) == "you said hi"
    assert server.calls[0].caller == lightning.Caller("writer", ("boss", "writer"), framework="raw")
    assert server.calls[0].rollout == "key-1"


@pytest.mark.parametrize("ask", SYNC)
def test_the_nearest_functions_name_the_caller(
    ask: Callable[[ActiveAttempt], str], server: ChatServer, session: ActiveAttempt
) -> None:
    class Writer:
        def draft(self) -> str:
            return (lambda: ask(session))()

    def solve() -> str:
        return Writer().draft()

    solve()
    caller = server.calls[0].caller
    assert caller is not None
    assert caller.path[-3:] == ("solve", "Writer.draft", ask.__name__)
    assert caller.agent == ask.__name__
    assert caller.path[0] == "test_the_nearest_functions_name_the_caller", "pytest's own frames are no callers"


async def test_async_agents_are_named(server: ChatServer, session: ActiveAttempt) -> None:
    @lightning.component("solver")
    async def solver() -> str:
        return await say_async(session)

    async def plain() -> str:
        return await say_async(session)

    await solver()
    await plain()
    named, framed = (call.caller for call in server.calls)
    assert named is not None
    assert named.path == ("solver",)
    assert framed is not None
    assert framed.path[-2:] == ("plain", "say_async")


async def gathered(ask: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(ask())


async def waited_for(ask: Callable[[], Awaitable[object]]) -> None:
    await asyncio.wait_for(ask(), 60)


async def in_a_group(ask: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(ask())  # type: ignore[arg-type]


async def in_a_task_of_a_task(ask: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(asyncio.wait_for(ask(), 60))


@pytest.mark.parametrize(
    "planner", [gathered, waited_for, in_a_group, in_a_task_of_a_task], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_call_alone_in_a_task_is_that_of_the_function_which_started_it(
    planner: Callable[[Callable[[], Awaitable[object]]], Awaitable[None]],
    loop: Callable[[], asyncio.AbstractEventLoop],
    server: ChatServer,
    session: ActiveAttempt,
) -> None:
    async def agent() -> None:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.llm.api_key}"}) as client:
            url, body = f"{session.llm.base_url}/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
            await planner(functools.partial(client.post, url, json=body))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(agent())
    caller = server.calls[0].caller
    assert caller is not None
    assert (caller.agent, caller.path[-2:]) == (planner.__name__, ("agent", planner.__name__))


async def test_a_call_alone_in_a_thread_is_that_of_the_function_which_started_it(
    server: ChatServer, session: ActiveAttempt
) -> None:
    url, body = f"{session.llm.base_url}/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}

    def planner(pool: ThreadPoolExecutor, client: httpx.Client) -> None:
        pool.submit(client.post, url, json=body).result()
        list(pool.map(functools.partial(client.post, json=body), [url]))
        thread = threading.Thread(target=client.post, args=(url,), kwargs={"json": body})
        thread.start()
        thread.join()

    async def writer(client: httpx.Client) -> None:
        await asyncio.to_thread(client.post, url, json=body)

    key = {"authorization": f"Bearer {session.llm.api_key}"}
    with ThreadPoolExecutor(1) as pool, httpx.Client(headers=key) as client:
        planner(pool, client)
        await writer(client)
        pool.submit(client.post, url, json=body).result()
    names = [call.caller.agent for call in server.calls if call.caller]
    here = "test_a_call_alone_in_a_thread_is_that_of_the_function_which_started_it"
    assert names == ["planner", "planner", "planner", "writer", here]


async def test_parallel_sub_agents_keep_their_names(server: ChatServer, session: ActiveAttempt) -> None:
    @lightning.component("helper")
    async def helper(number: int) -> str:
        with lightning.component(f"n{number}"):
            return await say_async(session, f"n{number}")

    with lightning.component("boss"):
        await asyncio.gather(*(helper(number) for number in range(6)))
    assert {call.text: call.caller.path for call in server.calls if call.caller} == {
        f"n{number}": ("boss", "helper", f"n{number}") for number in range(6)
    }


async def test_streams_are_named_like_plain_calls(server: ChatServer, session: ActiveAttempt) -> None:
    @lightning.component("streamer")
    async def words() -> AsyncIterator[str]:
        yield await say_async(session, stream=True)

    assert [text async for text in words()] == ["you said hi"]
    assert server.calls[0].body["stream"] is True
    assert server.calls[0].caller == lightning.Caller("streamer", ("streamer",), framework="raw")


@pytest.mark.parametrize("ask", SYNC)
def test_threads_belong_to_the_component_and_the_rollout_of_their_starter(
    ask: Callable[[ActiveAttempt], str], server: ChatServer, session: ActiveAttempt
) -> None:
    def checker() -> str:
        return ask(session)

    with lightning.component("boss"), ThreadPoolExecutor(2) as pool:
        assert pool.submit(checker).result() == "you said hi"
    call = server.calls[0]
    assert call.caller is not None
    assert call.caller.path == ("boss",)
    assert (call.rollout, call.key) == ("key-1", "key-1")


async def test_threads_with_a_copied_context_keep_everything(server: ChatServer, session: ActiveAttempt) -> None:
    with lightning.component("boss"):
        await asyncio.to_thread(say, session)
    call = server.calls[0]
    assert call.caller is not None
    assert (call.rollout, call.caller.path) == ("key-1", ("boss",))


def test_a_tool_knows_who_called_it_and_names_its_own_calls(server: ChatServer, session: ActiveAttempt) -> None:
    @lightning.tool
    def consult(question: str) -> str:
        return say(session, question)

    with lightning.component("boss"):
        consult("why")

    def alone() -> None:
        consult("how")

    alone()
    first, second = session.tool_events
    assert first.caller == lightning.Caller("boss", ("boss",), framework="raw")
    assert second.caller is not None
    assert second.caller.agent == "alone"
    inner, framed = (call.caller for call in server.calls)
    assert inner is not None
    assert inner.path == ("boss", "consult")
    assert framed is not None
    assert framed.path[-3:] == ("alone", "consult", "say"), "lightning's own frames are left out"


def test_deep_recursion_is_cut(server: ChatServer, session: ActiveAttempt) -> None:
    def descend(depth: int) -> str:
        return descend(depth - 1) if depth else say_httpx(session)

    descend(100)
    caller = server.calls[0].caller
    assert caller is not None
    assert caller.path == ("descend",) * (MAX_DEPTH - 1) + ("say_httpx",)


def test_a_retry_keeps_its_identity(server: ChatServer, session: ActiveAttempt) -> None:
    failures = iter([True])

    def answer(_: object) -> str:
        if next(failures, False):
            raise ConnectionAbortedError("the connection is dropped without an answer")
        return "at last"

    server.answer = answer
    with lightning.component("writer"):
        assert say(session) == "at last"
    assert [call.caller for call in server.calls] == [lightning.Caller("writer", ("writer",), framework="raw")] * 2
    assert server.calls[1].headers["x-stainless-retry-count"] == "1"


def test_without_the_adapter_nobody_is_named(server: ChatServer) -> None:
    undo_tap, undo_adapters = install_tap(), plugins().install_adapters(emit, [])
    try:
        with activate(server.llm()) as session, lightning.component("writer"):
            say_httpx(session)
    finally:
        undo_adapters()
        undo_tap()
    assert server.calls[0].caller is None
    assert server.calls[0].rollout == "test-key"


async def test_whoever_runs_the_agent_is_not_named(server: ChatServer) -> None:
    """Not even when the agent has no name of its own on the stack: in a callback, a lambda, or library code."""

    async def agent(task: Task, llm: LLM) -> float:
        loop = asyncio.get_running_loop()
        called: asyncio.Future[object] = loop.create_future()
        loop.call_soon(lambda: called.set_result(plugins().identify()))
        return float(await called is None)

    def in_a_function() -> list[Outcome]:
        async def every() -> list[Outcome]:
            found = []
            for each in (agent, lambda task, llm: float(plugins().identify() is None)):
                runner = InlineRunner(each, RunnerConfig(concurrency=1))
                await runner.start()
                try:
                    lease = Lease(Rollout("r", "run", Task("x"), "g", attempt=1), "w", 0.0)
                    found.append(await runner.run(lease, server.llm()))
                finally:
                    await runner.close()
            return found

        return asyncio.run(every())

    outcomes = await asyncio.to_thread(in_a_function)
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0], outcomes


async def test_an_agent_may_run_a_loop_of_its_own(server: ChatServer, session: ActiveAttempt) -> None:
    async def inner() -> str:
        return await say_async(session)

    def agent(task: Task, llm: LLM) -> float:
        return float(asyncio.run(inner()) == "you said hi")

    runner = InlineRunner(agent, RunnerConfig(concurrency=1))
    await runner.start()
    try:
        lease = Lease(Rollout("r", "run", Task("x"), "g", attempt=1), "w", 0.0)
        assert (await runner.run(lease, session.llm)).reward == 1.0
    finally:
        await runner.close()
    caller = server.calls[0].caller
    assert caller is not None
    assert caller.path == ("agent", "inner", "say_async")


def test_the_caches_of_a_chat_completion_are_filled_and_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    from openai._models import construct_type
    from openai._utils import _transform, maybe_transform
    from openai.types.chat import ChatCompletion
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    hints: Any = _transform.get_type_hints
    hints.cache_clear()
    fill_caches()
    known = hints.cache_info().currsize
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    maybe_transform({"model": "policy", "messages": messages}, CompletionCreateParamsNonStreaming)
    assert construct_type(value={"choices": []}, type_=ChatCompletion)
    assert known == hints.cache_info().currsize > 0


def test_a_client_of_another_release_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai._utils

    monkeypatch.setattr(openai._utils, "maybe_transform", lambda data: data)  # with another signature
    lightning_raw.lightning_warm()
    monkeypatch.delattr(openai._utils, "maybe_transform")
    lightning_raw.lightning_warm()
