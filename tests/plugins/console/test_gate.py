"""Who may open a console: asked over HTTP, with something small in the place of Gradio."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from lightning.errors import MissingExtraError, UnavailableError
from lightning.gateway.connections import Entrance
from lightning.installation import install_command
from lightning.store.memory import MemoryStore
from lightning.types import Scope
from lightning_console.web import gate
from lightning_console.web.gate import VISITOR, Door, Gate, OwnDoor, TokenDoor
from lightning_server.auth import Authenticator, issue_token
from lightning_server.config import PortLimits
from lightning_server.port import Guard
from lightning_server.tokens import put_token, revoke_token
from starlette.responses import PlainTextResponse

BASE = "http://127.0.0.1:8765"
ASKS = {"fn_name": "show", "data": {"address": "runs"}, "component_id": 1, "session_hash": "a"}


@asynccontextmanager
async def opened(door: Door, *, secure: bool = False, guarded: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    """A browser before a gate behind which everybody is greeted by name; `guarded` as a port is."""

    async def inside() -> object:
        async def greet(scope, receive, send) -> None:
            assert scope["query_string"] == b"", "Gradio has a `page` of its own"
            await PlainTextResponse(f"hello {VISITOR.get().name}, of {VISITOR.get().project}")(scope, receive, send)

        return greet

    async def answer(asked: dict[str, Any]) -> dict[str, Any]:
        return {"asked": asked, "by": VISITOR.get().name}

    gate = Gate(door, "/console", inside, {"show": answer, "act": answer}, secure=secure)  # type: ignore[arg-type]
    app = Entrance(Guard(gate, PortLimits()), PortLimits(), loopback=True) if guarded else gate
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as client:
        yield client


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    yield store
    await store.close()


async def token_of(store: MemoryStore, scope: Scope, project: str = "default", ttl: float | None = None) -> str:
    token, plain = issue_token(scope, project, name=f"{scope}'s", ttl=ttl)
    await put_token(store, token)
    return plain


# on a person's own machine -------------------------------------------------------------------------------------
async def test_the_printed_address_opens_the_console_and_nothing_else_does() -> None:
    door = OwnDoor()
    async with opened(door) as client:
        for path in (
            "/console/",
            "/console/config",
            "/console/gradio_api/component_server",
            "/console/lightning/shell.js",
        ):
            assert (await client.get(path)).status_code == 401
        wrong = await client.get("/console/?token=guessed")
        assert (wrong.status_code, "has printed" in wrong.text) == (401, True)
        let_in = await client.get(f"/console/?token={door.token}&page=run%2Fa")
        assert let_in.status_code == 303
        assert let_in.headers["location"] == "/console/?page=run%2Fa", "the token does not stay in the address bar"
        cookie = let_in.headers["set-cookie"].lower()
        assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/console"))
        assert door.token.lower() not in cookie
        assert (await client.get("/console/?page=run%2Fa")).text == "hello , of None"
        assert "lightning.start" in (await client.get("/console/lightning/shell.js")).text


async def test_a_token_for_one_use_opens_the_console_once_also_from_a_file() -> None:
    """A redirect of what a file's page asked for would leave the cookie out, which is for requests of the same site."""
    door = OwnDoor()
    async with opened(door) as client:
        link = f"/console/?token={door.once()}&page=run%2Fa"
        let_in = await client.get(link, headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"})
        assert let_in.status_code == 200
        assert 'content="0; url=/console/?page=run%2Fa"' in let_in.text
        assert (await client.get("/console/?page=run%2Fa")).text == "hello , of None"
        assert (await client.get(link)).status_code == 401
        assert (await client.get(f"/console/?token={door.token}")).status_code == 303, "the printed one still does"


async def test_a_page_of_another_site_and_of_another_port_does_nothing() -> None:
    door = OwnDoor()
    async with opened(door) as client:
        await client.get(f"/console/?token={door.token}")
        call = "/console/gradio_api/component_server"
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "http://127.0.0.1:9999"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
            {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
        ):
            assert (await client.post(call, headers=headers)).status_code == 403, headers
        followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get("/console/", headers=followed)).status_code == 200, "a link in a mail may be followed"
        own = {"origin": BASE, "sec-fetch-site": "same-origin"}
        assert (await client.post(call, headers=own, json=ASKS)).status_code == 200


async def test_a_page_asks_in_json_alone() -> None:
    """Gradio parses a form at the same route, and keeps what is uploaded."""
    door = OwnDoor()
    async with opened(door) as client:
        await client.get(f"/console/?token={door.token}")
        for call in ("/console/gradio_api/component_server", "/console/gradio_api/component_server/"):
            assert (await client.post(call, files={"data": b"x"}, data={"fn_name": "show"})).status_code == 415
            assert (await client.post(call, data={"fn_name": "show"})).status_code == 415
            assert (await client.post(call, content=b"{}")).status_code == 415
            charset = {"content-type": "Application/JSON; charset=utf-8"}
            answer = await client.post(call, content=json.dumps(ASKS).encode(), headers=charset)
            assert (answer.status_code, answer.json()) == (200, {"asked": ASKS["data"], "by": ""})
            assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *((body, 400) for body in (b"[]", b"1", b"null", b'"show"', b"", b"{", b"\xff", b"[" * 100_000, b"{}")),
        (b'{"fn_name": "show"}', 400),
        *((b'{"fn_name": "show", "data": %s}' % data, 400) for data in (b"[]", b"1", b"null", b'"a"')),
        *((b'{"fn_name": %s, "data": {}}' % name, 400) for name in (b'"__init__"', b"[]", b"{}", b"null", b"1")),
        (b'{"fn_name": "show", "data": {"a": "%s"}}' % (b"a" * (1 << 20)), 413),
        (b'{"component_id": [], "session_hash": {}, "fn_name": "show", "data": {"a": "\\ud800"}}', 200),
    ],
)
async def test_whatever_is_asked_is_answered_or_refused(body: bytes, status: int) -> None:
    door = OwnDoor()
    async with opened(door) as client:
        await client.get(f"/console/?token={door.token}")
        call, headers = "/console/gradio_api/component_server", {"content-type": "application/json"}
        answer = await client.post(call, content=body, headers=headers)
        assert answer.status_code == status
        assert status != 400 or answer.text == 'A page asks by POST, {"fn_name": "show" or "act", "data": {...}}.'
        assert (await client.get(call, headers=headers)).status_code == 400


async def test_of_gradio_s_own_routes_only_those_are_open_that_a_page_uses() -> None:
    door = OwnDoor()
    async with opened(door) as client:
        await client.get(f"/console/?token={door.token}")
        for path in ("upload", "file=/etc/passwd", "proxy=http://x", "queue/join", "mcp/sse", "run/show", "monitoring"):
            assert (await client.get(f"/console/gradio_api/{path}")).status_code == 404, path
        for path in (
            "monitoring/summary",
            "file=/etc/passwd",
            "lightning/../plugin.py",
            "lightning/..%2Fplugin.py",
            "docs",
        ):
            assert (await client.get(f"/console/{path}")).status_code == 404, path


async def test_a_page_may_ask_this_server_alone() -> None:
    door = OwnDoor()
    async with opened(door) as client:
        answer = await client.get(f"/console/?token={door.token}", follow_redirects=True)
    assert answer.headers["referrer-policy"] == "same-origin", "a browser must say where a form came from"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert answer.headers["cache-control"] == "no-store"


# on a server's port --------------------------------------------------------------------------------------------
async def test_a_viewer_logs_in_and_out(store: MemoryStore) -> None:
    plain = await token_of(store, Scope.VIEWER, "team-a")
    async with opened(TokenDoor(Authenticator(store)), secure=True) as client:
        asked = await client.get("/console/?page=run%2Fa")
        assert (asked.status_code, asked.headers["location"]) == (303, "/console/login?next=run/a")
        assert (await client.get("/console/gradio_api/info")).status_code == 401
        form = await client.get("/console/login?next=run/a")
        assert 'name="token"' in form.text
        assert 'value="run/a"' in form.text
        let_in = await client.post("/console/login", data={"token": f" {plain}\n", "next": "run/a"})
        assert (let_in.status_code, let_in.headers["location"]) == (303, "/console/?page=run%2Fa")
        cookie = let_in.headers["set-cookie"]
        assert plain not in cookie
        assert plain.rpartition("_")[2] not in cookie
        assert all(part in cookie.lower() for part in ("httponly", "samesite=strict", "secure"))
        session = {"cookie": cookie.partition(";")[0]}
        assert (await client.get("/console/", headers=session)).text == "hello viewer's, of team-a"
        assert (await client.post("/console/logout", headers=session)).status_code == 303
        assert (await client.get("/console/", headers=session)).status_code == 303, (
            "the session is over at the server too"
        )


async def test_what_opens_nothing_is_told_so_and_counted_as_a_wrong_token(store: MemoryStore) -> None:
    runner = await token_of(store, Scope.RUNNER)
    plain = await token_of(store, Scope.VIEWER)
    async with opened(TokenDoor(Authenticator(store))) as client:
        for given, status, said in (
            ("", 401, "No token"),
            ("guess", 401, "no token"),
            (plain[:-1] + ("A" if plain[-1] != "A" else "B"), 401, "not one of this server"),
            (runner, 403, "needs viewer or trainer or admin"),
            ("x" * 10_000, 413, "More than 4096 bytes were sent"),
        ):
            answer = await client.post("/console/login", data={"token": given, "next": 'run/a"'})
            assert answer.status_code == status
            assert status == 413 or 'value="run/a&quot;"' in answer.text, "the right token leads to the page"
            assert said in answer.text
            assert "set-cookie" not in answer.headers
        marked = await client.get("/console/login?next=%22%3E%3Cscript%3E")
        assert "<script>" not in marked.text


async def test_a_packed_form_is_bounded_as_it_comes_and_as_it_is_unpacked(store: MemoryStore) -> None:
    plain = await token_of(store, Scope.VIEWER)
    sent: list[int] = []

    async def empty() -> AsyncIterator[bytes]:
        """It becomes nothing, however much of it comes."""
        for number in range(10_000):
            sent.append(number)
            yield gzip.compress(b"") * 10

    headers = {"content-encoding": "gzip", "content-type": "application/x-www-form-urlencoded"}
    async with opened(TokenDoor(Authenticator(store)), guarded=True) as client:
        bomb = gzip.compress(b"x" * 2_000_000)
        for content, status in ((gzip.compress(f"token={plain}".encode()), 303), (bomb, 413), (empty(), 413)):
            answer = await client.post("/console/login", content=content, headers=headers)
            assert answer.status_code == status, answer.text
            assert ("More than 4096 bytes were sent" in answer.text) is (status == 413)
        assert len(sent) < 30
        answer = await client.post("/console/login", content=b"x", headers={**headers, "content-encoding": "br"})
        assert answer.status_code == 415


async def test_a_session_ends_with_its_token(store: MemoryStore) -> None:
    door = TokenDoor(Authenticator(store))
    plain = await token_of(store, Scope.VIEWER)
    brief, expired = issue_token(Scope.VIEWER, "default", ttl=1.0)
    await put_token(store, brief)
    first, second = await door.enter(plain), await door.enter(expired)
    assert await door.find(first) is not None
    await revoke_token(store, plain.split("_")[1])
    time.sleep(1.1)  # what a server believes of a token, and the life of the second one
    assert await door.find(first) is None
    assert await door.find(second) is None
    assert await door.find("made up") is None


async def test_who_logs_in_again_and_again_ends_their_own_sessions_alone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "SESSIONS_EACH", 3)
    door = TokenDoor(Authenticator(store))
    quiet, loud = await token_of(store, Scope.VIEWER), await token_of(store, Scope.VIEWER)
    kept = await door.enter(quiet)
    many = [await door.enter(loud) for _ in range(10)]
    assert await door.find(kept) is not None
    assert [await door.find(session) is not None for session in many] == [False] * 7 + [True] * 3
    door.leave(many[-1])
    again = await door.enter(loud)
    assert [await door.find(session) is not None for session in (*many[-3:], again)] == [True, True, False, True]


async def test_what_a_store_says_of_itself_is_not_for_strangers(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: object) -> None:
        raise UnavailableError("postgresql://db.lab:5432 refused lightning")

    plain = await token_of(store, Scope.VIEWER)
    monkeypatch.setattr(MemoryStore, "call", gone)
    async with opened(TokenDoor(Authenticator(store))) as client:
        refused = await client.post("/console/login", data={"token": plain})
    assert refused.status_code == 503
    assert "db.lab" not in refused.text
    assert "db.lab" in caplog.text


async def test_a_console_that_is_not_installed_is_said_to_who_may_see_it() -> None:
    async def inside() -> object:
        raise MissingExtraError("console", "gradio")

    door = OwnDoor()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(Gate(door, "/console", inside, {})), base_url=BASE
    ) as client:
        assert "pip" not in (await client.get("/console/")).text
        answer = await client.get(f"/console/?token={door.token}", follow_redirects=True)
    assert answer.status_code == 503
    assert install_command("console") in answer.text


@pytest.mark.parametrize(("scope", "changes"), [(Scope.VIEWER, False), (Scope.TRAINER, True), (Scope.ADMIN, True)])
async def test_who_may_change_something(store: MemoryStore, scope: Scope, changes: bool) -> None:
    door = TokenDoor(Authenticator(store))
    found = await door.find(await door.enter(await token_of(store, scope)))
    assert found is not None
    assert (found.changes, replace(found, session="").project) == (changes, "default")
