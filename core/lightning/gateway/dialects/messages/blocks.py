"""Messages and content blocks of the Messages API as chat messages.

The invariant: the chat messages are those of vLLM's own translation. A tool's result is its text, whether it was an error
or not; results come before what else the user says in that message; cache marks have no meaning here.
"""

from __future__ import annotations

import json

from lightning.gateway.dialects.base import refuse_parameter
from lightning.gateway.dialects.translated import items_of, text_field
from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body

BILLING = "x-anthropic-billing-header"
"""Claude Code's first system block: it differs with every request, and says nothing to the model."""


def messages_of(asked: Body) -> list[Body]:
    """`system` and `messages` of a request. Raises `RefusalError` (422) for what only Anthropic's servers can read."""
    found: list[Body] = []
    _system(found, asked.get("system"), "system")
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
    if said is None:
        return
    texts = [said] if isinstance(said, str) else [_text(block, where) for block in items_of(said, where)]
    text = "".join(text for text in texts if not text.startswith(BILLING))
    if text:
        found.append({"role": "system", "content": text})


def _text(block: Body, where: str) -> str:
    if block.get("type") != "text":
        raise _unreadable(block, where)
    return text_field(block, "text", where)


def _unreadable(block: Body, where: str) -> RefusalError:
    why = f"has the type {block.get('type')!r}, which the model cannot read here; send its text instead."
    return refuse_parameter(where, why)


def _user(found: list[Body], blocks: list[Body], where: str) -> None:
    parts: list[Body] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            _result(found, block, place)
        elif block.get("type") == "image":
            parts.append(_image(block))
        elif text := _text(block, place):
            parts.append({"type": "text", "text": text})
    if parts:
        found.append({"role": "user", "content": _joined(parts)})


def _joined(parts: list[Body]) -> str | list[Body]:
    """One text as it is, else the parts."""
    only = parts[0] if len(parts) == 1 else {}
    return only["text"] if only.get("type") == "text" else parts


def _result(found: list[Body], block: Body, where: str) -> None:
    call_id, content = text_field(block, "tool_use_id", where), block.get("content")
    texts, images = [content] if isinstance(content, str) else [], []
    if content is not None and not isinstance(content, str):
        for number, item in enumerate(items_of(content, f"{where}.content")):
            if item.get("type") == "image":
                images.append(_image(item))
            else:
                texts.append(_text(item, f"{where}.content[{number}]"))
    found.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
    if images:
        found.append({"role": "user", "content": images})


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
    if parts:
        message["content"] = _joined(parts)
    return message
