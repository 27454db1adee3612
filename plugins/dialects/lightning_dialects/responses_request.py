"""Translate a Responses request to a chat completion request.

The invariant (law 7): parameters that vLLM knows are passed on under vLLM's names, unknown ones as they are; a parameter with a
meaning that could only be ignored is refused with the cure. Items of one answer (reasoning, text, tool calls) become one
assistant message again, as in vLLM's own translation, so that the prompt is the same as through chat completions.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.gateway.dialects import refuse_parameter
from lightning.gateway.http import Body

from lightning_dialects.client_tools import (
    CALLS,
    KINDS,
    OUTPUTS,
    function_call,
    function_of,
    is_of_the_client,
    output_of,
)
from lightning_dialects.translated import ask_for_stream, items_of, object_field, passed_on, text_field

SEPARATOR = "__"
"""The separator between a namespace and a tool's name, as in vLLM."""
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(asked: object, before: Sequence[Body] = ()) -> list[Body]:
    """Return the messages `before` (not changed in place), followed by those for the `input` of a request.

    Raises `RefusalError` (422) for items that only OpenAI's own servers can read.
    """
    messages = [dict(message) for message in before]
    if isinstance(asked, str):
        return [*messages, {"role": "user", "content": asked}]
    for number, item in enumerate(items_of(asked, "input")):
        _add(messages, item, f"input[{number}]")
    return messages


def goes_on(asked: object) -> bool:
    """Return whether the last item is an unfinished assistant message, which the model must continue."""
    if not isinstance(asked, list) or not asked:
        return False
    last = asked[-1]
    said = last.get("type", "message") in {"message", "reasoning"}
    return said and last.get("status") in {"in_progress", "incomplete"}


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
    elif kind in CALLS:
        _call(messages, function_call(item, where), where)
    elif kind in OUTPUTS:
        said = output_of(item, where)
        messages.append({"role": "tool", "content": said["output"], "tool_call_id": said["call_id"]})
    elif kind == "reasoning":
        _think(messages, item, where)
    elif kind == "item_reference":
        raise refuse_parameter(where, "is an item_reference; send the item itself, or previous_response_id.")
    else:
        why = f"has the type {kind!r}; send messages, function calls and their outputs, and reasoning."
        raise refuse_parameter(where, why)


def _say(messages: list[Body], name: str, value: str) -> None:
    """Set the field `name` of the last message if that is an assistant message without it; else add an assistant message."""
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
            # An answer begins with its reasoning, so that this always begins a new message.
            messages.append({"role": "assistant", "reasoning": _plain(item[name], f"{where}.{name}")})
            return
    if item.get("encrypted_content"):
        why = "can be read by the server that wrote it only; leave this reasoning item out."
        raise refuse_parameter(f"{where}.encrypted_content", why)


def _plain(content: object, where: str) -> str:
    """Return the text of content that must be text. Raises `RefusalError` (422) for any other part."""
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
    """Translate content parts for vLLM's chat; parts with the same name in both APIs are passed on unchanged."""
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


RENAMED = {"max_output_tokens": "max_completion_tokens"}
ELSEWHERE = frozenset(
    {"input", "instructions", "previous_response_id", "include", "top_logprobs", "text", "reasoning", "tools"}
    | {"tool_choice", "stream", "stream_options", "truncation"}
)
"""Parameters that functions of their own translate."""
WITHOUT_EFFECT = frozenset(
    {"model", "store", "metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prompt_cache_options", "max_tool_calls", "access_programs", "image"}
)
"""Parameters that are dropped: they concern OpenAI's accounts, caches and built-in tools, not the answer."""
REFUSED = {
    "background": "is not supported: the gateway answers while you wait. Leave it out, or use 'stream'.",
    "conversation": "is not supported: the gateway has no conversation objects. Send the whole input, or previous_response_id.",
    "moderation": "is not supported: the gateway asks no other model. Moderate in the agent.",
    "prompt": "is not supported: prompt templates lie on OpenAI's servers. Send their text as instructions and input.",
    "context_management": "is not supported: the policy must see the context as it is. Shorten the input in the agent.",
}
KNOWN = frozenset({"function", "namespace"})
"""Types of tools that become functions of the chat, besides client tools."""
LOGPROBS = "message.output_text.logprobs"


def chat_request(asked: Body, messages: list[Body]) -> Body:
    """Translate a Responses request to the chat request with these messages. Raises `RefusalError` (422)."""
    chat = passed_on(asked, WITHOUT_EFFECT | ELSEWHERE, RENAMED, REFUSED)
    chat["messages"] = messages
    ask_for_stream(chat, asked)
    _logprobs(chat, asked)
    _format(chat, asked)
    _tools(chat, asked)
    if asked.get("truncation") == "auto":
        chat.setdefault("truncate_prompt_tokens", -1)
    if goes_on(asked.get("input")):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _logprobs(chat: Body, asked: Body) -> None:
    include = asked.get("include") or []
    if not isinstance(include, list):
        raise refuse_parameter("include", "must be a list of strings.")
    if LOGPROBS in include:  # the rest is what built-in tools would add, or OpenAI's encrypted reasoning
        chat |= {"logprobs": True, "top_logprobs": asked.get("top_logprobs") or 0}


def _format(chat: Body, asked: Body) -> None:
    """Translate `text.format` and `reasoning.effort`. vLLM has no counterpart of `text.verbosity` and `reasoning.summary`."""
    text, reasoning = object_field(asked, "text"), object_field(asked, "reasoning")
    wanted = text.get("format") or {}
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted.get("type", "text") != "text":
        chat["response_format"] = wanted
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]


def _tools(chat: Body, asked: Body) -> None:
    """Translate tools and `tool_choice`. Functions are passed on exactly as sent (`strict`, too); a choice of "auto" or "none"
    without tools is dropped."""
    tools = [tool for found, tool in _functions(asked)]
    if tools:
        chat["tools"] = tools
    choice = asked.get("tool_choice")
    if isinstance(choice, dict):
        chat["tool_choice"] = {"type": "function", "function": {"name": _chosen(choice)}}
    elif choice is not None and (tools or choice not in {"auto", "none"}):
        chat["tool_choice"] = choice


def _chosen(choice: Body) -> str:
    if choice.get("type") == "allowed_tools":
        raise refuse_parameter("tool_choice", "cannot be allowed_tools; send only these tools instead.")
    if choice.get("type") in KINDS:
        return text_field(choice, "name", "tool_choice") if choice["type"] == "custom" else str(choice["type"])
    if choice.get("type") != "function":
        why = f"cannot be {choice.get('type')!r}; it must be 'auto', 'none', 'required' or a function."
        raise refuse_parameter("tool_choice", why)
    name = text_field(choice, "name", "tool_choice")
    return f"{choice['namespace']}{SEPARATOR}{name}" if choice.get("namespace") else name


def namespaces(asked: Body) -> dict[str, tuple[str, str]]:
    """Return (namespace, name) of each tool in a namespace, by the name that the model sees."""
    return {
        tool["function"]["name"]: (space, tool["function"]["name"].removeprefix(f"{space}{SEPARATOR}"))
        for space, tool in _functions(asked)
        if space
    }


def _functions(asked: Body) -> list[tuple[str, Body]]:
    found: list[tuple[str, Body]] = []
    for number, tool in enumerate(items_of(asked.get("tools") or [], "tools")):
        where = f"tools[{number}]"
        if tool.get("type") == "namespace":
            space = text_field(tool, "name", where)
            inner = items_of(tool.get("tools"), f"{where}.tools")
            found += [(space, _function(item, f"{where}.tools[{at}]", space)) for at, item in enumerate(inner)]
        else:
            found.append(("", _function(tool, where)))
    return found


def hosted_tools(asked: Body) -> list[str]:
    """Return the types of a request's tools that would run on OpenAI's servers, in order."""
    tools = items_of(asked.get("tools") or [], "tools")
    return [str(tool.get("type")) for tool in tools if not (tool.get("type") in KNOWN or is_of_the_client(tool))]


def without_hosted_tools(asked: Body) -> Body:
    """Return the request without its hosted tools; a `tool_choice` of one of them is removed."""
    tools = [tool for tool in asked["tools"] if tool.get("type") in KNOWN or is_of_the_client(tool)]
    choice = asked.get("tool_choice")
    chosen = isinstance(choice, dict) and choice.get("type") in set(hosted_tools(asked))
    return {**asked, "tools": tools, **({"tool_choice": None} if chosen else {})}


def _function(tool: Body, where: str, space: str = "") -> Body:
    if is_of_the_client(tool):
        return {"type": "function", "function": function_of(tool, where)}
    if tool.get("type") != "function":
        why = f"is {tool.get('type')!r}, which runs on OpenAI's servers. Give the agent a function tool that does it, or set "
        why += "gateway.hosted_tools to 'drop' and let it do without."
        raise refuse_parameter(f"{where}.type", why)
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    name = text_field(tool, "name", where)
    return {"type": "function", "function": {**function, "name": f"{space}{SEPARATOR}{name}" if space else name}}
