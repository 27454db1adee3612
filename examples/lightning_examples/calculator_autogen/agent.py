"""An AutoGen agent for a model that knows no tools: it writes a calculation as text, and AutoGen's tool object does it.

The chat template of a small model has no place for `tools=`. So the `AssistantAgent` is shown worked examples, and each of its
turns is one line: a calculation, to which the result is the reply, or `Answer: N`. Nothing in this file knows that it is being
trained: `llm` only says where the model is.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.model_context import UnboundedChatCompletionContext
from autogen_core.models import AssistantMessage, LLMMessage, ModelFamily, ModelInfo, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import DefaultAsyncHttpxClient

from lightning_examples.calculator import calculate

if TYPE_CHECKING:
    from lightning import LLM, Task

NAME = "solver"
SYSTEM = "Write the calculation that solves the problem. When its result is there, write Answer: and the result."
EXAMPLES = (
    ("Tom has 30 cups. Tom gives away 4. How many cups are left?", "30 - 4", "26"),
    ("Sue has 41 nuts and buys 9 more. How many nuts does Sue have now?", "41 + 9", "50"),
    ("There are 3 boxes with 12 pears each. How many pears are there in all?", "3 * 12", "36"),
    ("Rob shares 24 figs equally among 4 friends. How many figs does each friend get?", "24 / 4", "6"),
    ("Max has 10 pins, finds 8 more and then loses 3. How many pins does Max have now?", "10 + 8 - 3", "15"),
    ("Uma has 50 keys and buys 2 bags of 7 more. How many keys does Uma have now?", "50 + 2 * 7", "64"),
)
"""A problem, its calculation and the result."""
MAX_TURNS = 3
MAX_TOKENS = 16
FORM = 0.2
"""Part of the reward for calculating and then answering, right or wrong."""
ANSWER = re.compile(r"Answer: *(-?\d+(?:\.\d+)?)\.?")
MODEL_INFO = ModelInfo(
    vision=False, function_calling=False, json_output=False, family=ModelFamily.UNKNOWN, structured_output=False
)
CALCULATOR = FunctionTool(calculate, description="The value of an arithmetic expression.")


async def agent(task: Task, llm: LLM) -> dict[str, float]:
    """Solve one word problem. `correct` is 1.0 for exactly the right number; `reward` counts the form of the work besides."""
    solver = AssistantAgent(
        NAME,
        model_client=client_of(llm),
        model_context=UnboundedChatCompletionContext(initial_messages=worked_examples()),
        system_message=SYSTEM,
    )
    said_to_it = str(task.input)
    for turn in range(MAX_TURNS):
        result = await solver.run(task=said_to_it)
        said = result.messages[-1].to_text().strip()
        if ANSWER.fullmatch(said):
            return grade(said, task.expected, calculated=turn > 0)
        try:
            said_to_it = CALCULATOR.return_value_as_string(
                await CALCULATOR.run_json({"expression": said}, CancellationToken(), call_id=str(turn))
            )
        except ValueError:  # not a calculation: the trace has the tool's failure
            break
    return grade("", task.expected, calculated=False)


def grade(said: str, expected: object, *, calculated: bool) -> dict[str, float]:
    """The rewards of an agent whose last words are `said`; `calculated` says whether the calculator was used before."""
    answer = ANSWER.fullmatch(said)
    if answer is None:
        return {"reward": 0.0, "correct": 0.0}
    correct = float(float(answer[1]) == float(str(expected)))
    return {"reward": FORM * calculated + (1 - FORM) * correct, "correct": correct}


def client_of(llm: LLM) -> OpenAIChatCompletionClient:
    """AutoGen's client of the model; a turn is one line."""
    return OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.base_url,
        api_key=llm.api_key,
        model_info=MODEL_INFO,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        stop=["\n"],
        http_client=_http(),  # type: ignore[call-arg]  # handed on to the `openai` client, which takes it
    )


def worked_examples() -> list[LLMMessage]:
    """The examples as messages of a conversation that has been."""
    return [
        message
        for problem, calculation, result in EXAMPLES
        for message in (
            UserMessage(content=problem, source="user"),
            AssistantMessage(content=calculation, source=NAME),
            UserMessage(content=result, source="user"),
            AssistantMessage(content=f"Answer: {result}", source=NAME),
        )
    ]


@functools.cache
def _http() -> DefaultAsyncHttpxClient:
    # A new pool loads the certificate store (80 ms); the key of each rollout travels with its requests anyway.
    return DefaultAsyncHttpxClient()
