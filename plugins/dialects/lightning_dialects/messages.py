"""`/v1/messages`: Anthropic's Messages API, translated to chat completions of vLLM.

The invariant: the prompt is the one that the same conversation would have through `/v1/chat/completions`. The blocks of a
stream add up to those of the whole answer, except tool arguments that are not a JSON object: a stream passes them on as they
come, and a whole answer wraps them in `INVALID_JSON`, as Anthropic asks for.

Law 7: parameters that vLLM knows are passed on under vLLM's names, unknown ones as they are; a parameter with a meaning that
could only be ignored is refused with the cure. The chat messages are those of vLLM's own translation, except that an empty turn
stays a turn with an empty text. A tool's result is its text, error or not; results come before the other content of the user's
message; cache marks are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import orjson
from lightning.gateway.dialects import Tokenize, refuse_parameter
from lightning.gateway.http import Body, RefusalError
from lightning.gateway.policy import Policy

from lightning_dialects.chat_template import template_of
from lightning_dialects.translated import (
    Event,
    Kind,
    Part,
    Step,
    Translated,
    Translator,
    ask_for_stream,
    event,
    items_of,
    object_field,
    passed_on,
    readable,
    text_field,
)

BILLING = "x-anthropic-billing-header"
"""The beginning of Claude Code's first system block, which is dropped: it differs in every request and means nothing to the
model."""


def messages_of(asked: Body) -> list[Body]:
    """Return the chat messages for `system` and `messages` of a request. Raises `RefusalError` (422) for content that only
    Anthropic's servers can read."""
    found: list[Body] = []
    system = asked.get("system")
    if system and isinstance(system, str):
        found.append({"role": "system", "content": system})
    elif system:
        _system(found, system, "system")
    for number, message in enumerate(items_of(asked.get("messages"), "messages")):
        where = f"messages[{number}]"
        role, content = text_field(message, "role", where), message.get("content")
        if role == "system":
            _system(found, content, f"{where}.content")
        elif role not in {"user", "assistant"}:
            raise refuse_parameter(f"{where}.role", f"must be 'user', 'assistant' or 'system', not {role!r}.")
        elif isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "user":
            _user(found, items_of(content, f"{where}.content"), f"{where}.content")
        else:
            found.append(_assistant(items_of(content, f"{where}.content"), f"{where}.content"))
    return found


def _system(found: list[Body], said: object, where: str) -> None:
    texts = [said] if isinstance(said, str) else [_text(block, where) for block in items_of(said, where)]
    text = "".join(text for text in texts if not text.startswith(BILLING))
    if text:
        found.append({"role": "system", "content": text})


def _text(block: Body, where: str) -> str:
    if block.get("type") != "text":
        why = f"has the type {block.get('type')!r}, which the model cannot read here; send its text instead."
        raise refuse_parameter(where, why)
    return text_field(block, "text", where)


def _user(found: list[Body], blocks: list[Body], where: str) -> None:
    parts: list[Body] = []
    before = len(found)
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            _result(found, block, place)
        elif block.get("type") == "image":
            parts.append(_image(block))
        elif text := _text(block, place):
            parts.append({"type": "text", "text": text})
    if parts or len(found) == before:
        found.append({"role": "user", "content": _joined(parts)})


def _joined(parts: list[Body]) -> str | list[Body]:
    """Return the content of a message: the text if there is only one text part, an empty text for no parts, else the parts."""
    only = parts[0] if len(parts) == 1 else {}
    return only["text"] if only.get("type") == "text" else parts or ""


def _result(found: list[Body], block: Body, where: str) -> None:
    call_id, content = text_field(block, "tool_use_id", where), block.get("content")
    texts, images, tools = [content] if isinstance(content, str) else [], [], []
    if content is not None and not isinstance(content, str):
        for number, item in enumerate(items_of(content, f"{where}.content")):
            if item.get("type") == "image":
                images.append(_image(item))
            elif item.get("type") == "tool_reference":  # a found tool, which some templates show
                named = {"tool_name": item.get("tool_name") or item.get("name")}  # as vLLM does
                name = text_field(named, "tool_name", f"{where}.content[{number}]")
                tools.append({"type": "tool_reference", "name": name})
            else:
                texts.append(_text(item, f"{where}.content[{number}]"))
    found.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
    if images:
        found.append({"role": "user", "content": images})
    if tools:
        found.append({"role": "tool", "tool_call_id": call_id, "content": tools})


def _image(block: Body) -> Body:
    source = block.get("source") or {}
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(blocks: list[Body], where: str) -> Body:
    parts: list[Body] = []
    calls: list[Body] = []
    thoughts: list[str] = []
    for number, block in enumerate(blocks):
        kind, place = block.get("type"), f"{where}[{number}]"
        if kind == "thinking":
            thoughts.append(text_field(block, "thinking", place))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": text_field(block, "name", place), "arguments": arguments}
            calls.append({"id": text_field(block, "id", place), "type": "function", "function": function})
        elif kind != "redacted_thinking" and (text := _text(block, place)):
            parts.append({"type": "text", "text": text})
    message: Body = {"role": "assistant"}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts or not (calls or thoughts):
        message["content"] = _joined(parts)
    return message


def goes_on(asked: list[Body], last: Body) -> bool:
    """Return whether the conversation ends with an assistant's text that the model must continue. `last` is the chat message
    of the last turn."""
    return asked[-1].get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last


def with_system_first(messages: list[Body]) -> list[Body]:
    """Return the messages with all system texts joined into one first message, as vLLM joins them."""
    said = "".join(message["content"] for message in messages if message["role"] == "system")
    return [{"role": "system", "content": said}, *(message for message in messages if message["role"] != "system")]


RENAMED = {"stop_sequences": "stop"}
ELSEWHERE = frozenset(
    {"messages", "system", "stream", "tools", "tool_choice", "thinking", "output_config", "output_format"}
)
"""Parameters that functions of their own translate."""
WITHOUT_EFFECT = frozenset(
    {"model", "metadata", "service_tier", "inference_geo", "cache_control", "speed", "diagnostics", "billing_policy"}
    | {"user_profile_id", "workspace_id", "fallbacks", "fallback_credit_token", "context_management"}
)
"""Parameters that are dropped: they concern Anthropic's accounts, caches and other models, not the answer. `context_management`
is checked by `_context`."""
REFUSED = {
    "container": "is not supported: there are no containers here. Run the code in a tool of the agent.",
    "compaction": "is not supported: the gateway summarizes nothing. Let the agent ask for a summary itself.",
    "mcp_servers": "is not supported: the gateway calls no tools. Connect the agent itself to the MCP servers.",
    "thread": "continues a conversation, and none is kept here. Send all of the messages: `tool_runner(..., thread=False)`.",
}
NEW_THREAD = {"type": "create"}
"""The `thread` of a first request of `tool_runner`, which is accepted because the request has all messages."""
EDITED = "is not supported: the policy must see the context as it is. Shorten it in the agent."
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
IN_A_TOOL = ("name", "description", "strict", "defer_loading")
NOT_IN_A_TOOL = {
    "input_examples": "cannot be shown to the model. Write the examples into the description.",
    "allowed_callers": "cannot be limited to code: there are no containers here. Leave it out, or allow 'direct'.",
}


def chat_request(asked: Body) -> Body:
    """Translate a Messages request to a chat request. Raises `RefusalError` (422) for one that cannot be translated."""
    if asked.get("thread") == NEW_THREAD:
        asked = {name: value for name, value in asked.items() if name != "thread"}
    chat = passed_on(asked, WITHOUT_EFFECT | ELSEWHERE, RENAMED, REFUSED)
    _context(asked.get("context_management") or {})
    chat["messages"] = messages = messages_of(asked)
    if not messages:
        raise refuse_parameter("messages", "is missing or empty; send a list of messages.")
    if goes_on(asked["messages"], messages[-1]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    ask_for_stream(chat, asked)
    _thinking(chat, asked)
    _tools(chat, asked)
    return chat


def _context(management: Body) -> None:
    """Refuse edits of the context, except the one that Claude Code always sends, which keeps all thinking and has no effect."""
    for edit in management.get("edits") or []:
        if not (str(edit.get("type")).startswith("clear_thinking_") and edit.get("keep") in ("all", {"type": "all"})):
            raise refuse_parameter("context_management", EDITED)


def _thinking(chat: Body, asked: Body) -> None:
    """Translate `output_config`, `output_format` and `thinking` as vLLM does. Adaptive thinking is left to the model."""
    config, thinking = object_field(asked, "output_config"), object_field(asked, "thinking")
    wanted = asked.get("output_format") or config.get("format")
    if wanted:
        schema = {"name": "json_schema", "schema": wanted.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    if thinking.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    elif thinking.get("type") == "enabled":
        chat["thinking_token_budget"] = thinking.get("budget_tokens")


def _tools(chat: Body, asked: Body) -> None:
    tools = items_of(asked.get("tools") or [], "tools")
    if tools:
        chat["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    choice = asked.get("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = text_field(choice, "name", "tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind not in CHOICES:
        raise refuse_parameter("tool_choice", f"must be of type 'auto', 'any', 'tool' or 'none', not {choice!r}.")
    elif tools or kind == "any":
        chat["tool_choice"] = CHOICES[kind]
    if tools:
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")


def _is_hosted(tool: Body) -> bool:
    """Return whether a tool is one of Anthropic's own, for which no schema is known here."""
    return tool.get("type") not in {None, "custom"}


def _tool(tool: Body, where: str) -> Body:
    schema = tool.get("input_schema")
    if _is_hosted(tool) or not isinstance(schema, dict):
        why = (
            f"is {tool.get('type')!r}, which only Anthropic's models know. Give the agent a tool with an input_schema, "
            "or set gateway.hosted_tools to 'drop' and let it do without."
        )
        raise refuse_parameter(where, why)
    for name, why in NOT_IN_A_TOOL.items():
        if tool.get(name) and "direct" not in tool[name]:
            raise refuse_parameter(f"{where}.{name}", why)
    function = {name: tool[name] for name in IN_A_TOOL if tool.get(name) is not None}
    text_field(tool, "name", where)
    # The prompt shows the keys in this order, so that a missing key is added last.
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": {**function, "parameters": parameters}}


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


class Messages(Translated):
    """Anthropic's Messages API. Requests are fitted to the policy's chat template as vLLM's own endpoint does: if the template
    takes system messages only at the beginning, they are moved there; if it cannot turn thinking off, low effort is asked
    for."""

    path = "/messages"
    id_prefix = "msg_"

    def hosted_tools(self, body: Body) -> list[str]:
        """Return the types of a request's tools that Anthropic's servers would run. Raises `RefusalError` (422)."""
        with readable():
            return [str(tool["type"]) for tool in items_of(body.get("tools") or [], "tools") if _is_hosted(tool)]

    def without_hosted_tools(self, body: Body) -> Body:
        """Return the request without the tools that Anthropic's servers would run."""
        return {**body, "tools": [tool for tool in body["tools"] if not _is_hosted(tool)]}

    def translate(self, body: Body, before: Sequence[Body], response_id: str) -> tuple[Body, Translator | None]:
        """Translate a request of the Messages API to a chat request. Return the chat request and the translator of its answer.
        Raises `RefusalError` (422) for a request that cannot be translated."""
        body = self.runnable(body)
        most = body.get("max_tokens")
        if not isinstance(most, int) or most < 1:
            raise refuse_parameter("max_tokens", f"must be a positive integer, not {most!r}.")
        with readable():
            return chat_request(body), MessageTranslator(response_id)

    async def fit(self, body: Body, policy: Policy, tokenize: Tokenize, name: str | None) -> None:
        """Fit a chat request (in place) to the policy's chat template: move system messages to the beginning, or ask for low
        effort instead of none, if the template needs it."""
        template = template_of(policy, name)
        later = any(message["role"] == "system" for message in body["messages"][1:])
        if later and await template.wants_system_first(tokenize):
            body["messages"] = with_system_first(body["messages"])
        if body.get("reasoning_effort") == "none" and not await template.can_skip_thinking(tokenize):
            body["reasoning_effort"] = "low"

    def refusal(self, refusal: RefusalError) -> bytes:
        """Return a refusal of the gateway as this API's error object."""
        return orjson.dumps(error_object(refusal.status, str(refusal)))

    def upstream_refusal(self, status: int, payload: bytes) -> bytes:
        """Return vLLM's refusal as this API's error object. A payload that is not one of vLLM's errors becomes the message as
        it is."""
        try:
            message = str(orjson.loads(payload)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            message = payload.decode("utf-8", "replace")
        return orjson.dumps(error_object(status, message))


class MessageTranslator(Translator):
    """Translates vLLM's chat answer to a Message of this API."""

    def __init__(self, message_id: str) -> None:
        super().__init__(message_id)
        self._begun = False
        self._stop: object = None

    def broken(self, refusal: RefusalError) -> bytes:
        """Return the `error` event that tells the agent that a stream broke off."""
        return event(error_object(refusal.status, str(refusal)))

    def _read(self, answer: Body, choice: Body | None) -> None:
        super()._read(answer, choice)
        if choice is not None and choice.get("finish_reason"):
            self._stop = choice.get("stop_reason")

    def answer(self) -> Body:
        """Return the Message for the whole answer, also for one that was read as a stream."""
        content = [self._block(part) for part in self._parts.all]
        return self._message(content, usage_of(self._usage)) | self._reason()

    def _message(self, content: list[Body], usage: Body) -> Body:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _reason(self) -> Body:
        """Return the stop reason. vLLM gives a matched stop string as its `stop_reason`, and ends a forced tool call with
        `stop`, which is `tool_use` here."""
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
    """Return an error object in the shape of this API."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def delta_of(kind: Kind, piece: str) -> Body:
    """Return the delta object for a piece of a block of this kind."""
    if kind is Kind.TEXT:
        return {"type": "text_delta", "text": piece}
    if kind is Kind.REASONING:
        return {"type": "thinking_delta", "thinking": piece}
    return {"type": "input_json_delta", "partial_json": piece}


def arguments_of(text: str) -> Body:
    """Read a tool call's arguments as an object, or `{"INVALID_JSON": text}` if they are not one. They are read with `json`,
    because orjson rounds integers above 64 bits."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def usage_of(usage: Body | None) -> Body:
    """Return token counts under the names of this API, in which tokens from the cache are not part of `input_tokens`."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage.get("completion_tokens") or 0}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        counts |= {"input_tokens": counts["input_tokens"] - cached, "cache_read_input_tokens": cached}
    return counts
