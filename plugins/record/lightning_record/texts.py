"""The call stage that stores requests and replies: redact their texts, and pack them as differences from an earlier call of the
attempt or, in a branch, of its parent.

The invariant: a text is redacted before it is stored, and only once: a piece that came with an earlier call of the attempt is
not checked again. Memory is bounded; dropped entries only cost more bytes in the store.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from lightning.gateway.call import SHAPE_ERRORS
from lightning.gateway.http import Body, UpstreamError, write_object
from lightning.gateway.stages import CallStage
from lightning.redaction import may_be_redacted, redacted_json
from lightning.types import CallStatus, Transition, shared_prefix

from lightning_record import exchanges
from lightning_record.config import RecordConfig
from lightning_record.conversation import has_many_texts
from lightning_record.exchanges import NOBODY, TEXTS, WHOLE, Flag, Said, canonical, written

if TYPE_CHECKING:
    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
MOST_BODIES = 4
"""Most requests of an attempt that are kept as bases for later ones. Several are kept because agents may take turns."""
PIECE = 64
"""Estimated bytes of memory for the key of a piece."""
SHORT = 16 * 1024
"""Up to this many bytes, new text is redacted in the event loop, which is faster than in a thread."""

SMALLEST: Final = 1024
"""Least bytes of a piece of a request, except for the last one of a list."""
NESTED: Final = frozenset((dict, list))
Attempt = tuple[str, int]


class Piece(NamedTuple):
    """A part of a canonical request, from byte `start` to `stop`, that may come again in later requests: consecutive items of
    the list `name`, or fields if `name` is None. Equal pieces have equal `key`s."""

    name: str | None
    start: int
    stop: int
    key: int


class _Cutter:
    """Builds the text of a request and cuts it into pieces."""

    def __init__(self) -> None:
        self.text, self.pieces, self._start = bytearray(), list[Piece](), 0

    def add(self, name: str | None, part: bytes) -> None:
        """Add a part to the current piece, and end the piece if it is large enough."""
        self.text += part
        if len(self.text) - self._start >= SMALLEST:
            self.close(name)

    def add_all(self, name: str, items: Iterable[Any]) -> None:
        """Add the items of the list `name`."""
        parts, size = list[bytes](), 0
        for item in items:
            parts.append(part := canonical(item))
            if (size := size + len(part)) >= SMALLEST:
                self.add(name, b",".join(parts))
                parts, size = [b""], 0  # the next piece begins with a comma
        if size:
            self.add(name, b",".join(parts))
        self.close(name)

    def close(self, name: str | None, then: bytes = b"") -> None:
        """End the current piece, and write the text `then`, which belongs to no piece."""
        if (stop := len(self.text)) > self._start:
            key = hash((name, bytes(self.text[self._start : stop])))
            self.pieces.append(Piece(name, self._start, stop, key))
        self.text += then
        self._start = len(self.text)


def cut(body: Mapping[str, Any]) -> tuple[bytes, tuple[Piece, ...]]:
    """Return the canonical JSON of a request and its pieces. Small items share a piece, since each piece costs memory; a list
    of numbers or texts is never cut. Raises `RecursionError` for a request that is nested too deep."""
    made = _Cutter()
    made.close(None, b"{")
    for place, name in enumerate(sorted(body)):
        value, before = body[name], b"%b%b:" % (b"," if place else b"", canonical(name))
        if not isinstance(value, list) or NESTED.isdisjoint(map(type, value)):
            made.add(None, before + canonical(value))
            continue
        made.close(None, before + b"[")
        made.add_all(name, value)
        made.close(None, b"]")
    made.close(None, b"}")
    return bytes(made.text), tuple(made.pieces)


def as_object(request: bytes, piece: Piece) -> bytes:
    """Return a piece of a canonical request as a JSON object."""
    text = request[piece.start : piece.stop].removeprefix(b",")
    return b"{%b}" % text if piece.name is None else b"{%b:[%b]}" % (written(piece.name), text)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the agent sent it: its canonical JSON and the pieces of that; both empty if it is too large."""

    path: str
    request: bytes = b""
    pieces: Sequence[Piece] = ()


@dataclass(frozen=True, slots=True)
class Shown:
    """The answer that the agent gets: the status and the JSON of the whole reply, 0 and empty for a call that broke off.
    `has_ids` says that the agent asked for token ids."""

    status: int = 0
    reply: bytes = b""
    has_ids: bool = False


@dataclass(slots=True, eq=False)
class _Remembered:
    """The memory of an attempt: the keys of pieces without a credential, and its last calls, as bases for later ones."""

    clean: set[int] = field(default_factory=set)
    last: deque[Said] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class PackedExchange:
    """An exchange in its `stored` form; and request, reply and the keys of clean pieces, to remember after it is stored."""

    stored: bytes
    request: bytes
    reply: bytes
    clean: frozenset[int]


class Exchanges:
    """Packs the exchanges of all attempts. `wanted` is the setting `gateway.record_requests`."""

    def __init__(self, *, wanted: bool = True, most_bytes: int = MOST_BYTES) -> None:
        self._wanted, self._most = wanted, most_bytes
        self._attempts: OrderedDict[Attempt, _Remembered] = OrderedDict()
        self._bytes = 0
        # By `id`: branches at one call share the same objects, whose bytes are in memory once and must count once. Otherwise a
        # few dozen branches would push out all other attempts.
        self._holders: Counter[int] = Counter()
        # Not the loop's own threads: agents of the inline runner may occupy all of them while they wait for this answer.
        self._threads = ThreadPoolExecutor(1, "lightning-exchanges")

    def close(self) -> None:
        """Stop the thread."""
        self._threads.shutdown(wait=False)

    def asked(self, path: str, body: Body, size: int) -> Asked | None:
        """Take a request of `size` bytes before it is changed; None if it is not recorded."""
        if not self._wanted:
            return None
        try:
            return Asked(path) if size > exchanges.LARGEST else Asked(path, *cut(body))
        except RecursionError:  # the gateway refuses such a request later
            return None

    async def pack(self, attempt: Attempt, asked: Asked, shown: Shown) -> PackedExchange:
        """Redact and pack an exchange, so that it can be stored."""
        known = self._attempts.get(attempt) or _Remembered()
        # A copy, because other calls of the attempt may end while the thread works.
        new = tuple(piece for piece in asked.pieces if piece.key not in known.clean)
        bodies = tuple(known.last)
        if sum(piece.stop - piece.start for piece in new) + len(shown.reply) <= SHORT:
            return _pack(asked, new, shown, bodies)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _pack, asked, new, shown, bodies)

    def keep(self, attempt: Attempt, seq: int, packed: PackedExchange) -> None:
        """Remember a call that is now durable with this `seq`, as a base for later ones."""
        if packed.request:
            self._remember(attempt, [Said(seq, packed.request, packed.reply)], packed.clean)

    def inherit(self, attempt: Attempt, calls: Sequence[Said]) -> None:
        """Give a new attempt of a branch these calls of its parent as bases; the first ones are dropped first."""
        if self._wanted and attempt not in self._attempts:
            self._remember(attempt, calls, frozenset())

    def _remember(self, attempt: Attempt, calls: Sequence[Said], clean: frozenset[int]) -> None:
        known = self._attempts.setdefault(attempt, _Remembered())
        self._attempts.move_to_end(attempt)
        self._bytes -= PIECE * len(known.clean)
        known.clean |= clean
        self._bytes += PIECE * len(known.clean)
        for said in calls:
            self._hold(said)
            known.last.append(said)
        while len(known.last) > MOST_BODIES:
            self._let_go(known.last.popleft())
        while self._bytes > self._most:
            _, forgotten = self._attempts.popitem(last=False)
            self._bytes -= PIECE * len(forgotten.clean)
            for said in forgotten.last:
                self._let_go(said)

    def _hold(self, said: Said) -> None:
        self._holders[id(said)] += 1
        if self._holders[id(said)] == 1:
            self._bytes += len(said.request) + len(said.reply)

    def _let_go(self, said: Said) -> None:
        self._holders[id(said)] -= 1
        if not self._holders[id(said)]:
            del self._holders[id(said)]
            self._bytes -= len(said.request) + len(said.reply)


def _pack(asked: Asked, new: Sequence[Piece], shown: Shown, bodies: Sequence[Said]) -> PackedExchange:
    flags, request, reply = WHOLE, asked.request, shown.reply
    if not request:
        return _left_out(asked, shown)
    unlike = {piece.key: text for piece in new if may_be_redacted(text := as_object(request, piece))}
    if unlike and has_many_texts(json.loads(request)):
        return _left_out(asked, shown, Flag.REDACTED)
    dirty = {key for key, text in unlike.items() if not _is_clean(text)}
    if dirty:
        flags |= Flag.REDACTED
        request, _ = cut(_object(redacted_json(json.loads(request), "request")))
    unsure = bool(reply) and may_be_redacted(reply)
    if shown.has_ids or unsure:
        whole = json.loads(reply)
        if shown.has_ids and exchanges.without_ids(whole):
            flags |= Flag.IDS
        if unsure and has_many_texts(whole):
            return _left_out(asked, shown, Flag.REDACTED)
        told = redacted_json(whole, "reply") if unsure else whole
        flags |= Flag.REDACTED if told != whole else WHOLE
        reply = json.dumps(told).encode() if told != whole or shown.has_ids else reply
    # Among equally similar requests the last one counts: its reply is the one that this call continues.
    base = max(reversed(bodies), key=lambda said: shared_prefix(request, said.request), default=NOBODY)
    stored = exchanges.pack(asked.path, shown.status, request, reply, base, flags)
    if len(reply) > exchanges.LARGEST:
        return PackedExchange(stored, b"", b"", frozenset())
    return PackedExchange(stored, request, reply, frozenset(piece.key for piece in new) - dirty)


def _left_out(asked: Asked, shown: Shown, flags: Flag = WHOLE) -> PackedExchange:
    """Pack an exchange without its texts: only path, status and flags are kept."""
    stored = exchanges.pack(asked.path, shown.status, b"", b"", flags=Flag.TOO_LARGE | flags)
    return PackedExchange(stored, b"", b"", frozenset())


def _is_clean(piece: bytes) -> bool:
    said = json.loads(piece)
    return bool(redacted_json(said, "request") == said)


def _object(value: Any) -> Body:
    assert isinstance(value, dict), "an object stays one"
    return value


def as_json(body: bytes) -> bytes:
    """Return a refusal's body as JSON. One that is not JSON, such as a proxy's plain text, becomes a JSON string."""
    try:
        json.loads(body)
    except ValueError:
        return json.dumps(body.decode("utf-8", "replace")).encode()
    return body


class WholeReply:
    """Puts the chunks of a stream of chat or text completions together, to the answer that would come without `stream`."""

    def __init__(self) -> None:
        self._head: Body = {}
        self._choices: dict[int, Body] = {}

    def add(self, chunk: Body) -> None:
        """Add a chunk as the agent sees it. Raises `UpstreamError` if its shape is wrong."""
        well_shaped(partial(self._add, chunk))

    def _add(self, chunk: Body) -> None:
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._head):
                self._head[name] = value
        for said in chunk.get("choices") or ():
            choice = self._choices.setdefault(said.get("index", 0), {})
            _merge(choice, {"message" if name == "delta" else name: value for name, value in said.items()})

    def whole(self) -> Body:
        """The answer from all chunks so far."""
        kind = str(self._head.get("object", "")).removesuffix(".chunk")
        return {**self._head, "object": kind, "choices": [_joined(self._choices[at]) for at in sorted(self._choices)]}


Made = TypeVar("Made")


def well_shaped(make: Callable[[], Made]) -> Made:
    """Call `make`, which reads a policy server's answer, and return its result. Raises `UpstreamError` if the answer does not
    have vLLM's shape."""
    try:
        return make()
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its answer is not shaped like vLLM's ({error!r})") from error


class TextsStage(CallStage):
    """The call stage that stores request and reply of each call in its extras."""

    api, after = 1, ("history",)

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self._asked: WeakKeyDictionary[Call, tuple[Asked, WholeReply]] = WeakKeyDictionary()
        self._packed: WeakKeyDictionary[Call, PackedExchange] = WeakKeyDictionary()

    def inherit(self, attempt: Attempt, calls: Sequence[Said]) -> None:
        """Give a new attempt of a branch these calls of its parent as bases (`Exchanges.inherit`)."""
        self.exchanges.inherit(attempt, calls)

    def reading(self, call: Call, request: Request) -> None:
        """Take the request as the agent sent it, before other stages change it."""
        asked = self.exchanges.asked(call.dialect.path, request.body, len(request.payload))
        if asked is not None:
            self._asked[call] = asked, WholeReply()

    async def sending(self, call: Call, body: Body) -> None:
        """Collect the chunks of a stream that the agent gets."""
        if call.sent.plan.stream and call.sent.translator is None and (asked := self._asked.get(call)) is not None:
            call.readers.append(asked[1].add)

    async def settled(self, call: Call, answer: Answer) -> None:
        """Pack request and reply into the call's extras. An error here is logged, and the call is stored and answered without
        them."""
        if (known := self._asked.get(call)) is None:
            return
        asked, streamed = known
        shown = _shown(call, answer, streamed)
        try:
            packed = await self.exchanges.pack(call.attempt, asked, shown)
        except Exception:
            log.exception("request and reply of a call of %s are not recorded", call.claims.rollout)
        else:
            self._packed[call], call.extras[TEXTS] = packed, packed.stored

    async def kept(self, call: Call, transitions: Sequence[Transition]) -> None:
        """Remember the stored call as a base for later ones."""
        if (packed := self._packed.pop(call, None)) is not None:
            self.exchanges.keep(call.attempt, transitions[0].seq, packed)


def stage(parts: Parts) -> TextsStage | None:
    """Make the stage; None if `gateway.record_requests` is false."""
    if not RecordConfig.of(parts.config).record_requests:
        return None
    exchanges = Exchanges()
    parts.closing.callback(exchanges.close)
    return TextsStage(exchanges)


def _shown(call: Call, answer: Answer, streamed: WholeReply) -> Shown:
    """Return the answer that the agent gets. Raises `UpstreamError` if a stream does not have vLLM's shape."""
    if not answer.status:
        return Shown()
    has_ids = call.sent.plan.keep_ids
    if not call.started:
        body = answer.body if answer.outcome is CallStatus.OK else as_json(answer.body)
        return Shown(answer.status, body, has_ids)
    if answer.outcome is not CallStatus.OK:
        return Shown()
    whole = well_shaped(streamed.whole if call.sent.translator is None else call.sent.translator.answer)
    return Shown(answer.status, write_object(whole), has_ids)


ONCE = frozenset({"id", "type", "role", "name", "finish_reason", "stop_reason"})
"""Fields of a chunk whose text is not appended to the text of the chunks before."""


class _Texts(list[str]):
    """The pieces so far of a text in a stream."""


class _Numbered(dict[int, Any]):
    """The items so far of a list in a stream, by the `index` that each has."""


def _merge(into: Body, said: Body) -> None:
    for name, value in said.items():
        before = into.get(name) or None  # an empty list counts as None
        if value is None or value == []:
            into.setdefault(name, value)
        elif isinstance(value, str) and name not in ONCE:
            into[name] = _Texts((value,)) if before is None else before
            if before is not None:
                before.append(value)
        elif isinstance(value, dict):
            if before is None:
                into[name] = {}
            _merge(into[name], value)
        elif isinstance(value, list) and value and isinstance(value[0], dict) and "index" in value[0]:
            items = into[name] = _Numbered() if before is None else before
            for item in value:
                _merge(items.setdefault(item["index"], {}), {key: each for key, each in item.items() if key != "index"})
        elif isinstance(value, list):
            into[name] = [*value] if before is None else before
            if before is not None:
                before.extend(value)
        elif value or before is None:
            into[name] = value


def _joined(value: Any) -> Any:
    if isinstance(value, _Texts):
        return "".join(value)
    if isinstance(value, _Numbered):
        return [_joined(value[place]) for place in sorted(value)]
    if isinstance(value, dict):
        return {name: _joined(item) for name, item in value.items()}
    return value
