"""Make the base model of this example from nothing: `python -m lightning_examples.raw_python.make_model OUT --seed 0`.

Scripted demonstrators solve problems with the agent's own tools, badly enough that the model has much to learn by
reinforcement, and a tiny Qwen3 learns to imitate them. The invariant: on one machine the folder follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from lightning.types import Task

from lightning_examples.calculator import calculate
from lightning_examples.raw_python.agent import MAX_CALLS, SYSTEM, TOOLS, grade, search
from lightning_examples.recipe.chatml import Conversation, Message, tool_call
from lightning_examples.recipe.make import command, make_solver
from lightning_examples.recipe.pretrain import Plan
from lightning_examples.word_problems import tasks


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """How well someone solves problems; each field is a probability, taken at every step."""

    right_operator: float
    """Else they just add."""
    right_number: float = 1.0
    """Else they take some number of the problem."""
    wrong_tool: float = 0.0
    """They ask the search or the clock before they go on."""
    guess: float = 0.0
    """They answer before it is worked out."""
    right_answer: float = 1.0
    """Else their answer is some number of the problem."""


CLEANER = Demonstrator(right_operator=0.85, wrong_tool=0.03, guess=0.05)
NOISY = Demonstrator(right_operator=0.5, right_number=0.98, wrong_tool=0.06, guess=0.08, right_answer=0.98)
DEMONSTRATIONS = 14_000
STEPS = 7000


def demonstrate(task: Task, rng: random.Random, who: Demonstrator) -> Conversation:
    """One conversation; what the tools say is what the agent's tools say (the clock shows a time of the seed's choice)."""
    value = cast(int, task.metadata["start"])
    steps = list(cast(Sequence[tuple[str, int]], task.metadata["steps"]))
    numbers = [value, cast(int, task.metadata["distractor"]), *(number for _, number in steps)]
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.input}]
    for turn in range(MAX_CALLS):
        if not steps or rng.random() < who.guess:
            if steps and rng.random() < 0.5:
                value += rng.randint(-9, 30)
            elif not steps and rng.random() >= who.right_answer:
                value = rng.choice(numbers)
            messages.append({"role": "assistant", "content": f"The answer is {value}."})
            break
        if rng.random() < who.wrong_tool:
            name, arguments, result = _distraction(task, rng)
        else:
            operator, number = steps.pop(0)
            operator = operator if rng.random() < who.right_operator else "+"
            number = number if rng.random() < who.right_number else rng.choice(numbers)
            name, arguments = "calculate", {"expression": f"{value} {operator} {number}"}
            result = calculate(arguments["expression"])
            value = int(result)
        messages.append(tool_call(f"call-{turn}", name, arguments))
        messages.append({"role": "tool", "tool_call_id": f"call-{turn}", "content": result})
    return Conversation(messages, cast(Sequence[Message], TOOLS))


def make(folder: Path, plan: Plan) -> None:
    """Write tokenizer, configuration and weights to `folder`; minutes on one core."""
    problems = tasks(DEMONSTRATIONS, seed=plan.seed)
    make_solver(folder, problems, partial(demonstrate, who=CLEANER), partial(demonstrate, who=NOISY), grade, plan)


def _distraction(task: Task, rng: random.Random) -> tuple[str, dict[str, str], str]:
    if rng.random() < 0.5:
        return "clock", {}, f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    name, _, _, thing = str(task.input).split()[:4]  # "Mia has 12 pens. ..."
    query = f"{name} {thing.rstrip('.')}"
    return "search", {"query": query}, search(query)


if __name__ == "__main__":
    command(__doc__, make, STEPS)
