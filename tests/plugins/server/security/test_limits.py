"""One port, many clients: the slow, the endless, the too frequent, and those that were sent by another site."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest
from lightning.gateway.connections import Entrance, Serving, bind
from lightning_server import port as server_port
from lightning_server.config import PortLimits
from lightning_server.port import Guard
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.core.security.test_limits import MIB, ask, echo, hold, send_body

QUICK = PortLimits(header_timeout=0.1, body_timeout=0.1, write_timeout=0.1)


def guarded(app: ASGIApp, limits: PortLimits) -> Entrance:
    """A door of this machine with a guard behind it."""
    return Entrance(Guard(app, limits), limits, loopback=True)


@asynccontextmanager
async def port(limits: PortLimits, app: ASGIApp = echo, *, pure: bool = False) -> AsyncIterator[int]:
    """A port of this machine with these limits."""
    with pytest.MonkeyPatch.context() as patch:
        if pure:
            patch.setattr(server_port, "_fastest", lambda: server_port._PatientH11)
        running = Serving(app, bind("127.0.0.1", 0), limits)
    await running.start()
    try:
        yield int(running.url.rpartition(":")[2])
    finally:
        await running.stop()


async def talk(number: int, *parts: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """What the server answered to bytes that come in parts, and after how many seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    began = time.monotonic()
    answer = asyncio.ensure_future(reader.read(100_000))
    try:
        for part in parts:
            if not answer.done():
                writer.write(part)
                await asyncio.sleep(pause)
        return await asyncio.wait_for(answer, 15.0), time.monotonic() - began
    finally:
        writer.close()


@pytest.fixture(params=[False, True], ids=["httptools", "h11"])
def pure(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def said(answer: bytes) -> tuple[int, str]:
    """The status of an answer and the code of its error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), orjson.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx-a: b",
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nabc",
    ],
    ids=["nothing", "half a line", "half the headers", "half the body"],
)
async def test_a_slow_client_is_cut_off(sent: bytes, pure: bool) -> None:
    async with port(QUICK, pure=pure) as number:
        answer, seconds = await talk(number, sent)
    assert said(answer) == (408, "request_timeout")
    assert 0.05 < seconds < 15.0, "far less than without these limits"


async def test_a_byte_now_and_then_does_not_keep_a_connection() -> None:
    async with port(QUICK) as number:
        drip = [b"GET / HTTP/1.1\r\nhost: localhost\r\n", *([b"x: y\r\n"] * 20)]
        answer, _ = await talk(number, *drip, pause=0.02)
    assert said(answer) == (408, "request_timeout")


async def test_headers_without_end_are_cut_off(pure: bool) -> None:
    async with port(PortLimits(), pure=pure) as number:
        answer, _ = await talk(number, b"GET / HTTP/1.1\r\n", *([b"x: " + b"y" * 20_000 + b"\r\n"] * 5), pause=0.01)
    head = answer.partition(b"\r\n")[0]
    assert b" 431 " in head if not pure else b" 400 " in head


async def test_a_client_that_waits_for_its_answer_is_left_alone(pure: bool) -> None:
    async with port(QUICK, pure=pure) as number:
        post = b"POST /slow HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc"
        answer, seconds = await talk(number, post)
    assert answer.startswith(b"HTTP/1.1 200")
    assert seconds > 0.2


async def test_a_kept_connection_may_rest_between_requests() -> None:
    get = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with port(QUICK) as number:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        for _ in range(2):
            writer.write(get)
            assert (await reader.read(1000)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.15)
        writer.close()


async def test_a_request_in_pieces_that_come_in_time_is_served() -> None:
    async with port(PortLimits()) as number:
        parts = [b"POST / HTTP/1.1\r\nhost: lo", b"calhost\r\ncontent-length: 6\r\n\r\nab", b"cd", b"ef"]
        answer, _ = await talk(number, *parts, pause=0.02)
    assert answer.endswith(b"6")


async def test_a_client_that_leaves_its_answer_unread_is_cut_off() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
        ended.set()

    async with port(QUICK, app) as number:
        _, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 30.0)  # the rest was sent to nobody
        writer.close()


# who asks too often -------------------------------------------------------------------------------------------------
Ask = Callable[..., "asyncio.Future[tuple[int, dict[str, str]]]"]


async def test_a_token_has_its_share_of_requests_and_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    door = guarded(echo, PortLimits(requests_per_second=0.5))
    assert (await ask(door, authorization="Bearer a"))[0] == 200
    status, headers = await ask(door, authorization="Bearer a")
    assert (status, headers["retry-after"]) == (429, "2")
    assert (await ask(door, authorization="Bearer b"))[0] == 200
    clock[0] += 2.0
    assert (await ask(door, authorization="Bearer a"))[0] == 200


@pytest.mark.parametrize(
    "requests",
    [
        [{"x_api_key": "a"}, {"x_api_key": "a"}],
        [{"path": "/r/a/v1/x"}, {"path": "/r/a/v1/y"}],
        [{"x_lightning_rollout": "a", "authorization": "1"}, {"x_lightning_rollout": "a", "authorization": "2"}],
        [{"authorization": "Bearer a", "x_api_key": "1"}, {"authorization": "Bearer a", "x_api_key": "2"}],
        [{"authorization": "Basic 1", "x_api_key": "a"}, {"authorization": "Basic 2", "x_api_key": "a"}],
        [{"path": "/api/v1/x", "authorization": "Bearer a", "x_lightning_rollout": n} for n in "12"],
        [{"path": "/api/v1/x", "authorization": said} for said in ("Bearer a", "bearer   a ")],
        [{"authorization": said} for said in ("Bearer a", "BEARER  a")],
    ],
)
async def test_no_header_makes_two_clients_of_one(requests: list[dict[str, str]]) -> None:
    door = guarded(echo, PortLimits(requests_per_second=0.5))
    assert [(await ask(door, **request))[0] for request in requests] == [200, 429]


async def test_a_token_has_a_number_of_requests_in_progress() -> None:
    door = guarded(echo, PortLimits(concurrent_requests=2))
    waiting = [asyncio.create_task(ask(door, "/slow", authorization="Bearer a")) for _ in range(2)]
    await asyncio.sleep(0)
    status, headers = await ask(door, authorization="Bearer a")
    assert (status, headers["retry-after"]) == (429, "1")
    assert (await ask(door, authorization="Bearer b"))[0] == 200
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
    assert (await ask(door, authorization="Bearer a"))[0] == 200


async def test_trying_tokens_quickly_ends_soon_and_disturbs_no_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    door = guarded(echo, PortLimits(failures_per_minute=5))
    assert (await ask(door, authorization="Bearer good"))[0] == 200
    tried = [(await ask(door, authorization="Bearer wrong", x_number=str(n)))[0] for n in range(8)]
    assert tried == [401] * 5 + [429] * 3
    assert (await ask(door, authorization="Bearer good"))[0] == 200
    assert (await ask(door, authorization="Bearer new and good"))[0] == 200, "others' wrong tokens lock nobody out"
    assert (await ask(door, "/health"))[0] == 200
    assert (await ask(door, authorization="Bearer wrong", client="10.0.0.2"))[0] == 401
    clock[0] += 12.0
    assert (await ask(door, authorization="Bearer wrong"))[0] == 401


async def test_of_wrong_tokens_at_one_time_no_more_are_answered() -> None:
    door = guarded(echo, PortLimits(failures_per_minute=5))
    tried = await asyncio.gather(*(ask(door, "/slow", authorization="Bearer wrong") for _ in range(8)))
    assert sorted(status for status, _ in tried) == [401] * 5 + [429] * 3


async def test_tokens_that_open_nothing_make_nobody_forget_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_port, "CLIENTS", 10)
    door = guarded(echo, PortLimits(requests_per_second=0.5))
    assert (await ask(door, authorization="Bearer good"))[0] == 200
    for number in range(50):
        await ask(door, authorization="Bearer wrong", x_lightning_rollout=str(number), client=f"10.0.0.{number}")
    assert (await ask(door, authorization="Bearer good"))[0] == 429, "its share is remembered"


async def test_a_thousand_new_tokens_of_one_address_are_all_let_in() -> None:
    door = guarded(echo, PortLimits(failures_per_minute=5))
    assert {(await ask(door, authorization=f"Bearer {n}"))[0] for n in range(1000)} == {200}


@pytest.mark.parametrize("request_of", [{"path": "/health", "authorization": "Bearer stranger"}, {}])
async def test_an_open_route_and_no_token_make_no_token_good(request_of: dict[str, str]) -> None:
    door = guarded(echo, PortLimits())
    assert (await ask(door, **request_of))[0] == 200
    assert len(door._app._tokens) == 0


async def test_zero_sets_no_limit() -> None:
    free = PortLimits(requests_per_second=0, concurrent_requests=0, failures_per_minute=0)
    door = guarded(echo, free)
    assert {(await ask(door, authorization="Bearer wrong"))[0] for _ in range(500)} == {401}


async def test_what_is_remembered_of_clients_is_bounded_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_port, "CLIENTS", 10)
    door = guarded(echo, PortLimits())
    for number in range(50):
        await ask(door, authorization=f"Bearer secret-{number}", client=f"10.0.0.{number}")
    assert len(door._app._tokens) <= 10
    assert len(door._app._untried) <= 10
    assert len(door._app._strangers) <= 10
    assert not any(b"secret" in key for key in (*door._app._tokens, *door._app._untried))


# connections


GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_idle_connections_make_room_for_new_ones(pure: bool) -> None:
    """400 of them keep nobody out; the same without the limit is what it would be, and all stay open."""
    for most, left in ((20, 20), (0, 401)):
        async with port(PortLimits(connections=most), pure=pure) as number:
            opened = [await asyncio.open_connection("127.0.0.1", number) for _ in range(400)]
            answer, _ = await talk(number, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            assert answer.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.05)
            still = sum(not reader.at_eof() for reader, _ in opened)
            assert left - 2 <= still <= left
            for _, writer in opened:
                writer.close()


async def test_connections_in_use_are_kept_and_further_ones_told(pure: bool) -> None:
    slow = GET.replace(b"GET /", b"GET /slow")
    async with port(PortLimits(connections=2), pure=pure) as number:
        using = [
            asyncio.create_task(talk(number, slow.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))) for _ in "12"
        ]
        await asyncio.sleep(0.1)
        answer, _ = await talk(number, b"")
        assert said(answer) == (503, "too_many_connections")
        assert all(answer.startswith(b"HTTP/1.1 200") for answer, _ in await asyncio.gather(*using))


async def test_one_address_has_its_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async with port(PortLimits(connections_per_address=3)) as number:
        opened = [await asyncio.open_connection("127.0.0.1", number) for _ in range(5)]
        answer, _ = await talk(number, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 200"), "loopback is many: agents, and a proxy's clients"
        monkeypatch.setattr(server_port, "is_loopback", lambda _: False)
        answer, _ = await talk(number, b"")
        assert said(answer) == (503, "too_many_connections")
        for _, writer in opened:
            writer.close()


# bodies


async def test_what_is_no_model_call_may_have_more_values() -> None:
    door = guarded(hold, PortLimits(json_values=1000))
    assert await send_body(door, *[b"[]," * 100] * 6) == (413, "too_many_values")
    assert await send_body(door, *[b"[]," * 100] * 6, path="/api/v1/x") == (200, 0), "no model call"


async def test_who_is_refused_is_told_and_then_read_for_a_while(pure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with port(PortLimits(json_values=1000), hold, pure=pure) as number, httpx.AsyncClient() as client:
        answer = await client.post(f"http://127.0.0.1:{number}/", content=b"[" * 8 * MIB)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_values")
        monkeypatch.setattr(server_port, "MOST_IGNORED", MIB)
        with pytest.raises(httpx.TransportError):
            await client.post(f"http://127.0.0.1:{number}/", content=b"[" * 64 * MIB)
        assert (await client.get(f"http://127.0.0.1:{number}/")).status_code == 200
