"""What requests and answers are made of: bodies, JSON, errors, and server-sent events.

The invariant of bodies: a body is counted as it arrives and as it is unpacked, by its bytes and by the values that it would be
parsed into, and nothing of it is parsed before that was granted; what was granted is given back when the request has been
answered. Every route of every port that takes a body reads it here, behind `connections.Entrance`. The core unpacks none: what
guards a port may, and counts it here.

The invariant of JSON: what the agent wrote is what goes on. Whole numbers keep every digit, since vLLM takes them; orjson,
which rounds them, is only the fast road. What JSON has no number for (NaN, infinity) and texts with half of a character (a lone
surrogate), which no tokenizer takes, are refused: they could only be passed on as something else.

Whatever goes wrong, the agent's client gets the error object of its API with a status its retry logic understands and a message
that names the cure; never a bare stack trace, never a silent close. Errors have OpenAI's shape here; other dialects make their
own from it.

Events are cut out of a byte stream, whatever the chunk boundaries are: the pieces, joined, are exactly the bytes that came in,
it takes time that grows with the bytes alone, and holds one unfinished event of bounded length.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import orjson
from starlette.types import Message, Receive, Scope, Send

from lightning.memory_budget import LONG, MANY, VALUE_BYTES, Budget, Holder, json_values
from lightning.plugins import plugins
from lightning.types import TOO_LONG

Body: TypeAlias = "dict[str, Any]"
"""A JSON object of a request or an answer."""
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
    **dict.fromkeys((400, 408, 415, 421, 422, 426), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    **dict.fromkeys((404, 405), "not_found_error"),
    409: "conflict_error",
    **dict.fromkeys((413, 431), "request_too_large"),
    429: "rate_limit_error",
    502: "upstream_error",
    503: "unavailable_error",
}


LONGEST_MESSAGE = 10_000
"""Characters of what a refusal says: it may quote the request."""
LONGEST_WHERE = 200
"""Characters that are told of a place in a request: agents choose names, of any length."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
LONG_NUMBER = b"0" * 19
"""Digits, all made zeros, from which on a whole number may need more than 64 bits, so that orjson would round it. To look for
them so takes a sixtieth of the time that a regular expression takes."""
BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
LINE = re.compile(rb"\r\n|\n|\r")
LONGEST_BLANK = 4
LONGEST_EVENT = 64 << 20
"""Bytes; the longest there is has the ids of a whole prompt, at most eight bytes each."""
SHORTER = "let the agent ask for fewer tokens (max_tokens), choices (n) or logprobs (top_logprobs)"
"""The cure of an answer that is too long."""
T = TypeVar("T")
KEY = "lightning.body"
"""Under this name the scope of a request has its `RequestBody`."""
OTHERS_VALUES = 4
"""A body that is no model call may have so many times the JSON values: of spans, of many rollouts."""
COPIES = 3
"""How often a body is there: as it came, as what it was parsed into, and as it is sent on or stored."""
WAIT = 10.0
"""Seconds that a body waits for room."""
LONGEST_LENGTH = 18
"""Digits of a length that is read as one."""
RAISE_THE_LIMIT = "raise gateway.max_body_bytes"


def _head(text: str, most: int) -> str:
    """A text, or its beginning where it is longer: it may quote the request."""
    return text if len(text) <= most else f"{text[:most]}…"


class RefusalError(Exception):
    """A request that is answered with an error. Raised anywhere below the route, sent once at the route."""

    def __init__(
        self, status: int, code: str, message: str, headers: Sequence[Header] = (), *, param: str | None = None
    ) -> None:
        super().__init__(_head(message, LONGEST_MESSAGE))
        self.status, self.code, self.headers = status, code, tuple(headers)
        self.param = None if param is None else _head(param, LONGEST_WHERE)

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
        return event_of(self.body)


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


def error_of(payload: bytes) -> dict[str, object]:
    """The error object of a refusal of vLLM's; its text alone where it has none."""
    try:
        error = orjson.loads(payload)["error"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        error = None
    return error if isinstance(error, dict) else {"message": payload[:2000].decode("utf-8", "replace")}


class UpstreamError(Exception):
    """vLLM broke off in the middle of a call, or answered in a shape that is not vLLM's."""


class UpstreamGoneError(UpstreamError):
    """The connection to vLLM was lost, as it is when vLLM dies."""


async def send_bytes(send: Send, status: int, body: bytes, headers: Sequence[Header] = (JSON_TYPE,)) -> None:
    """Send a whole answer at once."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class ClientGoneError(Exception):
    """The agent's connection closed before its answer was complete."""


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
        said: object = json.loads(payload, parse_constant=_finite, parse_float=_finite)
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _half_a_character(said, ord(error.object[error.start])) from None
    except ValueError as error:
        raise RefusalError(422, "invalid_json", f"The request's body is not JSON: {error}") from None
    except RecursionError:
        raise too_deep() from None
    return said


def _half_a_character(said: object, code: int) -> RefusalError:
    """The refusal of the first text with a lone surrogate, by its place."""
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in _way_to_half(said))
    where = LONE_SURROGATE.sub("\ufffd", steps.removeprefix(".")) or "body"
    where = _head(where, LONGEST_WHERE)
    message = (
        f"{where!r} has half of a character (the lone surrogate \\u{code:04x}), which no tokenizer takes: let the agent send "
        "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
    )
    return RefusalError(422, "lone_surrogate", message, param=where)


def _way_to_half(said: object) -> Sequence[str | int]:
    """The names and numbers that lead to the first text with a lone surrogate, or to the object that has it in a name.

    Only the way to where it looks is held: a path for each item would take as many bytes as the longest name, each time.
    """
    way: list[str | int] = []
    left: list[Iterator[tuple[str | int, object]]] = [iter([("", said)])]
    while left:
        if (found := next(left[-1], None)) is None:
            left.pop()
            del way[-1:]
            continue
        step, value = found
        if isinstance(value, str) and LONE_SURROGATE.search(value):
            return [*way[1:], step] if way else way
        if isinstance(value, dict | list):
            way.append(step)
            if isinstance(value, dict) and any(map(LONE_SURROGATE.search, value)):
                break
            left.append(iter(value.items() if isinstance(value, dict) else enumerate(value)))
    return way[1:]


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


class EventCutter:
    """Feed it bytes, get back whole events, each with the blank line that ends it."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completed, in order. Raises `UpstreamError` for one without an end."""
        buffer = self._buffer
        search_from = max(0, len(buffer) - LONGEST_BLANK + 1)
        buffer += data
        events: list[bytes] = []
        start = 0
        for match in BLANK_LINE.finditer(buffer, search_from):
            events.append(bytes(buffer[start : match.end()]))
            start = match.end()
        if start:
            del buffer[:start]
        if len(buffer) > LONGEST_EVENT:
            raise UpstreamError(f"it sent an event of more than {LONGEST_EVENT} bytes")
        return events

    def rest(self) -> bytes:
        """What came after the last blank line: an event that was cut off, or nothing."""
        return bytes(self._buffer)


def event_of(data: bytes, kind: str = "") -> bytes:
    """The server-sent event with this payload of one line, named after its kind if it has one."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data) if kind else b"data: %b\n\n" % data


def data_of(event: bytes) -> bytes | None:
    """The payload of an event (its `data:` lines joined by newlines), or None for comments and other fields."""
    body = event.rstrip(b"\r\n")
    if body.startswith(b"data: ") and b"\n" not in body and b"\r" not in body:
        return body[6:]
    lines = [line[5:].removeprefix(b" ") for line in LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class RequestBody:
    """What one request holds of its token's share. `most_values` is 0 for no limit. Of a compressed body `packed` are the bytes
    that have come."""

    __slots__ = ("_budget", "_bytes", "_held", "_holder", "_most_values", "_receive", "_values", "packed")

    def __init__(self, budget: Budget, holder: Holder, most_values: int, receive: Receive) -> None:
        self._budget, self._holder, self._receive = budget, holder, receive
        self._most_values = most_values
        self._held = self._values = self._bytes = self.packed = 0

    def is_no_call(self) -> None:
        """Its route says so before it reads it: it may have more values than a model call."""
        self._most_values *= OTHERS_VALUES

    async def receive(self) -> Message:
        """The next message of the request. Raises `RefusalError` (413, 429) for a body that there is no room for."""
        message = await self._receive()
        if body := message.get("body"):
            await self.hold(body)
        return message

    async def receive_packed(self) -> Message:
        """The next message of a request whose body is compressed: what it will be is not known, only its bytes. Raises as
        `receive` does."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self.packed += size
        await self.reserve(size)
        return message

    async def hold(self, data: bytes) -> None:
        """Count a part of a body. Raises `RefusalError`."""
        values = json_values(data)
        self._values += values
        self._bytes += len(data)
        if self._most_values and self._values > self._most_values:
            message = (
                f"The request's body has more than {self._most_values} JSON values, counted by commas and brackets "
                "(gateway.limits.json_values): send fewer."
            )
            raise RefusalError(413, "too_many_values", message)
        await self.reserve(COPIES * len(data) + VALUE_BYTES * values)

    async def reserve(self, size: int) -> None:
        """Hold so many bytes until the request has been answered, or `give` them back. Raises `RefusalError`."""
        if self._held + size > self._budget.largest:
            message = (
                f"The request would take {self._held + size} bytes of memory or more, and one may take "
                f"{self._budget.largest} (half of gateway.limits.body_memory): send less."
            )
            raise RefusalError(413, "body_too_large", message)
        if not await self._holder.wait(size, WAIT):
            message = (
                f"The bodies of this token's requests hold {self._holder.held} bytes, and there was no room for more in "
                f"{WAIT:g} s (gateway.limits.body_memory). Wait and send it again."
            )
            raise RefusalError(429, "too_many_bytes", message, [(b"retry-after", b"1")])
        self._held += size

    def give(self, size: int) -> None:
        """Let go of what was reserved."""
        self._held -= size
        self._holder.give(size)

    def close(self) -> None:
        """The request has been answered."""
        self.give(self._held)

    async def work(self, do: Callable[[], T], *, reads_texts: bool) -> T:
        """Do something with it: here when that is short, else beside the event loop (`Holder.work`). What reads no texts reads
        names at most, a sixteenth as long."""
        long = LONG if reads_texts else 16 * LONG
        return await self._holder.work(do) if self._values > MANY or self._bytes > long else do()


async def beside(scope: Scope, do: Callable[[], T], *, reads_texts: bool = True) -> T:
    """Do something with a body that was read: here when that is short, else beside the event loop (`RequestBody.work`)."""
    body: RequestBody | None = scope.get(KEY)
    return do() if body is None else await body.work(do, reads_texts=reads_texts)


async def read_body(scope: Scope, receive: Receive, limit: int, cure: str = RAISE_THE_LIMIT) -> bytes:
    """The whole request body. Raises `RefusalError` (413, which names the `cure`) above `limit` bytes, as it came or as it was
    unpacked, 415 for one that nothing has unpacked, `ClientGoneError` when it is cut off."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LONGEST_LENGTH:
                raise RefusalError(400, "bad_length", "The header content-length is no number of bytes; send one.")
            if int(value) > limit:
                raise _too_large(int(value), limit, cure)
    if packed := packed_with(scope):
        why = (
            f"The body's content-encoding is {', '.join(packed)!r:.80}, and nothing here unpacks it: send it as it is, or to a "
            f"port that a plugin guards.{plugins().cures('ports')}"
        )
        raise RefusalError(415, "unsupported_encoding", why, [(b"accept-encoding", b"identity")])
    held: RequestBody | None = scope.get(KEY)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        most = size if held is None else max(size, held.packed)
        if most > limit:
            raise _too_large(most, limit, cure)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def packed_with(scope: Scope) -> list[str]:
    """What the body of a request was compressed with, in that order; nothing for one that comes as it is."""
    said = b",".join(value for name, value in scope["headers"] if name == b"content-encoding").decode("latin-1").lower()
    return [name for part in said.split(",") if (name := part.strip()) not in ("", "identity")]


def _too_large(size: int, limit: int, cure: str) -> RefusalError:
    message = f"The request's body has {size} bytes or more, the limit is {limit}; {cure}."
    return RefusalError(413, "body_too_large", message)
