"""`lightning reward try`: a changed grader on the rollouts that a run was trained on.

The invariant: it only reads the store. Exit code 0: training would have been the same; 1: a group is ordered otherwise, an
advantage is another, or it cannot be said, since a rollout could not be graded or advantages could not be derived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer
from lightning.cli.locate import import_named, locate, with_store
from lightning.cli.output import AsJson, escape, print_json, print_table, say
from lightning.errors import ConfigError
from lightning.trainer.summary import said

from lightning_debug.regrade import Grader, GroupGrader, Regraded, RewardTrial, try_grader


class Action(StrEnum):
    """What is done with a reward."""

    TRY = "try"


def reward(
    action: Annotated[Action, typer.Argument(help="try: grade recorded rollouts again.")],
    grader: Annotated[
        str,
        typer.Argument(
            help="MODULE:FUNCTION, called with a transcript, which returns a reward as an agent does; or MODULE:JUDGE."
        ),
    ],
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of changed rollouts to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Grade a run's rollouts again with another reward function: what it would have changed, without running anything."""
    url, run_id = locate(run, runs)
    function = _load_grader(grader)
    trial = asyncio.run(with_store(url, lambda store: try_grader(store, run_id, function)))
    if as_json:
        print_json(_plain(trial))
    else:
        show(trial, limit)
    raise typer.Exit(0 if trial.same else 1)


def _load_grader(name: str) -> Grader | GroupGrader:
    found = import_named(name, "grader")
    if not (callable(found) or isinstance(found, GroupGrader)):
        raise ConfigError(
            f"{name!r} is a {type(found).__name__}: a grader is a function of a transcript, or has a weight and judge(groups)"
        )
    return cast("Grader | GroupGrader", found)


def _plain(trial: RewardTrial) -> dict[str, object]:
    return {
        "grader": trial.grader,
        "same": trial.same,
        "rollouts": [
            {
                "rollout": each.rollout,
                "step": each.step,
                "before": each.before,
                "now": each.now,
                "parts": dict(each.parts),
            }
            for each in trial.rollouts
        ],
        "failed": dict(trial.failed),
        "groups": trial.groups,
        "kept_policy_faults": trial.kept,
        "reordered": trial.reordered,
        "rank_correlation": trial.rank_correlation,
        "equal_before": trial.equal_before,
        "equal_now": trial.equal_now,
        "follows": {name: {"before": pair[0], "now": pair[1]} for name, pair in trial.follows.items()},
        "explained": dict(trial.explained),
        "advantages": trial.advantages,
        "changed_calls": trial.changed_calls,
        "why_no_advantages": trial.why,
        "judge_agreement": trial.agreement,
        "judge_unusable_groups": trial.unusable,
        "warnings": trial.warnings,
    }


def show(trial: RewardTrial, limit: int) -> None:
    """The result in words and tables."""
    graded = len(trial.rollouts)
    say(f"{escape(trial.grader)} on {graded} rollouts of {trial.groups} groups")
    if graded:
        _show_changes(trial)
    _show_judge(trial)
    for why, count in trial.failed.items():
        say(f"[red]{count} rollouts could not be graded and are in no figure: {escape(why)}")
    if not graded:
        say("[yellow]nothing was compared: no rollout was graded")
        return
    if trial.kept:
        kept = f"{trial.kept} rollouts that the policy failed keep the reward of trainer.policy_fault"
        say(f"{kept}, and are in no figure but the advantages")
    print_table(
        ["rank correlation of the reward with", "recorded", "now"],
        [
            [name, *(("-" if value is None else f"{value:+.2f}") for value in pair)]
            for name, pair in trial.follows.items()
        ],
    )
    if trial.explained:
        parts = ", ".join(f"{escape(name)} {share:.0%}" for name, share in trial.explained.items())
        say(f"what varies in the reward comes from: {parts}")
    changed = [each for each in trial.rollouts if each.now != each.before]
    changed.sort(key=lambda each: -abs(each.now - each.before))
    if limit and changed:
        _show_rollouts(changed[:limit])
    for warning in trial.warnings:
        say(f"[yellow]{escape(warning)}")


def _show_changes(trial: RewardTrial) -> None:
    graded = len(trial.rollouts)
    means = [sum(getattr(each, name) for each in trial.rollouts) / graded for name in ("before", "now")]
    rank = "-" if trial.rank_correlation is None else f"{trial.rank_correlation:.3f}"
    say(f"mean reward {means[0]:.3f} → {means[1]:.3f}; rank correlation with the recorded rewards {rank}")
    say(f"groups whose order changes: {len(trial.reordered)} of {trial.groups}")
    say(f"groups with equal rewards: {said(trial.equal_before, '.0%')} → {said(trial.equal_now, '.0%')}")
    if trial.advantages is not None:
        trained, other, signs = trial.advantages
        say(f"trained calls with another advantage: {other} of {trained}, {signs} of them with the other sign")
    else:
        unknown = "which advantages would differ, and so whether training would have been the same, cannot be said"
        say(f"[yellow]{unknown}: {escape(trial.why)}")


def _show_judge(trial: RewardTrial) -> None:
    if trial.unusable is None:
        return
    alike = (
        "not measured (it takes two usable samples of two rollouts)"
        if trial.agreement is None
        else f"{trial.agreement:.0%} (50% is chance)"
    )
    say(f"pairs of rollouts that two samples of the judge order alike: {alike}")
    all_groups = trial.groups + trial.unusable
    say(f"groups that the judge gave no usable scores for: {trial.unusable} of {all_groups}")


def _show_rollouts(changed: Sequence[Regraded]) -> None:
    print_table(
        ["rollout", "step", "recorded", "now", "parts", "task", "last answer"],
        [
            [
                escape(each.rollout),
                str(each.step),
                f"{each.before:.3g}",
                f"{each.now:.3g}",
                escape(", ".join(f"{name} {value:.3g}" for name, value in each.parts.items())),
                escape(str(each.task)[:60]),
                escape(each.answer[-60:]),
            ]
            for each in changed
        ],
        title="rollouts whose reward changes most",
    )
