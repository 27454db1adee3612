"""The tap on HTTP clients (httpx, httpx2, aiohttp, and the standard library's `http.client`, which requests, urllib3 and urllib
use): it marks the requests that go to a rollout's gateway. For a client of its own, an adapter calls `mark_request`.

The invariant: that of `marking` holds, and after the last undo the libraries are exactly as they were. No client is imported
here; a client that is imported later is tapped at its import. Only requests of httpx are rerouted.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from lightning.instrument.adapter_tools import Attachment, ReplacedMethods
from lightning.instrument.context import active, log_once
from lightning.instrument.marking import HttpxRequest, HttpxResponse, Sent, answered, host_of, mark
from lightning.instrument.providers import NOWHERE
from lightning.instrument.threads import carry_names
from lightning.plugins.importing import on_import

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

Headers = Iterable[tuple[str, str]]


class PlainUrl:
    """A URL parsed by the standard library, with the attributes that `marking` reads (`providers.Url`)."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.scheme, self.port = parts.scheme, parts.port
        self.netloc = parts.netloc.encode("ascii", "replace")
        self.raw_host = _host(parts.hostname or "")
        self.raw_path = (parts.path or "/").encode("ascii", "replace") + (
            f"?{parts.query}".encode() if parts.query else b""
        )


def _host(name: str) -> bytes:
    try:
        return name.encode("ascii")
    except UnicodeEncodeError:
        return name.encode("idna")


@dataclass(frozen=True, slots=True)
class MarkedRequest:
    """A request about to be sent. `added` are the headers that must be added to it."""

    added: Mapping[str, str]
    _sent: Sent | None

    def answered(self, status: int, headers: Headers) -> None:
        """Note that the reply's status and headers have arrived, so that later rewards and tool runs belong to this call."""
        if self._sent is not None:
            had = {name.lower(): value for name, value in headers}
            answered(self._sent, cast("HttpxResponse", SimpleNamespace(status_code=status, headers=had)))


def mark_request(url: str, headers: Headers) -> MarkedRequest:
    """Return the headers to add to a request with these `headers`. Must be called in the thread or task that sends the
    request."""
    had = {name.lower(): value for name, value in headers}
    try:
        request = SimpleNamespace(url=PlainUrl(url), headers=dict(had))
    except ValueError:  # not a URL; the client itself will raise
        return MarkedRequest({}, None)
    sent = mark(cast("HttpxRequest", request))
    return MarkedRequest({name: value for name, value in request.headers.items() if had.get(name) != value}, sent)


def _tap_http_client(module: ModuleType, replaced: ReplacedMethods) -> None:
    replaced.replace(module.HTTPConnection, "endheaders", _endheaders)
    replaced.replace(module.HTTPConnection, "getresponse", _getresponse)


def _tap_aiohttp(module: ModuleType, replaced: ReplacedMethods) -> None:
    replaced.replace(module.ClientSession, "_request", _request)


def _endheaders(original: Callable[..., None], connection: HTTPConnection, *args: Any, **more: Any) -> None:
    if active():
        _mark_connection(connection)
    original(connection, *args, **more)


def _mark_connection(connection: Any) -> None:
    """Add our headers to a request whose headers are not sent yet; `http.client` keeps these as lines of bytes."""
    try:
        first, *lines = [line.decode("latin-1") for line in connection._buffer]  # noqa: SLF001 — there is no other way
        target = first.split(" ")[1]
        if not target.startswith("http"):  # with a proxy the line has the whole URL
            host = f"[{connection.host}]" if ":" in connection.host else connection.host
            scheme = "https" if connection.default_port == 443 else "http"
            target = f"{scheme}://{host}:{connection.port}{target}"
        pairs = [(name, value.strip()) for name, colon, value in (line.partition(":") for line in lines) if colon]
        connection._lightning_marked = marked = mark_request(target, pairs)  # noqa: SLF001 — our own mark
        for name, value in marked.added.items():
            connection.putheader(name, value)
    except Exception as error:  # noqa: BLE001 — a request must go out even if nobody can say whose it is
        log_once("http.client", "a model call goes out without the name of its agent: %r", error)


def _getresponse(original: Callable[..., HTTPResponse], connection: Any, *args: Any, **more: Any) -> HTTPResponse:
    reply = original(connection, *args, **more)
    marked = vars(connection).pop("_lightning_marked", None)
    if marked is not None:
        marked.answered(reply.status, reply.headers.items())
    return reply


async def _request(original: Callable[..., Awaitable[Any]], session: Any, /, method: str, url: Any, **more: Any) -> Any:
    marked = _mark_aiohttp(session, url, more) if active() else None
    reply = await original(session, method, url, **more)
    if marked is not None:
        marked.answered(reply.status, reply.headers.items())
    return reply


def _mark_aiohttp(session: Any, url: Any, more: dict[str, Any]) -> MarkedRequest | None:
    try:
        kind = type(session.headers)
        own = kind(more.get("headers") or ())
        marked = mark_request(str(session._build_url(url)), {**session.headers, **own}.items())  # noqa: SLF001 — as aiohttp does
        if marked.added:
            own.update(marked.added)
            more["headers"] = own
    except Exception as error:  # noqa: BLE001 — as above
        log_once("aiohttp", "a model call goes out without the name of its agent: %r", error)
        return None
    return marked


def _tap_httpx(module: ModuleType, replaced: ReplacedMethods) -> None:
    for name, send in (("Client", _send), ("AsyncClient", _send_async)):
        client = getattr(module, name, None)
        if isinstance(client, type) and callable(vars(client).get("send")):
            replaced.replace(client, "send", send)


def _send(
    original: Callable[..., object], client: object, /, request: HttpxRequest, *args: object, **kwargs: object
) -> object:
    sent = mark(request, _hosts())
    reply = original(client, request, *args, **kwargs)
    if sent is not None:
        answered(sent, cast("HttpxResponse", reply))
    return reply


async def _send_async(
    original: Callable[..., Awaitable[object]],
    client: object,
    /,
    request: HttpxRequest,
    *args: object,
    **kwargs: object,
) -> object:
    sent = mark(request, _hosts())
    reply = await original(client, request, *args, **kwargs)
    if sent is not None:
        answered(sent, cast("HttpxResponse", reply))
    return reply


TAPS: Final = {"httpx": _tap_httpx, "httpx2": _tap_httpx, "http.client": _tap_http_client, "aiohttp": _tap_aiohttp}
"""The function that taps each client, by the client's module."""


def _attach() -> Callable[[], None]:
    """Tap the clients that are imported already, and others at their import; return the undo."""
    replaced = ReplacedMethods()

    def found(tap: Callable[[ModuleType, ReplacedMethods], None], module: ModuleType) -> None:
        with _tap.lock:
            if _tap.users:  # the last user may be gone before an import ends
                tap(module, replaced)

    undos = ExitStack()
    undos.callback(carry_names())
    undos.callback(replaced.put_back)
    for name, tap in TAPS.items():
        undos.callback(on_import(name, functools.partial(found, tap)))
    return undos.close


_tap = Attachment[tuple[str, ...]](_attach)
"""The one attachment to the clients. Each user of it is the tuple of hosts that it reroutes."""


def _hosts() -> list[str]:
    return [host for hosts in _tap.users for host in hosts]


def install_tap(reroute: Sequence[str] = ()) -> Callable[[], None]:
    """Tap HTTP clients, now or when they are imported, and carry names into threads; return the undo.

    The clients are httpx, httpx2, aiohttp, and users of the standard library's `http.client`: requests, urllib3, urllib.

    Requests that a rollout sends by httpx to a host of `reroute` (a name, or a URL of it) go to its gateway instead. May be
    called any number of times and from any thread; the tap is removed when every call has been undone.
    """
    return _tap.add((NOWHERE, *(host_of(name) for name in reroute)))
