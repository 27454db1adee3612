"""What the record of some attempts says is wrong: the same rules for a dry run and for each step of training.

The invariant: a rule reads what was recorded and nothing else, so that it can be asked of any run, whenever it ran.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning.batch.trajectory import Trajectory
from lightning.trainer.collect import NOT, OF_MODEL
from lightning.types import TOO_LONG, Caller, CallStatus, ToolEvent, Transition

UNNAMED: Final = Caller("agent").agent
"""The name of a caller of whom no adapter and no header says anything."""
LONGEST: Final = 300
"""Characters of a refusal that are shown."""
MOST_NAMES: Final = 8
"""Callers that a sentence names at most."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a rule has found. `cause` is the same for what has one cause, so that it can be said once; `text` has the cure. A
    `serious` one is a reason not to train."""

    cause: str
    text: str
    serious: bool = False


@dataclass(frozen=True, slots=True)
class Attempted:
    """The model calls of an attempt, refused and failed ones included, and the tool runs that were reported."""

    calls: Sequence[Transition]
    tool_events: Sequence[ToolEvent]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Attempted:
        """What a trajectory has of it."""
        return cls((*trajectory.transitions, *trajectory.refused), trajectory.tool_events)


def diagnose(attempts: Iterable[Attempted]) -> list[Diagnosis]:
    """What all the rules find in these attempts."""
    known = list(attempts)
    return [diagnosis for rule in RULES for diagnosis in rule(known)]


def refused_calls(attempts: Sequence[Attempted]) -> Iterator[Diagnosis]:
    """Calls that the gateway or vLLM does not take; but for one that is too long, which is the policy's own fault."""
    causes: defaultdict[tuple[str, str, str], list[Transition]] = defaultdict(list)
    for attempt in attempts:
        for call in attempt.calls:
            if call.status is CallStatus.REFUSED and call.finish_reason != TOO_LONG:
                message = re.sub(r"\d+", "N", call.error)
                causes[call.caller.name, call.finish_reason, message].append(call)
    for (agent, code, message), calls in causes.items():
        said = calls[0].error if len(calls[0].error) <= LONGEST else f"{calls[0].error[:LONGEST]}…"
        yield Diagnosis(
            f"refused/{agent}/{code}/{message}",
            f"{agent}: {len(calls)} refused {'call' if len(calls) == 1 else 'calls'} ({code}): {said}",
            serious=True,
        )


def silent_tools(attempts: Sequence[Attempted]) -> Iterator[Diagnosis]:
    """The model asked for tools, and no adapter reported that one ran."""
    asked = [attempt for attempt in attempts if any(call.tool_calls for call in attempt.calls)]
    if asked and not any(attempt.tool_events for attempt in attempts):
        calls = sum(len(call.tool_calls) for attempt in asked for call in attempt.calls)
        yield Diagnosis(
            "silent tools",
            f"the model asked for {calls} tool runs, and no tool run was reported. Mark the tools with @lightning.tool, or "
            "install the adapter of their framework (lightning adapters); without that no credit can be given for tools",
        )


def clamped(attempts: Sequence[Attempted]) -> Iterator[Diagnosis]:
    """Calls asked for longer answers than there was room for."""
    calls = [call for attempt in attempts for call in attempt.calls if call.max_tokens_asked and call.status.answered]
    if calls:
        most = max(call.max_tokens_asked for call in calls)
        yield Diagnosis(
            "clamped",
            f"{len(calls)} calls asked for more tokens (up to {most}) than policy_server.max_model_len leaves room for behind "
            "their prompts: each was answered with the room that was left",
        )


def lost_names(attempts: Sequence[Attempted]) -> Iterator[Diagnosis]:
    """Some calls have an agent's name and others have none."""
    calls = [call.caller for attempt in attempts for call in attempt.calls if call.status.answered]
    named = Counter(caller.name for caller in calls if caller.agent != UNNAMED or caller.path)
    unnamed = len(calls) - named.total()
    if named and unnamed:
        yield Diagnosis(
            "lost names",
            f"{unnamed} of {len(calls)} calls have no agent's name, though others have one "
            f"({', '.join(sorted(named)[:MOST_NAMES])}). Put `with lightning.component(NAME)` around the code that makes them",
        )


def requested_models(attempts: Sequence[Attempted]) -> Iterator[Diagnosis]:
    """Calls asked for several models, and the policy answers them all; which of them looks like a judge."""
    asked: defaultdict[str, Counter[str]] = defaultdict(Counter)
    early: set[str] = set()  # asked for before the last tool of an attempt ran
    late: Counter[str] = Counter()
    for attempt in attempts:
        last = max((event.at for event in attempt.tool_events), default=0.0)
        for call in attempt.calls:
            if call.status.answered and call.requested_model:
                asked[call.requested_model][call.caller.name] += 1
                early |= {call.requested_model} if call.started_at < last else set()
        late.update({call.requested_model for call in attempt.calls if last and call.started_at >= last})
    if len(asked) < 2:
        return
    for model, callers in sorted(asked.items()):
        who = ", ".join(f"{name} ({count})" for name, count in callers.most_common(MOST_NAMES))
        judge = bool(early) and model not in early and 2 * late[model] > len(attempts)
        yield Diagnosis(
            f"model/{model}/{'late' if judge else ''}",
            f"{callers.total()} calls asked for the model {model!r}: {who}. The policy answers them, as it does under any name"
            + (", and all of them came after the last tool: is it a judge" if judge else "")
            + f"{'?' if judge else '.'} To leave them out of training: train_agents={[f'{NOT}{OF_MODEL}{model}']}",
        )


RULES: Final[tuple[Callable[[Sequence[Attempted]], Iterator[Diagnosis]], ...]] = (
    refused_calls,
    silent_tools,
    clamped,
    requested_models,
    lost_names,
)
