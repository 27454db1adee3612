"""The questions to the optimiser model: first what is wrong with a prompt, then for a better prompt.

The invariant: the questions depend only on the prompt and the shown rollouts, so that a resumed run asks the same questions.

In ProTeGi (arXiv 2305.03495, figure 2) the textual gradient is a criticism of the prompt, written from rollouts that failed
with it, and the edit moves against it. Here, a good rollout is shown, too, so that an edit does not lose what works.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lightning.types import Json, Rollout

from lightning_prompts.chat_model import Messages
from lightning_prompts.templates import fields

LONGEST_VALUE = 1000
"""Most characters of a task's input, and of its expected answer."""


@dataclass(frozen=True, slots=True)
class Example:
    """A finished rollout with its transcript, to show to the optimiser model."""

    rollout: Rollout
    transcript: str


def shown(rollouts: Sequence[Rollout], count: int, random: Random) -> list[Rollout]:
    """Choose `count` rollouts for a criticism: a sample of those that failed or earned less than the best, lowest first, and
    last one of the best if `count` allows it. If all are equally good, a sample of these."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    best = max((rollout.reward or 0.0 for rollout in scored), default=0.0)
    well = [rollout for rollout in scored if rollout.reward == best]
    badly = [rollout for rollout in rollouts if rollout not in well]
    if not badly:
        return random.sample(well, min(count, len(well)))
    room = 1 if well and count > 1 else 0
    chosen = random.sample(badly, min(count - room, len(badly)))
    chosen.sort(key=lambda rollout: (rollout.reward is not None, rollout.reward or 0.0, rollout.id))
    return [*chosen, *random.sample(well, min(count - len(chosen), len(well), 1))]


def ask_for_criticism(component: str, prompt: str, examples: Sequence[Example]) -> Messages:
    """Return the question for a criticism of a prompt, the textual gradient."""
    text = f"""\
An AI agent has a component called {component!r} that works with this prompt template:

<template>
{prompt}
</template>

The agent was run with it on some tasks, and each run was given a reward; higher is better.

{_told(examples)}

What in the template made the agent earn less than it could? Compare the runs that earned little with those that earned \
more. Give the reasons as a short numbered list, the most important first. Speak of what the template says, leaves out or \
says badly, and of what would hold for other tasks of this kind; do not propose to write the answers of these tasks into it."""
    return [{"role": "user", "content": text}]


def ask_for_edit(component: str, prompt: str, criticism: str, examples: Sequence[Example]) -> Messages:
    """Return the question for a better prompt that cures the faults in a criticism."""
    names = [f"{{{name}}}" for name in (fields(prompt) or ())]
    keep = (
        f"The agent's code fills in the fields {', '.join(names)}: each must occur in the new template, written exactly so, no "
        "other field may, and every other brace must be doubled."
        if names
        else "The agent's code fills nothing in: add no fields in braces."
    )
    text = f"""\
An AI agent has a component called {component!r} that works with this prompt template:

<template>
{prompt}
</template>

{_told(examples)}

A reviewer found these faults in the template:

<review>
{criticism}
</review>

Write a better template that cures them and keeps what works. It must help with other tasks of this kind too, not only with \
these. {keep}

Give the whole new template between <prompt> and </prompt>, and nothing after it."""
    return [{"role": "user", "content": text}]


def _told(examples: Sequence[Example]) -> str:
    return "\n\n".join(_one(number, example) for number, example in enumerate(examples, 1))


def _one(number: int, example: Example) -> str:
    rollout = example.rollout
    lines = [f'<run number="{number}">', f"Task: {_json(rollout.task.input)}"]
    if rollout.task.expected is not None:
        lines.append(f"The grader expects: {_json(rollout.task.expected)}")
    if example.transcript:
        lines.append(example.transcript)
    if rollout.reward is None:
        lines.append(f"The agent failed: {(rollout.error.strip().splitlines() or ['no reason was given'])[-1]}")
    else:
        parts = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
        lines.append(f"Reward: {rollout.reward:g}" + (f" ({parts})" if parts else ""))
    return "\n".join([*lines, "</run>"])


def _json(value: Json) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + " [...]"
