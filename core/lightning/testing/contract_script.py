"""The model of the conformance kit: a script that plays every agent the kit needs, in the framework's own wording.

The invariant: a reply depends on the request alone, tool call ids included, so that two runs of one agent send the same
requests. A request that the script cannot play is answered with a 400 that tells the adapter's author what the agent lacks.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from lightning.testing.vllm_replies import Reply, ToolCall

ANSWER = "The answer is 42."
HANG = "hang"
"""A user text with this word is answered after `HANG_SECONDS`."""
HANG_SECONDS = 60.0
REFUSE = "refuse"
"""A user text with this word is answered with a 400, which clients do not retry."""
BAD = "bad"
"""A user text with this word makes the solver call its tool with an expression that fails, and then with a good one."""
INVENT = "invent"
"""A user text with this word makes the solver call a tool that it does not have, and then its own."""
INVENTED = "no_such_tool"
"""The name of the invented tool."""

NAMED = re.compile(r"You are (\w+)\.")
PARAMETERS = {"calculator": "expression"}
"""The parameters whose names the kit requires, by tool."""
ANSWERS = {
    "solver": ANSWER,
    "boss": "Both have answered.",
    "writer": "A draft about {text}",
    "checker": "Approved by the checker.",
    "echo": "Echo of {text}",
}
"""The final answer of each of the kit's agents."""


class ScriptTurn(NamedTuple):
    """What a request says: the agent's name, the user's text, and the number of tool `results` after that text."""

    agent: str
    text: str
    results: int


class ReplyFormat:
    """How a framework words a request to the model and the model's decision: by default in native messages and tool calls.

    Derive from it for a framework that has the model write its decisions as text, and give an instance to the contract as
    `replies`. The script decides; `read` reads its requests, and `calls` and `answer` word its decisions.
    """

    answering_calls: ClassVar[int] = 1
    """How many model calls an agent makes to answer, once its tools have run."""

    def read(self, body: Mapping[str, Any]) -> ScriptTurn:
        """Read the agent, the text and the number of results from a chat request."""
        messages = body["messages"]
        system = " ".join(text_of(item) for item in messages if item["role"] in ("system", "developer"))
        found = NAMED.search(system)
        said = [number for number, item in enumerate(messages) if item["role"] == "user"]
        text = text_of(messages[said[-1]]) if said else ""
        results = sum(item["role"] == "tool" for item in messages[said[-1] if said else 0 :])
        return ScriptTurn(found[1] if found else "", text, results)

    def calls(self, body: Mapping[str, Any], wanted: Mapping[str, str]) -> Reply:
        """Word the decision to call tools, each with a text as its first parameter: all at once, or the first one where a reply
        holds one call."""
        offered = {item["function"]["name"]: item["function"] for item in body.get("tools") or ()}
        missing = sorted(set(wanted) - {INVENTED} - set(offered))
        if missing:
            return refusal(f"the agent offers the tools {sorted(offered)}; the kit needs it to have {missing}")
        calls = []
        for number, (name, text) in enumerate(wanted.items()):
            if name == INVENTED:
                calls.append(ToolCall(name, json.dumps({"query": text}), _call_id(body["messages"], number)))
                continue
            schema, only = offered[name].get("parameters") or {}, PARAMETERS.get(name, "")
            parameters: Sequence[str] = list(schema.get("required") or schema.get("properties") or ())
            if not parameters or (only and only not in parameters):
                return refusal(f"the tool {name} has the parameters {parameters}; the kit needs {only or 'a text'!r}")
            arguments = json.dumps({only or parameters[0]: text})
            calls.append(ToolCall(name, arguments, _call_id(body["messages"], number)))
        return Reply(tool_calls=calls)

    def answer(self, body: Mapping[str, Any], text: str) -> Reply:
        """Word the final answer to the user."""
        return Reply(text)


def play(body: Mapping[str, Any], replies: ReplyFormat) -> Reply:
    """Return what the model says to a chat request, by the agent's name and the user's text."""
    agent, text, results = replies.read(body)
    if not agent:
        said = [text_of(item) for item in body["messages"] if item["role"] in ("system", "developer")]
        return refusal(f"the system message is {' '.join(said)!r}; the kit's agents say 'You are NAME.'")
    if REFUSE in text:
        return refusal("the kit's model refuses, as it was told to")
    if agent not in ANSWERS:
        return refusal(f"the agent {agent!r} is not in the kit: there are {', '.join(ANSWERS)}")
    wanted = _tools(agent, text, results)
    reply = replies.calls(body, wanted) if wanted else replies.answer(body, ANSWERS[agent].format(text=text))
    return replace(reply, delay=HANG_SECONDS) if HANG in text else reply


def _tools(agent: str, text: str, results: int) -> dict[str, str]:
    """Return the tools that an agent calls next, each with the text of its parameter; empty if it answers."""
    if agent == "solver":
        steps = [{INVENTED: "x"}] if INVENT in text else [{"calculator": "bad"}] if BAD in text else []
        steps.append({"calculator": "6 * 7"})
        return steps[results] if results < len(steps) else {}
    if agent == "boss":
        return dict([("ask_math", text), ("ask_echo", text)][results:])
    return {}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content is a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def refusal(message: str) -> Reply:
    """Return a reply with status 400 and a message for the adapter's author."""
    return Reply(status=400, message=message)


def _call_id(messages: Sequence[Mapping[str, Any]], number: int) -> str:
    """Return an id that differs in each turn of a conversation, and is the same when the conversation is repeated."""
    seed = json.dumps([messages, number], sort_keys=True).encode()
    return f"chatcmpl-tool-{zlib.crc32(seed):08x}{len(messages):02x}{number:02x}"
