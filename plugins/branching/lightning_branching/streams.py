"""Turn a recorded answer into the stream of events that an agent asked for, in each API.

The invariant: the events add up to the recorded answer. The pieces in which it was streamed when it was recorded are not kept:
each text comes in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from lightning.gateway.http import event_of, write_object

from lightning_branching.recorded import RecordedCall

Body = dict[str, Any]
INVALID: Final = "INVALID_JSON"
"""The name under which a Message wraps tool arguments that are no JSON object; a stream has them unwrapped."""
DONE: Final = b"data: [DONE]\n\n"


def answer_of(call: RecordedCall, request: Mapping[str, Any]) -> tuple[int, str, bytes]:
    """Return the status, content type and body of a recorded answer; the body is a stream if the request asks for one."""
    status = call.exchange.status
    reply: Any = call.exchange.reply
    if request.get("stream") is True and status == 200:
        return status, "text/event-stream; charset=utf-8", b"".join(STREAMS[call.exchange.path](reply, request))
    return status, "application/json", write_object(reply)


def _chat(reply: Body, request: Mapping[str, Any]) -> Iterator[bytes]:
    head = {name: value for name, value in reply.items() if name not in ("choices", "usage", "object")}
    head["object"] = "chat.completion.chunk"
    for choice in reply["choices"]:
        index, message = {"index": choice.get("index", 0)}, dict(choice.get("message") or {})
        said = {name: value for name, value in choice.items() if name not in ("index", "message", "finish_reason")}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        yield _data({**head, "choices": [{**index, "delta": message, **said, "finish_reason": None}]})
        yield _data({**head, "choices": [{**index, "delta": {}, "finish_reason": choice.get("finish_reason")}]})
    yield from _usage(head, reply, request)


def _text(reply: Body, request: Mapping[str, Any]) -> Iterator[bytes]:
    head = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    for choice in reply["choices"]:
        yield _data({**head, "choices": [choice]})
    yield from _usage(head, reply, request)


def _usage(head: Body, reply: Body, request: Mapping[str, Any]) -> Iterator[bytes]:
    if (request.get("stream_options") or {}).get("include_usage"):
        yield _data({**head, "choices": [], "usage": reply.get("usage")})
    yield DONE


def _messages(reply: Body, request: Mapping[str, Any]) -> Iterator[bytes]:
    usage = {**(reply.get("usage") or {}), "output_tokens": 0}
    begun = {**reply, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event({"type": "message_start", "message": begun})
    for index, block in enumerate(reply.get("content") or ()):
        place = {"index": index}
        empty: Body = EMPTY.get(block.get("type"), {})
        yield _event({"type": "content_block_start", **place, "content_block": {**block, **empty}})
        for delta in _block_deltas(block):
            yield _event({"type": "content_block_delta", **place, "delta": delta})
        yield _event({"type": "content_block_stop", **place})
    ended = {name: reply.get(name) for name in ("stop_reason", "stop_sequence")}
    yield _event({"type": "message_delta", "delta": ended, "usage": reply.get("usage")})
    yield _event({"type": "message_stop"})


EMPTY: Final[Mapping[str, Body]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""The empty fields with which a block of a Message begins in a stream, by the block's type."""


def _block_deltas(block: Body) -> Iterator[Body]:
    if block.get("type") == "text":
        yield {"type": "text_delta", "text": block["text"]}
    elif block.get("type") == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block.get("signature", "")}
    elif block.get("type") == "tool_use":
        given = block.get("input") or {}
        broken = given.get(INVALID) if given.keys() == {INVALID} else None
        yield {"type": "input_json_delta", "partial_json": json.dumps(given) if broken is None else broken}


def _responses(reply: Body, request: Mapping[str, Any]) -> Iterator[bytes]:
    for number, body in enumerate(_response_events(reply)):
        yield _event({**body, "sequence_number": number})


def _response_events(reply: Body) -> Iterator[Body]:
    begun = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for place, item in enumerate(reply.get("output") or ()):
        where = {"output_index": place}
        empty: Body = {"content": []} if "content" in item else {"arguments": ""} if "arguments" in item else {}
        yield {"type": "response.output_item.added", **where, "item": {**item, **empty, "status": "in_progress"}}
        at = {"item_id": item.get("id"), **where}
        for index, part in enumerate(item.get("content") or ()):
            yield from _part_events(part, {**at, "content_index": index})
        if item.get("type") == "function_call":
            yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **at, **done}
        yield {"type": "response.output_item.done", **where, "item": item}
    yield {"type": f"response.{reply.get('status', 'completed')}", "response": reply}


def _part_events(part: Body, at: Body) -> Iterator[Body]:
    kind = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}


def _data(body: Body) -> bytes:
    return event_of(json.dumps(body).encode())


def _event(body: Body) -> bytes:
    return event_of(json.dumps(body).encode(), body["type"])


STREAMS: Final[Mapping[str, Callable[[Body, Mapping[str, Any]], Iterator[bytes]]]] = {
    "/chat/completions": _chat,
    "/completions": _text,
    "/messages": _messages,
    "/responses": _responses,
}
"""The functions that yield the server-sent events of an answer, by the API's path."""
