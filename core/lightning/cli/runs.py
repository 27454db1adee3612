"""`lightning runs`: lists the runs of a folder, and shows or compares them.

The invariant: it only reads, also while the run is being trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lightning.cli.output import AsJson, answers, escape, local_time, print_json, print_table, say
from lightning.errors import ConfigError
from lightning.store.pages import each_rollout
from lightning.store.places import run_id_of, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.context import Epoch, read_epochs
from lightning.trainer.runs import differences
from lightning.trainer.summary import Reason, Summary, grouped, reason, said, said_parts, said_reward, summarize
from lightning.types import Json, Rollout, Run, Status, StepRecord, StepReward

Location = Annotated[
    str,
    typer.Option(
        "--runs", metavar="PLACE", help="A folder of runs, a run's folder, a database file, or a store's URL."
    ),
]

app = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in a list. `rewards` are the mean training rewards of the first and the last step. The fields `..._with_failures`
    count a failed rollout as 0."""

    id: str
    created_at: float
    steps: int
    rollouts_ok: int
    rollouts_failed: int
    rewards: tuple[float | None, float | None] | None
    before: float | None
    after: float | None
    store: str
    rewards_with_failures: tuple[float | None, float | None] | None = None
    before_with_failures: float | None = None
    after_with_failures: float | None = None


@app.callback()
def runs(context: typer.Context, where: Location = "runs", as_json: AsJson = False) -> None:
    """List runs: their steps, rollouts, and how the reward went."""
    if context.invoked_subcommand is not None:
        context.obj = where
        return
    rows = [row for _, found in answers(where, _rows) for row in found]
    rows.sort(key=lambda row: row.created_at, reverse=True)
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["run", "started", "steps", "rollouts", "failed", "reward", "held-out"],
            [
                [
                    escape(row.id),
                    local_time(row.created_at),
                    str(row.steps),
                    str(row.rollouts_ok),
                    f"[red]{row.rollouts_failed}" if row.rollouts_failed else "0",
                    _change(row.rewards, row.rewards_with_failures),
                    _change((row.before, row.after), (row.before_with_failures, row.after_with_failures)),
                ]
                for row in rows
            ],
        )
    else:
        say(f"no runs in {escape(redacted(where))} yet; `lightning demo` makes one")


@app.command("show")
def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="The run's id, as `lightning runs` lists it, or its folder.")],
    where: Annotated[
        str, typer.Option("--runs", metavar="PLACE", help="Where the run is, as for `lightning runs`.")
    ] = "",
    step: Annotated[int | None, typer.Option("--step", help="Only the rollouts of this step.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only the rollouts that failed.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Maximum number of rollouts to list.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show one run: its steps and its rollouts."""
    place = where or str(context.obj or "runs")
    if store_in(Path(run)):
        place, run = run, run_id_of(Path(run))
    for _, found in answers(place, lambda _, store: _details(store, run, step, failed, limit)):
        if found is not None:
            if as_json:
                print_json(
                    {
                        "run": found.run,
                        "epochs": found.epochs,
                        "summary": found.summary.to_json(),
                        "steps": found.steps,
                        "rollouts": found.rollouts,
                        "step_rewards": found.step_rewards,
                        "failures": [{"count": count, "reason": why} for count, why in found.failures],
                    }
                )
            else:
                _show_run(found)
            return
    shown = redacted(place)
    raise ConfigError(f"there is no run {run!r} in {shown}: `lightning runs --runs {shown}` lists the runs there")


@dataclass(frozen=True, slots=True)
class Compared:
    """One run in a comparison. `settings` has the run's values of the settings in which the runs differ. `before` and `after`
    count failed rollouts as 0; `error` is the standard error of `after`."""

    id: str
    settings: dict[str, Json]
    steps: int
    before: float | None
    after: float | None
    error: float | None
    failed: int


@app.command("compare")
def compare(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...]", help="Ids of runs; default: all.")] = None,
    where: Annotated[
        str, typer.Option("--runs", metavar="PLACE", help="Where the runs are, as for `lightning runs`.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings in which they differ, and the held-out reward before and after."""
    place = where or str(context.obj or "runs")
    found = {
        run.id: (run, summary) for _, those in answers(place, partial(_summaries, names)) for run, summary in those
    }
    if missing := [name for name in names or () if name not in found]:
        shown = redacted(place)
        raise ConfigError(
            f"there is no run {missing[0]!r} in {shown}: `lightning runs --runs {shown}` lists the runs there"
        )
    if len(found) < 2:
        there = f"there is {'only 1' if found else 'none'} in {redacted(place)}: give another place with --runs"
        if names:
            there = f"only {names[0]} was named: name another run, or no run to compare all runs in {redacted(place)}"
        raise ConfigError(f"a comparison needs two or more runs, and {there}")
    rows = _compared([found[name] for name in names or sorted(found)])
    if as_json:
        print_json(rows)
        return

    print_table(
        ("run", "differs in", "steps", "before", "after", "± error", "failed"),
        [
            (
                escape(row.id),
                escape(", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row.settings.items())),
                str(row.steps),
                *(said(value) for value in (row.before, row.after, row.error)),
                str(row.failed),
            )
            for row in sorted(rows, key=lambda row: (row.after is None, -(row.after or 0.0)))
        ],
        title="held-out reward before and after",
    )
    say("A held-out rollout that failed counts as 0. The error is over held-out rollouts; other seeds differ by more.")


async def _summaries(names: Sequence[str] | None, url: str, store: Store) -> list[tuple[Run, Summary]]:
    wanted = [run.id for run in await store.list_runs(brief=True) if not names or run.id in names]
    runs = [run for name in wanted if (run := await store.get_run(name)) is not None]
    return [(run, await summarize(store, run.id)) for run in runs]


def _compared(found: Sequence[tuple[Run, Summary]]) -> list[Compared]:
    first = found[0][0].config
    differing = {key: value for run, _ in found[1:] for key, (value, _) in differences(first, run.config).items()}
    differing.pop("seed", None)  # a copy of trainer.seed
    rows = []
    for run, summary in found:
        own = differences(first, run.config)
        ended = summary.evaluations
        rows.append(
            Compared(
                run.id,
                {key: own[key][1] if key in own else value for key, value in differing.items()},
                summary.steps,
                ended[0].reward_with_failures if ended else None,
                ended[-1].reward_with_failures if len(ended) > 1 else None,
                ended[-1].error if len(ended) > 1 and ended[-1].known else None,
                summary.failed,
            )
        )
    return rows


async def _rows(url: str, store: Store) -> list[RunRow]:
    return [await _row(store, run, url) for run in await store.list_runs(brief=True)]


async def _row(store: Store, run: Run, url: str) -> RunRow:
    states: Counter[Status] = Counter()
    for counted in await store.count_rollouts(run.id):
        states[counted.status] += counted.rollouts
    summary = await summarize(store, run.id)
    rewards = (summary.rewards[0], summary.rewards[-1]) if summary.rewards else None
    with_failures = summary.rewards_with_failures
    held_out = [result.reward_with_failures for result in summary.evaluations]
    return RunRow(
        id=run.id,
        created_at=run.created_at,
        steps=summary.steps,
        rollouts_ok=states[Status.SUCCEEDED],
        rollouts_failed=states[Status.FAILED],
        rewards=rewards,
        before=summary.before,
        after=summary.after,
        store=redacted(url),
        rewards_with_failures=(with_failures[0], with_failures[-1]) if with_failures else None,
        before_with_failures=held_out[0] if held_out else None,
        after_with_failures=held_out[-1] if len(held_out) > 1 else None,
    )


@dataclass(frozen=True, slots=True)
class Details:
    """The parts of a run that are shown. `rollouts` are the selected rollouts, of `among` rollouts searched; `step_rewards` are
    the step rewards of the selected rollouts, by rollout; `failures` counts the failed rollouts of all those searched, by
    reason."""

    run: Run
    epochs: list[Epoch]
    steps: list[StepRecord]
    rollouts: list[Rollout]
    among: int
    step_rewards: dict[str, tuple[StepReward, ...]]
    failures: list[tuple[int, Reason]]
    summary: Summary


async def _details(store: Store, run: str, step: int | None, failed: bool, limit: int) -> Details | None:
    stored = await store.get_run(run)
    if stored is None:
        return None
    rollouts = [rollout async for rollout in each_rollout(store, run, step=step)]
    chosen = [rollout for rollout in rollouts if not failed or rollout.status is Status.FAILED][:limit]
    attempts = await store.attempts_of([(rollout.id, None) for rollout in chosen])
    return Details(
        run=stored,
        epochs=await read_epochs(store, stored),
        steps=await store.steps(run),
        rollouts=chosen,
        among=len(rollouts),
        step_rewards={
            rollout.id: attempt.step_rewards
            for rollout, attempt in zip(chosen, attempts, strict=True)
            if attempt.step_rewards
        },
        failures=grouped(rollout.error for rollout in rollouts if rollout.status is Status.FAILED),
        summary=await summarize(store, run),
    )


def _show_run(found: Details) -> None:
    from lightning.trainer.runs import changes_of  # it imports algorithms, which a list of runs does not need

    parent = (
        f", forked from {escape(str(found.run.config['forked_from']))}" if "forked_from" in found.run.config else ""
    )
    say(f"[bold]{escape(found.run.id)}[/bold], model {escape(str(found.run.config.get('model', 'unknown')))}{parent}")
    for epoch in found.epochs[1:]:
        changed = "".join(f"\n  {escape(line)}" for line in changes_of(found.epochs, epoch.number))
        say(f"config epoch {epoch.number}, from step {epoch.first} on:{changed}")
    aged = any(record.metrics.get("staleness_max") or "recorded_share" in record.metrics for record in found.steps)
    columns = ["step", "reward", "failed as 0", "rollouts", "tokens", "loss", "logprob gap", "policy"]
    print_table(
        [*columns, *(["age", "record"] if aged else [])],
        [
            [
                str(record.step),
                said(record.metrics.get("reward")),
                said(record.metrics.get("reward_with_failures")),
                str(len(record.rollouts)),
                said(record.metrics.get("tokens"), ".0f"),
                said(record.metrics.get("loss")),
                said(record.metrics.get("max_logprob_gap"), ".1e"),
                f"v{record.policy_version}",
                *(_age(record) if aged else ()),
            ]
            for record in found.steps
        ],
        title="committed steps",
    )
    for result in found.summary.evaluations:
        named = "".join(f", {escape(name)} {said(value)}" for name, value in result.rewards.items())
        say(f"held-out after {result.step} steps: {said_reward(result)}{named} over {result.rollouts} tasks")
    print_table(
        ["rollout", "status", "attempt", "reward", "parts", "seconds", "error"],
        [
            [
                escape(rollout.id),
                f"[red]{rollout.status}" if rollout.status is Status.FAILED else str(rollout.status),
                str(rollout.attempt),
                said(rollout.reward),
                escape(said_parts(rollout.rewards, found.step_rewards.get(rollout.id, ()))),
                f"{rollout.seconds:.1f}",
                escape(str(reason(rollout.error))) if rollout.error else "",
            ]
            for rollout in found.rollouts
        ],
        title=f"rollouts ({len(found.rollouts)} of {found.among})",
    )
    for count, why in found.failures:
        say(f"{count} of {found.among} failed: {escape(str(why))}")


def _age(record: StepRecord) -> tuple[str, str]:
    """Format how many versions old the trained tokens were (mean/maximum), and the share of a recorded run that was used by
    then."""
    mean, most = (record.metrics.get(f"staleness_{name}") for name in ("mean", "max"))
    return f"{said(mean, '.1f')}/{said(most, '.0f')}", said(record.metrics.get("recorded_share"), ".0%")


def _change(
    values: tuple[float | None, float | None] | None, counted: tuple[float | None, float | None] | None = None
) -> str:
    """Format a reward's change. `counted` is the change with failed rollouts as 0, which is added if it differs."""
    if values is None or (values[0] is None and not counted):
        return "-"
    change = f"{said(values[0])} → {said(values[1])}"
    if counted is None or counted == values:
        return "-" if values[0] is None else change
    return f"{change} ({said(counted[0])} → {said(counted[1])} if failures count as 0)"
