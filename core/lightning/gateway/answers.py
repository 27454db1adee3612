"""How vLLM's answer to a call is read: whole, or as a stream that is passed on meanwhile.

The invariant: the bytes that complete an answer are returned and not sent; whatever is not shaped like vLLM's ends the call
with an `UpstreamError`, never with another one.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from typing import TypeVar

import aiohttp
import orjson
from starlette.types import Send

from lightning.gateway.call import Answer, Call
from lightning.gateway.dialects.base import Capture, error_text
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
from lightning.gateway.recorder import described
from lightning.types import CallStatus

Made = TypeVar("Made")
LONGEST_STREAM = 256 << 20
"""Bytes of a stream."""
SHAPE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""What reading an answer raises when it is not shaped like vLLM's."""


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
