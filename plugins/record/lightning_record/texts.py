"""What agents send and get, on its way into the store: redacted, and told against an earlier call of the attempt, or, in a
branch, of its parent.

The invariant: a text passes the redaction before it is stored, once: what came with an earlier call of the attempt is not
looked through again. What is remembered never exceeds a fixed number of bytes; what is forgotten costs bytes in the store.
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
from lightning.redaction import has_many_texts, may_be_redacted, redacted_json
from lightning.types import CallStatus, Transition, shared_prefix

from lightning_record import exchanges
from lightning_record.exchanges import NOBODY, TEXTS, WHOLE, Flag, Said, canonical, written

if TYPE_CHECKING:
    from lightning.gateway.call import Answer, Call, Request
    from lightning.gateway.calls import Parts

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
MOST_BODIES = 4
"""Requests of an attempt that a later one may be told against: those of agents that take turns."""
PIECE = 64
"""Bytes that the key of a piece takes."""
SHORT = 16 * 1024
"""Bytes of new text up to which it is looked through where the calls are answered, since that takes less than a thread."""

SMALLEST: Final = 1024
"""Bytes of a piece of a request, but for the last ones of a list."""
NESTED: Final = frozenset((dict, list))
Attempt = tuple[str, int]


class Piece(NamedTuple):
    """What stands side by side in a canonical request and comes again in later ones, from byte `start` to `stop`: items of the
    list `name`, or fields where that is None. `key` is equal for equal ones."""

    name: str | None
    start: int
    stop: int
    key: int


class _Cutter:
    """Joins a request's text and cuts it into pieces."""

    def __init__(self) -> None:
        self.text, self.pieces, self._start = bytearray(), list[Piece](), 0

    def add(self, name: str | None, part: bytes) -> None:
        """A part of the piece that is being made."""
        self.text += part
        if len(self.text) - self._start >= SMALLEST:
            self.close(name)

    def add_all(self, name: str, items: Iterable[Any]) -> None:
        """The items of a list."""
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
        """The piece ends here. What is written `then` belongs to none."""
        if (stop := len(self.text)) > self._start:
            key = hash((name, bytes(self.text[self._start : stop])))
            self.pieces.append(Piece(name, self._start, stop, key))
        self.text += then
        self._start = len(self.text)


def cut(body: Mapping[str, Any]) -> tuple[bytes, tuple[Piece, ...]]:
    """The canonical JSON of a request, and its pieces: one for each list of numbers or texts, and few for many small items,
    since each costs memory of its own. Raises `RecursionError` for what is nested too deep."""
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
    """A piece of a canonical request as a JSON object."""
    text = request[piece.start : piece.stop].removeprefix(b",")
    return b"{%b}" % text if piece.name is None else b"{%b:[%b]}" % (written(piece.name), text)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the agent sent it: its canonical JSON, and the pieces of that; empty where it is too large."""

    path: str
    request: bytes = b""
    pieces: Sequence[Piece] = ()


@dataclass(frozen=True, slots=True)
class Shown:
    """What the agent is shown of its call: the status, and the JSON of the whole answer, empty for a call that broke off.
    `has_ids` says that it asked for token ids."""

    status: int = 0
    reply: bytes = b""
    has_ids: bool = False


@dataclass(slots=True, eq=False)
class _Remembered:
    """What is remembered of an attempt: which pieces need not be looked through again, and its last requests."""

    clean: set[int] = field(default_factory=set)
    last: deque[Said] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class PackedExchange:
    """An exchange as it is stored, and what is to be remembered of it once it is."""

    stored: bytes
    request: bytes
    reply: bytes
    clean: frozenset[int]


class Exchanges:
    """Packs the exchanges of all attempts. `wanted` is `gateway.record_requests`."""

    def __init__(self, *, wanted: bool = True, most_bytes: int = MOST_BYTES) -> None:
        self._wanted, self._most = wanted, most_bytes
        self._attempts: OrderedDict[Attempt, _Remembered] = OrderedDict()
        self._bytes = 0
        # By `id`: the branches of one call are given the same objects, so that their bytes are there once and count once. With
        # each attempt's share counted whole, a few dozen branches would drive out all other attempts.
        self._holders: Counter[int] = Counter()
        # Not the loop's own threads: agents of the inline runner may hold all of them, and wait for this answer.
        self._threads = ThreadPoolExecutor(1, "lightning-exchanges")

    def close(self) -> None:
        """Let go of the thread."""
        self._threads.shutdown(wait=False)

    def asked(self, path: str, body: Body, size: int) -> Asked | None:
        """A request of so many bytes, before anybody changes it; None where it is not to be recorded."""
        if not self._wanted:
            return None
        try:
            return Asked(path) if size > exchanges.LARGEST else Asked(path, *cut(body))
        except RecursionError:  # whoever passes it on refuses it
            return None

    async def pack(self, attempt: Attempt, asked: Asked, shown: Shown) -> PackedExchange:
        """The exchange, ready to be stored."""
        known = self._attempts.get(attempt) or _Remembered()
        # A tuple now: other calls of the attempt end while a thread is at work.
        new = tuple(piece for piece in asked.pieces if piece.key not in known.clean)
        bodies = tuple(known.last)
        if sum(piece.stop - piece.start for piece in new) + len(shown.reply) <= SHORT:
            return _pack(asked, new, shown, bodies)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _pack, asked, new, shown, bodies)

    def keep(self, attempt: Attempt, seq: int, packed: PackedExchange) -> None:
        """The call is durable under this number: later ones may be told against it."""
        if packed.request:
            self._remember(attempt, [Said(seq, packed.request, packed.reply)], packed.clean)

    def inherit(self, attempt: Attempt, calls: Sequence[Said]) -> None:
        """An attempt of a branch begins: its calls may be told against these of its parent, of which the first are forgotten
        first."""
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
    # Of equal requests the last one: its reply is what this call goes on with.
    base = max(reversed(bodies), key=lambda said: shared_prefix(request, said.request), default=NOBODY)
    stored = exchanges.pack(asked.path, shown.status, request, reply, base, flags)
    if len(reply) > exchanges.LARGEST:
        return PackedExchange(stored, b"", b"", frozenset())
    return PackedExchange(stored, request, reply, frozenset(piece.key for piece in new) - dirty)


def _left_out(asked: Asked, shown: Shown, flags: Flag = WHOLE) -> PackedExchange:
    """That there was a call is all that is kept."""
    stored = exchanges.pack(asked.path, shown.status, b"", b"", flags=Flag.TOO_LARGE | flags)
    return PackedExchange(stored, b"", b"", frozenset())


def _is_clean(piece: bytes) -> bool:
    said = json.loads(piece)
    return bool(redacted_json(said, "request") == said)


def _object(value: Any) -> Body:
    assert isinstance(value, dict), "an object stays one"
    return value


def as_json(body: bytes) -> bytes:
    """A refusal's body as JSON: a policy server's proxy may say it in plain text."""
    try:
        json.loads(body)
    except ValueError:
        return json.dumps(body.decode("utf-8", "replace")).encode()
    return body


class WholeReply:
    """A stream of chat or text completions put together: the answer that would have been sent without `stream`."""

    def __init__(self) -> None:
        self._head: Body = {}
        self._choices: dict[int, Body] = {}

    def add(self, chunk: Body) -> None:
        """Take what the agent sees of a chunk. Raises `UpstreamError` for one of another shape."""
        well_shaped(partial(self._add, chunk))

    def _add(self, chunk: Body) -> None:
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._head):
                self._head[name] = value
        for said in chunk.get("choices") or ():
            choice = self._choices.setdefault(said.get("index", 0), {})
            _merge(choice, {"message" if name == "delta" else name: value for name, value in said.items()})

    def whole(self) -> Body:
        """All of it so far."""
        kind = str(self._head.get("object", "")).removesuffix(".chunk")
        return {**self._head, "object": kind, "choices": [_joined(self._choices[at]) for at in sorted(self._choices)]}


Made = TypeVar("Made")


def well_shaped(make: Callable[[], Made]) -> Made:
    """What is made of an answer that was read. Raises `UpstreamError` where it was not shaped like vLLM's."""
    try:
        return make()
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its answer is not shaped like vLLM's ({error!r})") from error


class TextsStage(CallStage):
    """What the agent sends and gets is stored with its call."""

    api, after = 1, ("history",)
    carries_out = ("record_requests",)

    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges
        self._asked: WeakKeyDictionary[Call, tuple[Asked, WholeReply]] = WeakKeyDictionary()
        self._packed: WeakKeyDictionary[Call, PackedExchange] = WeakKeyDictionary()

    def inherit(self, attempt: Attempt, calls: Sequence[Said]) -> None:
        """An attempt of a branch begins: see `Exchanges.inherit`."""
        self.exchanges.inherit(attempt, calls)

    def reading(self, call: Call, request: Request) -> None:
        """Keep the request as the agent sent it."""
        asked = self.exchanges.asked(call.dialect.path, request.body, len(request.payload))
        if asked is not None:
            self._asked[call] = asked, WholeReply()

    async def sending(self, call: Call, body: Body) -> None:
        """Read the stream that the agent gets."""
        if call.sent.plan.stream and call.sent.translator is None and (asked := self._asked.get(call)) is not None:
            call.readers.append(asked[1].add)

    async def settled(self, call: Call, answer: Answer) -> None:
        """Pack the request and the answer. A call is stored and answered whatever is wrong with the text of its request."""
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
        """Later calls may be told against it."""
        if (packed := self._packed.pop(call, None)) is not None:
            self.exchanges.keep(call.attempt, transitions[0].seq, packed)


def stage(parts: Parts) -> TextsStage | None:
    """The stage; None where the settings keep no texts."""
    if not parts.config.record_requests:
        return None
    exchanges = Exchanges()
    parts.closing.callback(exchanges.close)
    return TextsStage(exchanges)


def _shown(call: Call, answer: Answer, streamed: WholeReply) -> Shown:
    """What the agent is shown of its call. Raises `UpstreamError`."""
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
"""Texts of a chunk that are not added to those of the chunks before."""


class _Texts(list[str]):
    """A text whose pieces are still coming."""


class _Numbered(dict[int, Any]):
    """A list whose items say their places."""


def _merge(into: Body, said: Body) -> None:
    for name, value in said.items():
        before = into.get(name) or None  # an empty list says no more than none
        if value is None or value == []:
            into.setdefault(name, value)
        elif isinstance(value, str) and name not in ONCE:
            into[name] = _Texts((value,)) if before is None else before
            if before is not None:
                before.append(value)
        elif isinstance(value, dict):
            _merge(into.setdefault(name, {}) if before is not None else _fresh(into, name), value)
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


def _fresh(into: Body, name: str) -> Body:
    made: Body = {}
    into[name] = made
    return made


def _joined(value: Any) -> Any:
    if isinstance(value, _Texts):
        return "".join(value)
    if isinstance(value, _Numbered):
        return [_joined(value[place]) for place in sorted(value)]
    if isinstance(value, dict):
        return {name: _joined(item) for name, item in value.items()}
    return value
