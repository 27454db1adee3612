"""What an agent sent in a model call and what it got, packed into a few bytes, and back.

The invariant: `read` gives the very JSON that was packed, numbers digit by digit. A request is kept as what it adds to the
one of an earlier call of the attempt; a call whose earlier one is missing or unreadable raises `StoreError`, never gives
another request.

Layout, little-endian: a byte for the version, a byte of `Flag`s, the `seq` of the earlier call or -1 (int32), then a zstandard
frame of a line of JSON (API path, status, bytes of the request shared with the earlier one at the beginning and at the end, how
many are not), the bytes that are not, and the reply. The earlier call's reply is the frame's dictionary, since an agent mostly
sends back what the model has said.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import zstandard

from lightning.errors import StoreError
from lightning.types import Json, ToolEvent, Transition

VERSION: Final = 1
LEVEL: Final = 1
LARGEST: Final = 4 << 20
"""Bytes of a request, or of a reply, from which on it is left out."""
LARGEST_FRAME: Final = 2 * LARGEST + (64 << 10)
"""Bytes that an exchange has at most: a request, a reply, and what is said of them."""
LARGEST_DICTIONARY: Final = 32 << 10
_HEAD: Final = struct.Struct("<BBi")
Body: TypeAlias = "dict[str, Any]"


class Flag(IntFlag):
    """Why an exchange is not whole, and what of its reply is in the call's row already."""

    REDACTED = 1
    TOO_LARGE = 2
    IDS = 4
    """The agent asked for token ids; they are put back when the reply is read."""


WHOLE: Final = Flag(0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call as the agent saw it. `path` is the API's below `/v1`; `reply` is None and `status` 0 where none was sent whole.

    A reply that was streamed stands here as the whole answer that the stream adds up to. `redacted` says that a credential was
    left out, `too_large` that request or reply was: neither can be replayed.
    """

    path: str
    request: Json
    reply: Json = None
    status: int = 0
    redacted: bool = False
    too_large: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """The canonical request and the reply of a call that is stored: what a later one is packed against."""

    seq: int
    request: bytes
    reply: bytes


NOBODY: Final = Said(-1, b"", b"")


class Piece(NamedTuple):
    """A part of a request that comes again in later ones: an item of one of its lists, or another value.

    The texts of all pieces, joined, are the canonical JSON; `value` is that of the item alone, empty for what only closes.
    """

    name: str
    value: bytes
    text: bytes

    @property
    def key(self) -> int:
        """Equal for equal items."""
        return hash((self.name, self.value))


def pieces(body: Mapping[str, Any]) -> Iterator[Piece]:
    """The canonical JSON of a request. Raises `RecursionError` for what is nested too deep."""
    opening = b"{"
    for name in sorted(body):
        value = body[name]
        before = opening + written(name) + b":"
        if isinstance(value, list) and value:
            for place, item in enumerate(value):
                text = written(item)
                yield Piece(name, text, (b"," if place else before + b"[") + text)
            yield Piece(name, b"", b"]")
        else:
            text = written(value)
            yield Piece(name, text, before + text)
        opening = b","
    yield Piece("", b"", b"}" if body else b"{}")


def canonical(body: Mapping[str, Any]) -> bytes:
    """JSON that is equal for equal requests: sorted names, no spaces."""
    return b"".join(piece.text for piece in pieces(body))


def written(value: Any) -> bytes:
    """Canonical JSON of any value."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # lone surrogates, whole numbers of more than 64 bits, nesting
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def pack(path: str, status: int, request: bytes, reply: bytes, base: Said = NOBODY, flags: Flag = WHOLE) -> bytes:
    """An exchange against the earlier call `base`. Too large ones keep only that there was a call."""
    if len(request) > LARGEST or len(reply) > LARGEST:
        request = reply = b""
        base, flags = NOBODY, flags | Flag.TOO_LARGE
    start = shared(request, base.request)
    end = shared(request[start:][::-1], base.request[start:][::-1])
    middle = request[start : len(request) - end]
    if not start + end:
        base = NOBODY
    head = orjson.dumps([path, status, start, end, len(middle)])
    packer = zstandard.ZstdCompressor(level=LEVEL, dict_data=_dictionary(base))
    return _HEAD.pack(VERSION, flags, base.seq) + packer.compress(b"".join((head, b"\n", middle, reply)))


def _dictionary(base: Said) -> zstandard.ZstdCompressionDict | None:
    said = base.reply[:LARGEST_DICTIONARY]
    return zstandard.ZstdCompressionDict(said, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if len(said) >= 8 else None


def shared(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit  # one[:low] is shared, one[:high] is not: bytes compare far faster than Python counts
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def flags_of(call: Transition) -> Flag:
    """What stands in the way of replaying a call; nothing where it is not recorded. Does not unpack it."""
    return Flag(call.exchange[1]) if call.exchange is not None and len(call.exchange) >= _HEAD.size else WHOLE


def why_not_replayable(calls: Sequence[Transition], tool_events: Sequence[ToolEvent]) -> str:
    """Why an attempt cannot be run again from its record, in words; empty where it can. Does not unpack it."""
    if any(call.exchange is None for call in calls if call.status.answered and call.choice == 0):
        return "requests were not recorded: gateway.record_requests was false, or an earlier release recorded them"
    flags = WHOLE
    for call in calls:
        flags |= flags_of(call)
    if flags & Flag.REDACTED:
        return "a credential was left out of a request or a reply"
    if flags & Flag.TOO_LARGE:
        return f"a request or a reply had more than {LARGEST >> 20} MiB"
    if any(event.incomplete for event in tool_events):
        return "the result of a tool is not kept: it had more than 1 MB, a credential, or was no JSON"
    return ""


def read(calls: Sequence[Transition]) -> list[Exchange | None]:
    """The exchange of each call of an attempt, given all of its calls; None where none is recorded.

    Raises `StoreError` for one that cannot be read.
    """
    reader = _Reader(calls)
    return [reader.exchange(call.seq) for call in calls]


class _Reader:
    """Reads the exchanges of one attempt. A call may be told against one with a higher number, which ended before it."""

    def __init__(self, calls: Sequence[Transition]) -> None:
        self._calls = calls
        self._packed = {call.seq: call for call in calls if call.exchange is not None}
        self._said: dict[int, Said] = {}
        self._found: dict[int, Exchange] = {}

    def exchange(self, seq: int) -> Exchange | None:
        """The exchange of the call with this number; None without one."""
        if seq in self._packed and seq not in self._found:
            self._found[seq] = self._read(self._packed[seq])
        return self._found.get(seq)

    def _base(self, seq: int) -> Said:
        """What an earlier call said. Raises `KeyError` where none is recorded, `RecursionError` for a circle."""
        if seq not in self._said:
            self.exchange(seq)
        return self._said[seq]

    def _read(self, call: Transition) -> Exchange:
        packed = call.exchange
        assert packed is not None, "asked of calls that have one"
        try:
            version, number, before = _HEAD.unpack_from(packed)
            if version != VERSION:
                raise StoreError(
                    f"the exchange of transition {call.key} has form {version}, this release reads {VERSION}: it was written "
                    "by a newer release (pip install -U 'lightning<1')"
                )
            flags, base = Flag(number), NOBODY if before < 0 else self._base(before)
            if not 0 <= zstandard.frame_content_size(packed[_HEAD.size :]) <= LARGEST_FRAME:
                raise StoreError(f"the exchange of transition {call.key} would have more than {LARGEST_FRAME} bytes")
            text = zstandard.ZstdDecompressor(dict_data=_dictionary(base)).decompress(packed[_HEAD.size :])
            head, _, rest = text.partition(b"\n")
            path, status, start, end, length = json.loads(head)
            request = base.request[:start] + rest[:length] + base.request[len(base.request) - end :]
            self._said[call.seq] = Said(call.seq, request, rest[length:])
            if flags & Flag.TOO_LARGE:
                return Exchange(path, None, None, status, bool(flags & Flag.REDACTED), too_large=True)
            reply: Any = json.loads(rest[length:]) if len(rest) > length else None
            if flags & Flag.IDS:
                _put_ids_back(reply, [each for each in self._calls if each.id == call.id])
            return Exchange(path, json.loads(request), reply, status, bool(flags & Flag.REDACTED))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
            raise _corrupt(call, error) from error
        except zstandard.ZstdError as error:
            raise _corrupt(call, error) from error


def _corrupt(call: Transition, error: Exception) -> StoreError:
    why = f"the call {error} that it is told against has none" if isinstance(error, KeyError) else str(error)
    return StoreError(f"the exchange of transition {call.key} is corrupt: {why}. Restore the database from a backup")


def without_ids(reply: Body) -> bool:
    """Take the token ids out of a reply, in place; return whether there were any."""
    changed = _empty(reply, "prompt_token_ids")
    for choice in reply.get("choices") or ():
        changed |= _empty(choice, "prompt_token_ids") | _empty(choice, "token_ids")
    return changed


def _empty(holder: Body, name: str) -> bool:
    full = holder.get(name) is not None
    if full:
        holder[name] = []
    return full


def _put_ids_back(reply: Body, calls: Sequence[Transition]) -> None:
    """What `without_ids` took out, from the rows of the call's choices."""
    rows = {call.choice: call for call in calls}
    if reply.get("prompt_token_ids") == []:
        reply["prompt_token_ids"] = list(calls[0].prompt_ids)
    for choice in reply["choices"]:
        row = rows[choice.get("index", 0)]
        for name, ids in (("prompt_token_ids", row.prompt_ids), ("token_ids", row.response_ids)):
            if choice.get(name) == []:
                choice[name] = list(ids)
