"""The control API asked in process, as a server would ask it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pytest
from lightning.store.memory import MemoryStore
from lightning.types import LLM, Lease, Rollout, Run, Scope, Task
from lightning_server.api.app import Api, Limits
from lightning_server.auth import ALL_PROJECTS, Authenticator, issue_token
from lightning_server.tokens import put_token


@dataclass
class Answer:
    """What came back: `headers` are of the last message that had some."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]["type"]


@dataclass
class World:
    """A store with a run of the default project and one of another, an API over it, and a token for each scope."""

    store: MemoryStore
    api: Api
    tokens: dict[str, str]
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        token: str = "admin",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        payload: bytes | None = None,
    ) -> Answer:
        """Ask as the holder of a token of that scope, "" for nobody."""
        sent: list[dict[str, Any]] = []
        payload = payload if payload is not None else b"" if body is None else json.dumps(body).encode()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.api(connection(method, target, (*self.authorization(token), *headers)), receiver(payload), send)
        starts = [message for message in sent if message["type"] == "http.response.start"]
        assert len(starts) == 1, "one answer for one request"
        named = {name.decode(): value.decode() for name, value in starts[0]["headers"]}
        return Answer(starts[0]["status"], named, b"".join(message.get("body", b"") for message in sent))

    def authorization(self, token: str) -> tuple[tuple[bytes, bytes], ...]:
        if not token:
            return ()
        return ((b"authorization", f"Bearer {self.tokens.get(token, token)}".encode()),)


def connection(method: str, target: str, headers: tuple[tuple[bytes, bytes], ...]) -> dict[str, Any]:
    """An ASGI scope; `target` is below the API's prefix, unless it begins with two slashes."""
    whole = target[1:] if target.startswith("//") else f"/api/v1{target}"
    path, _, query = whole.partition("?")
    return {
        "type": "http",
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
    }


def receiver(payload: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """One body, and then a client that stays."""
    messages = [{"type": "http.request", "body": payload, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    return receive


async def llm_for(lease: Lease, store: object) -> LLM:
    return LLM("http://gateway/v1", f"key of {lease.rollout.id}", "policy", {"writer": "Write."})


async def make_world(**changes: Any) -> World:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "a run", created_at=1.0))
    await store.put_run(Run("theirs", "another's", created_at=2.0, project="other"))
    await store.create_rollouts([Rollout("run/0", "run", Task("question"), "g")])
    tokens = {}
    for scope in Scope:
        token, tokens[scope.value] = issue_token(scope, ALL_PROJECTS if scope is Scope.ADMIN else "default")
        await put_token(store, token)

    async def finish(store: Any, rollout: str, attempt: int, outcome: Any) -> Rollout:
        return await store.complete(rollout, attempt, outcome)

    arguments = {"finish": finish, "llm_for": llm_for, "limits": Limits(body_bytes=100_000), **changes}
    return World(store, Api(store, Authenticator(store), **arguments), tokens)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = await make_world()
    yield made
    await made.api.close()
    await made.store.close()
