"""The control API as an ASGI application: one object for each server, mounted on the gateway's port below `/api/`.

The invariant: a request reaches a handler only after these checks, in this order: route, token, scope, the token's share of
requests, query, body, free room. So a slowly arriving body takes room from no other token, and no token takes all the room. A
handler sees the store of its caller's project.
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
from lightning_server.api.table import ApiCall, Finish, LlmFor, Route, Served, Services, query_of
from lightning_server.auth import Authenticator, Principal, authorization_in
from lightning_server.errors import RETRY, ApiError, answer, refusal_of, refuse
from lightning_server.messages import ONCE_HEADER, PREFIX, Changed
from lightning_server.operations import OPERATIONS, over_http
from lightning_server.projects import Projects

ROUTES: tuple[Route, ...] = (
    *handlers.ROUTES,
    *(route_of(operation, handlers.HANDLERS.get(operation.name)) for operation in OPERATIONS),
)
"""The routes of the store's own operations and of the server itself, without those of plugins."""
LONGEST_ONCE = 255
EVENTS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}
LONG = 65_536
"""A body longer than this many bytes is parsed in a thread."""
T = TypeVar("T")
NOBODY = Principal("", "nobody", TokenScope.VIEWER, "")
"""The principal of requests without a token: its project cannot exist, so it sees nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a server takes on at once. Beyond `requests` in flight, or `watches` waiting, it answers 429. One token may have
    a quarter of the requests in flight; its further requests wait, at most `queued` of them for at most `queue_seconds` each,
    and then get 429. A fleet of clients may share one token."""

    body_bytes: int = 32 * 1024 * 1024
    requests: int = 256
    watches: int = 10_000
    queued: int = 1024
    queue_seconds: float = 10.0


def routes() -> tuple[Route, ...]:
    """Return all routes, including those of plugins' operations. Raises `PluginError` where two answer the same requests."""
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
    """Return a key that is equal for routes that answer the same requests, whatever the names of their path parameters."""
    return route.method, re.sub(r"{\w+}", "{}", route.path)


def description() -> Mapping[str, Json]:
    """Return the OpenAPI document of all routes."""
    return _described(routes())


_described = cache(describe)


class _Turns(asyncio.Semaphore):
    """The turns of one token, as many as may be in flight. `requests` are those in flight and those that wait for a turn."""

    requests = 0


class Api:
    """The ASGI application. `finish` ends attempts. `llm_for` gives agents their access to the model (None: there is no
    gateway). `served` tells whether the model of a run can be called now (None: it always can).

    Close it before the server that it is mounted on, so that clients that wait for changes are answered.
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
        """Answer all clients that wait for changes. Idempotent."""
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
            await self._authenticator.principal(authorization)  # the token may have been revoked during the wait
            return changed

        first = await wait(asked.since, 0)
        await StreamingResponse(events(first, wait, self._stopped), headers=EVENTS)(scope, receive, send)

    @asynccontextmanager
    async def _share(self, route: Route, principal: Principal) -> AsyncIterator[None]:
        """For the length of the block count the request as one of its token's; first wait until the token has less than a
        quarter of the requests in flight. Raises `ApiError` (429) when too many of its requests wait, or this one waits too
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
                    await mine.acquire()
            except TimeoutError:
                raise _busy(
                    f"{most} requests of this token are in flight, and this one had no turn in {limits.queue_seconds:g} s"
                ) from None
            try:
                yield
            finally:
                mine.release()
        finally:
            mine.requests -= 1
            if not mine.requests:
                del self._asking[principal.id]

    @contextmanager
    def _room(self, route: Route) -> Iterator[None]:
        """For the length of the block count a request in flight. Raises `ApiError` (429) when there are too many. Requests that
        wait for changes are counted apart. Requests that need no token are never refused here: a busy server must still say
        that it lives."""
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
    """Finds the route of a request by its path in percent-encoded form, because an id may have a `/`, sent as `%2F`."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._methods: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._methods.setdefault(PREFIX + route.path, {})[route.method] = route
        self._patterns = {path: compile_path(path)[0] for path in self._methods}

    def find(self, scope: Scope) -> tuple[Route, dict[str, str]]:
        """Return the route and the path's parameters, decoded. Raises `ApiError` (404, 405), `DataError` for a path that is no
        UTF-8."""
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
    """Return the caller's id for the request, prefixed with its token's id, so that no other token is given the answer. Empty
    without one.

    Raises `DataError` for several ids, and for one that is too long or not printable.
    """
    given = Headers(scope=scope).getlist(ONCE_HEADER)
    if len(given) > 1 or any(not 0 < len(one) <= LONGEST_ONCE or not one.isprintable() for one in given):
        raise DataError(f"the header {ONCE_HEADER} must have one id of at most {LONGEST_ONCE} printable characters")
    return f"{principal.id}/{given[0]}" if given else ""


async def _beside(long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` in a thread where it is `long`, so that other requests are served meanwhile; else call it here."""
    return await asyncio.to_thread(work, *arguments) if long else work(*arguments)
