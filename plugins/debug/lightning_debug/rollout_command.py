"""`lightning rollout`: print the calls of one recorded rollout, and what became of each.

The invariant: the store is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer
from lightning.cli.output import AsJson, escape, next_steps, print_json, print_table, say
from lightning.safe_text import counted
from lightning.trainer.summary import reason, said, said_parts
from lightning.types import POLICY, ToolEvent, Transition
from lightning_branching.find_rollout import ask_of_rollout
from lightning_branching.replay_command import Attempt, Place
from lightning_record.exchanges import why_not_replayable

from lightning_debug.rollout_calls import RolloutCall, RolloutCalls, read_calls, said_fault

LONGEST = 120
"""The most characters of an error or of a reason in the table; `--json` has all of it."""
OUTCOME = ("status", "reward", "rewards", "fault", "error", "seconds", "trained_at_step")
"""The fields of a rollout that the store keeps of its last attempt alone."""


def rollout(
    rollout: Annotated[str, typer.Argument(help="The rollout's id, as `lightning runs show` lists it.")],
    where: Place = "runs",
    attempt: Attempt = None,
    as_json: AsJson = False,
) -> None:
    """Show the calls of a rollout: who made them, how they ended, and which were trained or why not."""
    _, found = ask_of_rollout(where, rollout, lambda store, known: read_calls(store, known, attempt))
    if as_json:
        print_json(rollout_json(found))
        return
    show_rollout(found)
    options: list[object] = [] if where == "runs" else ["--runs", where]
    options += [] if found.is_last else ["--attempt", found.rollout.attempt]
    again = ("run the agent again from the record", ["replay", rollout, "MODULE:AGENT", *options])
    read = ("read what was said, with the push of each token", ["console", where])
    next_steps(*[again] * _is_replayable(found), *[read] * bool(found.calls))


def _is_replayable(found: RolloutCalls) -> bool:
    """Whether a replay of the attempt has something to answer from, and all of it."""
    events = [*found.tool_events, *(event for line in found.calls for event in line.tool_events)]
    calls = [line.transition for line in found.calls]
    return bool(calls) and found.is_over and not why_not_replayable(calls, events)


def rollout_json(found: RolloutCalls) -> dict[str, object]:
    """Return the rollout and its calls as JSON values, without tokens and without the bytes of plugins. The outcome of an
    earlier attempt is not kept: its fields are null."""
    own = {each.name: getattr(found.rollout, each.name) for each in fields(found.rollout)}
    return {
        "rollout": own if found.is_last else own | dict.fromkeys(OUTCOME),
        "attempts": found.attempts,
        "steps": found.steps,
        "branched_at_call": found.branched_at,
        "calls": [_call_json(found, call) for call in found.calls],
        "empty": found.empty,
        "tool_events": found.tool_events,
        "step_rewards": found.step_rewards,
    }


def _call_json(found: RolloutCalls, line: RolloutCall) -> dict[str, Any]:
    call, notes = line.transition, line.notes
    numbers = [0, *(each.number for each in found.calls)]
    return {
        "number": line.number or None,
        "seq": call.seq,
        "choice": call.choice,
        "id": call.id,
        "agent": call.caller.name,
        "model": call.requested_model,
        "versions": call.versions,
        "status": call.status,
        "finish_reason": call.finish_reason,
        "error": call.error,
        "prompt_tokens": len(call.prompt_ids),
        "answer_tokens": len(call.response_ids),
        "trained_in": line.trained_in,
        "why_untrained": line.untrained,
        "untrained": call.untrained,
        "tries_again": numbers[notes.again] or None,
        "rejected_by": numbers[notes.rejected_by] or None,
        "judged": notes.judged,
        "tool_events": line.tool_events,
        "step_rewards": line.step_rewards,
    }


def show_rollout(found: RolloutCalls) -> None:
    """Print the rollout's outcome, and a table of its calls; columns in which no call has anything are left out."""
    own = found.rollout
    ended = f"{own.status}, reward {said(own.reward)}" if found.is_last else "its outcome is not kept"
    fault = said_fault(own) if found.is_last else ""
    trained = [line.transition for line in found.calls if line.trained_in]
    taught = {step for line in found.calls for step in line.trained_in}
    steps = ", ".join(f"step {step}" for step in sorted(taught) or found.steps)
    step = f"; {'trained by' if taught else 'left out by'} {steps}" if steps else ""
    attempt = f"attempt {own.attempt} of {found.attempts}" if own.attempt else "no attempt yet"
    say(f"[bold]{escape(own.id)}[/bold], {attempt}: {ended}{fault}{step}")
    rewards = [*found.step_rewards, *(each for line in found.calls for each in line.step_rewards)]
    if parts := said_parts(own.rewards if found.is_last else {}, rewards):
        say(f"  {escape(parts)}")
    if own.error and found.is_last:
        say(f"  [red]{escape(str(reason(own.error)))}")
    if own.parent is not None:
        at = "a call that is not stored" if found.branched_at is None else f"its call {found.branched_at}"
        say(f"  a branch of {escape(own.parent[0])}, attempt {own.parent[1]}, at {at}: the calls before it are there")
    if not found.calls:
        say(found.empty)
        return
    cells = [_cells(found, line) for line in found.calls]
    columns = dict(zip(COLUMNS, zip(*cells, strict=True), strict=True))
    shown = {name: cells for name, cells in columns.items() if name not in OPTIONAL or any(cells)}
    print_table(list(shown), list(zip(*shown.values(), strict=True)))
    if found.tool_events:
        say(f"tool runs of no call: {escape(_tools(found.tool_events))}")
    calls = len({line.transition.id for line in found.calls})
    tokens = sum(len(call.response_ids) for call in trained)
    say(f"{counted(len({call.id for call in trained}), 'call')} of {calls} trained, with {counted(tokens, 'token')}")


COLUMNS = (
    "call", "agent", "model", "policy", "status", "prompt", "answer", "tools", "step rewards", "trained", "notes",
)  # fmt: skip
OPTIONAL = ("tools", "step rewards", "notes")


def _cells(found: RolloutCalls, line: RolloutCall) -> list[str]:
    call = line.transition
    rewards = ", ".join(f"{each.name} {each.value:.3g}" for each in line.step_rewards)
    return [
        (str(line.number) if line.number else "-") + (f".{call.choice + 1}" if call.choice else ""),
        escape(call.caller.name),
        escape(call.requested_model or "-"),
        escape(_policy(call)),
        escape(f"{call.status}, {call.finish_reason}" if call.finish_reason else str(call.status)),
        str(len(call.prompt_ids)),
        str(len(call.response_ids)),
        escape(_tools(line.tool_events)),
        escape(rewards),
        "yes" if line.trained_in else escape(f"no: {_cut(line.untrained)}"),
        escape("; ".join(filter(None, [line.notes.said(call.untrained, found.name), _cut(call.error)]))),
    ]


def _policy(call: Transition) -> str:
    """Format the versions that sampled a call's answer; `-` for a call without an answer."""
    if not len(call.response_ids):
        return "-"
    named = "" if call.policy == POLICY else f"{call.policy} "
    return named + "-".join(dict.fromkeys(f"v{run.version}" for run in call.versions))


def _tools(events: Sequence[ToolEvent]) -> str:
    return ", ".join(f"{each.name} {each.status}" for each in events)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
