"""JSON in and out of HTTP bodies, as bytes.

The invariant: what the agent wrote is what goes on. Whole numbers keep every digit, and lone surrogates are accepted, since
agents send both and vLLM takes them; orjson, which rounds the one and refuses the other, is only the fast road. What JSON has
no number for (NaN, infinity) is refused: it could only be passed on as something else.
"""

from __future__ import annotations

import json
import math

import orjson
from starlette.types import Receive, Scope

from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body

LONGEST_LENGTH = 18
"""Digits of a length that is read as one."""
RAISE_THE_LIMIT = "raise gateway.max_body_bytes"
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
LONG_NUMBER = b"0" * 19
"""Digits, all made zeros, from which on a whole number may need more than 64 bits, so that orjson would round it. To look for
them so takes a sixtieth of the time that a regular expression takes."""


async def read_body(scope: Scope, receive: Receive, limit: int, cure: str = RAISE_THE_LIMIT) -> bytes:
    """The whole request body. Raises `RefusalError` (413, which names the `cure`) above `limit` bytes, `ClientGoneError` when
    it is cut off."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LONGEST_LENGTH:
                raise RefusalError(400, "bad_length", "The header content-length is no number of bytes; send one.")
            if int(value) > limit:
                raise too_large(int(value), limit, cure)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(size, limit, cure)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class ClientGoneError(Exception):
    """The agent's connection closed before its answer was complete."""


def too_large(size: int, limit: int, cure: str = RAISE_THE_LIMIT) -> RefusalError:
    """The refusal for a body above the limit."""
    message = f"The request's body has {size} bytes or more, the limit is {limit}; {cure}."
    return RefusalError(413, "body_too_large", message)


def read_object(payload: bytes) -> Body:
    """Parse a request. Raises `RefusalError` (422) when it is not a JSON object."""
    try:
        body = _read_slowly(payload) if _has_long_number(payload) else orjson.loads(payload)
    except orjson.JSONDecodeError:
        body = _read_slowly(payload)
    if not isinstance(body, dict):
        raise RefusalError(422, "invalid_json", f"The request's body must be a JSON object, not {type(body).__name__}.")
    return body


def _has_long_number(payload: bytes) -> bool:
    """Whether there are so many digits in a row. Of these every sixth byte has three in a row, which texts seldom have."""
    return b"000" in payload[::6].translate(ZEROS) and LONG_NUMBER in payload.translate(ZEROS)


def _read_slowly(payload: bytes) -> object:
    try:
        return json.loads(payload, parse_constant=_finite, parse_float=_finite)
    except ValueError as error:
        raise RefusalError(422, "invalid_json", f"The request's body is not JSON: {error}") from None
    except RecursionError:
        raise too_deep() from None


def _finite(text: str) -> float:
    """The number that a text stands for. Raises `ValueError` for NaN and infinity, under whatever name."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no number of JSON; send a finite one, or null.")
    return number


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
