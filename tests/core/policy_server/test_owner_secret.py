"""vLLM's control routes behind a secret: who may call what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lightning.policy_server.owner_secret import ATTACH, HEADER, OPEN, SECRET, OwnerSecret

GIVEN = "the owner's secret"


async def ask(
    path: str, body: bytes = b"", secret: str = "", *, kind: str = "http", parts: int = 1
) -> tuple[int, bytes]:
    """Status of an answer (0: the request went on to vLLM), and what vLLM read of the body."""
    read, sent = bytearray(), []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            read.extend(message.get("body", b""))
            if not message.get("more_body"):
                return

    pieces = [body[n * len(body) // parts : (n + 1) * len(body) // parts] for n in range(parts)]
    messages = [{"type": "http.request", "body": piece, "more_body": n < parts - 1} for n, piece in enumerate(pieces)]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(HEADER.encode(), secret.encode())] if secret else []
    await OwnerSecret(vllm)({"type": kind, "path": path, "headers": headers}, receive, send)
    if not sent:
        return 0, bytes(read)
    return int(sent[0].get("status", sent[0].get("code"))), bytes(read)


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, GIVEN)


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_the_model_answers_everybody(path: str) -> None:
    assert await ask(path, b"{}") == (0, b"{}")


ADMIN = (
    "/collective_rpc", "/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights",
    "/init_weight_transfer_engine", "/server_info", "/v1/load_lora_adapter", "/v1/chat/completions/", "//pause", "/new",
)  # fmt: skip


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("secret", ["", "another", GIVEN[:-1]])
async def test_control_routes_answer_nobody_without_the_secret(path: str, secret: str) -> None:
    assert await ask(path, b'{"method": "lightning_load", "args": ["", "/tmp/w"]}', secret) == (403, b"")


@pytest.mark.parametrize("path", ADMIN)
async def test_control_routes_answer_the_owner(path: str) -> None:
    assert (await ask(path, b"{}", GIVEN))[0] == 0


async def test_without_a_secret_in_the_environment_nobody_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "")
    assert (await ask("/pause"))[0] == (await ask("/pause", secret="x"))[0] == 403


async def test_gateways_may_ask_who_it_is() -> None:
    body = json.dumps(ATTACH).encode()
    assert await ask("/collective_rpc", body) == (0, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        json.dumps(ATTACH | {"args": ["x"]}).encode(),
        json.dumps(ATTACH | {"kwargs": {}}).encode(),
        b'{"method": "lightning_attach", "args": [], "method": "lightning_load"}',
        json.dumps(ATTACH).encode() + b" " * 200,
    ],
)
async def test_and_nothing_else(body: bytes) -> None:
    assert await ask("/collective_rpc", body) == (403, b"")


async def test_the_question_may_come_in_pieces() -> None:
    body = json.dumps(ATTACH).encode()
    assert await ask("/collective_rpc", body, parts=3) == (0, body)


async def test_websockets_are_closed() -> None:
    assert (await ask("/v1/realtime", kind="websocket"))[0] == 1008
