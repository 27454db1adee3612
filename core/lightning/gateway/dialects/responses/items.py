"""Input items of the Responses API as chat messages.

The invariant: items that one answer gave (reasoning, text, tool calls) become one assistant message again, as vLLM's own
translation makes them, so that the prompt is the same as through chat completions.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.gateway.dialects.base import refuse_parameter
from lightning.gateway.dialects.translated import items_of, text_field
from lightning.gateway.errors import RefusalError
from lightning.gateway.sampling import Body

SEPARATOR = "__"
"""Between a namespace and a tool's name, as vLLM joins them."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(asked: object, before: Sequence[Body] = ()) -> list[Body]:
    """The `input` of a request, after the messages `before` it (which are not changed).

    Raises `RefusalError` (422) for items that only OpenAI's own servers can read.
    """
    messages = [dict(message) for message in before]
    if isinstance(asked, str):
        return [*messages, {"role": "user", "content": asked}]
    for number, item in enumerate(items_of(asked, "input")):
        _add(messages, item, f"input[{number}]")
    return messages


def goes_on(asked: object) -> bool:
    """Whether the last item is an unfinished assistant message, which the model is to continue."""
    if not isinstance(asked, list) or not asked:
        return False
    last = asked[-1]
    return last.get("type", "message") in {"message", "reasoning"} and last.get("status") in {
        "in_progress",
        "incomplete",
    }


def _add(messages: list[Body], item: Body, where: str) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message" and item.get("role") == "assistant":
        _say(messages, "content", _plain(item.get("content"), f"{where}.content"))
    elif kind == "message":
        role = text_field(item, "role", where)
        messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
    elif kind == "function_call":
        _call(messages, item, where)
    elif kind == "function_call_output":
        call_id = text_field(item, "call_id", where)
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind == "reasoning":
        _think(messages, item, where)
    else:
        raise _unreadable(where, kind)


def _unreadable(where: str, kind: object) -> RefusalError:
    if kind == "item_reference":
        why = "is an item_reference; send the item itself, or previous_response_id."
    else:
        why = f"has the type {kind!r}; send messages, function calls and their outputs, and reasoning."
    return refuse_parameter(where, why)


def _say(messages: list[Body], name: str, value: str) -> None:
    """Put it into the assistant message before it, if that has no such thing yet, else into a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last.get(name) is None:
        last[name] = value
    else:
        messages.append({"role": "assistant", name: value})


def _call(messages: list[Body], item: Body, where: str) -> None:
    name = text_field(item, "name", where)
    if item.get("namespace"):
        name = f"{item['namespace']}{SEPARATOR}{name}"
    function = {"name": name, "arguments": text_field(item, "arguments", where)}
    call = {"id": text_field(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    last = messages[-1]
    last["tool_calls"] = [*last.get("tool_calls", ()), call]


def _think(messages: list[Body], item: Body, where: str) -> None:
    for name in ("content", "summary"):
        if item.get(name):
            # An answer begins with its reasoning, so this is never a part of the message before it.
            messages.append({"role": "assistant", "reasoning": _plain(item[name], f"{where}.{name}")})
            return
    if item.get("encrypted_content"):
        why = "can be read by the server that wrote it only; leave this reasoning item out."
        raise refuse_parameter(f"{where}.encrypted_content", why)


def _plain(content: object, where: str) -> str:
    """The text of a message that can be only text."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(items_of(content, where)):
        place = f"{where}[{number}]"
        if part.get("type") == "refusal":
            texts.append(text_field(part, "refusal", place))
        elif part.get("type") in TEXTS:
            texts.append(text_field(part, "text", place))
        else:
            raise refuse_parameter(place, f"has the type {part.get('type')!r}; here it must be text.")
    return "".join(texts)


def _content(content: object, where: str) -> str | list[Body]:
    """Content parts as vLLM's chat takes them; parts it knows under the same name in both APIs are passed on."""
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}[{number}]") for number, part in enumerate(items_of(content, where))]


def _part(part: Body, where: str) -> Body:
    kind = part.get("type")
    if kind in TEXTS:
        return {"type": "text", "text": text_field(part, "text", where)}
    if kind == "input_image" and part.get("image_url"):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind in {"input_file", "input_image"}:
        raise refuse_parameter(where, f"is an {kind} that lies elsewhere; send its text, or an image as a data URL.")
    return part
