"""Branches on a rollout's page: what a branch begins with, which a rollout has at each call, and how to make some."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from lightning.batch.branches import is_void
from lightning.types import Json

from lightning_console.blocks import Action, Actions, Block, Cell, Column, Fact, Notice, Notices, Table
from lightning_console.pages.words import NONE, count, number, place_of, to
from lightning_console.places import Located
from lightning_console.queries.branches import is_sample
from lightning_console.queries.rollouts import BranchLine, RolloutView
from lightning_console.queries.tree import mean_of

SAMPLES: Final = 8
"""Branches that the command makes."""
ROWS: Final = 200
INHERITED: Final = 100
"""Calls of a parent that are shown with a branch: the last ones."""
OTHERWISE: Final = (
    "The command makes a run of their own, with a vLLM that has the weights of this call. With --edit TEXT, --prompt "
    "NAME=FILE, --set temperature=1 or --weights RUN@STEP something is another than it was."
)
FORK: Final = "fork"
"""The action that makes branches here: the console of a person's own machine has it."""


def origin_facts(view: RolloutView) -> list[Fact]:
    """Where a branch begins; nothing for a rollout that is none."""
    beginning = view.beginning
    if beginning is None:
        return []
    at = f"at call {beginning.at}" if beginning.at else "at a call that is not stored"
    there = ""
    if beginning.key:
        options = {"attempt": beginning.attempt} | ({"call": beginning.at} if beginning.at else {})
        there = to("rollout", beginning.key, beginning.parent, **options)
    facts = [Fact("branch of", beginning.parent, at, to=there)]
    if beginning.branch.changed:
        facts.append(Fact("changed", beginning.branch.changed, "what is another than in its parent"))
    return facts


def inherited_rows(view: RolloutView, width: int) -> list[list[Cell]]:
    """Rows of the table of calls for those that a branch was answered from its parent's record."""
    beginning = view.beginning
    if beginning is None:
        return []
    rows = []
    for place, call in beginning.calls[-INHERITED:]:
        there = to("rollout", beginning.key, beginning.parent, attempt=beginning.attempt, call=place)
        cells = [
            Cell(
                f"parent's {place}",
                there,
                tone="muted",
                hint="answered from its parent's record; not counted as its own",
            ),
            Cell(call.caller.name, tone="muted"),
            Cell("recorded", tone="muted"),
            Cell(call.finish_reason, tone="muted"),
            Cell(count(len(call.prompt_ids)), tone="muted"),
            Cell(count(len(call.response_ids)), tone="muted"),
        ]
        rows.append([*cells, *(Cell(NONE, tone="muted") for _ in range(width - len(cells)))])
    if beginning.branch.edit is not None:
        there = to("rollout", beginning.key, beginning.parent, attempt=beginning.attempt, call=beginning.at)
        cells = [
            Cell(f"parent's {beginning.at}", there, tone="warn"),
            Cell("edited"),
            Cell(beginning.branch.edit[:200]),
        ]
        rows.append([*cells, *(Cell(NONE, tone="muted") for _ in range(width - len(cells)))])
    return rows


def by_call(view: RolloutView) -> Mapping[int, Sequence[BranchLine]]:
    """The branches of a rollout by the numbers of the calls at which they begin."""
    found: dict[int, list[BranchLine]] = {}
    for line in view.branches:
        found.setdefault(line.at, []).append(line)
    return found


def branch_cells(lines: Sequence[BranchLine]) -> list[Cell]:
    """How many branches begin at a call, and what those earned that changed nothing."""
    void = sum(is_void(each.branch.rollout) for each in lines)
    return [
        Cell(str(len(lines)) if lines else NONE, hint=f"{void} of them void" if void else ""),
        Cell(number(value_of(lines))),
    ]


def value_of(lines: Sequence[BranchLine]) -> float | None:
    """The mean reward of branches that are samples of the same policy: the value of the state before their call."""
    return mean_of([each.branch.rollout.reward for each in lines if is_sample(each.branch)])


def branch_columns() -> list[Column]:
    """The columns of `branch_cells`."""
    return [
        Column("branches", "number", "rollouts that begin as this one did and are sampled from this call on"),
        Column("value", "number", "mean reward of the branches in which nothing was changed"),
    ]


def branches_table(view: RolloutView, here: Mapping[int, str]) -> list[Table]:
    """The branches of a rollout. `here` are the addresses of its calls."""
    if not view.branches:
        return []
    rows = []
    for line in view.branches[:ROWS]:
        rollout = line.branch.rollout
        void, failed = is_void(rollout), rollout.status == "failed"
        rows.append(
            [
                Cell(str(line.at), here.get(line.at, "")),
                Cell(rollout.id, to("rollout", line.branch.key, rollout.id)),
                Cell(line.branch.changed or NONE),
                Cell("void" if void else str(rollout.status), tone="bad" if failed else ""),
                Cell(number(rollout.reward)),
                Cell(rollout.error[:200], tone="bad" if failed else ""),
            ]
        )
    columns = [
        Column("at call", "number"),
        Column("branch"),
        Column("changed"),
        Column("status"),
        Column("reward", "number"),
        Column("why"),
    ]
    left = len(view.branches) - len(rows)
    return [Table(columns, rows, title="Branches", note=f"{left} more are not shown" if left else "")]


def branch_it(found: Located, view: RolloutView) -> list[Block]:
    """How to make branches at the chosen call, or why there can be none."""
    if not view.chosen:
        return []
    if view.fork.why:
        said = Notice(f"no branch can begin at call {view.chosen}: {view.fork.why}", "muted")
        return [Notices([said], title="Branch it")]
    rollout, agent = shlex.quote(view.rollout.id), named(view.agent)
    command = f"lightning branch {rollout} {agent} --at {view.fork.at} -n {SAMPLES} --runs {place_of(found)}"
    if view.rollout.attempt != view.attempts:
        command += f" --attempt {view.rollout.attempt}"
    text = f"{SAMPLES} rollouts that begin as this one did and are sampled anew from call {view.chosen} on"
    said = Notice(text, detail=OTHERWISE, commands=[command])
    return [Notices([said], title="Branch it"), *([_fork_here(found, view)] if view.fork.live else [])]


def named(agent: str) -> str:
    """An agent in a command; what stands for its name where that is not known."""
    return shlex.quote(agent) if agent else "MODULE:AGENT"


def _fork_here(found: Located, view: RolloutView) -> Actions:
    """The button for it, while the run's trainer serves the version that answered the call."""
    fork = view.fork
    arguments: dict[str, Json] = {
        "run": found.key, "rollout": view.rollout.id, "attempt": view.rollout.attempt, "at": fork.at,
    }  # fmt: skip
    if view.agent:
        arguments["agent"] = view.agent
    again = f" These tools run again in each: {', '.join(fork.tools)}." if fork.tools else ""
    ask = f"Run {view.agent or 'the agent'} {SAMPLES} times on this machine, beside the training?{again}"
    fields = () if view.agent else (("agent", "Agent as MODULE:FUNCTION"),)
    note = "The run's own vLLM answers, in the version that answered this call; an update by the trainer makes branches void."
    return Actions([Action(FORK, f"Fork here: {SAMPLES} branches", arguments, ask, fields)], note=note)
