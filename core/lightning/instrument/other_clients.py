"""The tap on aiohttp, and on the standard library's `http.client`, by which requests, urllib3 and urllib send.

The invariant: as that of the tap on httpx, but that a request goes where it was sent to: none is rerouted.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from lightning.instrument.adapter_tools import replace_method
from lightning.instrument.context import active, log_once

if TYPE_CHECKING:
    from lightning.instrument.httpx_patch import HttpxRequest, HttpxResponse, Sent


class PlainUrl:
    """A URL as the standard library reads it."""

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
class OtherClients:
    """What taps each client's module, and returns the undo. `mark` says whose call a request is, in its headers, and `answered`
    keeps that it was answered: those of the tap on httpx."""

    mark: Callable[[HttpxRequest], Sent | None]
    answered: Callable[[Sent, HttpxResponse], None]

    def taps(self) -> Mapping[str, Callable[[ModuleType], Callable[[], None]]]:
        """Module -> what taps it."""
        return {"http.client": self._tap_http_client, "aiohttp": self._tap_aiohttp}

    def _marked(self, url: str, headers: Iterable[tuple[str, str]]) -> tuple[Sent | None, Mapping[str, str]]:
        """The call that a request is, and the headers that it needs as well; `headers` are those that it has."""
        had = {name.lower(): value for name, value in headers}
        request = SimpleNamespace(url=PlainUrl(url), headers=dict(had))
        sent = self.mark(cast("HttpxRequest", request))
        return sent, {name: value for name, value in request.headers.items() if had.get(name) != value}

    def _tap_http_client(self, module: ModuleType) -> Callable[[], None]:
        undos = [
            replace_method(module.HTTPConnection, "endheaders", self._wrap_endheaders),
            replace_method(module.HTTPConnection, "getresponse", self._wrap_getresponse),
        ]

        def undo() -> None:
            for each in undos:
                each()

        return undo

    def _wrap_endheaders(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def endheaders(connection: HTTPConnection, *args: Any, **more: Any) -> None:
            if active():
                self._mark_connection(connection)
            original(connection, *args, **more)

        return endheaders

    def _mark_connection(self, connection: Any) -> None:
        """Add our headers behind those that wait to be sent, which `http.client` keeps as lines."""
        try:
            first, *lines = [line.decode("latin-1") for line in connection._buffer]  # noqa: SLF001 — there is no other way
            target = first.split(" ")[1]
            if not target.startswith("http"):  # else it goes by a proxy
                host = f"[{connection.host}]" if ":" in connection.host else connection.host
                scheme = "https" if connection.default_port == 443 else "http"
                target = f"{scheme}://{host}:{connection.port}{target}"
            pairs = [(name, value.strip()) for name, colon, value in (line.partition(":") for line in lines) if colon]
            connection._lightning_sent, added = self._marked(target, pairs)  # noqa: SLF001 — our own mark
            for name, value in added.items():
                connection.putheader(name, value)
        except Exception as error:  # noqa: BLE001 — a request must go out even if nobody can say whose it is
            log_once("http.client", "a model call goes out without the name of its agent: %r", error)

    def _wrap_getresponse(self, original: Callable[..., HTTPResponse]) -> Callable[..., HTTPResponse]:
        @functools.wraps(original)
        def getresponse(connection: Any, *args: Any, **more: Any) -> HTTPResponse:
            reply = original(connection, *args, **more)
            sent = vars(connection).pop("_lightning_sent", None)
            if sent is not None:
                self.answered(
                    sent, cast("HttpxResponse", SimpleNamespace(status_code=reply.status, headers=reply.headers))
                )
            return reply

        return getresponse

    def _tap_aiohttp(self, module: ModuleType) -> Callable[[], None]:
        return replace_method(module.ClientSession, "_request", self._wrap_request)

    def _wrap_request(self, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(original)
        async def request(session: Any, method: str, url: Any, **more: Any) -> Any:
            sent = self._mark_aiohttp(session, url, more) if active() else None
            reply = await original(session, method, url, **more)
            if sent is not None:
                self.answered(
                    sent, cast("HttpxResponse", SimpleNamespace(status_code=reply.status, headers=reply.headers))
                )
            return reply

        return request

    def _mark_aiohttp(self, session: Any, url: Any, more: dict[str, Any]) -> Sent | None:
        try:
            kind = type(session.headers)
            own = kind(more.get("headers") or ())
            sent, added = self._marked(str(session._build_url(url)), {**session.headers, **own}.items())  # noqa: SLF001 — as aiohttp does
            if added:
                own.update(added)
                more["headers"] = own
        except Exception as error:  # noqa: BLE001 — as above
            log_once("aiohttp", "a model call goes out without the name of its agent: %r", error)
            return None
        return sent
