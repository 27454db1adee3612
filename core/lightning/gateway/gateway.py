"""The gateway: an OpenAI-compatible front of vLLM that records every call it answers.

The invariant: an agent gets the answer that vLLM would have given, and each answered call is a transition in the store. Every
route but `/health` needs a token. Every error has the shape of its route's API (OpenAI's for an unknown route) and says what
would have worked. Plugins decide about tokens and errors of their own routes. At other routes nothing is sampled, so nothing is
stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

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
"""The most seconds that `Gateway.served` takes, because its caller waits."""
VERSIONS = ("/v1/deployments/{deployment}", "/v1", "/openai/v1", "/openai/deployments/{deployment}", "/openai")
"""The prefixes of a route: a version, or the paths that Azure's clients use instead."""
PREFIXES = tuple(f"{root}{version}" for root in ("", "/r/{token}") for version in VERSIONS)
OWN_PATHS = frozenset({"v1", "r", "openai", "health"})
"""The first parts of the gateway's own paths."""
MODELS = "/models"
OTHERS = (
    " Other calls of a provider's API go to the provider from the agent's process, if its runner was started with a key for it "
    "(OPENAI_API_KEY, ANTHROPIC_API_KEY) and the client is based on httpx, or from the gateway, if gateway.providers has one "
    "that lists the route; else give that client its own base_url and key."
)
JSON = "application/json"


class Gateway:
    """The front of policy servers. All methods belong to the event loop that runs it.

    `upstreams` are its own policy servers, which may be none; `version` is their weights' version and `run` the run that they
    serve (empty: any run). Keys of other runs are answered by those runs' policy servers, which their trainers name in the
    store. `secret` signs the keys and has at least 16 bytes; all servers over a store use the same one,
    `identity.gateway_secret`. With `shared` other servers answer calls with this gateway's keys, too, so data that they need is
    kept in the store. With a `seed` calls without a seed get one (`gateway.seed_calls`). `agents` is how many agents
    will run at once (0: unknown). Instead of calling `start`, `app` may be mounted elsewhere; then set `url` to its address.
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
        agents: int = 0,
    ) -> None:
        self.url = ""
        self.addresses: Sequence[str] = ()
        """URLs of gateways in other processes to which its keys for agents lead instead; none: to `url`."""
        self._config = config
        self._signer = TokenSigner(secret)
        own = Policy(upstreams, config.hold_timeout, version=version, seed=seed) if upstreams else None
        self._policies = Policies(store, own, run, config.hold_timeout, Allowed(config.allowed_upstreams))
        self._forwarder = Forwarder()
        self._serving: Serving | None = None
        self._recorder = Recorder(store, config.token_ttl)
        self._identity = identity = Identity(self._signer)
        self._closing = closing = AsyncExitStack()
        self.parts = Parts(
            config, identity, self._policies, self._forwarder, self._recorder, store, shared, closing, agents
        )
        self.parts.line = line_of(self.parts)
        self._front = build_front(self.parts)
        self.app = self._front.app

    @property
    def stages(self) -> Mapping[str, str]:
        """The names of the stages of its calls, in their order, with the versions of their distributions."""
        return self.parts.line.versions

    def mount(self, app: ASGIApp, name: str = "api") -> None:
        """Let another application answer all paths below `/NAME` on the gateway's port. Raises `GatewayError` for a name that
        is in use."""
        if name in OWN_PATHS or name in self._front.mounted:
            raise GatewayError(f"nothing can be mounted at /{name}: something answers there already")
        self._front.mounted[name] = app

    async def start(self, listener: socket.socket | None = None) -> None:
        """Serve on the running loop, on a bound `listener` if one is given, else on the configured port. Raises `GatewayError`
        if the address cannot be bound."""
        if self._serving is not None:
            return
        listener = listener or bind(self._config.host, self._config.port)
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
        server: int | None = None,
    ) -> str:
        """Return a signed API key for one attempt. `sampling` overrides the agent's parameters; `ttl` is in seconds.

        `run` is the run whose policy answers; empty for the gateway's own. With a `session`, the id of a run, the key is for
        many conversations, each of which becomes a rollout of that run; refused requests are stored with `rollout`. With
        `branch` the first calls are answered from the record of the rollout's parent. `server` is the number of the policy
        server that gets the calls while it is well; None leaves the choice to a hash of the rollout's id.
        """
        ttl = self._config.token_ttl if ttl is None else ttl
        return self._signer.issue(rollout, attempt, ttl, sampling, run, session, branch=branch, server=server)

    def llm(self, lease: Lease, *, sampling: Mapping[str, float | int] | None = None, run: str = "") -> LLM:
        """Return the `LLM` for the agent of a leased rollout. `run` is the run whose policy answers, if that is another run
        than the rollout's. Raises `GatewayError` before `start`, and for a branch if no stage answers branches."""
        if not self.url:
            raise GatewayError("The gateway has no address yet; await gateway.start() first.")
        rollout, branch = lease.rollout, lease.rollout.parent is not None
        if branch and (why := self.parts.line.why_not("branch")):
            raise GatewayError(f"the rollout {rollout.id} is a branch, and {why}")
        self._recorder.expect(rollout.id, lease.attempt)
        of, server = run or rollout.run, None
        if self.parts.line.places:
            server = self.parts.line.placed(rollout, self._policies.of(of).pool.slots)
        token = self.issue(rollout.id, lease.attempt, sampling=sampling, run=of, branch=branch, server=server)
        # All calls of a rollout go to one process, which has its branch, its texts and its tokens in memory.
        place = zlib.crc32(rollout.id.encode()) % len(self.addresses) if self.addresses else 0
        url = self.addresses[place] if self.addresses else self.url
        return LLM(base_url=f"{url}/v1", api_key=token, model=MODEL, extras=self.parts.line.told(rollout))

    async def served(self, run: str) -> bool:
        """Return whether a policy server of this run is up. Until the run's servers have been checked for the first time it
        waits, at most `SURE_SECONDS`, and then returns False."""
        policy = self._policies.of(run)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SURE_SECONDS):
                while not policy.told:  # noqa: ASYNC110 — short, once, and there is no event for it
                    await asyncio.sleep(SURE_SECONDS / 100)
                self._forwarder.look_after(policy)
                while not policy.pool.sure:  # noqa: ASYNC110
                    await asyncio.sleep(SURE_SECONDS / 100)
        return policy.told and policy.pool.sure and policy.pool.healthy > 0

    @asynccontextmanager
    async def hold(self, server: Upstream | None = None) -> AsyncIterator[None]:
        """Let new requests for this server of its own policy, or with None for any, wait during the block; requests at vLLM go
        on. Blocks may overlap.

        `lightning.gateway.policy.PolicyOwner` holds other gateways that serve the run.
        """
        with self.own.gate.hold(None if server is None else self.own.pool.slot_of(server).number):
            self.own.freeze()
            yield

    @property
    def own(self) -> Policy:
        """The gateway's own policy. Whoever updates the weights or restarts a policy server reports it here inside a hold.
        Raises `GatewayError` if the gateway has no policy of its own."""
        if self._policies.own is None:
            raise GatewayError(
                "this gateway has no policy server of its own; make it with at least one Upstream(url, model)"
            )
        return self._policies.own

    async def close(self) -> None:
        """Wait for the calls in flight for a while, then stop. Idempotent."""
        if self._serving is not None:
            await self._serving.stop()
            self._serving = None
        await self._policies.close()
        await self._forwarder.close()
        await self._closing.aclose()


class Others:
    """Answers requests for routes that the gateway does not have: a stage answers, or the request is refused. `posts` and
    `gets` are the gateway's own routes."""

    def __init__(self, parts: Parts, posts: Sequence[str], gets: Sequence[str]) -> None:
        self._parts, self._line, self._identity = parts, parts.line, parts.identity
        self._routes = {*posts, *gets}
        listed = ", ".join(
            [*(f"POST /v1{path}" for path in posts), *(f"GET /v1{path}" for path in gets), "GET /health"]
        )
        self._existing = f"These exist: {listed}; and the same below /r/<token>/v1."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A refused request with a valid key is stored."""
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
        """Return the gateway's answer to an error of Starlette."""
        assert isinstance(error, HTTPException)
        path = without_token(request.url.path)
        if error.status_code == 404:
            return _answer(self._no_such(request.method, path))
        if error.status_code == 405:
            message = f"{request.method} is not allowed for {path}. {self._existing}"
            return _answer(RefusalError(405, "method_not_allowed", message))
        return _answer(RefusalError(error.status_code, "http_error", error.detail))

    def _no_such(self, method: str, path: str) -> RefusalError:
        """Return the refusal (404) of an unknown route, with the existing routes."""
        message = f"There is no {method} {path} here. {self._existing}"
        if "/v1/v1/" in path:
            message += " Anthropic's clients add /v1 themselves: give them the base URL without it."
        elif path.removeprefix("/r/<token>").startswith(("/v1/", "/openai/")):
            message += OTHERS
        return RefusalError(404, "unknown_route", message)


def _model_in(payload: bytes, scope: Scope) -> object:
    """Return the model that a request names, in a JSON body or in the path; None if it names none."""
    if payload[:1] == b"{":
        try:
            return orjson.loads(payload).get("model")
        except orjson.JSONDecodeError:
            return None
    return scope["path_params"].get("deployment")


def build_front(parts: Parts) -> Front:
    """Make the application with all routes of the gateway. Raises `GatewayError` for a plugin's route that is wrongly named or
    exists already."""
    info = Info(parts)
    endpoints: dict[str, ASGIApp] = {dialect.path: CallEndpoint(dialect, parts) for dialect in spoken(parts.config)}
    gets: dict[str, Callable[..., Any]] = {MODELS: info.models}
    for name in plugins().names("routes"):
        method, _, route = name.rpartition(" ")
        if method not in ("", "GET"):
            raise GatewayError(f"a plugin registers the route {name!r}: name it as its path, or 'GET' and its path")
        if (path := f"/{route}") in (*endpoints, *gets):
            raise GatewayError(f"a plugin registers the route {name!r}, which the gateway answers already")
        made = cast("Callable[[Parts], ASGIApp]", plugins().get("routes", name))
        (gets if method else endpoints)[path] = made(parts)
    others = Others(parts, tuple(endpoints), tuple(gets))
    routes: list[Route] = [Route("/health", info.health, methods=["GET"])]
    for prefix in PREFIXES:
        routes += [Route(f"{prefix}{path}", endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        routes += [Route(f"{prefix}{path}", endpoint, methods=["GET"]) for path, endpoint in gets.items()]
    routes += [Route(f"{prefix}/{{route:path}}", others) for prefix in PREFIXES]
    app = Starlette(routes=routes, exception_handlers={HTTPException: others.http_error, RefusalError: _refusal})
    return Front(app, {f"/v1{path}": endpoint for path, endpoint in endpoints.items()})


class Info:
    """The two routes about the gateway itself."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._server = parts, secrets.token_hex(8)

    async def health(self, request: Request) -> Response:
        """Answer 200 while at least one policy server is up, else 503. It needs no token and shows no addresses.

        A gateway that serves no run is well, too, because it learns of runs from their calls. `server` is a text that is new in
        each process, by which clients notice that the process was replaced.
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
        """Answer vLLM's list of models, with the names that calls of the key may ask for; the other fields are vLLM's."""
        claims = self._parts.identity.claims(request.scope)
        names = await self._parts.line.models(claims)
        try:
            found = await self._parts.forwarder.models(self._parts.policies.of(claims.run), claims.rollout, names)
            return Response(found, media_type=JSON)
        except UNANSWERED as error:
            message = f"The policy server did not list its models ({error!r}). Ask again."
            raise RefusalError(502, "upstream_failed", message) from error


def line_of(parts: Parts) -> Line:
    """Make the stages that plugins register, for this gateway. Raises the errors of `Contract.made` and of `Line`."""
    return Line(CONTRACT.made(parts), parts.config.stage_order)


def spoken(config: GatewayConfig) -> list[Dialect]:
    """Return the dialects of a gateway with these settings: OpenAI's chat, and those that plugins register. Raises
    `GatewayError` for a plugin's dialect whose path is not the one it is registered with, or is in use."""
    found: list[Dialect] = [Chat()]
    for name in plugins().names("dialects"):
        dialect = cast("Callable[[GatewayConfig], Dialect]", plugins().get("dialects", name))(config)
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
    """Return a path without the token in it, which is a credential and must not be logged."""
    parts = path.split("/", 3)
    if parts[:2] == ["", "r"] and len(parts) == 4:
        return f"/r/<token>/{parts[3]}"
    return path
