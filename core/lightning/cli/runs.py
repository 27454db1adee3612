"""`lightning runs`: lists the runs of a folder, and shows or compares them.

The invariant: it only reads, also while the run is being trained.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
import typer.core

from lightning.cli.output import AsJson, answers, escape, local_time, next_steps, print_json, print_table, say
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning.store.pages import each_rollout
from lightning.store.places import run_id_of, store_in
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.context import RESTING, Epoch, read_epochs
from lightning.trainer.gains import Gain, gain_of, margin
from lightning.trainer.plan import TRAIN, VAL
from lightning.trainer.runs import differences
from lightning.trainer.summary import Reason, Summary, grouped, reason, said, said_parts, said_reward, summarize
from lightning.types import Json, Rollout, Run, Status, StepRecord, StepReward

if TYPE_CHECKING:
    from typer._click.core import Command, Context

Location = Annotated[
    str,
    typer.Option(
        "--runs", metavar="PLACE", help="A folder of runs, a run's folder, a database file, or a store's URL."
    ),
]

LONGEST_VALUE, MOST_SETTINGS = 24, 20
"""The most characters of a setting's value, and the most settings, that a comparison shows without `--all-settings`."""


class RunOrCommand(typer.core.TyperGroup):
    """The group of commands of `lightning runs`, in which a run's name alone means `show`."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Return the command that is typed, or `show` with all arguments."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


app = typer.Typer(
    cls=RunOrCommand, invoke_without_command=True, subcommand_metavar="[RUN | show RUN | compare [RUN ...]]"
)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in a list. `training_rollouts`, `held_out_rollouts` and `other_rollouts` (of a server, of branches) count
    rollouts in every state, `rollouts_failed` the failed ones among them all. `rewards` are the mean training rewards of the
    first and the last step. The fields `..._with_failures` and `gain` count a failed rollout as 0."""

    id: str
    created_at: float
    steps: int
    training_rollouts: int
    held_out_rollouts: int
    other_rollouts: int
    rollouts_failed: int
    rewards: tuple[float | None, float | None] | None
    before: float | None
    after: float | None
    store: str
    rewards_with_failures: tuple[float | None, float | None] | None = None
    before_with_failures: float | None = None
    after_with_failures: float | None = None
    gain: Gain | None = None


@app.callback()
def runs(context: typer.Context, where: Location = "runs", as_json: AsJson = False) -> None:
    """List runs with their steps, their rollouts and their rewards. `lightning runs RUN` shows one run."""
    if context.invoked_subcommand is not None:
        context.obj = where
        return
    rows = [row for _, found in answers(where, _rows) for row in found]
    rows.sort(key=lambda row: row.created_at, reverse=True)
    if as_json:
        print_json(rows)
    elif rows:
        _list(rows)
        place = [] if where == "runs" else ["--runs", where]
        several = [("compare the runs", ["runs", "compare", *place])] if len(rows) > 1 else []
        next_steps(("see a run's steps and rollouts", ["runs", *place, rows[0].id]), *several)
    else:
        say(f"no runs in {escape(redacted(where))} yet")
        next_steps(("make one with a demonstration", ["demo"]))


def _list(rows: Sequence[RunRow]) -> None:
    """Print the table of runs; columns in which no run has anything are left out."""
    others = any(row.other_rollouts for row in rows)
    print_table(
        [
            *("run", "started", "steps", "training rollouts", "held-out rollouts"),
            *(["other rollouts"] if others else []),
            *("failed", "training reward", "held-out reward"),
        ],
        [
            [
                escape(row.id),
                local_time(row.created_at),
                str(row.steps),
                str(row.training_rollouts),
                str(row.held_out_rollouts),
                *([str(row.other_rollouts)] if others else []),
                f"[red]{row.rollouts_failed}" if row.rollouts_failed else "0",
                _change(row.rewards, row.rewards_with_failures),
                _change((row.before, row.after), (row.before_with_failures, row.after_with_failures))
                + (f" {escape(row.gain.said_interval())}" if row.gain else ""),
            ]
            for row in rows
        ],
    )
    if any(row.gain for row in rows):
        say("In brackets: the interval of 95 % of the gain. An interval with 0 in it may be chance.")


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
    """Show one run: its steps, its held-out rewards and its rollouts."""
    place, named = where or str(context.obj or "runs"), run
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
                        "cancelled": found.cancelled,
                    }
                )
            else:
                _show_run(found)
                _say_next(found, _folder_of(named, place), place)
            return
    raise ConfigError(_no_run(run, place))


def _say_next(found: Details, folder: Path | None, place: str) -> None:
    where = [] if place == "runs" else ["--runs", place]
    one = [("see the calls of a rollout", ["rollout", found.rollouts[0].id, *where])] if found.rollouts else []
    whole = [
        ("look for problems, and for better settings", ["advise", folder]),
        ("prove what was trained", ["audit", folder]),
    ]
    next_steps(*one, *(whole if folder else []))


def _no_run(run: str, place: str) -> str:
    command = shlex.join(["lightning", "runs", "--runs", redacted(place)])
    return f"there is no run {run!r} in {redacted(place)}: `{command}` lists the runs there"


def _folder_of(run: str, place: str) -> Path | None:
    """Return the folder of a run that was named by its folder or by its id at a place; None if its store is elsewhere."""
    return next((folder for folder in (Path(run), Path(place) / run) if store_in(folder)), None)


@dataclass(frozen=True, slots=True)
class Compared:
    """One run in a comparison. `settings` has the run's values of the settings in which the runs differ. `before` and `after`
    count failed rollouts as 0; `error` is the standard error of `after`, `margin` half the width of its interval of 95 %, and
    `gain` the change. `reward` is the mean training reward of the last step, `failed` counts failed training rollouts."""

    id: str
    settings: dict[str, Json]
    steps: int
    before: float | None
    after: float | None
    error: float | None
    margin: float | None
    gain: Gain | None
    reward: float | None
    failed: int


@app.command("compare")
def compare(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...]", help="Ids of runs; default: all.")] = None,
    where: Annotated[
        str, typer.Option("--runs", metavar="PLACE", help="Where the runs are, as for `lightning runs`.")
    ] = "",
    all_settings: Annotated[
        bool, typer.Option("--all-settings", help="Show every setting that differs, and its whole value.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: held-out rewards before and after, and the settings in which the runs differ."""
    place = where or str(context.obj or "runs")
    found = {
        run.id: (run, summary) for _, those in answers(place, partial(_summaries, names)) for run, summary in those
    }
    if missing := [name for name in names or () if name not in found]:
        raise ConfigError(_no_run(missing[0], place))
    if len(found) < 2:
        there = f"there is {'only 1' if found else 'none'} in {redacted(place)}: give another place with --runs"
        if names:
            there = f"only {names[0]} was named: name another run, or no run to compare all runs in {redacted(place)}"
        raise ConfigError(f"a comparison needs two or more runs, and {there}")
    rows = _compared([found[name] for name in names or sorted(found)])
    if as_json:
        print_json(rows)
        return
    rows.sort(key=lambda row: (row.after is None, -(row.after or 0.0)))
    _show_compared(rows, all_settings=all_settings)
    options = [] if place == "runs" else ["--runs", place]
    next_steps(("see the run of the best held-out reward", ["runs", *options, rows[0].id]))


def _show_compared(rows: Sequence[Compared], *, all_settings: bool) -> None:
    """Print the runs with a number each, then the settings that differ with a column for each number."""
    print_table(
        ("", "run", "steps", "held-out before", "after", "± (95 %)", "gain", "training reward at the end", "failed"),
        [
            (
                str(number),
                escape(row.id),
                str(row.steps),
                *(said(value) for value in (row.before, row.after, row.margin)),
                "-" if row.gain is None else escape(f"{row.gain.change:+.3f} {row.gain.said_interval()}"),
                said(row.reward),
                str(row.failed),
            )
            for number, row in enumerate(rows, 1)
        ],
    )
    names = list(rows[0].settings)
    shown = names if all_settings else names[:MOST_SETTINGS]
    if shown:
        say("")
        print_table(
            ("settings that differ", *(str(number) for number in range(1, len(rows) + 1))),
            [
                (escape(name), *(escape(_value(row.settings[name], whole=all_settings)) for row in rows))
                for name in shown
            ],
        )
    else:
        say("The runs have the same settings.")
    if len(shown) < len(names):
        say(
            f"{counted(len(names) - len(shown), 'more setting differs', 'more settings differ')}: --all-settings shows them"
        )
    say(
        "A held-out rollout that failed counts as 0. The intervals are over held-out tasks; other seeds differ by more."
    )


def _value(value: Json, *, whole: bool) -> str:
    """Format a setting's value, cut unless it is to be `whole`."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if whole or len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


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
                margin(ended[-1]) if len(ended) > 1 else None,
                gain_of(ended, with_failures=True),
                summary.rewards_with_failures[-1] if summary.rewards_with_failures else None,
                summary.failed,
            )
        )
    return rows


async def _rows(url: str, store: Store) -> list[RunRow]:
    return [await _row(store, run, url) for run in await store.list_runs(brief=True)]


async def _row(store: Store, run: Run, url: str) -> RunRow:
    splits: Counter[str] = Counter()
    failed = 0
    for share in await store.count_rollouts(run.id):
        splits[share.split] += share.rollouts
        failed += share.rollouts if share.status is Status.FAILED else 0
    summary = await summarize(store, run.id)
    rewards = (summary.rewards[0], summary.rewards[-1]) if summary.rewards else None
    with_failures = summary.rewards_with_failures
    held_out = [result.reward_with_failures for result in summary.evaluations]
    return RunRow(
        id=run.id,
        created_at=run.created_at,
        steps=summary.steps,
        training_rollouts=splits[TRAIN],
        held_out_rollouts=splits[VAL],
        other_rollouts=splits.total() - splits[TRAIN] - splits[VAL],
        rollouts_failed=failed,
        rewards=rewards,
        before=summary.before,
        after=summary.after,
        store=redacted(url),
        rewards_with_failures=(with_failures[0], with_failures[-1]) if with_failures else None,
        before_with_failures=held_out[0] if held_out else None,
        after_with_failures=held_out[-1] if len(held_out) > 1 else None,
        gain=gain_of(summary.evaluations, with_failures=True),
    )


@dataclass(frozen=True, slots=True)
class Details:
    """The parts of a run that are shown. `rollouts` are the selected rollouts, without the `left_out` beyond the limit, of all
    those searched, which `searched` counts by split; `step_rewards` are the step rewards of the selected rollouts, by rollout;
    `failures` counts the failed rollouts of all those searched, by reason, and `cancelled` those that a training loop wanted no
    more."""

    run: Run
    epochs: list[Epoch]
    steps: list[StepRecord]
    rollouts: list[Rollout]
    left_out: int
    searched: Counter[str]
    step_rewards: dict[str, tuple[StepReward, ...]]
    failures: list[tuple[int, Reason]]
    cancelled: int
    summary: Summary

    @property
    def among(self) -> int:
        """The number of rollouts that were searched."""
        return self.searched.total()

    @property
    def said_counts(self) -> str:
        """Format how many rollouts were searched, such as `912 (512 training, 400 held-out)`."""
        words = {TRAIN: "training", VAL: "held-out"}
        parts = ", ".join(f"{count} {words.get(split, split)}" for split, count in self.searched.items())
        return f"{self.among} ({parts})" if parts else "0"


async def _details(store: Store, run: str, step: int | None, failed: bool, limit: int) -> Details | None:
    stored = await store.get_run(run)
    if stored is None:
        return None
    rollouts = [rollout async for rollout in each_rollout(store, run, step=step)]
    failures = [one for one in rollouts if one.status is Status.FAILED]
    matching = failures if failed else rollouts
    chosen = matching[:limit]
    attempts = await store.attempts_of([(rollout.id, None) for rollout in chosen])
    return Details(
        run=stored,
        epochs=await read_epochs(store, stored),
        steps=await store.steps(run),
        rollouts=chosen,
        left_out=len(matching) - len(chosen),
        searched=Counter(rollout.split for rollout in rollouts),
        step_rewards={
            rollout.id: attempt.step_rewards
            for rollout, attempt in zip(chosen, attempts, strict=True)
            if attempt.step_rewards
        },
        failures=grouped(rollout.error for rollout in failures),
        cancelled=sum(rollout.status is Status.CANCELLED for rollout in rollouts),
        summary=await summarize(store, run),
    )


def _show_run(found: Details) -> None:
    from lightning.trainer.runs import changes_of  # it imports algorithms, which a list of runs does not need

    config = found.run.config
    parent = f", forked from {escape(str(config['forked_from']))}" if "forked_from" in config else ""
    say(f"[bold]{escape(found.run.id)}[/bold], model {escape(str(config.get('model', 'unknown')))}{parent}")
    for epoch in found.epochs[1:]:
        changed = "".join(f"\n  {escape(line)}" for line in changes_of(found.epochs, epoch.number))
        say(f"config epoch {epoch.number}, from step {epoch.first} on:{changed}")
    _say_policies(found.epochs[-1])
    _show_steps(found.steps)
    for result in found.summary.evaluations:
        named = "".join(f", {escape(name)} {said(value)}" for name, value in result.rewards.items())
        say(
            f"held-out after {counted(result.step, 'step')}: {said_reward(result)}{named} over "
            f"{counted(result.rollouts, 'task')}"
        )
    if gain := gain_of(found.summary.evaluations, with_failures=True):
        note = " (failures count as 0)" if any(result.failed for result in found.summary.evaluations) else ""
        say(f"held-out gain{note}: {escape(str(gain))}")
    _show_rollouts(found)
    _say_untrained(found.steps)


def _show_steps(steps: Sequence[StepRecord]) -> None:
    """Print the table of committed steps; columns that no step needs are left out."""
    rested = [_rested(record) for record in steps]
    aged = any(record.metrics.get("staleness_max") or "recorded_share" in record.metrics for record in steps)
    columns = ["step", "reward", "failed as 0", "rollouts trained on", "tokens", "loss", "logprob gap", "policy"]
    print_table(
        [*columns, *(["age", "record"] if aged else []), *(["policies that rested"] if any(rested) else [])],
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
                *([escape(resting)] if any(rested) else ()),
            ]
            for record, resting in zip(steps, rested, strict=True)
        ],
        title="committed steps",
    )


def _show_rollouts(found: Details) -> None:
    """Print the table of the selected rollouts, and why rollouts failed."""
    rest = f"; {found.left_out} more with a larger --limit" if found.left_out else ""
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
        title=f"rollouts: {len(found.rollouts)} of {found.said_counts}{rest}",
    )
    for count, why in found.failures:
        say(f"{count} of {found.among} rollouts failed: {escape(str(why))}")
    if found.cancelled:
        say(f"{found.cancelled} of {found.among} rollouts were cancelled: a loop of your own wanted them no more")


def _say_untrained(steps: Sequence[StepRecord]) -> None:
    """Print how many calls of these steps were recorded and not trained, by reason, if any were."""
    from lightning.trainer.metrics import UNTRAINED, said_reasons  # it imports what a list of runs does not need

    found: Counter[str] = Counter()
    for record in steps:
        found.update({name: int(value) for name, value in record.metrics.items() if name.startswith(UNTRAINED)})
    if found:
        reasons = {name.removeprefix(UNTRAINED): number for name, number in found.items()}
        say(f"calls recorded and not trained: {escape(said_reasons(reasons))}")


def _say_policies(epoch: Epoch) -> None:
    """Print what each policy of a run with several does."""
    from lightning.trainer.model import policy_set_of  # it imports what a list of runs does not need

    try:
        several = policy_set_of(epoch.config)
    except ConfigError as error:  # its steps are shown all the same
        say(f"[yellow]its policies are not known: {escape(str(error))}")
        return
    for name, told in several.described.items() if several is not None else ():
        say(f"policy [bold]{escape(name)}[/bold]: {escape(told)}")


def _rested(record: StepRecord) -> str:
    """Format the policies that a step did not train, because policies took turns."""
    return ", ".join(map(str, cast("Sequence[Json]", record.context.get(RESTING, ()))))


def _age(record: StepRecord) -> tuple[str, str]:
    """Format how many versions old the trained tokens were (mean/maximum), and the share of a recorded run that was used by
    then."""
    mean, most = (record.metrics.get(f"staleness_{name}") for name in ("mean", "max"))
    return f"{said(mean, '.1f')}/{said(most, '.0f')}", said(record.metrics.get("recorded_share"), ".0%")


def _change(
    values: tuple[float | None, float | None] | None, counted: tuple[float | None, float | None] | None = None
) -> str:
    """Format a reward's change. `counted` is the change with failed rollouts as 0, which is added if it differs as printed."""
    if values is None or (values[0] is None and not counted):
        return "-"
    change, other = (f"{said(pair[0])} → {said(pair[1])}" for pair in (values, counted or values))
    if change == other:
        return "-" if values[0] is None else change
    return f"{change} ({other} if failures count as 0)"
