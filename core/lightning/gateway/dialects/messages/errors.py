"""Errors in the shape of the Messages API: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import orjson

from lightning.gateway.sampling import Body

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_object(status: int, message: str) -> Body:
    """The error with this status."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def translated(status: int, payload: bytes) -> bytes:
    """vLLM's error in this shape; what is not one of vLLM's becomes the message as it is."""
    try:
        message = str(orjson.loads(payload)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = payload.decode("utf-8", "replace")
    return orjson.dumps(error_object(status, message))
