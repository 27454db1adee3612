"""The HTTP client that DSPy brings along, which speaks to sockets by itself: its requests say whose they are.

The invariant: a request that is not for the gateway of an active rollout goes out as it was. Calls of DSPy's that go through
LiteLLM are tapped as all others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from dspy._vendor.lm15.transports import StdlibAsyncTransport, StdlibTransport
from lightning.instrument import MarkedRequest, ReplacedMethods, mark_request


def watch_client(replaced: ReplacedMethods) -> None:
    """Stand before the client's methods."""
    replaced.replace(StdlibTransport, "stream", _stream)
    replaced.replace(StdlibAsyncTransport, "_do_stream", _do_stream)


def _marked(request: Any) -> tuple[MarkedRequest, Any]:
    marked = mark_request(request.url, request.headers)
    kept = [(name, value) for name, value in request.headers if name.lower() not in marked.added]
    return marked, replace(request, headers=[*kept, *marked.added.items()]) if marked.added else request


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def stream(transport: Any, request: Any) -> Any:
        marked, request = _marked(request)
        reply = original(transport, request)
        marked.answered(reply.status, reply.headers)
        return reply

    return stream


def _do_stream(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def do_stream(transport: Any, request: Any) -> Any:
        marked, request = _marked(request)
        reply = await original(transport, request)
        marked.answered(reply.status, reply.headers)
        return reply

    return do_stream
