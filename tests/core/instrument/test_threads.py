"""Names and rollouts in threads, and on the requests of other clients than httpx."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import http.client
import http.server
import json
import multiprocessing
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, ClassVar

import aiohttp
import httpx
import lightning
import pytest
import requests
import urllib3
from lightning.bounded import Once
from lightning.instrument import activate, component_path, context, current_attempt, current_caller, install_tap
from lightning.instrument.threads import carry_names
from lightning.plugins import Plugins
from lightning.testing import ChatServer
from lightning.types import CALLER_HEADER, LLM, Caller, ToolEvent

ONE, TWO = (LLM("http://127.0.0.1:8000/v1", name, "policy") for name in ("one", "two"))
FRAMEWORK: ContextVar[Caller | None] = ContextVar("framework", default=None)
Run = Callable[[Callable[[], object]], object]


def in_thread(function: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def in_subclass(function: Callable[[], object]) -> object:
    class Worker(threading.Thread):
        def run(self) -> None:
            self.found = function()

    worker = Worker()
    worker.start()
    worker.join()
    return worker.found


def in_pool(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def in_executor(function: Callable[[], object]) -> object:
    async def run() -> object:
        return await asyncio.get_running_loop().run_in_executor(None, function)

    return asyncio.run(run())


def in_thread_of_a_thread(function: Callable[[], object]) -> object:
    return in_thread(lambda: in_pool(function))


WAYS = [in_thread, in_subclass, in_pool, in_executor, in_thread_of_a_thread]


@pytest.fixture
def carried() -> Iterator[None]:
    undo = carry_names()
    yield
    undo()


@pytest.fixture(autouse=True)
def _says_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_said", Once())


@pytest.mark.parametrize("run", WAYS)
def test_a_thread_has_the_rollout_and_the_components_of_its_starter(run: Run, carried: None) -> None:
    def inside() -> object:
        with lightning.component("draft"):
            return current_attempt(), component_path()

    with activate(ONE) as one, activate(TWO), lightning.component("writer"):
        two = current_attempt()
        assert run(inside) == (two, ("writer", "draft"))
        assert two is not one
    assert run(component_path) == ()


@pytest.mark.parametrize("run", WAYS)
def test_a_thread_has_the_name_that_a_framework_gave_its_starter(
    run: Run, carried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plugins, "identify", lambda self: FRAMEWORK.get())

    def inside() -> object:
        with lightning.component("draft"):
            caller = current_caller()
        return caller, current_caller(), FRAMEWORK.get()

    token = FRAMEWORK.set(Caller("node", ("graph", "node"), "span", "parent", "langchain"))
    with activate(ONE):
        deep, flat, framework = run(inside)  # type: ignore[misc]  # a tuple
    FRAMEWORK.reset(token)
    assert (deep.agent, deep.path) == ("draft", ("graph", "node", "draft"))
    assert (flat.agent, flat.path, flat.framework) == ("node", ("graph", "node"), "langchain")
    assert framework is None, "the user's and the framework's own variables stay as Python has them"


def test_work_of_one_pool_is_that_of_who_gave_it(carried: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        for llm in (ONE, TWO):
            with activate(llm) as session:
                assert pool.submit(current_attempt).result() is session
        assert pool.submit(current_attempt).result() is None


def test_a_thread_that_outlives_its_rollout_belongs_to_no_other(carried: None) -> None:
    go, found = threading.Event(), list[object]()

    def late() -> None:
        go.wait(30)
        found.append((current_attempt(), component_path()))

    with activate(ONE), lightning.component("old"):
        thread = threading.Thread(target=late)
        thread.start()
    with activate(TWO):
        go.set()
        thread.join()
    assert found == [(None, ())]


def test_a_reward_in_a_thread_follows_the_call_of_its_starter(carried: None) -> None:
    with activate(ONE) as session:
        session.calls.add("call-1", "agent")
        in_pool(lambda: lightning.reward(1.0))
    assert [given.response_id for given in session.step_rewards] == ["call-1"]


def test_outside_a_rollout_nothing_is_wrapped_and_the_undo_is_exact() -> None:
    before = threading.Thread.start, ThreadPoolExecutor.submit, http.client.HTTPConnection.endheaders
    undo = install_tap()
    assert threading.Thread.start is not before[0]
    thread = threading.Thread(target=int)
    thread.start()
    assert "run" not in vars(thread)
    thread.join()
    undo()
    assert before == (threading.Thread.start, ThreadPoolExecutor.submit, http.client.HTTPConnection.endheaders)


@pytest.mark.parametrize("run", [in_thread, in_pool, in_executor])
def test_what_a_rollout_has_left_behind_starts_is_nobodys(run: Run) -> None:
    undo = carry_names()
    ended, seen, tools = threading.Event(), list[object](), list[object]()

    def left() -> None:
        ended.wait()
        seen.append(run(current_attempt))
        run(lambda: context.emit(ToolEvent("late", "ok")))

    with activate(ONE) as one:
        thread = threading.Thread(target=contextvars.copy_context().run, args=[left])
        thread.start()
    with activate(TWO) as two:
        ended.set()
        thread.join()
        tools += two.tool_events
    undo()
    assert seen == [one]
    assert tools == []


class Watching:
    """A wrapper of a method as OpenTelemetry's for threads: its class tells it the instance, a bare call does not."""

    def __init__(self, wrapped: Callable[..., object], seen: list[object]) -> None:
        functools.update_wrapper(self, wrapped)
        self.wrapped, self.seen = wrapped, seen

    def __get__(self, instance: object, owner: type) -> Callable[..., object]:
        def call(*args: object) -> object:
            bound = args if instance is None else (instance, *args)
            self.seen.append(bound[0])
            return self.wrapped(*bound)

        return call

    def __call__(self, *args: object) -> object:
        self.seen.append(None)
        return self.wrapped(*args)


def test_what_another_library_has_put_around_a_method_still_knows_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    theirs = Watching(threading.Thread.start, seen)
    monkeypatch.setattr(threading.Thread, "start", theirs)
    undo = carry_names()
    with activate(ONE) as one:
        assert in_thread(current_attempt) is one
    undo()
    assert [type(each) for each in seen] == [threading.Thread]
    assert vars(threading.Thread)["start"] is theirs


def _child(queue: Any) -> None:
    with activate(ONE), lightning.component("writer"):
        queue.put(in_thread(component_path))


def test_it_survives_a_fork(carried: None) -> None:
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get() == ("writer",)
    child.join()


# other clients ----------------------------------------------------------------------------------------------------------
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def by_requests(llm: LLM) -> None:
    url = f"{llm.base_url}/chat/completions"
    requests.post(url, json=BODY, headers={"authorization": f"Bearer {llm.api_key}"}, timeout=30).raise_for_status()


def by_urllib3(llm: LLM) -> None:
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    urllib3.PoolManager().request("POST", f"{llm.base_url}/chat/completions", body=json.dumps(BODY), headers=headers)


def by_urllib(llm: LLM) -> None:
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(BODY).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()


def by_aiohttp(llm: LLM) -> None:
    async def post() -> None:
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session,
            session.post(f"{llm.base_url}/chat/completions", json=BODY) as reply,
        ):
            await reply.read()

    asyncio.run(post())


CLIENTS = [by_requests, by_urllib3, by_urllib, by_aiohttp]


class Gateway(http.server.BaseHTTPRequestHandler):
    """Keeps the headers of each request, and answers it with an id."""

    seen: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.seen.append(self.headers)
        self.send_response(200)
        self.send_header("x-request-id", f"call-{len(self.seen)}")
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def gateway() -> Iterator[LLM]:
    Gateway.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield LLM(f"http://127.0.0.1:{server.server_port}/v1", "key", "policy")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("post", CLIENTS)
def test_other_clients_carry_what_httpx_does_and_their_calls_are_known(
    post: Callable[[LLM], None], gateway: LLM
) -> None:
    undo = install_tap()
    with activate(gateway) as session, lightning.component("writer"):
        post(gateway)
        in_thread(lambda: post(gateway))
        lightning.reward(1.0)
    undo()
    for headers in Gateway.seen:
        assert json.loads(headers[CALLER_HEADER])["path"] == ["writer"]
        assert (headers["x-lightning-rollout"], headers.get_all("authorization")) == ("key", ["Bearer key"])
    assert len(Gateway.seen) == 2
    assert [given.response_id for given in session.step_rewards] == ["call-2"]


@pytest.mark.parametrize("post", CLIENTS)
def test_requests_elsewhere_are_left_alone(post: Callable[[LLM], None]) -> None:
    undo = install_tap()
    with ChatServer() as server, activate(ONE), lightning.component("writer"):
        post(server.llm())
        (call,) = server.calls
    undo()
    assert CALLER_HEADER not in {name.lower() for name in call.headers}


def test_a_call_without_a_name_is_said_where_a_framework_names_others(
    monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    answers = [Caller("solver", framework="langchain"), None, None]
    monkeypatch.setattr(Plugins, "identify", lambda self: answers.pop(0))
    undo = install_tap()
    with ChatServer() as server, activate(server.llm()) as session:
        for _ in range(3):
            httpx.post(f"{session.llm.base_url}/chat/completions", json=BODY, headers={"authorization": "Bearer key"})
    undo()
    (warning,) = warnings_of()
    assert "langchain" in warning
    assert "lightning.component" in warning
