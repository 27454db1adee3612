"""The client's view: servers that go away, come back, refuse and lie, and a token that nobody sees."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web
from lightning.errors import ConfigError, ConflictError, DataError, SchemaError, StoreError, UnavailableError
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.types import (
    LLM,
    Json,
    Lease,
    Outcome,
    Rollout,
    Run,
    Scope,
    Status,
    Task,
    Transition,
    logprobs,
    token_ids,
)
from lightning_resources.nouns import Resource
from lightning_resources.operations import alias_history, put_resource, roll_back_alias, set_alias
from lightning_server import errors, messages
from lightning_server.auth import issue_token
from lightning_server.http_store import HttpStore, transport
from lightning_server.http_store.store import HttpWatch
from lightning_server.operations import OPERATIONS
from lightning_server.tokens import Token, list_tokens, put_token
from yarl import URL

from tests.servers.control import ControlServer
from tests.servers.ports import free_port

TOKEN = "lt_0123456789abcdef_" + "s" * 43
VERSION = {"version": "1", "api": "v1", "scope": "admin", "project": "*"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    """A stand-in for a server whose every answer is `handler`'s."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def opened(urls: str | list[str], patience: float = 5.0) -> AsyncIterator[HttpStore]:
    store = HttpStore(urls, token=TOKEN, patience=patience)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class Script:
    """Answers each path by what is prepared for it, in order, the last for ever; keeps what was asked."""

    def __init__(self, **answers: list[tuple[int, object]]) -> None:
        self.answers: dict[str, list[tuple[int, object]]] = {"version": [(200, VERSION)], **answers}
        self.asked: list[str] = []
        self.bodies: list[str] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        name = request.path.rsplit("/", 1)[1]
        self.asked.append(f"{request.method} {name}")
        self.bodies.append(await request.text())
        prepared = self.answers[name]
        status, body = prepared.pop(0) if len(prepared) > 1 else prepared[0]
        if status == 0:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 200, text=body if isinstance(body, str) else json.dumps(body))


def refused(kind: str, message: str = "for a reason") -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


# where the servers are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1", ("http://a:1",)),
        ("http://a:1,b:2", ("http://a:1", "http://b:2")),
        ("https://a/, https://b/below/", ("https://a", "https://b/below")),
        (["http://a:1", "https://b:2"], ("http://a:1", "https://b:2")),
        ("http://a:1,a:1?patience=3", ("http://a:1",)),
        ("http://[::1]:80", ("http://[::1]:80",)),
    ],
)
def test_urls(given: str | list[str], urls: tuple[str, ...]) -> None:
    store = HttpStore(given, token=TOKEN)
    assert store._urls == urls
    assert store._patience == (3.0 if "patience" in given else 120.0)
    assert TOKEN not in repr(store)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("http://", "is not the URL of a server"),
        ("http://a:port", "is not the URL of a server"),
        ("ftp://a", "is not the URL of a server"),
        ([], "no URL"),
        (f"http://{TOKEN}@a:1", "LIGHTNING_TOKEN"),
        (f"http://user:{TOKEN}@a:1", "LIGHTNING_TOKEN"),
        (f"http://a:1?token={TOKEN}", "unknown option 'token'"),
        ("http://a:1?patience=long", "number of seconds"),
        ("http://a:1?patience=-1", "number of seconds"),
    ],
)
def test_urls_that_cannot_be_meant(given: str | list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        HttpStore(given, token=TOKEN)
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize("token", ["", "  ", "two words", "näh", "line\nend"])
def test_what_is_no_token_is_refused_unseen(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TOKEN", token)
    with pytest.raises(ConfigError, match="LIGHTNING_TOKEN") as error:
        HttpStore("http://a")
    assert not token.strip() or token not in str(error.value)


def test_the_scheme_chooses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TOKEN", TOKEN)
    for url in ("http://a:1,b:2", "https://a"):
        assert isinstance(plugins().store(url), HttpStore)


# servers that go away -------------------------------------------------------------------------------------------


async def test_another_server_answers_when_one_does_not() -> None:
    script = Script(runs=[(200, {"items": [], "cursor": ""})])
    async with server(script) as url:
        dead = f"http://127.0.0.1:{free_port()}"
        for urls in ([dead, url], [url, dead]):
            async with opened(urls) as store:
                assert await store.list_runs() == []


async def test_a_server_that_is_frozen_costs_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_server.http_store.store.LEASE_ANSWER", 0.1)
    for operation in OPERATIONS:
        if operation.name in ("complete", "release"):
            monkeypatch.setattr(operation, "answer_seconds", 0.1)
    frozen = asyncio.Event()

    async def freezing(request: web.Request) -> web.StreamResponse:
        if frozen.is_set():
            await asyncio.Event().wait()
        return web.json_response(VERSION)

    rollout = Rollout("r", "run", Task("q"), "g", attempt=1)
    well = Script(
        renew=[(200, {"expires_at": 2.0})],
        leases=[(200, {"leases": []})],
        release=[(200, {"released": 0})],
        complete=[(422, refused("refused"))],
    )
    async with server(freezing) as first, server(well) as second, opened([first, second]) as store:
        frozen.set()
        lease = Lease(rollout, "w", 1.0)

        async def asking(work: Awaitable[object]) -> object:
            store._transport._current = 0  # type: ignore[union-attr]
            return await asyncio.wait_for(work, 3)

        assert await asking(store.renew(lease)) == Lease(rollout, "w", 2.0)
        assert await asking(store.lease("run", "w")) == []
        assert await asking(store.release("w")) == 0
        with pytest.raises(StoreError, match="for a reason"):
            await asking(store.complete("r", 1, Outcome(reward=1.0)))


async def test_a_server_that_comes_back_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    script = Script(runs=[(200, {"items": [], "cursor": ""})])
    async with server(script, port) as url:
        store = HttpStore(url, token=TOKEN, patience=20)
        await store.open()
    asking = asyncio.create_task(store.list_runs())
    await asyncio.sleep(0.4)
    assert not asking.done()
    async with server(script, port):
        assert await asyncio.wait_for(asking, 120) == []
    await store.close()
    assert TOKEN not in caplog.text


async def test_a_token_that_is_refused_is_read_again_from_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new, file = TOKEN, TOKEN.replace("s", "n"), tmp_path / "token"
    file.write_text(f"{old}\n")
    good, asked = {old}, list[str]()

    async def expiring(request: web.Request) -> web.StreamResponse:
        token = request.headers["authorization"].removeprefix("Bearer ")
        asked.append(token)
        if token not in good:
            return web.json_response(refused("expired_token"), status=401)
        return web.json_response(VERSION)

    async with server(expiring) as url:
        store = HttpStore(url, token=file, patience=5)
        await store.open()
        good.clear()
        with pytest.raises(transport.TokenRefusedError, match="for a reason"):
            await store.version()
        assert asked == [old] * 2, "it has the same still"
        file.write_text("")
        with pytest.raises(transport.TokenRefusedError, match="for a reason"):
            await store.version()
        assert f"there is no token in {file}" in caplog.text
        file.write_text(f"{new}\n")
        good.add(new)
        for version in await asyncio.gather(*(store.version() for _ in range(4))):
            assert version.scope == "admin"
        await store.version()
        await store.close()
    assert asked.count(new) == 5
    assert "nnnn" not in caplog.text
    assert "ssss" not in caplog.text


async def test_a_token_s_file_is_found_again_after_the_program_has_changed_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def only_the_new_one(request: web.Request) -> web.StreamResponse:
        if request.headers["authorization"] != f"Bearer {TOKEN}":
            return web.json_response(refused("expired_token"), status=401)
        return web.json_response(VERSION)

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "token").write_text(TOKEN.replace("s", "n"))
    monkeypatch.chdir(tmp_path)
    async with server(only_the_new_one) as url:
        store = HttpStore(url, token=Path("token"), patience=5)
        monkeypatch.chdir(tmp_path / "elsewhere")
        (tmp_path / "token").write_text(TOKEN)
        await store.open()
        await store.close()


@pytest.mark.parametrize(
    "first", [(503, refused("unavailable")), (429, refused("busy")), (502, "<html>"), (0, "")], ids=str
)
async def test_asking_again_helps(first: tuple[int, object]) -> None:
    script = Script(run=[first, first, (200, {"id": "run", "name": "a run"})])
    async with server(script) as url, opened(url) as store:
        assert await store.get_run("run") == Run("run", "a run")
    assert script.asked.count("GET run") == 3


async def test_patience_ends_with_what_was_tried() -> None:
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    store = HttpStore(dead, token=TOKEN, patience=0.2)
    with pytest.raises(UnavailableError, match=r"no server answered within 0.2 s .*lightning serve") as error:
        await store.open()
    assert all(url in str(error.value) for url in dead)
    with pytest.raises(StoreError, match="not open"):
        await store.list_runs()


class Loses:
    """Forwards to a server. Once `between` is there, the next answer but those of GET is lost, and it is run before the
    request comes again."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.between: Callable[[], Awaitable[object]] | None = None

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        body = await request.read()
        url = URL(f"{self._target}{request.raw_path}", encoded=True)
        async with (
            ClientSession() as session,
            session.request(request.method, url, data=body, headers=headers) as answered,
        ):
            found = await answered.read()
        if request.method != "GET" and self.between is not None:
            between, self.between = self.between, None
            await between()
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=answered.status, body=found, content_type="application/json")


async def test_nothing_is_done_twice_when_an_answer_is_lost(control: ControlServer) -> None:
    """The server has done what was asked, and before it is asked again somebody else does the like."""
    url, token = control.add(MemoryStore())
    other = HttpStore(url, token=token)
    await other.open()
    loses = Loses(url)
    async with server(loses) as lossy:
        store = HttpStore(lossy, token=token)
        await store.open()
        await store.put_run(Run("run", "run"))
        await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in "abcd"])
        for text in "abc":
            await put_resource(store, Resource("w", text))
        loses.between = lambda: other.put_state("run", "k", "newer")
        await store.put_state("run", "k", "older")
        assert await store.get_state("run", "k") == "newer"
        loses.between = lambda: other.log_metrics("run", 0, {"loss": 1.0})
        await store.log_metrics("run", 0, {"loss": 2.0})
        assert [point.values for point in await store.metrics("run")] == [{"loss": 1.0}]
        loses.between = lambda: other.lease("run", "v")
        assert [lease.rollout.id for lease in await store.lease("run", "w", limit=2)] == ["a", "b"]
        loses.between = lambda: other.lease("run", "w")
        assert await store.release("w") == 2
        assert [r.id for r in (await store.list_rollouts("run", status=Status.PENDING)).items] == ["b", "d"]
        loses.between = lambda: set_alias(other, "w", "production", 2)
        assert (await set_alias(store, "w", "production", 1)).version == 1
        loses.between = lambda: set_alias(other, "w", "production", 3)
        assert (await roll_back_alias(store, "w", "production")).version == 1
        assert [move.version for move in await alias_history(store, "w", "production")] == [1, 2, 1, 3]
        loses.between = lambda: list_tokens(other)
        assert (await put_token(store, Token("t", Scope.RUNNER, "a" * 64))).id == "t"
        await store.close()
    await other.close()
    control.remove(url)


async def test_what_was_leased_unheard_is_leased_first_when_a_server_answers_again(control: ControlServer) -> None:
    """The caller's patience is over before it hears what it was given."""
    url, token = control.add(MemoryStore())
    loses = Loses(url)
    async with server(loses) as lossy:
        store = HttpStore(lossy, token=token, patience=0)
        await store.open()
        await store.put_run(Run("run", "run"))
        await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in "abcd"])
        loses.between = store.list_runs
        with pytest.raises(UnavailableError, match="not known whether it was done"):
            await store.lease("run", "w", limit=2)
        assert [lease.rollout.id for lease in await store.lease("run", "w", limit=1)] == ["c"]  # no more than that
        assert [lease.rollout.id for lease in await store.lease("run", "w", limit=3)] == ["a", "b"]
        assert [lease.rollout.id for lease in await store.lease("run", "w", limit=3)] == ["d"]
        await store.close()
    control.remove(url)


async def test_an_id_of_a_request_that_cannot_be_one_is_refused(control: ControlServer) -> None:
    url, token = control.add(MemoryStore())
    headers = {"authorization": f"Bearer {token}", "idempotency-key": "x" * 256}
    async with (
        ClientSession() as session,
        session.post(f"{url}/api/v1/leases/release", json={"worker": "w"}, headers=headers) as answered,
    ):
        assert answered.status == 400
        assert "idempotency-key must have one id of at most 255" in (await answered.json())["error"]["message"]
    control.remove(url)


async def test_work_goes_on_when_one_of_two_servers_over_one_database_ends(tmp_path: Path) -> None:
    first, second = ControlServer(), ControlServer()
    with second:
        with first:
            urls = []
            for one in (first, second):
                url, token = one.add(SqliteStore(tmp_path / "store.db"))
                urls.append(url)
            # Each server knows its own token alone: one that both know is in the database.
            shared, plain = issue_token(Scope.TRAINER)
            admin = HttpStore(urls[-1], token=token)
            await admin.open()
            await put_token(admin, shared)
            store = HttpStore(urls, token=plain, patience=20)
            await store.open()
            await store.put_run(Run("run", "a run"))
            await store.create_rollouts([Rollout(f"run/{i}", "run", Task(i), "g") for i in range(12)])
            await finish_some(store, 4)
        await finish_some(store, 8)  # the first server has ended
    done = SqliteStore(tmp_path / "store.db")
    await done.open()
    page = await done.list_rollouts("run")
    assert [(r.reward, r.attempt) for r in page.items] == [(float(i), 1) for i in range(12)]
    for opened_store in (store, admin, done):
        await opened_store.close()


async def finish_some(store: HttpStore, count: int) -> None:
    for _ in range(count):
        (lease,) = await store.lease("run", "w")
        await store.renew(lease)
        index = lease.rollout.task.input
        assert isinstance(index, int)
        await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=float(index)))


def test_an_error_is_the_same_on_both_sides() -> None:
    for kind, status, word in errors.KINDS:
        if issubclass(kind, StoreError | DataError) and status != 503:
            assert transport.KINDS.get(word, StoreError) is kind
    assert transport.KINDS["schema"] is SchemaError  # 503 too, and no reason to ask again


# answers that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((200, "{hello"), StoreError, "the answer to GET /runs/run is not JSON"),
        ((200, {"name": "no id"}), StoreError, "lacks 'id'"),
        ((200, "<html>hello</html>"), transport.PageError, "answered 200 to GET /api/v1/runs/run, and not as a Light"),
        ((404, "<html>not here</html>"), transport.PageError, "answered 404 .*look at the proxy before it"),
        ((500, refused("server_fault")), StoreError, "for a reason"),
        ((401, refused("invalid_token")), StoreError, "for a reason .*127.0.0.1"),
        ((409, refused("conflict")), ConflictError, "for a reason"),
        ((422, refused("a word of a newer release")), StoreError, "for a reason"),
        ((413, refused("body_too_large")), transport.TooLongError, "^for a reason$"),
        (
            (413, "<html>too large</html>"),
            transport.TooLongError,
            "GET /api/v1/runs/run of 0 bytes.*client_max_body_size",
        ),
        ((413, refused("of a proxy")), transport.TooLongError, "client_max_body_size"),
    ],
    ids=str,
)
async def test_answers_become_errors(answer: tuple[int, object], error: type[Exception], words: str) -> None:
    async with server(Script(run=[answer])) as url, opened(url, patience=0.1) as store:
        with pytest.raises(error, match=words):
            await store.get_run("run")


@pytest.mark.parametrize(
    "page", [(200, ""), (200, "<html>"), (302, ""), (403, "<html>"), (404, '{"message": 1}')], ids=str
)
async def test_a_page_of_somebody_else_is_an_error_until_a_server_has_answered_and_waited_for_since(
    page: tuple[int, object],
) -> None:
    run = (200, {"id": "run", "name": "a run"})
    async with server(Script(version=[page, (200, VERSION)], run=[page, page, run])) as url:
        store = HttpStore(url, token=TOKEN, patience=60)
        with pytest.raises(StoreError, match=f"answered {page[0]} .*Give the URL") as error:
            await asyncio.wait_for(store.open(), 5)
        assert not isinstance(error.value, UnavailableError)
        await store.open()
        assert await asyncio.wait_for(store.get_run("run"), 5) == Run("run", "a run")
        await store.close()


async def test_where_a_server_s_own_refusal_was_heard_the_url_is_right() -> None:
    script = Script(version=[(200, VERSION)], run=[(401, refused("revoked_token"))])
    async with server(script) as url, opened(url) as store:
        with pytest.raises(transport.TokenRefusedError, match="for a reason"):
            await store.get_run("run")
        assert script.asked.count("GET run") == 1, "and it is no reason to ask again"


class HangsUp:
    """A server that hangs up at bodies of `longest` bytes or more, and while `away` at everything."""

    def __init__(self, longest: int, away: bool = False) -> None:
        self._longest, self.away = longest, away
        self.long = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        long = (request.content_length or 0) >= self._longest
        self.long += long
        if long or self.away:
            assert request.transport is not None
            request.transport.abort()
        name = request.path.rsplit("/", 1)[1]
        return web.json_response(VERSION if name == "version" else {"appended": 1})


async def test_what_is_hung_up_at_for_its_length_is_too_long() -> None:
    calls = [Transition("r", 1, 0, "c", token_ids(range(30_000)), token_ids([1]), logprobs([-1.0]))]
    proxy = HangsUp(transport.LONG_BODY)
    async with server(proxy) as url, opened(url, patience=0) as store:
        for _ in range(transport.CUTS - 1):
            with pytest.raises(UnavailableError, match="went away"):
                await store.append(calls)
        with pytest.raises(transport.TooLongError, match=r"hung up 4 times .* of 160\d{3} bytes.*client_max_body_size"):
            await store.append(calls)
        assert proxy.long == transport.CUTS


@pytest.mark.parametrize(("count", "away"), [(10, False), (30_000, True)], ids=["short", "nothing is answered"])
async def test_a_server_that_hangs_up_for_another_reason_is_away(count: int, away: bool) -> None:
    calls = [Transition("r", 1, 0, "c", token_ids(range(count)), token_ids([1]), logprobs([-1.0]))]
    proxy = HangsUp(1)
    async with server(proxy) as url, opened(url, patience=0) as store:
        proxy.away = away
        for _ in range(2 * transport.CUTS):
            with pytest.raises(UnavailableError, match="went away"):
                await store.append(calls)


async def test_behind_a_page_the_next_server_is_asked() -> None:
    well = Script(run=[(200, {"id": "run", "name": "a run"})])
    ill = Script(run=[(404, "<html>no backend yet</html>")])
    async with server(ill) as first, server(well) as second, opened([first, second]) as store:
        store._transport._current = 0  # type: ignore[union-attr]
        assert await store.get_run("run") == Run("run", "a run")
        assert store.answering == second


@pytest.mark.parametrize("answer", [(500, refused("server_fault")), (503, refused("schema"))], ids=str)
async def test_after_a_refusal_that_may_be_one_server_s_alone_another_one_is_asked(answer: tuple[int, object]) -> None:
    other = Script(run=[(200, {"id": "run", "name": "a run"})])
    async with server(Script(run=[answer])) as ill, server(other) as well, opened([ill, well]) as store:
        store._transport._current = 0  # type: ignore[union-attr]
        with pytest.raises(StoreError):
            await store.get_run("run")
        assert await store.get_run("run") == Run("run", "a run")
        assert store.answering == well


async def test_after_a_refusal_of_what_was_asked_the_same_server_is_asked() -> None:
    script = Script(run=[(409, refused("stale_attempt"))])
    async with server(script) as one, server(script) as other, opened([one, other]) as store:
        at = store.answering
        with pytest.raises(StoreError):
            await store.get_run("run")
        assert store.answering == at


async def test_a_redirect_is_not_followed_so_the_token_stays_here() -> None:
    elsewhere = Script()
    async with server(elsewhere) as other:

        async def redirecting(request: web.Request) -> web.StreamResponse:
            return web.Response(status=307, headers={"location": f"{other}{request.path}"})

        async with server(redirecting) as url:
            store = HttpStore(url, token=TOKEN, patience=1)
            with pytest.raises(StoreError, match="answered 307"):
                await store.open()
    assert elsewhere.asked == []


async def test_an_answer_without_end_is_not_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed, a short one becomes a long one."""
    monkeypatch.setattr(transport, "LONGEST_ANSWER", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/version"):
            return web.json_response(VERSION)
        answer = web.Response(text='{"items": [' + (1 << 21) * " ", content_type="application/json")
        answer.enable_compression(web.ContentCoding.gzip)
        return answer

    async with server(endless) as url, opened(url) as store:
        with pytest.raises(StoreError, match="answered with more than 1 MiB: it is no Lightning Server"):
            await store.list_runs()


async def test_a_wrong_token_is_said_at_once(control: ControlServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url, _ = control.add(MemoryStore())
    store = HttpStore(url, token=TOKEN)
    with pytest.raises(StoreError, match="not one of this server") as error:
        await store.open()
    assert TOKEN not in str(error.value)
    assert TOKEN.rsplit("_", 1)[1] not in caplog.text
    control.remove(url)


# what is long ---------------------------------------------------------------------------------------------------


async def test_long_lists_travel_in_pieces(control: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_server.http_store.store.BODY_BYTES", 4000)
    monkeypatch.setattr("lightning_server.http_store.store.PAGE", 7)
    monkeypatch.setattr("lightning_server.api.store_routes.PAGE_BYTES", 3000)
    url, token = control.add(MemoryStore())
    store = HttpStore(url, token=token)
    await store.open()
    await store.put_run(Run("run", "a run"))
    rollouts = [Rollout(f"r{i:02}", "run", Task("q" * 100), "g") for i in range(40)]
    assert await store.create_rollouts(rollouts) == 40
    page = await store.list_rollouts("run", limit=20)
    rest = await store.list_rollouts("run", cursor=page.cursor, limit=100)
    assert [item.id for item in page.items + rest.items] == [item.id for item in rollouts]
    assert (len(page.items), rest.cursor) == (20, "")
    await store.lease("run", "w", limit=2)
    calls = [
        Transition(f"r0{i % 2}", 1, i // 2, f"c{i}", token_ids(range(100 * i)), token_ids([1]), logprobs([-1.0]))
        for i in range(20)
    ]
    assert await store.append(calls) == 20
    expected = [[call for call in calls if call.rollout == name] for name in ("r00", "r01")]
    assert await store.transitions_of([("r00", 1), ("r01", 1), ("r02", 1)]) == [*expected, []]
    assert await store.transitions("r01") == expected[1]
    await store.close()
    control.remove(url)


async def test_what_may_be_done_twice_has_no_id_on_the_servers_side_either(control: ControlServer) -> None:
    """A database would keep an answer under each, for nobody."""
    asked: list[str | None] = []

    class Noted(MemoryStore):
        async def put_state(self, run: str, key: str, value: Json, *, once: str | None = "") -> None:
            asked.append(once)
            await super().put_state(run, key, value, once=once)

    url, token = control.add(Noted())
    store = HttpStore(url, token=token)
    await store.open()
    await store.put_state("run", "k", 1, once=None)
    await store.put_state("run", "k", 2)
    await store.close()
    control.remove(url)
    nothing, given = asked
    assert nothing is None
    assert given


async def test_ids_that_urls_know_otherwise(control: ControlServer) -> None:
    url, token = control.add(MemoryStore())
    store = HttpStore(url, token=token)
    await store.open()
    for name in ("a/b", "..", ".", "%2F", "a?b#c", "ü €", "a+b&c=d", " "):
        await store.put_run(Run(name, name))
        assert (await store.get_run(name)) == await store.put_run(Run(name, "another"))
        await store.put_state(name, name, name)
        assert await store.get_state(name, name) == name
    await put_resource(store, Resource("a/b ü", "text"))
    assert (await set_alias(store, "a/b ü", "produktion/ü", 1)).version == 1
    await store.close()
    control.remove(url)


# leases and news ------------------------------------------------------------------------------------------------


async def test_a_lease_brings_what_the_agent_needs(control: ControlServer) -> None:
    llm = LLM("http://g/v1", "key", "policy", {"writer": "Write."})

    async def llm_for(lease: Lease, store: object) -> LLM:
        return llm

    for given in (llm_for, None):
        url, token = control.add(MemoryStore(), llm_for=given)
        store = HttpStore(url, token=token)
        await store.open()
        await store.put_run(Run("run", "a run"))
        await store.create_rollouts([Rollout("r", "run", Task("q"), "g")])
        if given is None:
            with pytest.raises(StoreError, match="has no gateway"):
                await store.lease_for_agents("run", "w")
        else:
            ((lease, found),), over = await store.lease_for_agents("run", "w")
            assert not over
            assert (lease.rollout.id, found) == ("r", llm)
        await store.close()
        control.remove(url)


async def test_a_watch_that_loses_its_server_takes_it_for_a_change() -> None:
    port = free_port()
    changed = {"changed": False, "since": "here.0.1"}
    async with server(Script(watch=[(200, changed)]), port) as url:
        store = HttpStore(url, token=TOKEN, patience=5)
        await store.open()
        watch = store.watch("run")
        listening = await watch.__aenter__()
        assert not await listening.wait(0.05)
    assert await listening.wait(0.05)
    async with server(Script(watch=[(200, {"changed": True, "since": "there.0.0"})]), port):
        assert await listening.wait(60)
    await watch.__aexit__(None, None, None)
    await store.close()


async def test_a_watch_asks_servers_that_take_turns_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["a.0.0", "b.0.0", "a.0.0", "b.0.0", "a.0.1", "a.0.2", "b.0.1"]
    asked: list[str] = []
    pauses: list[float] = []

    async def ask(since: str, timeout: float) -> messages.Changed:
        asked.append(since)
        return messages.Changed(since != said[0], said.pop(0))

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("lightning_server.http_store.store.asyncio", SimpleNamespace(sleep=sleep))
    async with HttpWatch(ask) as watch:
        for told in (["b.0.0"], ["a.0.0", "b.0.0", "a.0.1"], ["a.0.2"], ["b.0.1"]):
            before = len(asked)
            assert await watch.wait(60), "once for each server that says something new"
            assert len(asked) - before == len(told)
    assert asked == ["", "a.0.0", "b.0.0", "a.0.0", "b.0.0", "a.0.1", "a.0.2"]
    assert pauses == [0, 1, 2, 4, 4, 0]


async def test_closing_does_not_wait_for_news(control: ControlServer) -> None:
    url, token = control.add(MemoryStore())
    store = HttpStore(url, token=token)
    await store.open()
    await store.put_run(Run("run", "a run"))
    async with store.watch("run") as watch:
        waiting = asyncio.create_task(watch.wait(60))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(store.close(), 5)
        assert await asyncio.wait_for(
            waiting, 120
        )  # perhaps something has changed; asking again says that it is closed
    with pytest.raises(StoreError, match="not open"):
        await store.list_runs()
    control.remove(url)
