"""Answers that say no: every refusal of the gateway, in OpenAI's error shape, from which other dialects make their own.

The invariant: whatever goes wrong, the agent's client gets the error object of its API with a status its
retry logic understands and a message that names the cure; never a bare stack trace, never a silent close.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from starlette.types import Send

from lightning.types import TOO_LONG

Header = tuple[bytes, bytes]
JSON_TYPE: Header = (b"content-type", b"application/json")

OF_LENGTH = ("maximum context length", "cannot be greater than max_model_len")
"""How vLLM says that prompt and answer are too long, or that the answer alone would be."""
CURE_OF_LENGTH = (
    "Prompt and answer together have policy_server.max_model_len tokens, or as many as the model was made for: raise the "
    "former, let the agent shorten its conversation, or have it ask for fewer tokens (max_tokens)."
)
"""Without quotation marks: a client shows it in the text of an exception, which is searched for it."""
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


def told_of_length(payload: bytes) -> bytes | None:
    """vLLM's refusal of a call whose prompt and answer do not fit, with OpenAI's code for that, which clients know, and the
    cure. None for any other refusal.

    The numbers are vLLM's: the length, what was asked for, and what the prompt has.
    """
    try:
        said = orjson.loads(payload)
        message = said["error"]["message"]
        if not any(words in message for words in OF_LENGTH):
            return None
        said["error"] |= {"message": f"{message} {CURE_OF_LENGTH}", "code": TOO_LONG}
    except (ValueError, KeyError, TypeError):
        return None
    return orjson.dumps(said)


class UpstreamError(Exception):
    """vLLM broke off in the middle of a call, or answered in a shape that is not vLLM's."""


class UpstreamGoneError(UpstreamError):
    """The connection to vLLM was lost, as it is when vLLM dies."""


async def send_bytes(send: Send, status: int, body: bytes, headers: Sequence[Header] = (JSON_TYPE,)) -> None:
    """Send a whole answer at once."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
