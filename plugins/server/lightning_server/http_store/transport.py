"""Requests to servers that may go away at any moment: failover, back-off, and the store's errors made of answers.

The invariant: a request ends with a server's answer, or with `UnavailableError` after its patience. A request that must not be
done twice has an id that every server recognizes. After a refusal that may concern one server alone, another server is asked
next. An answer that is not from a Lightning Server means a wrong URL, unless such a server has answered before: then it means
that the server is away. The token is sent in one header and shown nowhere.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import aiohttp
from lightning.asyncio_utils import is_set_within, unless
from lightning.errors import (
    ConfigError,
    ConflictError,
    DataError,
    LightningError,
    SchemaError,
    StaleAttemptError,
    StoreError,
    UnavailableError,
)
from lightning.memory_budget import bounded
from lightning.store.threads import check_process, closed_error
from lightning_db.loop_thread import LoopThread
from yarl import URL

from lightning_server import json_codec
from lightning_server.messages import ONCE_HEADER, PREFIX, Failure, Problem
from lightning_server.operations import ANSWER_SECONDS, LEASE_ANSWER

log = logging.getLogger(__name__)

FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 5.0
CONNECT_SECONDS: Final = 5.0
KEEP_ALIVE: Final = 60.0
"""Seconds that an idle connection is kept: fewer than the server's, so that the server never closes one first."""
LONGEST_ANSWER: Final = 256 << 20
"""The longest answer that is read, in decompressed bytes; it is many times a page."""
LONG: Final = 30.0
"""With at least this many seconds of patience, repeated requests are logged; with less, the caller says it."""
BUSY: Final = 429
TOO_LONG: Final = 413
AWAY: Final = (502, 503, 504)
LOOK: Final = "look at the proxy before it, and at whether the server behind that runs"
LONG_BODY: Final = 64 * 1024
"""Only a body of at least this many bytes may be cut off for its length: proxies take shorter ones."""
LARGE_BODY: Final = 1 << 20
"""From this size in bytes on aiohttp wants bodies as a stream."""
CUTS: Final = 4
"""After this many cut-offs of a body without an answer, it is checked whether the body is too long
(`Transport._is_too_long`)."""


class TooLongError(DataError):
    """The request is longer than the server, or a proxy before it, takes: it answered 413, or closes the connection."""


class PageError(UnavailableError):
    """Something other than a Lightning Server answered, such as a proxy with an error page. The cause may be the request
    itself."""


KINDS: Final[Mapping[str, type[LightningError]]] = {
    "stale_attempt": StaleAttemptError,
    "conflict": ConflictError,
    "invalid_data": DataError,
    "body_too_large": TooLongError,
    "schema": SchemaError,
}
"""The errors for the words of a server's answers; every other word means `StoreError`."""


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One request. `path` is percent-encoded, below `PREFIX`. `once` is the id of a request that must not be done twice. A
    server may take `waits` seconds on purpose, and may send nothing for `answer_seconds` beyond them before it counts as
    gone."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes | None = None
    once: str = ""
    waits: float = 0.0
    answer_seconds: float = ANSWER_SECONDS


class TokenRefusedError(StoreError):
    """The token is unknown, revoked or expired (401), or of another scope (403)."""


class NotFoundError(Exception):
    """The server knows the path, and nothing exists there."""


class UnknownRouteError(StoreError):
    """The server does not know the path, such as one of a plugin that it does not have."""


class Transport:
    """The connections of one store, in a thread with its own event loop, so that any thread and loop may use the store.

    `renew` returns the present token when servers have refused the old one; it may raise `ConfigError`.
    """

    def __init__(
        self, urls: Sequence[str], token: str, patience: float, renew: Callable[[], str] | None = None
    ) -> None:
        self._urls, self._patience = tuple(urls), patience
        self._token, self._renew = token, renew
        self._current = random.randrange(len(self._urls))  # noqa: S311 — spreads clients over servers
        self._process = os.getpid()
        self._closing = False
        self._met = False  # whether a Lightning Server has answered, so that the URLs are right
        self._cuts: Counter[tuple[str, int]] = Counter()  # cut-offs of long bodies, by path and length
        self._thread = LoopThread("lightning-store-http")
        self._over = asyncio.Event()
        self._session, self._fresh = asyncio.run_coroutine_threadsafe(self._open(), self._thread.loop).result()

    def __repr__(self) -> str:
        return f"Transport({', '.join(self._urls)})"

    @property
    def answering(self) -> str:
        """The URL of the server that answered last, or is asked next."""
        return self._urls[self._current]

    async def send(self, request: StoreRequest, patience: float | None = None) -> bytes:
        """Send a request and return the body of the answer. Raises `NotFoundError` and the errors in `KINDS`,
        `UnavailableError` when no server answered for `patience` seconds (default: the store's)."""
        check_process(f"at {', '.join(self._urls)}", self._process)
        wanted = self._patience if patience is None else patience
        waiter = self._thread.submit(lambda: self._send(request, wanted), followed=True)
        if waiter is None:
            raise closed_error(f"at {', '.join(self._urls)}")
        return await waiter

    async def close(self) -> None:
        """Wait until the sent requests end, except those that wait for news, then disconnect."""
        self._closing = True
        if self._process == os.getpid():
            self._thread.loop.call_soon_threadsafe(self._over.set)
            await asyncio.to_thread(self._thread.close, self._disconnect)

    # in the thread ----------------------------------------------------------------------------------------------
    async def _open(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        """Open two sessions: one that keeps connections, and one that makes a new one each time, for requests that were cut
        off, since a kept connection may have been dead."""
        kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        fresh = aiohttp.TCPConnector(limit=0, force_close=True)
        none, accept = aiohttp.DummyCookieJar(), {"accept": "application/json"}
        first, second = (aiohttp.ClientSession(connector=one, headers=accept, cookie_jar=none) for one in (kept, fresh))
        return first, second

    async def _disconnect(self) -> None:
        for session in (self._session, self._fresh):
            await session.close()

    async def _send(self, request: StoreRequest, patience: float) -> bytes:
        deadline, delay, tried, warned = time.monotonic() + patience, FIRST_DELAY, 0, False
        while True:
            at, token = self._current, self._token
            try:
                return await self._until_closed(self._attempt(self._urls[at], request), request.waits > 0)
            except _AwayError as away:
                if away.cut and await self._is_too_long(at, request):
                    raise TooLongError(
                        f"{self._urls[at]} hung up {CUTS} times at {_asked(request)} of {len(request.body or b'')} bytes, and "
                        "answers what is short: a proxy before it takes no more. Raise the proxy's limit "
                        "(client_max_body_size in nginx), or send less"
                    ) from away
                left, problem = deadline - time.monotonic(), away
            except TokenRefusedError:
                if not await self._is_renewed(token):
                    raise
                continue
            except StoreError as error:
                if type(error) in (StoreError, SchemaError):  # of another release, at fault, or no server of ours
                    self._pass_over(at)
                raise
            self._pass_over(at)
            tried += 1
            if tried % len(self._urls):
                continue  # the next server may be there
            if left <= 0 or self._closing:
                doubt = "; it is not known whether it was done: look, then ask again" if request.once else ""
                raise (PageError if problem.page else UnavailableError)(
                    f"no server answered within {patience:g} s ({problem}){doubt}. Servers: {', '.join(self._urls)}. "
                    "Start one with `lightning serve`, or give the right URL"
                )
            if patience >= LONG and not warned and not request.waits and tried > 2 * len(self._urls):
                log.warning("%s; asking again for %.0f s", problem, left)
                warned = True
            spread = delay * random.uniform(0.5, 1.0)  # noqa: S311 — clients that lost one server must not come back as one
            await is_set_within(self._over, min(left, max(problem.pause, spread)))
            delay = min(delay * 2, LONGEST_DELAY)

    async def _is_renewed(self, refused: str) -> bool:
        """Read the token again, and return whether it differs from the one that was refused."""
        if self._token == refused and self._renew is not None:
            try:
                self._token = await asyncio.to_thread(self._renew)
            except ConfigError as error:
                log.warning("a token was refused, and there is no other one: %s", error)
        return self._token != refused

    def _pass_over(self, at: int) -> None:
        """Ask the server after `at` from now on, unless another request has changed the server already."""
        if at == self._current:
            self._current = (at + 1) % len(self._urls)

    async def _until_closed(self, attempt: Coroutine[Any, Any, bytes], waits: bool) -> bytes:
        """Return the answer to one attempt. An attempt that waits for news ends when the store is closed."""
        if not waits:
            return await attempt
        answer = await unless(attempt, self._over.wait())
        if answer is None:
            raise UnavailableError("the store was closed while it waited for news")
        return answer

    async def _is_too_long(self, at: int, request: StoreRequest) -> bool:
        """Count that a request was cut off, and return whether its length is the reason: it is long, was cut off `CUTS` times,
        and the server answers a short request."""
        if len(request.body or b"") < LONG_BODY:
            return False
        self._cuts[_same(request)] += 1
        if self._cuts[_same(request)] < CUTS:
            return False
        try:
            await self._attempt(self._urls[at], StoreRequest("GET", "/version", {}, answer_seconds=LEASE_ANSWER))
        except _AwayError:
            return False
        return True

    async def _attempt(self, base: str, request: StoreRequest) -> bytes:
        query = "&".join(f"{name}={value}" for name, value in request.query.items())
        url = URL(f"{base}{PREFIX}{request.path}" + (f"?{query}" if query else ""), encoded=True)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=request.answer_seconds + request.waits
        )
        headers = {"authorization": f"Bearer {self._token}"}
        if request.body is not None:
            headers["content-type"] = "application/json"
        if request.once:
            headers[ONCE_HEADER] = request.once
        data = request.body if len(request.body or b"") < LARGE_BODY else io.BytesIO(request.body or b"")
        session = self._fresh if self._cuts[_same(request)] else self._session
        try:
            async with session.request(
                request.method, url, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                body = await whole_body(response, LONGEST_ANSWER)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _AwayError(f"{base} cannot be reached ({error})") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cut = not isinstance(error, TimeoutError)
            raise _AwayError(f"{base} went away ({error!r})", cut=cut) from error
        self._cuts.pop(_same(request), None)
        if response.status == 200 and body.lstrip()[:1] == b"{":  # as every answer of ours begins
            self._met = True
            return body
        raise self._refusal(base, request, response.status, response.headers.get("retry-after", ""), body)

    def _refusal(self, base: str, request: StoreRequest, status: int, retry_after: str, body: bytes) -> Exception:
        problem = problem_in(body)
        asked = _asked(request)
        self._met = self._met or problem is not None
        pause = min(float(retry_after), LONGEST_DELAY) if retry_after.isdecimal() else 0.0
        if status == BUSY or (status in AWAY and (problem is None or problem.type not in KINDS)):
            said = problem.message if problem else f"not as a Lightning Server does: {LOOK}"
            return _AwayError(f"{base} answered {status} ({said})", pause)
        if status == TOO_LONG and (problem is None or problem.type not in KINDS):
            return TooLongError(
                f"{base} answered {status} to {asked} of {len(request.body or b'')} bytes, and not as a Lightning Server does: "
                "a proxy before it takes no more. Raise the proxy's limit (client_max_body_size in nginx), or send less"
            )
        if problem is None and self._met:
            said = f"{base} answered {status} to {asked}, and not as a Lightning Server does: {LOOK}"
            return _AwayError(said, pause, page=True)
        if problem is None:
            return StoreError(
                f"{base} answered {status} to {asked}, and not as a Lightning Server does: "
                "is it one, of this release? Give the URL that `lightning serve` printed"
            )
        if problem.type == "not_found":
            return NotFoundError(problem.message)
        if problem.type == "unknown_route":
            return UnknownRouteError(problem.message)
        if status in (401, 403):
            return TokenRefusedError(f"{problem.message} ({base})")
        return KINDS.get(problem.type, StoreError)(problem.message)


class _AwayError(Exception):
    """There was no answer, or one that says to ask again after `pause` seconds. `cut`: the connection was made, and broke off.
    `page`: something that is not a Lightning Server answered."""

    def __init__(self, message: str, pause: float = 0.0, *, cut: bool = False, page: bool = False) -> None:
        super().__init__(message)
        self.pause, self.cut, self.page = pause, cut, page


async def whole_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read the body of an answer. Raises `StoreError` for one of more than `most` bytes."""
    body = await bounded(response.content.iter_any(), most)
    if body is None:
        raise StoreError(
            f"{response.url.origin()} answered with more than {most >> 20} MiB: it is no Lightning Server. Give the URL that "
            "`lightning serve` printed"
        )
    return body


def _asked(request: StoreRequest) -> str:
    return f"{request.method} {PREFIX}{request.path}"


def _same(request: StoreRequest) -> tuple[str, int]:
    """Return a key that is equal for repetitions of a request: its path and its body's length."""
    return request.path, len(request.body or b"")


def problem_in(body: bytes) -> Problem | None:
    """Return the error in a server's answer; None when the answer is not a Lightning Server's."""
    try:
        return cast("Failure", json_codec.from_bytes(Failure, body, "the answer")).error
    except DataError:
        return None
