"""Closes vLLM's own control routes (weights, pause, worker methods) to requests without a secret.

The invariant: a route that is not listed as open is refused before vLLM sees the request, unless the request has the secret. So
routes that another release of vLLM adds are closed. The one exception is the worker extension's call `lightning_attach`, which
tells who the server is and whether its engine runs. Gateways in other processes know a server by it; it changes no weights.

vLLM's own `--api-key` covers `/v1` alone. `vllm serve --middleware lightning.policy_server.owner_secret.OwnerSecret` installs
this middleware, with the secret in the environment. A vLLM that lightning starts has a new secret for each start.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

SECRET = "LIGHTNING_VLLM_SECRET"  # noqa: S105 — the variable's name
"""Environment variable with the secret, of a vLLM and of the trainer that attaches to it."""
HEADER = "x-lightning-secret"
OPEN = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    }
)
"""The model's routes, and those that only give information."""
ATTACH = {"method": "lightning_attach", "args": []}
"""The call of the worker extension that needs no secret."""
LONGEST_ATTACH = 200
"""Most bytes of the body of that call."""
CURE = (
    "This vLLM's control routes answer its owner alone. Whoever attaches to it sets "
    f"{SECRET} to the value that it was started with."
)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class OwnerSecret:
    """The ASGI middleware that asks for the secret. If the environment has no secret, every control route is refused."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._secret = os.environ.get(SECRET, "").encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request, or refuse it with 403."""
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"] == "/collective_rpc":
            body = await _short_body(receive)
            if _only_attaches(body):
                await self._app(scope, _again(body, receive), send)
                return
        await _refuse(scope, send)

    def _is_open(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN:
            return True
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        return bool(self._secret) and hmac.compare_digest(given, self._secret)


async def _short_body(receive: Any) -> bytes:
    """Read the body of a request; return b"" for a body longer than the open call's, or one that was cut off."""
    body = b""
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        body += part
        if message["type"] != "http.request" or len(body) > LONGEST_ATTACH:
            return b""
        if not message.get("more_body"):
            return body


def _only_attaches(body: bytes) -> bool:
    try:
        return bool(json.loads(body) == ATTACH)
    except ValueError:
        return False


def _again(body: bytes, receive: Any) -> Any:
    """Return a `receive` that gives `body`, which was read already, once more, and then what follows."""
    given = False

    async def received() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return received


async def _refuse(scope: Scope, send: Any) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": {"message": CURE, "type": "forbidden", "code": 403}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
