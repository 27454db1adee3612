"""Agents that name a provider in their code: brought to the gateway when asked, warned about when not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from lightning.bounded import Once
from lightning.instrument import activate, context, install_tap, providers
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM

BODY = {"messages": [{"role": "user", "content": "hi"}]}
HOST = "api.openai.com"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as running:
        yield running


@pytest.fixture
def rerouted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(context, "_said", Once())
    undo = install_tap(["api.openai.com", "api.anthropic.com"])
    yield
    undo()


async def test_hard_coded_openai_clients_reach_the_policy(server: ChatServer, rerouted: None) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with activate(server.llm("key-1")):
        with openai.OpenAI(base_url=f"https://{HOST}/v1", api_key="sk-real") as client:
            reply = client.chat.completions.create(model="gpt-5", messages=messages)  # type: ignore[call-overload]
        async with openai.AsyncOpenAI(base_url=f"https://{HOST}/v1", api_key="sk-real") as other:
            await other.chat.completions.create(model="gpt-5", messages=messages)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == "you said hi"
    assert [(call.path, call.key, call.rollout) for call in server.calls] == [
        ("/v1/chat/completions", "key-1", "key-1")
    ] * 2
    assert all("sk-real" not in str(call.headers) for call in server.calls), "the user's own key goes nowhere"


def test_hard_coded_anthropic_clients_reach_the_policy(server: ChatServer, rerouted: None) -> None:
    with activate(server.llm("key-1")):
        with anthropic.Anthropic(api_key="sk-real", max_retries=0) as client:
            client.messages.with_raw_response.create(
                model="claude", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
            )
        httpx.post("https://api.anthropic.com/v1/messages", headers={"x-api-key": "sk-real"}, json=BODY)
    new, old = server.calls
    assert (new.path, new.key) == (old.path, old.key) == ("/v1/messages", "key-1")
    assert old.headers["x-api-key"] == "key-1"
    assert new.headers["host"] in server.llm().base_url


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_a_gateway_beyond_ascii_is_reached_with_a_host_header_that_can_be_sent(library: Any, rerouted: None) -> None:
    seen: list[Any] = []

    def answer(request: Any) -> Any:
        seen.append((request.url.host, request.headers["host"], request.headers["x-lightning-rollout"]))
        return library.Response(200)

    with (
        activate(LLM("http://Bücher.example:8000/v1", "key-1", "policy")),
        library.Client(transport=library.MockTransport(answer)) as client,
    ):
        client.post(f"https://{HOST}/v1/chat/completions", json=BODY)
    assert seen == [("bücher.example", "xn--bcher-kva.example:8000", "key-1")]


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_outside_a_rollout_nothing_is_brought_anywhere(library: object, rerouted: None) -> None:
    seen: list[str] = []

    def answer(request: object) -> object:
        seen.append(str(request.url))  # type: ignore[attr-defined]
        return library.Response(200)  # type: ignore[attr-defined]

    with library.Client(transport=library.MockTransport(answer)) as client:  # type: ignore[attr-defined]
        client.post(f"https://{HOST}/v1/chat/completions", json=BODY)
    assert seen == [f"https://{HOST}/v1/chat/completions"]


def test_an_unlisted_provider_is_left_alone_and_named_once(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "_said", Once())
    undo = install_tap()
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200)

    try:
        with (
            caplog.at_level(logging.WARNING),
            activate(server.llm()),
            httpx.Client(transport=httpx.MockTransport(answer)) as client,
        ):
            for _ in range(2):
                client.post(f"https://{HOST}/v1/responses", headers={"authorization": "Bearer sk-real"}, json=BODY)
    finally:
        undo()
    assert seen == ["Bearer sk-real"] * 2
    assert server.calls == []
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "set runner.reroute to ['api.openai.com']" in caplog.text


def test_what_is_no_model_call_is_not_brought_to_the_policy(
    server: ChatServer, rerouted: None, caplog: pytest.LogCaptureFixture
) -> None:
    answered = httpx.MockTransport(lambda _: httpx.Response(204))
    with activate(server.llm()), httpx.Client(transport=answered) as client:
        assert client.get(f"https://{HOST}/status").status_code == 204
    assert server.calls == []
    assert "has no /v1/" in caplog.text


def test_what_azures_client_asks_the_gateway_itself_goes_to_the_process_s_own_provider(
    server: ChatServer, rerouted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its URLs have no /v1/: they were once taken for a path as a whole."""
    monkeypatch.setattr(providers, "_original", {})
    with ChatServer() as own, activate(server.llm("key-1")):
        providers.remember({"OPENAI_API_KEY": "sk-real", "OPENAI_BASE_URL": own.llm().base_url})
        place = server.llm().base_url.removesuffix("/v1")
        with openai.AzureOpenAI(azure_endpoint=place, api_key="key-1", api_version="v", max_retries=0) as client:
            client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "hi"}])
            client.embeddings.with_raw_response.create(model="e", input="text")
        assert [call.path for call in server.calls] == ["/openai/deployments/mine/chat/completions?api-version=v"]
        assert [(call.path, call.key) for call in own.calls] == [("/v1/embeddings?api-version=v", "sk-real")]
        assert "key-1" not in str(own.calls)


@pytest.mark.parametrize("listed", ["API.OpenAI.com", "https://api.openai.com/v1", "api.openai.com:443"])
def test_a_host_may_be_listed_as_people_write_it(listed: str, server: ChatServer) -> None:
    undo = install_tap([listed])
    try:
        with activate(server.llm()), httpx.Client() as client:
            assert client.post(f"https://{HOST}/v1/chat/completions", json=BODY).status_code == 200
    finally:
        undo()


def start_without_context(thread: threading.Thread) -> None:
    """As what starts threads behind Python's back does."""
    vars(threading.Thread)["start"].__wrapped__(thread)


def test_a_thread_that_may_be_any_rollouts_says_that_its_call_goes_elsewhere(
    server: ChatServer, rerouted: None, caplog: pytest.LogCaptureFixture
) -> None:
    answered: list[int] = []

    def call() -> None:
        with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(204))) as client:
            answered.append(client.post(f"https://{HOST}/v1/chat/completions", json=BODY).status_code)

    with activate(server.llm("key-1")), activate(server.llm("key-2")):
        thread = threading.Thread(target=call)
        start_without_context(thread)
        thread.join()
    assert answered == [204]
    assert "may belong to any of several rollouts" in caplog.text


def test_the_last_undo_ends_the_rerouting_of_its_hosts_only(server: ChatServer) -> None:
    one, two = install_tap([HOST]), install_tap([HOST])
    one()
    try:
        with activate(server.llm()), httpx.Client() as client:
            assert client.post(f"https://{HOST}/v1/chat/completions", json=BODY).status_code == 200
    finally:
        two()
    with activate(server.llm()), httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(204))) as client:
        assert client.post(f"https://{HOST}/v1/chat/completions", json=BODY).status_code == 204
