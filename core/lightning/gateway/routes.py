"""The routes of the gateway and what stands at those that are not calls.

The invariant: every route but `/health` needs a token, and every error has the shape of its route's API (OpenAI's where
there is no such route) and says what would have worked; only `/v1/traces`, which speaks OTLP, knows traces by their id too.
Nothing is sampled here, so nothing is recorded.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning.config.sections import GatewayConfig
from lightning.errors import StoreError
from lightning.gateway.body_limits import beside
from lightning.gateway.calls import CallEndpoint, Calls
from lightning.gateway.chat_template import prompt_of
from lightning.gateway.dialects import DIALECTS
from lightning.gateway.dialects.messages import Messages, chat_request
from lightning.gateway.dialects.translated import readable
from lightning.gateway.feedback import FEEDBACK_PATH, FeedbackEndpoint
from lightning.gateway.http import (
    JSON_TYPE,
    Body,
    ClientGoneError,
    RefusalError,
    UpstreamError,
    read_object,
    send_bytes,
)
from lightning.gateway.identity import Claims, Identity
from lightning.gateway.policy_registry import Policies
from lightning.gateway.providers import Providers
from lightning.gateway.recorder import Recorder
from lightning.gateway.replay.branches import Branches
from lightning.gateway.request_body import read_body
from lightning.gateway.traces import PATH, TraceEndpoint
from lightning.gateway.upstream.client import Forwarder

log = logging.getLogger(__name__)

VERSIONS = ("/v1/deployments/{deployment}", "/v1", "/openai/v1", "/openai/deployments/{deployment}", "/openai")
"""What stands before a route: a version, or what Azure's clients have in its place."""
PREFIXES = tuple(f"{root}{version}" for root in ("", "/r/{token}") for version in VERSIONS)
OWN_PATHS = frozenset({"v1", "r", "openai", "health"})
"""What paths of the gateway begin with."""
MODELS = "/models"
TOOL_RUNS = "/tool_runs"
COUNT_PATH = f"{Messages.path}/count_tokens"
POSTS = (*(dialect.path for dialect in DIALECTS), COUNT_PATH, PATH, FEEDBACK_PATH)
LISTED = ", ".join([*(f"POST /v1{path}" for path in POSTS), "GET /v1/models", "GET /v1/tool_runs", "GET /health"])
OTHERS = (
    " Other calls of a provider's API go to the provider from the agent's process, if its runner was started with a key for it "
    "(OPENAI_API_KEY, ANTHROPIC_API_KEY) and the client is based on httpx, or from the gateway, if gateway.providers has one "
    "that lists the route; else give that client its own base_url and key."
)
EXISTING = f"These exist: {LISTED}; and the same below /r/<token>/v1."
JSON = "application/json"
UNANSWERED = (aiohttp.ClientError, TimeoutError, OSError, UpstreamError)
"""What asking a policy server raises when it does not answer as itself."""


class CountTokens:
    """`POST /v1/messages/count_tokens`: the tokens of a prompt, by the policy server's own tokenizer and chat template, over
    the very chat messages that `/v1/messages` would send."""

    def __init__(
        self, config: GatewayConfig, identity: Identity, policies: Policies, forwarder: Forwarder, providers: Providers
    ) -> None:
        self._config, self._identity, self._policies, self._forwarder = config, identity, policies, forwarder
        self._providers = providers
        self._dialect = Messages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Never raises for what is the agent's or vLLM's fault."""
        try:
            claims = self._identity.claims(scope)
            self._identity.check_over(claims)
            payload = await read_body(scope, receive, self._config.max_body_bytes)
            body = await beside(scope, partial(read_object, payload))
            if (provider := self._providers.of_model(body.get("model"))) is not None:
                await self._providers.pass_on(provider, COUNT_PATH[1:], payload, scope, receive, send)
                return
            with readable():
                chat = chat_request(body)
            status, answer = await self._count(claims, chat)
            await send_bytes(send, status, answer)
        except RefusalError as refusal:
            await send_bytes(send, refusal.status, self._dialect.refusal(refusal), (JSON_TYPE, *refusal.headers))
        except ClientGoneError:
            return

    async def _count(self, claims: Claims, chat: Body) -> tuple[int, bytes]:
        policy = self._policies.of(claims.run)
        tokenize = partial(self._forwarder.tokenize, policy, claims.rollout)
        try:
            await self._dialect.fit(chat, policy.template, tokenize)
            with readable():
                prompt = prompt_of(chat)
            status, payload = await tokenize(prompt)
            if status != 200:
                return status, self._dialect.upstream_refusal(status, payload)
            count = orjson.loads(payload)["count"]
            said = {"input_tokens": count, "context_management": {"original_input_tokens": count}}
            return 200, orjson.dumps(said)
        except (*UNANSWERED, orjson.JSONDecodeError, KeyError, TypeError) as error:
            message = f"The policy server did not count the tokens ({error!r}). Ask again."
            raise RefusalError(502, "upstream_failed", message) from error


class ToolRuns:
    """`GET /v1/tool_runs`: the runs of tools that are answered in a branch, for whoever runs its agent; of another attempt
    none."""

    def __init__(self, identity: Identity, branches: Branches) -> None:
        self._identity, self._branches = identity, branches

    async def __call__(self, request: Request) -> Response:
        """Serve one request."""
        claims = self._identity.claims(request.scope)
        runs = await self._branches.tool_runs(claims) if claims.branch else []
        return Response(orjson.dumps({"tool_runs": [asdict(run) for run in runs]}), media_type=JSON)


class Others:
    """What stands below a version and is no route of the gateway's: a provider answers it, or nobody does."""

    def __init__(self, config: GatewayConfig, identity: Identity, recorder: Recorder, providers: Providers) -> None:
        self._config, self._identity, self._recorder, self._providers = config, identity, recorder, providers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. What an agent asks for and does not get is recorded as a refused call."""
        route, unknown = scope["path_params"]["route"], unknown_route(scope["method"], without_token(scope["path"]))
        if f"/{route}" in (*POSTS, MODELS, TOOL_RUNS):
            raise HTTPException(405)
        try:
            claims = self._identity.claims(scope)
            self._identity.check_over(claims)
        except RefusalError:
            if self._providers.of_route(route, None) is None:
                raise unknown from None
            raise
        try:
            if self._providers.of_route(route, None) is None:
                raise unknown
            payload = await read_body(scope, receive, self._config.max_body_bytes)
            model = await beside(scope, partial(_model_in, payload, scope))
            provider = self._providers.of_route(route, model)
            if provider is None:
                raise unknown
            await self._providers.pass_on(provider, route, payload, scope, receive, send)
        except ClientGoneError:
            return
        except RefusalError as refusal:
            if scope["method"] == "POST" and refusal.status < 500:
                await self._record(scope, claims, refusal)
            raise

    async def _record(self, scope: Scope, claims: Claims, refusal: RefusalError) -> None:
        name = f"route-{secrets.token_hex(12)}"
        try:
            await self._recorder.append_refused(claims, self._identity.caller(scope, None), name, refusal)
        except StoreError as error:
            log.warning("that a call of %s was refused (%s) was not recorded: %s", claims.rollout, refusal.code, error)


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


def build_front(parts: Calls, traces: TraceEndpoint, feedback: FeedbackEndpoint) -> Front:
    """The routes, tied to the parts that serve them."""
    config, identity, providers = parts.config, parts.identity, parts.providers
    info, tool_runs = Info(identity, parts.policies, parts.forwarder), ToolRuns(identity, parts.branches)
    endpoints: dict[str, ASGIApp] = {dialect.path: CallEndpoint(dialect(), parts) for dialect in DIALECTS}
    endpoints[COUNT_PATH] = CountTokens(config, identity, parts.policies, parts.forwarder, providers)
    endpoints[PATH] = traces
    endpoints[FEEDBACK_PATH] = feedback
    routes: list[Route] = [Route("/health", info.health, methods=["GET"])]
    for prefix in PREFIXES:
        routes += [Route(f"{prefix}{path}", endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        routes.append(Route(f"{prefix}{MODELS}", info.models, methods=["GET"]))
        routes.append(Route(f"{prefix}{TOOL_RUNS}", tool_runs.__call__, methods=["GET"]))
    others = Others(config, identity, parts.recorder, providers)
    routes += [Route(f"{prefix}/{{route:path}}", others) for prefix in PREFIXES]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, RefusalError: _refusal})
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
            "policy_version": None if own is None else own.book.current,
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


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = without_token(request.url.path)
    if error.status_code == 404:
        return _answer(unknown_route(request.method, path))
    if error.status_code == 405:
        message = f"{request.method} is not allowed for {path}. {EXISTING}"
        return _answer(RefusalError(405, "method_not_allowed", message))
    return _answer(RefusalError(error.status_code, "http_error", error.detail))


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return _answer(error)


def _answer(refusal: RefusalError) -> Response:
    headers = {name.decode(): value.decode() for name, value in refusal.headers}
    return Response(refusal.body, refusal.status, headers, JSON)


def unknown_route(method: str, path: str) -> RefusalError:
    """The refusal (404) of what nobody answers here."""
    message = f"There is no {method} {path} here. {EXISTING}"
    if "/v1/v1/" in path:
        message += " Anthropic's clients add /v1 themselves: give them the base URL without it."
    elif path.removeprefix("/r/<token>").startswith(("/v1/", "/openai/")):
        message += OTHERS
    return RefusalError(404, "unknown_route", message)


def without_token(path: str) -> str:
    """The path, with the token (a credential) left out of what may be logged by clients."""
    parts = path.split("/", 3)
    if parts[:2] == ["", "r"] and len(parts) == 4:
        return f"/r/<token>/{parts[3]}"
    return path
