"""A math agent as one writes it with the `openai` client: a loop, three tools, a grader.

Nothing in this file knows that it is being trained: `llm` only says where the model is.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from openai import OpenAI

from lightning_examples.calculator import calculate

if TYPE_CHECKING:
    from lightning import LLM, Task
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

SYSTEM = "You solve math problems. Use tools for every step."
MAX_CALLS = 5
MAX_TOKENS = 40


def agent(task: Task, llm: LLM) -> float:
    """Solve one word problem and return the reward: 1.0 for exactly the right answer, else 0.0."""
    client = _client(llm.base_url).with_options(api_key=llm.api_key)
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": str(task.input)},
    ]
    for _ in range(MAX_CALLS):
        completion = client.chat.completions.create(
            model=llm.model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return grade(reply.content or "", task)
        messages.append(reply.model_dump(exclude_none=True))  # type: ignore[arg-type]
        for call in reply.tool_calls:
            result = run_tool(call.function.name, call.function.arguments) if call.type == "function" else UNKNOWN
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def grade(reply: str, task: Task) -> float:
    """Exactly `... answer is N.`, and the right N."""
    answer = re.search(r"answer is (-?\d+)\.?\s*$", reply)
    return float(answer is not None and int(answer[1]) == task.expected)


@functools.cache
def _client(base_url: str) -> OpenAI:
    # A new client builds a connection pool (tens of ms); a new key on the same client costs next to nothing.
    return OpenAI(base_url=base_url, api_key="set per call")


# --- tools ------------------------------------------------------------------------------------------------------------

UNKNOWN = "error: unknown tool"
FACTS = {"dozen": "12", "score": "20", "week": "7", "year": "365"}


def search(query: str) -> str:
    """Look a word up; there is rarely anything about the pens of one Mia."""
    return next((fact for word, fact in FACTS.items() if word in query.lower()), "no results")


def clock() -> str:
    """The time of day."""
    return datetime.now().astimezone().strftime("%H:%M")


def run_tool(name: str, arguments: str) -> str:
    """Run what the model asked for; whatever is wrong with it becomes an error text that the model can read."""
    function = FUNCTIONS.get(name)
    if function is None:
        return UNKNOWN
    try:
        values = json.loads(arguments or "{}")
        if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
            return "error: bad arguments"
        return function(**values)
    except json.JSONDecodeError:
        return "error: bad arguments"
    except TypeError:
        return "error: wrong arguments"
    except ValueError as error:
        return f"error: {error}"


def _tool(name: str, description: str, *parameters: str) -> ChatCompletionToolParam:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema: dict[str, object] = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


FUNCTIONS: dict[str, Callable[..., str]] = {"calculate": calculate, "search": search, "clock": clock}
TOOLS = [
    _tool("calculate", "Work out an arithmetic expression.", "expression"),
    _tool("search", "Look something up.", "query"),
    _tool("clock", "The time of day."),
]
