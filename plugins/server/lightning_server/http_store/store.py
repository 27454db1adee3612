"""`HttpStore`: the `Store` protocol over the control API of Lightning Servers.

The invariant: it promises what the store behind the servers promises, whichever server answers; errors have the same classes
and texts. A request is sent until it is answered; one that must not be done twice is sent under an id.

Changes are heard by requests that a server answers when there is news (`HttpWatch`). Each request says what the last answer
told, so a change between two requests is in the next answer, whichever server gives it. When several servers take turns behind
one URL there are pauses between requests, because a server answers at once when another gave the last answer.

The URLs of servers (`http://a:8000`, `https://a,b/prefix?patience=600`) and `LIGHTNING_TOKEN` are read here. A token is never
part of a URL, so that nothing that shows a URL shows a token.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.parse import quote, urlsplit

from lightning.errors import ConfigError, DataError, StoreError, UnavailableError
from lightning.store import rollout_state, rows
from lightning.store.operation import Operation, Operations
from lightning.store.protocol import Page, RunWatch
from lightning.store.url import parse
from lightning.types import LLM, Lease, Rollout, Span, Transition

from lightning_server import json_codec, messages
from lightning_server.http_store.transport import NotFoundError, StoreRequest, Transport, UnknownRouteError
from lightning_server.messages import Changed, LeaseRequest
from lightning_server.operations import LEASE_ANSWER, REQUIRED, HttpOperation, over_http

BODY_BYTES: Final = 8 * 1024 * 1024
"""Lists with more bytes of JSON are sent in several requests; a longer single item is sent in one."""

SHORTEST_ANSWER: Final = 3.0
"""The least seconds that a server has to answer a lease request. If it leases later than that, the lease stays unused until it
expires."""
CHECKS: Final[Mapping[type, Callable[[Any], object]]] = {Rollout: rows.rollout_values, Span: rows.SPANS.values}
"""Functions that raise a clearer error than JSON's for a value that has no JSON, by type."""
PATIENCE: Final = 120.0
EVERY_PROJECT: Final = "*"
"""The project that a server names for a token of all projects."""
PAGE: Final = 1000


class UnansweredLeases:
    """The lease requests of one store that no server answered, each with the id it was sent under. Any thread may use it.

    The invariant: an id belongs to one request at a time, and is never sent again for more rollouts than at first: a server
    repeats the leases that it gave under the id.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[LeaseRequest, str]] = []

    def take(self, run: str, worker: str, limit: int) -> tuple[LeaseRequest, str] | None:
        """Remove and return a request of this worker for at most `limit` rollouts, to be sent again now; None when there is
        none."""
        with self._lock:
            for place, (asked, _) in enumerate(self._kept):
                if (asked.run, asked.worker) == (run, worker) and asked.limit <= limit:
                    return self._kept.pop(place)
        return None

    def keep(self, asked: LeaseRequest, once: str) -> None:
        """Keep a request that was not answered, unless it asked for nothing."""
        if asked.limit:
            with self._lock:
                self._kept.append((asked, once))

    def forget(self, worker: str) -> None:
        """Drop a worker's requests: it has given back all its leases."""
        with self._lock:
            self._kept = [kept for kept in self._kept if kept[0].worker != worker]


class HttpStore(Operations):
    """The store behind the servers at `urls` (any of them answers any request), opened with a scoped `token`.

    `token` may be a path of a file with the token, which is read again when servers refuse the token: tokens may expire and be
    renewed there. Without `token` the environment's `LIGHTNING_TOKEN` is used. When no server answers, requests are repeated
    with growing pauses for `patience` seconds, then raise `UnavailableError`. Raises `ConfigError` for text that is no URL of a
    server, for a `patience` in the URL that is no number of seconds, and without a token.

    `create_rollouts`, `append` and a plugin's operations on lists send more than `BODY_BYTES` in several requests, each of
    which is done wholly or not at all. State that is a secret of the servers can neither be read nor written.
    """

    def __init__(
        self, urls: str | Sequence[str], *, token: str | Path | None = None, patience: float | None = None
    ) -> None:
        self._urls, options = split_urls(urls)
        if isinstance(token, Path):
            token = token.absolute()  # it is read again later, and the program may change its folder
        self._token = token_or_complain(token)
        self._renew = partial(token_or_complain, token) if isinstance(token, Path) else None
        self._patience = _seconds(options.get("patience", str(PATIENCE))) if patience is None else patience
        self._lock = threading.Lock()
        self._unanswered = UnansweredLeases()
        self._transport: Transport | None = None
        self.project: str | None = None
        """The project that servers show to this store's token; None for all projects, and before `open`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._urls)})"

    async def open(self, *, make: bool = True) -> None:
        """Connect to the servers and check the token; `make` has no effect, since a server has its store already. Raises
        `StoreError` when a server refuses the token, `UnavailableError` when none answers."""
        with self._lock:
            fresh = self._transport is None
            if self._transport is None:
                self._transport = Transport(self._urls, self._token, self._patience, self._renew)
            transport = self._transport
        if not fresh:
            return
        try:
            told = (await self.version()).project
            self.project = None if told == EVERY_PROJECT else told
        except BaseException:
            await self._disconnect(transport)
            raise

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._transport is not None:
            await self._disconnect(self._transport)

    async def _disconnect(self, transport: Transport) -> None:
        with self._lock:
            if self._transport is not transport:
                return
            self._transport = None
        await transport.close()

    @property
    def answering(self) -> str:
        """Return the URL of the server that answered last. Raises `StoreError` before `open`."""
        return self._opened().answering

    def _opened(self) -> Transport:
        if self._transport is None:
            raise StoreError(f"the store at {', '.join(self._urls)} is not open: await store.open() first")
        return self._transport

    async def version(self) -> messages.Version:
        """Ask for the server's release, and the scope and project of this store's token."""
        return cast("messages.Version", await self._ask("GET", ("version",), messages.Version))

    # asking -----------------------------------------------------------------------------------------------------
    async def _send(
        self,
        method: str,
        path: Sequence[str],
        answer: Any,
        payload: bytes | None = None,
        query: Mapping[str, object] | None = None,
        **how: Any,
    ) -> Any:
        """Send a request, and read the answer as the type `answer`. `how` are further fields of `StoreRequest`, and `patience`.
        Raises `NotFoundError` and the errors of the store."""
        transport, patience = self._opened(), how.pop("patience", None)
        if not all(path):
            raise DataError(f"an id or a name in {method} /{'/'.join(path)} is empty")
        asked = {name: _quoted(str(value)) for name, value in (query or {}).items() if value is not None}
        request = StoreRequest(method, "".join(f"/{_quoted(part)}" for part in path), asked, payload, **how)
        body = await transport.send(request, patience)
        what = f"the answer to {method} {request.path}"
        try:
            return json_codec.from_bytes(answer, body, what)
        except DataError as error:
            raise StoreError(f"{error}. Is it a Lightning Server that answers at {', '.join(self._urls)}?") from error

    async def _ask(
        self, method: str, path: Sequence[str], answer: Any, payload: bytes | None = None, **how: Any
    ) -> Any:
        try:
            return await self._send(method, path, answer, payload, **how)
        except NotFoundError as error:
            raise StoreError(str(error)) from error

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation at a server. Raises `StoreError` with the name of the missing plugin if the operation is a plugin's
        and the server does not know it."""
        try:
            return await self._called(over_http(operation), arguments)
        except UnknownRouteError as error:
            if operation.group is None:
                raise
            raise StoreError(
                f"the server at {self._urls[0]} cannot do {operation.name}: it has no plugin that brings "
                f"{operation.group.name!r}, or another release of it. Install {operation.group.distribution} there, and start "
                "the server again"
            ) from error

    async def _called(self, operation: HttpOperation, arguments: dict[str, Any]) -> Any:
        path = _path(operation, arguments)
        query = {part.name: _shown(arguments[part.name]) for part in operation.query if _is_sent(part, arguments)}
        if operation.item is not None:
            return await self._pages(operation, path, query, arguments)
        if operation.is_optional:
            try:
                return await self._send("GET", path, operation.answered, query=query) if all(path) else None
            except NotFoundError:
                return None
        how = {"query": query, "answer_seconds": operation.answer_seconds, "once": _once(operation, arguments)}
        if operation.is_in_parts:
            found = [
                await self._told(operation, path, body, how)
                for body in _bodies(
                    operation.body[0].name, [_item(value) for value in arguments[operation.body[0].name]]
                )
            ]
            return sum(found)
        if operation.is_read_in_parts:
            return await self._in_parts(operation, path, arguments[operation.body[0].name], how)
        body = _body(operation, arguments)
        return await self._told(operation, path, None if body is None else json_codec.to_bytes(body), how)

    async def _told(
        self, operation: HttpOperation, path: Sequence[str], payload: bytes | None, how: Mapping[str, Any]
    ) -> Any:
        """Send one request of an operation and return the operation's result."""
        answer = await self._ask(operation.method, path, operation.answered, payload, **how)
        if operation.result is type(None):
            return None
        return getattr(answer, operation.field) if operation.field else answer

    async def _pages(
        self, operation: HttpOperation, path: Sequence[str], query: Mapping[str, object], arguments: Mapping[str, Any]
    ) -> Any:
        """Return the items of all pages, or the first `limit` of them; for an operation that returns a `Page`, return one."""
        most: int | None = arguments.get("limit")
        if operation.is_page:
            cursor = arguments["cursor"]
        else:
            rollout_state.check_page(most)
            after = arguments.get("after", "")
            cursor = "" if isinstance(after, int) and after <= 0 else str(after)
        found: list[Any] = []
        while True:
            limit = PAGE if most is None else min(most - len(found), PAGE)
            asked = {**query, "cursor": cursor, "limit": limit}
            page = await self._ask(operation.method, path, operation.answered, query=asked)
            found += page.items
            cursor = page.cursor
            if not cursor or (most is not None and len(found) >= most):
                return Page(tuple(found), cursor) if operation.is_page else found

    async def _in_parts(
        self, operation: HttpOperation, path: Sequence[str], asked: Sequence[Any], how: Mapping[str, Any]
    ) -> list[Any]:
        """Return the results for all items `asked` for. A server may answer for the first items only; the rest is then asked
        for again."""
        found: list[Any] = []
        while len(found) < len(asked):
            body = _body(operation, {operation.body[0].name: tuple(asked[len(found) : len(found) + PAGE])})
            some = await self._told(operation, path, json_codec.to_bytes(body), how)
            if not some:
                raise StoreError(
                    f"the server at {self._urls[0]} sent no result for {asked[len(found)]}: update the server"
                )
            found += some
        return found

    def watch(self, run: str) -> AbstractAsyncContextManager[RunWatch]:
        """Watch a run for changes."""
        return HttpWatch(lambda since, timeout: self._changed(run, since, timeout))

    async def _changed(self, run: str, since: str, timeout: float) -> messages.Changed | None:
        """Ask whether a run changed; a server answers after `timeout` seconds at most. None when no server answered in that
        time."""
        query = {"run": run, "since": since, "timeout": timeout}
        try:
            changed = await self._ask(
                "GET", ("watch",), messages.Changed, query=query, waits=timeout, patience=timeout if since else None
            )
        except UnavailableError:
            if not since:
                raise
            return None
        return cast("messages.Changed", changed)

    # leases -----------------------------------------------------------------------------------------------------
    async def lease(self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0, once: str = "") -> list[Lease]:
        """Lease rollouts. A request that was not answered in time is repeated first when the worker leases again."""
        return [held.lease for held in (await self._lease(run, worker, limit, ttl, once)).leases]

    async def lease_for_agents(
        self, run: str, worker: str, *, limit: int = 1, ttl: float = 60.0
    ) -> tuple[list[tuple[Lease, LLM]], bool]:
        """Lease rollouts, each with access to the model, and say whether the run is over. Raises `StoreError` when the server
        has no gateway."""
        found = await self._lease(run, worker, limit, ttl, "")
        if any(one.llm is None for one in found.leases):
            raise StoreError(
                f"the server at {self._urls[0]} has no gateway: lease from a server that `lightning serve` started"
            )
        return [(one.lease, cast("LLM", one.llm)) for one in found.leases], found.over

    async def _lease(self, run: str, worker: str, limit: int, ttl: float, once: str) -> messages.Leases:
        asked, name = LeaseRequest(run, worker, limit, ttl), once or (_id() if limit else "")
        if not once and (earlier := self._unanswered.take(run, worker, limit)) is not None:
            asked, name = earlier
        how: dict[str, Any] = {"answer_seconds": _within(ttl), "once": name}
        try:
            return cast(
                "messages.Leases",
                await self._send("POST", ("leases",), messages.Leases, json_codec.to_bytes(asked), **how),
            )
        except NotFoundError:  # a run that is not there yet has nothing to lease, as in every other store
            return messages.Leases(())
        except (UnavailableError, asyncio.CancelledError):
            self._unanswered.keep(asked, name)
            raise

    async def renew(self, lease: Lease, *, ttl: float = 60.0) -> Lease:
        """Prolong a lease by `ttl` seconds from now, and return it."""
        path = ("rollouts", lease.rollout.id, "attempts", str(lease.attempt), "renew")
        found = await self._ask(
            "POST",
            path,
            messages.Expiry,
            json_codec.to_bytes(messages.Renewal(lease.worker, ttl)),
            answer_seconds=_within(ttl),
        )
        return replace(lease, expires_at=found.expires_at)

    async def release(self, worker: str, *, once: str = "") -> int:
        """Give back every lease that a worker holds; return the number of these leases."""
        found = await super().release(worker, once=once)
        self._unanswered.forget(worker)
        return found


def _id() -> str:
    """Return an id for a call to which its caller gave none, because its answer may get lost."""
    return uuid.uuid4().hex


def _once(operation: HttpOperation, arguments: Mapping[str, Any]) -> str:
    """Return the id under which a call is sent; empty for a call that may be done twice (its `once` is None)."""
    once: str | None = arguments.get("once") if operation.once else None
    return _id() if once == "" else once or ""


def _within(ttl: float) -> float:
    """Return the seconds that a server has to answer about a lease of `ttl` seconds, so that a few servers can be asked before
    it expires."""
    return min(
        max(SHORTEST_ANSWER, ttl / 6), LEASE_ANSWER
    )  # in this order a NaN, which the server refuses, is no timeout


def _path(operation: HttpOperation, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    parts = operation.path.split("/")[1:]
    return tuple(str(arguments[part[1:-1]]) if part.startswith("{") else part for part in parts)


def _is_sent(part: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a parameter is sent in the query; one that has its default is not."""
    return part.default is REQUIRED or arguments[part.name] != part.default


def _shown(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _body(operation: HttpOperation, arguments: Mapping[str, Any]) -> Any:
    """Return the body of a request; None when it has none. Raises `DataError` for a value that is not JSON."""
    if not operation.body:
        return None
    for part in operation.body:
        if part.hint is json_codec.AnyJson:
            rows.dump(arguments[part.name], f"the {part.name} of {arguments.get('key', operation.name)!r}")
    if operation.whole_body:
        return arguments[operation.whole_body]
    return operation.sent(**{part.name: arguments[part.name] for part in operation.body})


def _item(value: Any) -> bytes:
    """Return an item of a list as JSON. Raises `DataError` that says what is wrong with it."""
    if isinstance(value, Transition):  # raises before any part of the list is sent
        rows.pack_extras(value.extras, f"the extras of transition {value.key}")
    try:
        return json_codec.to_bytes(value)
    except DataError:
        CHECKS.get(type(value), lambda unchecked: None)(value)
        raise


def _bodies(field: str, items: Sequence[bytes]) -> Iterator[bytes]:
    """Yield bodies `{field: [items]}` of `BODY_BYTES` at most; a longer item is alone in its body."""
    start = size = 0
    for end, item in enumerate(items):
        if end > start and size + len(item) > BODY_BYTES:
            yield _list(field, items[start:end])
            start, size = end, 0
        size += len(item) + 1
    yield _list(field, items[start:])


def _list(field: str, items: Sequence[bytes]) -> bytes:
    return b'{"' + field.encode() + b'":[' + b",".join(items) + b"]}"


ROUND: Final = 25.0
"""The longest wait of one request in seconds; proxies cut off longer ones."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 4.0
"""The longest pause in seconds before the next request, when another server answered than the time before."""


class HttpWatch:
    """Waits for changes of a run. `ask(since, timeout)` asks a server, and returns None when no server answered in that
    time."""

    def __init__(self, ask: Callable[[str, float], Awaitable[Changed | None]]) -> None:
        self._ask = ask
        self._since, self._pause = "", 0.0
        self._told: dict[str, str] = {}  # the last `since` of each server, by its watch's name

    async def __aenter__(self) -> Self:
        first = await self._ask("", 0.0)
        assert first is not None, "without a `since` the store raises"
        self._heard(first)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no connection is held between requests."""

    async def wait(self, timeout: float) -> bool:
        """Wait until something may have changed, `timeout` seconds at most; return whether it may have. True also when no
        server answered in that time."""
        deadline = time.monotonic() + timeout
        while True:
            await asyncio.sleep(min(self._pause, max(deadline - time.monotonic(), 0.0)))
            left = max(deadline - time.monotonic(), 0.0)
            changed = await self._ask(self._since, min(left, ROUND))
            if changed is None or self._heard(changed):
                return True
            if time.monotonic() >= deadline:
                return False

    def _heard(self, changed: Changed) -> bool:
        """Take in an answer, and return whether it has news. An answer that repeats the last `since` of its server has none."""
        watch = changed.since.rpartition(".")[0]
        if watch == self._since.rpartition(".")[0]:
            self._pause = 0.0
        elif self._since:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        news = changed.changed and self._told.get(watch) != changed.since
        self._since = self._told[watch] = changed.since
        return news


def _quoted(part: str) -> str:
    """Percent-encode text for a path or a query. Raises `DataError` for text that no URL can hold."""
    try:
        return "%2E" * len(part) if part in (".", "..") else quote(part, safe="")
    except UnicodeEncodeError as error:
        raise DataError(f"{part[:80]!r} cannot be an id or a name: {error}") from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"patience={text!r} is not a number of seconds: write ?patience=600")
    return value


TOKEN_VARIABLE: Final = "LIGHTNING_TOKEN"  # noqa: S105 — the name of a variable
SCHEMES: Final = ("http", "https")
EXAMPLE: Final = "write http://host:port, several as http://host-a:port,host-b:port"


def split_urls(given: str | Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the URLs of the servers, without a slash at the end, and the options after `?`. Raises `ConfigError`."""
    texts = [given] if isinstance(given, str) else list(given)
    found: list[str] = []
    options: dict[str, str] = {}
    for text in texts:
        if "@" in text.partition("?")[0]:
            raise ConfigError(
                f"a server's URL takes no user and no token: set the variable {TOKEN_VARIABLE}, and {EXAMPLE}"
            )
        where = parse(text)
        options |= where.options
        where.check_options(("patience",))
        bare = text.partition("?")[0]
        parts = [part.strip() for part in bare.split(",")]
        found += [_checked(part if "://" in part else f"{where.scheme}://{part}") for part in parts]
    if not found:
        raise ConfigError(f"there is no URL of a server: {EXAMPLE}")
    return tuple(dict.fromkeys(found)), options


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        port_is_possible = parts.port is None or parts.port > 0
    except ValueError:
        port_is_possible = False
    if not port_is_possible or parts.scheme not in SCHEMES or not parts.hostname or parts.fragment:
        raise ConfigError(f"{url!r} is not the URL of a server: {EXAMPLE}")
    return url.rstrip("/")


def token_or_complain(given: str | Path | None) -> str:
    """Return the token: `given` itself, the text of the file `given`, or, if `given` is None, the environment's
    `LIGHTNING_TOKEN`. Raises `ConfigError` if there is no token, the file cannot be read, or the text is not one word. No error
    shows a part of the token."""
    where = str(given) if isinstance(given, Path) else TOKEN_VARIABLE
    try:
        text = given.read_text(encoding="utf-8") if isinstance(given, Path) else given
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {where} cannot be read: {error}") from error
    token = (os.environ.get(TOKEN_VARIABLE, "") if text is None else text).strip()
    if not token and isinstance(given, Path):
        raise ConfigError(f"there is no token in {where}: write the token there that `lightning token create` printed")
    if not token:
        raise ConfigError(
            f"a server asks for a token: set the variable {TOKEN_VARIABLE} to the token that `lightning token create` printed"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the text in {where} is not a token: a token is one word that begins with lt_. Copy the word that `lightning "
            "token create` printed"
        )
    return token
