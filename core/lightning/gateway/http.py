"""The parts of HTTP requests and answers: bodies, JSON, errors, and server-sent events.

The invariant of bodies: a body is counted as it arrives and as it is unpacked, by its bytes and by the values into which it
would be parsed. Nothing is parsed before there is room for it, and the room is given back when the request has been answered.
Every route of every port that takes a body reads it here, behind `connections.Entrance`. The core does not unpack bodies; a
port's guard may, and counts them here.

The invariant of JSON: values go on as the agent wrote them. Whole numbers keep every digit, because vLLM takes them; orjson,
which rounds large ones, parses only bodies without any. NaN and infinity, which JSON does not have, and texts with a lone
surrogate, which no tokenizer takes, are refused, because they could only be passed on changed.

After any failure the agent's client gets the error object of its API, with a status that its retry logic understands and a
message that names the cure; never a stack trace, never a silent close. Errors have OpenAI's shape here; other dialects convert
it.

Events are cut out of a byte stream with any chunk boundaries. The pieces, joined, are exactly the bytes of the stream. Cutting
takes time proportional to the bytes, and holds one unfinished event of bounded length.
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
"""Parts of vLLM's messages that prompt and answer, or the answer alone, are too long."""
CURE_OF_LENGTH = (
    "Prompt and answer together have policy_server.max_model_len tokens, or as many as the model was made for: raise the "
    "former, let the agent shorten its conversation, or have it ask for fewer tokens (max_tokens)."
)
"""The cure of a call that is too long. It has no quotation marks, because it is looked for in the texts of clients'
exceptions."""
OF_TOOLS = ("--tool-call-parser",)
"""Part of vLLM's message that it has no parser of tool calls."""
CURE_OF_TOOLS = (
    "vLLM refuses calls with tools, because it was started without a parser of tool calls for this model. If the model's chat "
    "template shows tools (lightning doctor --model FOLDER), set policy_server.tool_call_parser, or start a vLLM of your own "
    "(policy_server.attach) with --enable-auto-tool-choice --tool-call-parser. If not, take another model, or describe the "
    "tools in the agent's own prompt."
)
"""Stands in the place of vLLM's message, which names arguments of vLLM that users do not give."""
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
"""The most characters of a refusal's message, which may quote the request."""
LONGEST_WHERE = 200
"""The most characters of the place in a request that an error names, because agents choose names of any length."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
LONG_NUMBER = b"0" * 19
"""As many digits, all replaced by zeros, as a whole number of more than 64 bits has at least; orjson would round it. This
search takes a sixtieth of the time of a regular expression."""
BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
LINE = re.compile(rb"\r\n|\n|\r")
LONGEST_BLANK = 4
LONGEST_EVENT = 64 << 20
"""The most bytes of an event. The longest event of vLLM has the ids of a whole prompt, at most eight bytes each."""
SHORTER = "let the agent ask for fewer tokens (max_tokens), choices (n) or logprobs (top_logprobs)"
"""The cure of an answer that is too long."""
T = TypeVar("T")
KEY = "lightning.body"
"""The key of a request's ASGI scope under which its `RequestBody` is."""
OTHERS_VALUES = 4
"""How many times the JSON values of a model call another body may have, such as spans or many rollouts."""
COPIES = 3
"""How many copies of a body are in memory: the received bytes, the parsed values, and the bytes that are sent on or stored."""
WAIT = 10.0
"""The most seconds that a body waits for room in memory."""
LONGEST_LENGTH = 18
"""The most digits of a `content-length` that is accepted."""
RAISE_THE_LIMIT = "raise gateway.max_body_bytes"


def _head(text: str, most: int) -> str:
    """Return a text, shortened to `most` characters and an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[:most]}…"


class RefusalError(Exception):
    """An error with which a request is answered. It may be raised anywhere below the route, which sends it once."""

    def __init__(
        self, status: int, code: str, message: str, headers: Sequence[Header] = (), *, param: str | None = None
    ) -> None:
        super().__init__(_head(message, LONGEST_MESSAGE))
        self.status, self.code, self.headers = status, code, tuple(headers)
        self.param = None if param is None else _head(param, LONGEST_WHERE)

    @property
    def error(self) -> dict[str, str | None]:
        """The content of OpenAI's error object."""
        kind = TYPES.get(self.status, "server_error")
        return {"message": str(self), "type": kind, "code": self.code, "param": self.param}

    @property
    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        return orjson.dumps({"error": self.error})

    @property
    def event(self) -> bytes:
        """The error object as a server-sent event, for an answer whose headers have been sent."""
        return event_of(self.body)


def told_of_length(payload: bytes) -> bytes | None:
    """Return vLLM's refusal of a call whose prompt and answer are too long, with OpenAI's error code, which clients know, and
    with the cure; None for any other refusal. The numbers in the message stay vLLM's.
    """
    message = _message_with(payload, OF_LENGTH)
    return None if message is None else _told(payload, message=f"{message} {CURE_OF_LENGTH}", code=TOO_LONG)


def told_of_tools(payload: bytes) -> bytes | None:
    """Return vLLM's refusal of a call with tools for which it has no parser, with the cure; None for any other refusal."""
    return None if _message_with(payload, OF_TOOLS) is None else _told(payload, message=CURE_OF_TOOLS)


def _message_with(payload: bytes, words: Sequence[str]) -> str | None:
    try:
        message = orjson.loads(payload)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) and any(each in message for each in words) else None


def _told(payload: bytes, **changed: str) -> bytes:
    said = orjson.loads(payload)
    said["error"] |= changed
    return orjson.dumps(said)


def error_of(payload: bytes) -> dict[str, object]:
    """Return the error object in a refusal of vLLM; an object with only its text if it has none."""
    try:
        error = orjson.loads(payload)["error"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        error = None
    return error if isinstance(error, dict) else {"message": payload[:2000].decode("utf-8", "replace")}


class UpstreamError(Exception):
    """vLLM broke off during a call, or its answer does not have the shape of vLLM's answers."""


class UpstreamGoneError(UpstreamError):
    """The connection to vLLM was lost, for example because vLLM died."""


async def send_bytes(send: Send, status: int, body: bytes, headers: Sequence[Header] = (JSON_TYPE,)) -> None:
    """Send a whole answer."""
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
    """Return whether the payload has as many digits in a row as `LONG_NUMBER`. It first looks at every sixth byte, where these
    are three digits in a row, which texts seldom have."""
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
    """Return the refusal of a body with a lone surrogate, which names the place of the first text that has one."""
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in _way_to_half(said))
    where = LONE_SURROGATE.sub("\ufffd", steps.removeprefix(".")) or "body"
    where = _head(where, LONGEST_WHERE)
    message = (
        f"{where!r} has half of a character (the lone surrogate \\u{code:04x}), which no tokenizer takes: let the agent send "
        "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
    )
    return RefusalError(422, "lone_surrogate", message, param=where)


def _way_to_half(said: object) -> Sequence[str | int]:
    """Return the names and indices that lead to the first text with a lone surrogate, or to the object that has it in a name.

    Memory holds only the path to the present item: a path for each item would take the bytes of the longest name each time.
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
    """Return the number that a text means. Raises `ValueError` for NaN and infinity in any spelling."""
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
    """Return the refusal of a body whose lists and objects are nested too deep."""
    return RefusalError(422, "invalid_json", "The request's body is nested too deep to be read; send a flatter one.")


class EventCutter:
    """Cuts a byte stream into server-sent events, each with the blank line that ends it."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes of the stream, and return the events that they complete, in order. Raises `UpstreamError` for an unfinished
        event of more than `LONGEST_EVENT` bytes."""
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
        """Return the bytes behind the last blank line: an unfinished event; empty if there is none."""
        return bytes(self._buffer)


def event_of(data: bytes, kind: str = "") -> bytes:
    """Return the server-sent event with a payload of one line; `kind` is the event's name, empty for none."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data) if kind else b"data: %b\n\n" % data


def data_of(event: bytes) -> bytes | None:
    """Return the payload of an event, its `data:` lines joined by newlines; None for an event without any."""
    body = event.rstrip(b"\r\n")
    if body.startswith(b"data: ") and b"\n" not in body and b"\r" not in body:
        return body[6:]
    lines = [line[5:].removeprefix(b" ") for line in LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class RequestBody:
    """The memory that one request's body takes from its token's share. `most_values` is the most JSON values of a body, 0 for
    no limit. `packed` counts the received bytes of a compressed body."""

    __slots__ = ("_budget", "_bytes", "_held", "_holder", "_most_values", "_receive", "_values", "packed")

    def __init__(self, budget: Budget, holder: Holder, most_values: int, receive: Receive) -> None:
        self._budget, self._holder, self._receive = budget, holder, receive
        self._most_values = most_values
        self._held = self._values = self._bytes = self.packed = 0

    def is_no_call(self) -> None:
        """Allow the body more values than a model call may have. A route calls it before it reads the body."""
        self._most_values *= OTHERS_VALUES

    async def receive(self) -> Message:
        """Receive the next message of the request, and count its part of the body. Raises `RefusalError` (413, 429) if there is
        no room for the body."""
        message = await self._receive()
        if body := message.get("body"):
            await self.hold(body)
        return message

    async def receive_packed(self) -> Message:
        """Receive the next message of a request with a compressed body, and count its bytes. Raises `RefusalError` (413, 429)
        if there is no room for them."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self.packed += size
        await self.reserve(size)
        return message

    async def hold(self, data: bytes) -> None:
        """Count a part of a body that is not compressed. Raises `RefusalError` (413, 429) if there is no room for it."""
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
        """Reserve `size` bytes until the request has been answered, or until `give`. Raises `RefusalError` (413, 429) if there
        is no room for them."""
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
        """Give back `size` reserved bytes."""
        self._held -= size
        self._holder.give(size)

    def close(self) -> None:
        """Give back all reserved bytes, because the request has been answered."""
        self.give(self._held)

    async def work(self, do: Callable[[], T], *, reads_texts: bool) -> T:
        """Call `do`, which works on the body, and return its result: directly for a short body, in a thread for a long one
        (`Holder.work`). With `reads_texts=False` it is taken to need a sixteenth of the time."""
        long = LONG if reads_texts else 16 * LONG
        return await self._holder.work(do) if self._values > MANY or self._bytes > long else do()


async def beside(scope: Scope, do: Callable[[], T], *, reads_texts: bool = True) -> T:
    """Call `do`, which works on the body of a request, and return its result: directly for a short body, in a thread for a long
    one (`RequestBody.work`)."""
    body: RequestBody | None = scope.get(KEY)
    return do() if body is None else await body.work(do, reads_texts=reads_texts)


async def read_body(scope: Scope, receive: Receive, limit: int, cure: str = RAISE_THE_LIMIT) -> bytes:
    """Return the whole body of a request. Raises `RefusalError`: 413 with the `cure` above `limit` bytes, received or unpacked;
    400 for a malformed `content-length`; 415 for a compressed body that no guard unpacks. Raises `ClientGoneError` if the body
    is cut off."""
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
    """Return the encodings with which a request's body is compressed, in order; none for a plain body."""
    said = b",".join(value for name, value in scope["headers"] if name == b"content-encoding").decode("latin-1").lower()
    return [name for part in said.split(",") if (name := part.strip()) not in ("", "identity")]


def _too_large(size: int, limit: int, cure: str) -> RefusalError:
    message = f"The request's body has {size} bytes or more, the limit is {limit}; {cure}."
    return RefusalError(413, "body_too_large", message)
