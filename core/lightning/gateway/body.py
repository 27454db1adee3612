"""JSON in and out of HTTP bodies, as bytes.

The invariant: what Python's own JSON accepts (lone surrogates, NaN) is accepted here too, since agents send it and vLLM
takes it; orjson is only the fast road.
"""

from __future__ import annotations

import json

import orjson
from starlette.types import Receive, Scope

from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body

LONGEST_LENGTH = 18
"""Digits of a length that is read as one."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises `RefusalError` (413) above `limit` bytes, `ClientGoneError` when it is cut off."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LONGEST_LENGTH:
                raise RefusalError(400, "bad_length", "The header content-length is no number of bytes; send one.")
            if int(value) > limit:
                raise too_large(int(value), limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(size, limit)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class ClientGoneError(Exception):
    """The agent's connection closed before its answer was complete."""


def too_large(size: int, limit: int) -> RefusalError:
    """The refusal for a body above the limit."""
    message = f"The request's body has {size} bytes or more, the limit is {limit}; raise gateway.max_body_bytes."
    return RefusalError(413, "body_too_large", message)


def read_object(payload: bytes) -> Body:
    """Parse a request. Raises `RefusalError` (422) when it is not a JSON object."""
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        body = _read_slowly(payload)
    if not isinstance(body, dict):
        raise RefusalError(422, "invalid_json", f"The request's body must be a JSON object, not {type(body).__name__}.")
    return body


def _read_slowly(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except ValueError as error:
        raise RefusalError(422, "invalid_json", f"The request's body is not JSON: {error}") from None
    except RecursionError:
        raise too_deep() from None


def write_object(body: Body) -> bytes:
    """Serialize a request or an answer. Raises `RefusalError` (422) for one that is nested too deep."""
    try:
        return orjson.dumps(body)
    except TypeError:
        try:
            return json.dumps(body).encode()
        except RecursionError:
            raise too_deep() from None


def too_deep() -> RefusalError:
    """The refusal for lists and objects inside one another without end."""
    return RefusalError(422, "invalid_json", "The request's body is nested too deep to be read; send a flatter one.")
