"""The scripted policy of the conformance kit: a model that plays every agent the kit asks for.

The invariant: its answer is a function of the request alone, tool call ids included, so that two runs of one agent send
the same requests. What it cannot play is answered with a 400 that tells the adapter's author what the agent lacks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.testing.vllm_replies import Reply, ToolCall

ANSWER = "The answer is 42."
HANG = "hang"
"""A user text with this word is answered after `HANG_SECONDS`."""
HANG_SECONDS = 60.0
REFUSE = "refuse"
"""A user text with this word is answered with a 400, which clients do not retry."""
BAD = "bad"
"""A user text with this word makes the solver call its tool with an expression that fails, and then with a good one."""

NAMED = re.compile(r"You are (\w+)\.")


def play(body: Mapping[str, Any]) -> Reply:
    """What the model says to a chat request, by the agent's instructions and the last user message."""
    messages = body["messages"]
    system = " ".join(text_of(item) for item in messages if item["role"] in ("system", "developer"))
    found = NAMED.search(system)
    if found is None:
        return _refusal(f"the system message is {system!r}; the kit's agents say 'You are NAME.' and nothing else")
    said = [number for number, item in enumerate(messages) if item["role"] == "user"]
    text = text_of(messages[said[-1]]) if said else ""
    results = sum(item["role"] == "tool" for item in messages[said[-1] if said else 0 :])
    if REFUSE in text:
        return _refusal("the kit's model refuses, as it was told to")
    parts = {"solver": _solver, "boss": _boss, "writer": _writer, "checker": _checker, "echo": _echo}
    part = parts.get(found[1])
    if part is None:
        return _refusal(f"the agent {found[1]!r} is not in the kit: there are {', '.join(parts)}")
    reply = part(body, text, results)
    return Reply(reply.text, delay=HANG_SECONDS) if HANG in text else reply


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def _solver(body: Mapping[str, Any], text: str, results: int) -> Reply:
    expressions = ["bad", "6 * 7"] if BAD in text else ["6 * 7"]
    if results >= len(expressions):
        return Reply(ANSWER)
    return _calls(body, {"calculator": expressions[results]}, only="expression")


def _boss(body: Mapping[str, Any], text: str, results: int) -> Reply:
    return Reply("Both have answered.") if results else _calls(body, {"ask_math": text, "ask_echo": text})


def _writer(_body: Mapping[str, Any], text: str, _results: int) -> Reply:
    return Reply(f"A draft about {text}")


def _checker(_body: Mapping[str, Any], _text: str, _results: int) -> Reply:
    return Reply("Approved by the checker.")


def _echo(_body: Mapping[str, Any], text: str, _results: int) -> Reply:
    return Reply(f"Echo of {text}")


def _calls(body: Mapping[str, Any], wanted: Mapping[str, str], only: str = "") -> Reply:
    """Tool calls, in parallel, each with a text as its first parameter (or the one called `only`)."""
    offered = {item["function"]["name"]: item["function"] for item in body.get("tools") or ()}
    missing = sorted(set(wanted) - set(offered))
    if missing:
        return _refusal(f"the agent offers the tools {sorted(offered)}; the kit needs it to have {missing}")
    calls = []
    for number, (name, text) in enumerate(wanted.items()):
        schema = offered[name].get("parameters") or {}
        parameters: Sequence[str] = list(schema.get("required") or schema.get("properties") or ())
        if not parameters or (only and only not in parameters):
            return _refusal(f"the tool {name} has the parameters {parameters}; the kit needs {only or 'a text'!r}")
        arguments = json.dumps({only or parameters[0]: text})
        calls.append(ToolCall(name, arguments, _call_id(body["messages"], number)))
    return Reply(tool_calls=calls)


def _call_id(messages: Sequence[Mapping[str, Any]], number: int) -> str:
    """Different in each turn of a conversation, the same when the conversation is repeated."""
    seed = json.dumps([messages, number], sort_keys=True).encode()
    return f"chatcmpl-tool-{zlib.crc32(seed):08x}{len(messages):02x}{number:02x}"


def _refusal(message: str) -> Reply:
    return Reply(status=400, message=message)
