"""The agent of `math_autogen` with room for a real model: a calculator for all of Calc-X, more steps, longer replies."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from autogen_agentchat.agents import AssistantAgent

from lightning_examples.math_autogen.agent import ANSWER, NAME, client_of
from lightning_examples.math_autogen.tasks import number
from lightning_examples.paper.calcx.calculator import calculator

if TYPE_CHECKING:
    from lightning import LLM, Task

SYSTEM = (
    "You solve math problems. Use the calculator for every calculation. End your last message with one line: "
    "`The answer is N.`, where N is a number such as 18, -3.5 or 2/3, without a unit."
)
MAX_CALLS = 12
"""Calls of the model: most of Calc-X's solutions take 2 to 8 calculations, one a call, and the answer."""
MAX_TOKENS = 512
"""For a reply: a thought and a call of the tool. Published: 2,048 for a whole rollout."""
TOLERANCE = 0.01
"""Relative; published. Calc-X's own results are rounded here and there."""


async def agent(task: Task, llm: LLM) -> float:
    """Solve one word problem; the reward is 1.0 for the right number, else 0.0."""
    mathematician = AssistantAgent(
        NAME,
        model_client=client_of(llm, MAX_TOKENS),
        tools=[calculator],
        system_message=SYSTEM,
        max_tool_iterations=MAX_CALLS,
    )
    result = await mathematician.run(task=str(task.input))
    return grade(result.messages[-1].to_text(), task)


def grade(reply: str, task: Task) -> float:
    """Ends with `... answer is N.`, and N is within a hundredth of the right number."""
    said = ANSWER.search(reply)
    answer = number(said[1]) if said else None
    return float(answer is not None and math.isclose(answer, Fraction(str(task.expected)), rel_tol=TOLERANCE))
