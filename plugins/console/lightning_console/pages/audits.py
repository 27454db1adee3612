"""What credit audits found, on the pages of a run and of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_debug.credit_audit import AuditedCall, CreditAudit
from lightning_debug.credit_estimates import Measured

from lightning_console.blocks import Cell, Column, Link, Notice, Notices, Table
from lightning_console.pages.words import NONE, counted, number, seconds, to, tone_of
from lightning_console.places import Located
from lightning_console.queries.branches import key_beside
from lightning_console.queries.rollouts import RolloutView


def audit_blocks(found: Located, audits: Sequence[CreditAudit]) -> list[Notices | Table]:
    """Return the summary of the newest credit audit of a run, and how each credit agrees with it."""
    if not audits:
        return []
    audit = audits[0]
    share = NONE if audit.share is None else f"{number(audit.share.value, 2)}{_within(audit.share.interval)}"
    mattered = sum(call.mattered for call in audit.calls)
    text = (
        f"{'the evaluation after' if audit.held_out else 'step'} {audit.step}: {mattered} of "
        f"{counted(len(audit.calls), 'decision')} mattered, a share of {share} over tasks"
    )
    ended = f"{audit.void} void, {audit.failed} failed, {audit.faults} by the policy's own fault"
    cost = (
        f"{counted(audit.rollouts, 'branch', 'branches')} from {counted(audit.states, 'state')} ({ended}), "
        f"{counted(audit.tokens, 'sampled token')}, {seconds(audit.seconds)}"
    )
    rollouts = list(dict.fromkeys(call.rollout for call in audit.calls))
    links = [Link(name, to("rollout", found.key, name)) for name in rollouts]
    branches = Link("the branches", to("run", key_beside(found, audit.branches)))
    notes = [Notice(text, detail=cost, links=[*links, branches]), *(Notice(each, "muted") for each in audit.warnings)]
    columns = [
        Column("credit"),
        Column("correlation", "number", "Pearson's, of its advantages with the executed ones"),
        Column("95 % interval", "number", "over tasks"),
        Column("ranks", "number", "Spearman's correlation"),
        Column("same sign", "number", "share of the decisions that mattered"),
        Column("size", "number", "rank correlation of the sizes of both: whether it is large where decisions mattered"),
        Column("inner calls", "number", "the correlation without the calls that ended a rollout"),
        Column("less the run's", "number", "the correlation less that of the run's own credit"),
    ]
    ordered = sorted(audit.agreements.items(), key=lambda each: each[1].correlation.order)
    rows = [
        [
            Cell(f"{name} (the run's)" if name == audit.own else name),
            Cell(number(each.correlation.value, 2)),
            Cell(_interval(each.correlation)),
            Cell(number(each.rank.value, 2)),
            Cell(number(each.sign.value, 2), hint=_interval(each.sign)),
            Cell(number(each.size.value, 2)),
            Cell(number(each.inner.value, 2), hint=_interval(each.inner)),
            Cell(number(each.better.value, 2), hint=_interval(each.better)),
        ]
        for name, each in ordered
    ]
    note = (
        ""
        if audit.ceiling is None
        else f"the true advantages would have a correlation of about {number(audit.ceiling, 2)}"
    )
    return [
        Notices(notes, title="Credit, executed"),
        Table(columns, rows, title="How each credit agrees with what was executed", note=note),
    ]


def audited_calls(view: RolloutView, here: Mapping[int, str]) -> list[Table]:
    """Return the table of the decisions of a rollout that were executed, with the advantage that each credit gives them.
    `here` has the address of each of its calls, by number."""
    audit = view.audit
    if audit is None:
        return []
    calls = [call for call in audit.calls if (call.rollout, call.attempt) == (view.rollout.id, view.rollout.attempt)]
    numbers = {each.transition.seq: each.number for each in view.calls}
    names = [name for name in audit.agreements if any(name in call.credits for call in calls)]
    columns = [
        Column("call", "number"),
        Column("state", "number", "mean return of branches at the call: what the state before it is worth"),
        Column(
            "answer", "number", "mean return of branches after the recorded answer; of the last call, the recorded one"
        ),
        Column("executed advantage", "number"),
        Column("95 % interval", "number"),
        Column("mattered", hint="the interval excludes 0, corrected for the number of decisions of the audit"),
        *(Column(name, "number", "the advantage that this credit gives the call") for name in names),
    ]
    note = f"step {audit.step}, {audit.n} branches at each state, with the weights {audit.weights}"
    rows = [_row(call, numbers.get(call.seq, call.number), here, names) for call in calls]
    return [Table(columns, rows, title="Decisions, executed", note=note)]


def _row(call: AuditedCall, number_here: int, here: Mapping[int, str], names: Sequence[str]) -> list[Cell]:
    given = [call.credits.get(name) for name in names]
    return [
        Cell(str(number_here), here.get(number_here, "")),
        Cell(number(call.value), hint=counted(call.state, "branch", "branches")),
        Cell(number(call.worth), hint="one sample" if call.last else counted(call.answer, "branch", "branches")),
        Cell(number(call.advantage), tone=tone_of(call.advantage)),
        Cell(_interval(Measured(call.advantage, call.interval))),
        Cell("yes" if call.mattered else NONE),
        *(Cell(number(value), tone=tone_of(value)) for value in given),
    ]


def _interval(found: Measured) -> str:
    return NONE if found.interval is None else "{:.2f} to {:.2f}".format(*found.interval)


def _within(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else " ({:.2f} to {:.2f})".format(*interval)
