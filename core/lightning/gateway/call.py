"""A model call as one object, from the agent's request to the durable transition.

The invariant: each phase adds one typed result and changes none of an earlier phase: what was asked (`Request`), what the
policy server was sent (`Sent`), what it answered (`Answer`), what is kept (transitions). A `Request` holds the bytes of a body,
which may be megabytes: it is gone when the call has been sent.

An answer is read whole, or as a stream that is passed on meanwhile: the bytes that complete it are returned and not sent, and
whatever is not shaped like vLLM's ends the call with an `UpstreamError`, never with another one.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import orjson
from starlette.types import Scope, Send

from lightning.gateway.dialects import Capture, Dialect, Plan, Translator
from lightning.gateway.dialects.base import error_text
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
    write_object,
)
from lightning.gateway.identity import Claims
from lightning.gateway.policy import LiveCall, Policy
from lightning.gateway.recorder import Ticket, described
from lightning.types import Caller, CallStatus

Made = TypeVar("Made")
LONGEST_STREAM = 256 << 20
"""Bytes of a stream."""
SHAPE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""What reading an answer raises when it is not shaped like vLLM's."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks. `body` is the JSON object of `payload`: whoever wants another one makes a copy. `model` is the model
    that the agent names, of any type."""

    scope: Scope
    payload: bytes
    body: Body
    model: object


@dataclass(frozen=True, slots=True)
class Sent:
    """What the policy server is asked: its body and what of the answer is the agent's (`plan`), who translates the answer, the
    call's numbers in the record, and what its tokens' versions are found by."""

    plan: Plan
    translator: Translator | None
    ticket: Ticket
    live: LiveCall


@dataclass(slots=True)
class Answer:
    """The end of a call: of an answer that was read whole all of it, of a stream its tail. `status` is that of HTTP, 0 where
    the agent gets no answer."""

    status: int
    body: bytes = b""
    headers: list[Header] = field(default_factory=list)
    outcome: CallStatus = CallStatus.OK


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """One model call.

    Known when it is admitted: the `dialect` it is made in, the agent that calls, the attempt it belongs to, the `policy` that
    answers. At `admitted` a stage may set `claims` (the attempt), `policy`, `before` (the chat messages before those of
    the request), `id_mark` (which the id of its answer begins with), `lineage` (the attempt whose earlier responses the request
    may go on with). `withheld` says why a stream is shown to the agent at once, when its versions are settled ("a branch"), and
    not as it comes. `readers` are given each chunk of a stream as the agent sees it; what one raises is its
    stage's failure, but for an `UpstreamError` (the chunk is not shaped like one). `extras` are stored with the call, by the
    name of the plugin.

    `started` says that the first bytes of the answer have left, `stopped_by` which stage refused the call or failed on it.
    """

    dialect: Dialect
    caller: Caller
    claims: Claims
    find_policy: Callable[[], Policy]
    headers: list[tuple[str, str]]
    before: Sequence[Body] = ()
    id_mark: str = ""
    lineage: tuple[str, int] | None = None
    withheld: str = ""
    readers: list[Callable[[Body], None]] = field(default_factory=list)
    extras: dict[str, bytes] = field(default_factory=dict)
    started: bool = False
    stopped_by: str = ""
    _policy: Policy | None = None
    _sent: Sent | None = None

    @property
    def policy(self) -> Policy:
        """Whose servers answer it. A call that a stage answers by itself has none. Raises `RefusalError`."""
        if self._policy is None:
            self._policy = self.find_policy()
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def attempt(self) -> tuple[str, int]:
        """The rollout and the attempt that it belongs to."""
        return self.claims.rollout, self.claims.attempt

    @property
    def is_planned(self) -> bool:
        """Whether it is known what the policy server is asked, so that the call has its numbers in the record."""
        return self._sent is not None

    @property
    def sent(self) -> Sent:
        """What the policy server is asked. Raises `LookupError` before that is known."""
        if self._sent is None:
            raise LookupError("the call has not been planned: a stage looks at `call.sent` from `sending` on")
        return self._sent

    @sent.setter
    def sent(self, sent: Sent) -> None:
        self._sent = sent

    @property
    def plan(self) -> Plan:
        """See `Sent`."""
        return self.sent.plan

    @property
    def translator(self) -> Translator | None:
        """See `Sent`."""
        return self.sent.translator

    @property
    def ticket(self) -> Ticket:
        """See `Sent`."""
        return self.sent.ticket

    @property
    def live(self) -> LiveCall:
        """See `Sent`."""
        return self.sent.live

    @property
    def capture(self) -> Capture:
        """What the answer has shown so far."""
        return self.sent.live.capture

    @property
    def wants_packed(self) -> bool:
        """Whether nobody but the record wants the logprobs, and of the sampled tokens alone: no text has to be made of them."""
        plan = self.plan
        body = plan.body
        others = body.get("echo") or body.get("logprob_token_ids") or body.get("prompt_logprobs") is not None
        return not (plan.keep_logprobs or others)


# the answer -------------------------------------------------------------------------------------------------------
def read_whole(call: Call, response: aiohttp.ClientResponse, payload: bytes) -> Answer:
    """vLLM's answer to a call that is no stream. Raises `UpstreamError` for one of another shape."""
    if response.status != 200:
        headers = [(b"content-type", response.content_type.encode()), _id_header(call)]
        outcome = CallStatus.ERROR if response.status >= 500 else CallStatus.REFUSED
        if response.status == 400 and (told := told_of_length(payload)) is not None:
            payload = told
        if outcome is CallStatus.REFUSED:
            error = error_of(payload)
            call.capture.refused = described(error)
            call.capture.choice(0).finish_reason = str(error.get("code") or error.get("type") or response.status)
        return Answer(response.status, call.dialect.upstream_refusal(response.status, payload), headers, outcome)
    try:
        reply = orjson.loads(payload)
        call.dialect.read(reply, call.capture)
        stripped = call.dialect.strip(reply, call.plan) | _named(reply, call.capture)
        if call.translator is not None:
            return Answer(200, write_object(call.translator.whole(reply)), [JSON_TYPE, _id_header(call)])
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its answer is not shaped like vLLM's ({error!r})") from error
    return Answer(200, write_object(reply) if stripped else payload, [JSON_TYPE, _id_header(call)])


async def pass_on(call: Call, response: aiohttp.ClientResponse, send: Send) -> bytes:
    """Pass the events of a stream on as they come; hold back those from the one that completes the answer, and return them.

    Raises `UpstreamError` for a stream that ends before that, or is of another shape.
    """
    content_type = response.headers.get("content-type", "text/event-stream").encode()
    headers = [(b"content-type", content_type), (b"cache-control", b"no-cache"), _id_header(call)]
    call.started = True
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    cutter, held = EventCutter(), bytearray()
    # An agent acts upon what it has read: where a stage may yet refuse the call, it is not shown before.
    holding = bool(call.withheld)
    clock, size = asyncio.get_running_loop().time, 0
    async for data in response.content.iter_any():
        call.live.heard_at = clock()
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
    if not holding or not (call.capture.failed or call.capture.finished(call.plan.choices)):
        raise UpstreamError("it ended the stream before the answer was complete")
    if call.translator is None:
        return bytes(held + cutter.rest())
    try:
        return bytes(held) if call.capture.failed else bytes(held + call.translator.end())
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its stream was not shaped like vLLM's ({error!r})") from error


def _read_event(event: bytes, call: Call) -> tuple[bytes, bool]:
    """What the agent sees of an event, and whether the answer is complete with it."""
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
        stripped = dialect.strip(chunk, plan) | _named(chunk, capture)
        if translator is not None:
            return translator.chunk(chunk), last
        if dialect.exists_only_for_us(chunk, plan):
            return b"", last
        for read in call.readers:
            read(chunk)
        return (event_of(write_object(chunk)) if stripped else event), last
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"a chunk is not shaped like vLLM's ({error!r})") from error


def _named(answer: Body, capture: Capture) -> bool:
    """Give an answer or a chunk the id under which the call is recorded, which is vLLM's own; return whether it had another."""
    other = answer.get("id") != capture.id
    answer["id"] = capture.id
    return other


def refuse_unsound(call: Call) -> None:
    """Raise `UpstreamError` where what was read cannot be recorded."""
    if wrong := forget_unsound(call):
        raise UpstreamError(f"its answer is not shaped like vLLM's ({wrong})")


def forget_unsound(call: Call) -> str:
    """Forget all that was read where some of it cannot be recorded; return what is wrong with it."""
    capture = call.capture
    choices = capture.choices.items()
    texts = [text for _, choice in choices for text in (choice.finish_reason, *choice.tool_calls)]
    ids = [capture.prompt_ids, *(each for _, choice in choices for each in (choice.prompt_ids, choice.response_ids))]
    wrong = (
        "a choice has an index that was not asked for"
        if any(type(index) is not int or not 0 <= index < call.plan.choices for index, _ in choices)
        else "a finish reason, or the id of a tool call, is no text"
        if not all(isinstance(text, str) for text in texts)
        else "a token id is negative"
        if any(each and min(each) < 0 for each in ids)
        else "a logprob is no finite number"
        if not all(math.isfinite(sum(choice.logprobs)) for _, choice in choices)
        else ""
    )
    if wrong:
        capture.prompt_ids = None
        capture.choices.clear()
    return wrong


def well_shaped(make: Callable[[], Made]) -> Made:
    """What is made of an answer that was read. Raises `UpstreamError` where it was not shaped like vLLM's."""
    try:
        return make()
    except SHAPE_ERRORS as error:
        raise UpstreamError(f"its answer is not shaped like vLLM's ({error!r})") from error


def _id_header(call: Call) -> Header:
    return (b"x-request-id", call.capture.id.encode())
