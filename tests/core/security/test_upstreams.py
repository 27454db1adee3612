"""The gateway talks to the policy servers that it was given or may use, and to nobody that a request names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import httpx
import pytest
from aiohttp import web
from lightning.addresses import Allowed
from lightning.config import GatewayConfig
from lightning.errors import ConfigError, GatewayError
from lightning.gateway import Gateway, Upstream, upstream
from lightning.gateway.upstream import Found, Pool
from lightning.store import Store
from lightning.testing.fake_vllm import FakeVLLM
from lightning.types import LLM, Rollout, Run, Task

SECRET = b"a secret of the test, long enough"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.9.9.9",
        "localhost",
        "[::1]",
        "10.1.2.3",
        "172.16.0.9",
        "192.168.1.1",
        "100.64.0.1",
        "[fd00::1]",
        "[::ffff:10.0.0.1]",
    ],
)
def test_machines_of_ones_own_are_allowed(host: str) -> None:
    Allowed().check(f"http://{host}:8000")


@pytest.mark.parametrize(
    "host",
    [
        "8.8.8.8",
        "169.254.169.254",  # a cloud's credentials of its machines
        "[fe80::1]",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
        "[::ffff:8.8.8.8]",
        "[::ffff:169.254.169.254]",
        "2130706433",  # 127.0.0.1 as one number: a name that is not in the list
        "0x7f000001",
        "127.1",
        "localhost.evil.example",
        "metadata.google.internal",
        "gpu-7",
    ],
)
def test_others_and_names_are_not(host: str) -> None:
    with pytest.raises(GatewayError, match=r"gateway\.allowed_upstreams"):
        Allowed().check(f"http://{host}:8000")


def test_what_is_named_is_allowed_and_nothing_near_it() -> None:
    allowed = Allowed(["gpu-*.example.org", "203.0.113.0/24", "2001:db8::/32"])
    for host in ("gpu-7.example.org", "GPU-7.example.org.", "203.0.113.9", "[2001:db8::5]"):
        allowed.check(f"http://{host}")
    for host in ("gpu-7.example.org.evil.example", "cpu-7.example.org", "203.0.114.1", "127.0.0.1", "10.0.0.1"):
        with pytest.raises(GatewayError):
            allowed.check(f"http://{host}")


@pytest.mark.parametrize("pattern", ["*", "", " ", "http://gpu-7", "10.*", "10.0.0.0/99", "fd00:*", "gpu-7:8000"])
def test_what_allows_everything_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="allowed_upstreams"):
        Allowed([pattern])


@asynccontextmanager
async def listening(handler: object) -> AsyncIterator[str]:
    """A server of somebody else's."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def gateway_before(store: Store, upstream: Upstream) -> AsyncIterator[LLM]:
    """A gateway before a policy server, and an agent's key."""
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("run/0", "run", Task("x"), "g")])
    (lease,) = await store.lease("run", "w")
    gateway = Gateway(store, [upstream], GatewayConfig(hold_timeout=1.0), secret=SECRET)
    await gateway.start()
    try:
        yield gateway.llm(lease)
    finally:
        await gateway.close()


CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def test_redirects_are_not_followed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def named(*_: object) -> str:
        return ""

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    monkeypatch.setattr(upstream, "strangeness", named)  # else a server that redirects counts as another one
    async with listening(elsewhere) as target:

        async def redirect(request: web.Request) -> web.Response:
            if request.path == "/health":
                return web.Response()
            return web.Response(status=307, headers={"location": f"{target}/stolen"})

        async with (
            listening(redirect) as url,
            gateway_before(store, Upstream(url, "m")) as llm,
            client_of(llm) as client,
        ):
            answers = [
                await client.post("/v1/chat/completions", json=CHAT),
                await client.get("/v1/models"),
                await client.post("/v1/messages/count_tokens", json={**CHAT, "max_tokens": 1}),
            ]
    assert [answer.status_code for answer in answers] == [502, 502, 502]
    assert "redirect" in answers[0].text
    assert asked == []


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_a_health_check_follows_no_redirect(store: Store, length: int) -> None:
    asked: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) < length:
            return web.json_response({"data": [{"id": "m"}]})
        return web.Response(status=302, headers={"location": "/elsewhere"})

    async with listening(redirect) as url, aiohttp.ClientSession() as session:
        pool = Pool([Upstream(url, "m", "claim")])
        assert await pool.check(pool.slots[0], session) is Found.OUT
    assert (asked, pool.healthy) == (["/health", "/v1/models", "/collective_rpc"][:length], 0)


@asynccontextmanager
async def client_of(llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {llm.api_key}"}
    async with httpx.AsyncClient(base_url=llm.base_url.removesuffix("/v1"), headers=headers, timeout=20) as client:
        yield client


async def test_no_request_chooses_the_upstream(store: Store) -> None:
    asked: list[str] = []

    async def evil(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    async with (
        listening(evil) as target,
        FakeVLLM() as fake,
        gateway_before(store, Upstream(fake.url, fake.model)) as llm,
    ):
        name = target.removeprefix("http://")
        async with client_of(llm) as client:
            for body, headers in (
                ({**CHAT, "model": f"{target}/v1"}, {}),
                ({**CHAT, "api_base": target, "base_url": target, "upstream": target}, {}),
                (
                    CHAT,
                    {
                        "x-forwarded-host": name,
                        "x-original-url": target,
                        "x-lightning-upstream": target,
                        "forwarded": name,
                    },
                ),
            ):
                answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200
        host, port = llm.base_url.removesuffix("/v1").removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        payload = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}]}'
        writer.write(
            f"POST {target}/v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {llm.api_key}\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode()
            + payload
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert asked == []


async def test_no_credential_of_an_agent_is_passed_on(store: Store) -> None:
    heard: list[dict[str, str]] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append({name.lower(): value for name, value in request.headers.items()})
        return web.Response(status=400, text="{}")

    sent = {"cookie": "s=1", "proxy-authorization": "Basic x", "x-api-key": "k", "api-key": "k", "traceparent": "kept"}
    async with listening(hear) as url, gateway_before(store, Upstream(url, "m")) as llm, client_of(llm) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers=sent)
    (last,) = [headers for headers in heard if "traceparent" in headers]
    assert not {"authorization", "cookie", "proxy-authorization", "x-api-key", "api-key"} & set(last)
    assert llm.api_key not in repr(heard)
