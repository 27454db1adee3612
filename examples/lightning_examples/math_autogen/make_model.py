"""Make the base model of this example from nothing: `python -m lightning_examples.math_autogen.make_model OUT --seed 0`.

Scripted demonstrators solve problems with the agent's own calculator, badly enough that the model has much to learn by
reinforcement, and a tiny Qwen3 learns to imitate them. The invariants: the conversations are what AutoGen sends (a test
compares them with its requests), and on one machine the folder follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from autogen_core.tools import FunctionTool
from lightning.types import Task

from lightning_examples.calculator import calculate
from lightning_examples.math_autogen.agent import MAX_CALLS, SYSTEM, grade
from lightning_examples.math_autogen.tasks import tasks
from lightning_examples.recipe.chatml import Conversation, Message, tool_call
from lightning_examples.recipe.make import command, make_solver
from lightning_examples.recipe.pretrain import Plan


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """How well someone solves problems; each field is a probability, taken at every step."""

    right_operator: float
    """Else they just add."""
    right_number: float
    """Else they take some number of the problem."""
    slip: float
    """They write the things with the numbers, which the calculator refuses, and must try again."""
    guess: float
    """They answer before it is worked out."""
    right_answer: float
    """Else their answer is some number of the problem."""


CLEANER = Demonstrator(right_operator=0.85, right_number=1.0, slip=0.03, guess=0.05, right_answer=1.0)
NOISY = Demonstrator(right_operator=0.5, right_number=0.98, slip=0.06, guess=0.08, right_answer=0.98)
DEMONSTRATIONS = 14_000
STEPS = 7000

_TOOL = FunctionTool(calculate, description=calculate.__doc__ or "")
TOOLS: Sequence[Message] = [cast(Message, {"type": "function", "function": _TOOL.schema})]
"""The calculator as AutoGen offers it."""


def demonstrate(task: Task, rng: random.Random, who: Demonstrator) -> Conversation:
    """One conversation; what the calculator says is what the agent's calculator says."""
    value = cast(int, task.metadata["start"])
    steps = list(cast(Sequence[tuple[str, int]], task.metadata["steps"]))
    numbers = [value, cast(int, task.metadata["distractor"]), *(number for _, number in steps)]
    thing = str(task.input).split()[3].rstrip(".")  # "Mia has 12 pens. ..."
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.input}]
    for turn in range(MAX_CALLS):
        if not steps or rng.random() < who.guess:
            if steps and rng.random() < 0.5:
                value += rng.randint(-9, 30)
            elif not steps and rng.random() >= who.right_answer:
                value = rng.choice(numbers)
            messages.append({"role": "assistant", "content": f"The answer is {value}."})
            break
        operator, number = steps[0]
        operator = operator if rng.random() < who.right_operator else "+"
        number = number if rng.random() < who.right_number else rng.choice(numbers)
        expression = f"{value} {operator} {number}"
        if rng.random() < who.slip:
            expression += f" {thing}"
        else:
            steps.pop(0)
        try:
            result = calculate(expression)
            value = int(result)
        except ValueError as error:
            result = str(error)  # AutoGen gives the model the exception's text
        messages.append(tool_call(f"call-{turn}", "calculate", {"expression": expression}))
        messages.append({"role": "tool", "tool_call_id": f"call-{turn}", "content": result})
    return Conversation(messages, TOOLS)


def make(folder: Path, plan: Plan) -> None:
    """Write tokenizer, configuration and weights to `folder`; minutes on one core."""
    problems = tasks(DEMONSTRATIONS, seed=plan.seed)
    make_solver(folder, problems, partial(demonstrate, who=CLEANER), partial(demonstrate, who=NOISY), grade, plan)


if __name__ == "__main__":
    command(__doc__, make, STEPS)
