"""The tap marks requests to the gateway, only those, and goes without a trace."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import httpx2
import pytest
from lightning.bounded import Once
from lightning.instrument import activate, component, context, emit, install_tap, marking, reward
from lightning.plugins import Plugins, plugins
from lightning.runner.worker import run_agent
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Caller, Task

LIBRARIES = [httpx, httpx2]
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def tapped() -> Iterator[None]:
    undo = install_tap()
    yield
    undo()


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> Caller:
    caller = Caller("schreiber ✎", ("boss", "schreiber ✎"), span_id="s", framework="test")
    monkeypatch.setattr(Plugins, "identify", lambda self: caller)
    return caller


@pytest.mark.parametrize("library", LIBRARIES)
def test_sync_requests_are_marked(library: object, server: ChatServer, tapped: None, someone: Caller) -> None:
    llm = server.llm("key-1")
    with activate(llm), library.Client() as client:  # type: ignore[attr-defined]
        client.post(f"{llm.base_url}/chat/completions", json=BODY)
    assert (server.calls[0].rollout, server.calls[0].caller) == ("key-1", someone)


@pytest.mark.parametrize("library", LIBRARIES)
async def test_async_and_streamed_requests_are_marked(
    library: object, server: ChatServer, tapped: None, someone: Caller
) -> None:
    llm = server.llm("key-1")
    with activate(llm):
        async with (
            library.AsyncClient() as client,  # type: ignore[attr-defined]
            client.stream("POST", f"{llm.base_url}/chat/completions", json={**BODY, "stream": True}) as response,
        ):
            lines = [line async for line in response.aiter_lines()]
    assert "data: [DONE]" in lines
    assert (server.calls[0].rollout, server.calls[0].caller) == ("key-1", someone)


def start_without_context(thread: threading.Thread) -> None:
    """As what starts threads behind Python's back does."""
    vars(threading.Thread)["start"].__wrapped__(thread)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_thread_that_lost_the_context_is_named_but_gets_no_token(
    library: object, server: ChatServer, tapped: None, someone: Caller
) -> None:
    llm = server.llm("key-1")

    def post() -> None:
        with library.Client() as client:  # type: ignore[attr-defined]
            client.post(f"{llm.base_url}/chat/completions", json=BODY)

    with activate(llm):
        thread = threading.Thread(target=post)
        start_without_context(thread)
        thread.join()
    assert (server.calls[0].rollout, server.calls[0].caller) == (None, someone)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_client_that_is_kept_between_rollouts_calls_for_the_one_that_runs(
    library: Any, server: ChatServer, tapped: None
) -> None:
    """In a worker one runs at a time: a thread that lost the context can be of no other, whatever key its client has kept."""
    kept = library.Client(headers={"Authorization": "Bearer key-1"})

    def agent(task: Task, llm: LLM) -> float:
        thread = threading.Thread(target=kept.post, args=(f"{llm.base_url}/chat/completions",), kwargs={"json": BODY})
        thread.start()
        thread.join()
        return 1.0

    with asyncio.Runner() as loop, kept:
        for key in ("key-1", "key-2"):
            assert run_agent(agent, Task("x"), server.llm(key), loop).reward == 1.0
    assert [call.rollout for call in server.calls] == ["key-1", "key-2"]


def test_a_thread_that_was_left_behind_keeps_its_key(server: ChatServer, tapped: None) -> None:
    begin, llm = threading.Event(), server.llm("key-2")

    def post() -> None:
        begin.wait()
        httpx.post(f"{llm.base_url}/chat/completions", json=BODY, headers={"Authorization": "Bearer key-1"})

    thread = threading.Thread(target=post)
    thread.start()
    with activate(llm, alone=True):
        begin.set()
        thread.join()
    assert server.calls[0].rollout is None


def test_other_servers_and_other_times_see_nothing(server: ChatServer, tapped: None, someone: Caller) -> None:
    with ChatServer() as other, httpx.Client() as client:
        client.post(f"{server.llm().base_url}/chat/completions", json=BODY)
        with activate(server.llm()):
            client.post(f"{other.llm().base_url}/chat/completions", json=BODY)
        assert "x-lightning-caller" not in other.calls[0].headers
        assert "x-lightning-rollout" not in other.calls[0].headers
    assert "x-lightning-caller" not in server.calls[0].headers


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "base", ["http://GPU1:8123/v1", "https://host:443/v1", "http://host:80", "http://Bücher.de/v1"]
)
async def test_the_gateway_is_known_however_its_url_is_written(library: Any, base: str, tapped: None) -> None:
    seen: list[Any] = []

    def answer(request: Any) -> Any:
        seen.append(request.headers)
        return library.Response(200, headers={"x-request-id": f"call-{len(seen)}"})

    transport = library.MockTransport(answer)
    with activate(LLM(base, "key-1", "policy")) as session:
        with component("writer"), library.Client(base_url=base, transport=transport) as client:
            client.post("/chat/completions", json=BODY)
        async with library.AsyncClient(transport=transport) as other:
            await other.post(f"{base}/chat/completions", json=BODY)
        assert session.calls.last() == "call-2"
    assert [headers.get("x-lightning-rollout") for headers in seen] == ["key-1", "key-1"]


@pytest.mark.parametrize("status", [400, 409, 500, 502])
def test_a_refused_call_is_none_to_give_a_reward_to(status: int, tapped: None) -> None:
    replies = iter(
        [httpx.Response(200, headers={"x-request-id": "good"}), httpx.Response(status, headers={"x-request-id": "bad"})]
    )
    base = "http://gateway/v1"
    with activate(LLM(base, "key-1", "policy")) as session:
        with httpx.Client(transport=httpx.MockTransport(lambda _: next(replies))) as client:
            for _ in range(2):
                client.post(f"{base}/chat/completions", json=BODY)
        reward(1.0)
    assert [given.response_id for given in session.step_rewards] == ["good"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("headers", [{"Authorization": "Bearer key-{}"}, {"X-Api-Key": "key-{}"}])
def test_among_rollouts_a_thread_without_context_calls_for_the_one_whose_key_it_sends(
    library: Any, headers: dict[str, str], tapped: None
) -> None:
    base, numbers = "http://gateway/v1", iter(range(9))
    transport = library.MockTransport(
        lambda request: library.Response(200, headers={"x-request-id": f"call-{next(numbers)}"})
    )

    def post(key: str) -> None:
        with library.Client(transport=transport) as client:
            own = {name: value.format(key) for name, value in headers.items()}
            client.post(f"{base}/chat/completions", json=BODY, headers=own)

    with activate(LLM(base, "key-a", "policy")) as first, activate(LLM(base, "key-b", "policy")) as second:
        for key in ("a", "b", "of nobody", "a"):
            thread = threading.Thread(target=post, args=(key,))
            start_without_context(thread)
            thread.join()
        assert (first.calls.last(), second.calls.last()) == ("call-3", "call-1")


async def test_eight_rollouts_at_once(server: ChatServer, tapped: None) -> None:
    async with httpx2.AsyncClient() as client:

        async def rollout(number: int) -> None:
            llm = server.llm(f"key-{number}")
            with activate(llm):
                for turn in range(3):
                    body = {"messages": [{"role": "user", "content": f"{number} {turn}"}]}
                    await client.post(f"{llm.base_url}/chat/completions", json=body)

        await asyncio.gather(*(rollout(number) for number in range(8)))
    assert len(server.calls) == 24
    assert all(call.rollout == f"key-{call.text.split()[0]}" for call in server.calls)


@pytest.mark.parametrize("broken", ["identify", "encode"])
def test_a_name_that_cannot_be_told_breaks_nothing_and_is_logged_once(
    broken: str, server: ChatServer, tapped: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "_said", Once())
    if broken == "identify":
        monkeypatch.setattr(Plugins, "identify", lambda self: 1 / 0)
    else:
        monkeypatch.setattr(Plugins, "identify", lambda self: Caller(object()))  # type: ignore[arg-type]
    llm = server.llm("key-1")
    with activate(llm), httpx.Client() as client:
        for _ in range(2):
            assert client.post(f"{llm.base_url}/chat/completions", json=BODY).status_code == 200
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_the_tap_leaves_no_trace() -> None:
    classes = [getattr(library, name) for library in LIBRARIES for name in ("Client", "AsyncClient")]
    before = [vars(cls)["send"] for cls in classes]
    finders = list(sys.meta_path)
    first, second = install_tap(), install_tap()
    during = [vars(cls)["send"] for cls in classes]
    assert not any(a is b for a, b in zip(before, during, strict=True))
    assert all(during_send.__wrapped__ is original for during_send, original in zip(during, before, strict=True))
    first()
    first()
    assert [vars(cls)["send"] for cls in classes] == during
    second()
    assert all(vars(cls)["send"] is original for cls, original in zip(classes, before, strict=True))
    assert sys.meta_path == finders


def test_it_can_be_installed_and_undone_from_many_threads() -> None:
    before = httpx.Client.send

    def often() -> None:
        for _ in range(50):
            undo = install_tap()
            assert httpx.Client.send is not before
            undo()

    threads = [threading.Thread(target=often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert httpx.Client.send is before


def test_a_wrapper_that_came_after_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = install_tap()

    def theirs(*args: object, **kwargs: object) -> object:
        raise NotImplementedError

    monkeypatch.setattr(httpx.Client, "send", theirs)
    undo()
    assert httpx.Client.send is theirs
    monkeypatch.undo()  # puts our wrapper back, which nobody uses any more
    httpx.Client.send = httpx.Client.send.__wrapped__  # type: ignore[method-assign, attr-defined]


def test_libraries_are_tapped_when_they_are_imported_later() -> None:
    code = """
    import sys
    from lightning.instrument import install_tap
    undo = install_tap()
    assert "httpx" not in sys.modules and "httpx2" not in sys.modules, "the tap imports nothing"
    import httpx, httpx2
    for library in (httpx, httpx2):
        assert library.Client.send.__wrapped__ and library.AsyncClient.send.__wrapped__
        assert "lightning" not in type(library.__spec__.loader).__module__
    undo()
    for library in (httpx, httpx2):
        assert not hasattr(library.Client.send, "__wrapped__") and not hasattr(library.AsyncClient.send, "__wrapped__")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_header_is_ascii_and_without_empty_fields() -> None:
    assert marking.encode_caller(Caller("a")) == '{"agent":"a"}'
    assert marking.encode_caller(Caller("ä", ("b", "ä"))).isascii()


def test_adapters_get_emit_and_their_undo_is_harmless() -> None:
    plugins().install_adapters(emit, None)()
