"""The routes of the gateway and what stands at those that are not calls.

The invariant: every route but `/health` needs a token, and every error has the shape of its route's API (OpenAI's where
there is no such route) and says what would have worked; what a plugin's route asks for and says of errors is the plugin's.
Nothing is sampled here, so nothing is recorded.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning.errors import GatewayError
from lightning.gateway.calls import CallEndpoint, Parts
from lightning.gateway.dialects import Chat, Completions, Dialect
from lightning.gateway.http import (
    JSON_TYPE,
    ClientGoneError,
    RefusalError,
    send_bytes,
)
from lightning.gateway.identity import Identity
from lightning.gateway.policy import Policies
from lightning.gateway.request_body import beside, read_body
from lightning.gateway.stages import CONTRACT, Line, recording_refusals
from lightning.gateway.upstream.client import UNANSWERED, Forwarder
from lightning.plugins import plugins

VERSIONS = ("/v1/deployments/{deployment}", "/v1", "/openai/v1", "/openai/deployments/{deployment}", "/openai")
"""What stands before a route: a version, or what Azure's clients have in its place."""
PREFIXES = tuple(f"{root}{version}" for root in ("", "/r/{token}") for version in VERSIONS)
OWN_PATHS = frozenset({"v1", "r", "openai", "health"})
"""What paths of the gateway begin with."""
MODELS = "/models"
GET = "GET"
OTHERS = (
    " Other calls of a provider's API go to the provider from the agent's process, if its runner was started with a key for it "
    "(OPENAI_API_KEY, ANTHROPIC_API_KEY) and the client is based on httpx, or from the gateway, if gateway.providers has one "
    "that lists the route; else give that client its own base_url and key."
)
JSON = "application/json"


class Others:
    """What stands below a version and is no route of the gateway's: a stage answers it, or nobody does."""

    def __init__(self, parts: Parts, directory: Directory) -> None:
        self._parts, self._line, self._identity, self._directory = parts, parts.line, parts.identity, directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. What is refused is recorded."""
        route = scope["path_params"]["route"]
        unknown = self._directory.no_such(scope["method"], without_token(scope["path"]))
        if f"/{route}" in (*self._directory.posts, *self._directory.gets):
            raise HTTPException(405)
        try:
            claims = self._identity.claims(scope)
            self._identity.check_over(claims)
        except RefusalError:
            if self._line.elsewhere(route) is None:
                raise unknown from None
            raise
        try:
            async with recording_refusals(self._parts, claims, scope, send) as passed:
                if self._line.elsewhere(route, rollout=claims.rollout) is None:
                    raise unknown
                payload = await read_body(scope, receive, self._parts.config.max_body_bytes)
                model = await beside(scope, partial(_model_in, payload, scope))
                pass_on = self._line.elsewhere(route, model, rollout=claims.rollout)
                if pass_on is None:
                    raise unknown
                await pass_on(payload, scope, receive, passed)
        except ClientGoneError:
            return


def _model_in(payload: bytes, scope: Scope) -> object:
    """The model that a request names in a JSON body, if it does, or in the path."""
    if payload[:1] == b"{":
        try:
            return orjson.loads(payload).get("model")
        except orjson.JSONDecodeError:
            return None
    return scope["path_params"].get("deployment")


NO_WEBSOCKET = RefusalError(
    426,
    "no_websocket",
    "There are no WebSockets here; send the request by POST over HTTP.",
    [(b"upgrade", b"HTTP/1.1")],
)
"""What clients that try a WebSocket first (Codex) take for the word to go on without."""


def _wants_websocket(scope: Scope) -> bool:
    return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"])


class Front:
    """`app` answers everything; calls to `/v1` go straight to their endpoints, past what Starlette does for each request."""

    def __init__(self, app: Starlette, endpoints: Mapping[str, ASGIApp]) -> None:
        self.app, self._endpoints = app, endpoints
        self.mounted: dict[str, ASGIApp] = {}
        """What answers on the same port beside the gateway, by the first part of the path: `api`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] == "http" and scope["method"] == "GET" and _wants_websocket(scope):
            await send_bytes(send, NO_WEBSOCKET.status, NO_WEBSOCKET.body, (JSON_TYPE, *NO_WEBSOCKET.headers))
            return
        if self.mounted and scope["type"] == "http":
            other = self.mounted.get(scope["path"][1:].partition("/")[0])
            if other is not None:
                await other(scope, receive, send)
                return
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self.app)(scope, receive, send)


def build_front(parts: Parts) -> Front:
    """The routes, tied to the parts that serve them."""
    info = Info(parts.identity, parts.policies, parts.forwarder)
    endpoints: dict[str, ASGIApp] = {dialect.path: CallEndpoint(dialect, parts) for dialect in spoken()}
    gets: dict[str, ASGIApp] = {}
    for name in plugins().names("routes"):
        method, _, route = name.rpartition(" ")
        if method not in ("", GET):
            raise GatewayError(f"a plugin registers the route {name!r}: name it as its path, or {GET!r} and its path")
        if (path := f"/{route}") in (*endpoints, *gets, MODELS):
            raise GatewayError(f"a plugin registers the route {name!r}, which the gateway answers already")
        (gets if method else endpoints)[path] = plugins().route(name)(parts)
    directory = Directory(tuple(endpoints), (MODELS, *gets))
    routes: list[Route] = [Route("/health", info.health, methods=["GET"])]
    for prefix in PREFIXES:
        routes += [Route(f"{prefix}{path}", endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        routes.append(Route(f"{prefix}{MODELS}", info.models, methods=["GET"]))
        routes += [Route(f"{prefix}{path}", endpoint, methods=[GET]) for path, endpoint in gets.items()]
    others = Others(parts, directory)
    routes += [Route(f"{prefix}/{{route:path}}", others) for prefix in PREFIXES]
    app = Starlette(routes=routes, exception_handlers={HTTPException: directory.http_error, RefusalError: _refusal})
    return Front(app, {f"/v1{path}": endpoint for path, endpoint in endpoints.items()})


class Info:
    """The two routes that answer questions about the gateway itself."""

    def __init__(self, identity: Identity, policies: Policies, forwarder: Forwarder) -> None:
        self._identity, self._policies, self._forwarder = identity, policies, forwarder
        self._server = secrets.token_hex(8)

    async def health(self, request: Request) -> Response:
        """200 while at least one policy server is up, else 503. Needs no token and says nothing of addresses.

        A server without a policy of its own is well while it serves no run, too: it learns of them when they are asked for.
        `server` is another word in each process: clients notice by it that the one they used is gone.
        """
        policies = self._policies.known
        healthy = sum(policy.pool.healthy for policy in policies)
        total = sum(len(policy.pool.slots) for policy in policies)
        well = bool(healthy or not policies)
        own = self._policies.own
        said = {
            "status": "ok" if well else "no policy server is up",
            "policy_version": None if own is None else own.version,
            "policy_servers": {"healthy": healthy, "total": total},
            "server": self._server,
        }
        return Response(orjson.dumps(said), 200 if well else 503, media_type=JSON)

    async def models(self, request: Request) -> Response:
        """vLLM's own list, with the policy under the name agents use (`max_model_len` and the rest are vLLM's)."""
        claims = self._identity.claims(request.scope)
        try:
            return Response(
                await self._forwarder.models(self._policies.of(claims.run), claims.rollout), media_type=JSON
            )
        except UNANSWERED as error:
            message = f"The policy server did not list its models ({error!r}). Ask again."
            raise RefusalError(502, "upstream_failed", message) from error


def line_of(parts: Parts) -> Line:
    """The stages that plugins register, one of each kind for this gateway. Raises what `Contract.made` raises."""
    return Line(CONTRACT.made(parts, parts.config), parts.config.stage_order)


def spoken() -> list[Dialect]:
    """OpenAI's chat and completions, and one dialect of each kind that plugins register. Raises `GatewayError` for one whose
    path is another than it is registered with, or is spoken already."""
    found: list[Dialect] = [Chat(), Completions()]
    for name in plugins().names("dialects"):
        dialect = plugins().dialect(name)()
        if dialect.path != f"/{name}" or any(dialect.path == other.path for other in found):
            raise GatewayError(
                f"a plugin registers the dialect {name!r} for {dialect.path}: each has its own path, /{name}"
            )
        found.append(dialect)
    return found


class Directory:
    """What the gateway answers, for whoever asks for something else: the paths, below a version, of what is posted and of what
    is got."""

    def __init__(self, posts: Sequence[str], gets: Sequence[str]) -> None:
        self.posts, self.gets = posts, gets
        listed = ", ".join(
            [*(f"POST /v1{path}" for path in posts), *(f"GET /v1{path}" for path in gets), "GET /health"]
        )
        self._existing = f"These exist: {listed}; and the same below /r/<token>/v1."

    def no_such(self, method: str, path: str) -> RefusalError:
        """The refusal (404) of what nobody answers here."""
        message = f"There is no {method} {path} here. {self._existing}"
        if "/v1/v1/" in path:
            message += " Anthropic's clients add /v1 themselves: give them the base URL without it."
        elif path.removeprefix("/r/<token>").startswith(("/v1/", "/openai/")):
            message += OTHERS
        return RefusalError(404, "unknown_route", message)

    async def http_error(self, request: Request, error: Exception) -> Response:
        """What Starlette refuses, as the gateway says it."""
        assert isinstance(error, HTTPException)
        path = without_token(request.url.path)
        if error.status_code == 404:
            return _answer(self.no_such(request.method, path))
        if error.status_code == 405:
            message = f"{request.method} is not allowed for {path}. {self._existing}"
            return _answer(RefusalError(405, "method_not_allowed", message))
        return _answer(RefusalError(error.status_code, "http_error", error.detail))


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return _answer(error)


def _answer(refusal: RefusalError) -> Response:
    headers = {name.decode(): value.decode() for name, value in refusal.headers}
    return Response(refusal.body, refusal.status, headers, JSON)


def without_token(path: str) -> str:
    """The path, with the token (a credential) left out of what may be logged by clients."""
    parts = path.split("/", 3)
    if parts[:2] == ["", "r"] and len(parts) == 4:
        return f"/r/<token>/{parts[3]}"
    return path
