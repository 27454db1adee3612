"""`/v1/messages`: Anthropic's Messages API, asked of vLLM as a chat completion.

The invariant: the prompt is the one that the same conversation would have had through `/v1/chat/completions`. The blocks of a
stream, put together, are those of the whole answer; only arguments that are no JSON object differ, which a stream passes on as
they come and a whole answer wraps, as Anthropic asks for it, in `INVALID_JSON`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import orjson

from lightning.gateway.dialects.base import refuse_parameter
from lightning.gateway.dialects.messages_request import chat_request
from lightning.gateway.dialects.translated import Event, Kind, Part, Step, Translated, Translator, event, readable
from lightning.gateway.http import Body, RefusalError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
IN_THE_PROMPT = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Messages(Translated):
    """Anthropic's Messages API."""

    path = "/messages"
    id_prefix = "msg_"

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """See `Dialect`."""
        most = body.get("max_tokens")
        if not isinstance(most, int) or most < 1:
            raise refuse_parameter("max_tokens", f"must be a positive integer, not {most!r}.")
        with readable():
            return chat_request(body), MessageTranslator(response_id)

    def refusal(self, refusal: RefusalError) -> bytes:
        """See `Dialect`."""
        return orjson.dumps(error_object(refusal.status, str(refusal)))

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """See `Dialect`. What is not one of vLLM's errors becomes the message as it is."""
        try:
            message = str(orjson.loads(payload)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message = payload.decode("utf-8", "replace")
        return orjson.dumps(error_object(status, message))


def prompt_of(body: Body) -> Body:
    """What vLLM's `/tokenize` needs to count a request's prompt. Raises `RefusalError` (422)."""
    with readable():
        chat = chat_request(body)
    return {name: chat[name] for name in IN_THE_PROMPT if name in chat}


class MessageTranslator(Translator):
    """What the agent sees as a Message."""

    def __init__(self, message_id: str) -> None:
        super().__init__(message_id)
        self._begun = False
        self._stop: object = None

    def broken(self, refusal: RefusalError) -> bytes:
        """See `Translator`."""
        return event(error_object(refusal.status, str(refusal)))

    def _read(self, answer: Body, choice: Body | None) -> None:
        super()._read(answer, choice)
        if choice is not None and choice.get("finish_reason"):
            self._stop = choice.get("stop_reason")

    def answer(self) -> Body:
        """See `Translator`."""
        content = [self._block(part) for part in self._parts.all]
        return self._message(content, usage_of(self._usage)) | self._reason()

    def _message(self, content: list[Body], usage: Body) -> Body:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _reason(self) -> Body:
        """A stop string is vLLM's `stop_reason`; a forced tool call ends with `stop` there, yet wants a result."""
        if self._finish == "stop" and isinstance(self._stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        called = any(part.kind is Kind.TOOL for part in self._parts.all)
        ended = "tool_use" if called else "end_turn"
        return {"stop_reason": REASONS.get(self._finish, ended), "stop_sequence": None}

    def _block(self, part: Part) -> Body:
        if part.kind is Kind.TEXT:
            return {"type": "text", "text": part.text}
        if part.kind is Kind.REASONING:
            return {"type": "thinking", "thinking": part.text, "signature": self._id}
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments_of(part.text)}

    def _beginning(self, chunk: Body) -> list[Body]:
        if self._begun:
            return []
        self._begun = True
        usage = {"input_tokens": len(chunk.get("prompt_token_ids") or ()), "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], usage)}, {"type": "ping"}]

    def _ending(self) -> list[Body]:
        delta = {"type": "message_delta", "delta": self._reason(), "usage": usage_of(self._usage)}
        return [delta, {"type": "message_stop"}]

    def _events(self, happened: Event) -> Iterator[Body]:
        step, part, piece = happened
        index = {"index": part.index}
        if step is Step.OPEN:
            block = {"type": "text", "text": ""} if part.kind is Kind.TEXT else self._block(part)
            if part.kind is Kind.REASONING:
                block["signature"] = ""
            yield {"type": "content_block_start", **index, "content_block": block}
        elif step is Step.ADD:
            yield {"type": "content_block_delta", **index, "delta": delta_of(part.kind, piece)}
        else:
            if part.kind is Kind.REASONING:
                delta = {"type": "signature_delta", "signature": self._id}
                yield {"type": "content_block_delta", **index, "delta": delta}
            yield {"type": "content_block_stop", **index}


def error_object(status: int, message: str) -> Body:
    """An error in the shape of this API."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def delta_of(kind: Kind, piece: str) -> Body:
    """A piece of a block."""
    if kind is Kind.TEXT:
        return {"type": "text_delta", "text": piece}
    if kind is Kind.REASONING:
        return {"type": "thinking_delta", "thinking": piece}
    return {"type": "input_json_delta", "partial_json": piece}


def arguments_of(text: str) -> Body:
    """A tool call's arguments as an object. Python's own JSON reads them, since orjson rounds integers above 64 bits."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def usage_of(usage: Body | None) -> Body:
    """Token counts under the names of this API, where tokens from the cache are counted by themselves."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage.get("completion_tokens") or 0}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        counts |= {"input_tokens": counts["input_tokens"] - cached, "cache_read_input_tokens": cached}
    return counts
