"""The gateway: an OpenAI-compatible front of vLLM that records every call it answers.

The invariant: what an agent gets is what vLLM would have given it, and each call it got is a transition in the store. Every
route but `/health` needs a token, and every error has the shape of its route's API (OpenAI's where there is no such route) and
says what would have worked; what a plugin's route asks for and says of errors is the plugin's. At a route that is no call
nothing is sampled, so nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning.addresses import Allowed
from lightning.config import GatewayConfig
from lightning.errors import GatewayError
from lightning.gateway.call import Recorder
from lightning.gateway.calls import CallEndpoint, Parts
from lightning.gateway.connections import Front, Serving, bind
from lightning.gateway.dialects import Chat, Dialect
from lightning.gateway.http import ClientGoneError, RefusalError, beside, read_body
from lightning.gateway.identity import MODEL, Identity, TokenSigner
from lightning.gateway.policy import Policies, Policy
from lightning.gateway.stages import CONTRACT, Line, recording_refusals
from lightning.gateway.upstream import UNANSWERED, Forwarder, Upstream
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.types import LLM, Lease

log = logging.getLogger(__name__)

SURE_SECONDS = 1.5
"""Seconds that `Gateway.served` takes at most: who asks waits for it."""
VERSIONS = ("/v1/deployments/{deployment}", "/v1", "/openai/v1", "/openai/deployments/{deployment}", "/openai")
"""What stands before a route: a version, or what Azure's clients have in its place."""
PREFIXES = tuple(f"{root}{version}" for root in ("", "/r/{token}") for version in VERSIONS)
OWN_PATHS = frozenset({"v1", "r", "openai", "health"})
"""What paths of the gateway begin with."""
MODELS = "/models"
OTHERS = (
    " Other calls of a provider's API go to the provider from the agent's process, if its runner was started with a key for it "
    "(OPENAI_API_KEY, ANTHROPIC_API_KEY) and the client is based on httpx, or from the gateway, if gateway.providers has one "
    "that lists the route; else give that client its own base_url and key."
)
JSON = "application/json"


class Gateway:
    """The front of policy servers. All methods belong to the event loop that runs it.

    `upstreams` are the policy servers of its own, with `version` as their weights' version now and `run` as the run they are
    for (empty: any run); a gateway that has none gets no `upstreams`. Keys of other runs are answered by those runs' policy
    servers, which their trainers name in the store. `secret` signs the keys (at least 16 bytes): all servers over a store have
    one, that of `identity.gateway_secret`. With `shared` other servers answer for the rollouts of this one's keys, so that what
    they must know of them is kept in the store. With a `seed` calls without one are given one (`gateway.seed_calls`). `app` may
    be mounted elsewhere instead of calling `start`; then set `url` to where it can be reached.
    """

    def __init__(
        self,
        store: Store,
        upstreams: Sequence[Upstream],
        config: GatewayConfig,
        *,
        secret: bytes,
        version: int = 0,
        run: str = "",
        shared: bool = False,
        seed: int | None = None,
    ) -> None:
        self.url = ""
        self._config = config
        self._signer = TokenSigner(secret)
        own = Policy(upstreams, config.hold_timeout, version=version, seed=seed) if upstreams else None
        self._policies = Policies(store, own, run, config.hold_timeout, Allowed(config.allowed_upstreams))
        self._forwarder = Forwarder()
        self._serving: Serving | None = None
        self._recorder = Recorder(store, config.token_ttl)
        self._identity = identity = Identity(self._signer)
        self._closing = closing = AsyncExitStack()
        self.parts = Parts(config, identity, self._policies, self._forwarder, self._recorder, store, shared, closing)
        self.parts.line = line_of(self.parts)
        self._front = build_front(self.parts)
        self.app = self._front.app

    @property
    def stages(self) -> Mapping[str, str]:
        """The stages that stand in the line of its calls, in their order, with the versions of their distributions."""
        return self.parts.line.versions

    def mount(self, app: ASGIApp, name: str = "api") -> None:
        """Let another application answer everything below `/NAME` on the gateway's port. Raises `GatewayError` for a name
        that is taken, and for one of the gateway's own."""
        if name in OWN_PATHS or name in self._front.mounted:
            raise GatewayError(f"nothing can be mounted at /{name}: something answers there already")
        self._front.mounted[name] = app

    async def start(self) -> None:
        """Bind and serve on the running loop. Raises `GatewayError` when the address cannot be had."""
        if self._serving is not None:
            return
        if why := CONTRACT.why_idle(self.parts.line.stages, self._config, "record_requests"):
            log.warning("what agents send and get is not kept: %s", why)
        listener = bind(self._config.host, self._config.port)
        self._serving = Serving(self._front, listener, self._config.limits, self._identity.key_of)
        await self._serving.start()
        self.url = self._serving.url

    def issue(
        self,
        rollout: str,
        attempt: int,
        *,
        sampling: Mapping[str, float | int] | None = None,
        ttl: float | None = None,
        run: str = "",
        session: str = "",
        branch: bool = False,
    ) -> str:
        """Sign the API key of one attempt. `sampling` overrides what the agent asks for; `ttl` is in seconds.

        `run` says whose policy it is for; empty: the gateway's own. With a `session`, a run, the key is of many conversations,
        each of which becomes a rollout of that run; requests that are refused are recorded with `rollout`. In a `branch` the
        first calls are answered from the record of the rollout's parent.
        """
        ttl = self._config.token_ttl if ttl is None else ttl
        return self._signer.issue(rollout, attempt, ttl, sampling, run, session, branch=branch)

    def llm(self, lease: Lease, *, sampling: Mapping[str, float | int] | None = None, run: str = "") -> LLM:
        """What the agent of a leased rollout needs; `run` is whose policy answers it, where that is not its own run's. Raises
        `GatewayError` before `start`, and for a branch where no stage answers those."""
        if not self.url:
            raise GatewayError("The gateway has no address yet; await gateway.start() first.")
        rollout, branch = lease.rollout, lease.rollout.parent is not None
        if branch and (why := self.parts.line.why_not("branch")):
            raise GatewayError(f"the rollout {rollout.id} is a branch, and {why}")
        self._recorder.expect(rollout.id, lease.attempt)
        token = self.issue(rollout.id, lease.attempt, sampling=sampling, run=run or rollout.run, branch=branch)
        return LLM(base_url=f"{self.url}/v1", api_key=token, model=MODEL, extras=self.parts.line.told(rollout))

    async def served(self, run: str) -> bool:
        """Whether a call of this run would find a policy server that is up. Takes `SURE_SECONDS` at most, and that only until
        the run's servers have been asked for the first time; without an answer it is False."""
        policy = self._policies.of(run)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SURE_SECONDS):
                while not policy.told:  # noqa: ASYNC110 — short, once, and what is awaited has no one event
                    await asyncio.sleep(SURE_SECONDS / 100)
                self._forwarder.look_after(policy)
                while not policy.pool.sure:  # noqa: ASYNC110
                    await asyncio.sleep(SURE_SECONDS / 100)
        return policy.told and policy.pool.sure and policy.pool.healthy > 0

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """For the length of the block new requests for its own policy wait; those already at vLLM go on. Blocks may overlap.

        Gateways elsewhere that serve the run, too, are held by `lightning.gateway.policy.PolicyOwner`.
        """
        with self.own.gate.hold():
            self.own.freeze()
            yield

    @property
    def own(self) -> Policy:
        """Its own policy: whoever updates the weights or starts a policy server again tells it inside the hold. Raises
        `GatewayError` where it has none."""
        if self._policies.own is None:
            raise GatewayError(
                "this gateway has no policy server of its own; make it with at least one Upstream(url, model)"
            )
        return self._policies.own

    async def close(self) -> None:
        """Let the calls in flight end (for a while), then stop. Idempotent."""
        if self._serving is not None:
            await self._serving.stop()
            self._serving = None
        await self._policies.close()
        await self._forwarder.close()
        await self._closing.aclose()


class Others:
    """What stands below a version and is no route of the gateway's: a stage answers it, or nobody does. `posts` and `gets` are
    the paths, below a version, of what the gateway answers."""

    def __init__(self, parts: Parts, posts: Sequence[str], gets: Sequence[str]) -> None:
        self._parts, self._line, self._identity = parts, parts.line, parts.identity
        self._routes = {*posts, *gets}
        listed = ", ".join(
            [*(f"POST /v1{path}" for path in posts), *(f"GET /v1{path}" for path in gets), "GET /health"]
        )
        self._existing = f"These exist: {listed}; and the same below /r/<token>/v1."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. What is refused is recorded."""
        route = scope["path_params"]["route"]
        unknown = self._no_such(scope["method"], without_token(scope["path"]))
        if f"/{route}" in self._routes:
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

    async def http_error(self, request: Request, error: Exception) -> Response:
        """What Starlette refuses, as the gateway says it."""
        assert isinstance(error, HTTPException)
        path = without_token(request.url.path)
        if error.status_code == 404:
            return _answer(self._no_such(request.method, path))
        if error.status_code == 405:
            message = f"{request.method} is not allowed for {path}. {self._existing}"
            return _answer(RefusalError(405, "method_not_allowed", message))
        return _answer(RefusalError(error.status_code, "http_error", error.detail))

    def _no_such(self, method: str, path: str) -> RefusalError:
        """The refusal (404) of what nobody answers here."""
        message = f"There is no {method} {path} here. {self._existing}"
        if "/v1/v1/" in path:
            message += " Anthropic's clients add /v1 themselves: give them the base URL without it."
        elif path.removeprefix("/r/<token>").startswith(("/v1/", "/openai/")):
            message += OTHERS
        return RefusalError(404, "unknown_route", message)


def _model_in(payload: bytes, scope: Scope) -> object:
    """The model that a request names in a JSON body, if it does, or in the path."""
    if payload[:1] == b"{":
        try:
            return orjson.loads(payload).get("model")
        except orjson.JSONDecodeError:
            return None
    return scope["path_params"].get("deployment")


def build_front(parts: Parts) -> Front:
    """The routes, tied to the parts that serve them."""
    info = Info(parts)
    endpoints: dict[str, ASGIApp] = {dialect.path: CallEndpoint(dialect, parts) for dialect in spoken(parts.config)}
    gets: dict[str, Callable[..., Any]] = {MODELS: info.models}
    for name in plugins().names("routes"):
        method, _, route = name.rpartition(" ")
        if method not in ("", "GET"):
            raise GatewayError(f"a plugin registers the route {name!r}: name it as its path, or 'GET' and its path")
        if (path := f"/{route}") in (*endpoints, *gets):
            raise GatewayError(f"a plugin registers the route {name!r}, which the gateway answers already")
        (gets if method else endpoints)[path] = plugins().route(name)(parts)
    others = Others(parts, tuple(endpoints), tuple(gets))
    routes: list[Route] = [Route("/health", info.health, methods=["GET"])]
    for prefix in PREFIXES:
        routes += [Route(f"{prefix}{path}", endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        routes += [Route(f"{prefix}{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()]
    routes += [Route(f"{prefix}/{{route:path}}", others) for prefix in PREFIXES]
    app = Starlette(routes=routes, exception_handlers={HTTPException: others.http_error, RefusalError: _refusal})
    return Front(app, {f"/v1{path}": endpoint for path, endpoint in endpoints.items()})


class Info:
    """The two routes that answer questions about the gateway itself."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._server = parts, secrets.token_hex(8)

    async def health(self, request: Request) -> Response:
        """200 while at least one policy server is up, else 503. Needs no token and says nothing of addresses.

        A server without a policy of its own is well while it serves no run, too: it learns of them when they are asked for.
        `server` is another word in each process: clients notice by it that the one they used is gone.
        """
        policies, own = self._parts.policies.known, self._parts.policies.own
        healthy = sum(policy.pool.healthy for policy in policies)
        total = sum(len(policy.pool.slots) for policy in policies)
        well = bool(healthy or not policies)
        said = {
            "status": "ok" if well else "no policy server is up",
            "policy_version": None if own is None else own.version,
            "policy_servers": {"healthy": healthy, "total": total},
            "server": self._server,
        }
        return Response(orjson.dumps(said), 200 if well else 503, media_type=JSON)

    async def models(self, request: Request) -> Response:
        """vLLM's own list, with the policy under the name agents use (`max_model_len` and the rest are vLLM's)."""
        claims = self._parts.identity.claims(request.scope)
        try:
            return Response(
                await self._parts.forwarder.models(self._parts.policies.of(claims.run), claims.rollout), media_type=JSON
            )
        except UNANSWERED as error:
            message = f"The policy server did not list its models ({error!r}). Ask again."
            raise RefusalError(502, "upstream_failed", message) from error


def line_of(parts: Parts) -> Line:
    """The stages that plugins register, one of each kind for this gateway. Raises what `Contract.made` raises."""
    return Line(CONTRACT.made(parts), parts.config.stage_order)


def spoken(config: GatewayConfig) -> list[Dialect]:
    """OpenAI's chat, and one dialect of each kind that plugins register, for a gateway with these settings. Raises
    `GatewayError` for one whose path is another than it is registered with, or is spoken already."""
    found: list[Dialect] = [Chat()]
    for name in plugins().names("dialects"):
        dialect = plugins().dialect(name)(config)
        if dialect.path != f"/{name}" or any(dialect.path == other.path for other in found):
            raise GatewayError(
                f"a plugin registers the dialect {name!r} for {dialect.path}: each has its own path, /{name}"
            )
        found.append(dialect)
    return found


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
