"""A Responses request as a chat completion request.

The invariant (law 7): what vLLM understands goes on under the name it has there, unknown parameters as they are; what
could only be ignored although it means something is refused with the cure.
"""

from __future__ import annotations

from lightning.gateway.dialects.base import refuse_parameter
from lightning.gateway.dialects.responses.items import SEPARATOR, goes_on
from lightning.gateway.dialects.translated import items_of, text_field
from lightning.gateway.sampling import Body

RENAMED = {"max_output_tokens": "max_completion_tokens"}
ELSEWHERE = frozenset(
    {"input", "instructions", "previous_response_id", "include", "top_logprobs", "text", "reasoning", "tools"}
    | {"tool_choice", "stream", "stream_options", "truncation"}
)
"""Translated by a function of their own."""
WITHOUT_EFFECT = frozenset(
    {"model", "store", "metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key"}
    | {"prompt_cache_retention", "prompt_cache_options", "max_tool_calls", "access_programs", "image", *RENAMED}
)
"""They concern OpenAI's accounts, caches and built-in tools, not the answer (or are renamed)."""
REFUSED = {
    "background": "is not supported: the gateway answers while you wait. Leave it out, or use 'stream'.",
    "conversation": "is not supported: the gateway has no conversation objects. Send the whole input, or previous_response_id.",
    "moderation": "is not supported: the gateway asks no other model. Moderate in the agent.",
    "prompt": "is not supported: prompt templates lie on OpenAI's servers. Send their text as instructions and input.",
    "context_management": "is not supported: the policy must see the context as it is. Shorten the input in the agent.",
}
LOGPROBS = "message.output_text.logprobs"


def chat_request(asked: Body, messages: list[Body]) -> Body:
    """The chat request with these messages. Raises `RefusalError` (422)."""
    for name, why in REFUSED.items():
        if asked.get(name):
            raise refuse_parameter(name, why)
    chat = {
        name: value
        for name, value in asked.items()
        if value is not None and name not in ELSEWHERE and name not in WITHOUT_EFFECT and name not in REFUSED
    }
    chat["messages"] = messages
    for name, other in RENAMED.items():
        if asked.get(name) is not None:
            chat[other] = asked[name]
    _stream(chat, asked)
    _logprobs(chat, asked)
    _format(chat, asked)
    _tools(chat, asked)
    if asked.get("truncation") == "auto":
        chat.setdefault("truncate_prompt_tokens", -1)
    if goes_on(asked["input"]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _stream(chat: Body, asked: Body) -> None:
    stream = asked.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise refuse_parameter("stream", f"must be true or false, not {stream!r}.")
    if stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}


def _logprobs(chat: Body, asked: Body) -> None:
    include = asked.get("include") or []
    if not isinstance(include, list):
        raise refuse_parameter("include", "must be a list of strings.")
    if LOGPROBS in include:  # the rest is what built-in tools would add, or OpenAI's encrypted reasoning
        chat |= {"logprobs": True, "top_logprobs": asked.get("top_logprobs") or 0}


def _format(chat: Body, asked: Body) -> None:
    """`text.format` and `reasoning.effort`; `text.verbosity` and `reasoning.summary` have no counterpart in vLLM."""
    text, reasoning = asked.get("text") or {}, asked.get("reasoning") or {}
    for name, value in (("text", text), ("reasoning", reasoning)):
        if not isinstance(value, dict):
            raise refuse_parameter(name, f"must be an object, not {type(value).__name__}.")
    wanted = text.get("format") or {}
    if wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted.get("type", "text") != "text":
        chat["response_format"] = wanted
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]


def _tools(chat: Body, asked: Body) -> None:
    """Function tools exactly as they were sent (`strict` too); a `tool_choice` without tools means nothing."""
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
    if choice.get("type") != "function":
        why = f"cannot be {choice.get('type')!r}; it must be 'auto', 'none', 'required' or a function."
        raise refuse_parameter("tool_choice", why)
    name = text_field(choice, "name", "tool_choice")
    return f"{choice['namespace']}{SEPARATOR}{name}" if choice.get("namespace") else name


def namespaces(asked: Body) -> dict[str, tuple[str, str]]:
    """The (namespace, name) of each tool that has one, by the name the model knows it by."""
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


def _function(tool: Body, where: str, space: str = "") -> Body:
    if tool.get("type") != "function":
        why = f"is {tool.get('type')!r}, which runs on OpenAI's servers. Give the agent a function tool that does it."
        raise refuse_parameter(f"{where}.type", why)
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    name = text_field(tool, "name", where)
    return {"type": "function", "function": {**function, "name": f"{space}{SEPARATOR}{name}" if space else name}}
