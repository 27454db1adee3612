"""What the model says to any program: it uses each tool that it is offered once, with arguments that fit their schema, then
answers, in JSON where a schema asks for it.

The invariant: an answer is a function of the request alone but for the ids of tool calls, of which none is given twice.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.testing import Reply, ToolCall

TEXT = "The answer is 42."
TURNS = 2
"""Turns with tool calls after the last message of a user."""
AT_ONCE = 2
"""Tools that are called in one turn."""
WORDS = {
    "expression": "6 * 7",
    "city": "Tokyo",
    "location": "Tokyo",
    "date": "2026-01-31",
    "url": "http://127.0.0.1:9/",
}
ARGUMENTS = {
    "apply_patch": {"operation": {"type": "create_file", "path": "tasks.md", "diff": "+- [ ] tea\n+- [ ] milk"}}
}
"""Of tools whose schema does not say all: a file that is created has a diff."""
TWICE = "Call it twice at once."
"""A tool whose description says so is called twice in one turn, with the same arguments."""
LAST = ("final_answer", "finish")
"""Tools that end a run: called once no other is left."""
FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "uri": "http://127.0.0.1:9/",
    "email": "a@b.example",
}
MARKER = re.compile(r"`\[\[ ## (\w+) ## \]\]`")

Json = Mapping[str, Any]

_ids = itertools.count(1)


def answer(body: Json) -> Reply:
    """The reply to a chat request."""
    messages = body["messages"]
    calls = _calls(body, messages)
    if calls:
        return Reply(tool_calls=calls)
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        return Reply(json.dumps(example(wanted["json_schema"].get("schema") or {})))
    if wanted.get("type") == "json_object":
        return Reply(json.dumps({"answer": 42}))
    return Reply(_protocol(messages), reasoning="It is 6 times 7." if body.get("reasoning_effort") else "")


def _calls(body: Json, messages: Sequence[Json]) -> list[ToolCall]:
    choice, turns = body.get("tool_choice"), _turns(messages)
    offered = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    if not offered or choice == "none" or turns >= TURNS + (choice not in (None, "auto")):
        return []
    if isinstance(choice, dict):
        names = [choice["function"]["name"]]
    else:
        used = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
        left = [name for name in offered if name not in used and name not in LAST]
        ends = [name for name in offered if name in LAST]
        # To hand over ends an agent's turn, so it comes after the other tools, alone.
        hands = sorted(name for name in left if name.startswith(("transfer_", "handoff")))
        # Some frameworks tell of earlier calls in text: then nobody knows which tools have been used.
        spoken = bool(ends) and any(message["role"] == "assistant" for message in messages)
        names = [name for name in left if name not in hands and not spoken][:AT_ONCE] or hands[:1] or ends
        names = names or (list(offered)[:1] if choice == "required" else [])
        names = [name for name in names for _ in range(1 + (TWICE in (offered[name].get("description") or "")))]
    if body.get("parallel_tool_calls") is False:
        names = names[:1]
    return [
        ToolCall(
            name,
            json.dumps(ARGUMENTS.get(name) or example(offered[name].get("parameters") or {})),
            f"call_{next(_ids):08d}",
        )
        for name in names
    ]


def _turns(messages: Sequence[Json]) -> int:
    """The turns with tool calls since a user last spoke."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return sum(bool(message.get("tool_calls")) for message in messages[users[-1] if users else 0 :])


def _protocol(messages: Sequence[Json]) -> str:
    """Plain text, in the form that a framework which parses text has asked for."""
    text = "\n".join(text_of(message) for message in messages if message["role"] in ("system", "developer", "user"))
    if fields := MARKER.findall(text.rpartition("Respond with the corresponding output fields")[2]):
        values = {"next_tool_name": "finish", "next_tool_args": "{}"}
        return "\n\n".join(f"[[ ## {name} ## ]]\n{values.get(name, '42')}" for name in fields)
    if "<code>" in text and "final_answer" in text:
        return "Thought: I know it.\n<code>\nfinal_answer('42')\n</code>"
    if "Final Answer:" in text:
        return "Thought: I now can give a great answer\nFinal Answer: 42"
    if "Answer: [your answer here" in text:
        return "Thought: I can answer without using any more tools.\nAnswer: 42"
    return TEXT


def text_of(message: Json) -> str:
    """The text of a message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def example(schema: Json, name: str = "", root: Json | None = None) -> Any:
    """A value that fits a JSON schema; `name` is the property's, which tells what text is sensible."""
    root = schema if root is None else root
    if "$ref" in schema:
        place: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            place = place[step]
        return example(place, name, root)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            fitting = [one for one in schema[several] if one.get("type") != "null"] or [{"type": "null"}]
            return example(fitting[0], name, root)
    return _of_type(schema, name, root)


def _of_type(schema: Json, name: str, root: Json) -> Any:
    kind = schema.get("type") or ("object" if "properties" in schema else "string")
    kind = next(one for one in kind if one != "null") if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required", schema.get("properties") or ())
        return {
            key: example(one, key, root) for key, one in (schema.get("properties") or {}).items() if key in required
        }
    if kind == "array":
        return [example(schema.get("items") or {}, name, root)] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        value = schema.get("minimum", 3)
        return min(value, schema.get("maximum", value))
    if kind in ("boolean", "null"):
        return True if kind == "boolean" else None
    text = FORMATS.get(schema.get("format", "")) or WORDS.get(name.lower(), f"some {name or 'text'}")
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength")]
