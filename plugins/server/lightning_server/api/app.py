"""The control API as an ASGI application: one object for one server, mounted on the gateway's port below `/api/`.

The invariant: a request is checked in this order, and reaches a handler only behind all of it: route, token, scope, its
holder's share, query, body, room. So a body that comes slowly takes room from nobody else, and no holder of a token takes all
of it. A handler sees the store of its caller's project.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from lightning.errors import DataError, PluginError
from lightning.gateway.http import ClientGoneError, read_body
from lightning.plugins import plugins
from lightning.store.operation import Operation
from lightning.store.protocol import Store
from lightning.types import Json
from lightning.types import Scope as TokenScope
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from lightning_server import json_codec
from lightning_server.api import handlers
from lightning_server.api.change_waiters import Watchers, events
from lightning_server.api.openapi import describe
from lightning_server.api.store_routes import route_of
from lightning_server.api.table import PREFIX, ApiCall, Finish, LlmFor, Route, Served, Services, query_of
from lightning_server.auth import Authenticator, Principal, authorization_in
from lightning_server.errors import RETRY, ApiError, answer, refusal_of, refuse
from lightning_server.messages import ONCE_HEADER, Changed
from lightning_server.operations import OPERATIONS, over_http
from lightning_server.projects import Projects

ROUTES: tuple[Route, ...] = (
    *handlers.ROUTES,
    *(route_of(operation, handlers.HANDLERS.get(operation.name)) for operation in OPERATIONS),
)
"""Those of the store and of the server itself."""
LONGEST_ONCE = 255
EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}
LONG = 65_536
"""Bytes of a body that is read beside the event loop."""
T = TypeVar("T")
NOBODY = Principal("", "nobody", TokenScope.VIEWER, "")
"""Who asks where no token is needed: of a project that cannot be, and so sees nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a server takes on. Beyond `requests` in flight, or `watches` that wait, it answers 429. One token may have a
    quarter of the requests in flight: further ones of it wait, `queued` of them at most and each for `queue_seconds` at most,
    before they get 429. A fleet of clients shares one token."""

    body_bytes: int = 32 * 1024 * 1024
    requests: int = 256
    watches: int = 10_000
    queued: int = 1024
    queue_seconds: float = 10.0


def routes() -> tuple[Route, ...]:
    """All of them: also those of the operations that plugins bring. Raises `PluginError` where two answer the same requests."""
    return (*ROUTES, *_brought(plugins().operations()))


@cache
def _brought(operations: tuple[Operation, ...]) -> tuple[Route, ...]:
    made: list[Route] = []
    taken = {_shape(route): "the server itself" for route in ROUTES}
    for operation in operations:
        owner = f"the plugin that brings {operation.group.name!r}" if operation.group else "the store"
        try:
            route = route_of(over_http(operation))
        except Exception as error:  # a plugin's line may be wrong in any way
            raise PluginError(f"{owner} has the operation {operation.name!r}, which has no route: {error}") from error
        first = taken.setdefault(_shape(route), owner)
        if first is not owner:
            raise PluginError(
                f"{first} and {owner} both answer {route.method} {PREFIX}{route.path}: uninstall one of them"
            )
        made.append(route)
    return tuple(made)


def _shape(route: Route) -> tuple[str, ...]:
    """Equal for routes that answer the same requests, whatever they call the parts of the path."""
    return route.method, re.sub(r"{\w+}", "{}", route.path)


def description() -> Mapping[str, Json]:
    """The OpenAPI document."""
    return _described(routes())


_described = cache(describe)


class _Turns:
    """The requests of one token: those that are in flight and those that wait for their turn."""

    def __init__(self, most: int) -> None:
        self.turns = asyncio.Semaphore(most)
        self.requests = 0


class Api:
    """The application. `finish` ends attempts, `llm_for` gives agents their access to the model (None: there is no gateway),
    `served` says whether the model of a run can be called now (None: it always can).

    Close it before the server that it is mounted on, so that who waits for changes is let go.
    """

    def __init__(
        self,
        store: Store,
        authenticator: Authenticator,
        *,
        finish: Finish,
        llm_for: LlmFor | None = None,
        served: Served | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._projects = Projects(store)
        self._authenticator = authenticator
        self._limits = limits or Limits()
        self._services = Services(Watchers(), finish, llm_for, served, description)
        self._routes = _Routes(routes())
        self._stopped = asyncio.Event()
        self._serving = Counter[bool]()  # requests, by whether they only wait
        self._asking: dict[str, _Turns] = {}

    async def close(self) -> None:
        """Let everybody go who waits for changes. Idempotent."""
        self._stopped.set()
        await self._services.watchers.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        where = f"{scope['method']} {scope['path'][:200]!r}"
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, sending)
        except ClientGoneError:
            return
        except Exception as error:  # noqa: BLE001 — the edge of the server: every fault becomes an answer
            refusal = refusal_of(error, where)
            if not started:
                await refuse(send, refusal)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        route, path = self._routes.find(scope)
        authorization = authorization_in(scope)
        principal = NOBODY if route.scopes is None else await self._authenticator.principal(authorization)
        if route.scopes is not None:
            principal.require(*route.scopes)
        async with self._share(route, principal):
            query, once = query_of(route, _query(scope)), _once(scope, principal) if route.once else ""
            payload = b"" if route.body is None else await read_body(scope, receive, self._limits.body_bytes)
            with self._room(route):
                body = (
                    None
                    if route.body is None
                    else await _beside(
                        len(payload) > LONG, json_codec.from_bytes, route.body, payload, "the body", True
                    )
                )
                call = ApiCall(principal, self._projects.of(principal.project), self._services, path, query, body, once)
                if route is handlers.WATCH and "text/event-stream" in ",".join(Headers(scope=scope).getlist("accept")):
                    await self._stream(call, authorization, scope, receive, send)
                    return
                answered = await route.handler(call)
                if route is handlers.WATCH:
                    await self._authenticator.principal(authorization)  # it may have been revoked during the wait
                written = await _beside(route.heavy, json_codec.to_bytes, answered, route.answer)
        await answer(send, 200, written)

    async def _stream(
        self, call: ApiCall[Any, None], authorization: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        asked = call.query

        async def wait(since: str, timeout: float) -> Changed:
            changed = await handlers.watch(replace(call, query=replace(asked, since=since, timeout=timeout)))
            await self._authenticator.principal(authorization)  # a token that was revoked meanwhile hears no more
            return changed

        first = await wait(asked.since, 0)
        answered = events(first, wait, self._stopped)
        await StreamingResponse(answered, headers=EVENTS)(scope, receive, send)

    @asynccontextmanager
    async def _share(self, route: Route, principal: Principal) -> AsyncIterator[None]:
        """Wait until less than a quarter of the room is this token's. Raises `ApiError` (429) when too many wait, or for too
        long."""
        if route.scopes is None or route is handlers.WATCH:
            yield
            return
        most, limits = max(1, self._limits.requests // 4), self._limits
        mine = self._asking.setdefault(principal.id, _Turns(most))
        if mine.requests >= most + limits.queued:
            raise _busy(f"{mine.requests} requests of this token are in flight or wait for their turn")
        mine.requests += 1
        try:
            try:
                async with asyncio.timeout(limits.queue_seconds):
                    await mine.turns.acquire()
            except TimeoutError:
                raise _busy(
                    f"{most} requests of this token are in flight, and this one had no turn in {limits.queue_seconds:g} s"
                ) from None
            try:
                yield
            finally:
                mine.turns.release()
        finally:
            mine.requests -= 1
            if not mine.requests:
                del self._asking[principal.id]

    @contextmanager
    def _room(self, route: Route) -> Iterator[None]:
        """Count a request, or refuse it while there are too many. Those that only wait have a count of their own; what needs no
        token is never refused so: a busy server is not a dead one."""
        if route.scopes is None:
            yield
            return
        waits = route is handlers.WATCH
        if self._serving[waits] >= (self._limits.watches if waits else self._limits.requests):
            what = "wait for changes" if waits else "are in flight"
            raise _busy(f"{self._serving[waits]} requests {what}, and this server takes no more")
        self._serving[waits] += 1
        try:
            yield
        finally:
            self._serving[waits] -= 1


def _busy(why: str) -> ApiError:
    return ApiError(429, "busy", f"{why}: ask again later.", RETRY)


class _Routes:
    """Finds the route of a request by its path as it was sent: an id may have a `/`, sent as `%2F`."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._methods: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._methods.setdefault(PREFIX + route.path, {})[route.method] = route
        self._patterns = {path: compile_path(path)[0] for path in self._methods}

    def find(self, scope: Scope) -> tuple[Route, dict[str, str]]:
        """The route and the path's parameters. Raises `ApiError` (404, 405)."""
        raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        sent = raw.partition(b"?")[0].decode("latin-1")
        for path, pattern in self._patterns.items():
            if (found := pattern.fullmatch(sent)) is None:
                continue
            methods = self._methods[path]
            if (route := methods.get(scope["method"])) is None:
                allowed = ", ".join(methods)
                message = f"{scope['method']} is not one of {allowed}, which {path} knows."
                raise ApiError(405, "method_not_allowed", message, {"allow": allowed})
            return route, {name: _unquoted(part) for name, part in found.groupdict().items()}
        raise ApiError(
            404, "unknown_route", f"There is no {sent[:200]!r}: GET {PREFIX}/openapi.json says what there is."
        )


def _unquoted(part: str) -> str:
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise DataError("the path is not percent-encoded UTF-8") from None


def _query(scope: Scope) -> list[tuple[str, str]]:
    text: str = scope["query_string"].decode("latin-1")
    try:
        return parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=50)
    except ValueError as error:
        raise DataError(f"the query is not name=value&..., percent-encoded: {error}") from None


def _once(scope: Scope, principal: Principal) -> str:
    """The caller's id for the request, which is another one with another token: nobody gets what somebody else was answered.

    Raises `DataError` for several, and for what is too long or not printable.
    """
    given = Headers(scope=scope).getlist(ONCE_HEADER)
    if len(given) > 1 or any(not 0 < len(one) <= LONGEST_ONCE or not one.isprintable() for one in given):
        raise DataError(f"the header {ONCE_HEADER} must have one id of at most {LONGEST_ONCE} printable characters")
    return f"{principal.id}/{given[0]}" if given else ""


async def _beside(long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Do something that may take long in a thread, so that others are served meanwhile."""
    return await asyncio.to_thread(work, *arguments) if long else work(*arguments)
