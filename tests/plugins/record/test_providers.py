"""What is not the policy's goes to a provider of the settings, with the provider's key and without the rollout's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from lightning.errors import ConfigError
from lightning.types import CallStatus
from lightning_record import providers
from lightning_record.config import ProviderConfig
from lightning_record.providers import read_providers

HI = [{"role": "user", "content": "hi there"}]
KEY = "sk-of-the-provider"
VECTOR = {"object": "list", "model": "e", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}]}


@dataclass
class Provider:
    """A server that is no policy server: it remembers what it was asked."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[web.Request], object] = lambda request: web.json_response(VECTOR)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.path_qs, headers, await request.read()))
        answered = self.answer(request)
        return await answered if asyncio.iscoroutine(answered) else answered


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", made.serve)
    async with TestServer(app) as server:
        made.url = str(server.make_url("/v1"))
        yield made


@pytest.fixture
async def house(build, provider, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    config = ProviderConfig(base_url=provider.url, api_key_env="JUDGE_KEY", models=("gpt-4o*",))
    return await build(providers={"judge": config})


def everything(provider: Provider) -> str:
    return json.dumps([(*call[:3], call[3].decode("utf-8", "replace")) for call in provider.asked])


async def test_embeddings_go_there_with_its_key_and_never_with_the_rollouts(house, provider):
    llm = await house.llm()
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        answer = await client.embeddings.create(model="e", input="text", encoding_format="float")
    assert answer.data[0].embedding == [0.5]
    ((method, path, headers, body),) = provider.asked
    assert (method, path, headers["authorization"]) == ("POST", "/v1/embeddings", f"Bearer {KEY}")
    assert json.loads(body)["input"] == "text"
    assert llm.api_key not in everything(provider)
    assert not [name for name in headers if name.startswith("x-")]
    assert await house.transitions() == []


async def test_a_judges_model_is_answered_there_and_is_not_recorded(house, provider):
    provider.answer = lambda request: web.json_response({"choices": [{"message": {"content": "yes"}}]})
    llm = await house.llm()
    http = await house.http(llm)
    theirs = await http.post("/chat/completions", json={"model": "gpt-4o-mini", "messages": HI})
    ours = await http.post("/chat/completions", json={"model": "gpt-5", "messages": HI})
    assert theirs.json() == {"choices": [{"message": {"content": "yes"}}]}
    assert "x-request-id" not in theirs.headers, "a reward would be taken for that of a call of the policy's"
    assert ours.json()["model"] == "tiny"
    assert [call[1] for call in provider.asked] == ["/v1/chat/completions"]
    assert [call.requested_model for call in await house.transitions()] == ["gpt-5"]
    assert llm.api_key not in everything(provider)


async def test_an_agent_with_a_model_of_its_own_is_frozen(build, provider):
    """It is answered by the server of that name, whatever the policy is by then; all others by the policy."""
    provider.answer = lambda request: web.json_response(
        {"id": "c", "object": "chat.completion", "created": 0, "model": "frozen", "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "as at first"}}
        ]}
    )  # fmt: skip
    house = await build(providers={"frozen": ProviderConfig(base_url=provider.url, api_key_env="", models=("frozen",))})
    llm = await house.llm()
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        for model in ("frozen", llm.model, "any other"):
            await client.chat.completions.create(model=model, messages=HI)
    assert len(provider.asked) == 1
    assert [call.requested_model for call in await house.transitions()] == [llm.model, "any other"]


async def test_the_tokens_of_its_prompts_are_counted_there(house, provider):
    provider.answer = lambda request: web.json_response({"input_tokens": 3})
    http = await house.http(await house.llm())
    theirs = await http.post("/messages/count_tokens", json={"model": "gpt-4o-mini", "messages": HI})
    ours = await http.post("/messages/count_tokens", json={"model": "claude-sonnet", "messages": HI})
    assert theirs.json() == {"input_tokens": 3}
    assert [call[1] for call in provider.asked] == ["/v1/messages/count_tokens"]
    assert ours.status_code == 200
    assert ours.json() != theirs.json()


async def test_the_policys_own_name_is_nobody_elses(build, provider):
    house = await build(providers={"all": ProviderConfig(base_url=provider.url, models=("*",))})
    http = await house.http()
    for model in ("policy", "policy:writer"):
        assert (await http.post("/chat/completions", json={"model": model, "messages": HI})).status_code == 200
    assert (await http.post("/chat/completions", json={"messages": HI})).status_code == 200
    assert not provider.asked
    assert len(await house.transitions()) == 3


async def test_a_stream_comes_as_it_is_made(house, provider):
    go_on = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "set-cookie": "a=b"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    provider.answer = stream
    http = await house.http()
    asked = {"model": "gpt-4o", "messages": HI, "stream": True}
    async with http.stream("POST", "/chat/completions", json=asked) as answer:
        parts = answer.aiter_bytes()
        assert await anext(parts) == b"data: 1\n\n"
        go_on.set()
        assert [part async for part in parts] == [b"data: [DONE]\n\n"]
    assert answer.headers["content-type"] == "text/event-stream"
    assert "set-cookie" not in answer.headers


async def test_an_agent_that_hangs_up_ends_the_call_there(house, provider):
    ended = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            ended.set()
            raise

    provider.answer = wait
    http = await house.http()
    async with http.stream("POST", "/embeddings", json={}) as answer:
        await anext(answer.aiter_bytes())
    await asyncio.wait_for(ended.wait(), 30)


@pytest.mark.parametrize(
    ("header", "expected"),
    [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY), ("api-key", KEY)],
    ids=["openai", "anthropic", "azure"],
)
async def test_the_key_is_where_the_client_had_its_own(house, provider, header, expected):
    llm = await house.llm()
    value = f"Bearer {llm.api_key}" if header == "authorization" else llm.api_key
    sent = {header: value, "anthropic-version": "2023-06-01", "cookie": "a=b", "openai-organization": "org"}
    async with httpx.AsyncClient(base_url=llm.base_url, headers=sent) as http:
        assert (await http.post("/embeddings?b=1", json={})).status_code == 200
    ((_, path, headers, _),) = provider.asked
    assert path == "/v1/embeddings?b=1"
    assert headers[header] == expected
    assert headers["anthropic-version"] == "2023-06-01"
    assert not {"cookie", "openai-organization"} & set(headers)
    assert llm.api_key not in everything(provider)


async def test_files_and_what_else_is_not_listed_is_refused_with_the_setting_and_recorded(house, provider):
    http = await house.http()
    answer = await http.post("/files", content=b"...")
    assert answer.status_code == 404
    assert "gateway.providers" in answer.json()["error"]["message"]
    (call,) = await house.recorded()
    assert (call.status, call.finish_reason) == (CallStatus.REFUSED, "unknown_route")
    assert "There is no POST /v1/files here" in call.error
    assert "gateway.providers" in call.error
    assert not provider.asked
    assert (await http.get("/files")).status_code == 404
    assert len(await house.transitions()) == 1, "a look at what there is makes no call"


async def test_what_is_listed_takes_any_method_and_all_below_it(build, provider):
    house = await build(providers={"store": ProviderConfig(base_url=provider.url, routes=("files",))})
    http = await house.http()
    assert (await http.delete("/files/file-1")).status_code == 200
    assert (await http.post("/files", files={"file": ("a.txt", b"text")})).status_code == 200
    deleted, uploaded = provider.asked
    assert deleted[:2] == ("DELETE", "/v1/files/file-1")
    assert "authorization" not in deleted[2], "a provider without a key gets none, least of all the rollout's"
    assert uploaded[2]["content-type"].startswith("multipart/form-data; boundary=")
    assert b"a.txt" in uploaded[3]
    assert (await http.post("/embeddings", json={})).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "embeddings/../files", "embeddings/%2e%2e/files", "embeddings/..%2ffiles", "embeddings%2f..%2ffiles",
        "embeddings//files", "embeddings/%00", "embeddings/a%3fb", "//evil.example/embeddings", "embeddings@evil.example",
        "embeddings/%0d%0ax:y",
    ],
)  # fmt: skip
async def test_no_path_leads_out_of_its_route(house, provider, path):
    llm = await house.llm()
    host, port = llm.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))  # httpx would tidy the path
    request = (
        f"GET /v1/{path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {llm.api_key}\r\nconnection: close\r\n\r\n"
    )
    writer.write(request.encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    assert status in (400, 404)
    assert not provider.asked


async def test_without_a_rollouts_key_nothing_is_passed_on(house, provider):
    for headers in ({}, {"authorization": f"Bearer {KEY}"}):
        async with httpx.AsyncClient(base_url=f"{house.gateway.url}/v1", headers=headers) as http:
            assert (await http.post("/embeddings", json={})).status_code == 401
            assert (await http.post("/chat/completions", json={"model": "gpt-4o"})).status_code == 401
    assert not provider.asked


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_refused_is_named_and_not_shown(house, provider, status):
    provider.answer = lambda request: web.json_response({"error": f"Incorrect API key: {KEY}"}, status=status)
    http = await house.http()
    for path in ("/embeddings", "/chat/completions"):
        answer = await http.post(path, json={"model": "gpt-4o", "messages": HI})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "provider_refused_key")
        assert "JUDGE_KEY" in answer.text
        assert KEY not in answer.text
    assert [call.finish_reason for call in await house.recorded(2)] == ["provider_refused_key"] * 2


async def test_another_error_is_the_providers_own_without_the_key(house, provider):
    provider.answer = lambda request: web.Response(status=429, text=f"slow down {KEY}", headers={"retry-after": "7"})
    answer = await (await house.http()).post("/embeddings", json={})
    assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (429, "slow down [redacted]", "7")


async def test_a_redirect_is_not_followed(house, provider):
    provider.answer = lambda request: web.Response(status=307, headers={"location": f"{provider.url}/elsewhere"})
    answer = await (await house.http()).post("/embeddings", json={})
    assert answer.status_code == 502
    assert "redirect" in answer.json()["error"]["message"]
    assert len(provider.asked) == 1


async def test_a_provider_that_is_away_is_a_502(build):
    house = await build(providers={"judge": ProviderConfig(base_url="http://127.0.0.1:9/v1")})
    answer = await (await house.http()).post("/embeddings", json={})
    assert answer.status_code == 502
    assert "'judge' (gateway.providers)" in answer.json()["error"]["message"]


async def test_of_several_the_one_with_the_model_answers_else_the_first(build, provider):
    first = ProviderConfig(base_url=f"{provider.url}/first")
    second = ProviderConfig(base_url=f"{provider.url}/second", models=("nomic-*",))
    house = await build(providers={"first": first, "second": second})
    http = await house.http()
    for model in ("nomic-embed", "other"):
        await http.post("/embeddings", json={"model": model})
    assert [call[1] for call in provider.asked] == ["/v1/second/embeddings", "/v1/first/embeddings"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"base_url": "api.openai.com"}, "gateway.providers.judge is no URL"),
        ({"base_url": "https://u:p@host/v1"}, "has a user, a password or a query"),
        ({"base_url": "https://host/v1", "api_key_env": "sk-123"}, "give the name of the variable"),
        ({"base_url": "https://host/v1", "api_key_env": "NOT_THERE"}, "names NOT_THERE, which is not set"),
        ({"base_url": "https://host/v1", "routes": ("chat/completions",)}, r"gateway.providers.judge.models"),
        ({"base_url": "https://host/v1", "routes": ("../x",)}, "write what stands behind /v1/"),
    ],
)
def test_a_provider_that_cannot_be_meant_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        read_providers({"judge": ProviderConfig(**config)}, {"OTHER": "x"})


def test_a_key_is_in_no_text_of_a_provider():
    config = ProviderConfig(base_url="https://host/v1", api_key_env="JUDGE_KEY")
    (read,) = read_providers({"judge": config}, {"JUDGE_KEY": KEY})
    assert read.key == KEY
    assert KEY not in repr(read) + config.model_dump_json()


@pytest.mark.parametrize("root", ["", "/r/{key}"])
async def test_azures_clients_reach_the_policy(house, root):
    llm = await house.llm()
    place = house.gateway.url + root.format(key=llm.api_key)
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=place, api_key=llm.api_key, api_version="2024-10-21", max_retries=0
    ) as client:
        answer = await client.chat.completions.create(model="my-deployment", messages=HI)
        vector = await client.embeddings.create(model="e", input="text", encoding_format="float")
    assert answer.choices[0].message.content
    assert vector.data[0].embedding == [0.5]
    async with openai.AsyncOpenAI(base_url=f"{place}/openai/v1", api_key=llm.api_key, max_retries=0) as client:
        await client.responses.create(model="my-deployment", input="hi there")
    async with openai.AsyncAzureOpenAI(
        base_url=llm.base_url, api_key=llm.api_key, api_version="2024-10-21", max_retries=0
    ) as client:
        await client.chat.completions.create(model="my-deployment", messages=HI)
    calls = await house.recorded(3)
    assert [(call.status, call.requested_model) for call in calls] == [(CallStatus.OK, "my-deployment")] * 3


async def test_a_deployment_in_the_path_is_the_model(house):
    llm = await house.llm()
    async with httpx.AsyncClient(base_url=house.gateway.url, headers={"api-key": llm.api_key}) as http:
        path = "/openai/deployments/mine/chat/completions?api-version=2024-10-21"
        assert (await http.post(path, json={"messages": HI})).status_code == 200
    (call,) = await house.recorded()
    assert call.requested_model == "mine"


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_of_an_error_without_end_the_status_is_passed_on(house, provider, monkeypatch, status):
    """By it clients tell what they may send again."""
    monkeypatch.setattr(providers, "LONGEST_ERROR", 1000)
    headers = {"retry-after": "7", "content-type": "text/plain"}
    provider.answer = lambda request: web.Response(status=status, body=b" " * 2000, headers=headers)
    reply = await (await house.http()).post("/chat/completions", json={"model": "gpt-4o", "messages": HI})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, "provider_failed")
    assert (reply.headers["retry-after"], reply.headers["content-type"]) == ("7", "application/json")
    assert (f"status {status} and with more than 1000 bytes" in error["message"], len(reply.content) < 1000) == (
        True,
        True,
    )
