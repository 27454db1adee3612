"""A math agent as AutoGen's documentation writes one: an `AssistantAgent` with a calculator, and a grader.

Nothing in this file knows that it is being trained: `llm` only says where the model is.
"""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import DefaultAsyncHttpxClient

from lightning_examples.calculator import calculate
from lightning_examples.math_autogen.tasks import NUMBER, number

if TYPE_CHECKING:
    from lightning import LLM, Task

NAME = "mathematician"
SYSTEM = "You solve math problems. Use the calculator for every step. End with: The answer is N."
MAX_CALLS = 5
MAX_TOKENS = 256
MODEL_INFO = ModelInfo(
    vision=False, function_calling=True, json_output=False, family=ModelFamily.UNKNOWN, structured_output=False
)
ANSWER = re.compile(rf"answer is\s+({NUMBER})\.?\s*$")


async def agent(task: Task, llm: LLM) -> float:
    """Solve one word problem and return the reward: 1.0 for exactly the right number, else 0.0."""
    mathematician = AssistantAgent(
        NAME,
        model_client=client_of(llm, MAX_TOKENS),
        tools=[calculate],
        system_message=SYSTEM,
        max_tool_iterations=MAX_CALLS,
    )
    result = await mathematician.run(task=str(task.input))
    return grade(result.messages[-1].to_text(), task)


def client_of(llm: LLM, max_tokens: int) -> OpenAIChatCompletionClient:
    """AutoGen's client of the model."""
    return OpenAIChatCompletionClient(
        model=llm.model,
        base_url=llm.base_url,
        api_key=llm.api_key,
        model_info=MODEL_INFO,
        max_tokens=max_tokens,
        http_client=_http(),  # type: ignore[call-arg]  # handed on to the `openai` client, which takes it
    )


def grade(reply: str, task: Task) -> float:
    """Ends with `... answer is N.`, and N is right.

    A whole number must be met exactly, any other to the six digits that the calculator shows.
    """
    said = ANSWER.search(reply)
    answer, expected = number(said[1]) if said else None, Fraction(str(task.expected))
    if answer is None:
        return 0.0
    if expected.denominator == 1:
        return float(answer == expected)
    return float(math.isclose(answer, expected, rel_tol=1e-5))


@functools.cache
def _http() -> DefaultAsyncHttpxClient:
    # A new pool loads the certificate store (80 ms); the key of each rollout travels with its requests anyway.
    return DefaultAsyncHttpxClient()
