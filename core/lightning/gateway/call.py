"""A model call as one object, from the agent's request to the durable transition, and its parts: reading the answer, numbering
the call, and storing it.

The invariant: each phase adds one typed result and changes no result of an earlier phase: the agent's `Request`, what was
`Sent` to the policy server, its `Answer`, and the stored transitions. A `Request` holds the bytes of the body, which may be
megabytes, so it is dropped when the call has been sent.

An answer is read whole, or as a stream that is passed on at the same time. The bytes that complete a stream are returned and
not sent. Anything that does not have the shape of vLLM's answers ends the call with an `UpstreamError`, and no other error.

`(rollout, attempt, seq)` is given to one choice of one call, in the order in which calls began. `append` returns when the store
has the transitions. Nothing is kept of a finished call. The counter of an idle attempt is forgotten, because the store knows
the next number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import orjson
from starlette.types import Scope, Send

from lightning.bounded import Bounded
from lightning.errors import ConflictError, StaleAttemptError, StoreError
from lightning.gateway.dialects import Capture, Choice, Dialect, Plan, Translator, error_text, has_negative
from lightning.gateway.http import (
    JSON_TYPE,
    LONGEST_EVENT,
    SHORTER,
    Body,
    EventCutter,
    Header,
    RefusalError,
    UpstreamError,
    data_of,
    error_of,
    event_of,
    told_of_length,
    told_of_tools,
    write_object,
)
from lightning.gateway.identity import MODEL, Claims
from lightning.gateway.policy import LiveCall, Policy
from lightning.policy_server.packed_logprobs import HEADER, IDS_HEADER, WANTED
from lightning.redaction import redacted
from lightning.safe_text import printable
from lightning.store.protocol import Store
from lightning.types import EXPIRED, POLICY, UNSERVED, Caller, CallStatus, Transition, logprobs, token_ids

log = logging.getLogger(__name__)

LONGEST_STREAM = 256 << 20
"""The most bytes of a stream."""
SHAPE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""The exceptions of reading an answer that does not have the shape of vLLM's answers."""
COUNTERS = 8192
"""The most attempts whose counters are kept, and the most expired keys that are remembered."""
CONFLICT_RETRIES = 5
STORE_FAILED = "store_failed"
LONGEST_ERROR = 2000
"""The most characters that are stored of the error of a refused call, which may quote the request."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of an agent. `body` is the JSON object of `payload` and must not be changed. `model` is the model that the
    agent names, of any type."""

    scope: Scope
    payload: bytes
    body: Body
    model: object


@dataclass(frozen=True, slots=True)
class Sent:
    """The request to the policy server: its body and the fields of the answer that the agent asked for (`plan`), the
    `translator` of the answer (None: not translated), the call's numbers in the store (`ticket`), and the call as the policy
    tracks it (`live`)."""

    plan: Plan
    translator: Translator | None
    ticket: Ticket
    live: LiveCall


@dataclass(slots=True)
class Answer:
    """The answer to a call. `body` is all of it, or the last bytes of a stream. `status` is the HTTP status; 0 if the agent
    gets no answer."""

    status: int
    body: bytes = b""
    headers: list[Header] = field(default_factory=list)
    outcome: CallStatus = CallStatus.OK


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """One model call.

    When the call is admitted it has its `dialect`, the `caller`, the `claims` of its key, and the `policy` that answers. At
    `admitted` a stage may set `claims`, `policy`, `before` (chat messages in front of the request's), `id_mark` (the beginning
    of the answer's id), `lineage` (the attempt whose earlier responses the request may continue), and, in a run with several
    policies, the `policy_name` of the one that answers and whether it is `frozen`: never trained. Until the call is stored a
    stage may set `untrained`, the reason why the call is not trained (`lightning.types.read_reason`); it is the agent's own if
    the agent gave one. `rejects` are the earlier calls of the attempt that the agent rejected, with the reasons.

    `withheld` says why the agent gets a stream in one piece after its versions are settled ("a branch"); empty for a stream
    that is passed on as it comes. `readers` get each chunk of a stream as the agent sees it. An exception of a reader is a
    failure of its stage, except an `UpstreamError` for a chunk of another shape. `extras` are stored with the call, by the
    plugin's name.

    `started` says that the first bytes of the answer have been sent. `stopped_by` is the stage that refused the call or failed
    on it.
    """

    dialect: Dialect
    caller: Caller
    claims: Claims
    find_policy: Callable[[], Policy]
    headers: list[tuple[str, str]]
    before: Sequence[Body] = ()
    id_mark: str = ""
    lineage: tuple[str, int] | None = None
    policy_name: str = POLICY
    frozen: bool = False
    withheld: str = ""
    readers: list[Callable[[Body], None]] = field(default_factory=list)
    extras: dict[str, bytes] = field(default_factory=dict)
    untrained: str = ""
    rejects: Mapping[str, str] = field(default_factory=dict)
    started: bool = False
    stopped_by: str = ""
    _policy: Policy | None = None
    _sent: Sent | None = None

    @property
    def policy(self) -> Policy:
        """The policy whose servers answer the call. Raises `RefusalError` if there is none for it."""
        if self._policy is None:
            self._policy = self.find_policy()
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def attempt(self) -> tuple[str, int]:
        """The rollout and the attempt of the call."""
        return self.claims.rollout, self.claims.attempt

    @property
    def is_planned(self) -> bool:
        """Whether the request to the policy server is made, so that the call has its numbers in the store."""
        return self._sent is not None

    @property
    def sent(self) -> Sent:
        """The request to the policy server. Raises `LookupError` before it is made."""
        if self._sent is None:
            raise LookupError("the call has not been planned: a stage looks at `call.sent` from `sending` on")
        return self._sent

    @sent.setter
    def sent(self, sent: Sent) -> None:
        self._sent = sent

    @property
    def capture(self) -> Capture:
        """The answer as read so far."""
        return self.sent.live.capture

    @property
    def wants_packed(self) -> bool:
        """Whether vLLM may send logprobs as packed numbers, because only the store needs them, and only those of sampled
        tokens."""
        body = self.sent.plan.body
        others = body.get("echo") or body.get("logprob_token_ids") or body.get("prompt_logprobs") is not None
        return not (self.sent.plan.keep_logprobs or others)

    @property
    def packing(self) -> list[tuple[str, str]]:
        """The headers that ask vLLM to pack what the agent does not get as it came: logprobs, and the prompt's ids."""
        keeps_ids = self.sent.plan.keep_ids and self.sent.translator is None
        wanted = {HEADER: self.wants_packed, IDS_HEADER: not keeps_ids}
        return [(name, WANTED) for name, yes in wanted.items() if yes]


# the answer -------------------------------------------------------------------------------------------------------
def read_whole(call: Call, response: aiohttp.ClientResponse, payload: bytes) -> Answer:
    """Read vLLM's answer to a call that is not a stream, and return the agent's answer. Raises `UpstreamError` for an answer of
    another shape."""
    if response.status != 200:
        headers = [(b"content-type", response.content_type.encode()), _id_header(call)]
        outcome = CallStatus.ERROR if response.status >= 500 else CallStatus.REFUSED
        if response.status == 400:
            payload = told_of_length(payload) or told_of_tools(payload) or payload
        if outcome is CallStatus.REFUSED:
            error = error_of(payload)
            call.capture.refused = described(error)
            call.capture.choice(0).finish_reason = str(error.get("code") or error.get("type") or response.status)
        return Answer(response.status, call.dialect.upstream_refusal(response.status, payload), headers, outcome)
    try:
        reply = orjson.loads(payload)
        call.dialect.read(reply, call.capture)
        stripped = call.dialect.strip(reply, call.sent.plan) | _named(reply, call)
        if call.sent.translator is not None:
            return Answer(200, write_object(call.sent.translator.whole(reply)), [JSON_TYPE, _id_header(call)])
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its answer is not shaped like vLLM's ({error!r})") from error
    return Answer(200, write_object(reply) if stripped else payload, [JSON_TYPE, _id_header(call)])


async def pass_on(call: Call, response: aiohttp.ClientResponse, send: Send) -> bytes:
    """Send the events of a stream to the agent as they come. Hold back the event that completes the answer and the events
    behind it, and return them.

    Raises `UpstreamError` for a stream that ends before it is complete, or has another shape.
    """
    content_type = response.headers.get("content-type", "text/event-stream").encode()
    headers = [(b"content-type", content_type), (b"cache-control", b"no-cache"), _id_header(call)]
    call.started = True
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    cutter, held = EventCutter(), bytearray()
    # An agent acts on what it has read, so it gets nothing of a call that a stage may still refuse.
    holding = bool(call.withheld)
    clock, size = asyncio.get_running_loop().time, 0
    async for data in response.content.iter_any():
        call.sent.live.heard_at = clock()
        if (size := size + len(data)) > LONGEST_STREAM:
            raise UpstreamError(f"it sent a stream of more than {LONGEST_STREAM} bytes: {SHORTER}")
        now = bytearray()
        for event in cutter.feed(data):
            shown, last = _read_event(event, call)
            holding = holding or last
            (held if holding else now).extend(shown)
            if len(held) > LONGEST_EVENT:
                whole = f", and {call.withheld} is shown all at once: {SHORTER}"
                why = whole if call.withheld else " after the answer was complete"
                raise UpstreamError(f"it sent more than {LONGEST_EVENT} bytes{why}")
        if now:
            await send({"type": "http.response.body", "body": bytes(now), "more_body": True})
    if not holding or not (call.capture.failed or call.capture.finished(call.sent.plan.choices)):
        raise UpstreamError("it ended the stream before the answer was complete")
    if call.sent.translator is None:
        return bytes(held + cutter.rest())
    try:
        return bytes(held) if call.capture.failed else bytes(held + call.sent.translator.end())
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its stream was not shaped like vLLM's ({error!r})") from error


def _read_event(event: bytes, call: Call) -> tuple[bytes, bool]:
    """Read an event of a stream. Return the bytes that the agent gets for it, and whether it completes the answer."""
    data, sent = data_of(event), call.sent
    translator = sent.translator
    if data is None or data == b"[DONE]":
        return event if translator is None else b"", data is not None
    plan, capture, dialect = sent.plan, sent.live.capture, call.dialect
    try:
        chunk = orjson.loads(data)
        if capture.failed:
            return event if translator is None else b"", True
        if error := error_text(chunk):
            capture.failed = error
            refusal = RefusalError(500, "policy_server_error", error)
            return event if translator is None else translator.broken(refusal), True
        dialect.read(chunk, capture)
        last = capture.finished(plan.choices)
        stripped = dialect.strip(chunk, plan) | _named(chunk, call)
        if translator is not None:
            return translator.chunk(chunk), last
        if dialect.exists_only_for_us(chunk, plan):
            return b"", last
        for read in call.readers:
            read(chunk)
        return (event_of(write_object(chunk)) if stripped else event), last
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"a chunk is not shaped like vLLM's ({error!r})") from error


def _named(answer: Body, call: Call) -> bool:
    """Give an answer or a chunk the id under which the call is stored and, of one of several policies, the model name that
    agents know. Return whether it had others."""
    other = answer.get("id") != call.capture.id
    answer["id"] = call.capture.id
    if call.policy_name != POLICY:
        answer["model"], other = MODEL, True
    return other


def refuse_unsound(call: Call) -> None:
    """Raise `UpstreamError` if the answer as read cannot be stored."""
    if wrong := forget_unsound(call):
        raise UpstreamError(f"its answer is not shaped like vLLM's ({wrong})")


def forget_unsound(call: Call) -> str:
    """Return what is wrong with the answer as read, and forget all of it then; return an empty text for an answer that can be
    stored."""
    capture = call.capture
    choices = capture.choices.items()
    texts = [text for _, choice in choices for text in (choice.finish_reason, *choice.tool_calls)]
    ids = [capture.prompt_ids, *(each for _, choice in choices for each in (choice.prompt_ids, choice.response_ids))]
    wrong = (
        "a choice has an index that was not asked for"
        if any(type(index) is not int or not 0 <= index < call.sent.plan.choices for index, _ in choices)
        else "a finish reason, or the id of a tool call, is no text"
        if not all(isinstance(text, str) for text in texts)
        else "a token id is negative"
        if any(each and has_negative(each) for each in ids)
        else "a logprob is no finite number"
        if not all(math.isfinite(sum(choice.logprobs)) for _, choice in choices)
        else ""
    )
    if wrong:
        capture.prompt_ids = None
        capture.choices.clear()
    return wrong


def _id_header(call: Call) -> Header:
    return (b"x-request-id", call.capture.id.encode())


@dataclass(slots=True, eq=False)
class Counter:
    """The numbers of the calls of one attempt. `base` is the store's first free number, or a task that asks for it. `used` are
    taken from there on. `touched` is the time of the last call (`time.monotonic`)."""

    base: int | asyncio.Task[int]
    used: int
    touched: float

    @property
    def failed(self) -> bool:
        """Whether the store failed to give the first free number."""
        base = self.base
        return not isinstance(base, int) and base.done() and (base.cancelled() or base.exception() is not None)

    async def first(self) -> int:
        """Return the first free number of the store. Raises `StoreError`."""
        if not isinstance(self.base, int):
            self.base = await asyncio.shield(self.base)
        return self.base


@dataclass(frozen=True, slots=True)
class Ticket:
    """The numbers of one call, from `offset` behind its attempt's base on, and when it began."""

    rollout: str
    attempt: int
    caller: Caller
    counter: Counter
    offset: int
    started_at: float
    appended: list[Transition] = field(default_factory=list)
    """The call's transitions that were given to the store, whether or not it has confirmed them."""


class Recorder:
    """Gives calls their numbers and stores them."""

    def __init__(self, store: Store, ttl: float) -> None:
        self._store, self._ttl = store, ttl
        self._counters = Bounded[tuple[str, int], Counter](COUNTERS)
        self._expired = Bounded[tuple[str, int, float], None](COUNTERS)

    def expect(self, rollout: str, attempt: int) -> None:
        """Number the calls of a new attempt from 0, without asking the store.

        If another gateway has served the attempt, the store refuses the numbers and the call is renumbered.
        """
        now = time.monotonic()
        if (rollout, attempt) not in self._counters:
            self._counters.keep((rollout, attempt), Counter(0, 0, now))
        self._forget_idle(now)

    def begin(self, rollout: str, attempt: int, choices: int, caller: Caller) -> Ticket:
        """Reserve numbers for a call with so many `choices` that begins now. It does not wait for the store; `append` does."""
        now = time.monotonic()
        key = (rollout, attempt)
        counter = self._counters.get(key)
        if counter is None or counter.failed:
            base = asyncio.ensure_future(self._store.next_seq(rollout, attempt))
            base.add_done_callback(_retrieve)
            counter = self._counters.keep(key, Counter(base, 0, now))
        counter.touched = now
        self._counters.move_to_end(key)
        self._forget_idle(now)
        ticket = Ticket(rollout, attempt, caller, counter, counter.used, time.time())
        counter.used += choices
        return ticket

    def _forget_idle(self, now: float) -> None:
        while self._counters and now - next(iter(self._counters.values())).touched > self._ttl:
            self._counters.popitem(last=False)

    async def append(self, call: Call, status: CallStatus) -> None:
        """Store a call's transitions durably; its ticket has them then. Numbers that are taken meanwhile are replaced. Raises
        `StoreError`."""
        ticket = call.sent.ticket
        await self._append(ticket, build(call, await ticket.counter.first() + ticket.offset, status))

    async def take_back(self, ticket: Ticket) -> None:
        """Store a call as aborted, because its answer did not arrive. A call that had no answer keeps its status, and is stored
        again in case it was not. Raises `StoreError`."""
        taken = [replace(item, status=CallStatus.ABORTED) if item.status.answered else item for item in ticket.appended]
        await self._store.append(taken)

    async def record_refused(self, claims: Claims, caller: Caller, call: str, refusal: RefusalError) -> None:
        """Store that the gateway refused the call with the id `call`, and why, since an agent may go on without the answer. Of
        an expired key only the first call is stored, because an agent may repeat it for ever. Failures are only logged."""
        try:
            await self._append_refused(claims, caller, call, refusal)
        except StoreError as error:
            log.warning("could not record the refused call of %s (%s): %s", claims.rollout, refusal.code, error)
        except Exception:
            log.exception("the gateway failed to record the refused call of %s", claims.rollout)

    async def _append_refused(self, claims: Claims, caller: Caller, call: str, refusal: RefusalError) -> None:
        key = (claims.rollout, claims.attempt, claims.expires_at)
        if refusal.code == EXPIRED and key in self._expired:
            return
        ticket = self.begin(claims.rollout, claims.attempt, 1, caller)
        with contextlib.suppress(StaleAttemptError):  # the attempt is over, and its record is complete
            await self._append(ticket, [_refused(ticket, await ticket.counter.first() + ticket.offset, call, refusal)])
        if refusal.code == EXPIRED:
            self._expired.keep(key, None)

    async def _append(self, ticket: Ticket, transitions: list[Transition]) -> None:
        for _ in range(CONFLICT_RETRIES):
            ticket.appended[:] = transitions
            try:
                await self._store.append(transitions)
            except ConflictError:
                first = await self._renumber(ticket, len(transitions))
                log.info("calls of %s attempt %d renumbered from %d", ticket.rollout, ticket.attempt, first)
                transitions = [replace(item, seq=first + offset) for offset, item in enumerate(transitions)]
            else:
                return
        ticket.appended[:] = transitions
        await self._store.append(transitions)

    async def _renumber(self, ticket: Ticket, count: int) -> int:
        free = await self._store.next_seq(ticket.rollout, ticket.attempt)
        counter = ticket.counter
        base = await counter.first()
        first = max(free, base + counter.used)
        counter.used = first - base + count
        return first


def build(call: Call, first: int, status: CallStatus) -> list[Transition]:
    """Return one transition for each choice of a call, numbered from `first` on; a single empty one for a call that ended
    before any choice came."""
    plan, live, ticket = call.sent.plan, call.sent.live, call.sent.ticket
    capture = live.capture
    choices: Sequence[tuple[int, Choice]] = sorted(capture.choices.items()) or [(0, Choice())]
    empty = token_ids()
    ended_at = time.time()
    return [
        Transition(
            rollout=ticket.rollout,
            attempt=ticket.attempt,
            seq=first + offset,
            id=capture.id,
            prompt_ids=memoryview(choice.prompt_ids or capture.prompt_ids or empty).toreadonly(),
            response_ids=memoryview(choice.response_ids).toreadonly(),
            logprobs=logprobs(choice.logprobs if choice.aligned else ()),
            caller=ticket.caller,
            versions=live.versions(index, len(choice.response_ids)),
            status=status,
            finish_reason=UNSERVED if live.unserved else choice.finish_reason,
            choice=index,
            temperature=plan.temperature,
            constrained=plan.constrained,
            started_at=ticket.started_at,
            ended_at=ended_at,
            tool_calls=tuple(choice.tool_calls),
            extras={**({} if offset else call.extras), **choice.extras},
            error=capture.refused,
            max_tokens_asked=plan.max_tokens_asked,
            requested_model=plan.requested_model,
            untrained=call.untrained,
            rejects=call.rejects if not offset else {},
        )
        for offset, (index, choice) in enumerate(choices)
    ]


def _refused(ticket: Ticket, seq: int, call: str, refusal: RefusalError) -> Transition:
    """Return the transition, without tokens, of a call that the gateway refused before any policy server got it."""
    return Transition(
        ticket.rollout,
        ticket.attempt,
        seq,
        call,
        token_ids(),
        token_ids(),
        logprobs(),
        ticket.caller,
        status=CallStatus.ERROR if refusal.code == EXPIRED or refusal.status >= 500 else CallStatus.REFUSED,
        finish_reason=UNSERVED if refusal.status >= 500 else refusal.code,
        started_at=ticket.started_at,
        ended_at=time.time(),
        error=described(refusal.error),
    )


def refuse_unstored(error: StoreError) -> RefusalError:
    """Return the refusal (503) of a call that the store did not take."""
    message = f"The store did not take the call, so it is not answered: {error}. Send it again."
    return RefusalError(503, STORE_FAILED, message)


def described(error: Mapping[str, object]) -> str:
    """Return the text of an error object as it is stored: with the field that the error is about, and without credentials."""
    field, message = error.get("param"), str(error.get("message", ""))
    text = f"{field}: {message}" if field and str(field) not in message else message
    return printable(redacted(text[:LONGEST_ERROR], "error"))


def _retrieve(task: asyncio.Task[int]) -> None:
    """Read the outcome of a task, so that asyncio does not report an exception that nobody awaited."""
    if not task.cancelled():
        task.exception()
