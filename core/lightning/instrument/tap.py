"""The tap on httpx and httpx2: requests to the gateway say which rollout and which agent they come from.

The invariant: only requests to the gateway of an active rollout are touched, and those that are to be rerouted to it; a tap
can never make a request fail, and after the last undo the libraries are exactly as they were. Neither library is imported
here; one that is imported later is tapped when it is.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import ModuleType
from typing import cast

from lightning.instrument.callers import current_caller
from lightning.instrument.context import context_session, is_gateway, log_once
from lightning.instrument.reroute import Request, host_of, reroute
from lightning.types import Caller

ROLLOUT_HEADER = "x-lightning-rollout"
CALLER_HEADER = "x-lightning-caller"
TRACE_HEADER = "traceparent"
LIBRARIES = ("httpx", "httpx2")


def encode_caller(caller: Caller) -> str:
    """A caller as compact ASCII JSON, without its empty fields, as it stands in `x-lightning-caller`."""
    fields: dict[str, str | Sequence[str]] = {"agent": caller.agent}
    if caller.path:
        fields["path"] = caller.path
    for name in ("span_id", "parent_id", "framework"):
        if value := getattr(caller, name):
            fields[name] = value
    return json.dumps(fields, separators=(",", ":"))


def headers_for(url: str) -> Mapping[str, str]:
    """What a request to `url`, sent from here and now, has to carry; empty unless it goes to an active rollout's gateway."""
    if not is_gateway(url):
        return {}
    headers = {}
    session = context_session()
    if session is not None and url.startswith(session.gateway):
        headers[ROLLOUT_HEADER] = session.llm.api_key
        if session.traceparent:
            headers[TRACE_HEADER] = session.traceparent
    caller = current_caller()
    if caller is not None:
        headers[CALLER_HEADER] = encode_caller(caller)
    return headers


def _mark(request: Request) -> None:
    try:
        reroute(request, _tap.hosts)
        if headers := headers_for(str(request.url)):
            said = request.headers.get(TRACE_HEADER)  # a client that is instrumented knows the span it is in
            request.headers.update({**headers, TRACE_HEADER: said} if said else headers)
    except Exception as error:  # noqa: BLE001 — a request must go out even if nobody can say whose it is
        log_once("tap", "a model call goes out without the name of its agent: %r", error)


class _Tap:
    """The process's one tap; counts its users."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self.hosts: tuple[str, ...] = ()
        self._undo: list[Callable[[], None]] = []

    def acquire(self, hosts: Sequence[str]) -> None:
        with self._lock:
            self._users += 1
            self.hosts = (*self.hosts, *hosts)
            if self._users > 1:
                return
            from lightning.plugins.importing import on_import

            for name in LIBRARIES:
                self._undo.append(on_import(name, self._attach))

    def release(self, hosts: Sequence[str]) -> None:
        with self._lock:
            self._users -= 1
            kept = list(self.hosts)
            for host in hosts:
                kept.remove(host)
            self.hosts = tuple(kept)
            if self._users == 0:
                while self._undo:
                    self._undo.pop()()

    def _attach(self, module: ModuleType) -> None:
        with self._lock:
            if self._users == 0:
                return
            for name, wrap in (("Client", _wrap_sync), ("AsyncClient", _wrap_async)):
                client = getattr(module, name, None)
                original = vars(client).get("send") if isinstance(client, type) else None
                if not isinstance(client, type) or not callable(original) or getattr(original, "_lightning", False):
                    continue
                wrapped = functools.wraps(original)(wrap(original))
                wrapped._lightning = True  # type: ignore[attr-defined]  # noqa: SLF001 — our own mark on our own function
                setattr(client, "send", wrapped)  # noqa: B010 — mypy forbids assigning to a method
                self._undo.append(functools.partial(_restore, client, wrapped, original))


def _wrap_sync(original: Callable[..., object]) -> Callable[..., object]:
    def send(self: object, request: Request, *args: object, **kwargs: object) -> object:
        _mark(request)
        return original(self, request, *args, **kwargs)

    return send


def _wrap_async(original: Callable[..., object]) -> Callable[..., object]:
    async def send(self: object, request: Request, *args: object, **kwargs: object) -> object:
        _mark(request)
        return await cast("Awaitable[object]", original(self, request, *args, **kwargs))

    return send


def _restore(client: type, wrapped: object, original: object) -> None:
    if vars(client).get("send") is wrapped:
        setattr(client, "send", original)  # noqa: B010 — mypy forbids assigning to a method


_tap = _Tap()


def install_tap(reroute: Sequence[str] = ()) -> Callable[[], None]:
    """Tap `Client.send` and `AsyncClient.send` of httpx and httpx2, now or when they are imported; return the undo.

    Requests that a rollout sends to a host of `reroute` (a name, or a URL of it) go to its gateway instead. May be called
    any number of times and from any thread; the tap goes when every call has been undone.
    """
    hosts = tuple(host_of(name) for name in reroute)
    _tap.acquire(hosts)
    done = threading.Lock()

    def undo() -> None:
        if done.acquire(blocking=False):
            _tap.release(hosts)

    return undo
