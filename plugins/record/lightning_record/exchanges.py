"""Pack the exchange of a model call (the agent's request and the reply it got) into few bytes, and read it back.

The invariant: `read` returns exactly the JSON that was packed, numbers digit by digit. A request is stored as its difference
from the request of an earlier call of the attempt or, in a branch, of its parent. If that base call is missing, changed or
unreadable, `StoreError` is raised and no other request is ever returned; for a missing or changed call of the parent it is a
`ParentGoneError`, and everything else of the branch is still there.

Layout, little-endian: a byte for the version, a byte of `Flag`s, the `seq` of the base call or -1 (int32), with `OF_PARENT` the
CRC-32 of that call's request and reply (uint32), then a zstandard frame with a line of JSON (API path, status, numbers of bytes
of the request shared with the base at the beginning and at the end, number of bytes that differ), the bytes that differ, and
the reply. The base call's reply is the frame's dictionary, since an agent mostly sends back what the model said.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import orjson
import zstandard
from lightning.errors import ParentGoneError, StoreError
from lightning.installation import other_format
from lightning.memory_budget import compact
from lightning.store.protocol import Store
from lightning.types import Json, Rollout, ToolEvent, Transition, shared_prefix

if TYPE_CHECKING:
    from lightning.batch import Trajectory

TEXTS: Final = "texts"
"""The name under which an exchange is stored in a call's extras."""
VERSION: Final = 1
LEVEL: Final = 1
LARGEST: Final = 4 << 20
"""Most bytes of a request, and of a reply; an exchange with a larger one is stored without both."""
LARGEST_FRAME: Final = 2 * LARGEST + (64 << 10)
"""Most bytes of an unpacked frame: a request, a reply, and the line of JSON."""
LARGEST_DICTIONARY: Final = 32 << 10
_HEAD: Final = struct.Struct("<BBi")
_CHECK: Final = struct.Struct("<I")
DAMAGED: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    struct.error,
    zstandard.ZstdError,
)
"""Exceptions that reading a damaged exchange may raise."""
_LOST: Final = "The texts of the branch cannot be read any more; its tokens and rewards are still there"
Body: TypeAlias = "dict[str, Any]"


class Flag(IntFlag):
    """Facts about an exchange: why it is not whole, and how it must be read."""

    REDACTED = 1
    TOO_LARGE = 2
    IDS = 4
    """The reply had token ids, which are stored in the call's row and put back when the reply is read."""
    OF_PARENT = 8
    """The base call belongs to the parent's attempt, not to this one."""


WHOLE: Final = Flag(0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call as the agent saw it. `path` is the API's path below `/v1`; `reply` is None and `status` 0 if no whole reply was
    sent.

    A streamed reply is given as the whole answer that its chunks add up to. `redacted` says that a credential was removed,
    `too_large` that request and reply were left out for their size: such a call cannot be replayed.
    """

    path: str
    request: Json
    reply: Json = None
    status: int = 0
    redacted: bool = False
    too_large: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """The canonical request and the reply of a stored call, as a base to pack later calls against. `of_parent` says that the
    later call belongs to a branch, and this one to its parent."""

    seq: int
    request: bytes
    reply: bytes
    of_parent: bool = False

    @property
    def check(self) -> bytes:
        """The checksum that tells this call from another of the same number, since a parent may be deleted and made again."""
        return _CHECK.pack(zlib.crc32(self.reply, zlib.crc32(self.request)))


NOBODY: Final = Said(-1, b"", b"")


class Parent(NamedTuple):
    """The parent of a branch: its rollout's id, and all calls of the attempt that the branch continues; empty if they are not
    in the store."""

    rollout: str
    calls: Sequence[Transition] = ()


def canonical(value: Any) -> bytes:
    """Encode a value as JSON that is equal for equal values: sorted names, no spaces. Raises `RecursionError` if it is nested
    too deep."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # lone surrogates, whole numbers of more than 64 bits, nesting
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def written(value: Any) -> bytes:
    """Return the canonical JSON of a value, compact in memory for keeping."""
    return compact(canonical(value))


def pack(path: str, status: int, request: bytes, reply: bytes, base: Said = NOBODY, flags: Flag = WHOLE) -> bytes:
    """Pack an exchange as its difference from the earlier call `base`. If it is too large, only path and status are kept."""
    if len(request) > LARGEST or len(reply) > LARGEST:
        request = reply = b""
        base, flags = NOBODY, flags | Flag.TOO_LARGE
    start = shared_prefix(request, base.request)
    end = shared_prefix(request[start:][::-1], base.request[start:][::-1])
    middle = request[start : len(request) - end]
    if not start + end:
        base = NOBODY
    before = _HEAD.pack(VERSION, flags, base.seq)
    if base.of_parent:
        before = _HEAD.pack(VERSION, flags | Flag.OF_PARENT, base.seq) + base.check
    head = orjson.dumps([path, status, start, end, len(middle)])
    packer = zstandard.ZstdCompressor(level=LEVEL, dict_data=_dictionary(base))
    return before + packer.compress(b"".join((head, b"\n", middle, reply)))


def _dictionary(base: Said) -> zstandard.ZstdCompressionDict | None:
    said = base.reply[:LARGEST_DICTIONARY]
    return zstandard.ZstdCompressionDict(said, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if len(said) >= 8 else None


def packed_in(call: Transition) -> bytes | None:
    """Return the packed exchange of a call; None if none is recorded."""
    return call.extras.get(TEXTS)


def flags_of(call: Transition) -> Flag:
    """Return the flags of a call's exchange, without unpacking it; no flags if it is not recorded."""
    packed = packed_in(call)
    return Flag(packed[1]) if packed is not None and len(packed) >= _HEAD.size else WHOLE


def why_not_replayable(calls: Sequence[Transition], tool_events: Sequence[ToolEvent]) -> str:
    """Say why an attempt cannot be replayed from its record; empty if it can. Exchanges are not unpacked."""
    if any(packed_in(call) is None for call in calls if call.status.answered and call.choice == 0):
        return "requests were not recorded: gateway.record_requests was false, or no plugin kept them"
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


async def parents_of(
    store: Store, rollouts: Sequence[Rollout], known: Mapping[tuple[str, int], Sequence[Transition]] | None = None
) -> list[Parent | None]:
    """Return, for each of these rollouts, the parent that is needed to read its exchanges; None if it is not a branch. `known`
    has the calls of attempts that were read already."""
    calls = dict(known or {})
    keys = [None if rollout.parent is None else rollout.parent[:2] for rollout in rollouts]
    unknown = [key for key in dict.fromkeys(keys) if key is not None and key not in calls]
    there = [key for key in unknown if await store.get_rollout(key[0]) is not None]
    calls |= zip(there, await store.transitions_of(there) if there else (), strict=True)
    return [None if key is None else Parent(key[0], calls.get(key, ())) for key in keys]


def parent_of(member: Trajectory) -> Parent | None:
    """Return the parent of a trajectory, as `parents_of` does, from the parent's calls that the trajectory has."""
    parent = member.rollout.parent
    return None if parent is None else Parent(parent[0], member.parent_calls)


def read(calls: Sequence[Transition], parent: Parent | None = None) -> list[Exchange | None]:
    """Read the exchange of each call of an attempt; None for a call without one. `calls` must be all calls of the attempt; a
    branch also needs its `parent` (`parents_of`).

    Raises `ParentGoneError` for a branch whose parent was removed or made again, `StoreError` for any other exchange that
    cannot be read.
    """
    reader = _Reader(calls, parent)
    return [reader.exchange(call) for call in calls]


def said_in_parent(calls: Sequence[Transition], numbers: Iterable[int]) -> list[Said]:
    """Return the calls of a rollout with these `seq` as bases to pack calls of its branches against. Raises `StoreError` for a
    call that cannot be read, `KeyError` for one that is not recorded."""
    reader = _Reader(calls, None)
    return [replace(reader.said(number), of_parent=True) for number in numbers]


class _Unpacked(NamedTuple):
    path: str
    status: int
    flags: Flag
    said: Said


class _Reader:
    """Reads the exchanges of one attempt. A call's base may have a higher number, if it ended before the call did."""

    def __init__(self, calls: Sequence[Transition], parent: Parent | None) -> None:
        self._calls, self._parent = calls, parent
        self._above = _Reader(parent.calls, None) if parent is not None else None
        self._packed = {call.seq: call for call in calls if packed_in(call) is not None}
        self._found: dict[int, _Unpacked] = {}

    def exchange(self, call: Transition) -> Exchange | None:
        """Return the exchange of a call; None if none is recorded."""
        if packed_in(call) is None:
            return None
        with _corrupt(call):
            path, status, flags, said = self._unpacked(call.seq)
            redacted = bool(flags & Flag.REDACTED)
            if flags & Flag.TOO_LARGE:
                return Exchange(path, None, None, status, redacted, too_large=True)
            reply: Any = json.loads(said.reply) if said.reply else None
            if flags & Flag.IDS:
                _put_ids_back(reply, [each for each in self._calls if each.id == call.id])
            return Exchange(path, json.loads(said.request), reply, status, redacted)

    def said(self, seq: int) -> Said:
        """Return request and reply of the call with this number. Raises `KeyError` if none is recorded."""
        for call in self._calls:  # in order: a call's base mostly comes before it, so that no recursion is deep
            if call.seq in self._packed:
                self._unpacked(call.seq)
            if call.seq == seq:
                break
        return self._found[seq].said

    def _unpacked(self, seq: int) -> _Unpacked:
        """Unpack a call's exchange once. Raises `KeyError` if none is recorded, `RecursionError` for a circle of bases."""
        if seq not in self._found:
            call = self._packed[seq]
            with _corrupt(call):
                self._found[seq] = self._unpack(call)
        return self._found[seq]

    def _unpack(self, call: Transition) -> _Unpacked:
        packed = packed_in(call)
        assert packed is not None, "asked of calls that have one"
        version, number, before = _HEAD.unpack_from(packed)
        if version != VERSION:
            raise StoreError(
                other_format(f"the exchange of transition {call.key} has form {version}", f"form {VERSION}")
            )
        flags, body, base = Flag(number), packed[_HEAD.size :], NOBODY
        if flags & Flag.OF_PARENT:
            body, base = body[_CHECK.size :], self._of_parent(call, before, body[: _CHECK.size])
        elif before >= 0:
            base = self._unpacked(before).said
        if not 0 <= zstandard.frame_content_size(body) <= LARGEST_FRAME:
            raise StoreError(f"the exchange of transition {call.key} would have more than {LARGEST_FRAME} bytes")
        text = zstandard.ZstdDecompressor(dict_data=_dictionary(base)).decompress(body)
        head, _, rest = text.partition(b"\n")
        path, status, start, end, length = json.loads(head)
        request = base.request[:start] + rest[:length] + base.request[len(base.request) - end :]
        return _Unpacked(path, status, flags, Said(call.seq, request, rest[length:]))

    def _of_parent(self, call: Transition, seq: int, check: bytes) -> Said:
        """Return the parent's call with this number as a base. Raises `ParentGoneError` if it is missing or not the call that
        `call` was packed against."""
        told = f"the exchange of transition {call.key} is stored as its difference from call {seq} of its parent"
        if self._parent is None or self._above is None:
            raise StoreError(f"{told}: it is read with that one's calls (`lightning_record.exchanges.parents_of`)")
        name, calls = self._parent
        if not calls:
            raise ParentGoneError(
                f"{told} {name}, whose calls are not in the store any more: `lightning db prune` removed them, or the whole "
                f"run of {name}. {_LOST}; only a backup made before that has the texts"
            )
        there = next((each for each in calls if each.seq == seq), None)
        if there is not None and packed_in(there) is None and there.status.answered and not there.choice:
            raise ParentGoneError(
                f"{told} {name}, of which no request is recorded now: {name} was removed and made again with "
                f"gateway.record_requests = false. {_LOST}. For texts that can be read, record requests and branch again"
            )
        if (
            there is None
            or packed_in(there) is None
            or any(
                flags_of(each) & Flag.OF_PARENT for each in calls
            )  # a branch, which has no branches: another rollout
            or self._above.said(seq).check != check
        ):
            raise ParentGoneError(
                f"{told} {name}, and that is another call now: {name} was removed and made again, or the database was edited. "
                f"{_LOST}. For texts that can be read, branch again"
            )
        return self._above.said(seq)


@contextmanager
def _corrupt(call: Transition) -> Iterator[None]:
    """Turn the errors of reading a damaged exchange into a `StoreError`."""
    try:
        yield
    except DAMAGED as error:
        why = f"the call {error} that it builds on has no exchange" if isinstance(error, KeyError) else str(error)
        raise StoreError(
            f"the exchange of transition {call.key} is corrupt: {why}. Restore the database from a backup"
        ) from error


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
    """Put the token ids that `without_ids` removed back into a reply, from the rows of the call's choices."""
    rows = {call.choice: call for call in calls}
    if reply.get("prompt_token_ids") == []:
        reply["prompt_token_ids"] = list(calls[0].prompt_ids)
    for choice in reply["choices"]:
        row = rows[choice.get("index", 0)]
        for name, ids in (("prompt_token_ids", row.prompt_ids), ("token_ids", row.response_ids)):
            if choice.get(name) == []:
                choice[name] = list(ids)
