"""What every port holds to: it answers to its own names, and the bodies of requests have their share of the memory."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from lightning.config import LimitsConfig
from lightning.gateway import http
from lightning.gateway.connections import Entrance
from lightning.gateway.http import COPIES, RefusalError, send_bytes
from starlette.types import ASGIApp, Receive, Scope, Send


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes it was sent; 401 to who sends the token `wrong`; `/slow` waits, `/large` is large."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    if scope["path"] == "/slow":
        await asyncio.sleep(0.25)
    status = 401 if (b"authorization", b"Bearer wrong") in scope["headers"] else 200
    await send_bytes(send, status, b"x" * 20_000_000 if scope["path"] == "/large" else str(size).encode())


async def ask(
    app: ASGIApp, path: str = "/v1/x", client: str = "10.0.0.1", **headers: str
) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer."""
    got: list[tuple[int, dict[str, str]]] = []

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            fields = {name.decode(): value.decode() for name, value in message["headers"]}  # type: ignore[attr-defined]
            got.append((message["status"], fields))  # type: ignore[arg-type]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "client": (client, 1), "headers": sent}
    await app(scope, receive, send)  # type: ignore[arg-type]
    return got[0]


async def test_two_tokens_in_one_request_are_refused() -> None:
    door = Entrance(echo, LimitsConfig(), loopback=True)
    got = []
    scope = {
        "type": "http",
        "path": "/",
        "client": None,
        "headers": [(b"authorization", b"a"), (b"authorization", b"b")],
    }

    async def send(message: dict[str, object]) -> None:
        got.append(message.get("status"))

    await door(scope, None, send)  # type: ignore[arg-type]
    assert got[0] == 400


# names --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LocalHost:80", 200),
        ("[::1]:8000", 200),
        ("127.1.2.3", 200),
        ("proxy.example:443", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("169.254.169.254", 421),
        ("localhost@evil.example", 421),
        ("[::1", 421),
    ],
)
async def test_a_server_on_loopback_answers_to_its_names_only(host: str, status: int) -> None:
    door = Entrance(echo, LimitsConfig(hosts=("proxy.example",)), loopback=True)
    assert (await ask(door, host=host))[0] == status


async def test_a_server_of_the_network_answers_to_every_name_unless_told() -> None:
    assert (await ask(Entrance(echo, LimitsConfig(), loopback=False), host="gpu-7"))[0] == 200
    told = Entrance(echo, LimitsConfig(hosts=("gpu-7",)), loopback=False)
    assert [(await ask(told, host=host))[0] for host in ("gpu-7:80", "evil.example", "127.0.0.1")] == [200, 421, 421]


# the memory and time of bodies


async def send_body(
    door: ASGIApp, *parts: bytes, token: str = "a", path: str = "/", length: int = 0
) -> tuple[int, str]:
    """Status and error code of a request whose body comes in parts."""
    coming = [{"type": "http.request", "body": part, "more_body": n < len(parts) - 1} for n, part in enumerate(parts)]
    got: list[dict[str, object]] = []
    scope = {
        "type": "http", "path": path, "client": None, "headers": [(b"authorization", b"Bearer " + token.encode())],
    }  # fmt: skip

    async def receive() -> dict[str, object]:
        return coming.pop(0)

    async def send(message: dict[str, object]) -> None:
        got.append(message)

    await door(scope, receive, send)  # type: ignore[arg-type]
    body = orjson.loads(got[1]["body"])  # type: ignore[arg-type]
    return got[0]["status"], body["error"]["code"] if isinstance(body, dict) else body  # type: ignore[return-value]


async def hold(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads a body, and answers a while later; refuses as the gateway does."""
    try:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(0.2 if scope["path"] == "/slow" else 0)
        await send_bytes(send, 200, b"0")
    except RefusalError as refusal:
        await send_bytes(send, refusal.status, refusal.body)


MIB = 1 << 20


async def test_a_body_is_counted_in_values_as_it_arrives() -> None:
    door = Entrance(hold, LimitsConfig(json_values=1000), loopback=True)
    assert await send_body(door, b"[" + b"1," * 900 + b"1]") == (200, 0)
    assert await send_body(door, *[b"[]," * 100] * 6) == (413, "too_many_values")
    assert await send_body(Entrance(hold, LimitsConfig(json_values=0), loopback=True), b"[]," * 100_000) == (200, 0)


async def test_one_token_holds_half_of_the_memory_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "WAIT", 0.05)
    door = Entrance(hold, LimitsConfig(body_memory=COPIES * 8 * MIB), loopback=True)
    part = b"x" * MIB
    assert await send_body(door, *[part] * 5) == (413, "body_too_large"), "more than it could ever have"
    first = asyncio.create_task(send_body(door, *[part] * 4, path="/slow"))
    await asyncio.sleep(0.01)
    assert await send_body(door, part) == (429, "too_many_bytes")
    others = [asyncio.create_task(send_body(door, part, token=name, path="/slow")) for name in "bc"]
    await asyncio.sleep(0.01)
    assert await send_body(door, part, token="d") == (200, 0)
    assert {await task for task in (first, *others)} == {(200, 0)}
    assert await send_body(door, *[part] * 4) == (200, 0), "what was held is given back"


async def test_a_body_waits_for_room() -> None:
    door = Entrance(hold, LimitsConfig(body_memory=COPIES * 8 * MIB), loopback=True)
    first = asyncio.create_task(send_body(door, *[b"x" * MIB] * 4, path="/slow"))
    await asyncio.sleep(0.01)
    assert await send_body(door, b"x" * MIB) == (200, 0)
    assert first.done()
    await first


async def test_a_client_that_goes_away_gives_its_memory_back() -> None:
    door = Entrance(hold, LimitsConfig(body_memory=COPIES * 8 * MIB), loopback=True)
    for _ in range(3):
        first = asyncio.create_task(send_body(door, *[b"x" * MIB] * 4, path="/slow"))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert await send_body(door, *[b"x" * MIB] * 4) == (200, 0)
