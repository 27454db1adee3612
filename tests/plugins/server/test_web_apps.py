"""What plugins answer on a server's port, and tokens that were verified before."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
import pytest
from lightning.config import GatewayConfig
from lightning.errors import ConfigError, GatewayError
from lightning.gateway import Gateway
from lightning.gateway.upstream.servers import Upstream
from lightning.store.memory import MemoryStore
from lightning.testing import FakeVLLM
from lightning.types import Run, Scope
from lightning_server.auth import Authenticator, issue_token
from lightning_server.errors import ApiError
from lightning_server.fleet.owner import Owner
from lightning_server.protocol import Host
from lightning_server.serving import Sessions, mount_web_apps
from lightning_server.tokens import put_token, revoke_token
from starlette.responses import PlainTextResponse


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


@dataclass
class Pages:
    host: Host
    closed: list[str] = field(default_factory=list)

    async def __call__(self, scope, receive, send) -> None:
        await PlainTextResponse(f"{self.host.path} serves {scope['path']}")(scope, receive, send)

    async def close(self) -> None:
        self.closed.append(self.host.path)


class Installed:
    """Plugins of which one cannot be made and one wants a path of the gateway's."""

    def __init__(self) -> None:
        self.made: dict[str, Pages] = {}

    def names(self, kind: str) -> list[str]:
        assert kind == "web_apps"
        return ["broken", "pages", "v1"]

    def get(self, kind: str, name: str):
        assert kind == "web_apps"

        def make(host: Host) -> Pages:
            if name == "broken":
                raise ConfigError("it has no settings")
            return self.made.setdefault(name, Pages(host))

        return make


async def test_an_application_answers_below_its_name_and_the_gateway_everything_else(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = Installed()
    monkeypatch.setattr("lightning_server.serving.plugins", lambda: installed)
    gateway = Gateway(store, [], GatewayConfig(), secret=b"0123456789abcdef", shared=True)
    sessions = Sessions(store, gateway, {})
    async with AsyncExitStack() as stack:
        host = Host("", "https://here", store, Authenticator(store), sessions, gateway.served)
        with caplog.at_level(logging.WARNING):
            assert mount_web_apps(stack, gateway, host) == ["/pages"]
        assert "nothing answers at /broken: it has no settings" in caplog.text
        assert "nothing can be mounted at /v1" in caplog.text
        with pytest.raises(GatewayError, match="something answers there already"):
            gateway.mount(installed.made["pages"], "pages")
        await gateway.start()
        stack.push_async_callback(gateway.close)
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            for path in ("/pages", "/pages/", "/pages/a/b"):
                assert (await client.get(path)).text == f"/pages serves {path}"
            assert (await client.get("/pagesmore")).status_code == 404
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
    assert installed.made["pages"].closed == ["/pages"]


async def test_a_session_is_answered_by_the_model_of_a_run(store: MemoryStore) -> None:
    await store.put_run(Run("trained", "trained", {}, 1.0, "team-a"))
    gateway = Gateway(store, [], GatewayConfig(), secret=b"0123456789abcdef", shared=True)
    await gateway.start()
    async with FakeVLLM() as vllm:
        owner = Owner(store, "trained")
        await owner.open((), 0)
        await owner.serve((Upstream(vllm.url, vllm.model),), 0)
        try:
            assert await gateway.served("trained")
            llm = await Sessions(store, gateway, {})("talk", 60.0, project="team-a", run="trained")
            headers = {"authorization": f"Bearer {llm.api_key}"}
            body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
            async with httpx.AsyncClient(headers=headers) as client:
                answer = await client.post(f"{llm.base_url}/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == vllm.default.text
            (session,) = [run for run in await store.list_runs("team-a") if run.id != "trained"]
            assert session.config == {"session_of": "trained"}
            assert len(await store.transitions(f"{session.id}/0")) == 1
            assert (await store.count_rollouts("trained")) == [], "the run itself has got nothing"
        finally:
            await owner.close()
            await gateway.close()


async def test_a_token_that_was_verified_is_still_good_until_it_is_not(store: MemoryStore) -> None:
    authenticator = Authenticator(store)
    token, plain = issue_token(Scope.VIEWER, "team-a")
    await put_token(store, token)
    assert await authenticator.still(token.id) == await authenticator.principal(f"Bearer {plain}")
    with pytest.raises(ApiError, match="not one of this server"):
        await authenticator.still("0" * 16)
    await revoke_token(store, token.id)
    time.sleep(1.05)
    with pytest.raises(ApiError, match="was revoked"):
        await authenticator.still(token.id)
    brief, _ = issue_token(Scope.VIEWER, "team-a", ttl=0.01)
    await put_token(store, brief)
    time.sleep(0.02)
    with pytest.raises(ApiError, match="has expired"):
        await authenticator.still(brief.id)
