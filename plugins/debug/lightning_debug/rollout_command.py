"""`lightning rollout`: print the calls of one recorded rollout, and what became of each.

The invariant: the store is only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from lightning.cli.output import AsJson, escape, next_steps, print_json, print_table, say
from lightning.safe_text import counted
from lightning.trainer.summary import reason, said, said_parts
from lightning.types import POLICY, ToolEvent, Transition
from lightning_branching.find_rollout import ask_of_rollout
from lightning_branching.replay_command import Attempt, Place

from lightning_debug.rollout_calls import RolloutCall, RolloutCalls, read_calls

LONGEST = 120
"""The most characters of an error or of a reason in the table; `--json` has all of it."""


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
    place = [] if where == "runs" else ["--runs", where]
    next_steps(
        ("run the agent again from the record", ["replay", rollout, "MODULE:AGENT", *place]),
        ("read what was said, with the push of each token", ["console", where]),
    )


def rollout_json(found: RolloutCalls) -> dict[str, object]:
    """Return the rollout and its calls as JSON values, without tokens and without the bytes of plugins."""
    return {
        "rollout": found.rollout,
        "attempts": found.attempts,
        "step": found.step,
        "branched_at_call": found.branched_at,
        "calls": [_call_json(call) for call in found.calls],
        "tool_events": found.tool_events,
        "step_rewards": found.step_rewards,
    }


def _call_json(line: RolloutCall) -> dict[str, Any]:
    call = line.transition
    return {
        "number": line.number,
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
        "trained": not line.untrained,
        "why_untrained": line.untrained,
        "untrained": call.untrained,
        "tries_again": line.again or None,
        "rejected_by": line.rejected_by or None,
        "judged": line.judged,
        "tool_events": line.tool_events,
        "step_rewards": line.step_rewards,
    }


def show_rollout(found: RolloutCalls) -> None:
    """Print the rollout's outcome, and a table of its calls; columns in which no call has anything are left out."""
    own = found.rollout
    ended = f"{own.status}, reward {said(own.reward)}" if found.is_last else "its outcome is not kept"
    fault = f", fault: {own.fault}" if own.fault and found.is_last else ""
    trained = [len(line.transition.response_ids) for line in found.calls if not line.untrained]
    step = "" if found.step is None else f"; {'trained by' if trained else 'left out by'} step {found.step}"
    say(f"[bold]{escape(own.id)}[/bold], attempt {own.attempt} of {found.attempts}: {ended}{fault}{step}")
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
    columns = dict(zip(COLUMNS, zip(*map(_cells, found.calls), strict=True), strict=True))
    shown = {name: cells for name, cells in columns.items() if name not in OPTIONAL or any(cells)}
    print_table(list(shown), list(zip(*shown.values(), strict=True)))
    if found.tool_events:
        say(f"tool runs of no call: {escape(_tools(found.tool_events))}")
    say(f"{counted(len(trained), 'call')} of {len(found.calls)} trained, with {sum(trained)} tokens")


COLUMNS = (
    "call", "agent", "model", "policy", "status", "prompt", "answer", "tools", "step rewards", "trained", "notes",
)  # fmt: skip
OPTIONAL = ("tools", "step rewards", "notes")


def _cells(line: RolloutCall) -> list[str]:
    call = line.transition
    rewards = ", ".join(f"{each.name} {each.value:.3g}" for each in line.step_rewards)
    return [
        str(line.number),
        escape(call.caller.name),
        escape(call.requested_model or "-"),
        escape(_policy(call)),
        escape(f"{call.status}, {call.finish_reason}" if call.finish_reason else str(call.status)),
        str(len(call.prompt_ids)),
        str(len(call.response_ids)),
        escape(_tools(line.tool_events)),
        escape(rewards),
        "yes" if not line.untrained else escape(f"no: {line.untrained[:LONGEST]}"),
        escape("; ".join(_notes(line))),
    ]


def _policy(call: Transition) -> str:
    """Format the versions that sampled a call's answer; `-` for a call without an answer."""
    if not len(call.response_ids):
        return "-"
    named = "" if call.policy == POLICY else f"{call.policy} "
    return named + "-".join(dict.fromkeys(f"v{run.version}" for run in call.versions))


def _tools(events: Sequence[ToolEvent]) -> str:
    return ", ".join(f"{each.name} {each.status}" for each in events)


def _notes(line: RolloutCall) -> Iterator[str]:
    if line.again:
        yield f"tries call {line.again} again"
    if line.rejected_by:
        yield f"rejected by call {line.rejected_by}"
    if line.judged and line.judged != line.transition.untrained:
        yield line.judged
    if line.transition.error:
        yield line.transition.error[:LONGEST]
