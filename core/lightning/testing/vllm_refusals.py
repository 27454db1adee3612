"""What vLLM 0.31's chat route refuses with a 400, for a fake that is no more patient than the real one.

The invariant: what is refused here vLLM refuses as well; a test asks its own request class and renderer. The length of
a prompt is looked at elsewhere (`vllm_shapes.too_long`), and the fake's model takes pictures, sound and video.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

Refusal = tuple[str, str]
"""The message, and the field that it is about."""

NO_TEXT = "TextEncodeInput must be Union[TextInputSequence, Tuple[InputSequence, InputSequence]]"
"""What tokenizers say to a text with a lone surrogate, which vLLM passes on."""
SYSTEM_NOT_FIRST: Refusal = ("System message must be at the beginning.", "messages")
"""What a chat template such as Qwen3.5's raises, which vLLM passes on."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
UNTRUSTED = (
    "Chat template is passed with request, but --trust-request-chat-template is not set. "
    "Refused request with untrusted chat template."
)
RANGES = {
    "temperature": (0.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_p": (0.0, 1.0),
}
"""Numbers with the smallest and largest value that is taken."""


def refusal(body: Mapping[str, Any]) -> Refusal | None:
    """Why vLLM refuses a chat request, or None."""
    return next(_all(body), None)


def cannot_be_tokenized(body: Mapping[str, Any]) -> bool:
    """Whether something of the prompt is no text: half of a character."""
    try:
        json.dumps([body.get(name) for name in ("messages", "tools", "prompt")], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _all(body: Mapping[str, Any]) -> Iterator[Refusal]:
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        yield "messages must be a list that is not empty", "messages"
        return
    yield from _template(body)
    yield from _numbers(body)
    yield from _tools(body)
    yield from _formats(body)
    for message in body["messages"]:
        yield from _message(message)


def _template(body: Mapping[str, Any]) -> Iterator[Refusal]:
    for name, holder in (("chat_template", body), ("chat_template_kwargs", body.get("chat_template_kwargs") or {})):
        if holder.get("chat_template") is not None:
            yield UNTRUSTED, name


def _numbers(body: Mapping[str, Any]) -> Iterator[Refusal]:
    for name, (least, most) in RANGES.items():
        value = body.get(name)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            yield f"{name} must be in [{least:g}, {most:g}], got {value}.", name
    top_p = body.get("top_p")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        yield f"top_p must be in (0, 1], got {top_p}.", "top_p"
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None and body[name] < 1:
            yield f"max_tokens must be at least 1, got {body[name]}.", name
    if body.get("stream_options") and not body.get("stream"):
        yield "Stream options can only be defined when `stream=True`.", "stream_options"
    if body.get("top_logprobs") and not body.get("logprobs"):
        yield "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
    stops = body.get("stop") or []
    if any(not text for text in ([stops] if isinstance(stops, str) else stops)):
        yield "stop cannot contain an empty string.", "stop"
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        yield f"Input should be one of {EFFORTS}, got {effort!r}", "reasoning_effort"


def _tools(body: Mapping[str, Any]) -> Iterator[Refusal]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        yield (
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    names = []
    for tool in tools or ():
        if tool.get("type", "function") != "function" or not isinstance(tool.get("function", {}).get("name"), str):
            yield f"Input should be a function with a name, got {tool.get('type')!r}", "tools"
        else:
            names.append(tool["function"]["name"])
    if choice in (None, "none"):
        return
    if tools is None:
        yield "When using `tool_choice`, `tools` must be set.", "tool_choice"
    elif isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in names:
            yield "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
    elif choice not in ("auto", "required"):
        yield (
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def _formats(body: Mapping[str, Any]) -> Iterator[Refusal]:
    wanted = body.get("response_format") or {}
    kind = wanted.get("type", "text")
    if kind not in FORMATS:
        yield f"Input should be one of {FORMATS}, got {kind!r}", "response_format"
    elif kind == "json_schema" and wanted.get("json_schema") is None:
        yield "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"


def _message(message: Mapping[str, Any]) -> Iterator[Refusal]:
    if not isinstance(message.get("role"), str):
        yield "Field required: role", "messages"
    if message.get("role") != "assistant":
        return
    for call in message.get("tool_calls") or ():  # malformed arguments are taken for {}
        if not isinstance(call, Mapping):
            yield "assistant tool_calls entries must be objects.", "tool_calls"
        elif call.get("type", "function") != "function" or not isinstance(call.get("function"), Mapping):
            yield "chat completions only support assistant tool_calls of type 'function'.", "tool_calls"
