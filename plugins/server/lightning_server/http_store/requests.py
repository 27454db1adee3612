"""The requests of `HttpStore`: path, body, and the reading of the answer. Lease requests whose answer was lost are sent again.
The URLs of servers (`http://a:8000`, `https://a,b/prefix?patience=600`) and `LIGHTNING_TOKEN` are read here.

The invariant: an answer is read as the expected type, or raises an error that names the request. A token is never part of a
URL, so that nothing that shows a URL shows a token.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote, urlsplit

from lightning.errors import ConfigError, DataError, StoreError
from lightning.store.url import parse

from lightning_server import json_codec, messages
from lightning_server.http_store.transport import NotFoundError, StoreRequest, Transport
from lightning_server.messages import LeaseRequest


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


PATIENCE: Final = 120.0
EVERY_PROJECT: Final = "*"
"""The project that a server names for a token of all projects."""
PAGE: Final = 1000


class Asking:
    """The connection of an `HttpStore`, where the arguments are described."""

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

    async def _find(self, path: Sequence[str], answer: Any, query: Mapping[str, object]) -> Any:
        if not all(path):
            return None
        try:
            return await self._send("GET", path, answer, query=query)
        except NotFoundError:
            return None


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
    """Return the token: the one given, the one in a given file, or the environment's. Raises `ConfigError` where there is none;
    no error shows a part of it."""
    where = str(given) if isinstance(given, Path) else TOKEN_VARIABLE
    try:
        text = given.read_text(encoding="utf-8") if isinstance(given, Path) else given
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {where} cannot be read: {error}") from error
    token = (os.environ.get(TOKEN_VARIABLE, "") if text is None else text).strip()
    if not token and isinstance(given, Path):
        raise ConfigError(f"there is no token in {where}: write one there that `lightning token create` made")
    if not token:
        raise ConfigError(
            f"a server asks for a token: set the variable {TOKEN_VARIABLE} to one that `lightning token create` made"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token (in {where}) is none: it is one word, lt_..., as `lightning token create` printed it"
        )
    return token
