"""Answers that say no: every refusal of the gateway, in OpenAI's error shape, from which other dialects make their own.

The invariant: whatever goes wrong, the agent's client gets the error object of its API with a status its
retry logic understands and a message that names the cure; never a bare stack trace, never a silent close.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from starlette.types import Send

Header = tuple[bytes, bytes]
JSON_TYPE: Header = (b"content-type", b"application/json")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    409: "conflict_error",
    408: "invalid_request_error",
    413: "request_too_large",
    421: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    502: "upstream_error",
    503: "unavailable_error",
}


class RefusalError(Exception):
    """A request that is answered with an error. Raised anywhere below the route, sent once at the route."""

    def __init__(
        self, status: int, code: str, message: str, headers: Sequence[Header] = (), *, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers, self.param = status, code, tuple(headers), param

    @property
    def error(self) -> dict[str, str | None]:
        """What OpenAI's error object says."""
        kind = TYPES.get(self.status, "server_error")
        return {"message": str(self), "type": kind, "code": self.code, "param": self.param}

    @property
    def body(self) -> bytes:
        """The OpenAI error object."""
        return orjson.dumps({"error": self.error})

    @property
    def event(self) -> bytes:
        """The same as a server-sent event, for answers whose headers have left already."""
        return b"data: " + self.body + b"\n\n"


class UpstreamError(Exception):
    """vLLM broke off in the middle of a call, or answered in a shape that is not vLLM's."""


class UpstreamGoneError(UpstreamError):
    """The connection to vLLM was lost, as it is when vLLM dies."""


async def send_bytes(send: Send, status: int, body: bytes, headers: Sequence[Header] = (JSON_TYPE,)) -> None:
    """Send a whole answer at once."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
