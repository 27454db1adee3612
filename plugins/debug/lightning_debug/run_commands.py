"""The commands that inspect a recorded run: `lightning advise` (alarms, and settings of past runs that earned more), `lightning
profile` (where time and tokens went, and what would help), and `lightning reward try` (another grader on its rollouts).

The invariant: they only read the store. Exit codes of `advise`: 1 if a serious alarm still holds after the last step, else 0.
Of `reward try`: 0 if training would have been the same; 1 if the order of a group or an advantage changes, or if that is not
known, because a rollout could not be graded or advantages could not be derived.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer
from lightning.cli.output import (
    AsJson,
    answers,
    databases,
    escape,
    fail,
    import_named,
    locate,
    next_steps,
    print_json,
    print_table,
    run_words,
    say,
    with_store,
)
from lightning.config import load_config
from lightning.errors import ConfigError, LightningError
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.summary import said
from lightning.types import Json, Run

from lightning_debug.advise import Advice, Alarm, Past, Tuning, config_of, is_comparable, past_of
from lightning_debug.advise import advise as advise_run
from lightning_debug.bottlenecks import STEP, Help, find_helps
from lightning_debug.diagnosis import WINDOW
from lightning_debug.profile import ROLLOUT_PARTS, Profile, read_profile
from lightning_debug.regrade import Grader, GroupGrader, RewardTrial, try_grader


def advise(
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder of the runs with which this run is compared.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Name what is wrong in a run, and settings with which past runs of its tasks fared better."""
    url, run_id = locate(run, runs)
    mine = asyncio.run(with_store(url, lambda store: _mine(store, run_id)))
    past = _past(url, *mine, runs) if mine else []
    advice = asyncio.run(with_store(url, lambda store: advise_run(store, run_id, past)))
    if as_json:
        print_json(
            {
                "run": advice.run,
                "steps": advice.steps,
                "alarms": [
                    {**each.found.to_json(), "since": each.since, "still": each.still} for each in advice.alarms
                ],
                "hints": [hint.to_json() for hint in advice.hints],
                "tuning": [{**asdict(each), "set": override(each.setting, each.better)} for each in advice.tuning],
                "compared_runs": advice.compared,
                "unread": advice.unread,
                "idle_steps": advice.idle,
            }
        )
    else:
        show_advice(advice)
        named = run_words(run, runs)
        next_steps(
            ("read the rollouts", ["runs", "show", *named]),
            ("see where its time went", ["profile", *named]),
        )
    raise typer.Exit(int(any(alarm.found.serious and alarm.still for alarm in advice.alarms)))


async def _mine(store: Store, run_id: str) -> tuple[Run, Mapping[str, Json]] | None:
    """Return the run and the configuration of its last step; None if the store has no such run."""
    run = await store.get_run(run_id)
    return (run, await config_of(store, run)) if run else None


def _past(url: str, mine: Run, config: Mapping[str, Json], runs: Path) -> list[Past]:
    """Return the other runs of the same model and tasks, from the run's own store and the stores in the folder `runs`."""

    async def comparable(_: str, store: Store) -> dict[tuple[str, float], Past]:
        others = [
            one for one in await store.list_runs() if is_comparable(config, one.config) and _key(one) != _key(mine)
        ]
        return {_key(one): found for one in others if (found := await past_of(store, one)) is not None}

    places = [url, *([str(runs)] if runs.is_dir() and databases(str(runs)) else [])]
    found: dict[tuple[str, float], Past] = {}
    for place in places:
        try:
            for _, past in answers(place, comparable):
                found |= past
        except LightningError as error:  # the run itself can be read
            fail(f"{redacted(place)} is not compared with: {error}")
    return list(found.values())


def _key(run: Run) -> tuple[str, float]:
    """Return the id and the time of creation of a run, which tell it from a run of the same id in another store."""
    return run.id, run.created_at


def show_advice(advice: Advice) -> None:
    """Print the advice."""
    say(f"{escape(advice.run)}: {counted(advice.steps, 'step')}")
    if not (advice.alarms or advice.idle):
        say("no alarm" if advice.steps else "nothing was looked at: the run has no step yet")
    if advice.idle:
        say(f"[yellow]{advice.idle} of {advice.steps} steps trained nothing and left the weights as they were[/]")
    if 0 < advice.steps < WINDOW:
        say(f"most rules were not applied: they compare {WINDOW} steps, and the run has fewer")
    for alarm in advice.alarms:
        _show_alarm(alarm)
    for hint in advice.hints:
        say(f"[yellow]{escape(hint.text)}")
    if advice.unread:
        say(f"[yellow]{escape(advice.unread)}")
    _show_tuning(advice.tuning, advice.compared)


def _show_alarm(alarm: Alarm) -> None:
    found = alarm.found
    say(f"{'[red]' if found.serious and alarm.still else '[yellow]'}{escape(found.text)}[/] ({alarm.when})")
    if found.rollouts:
        say(f"  look at: {escape(', '.join(found.rollouts))}")


def _show_tuning(tuning: Sequence[Tuning], compared: int) -> None:
    if compared == 1:
        say("there is no other run of this model and these tasks, measured in the same way, to compare settings with")
    elif not tuning:
        say(
            f"none of {compared - 1} other runs of this model and these tasks fared better for a setting that is different"
        )
    for each in tuning:
        runs = (
            f"{each.better_reward:.3f} in {counted(each.better_runs, 'run')} beside {each.my_reward:.3f} in "
            f"{counted(each.my_runs, 'run')}"
        )
        beside = "" if each.alone else "; these runs differ in other settings, too"
        values = f"{written(each.better)} instead of {written(each.mine)}"
        say(f"{escape(each.setting)} = {escape(values)}: {runs}{beside}")
        line = override(each.setting, each.better)
        if line is not None:
            say(f"  --set {escape(shlex.quote(line))}")


def override(setting: str, value: Json) -> str | None:
    """Return the argument of `--set` for a setting; None if `--set` does not accept it (an argument of the algorithm, or a
    setting of another release)."""
    line = f"{setting}={written(value)}"
    try:
        load_config(overrides=[line], env={})
    except ConfigError:
        return None
    return line


def written(value: Json) -> str:
    """Return a value as `--set` reads it: JSON, but with TOML's inline tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value, ensure_ascii=False)


def profile(
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="The steps from A up to, but without, B; default: all but the first.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show where a run's wall time and tokens went, what would help, and by how much."""
    first, end = _range(steps)
    url, run_id = locate(run, runs)
    found = asyncio.run(with_store(url, lambda store: read_profile(store, run_id, first, end)))
    helps = find_helps(found)
    if as_json:
        print_json(profile_json(found, helps))
    else:
        show_profile(found, helps)
        named = run_words(run, runs)
        next_steps(
            ("simulate the run on other machines", ["plan", *named]),
            ("learn what is wrong with what it learned", ["advise", *named]),
        )


def _range(steps: str) -> tuple[int | None, int | None]:
    """Read `A:B` as (first, end); a missing A means 0, a missing B None. An empty text gives (None, None). Raises `ConfigError`
    for anything else."""
    if not steps:
        return None, None
    first, colon, end = steps.partition(":")
    if not colon or not all(not part or part.isdecimal() for part in (first, end)):
        raise ConfigError(f"--steps {steps}: write A:B, the first step and the one after the last, as in 5:10")
    return int(first or 1), int(end) if end else None


def profile_json(found: Profile, helps: Sequence[Help]) -> dict[str, object]:
    """Return the profile and the helps as JSON values."""
    tokens = found.tokens
    return {
        "run": found.run,
        "steps": [step.step for step in found.steps],
        "seconds": found.seconds,
        "parts": dict(found.parts),
        "server_idle_seconds": found.server_idle,
        "places_idle_share": found.places_idle,
        "tool_seconds": dict(found.tools),
        "tokens": {
            "prompt": tokens.prompt,
            "cached": tokens.cached,
            "sampled": tokens.sampled,
            "trained": tokens.trained,
            "useful_share": tokens.useful,
            "untaught": dict(tokens.untaught),
            "failed": tokens.failed,
            "cancelled": tokens.cancelled,
        },
        "helps": [
            {
                "cause": help_.cause,
                "text": help_.text,
                "set": list(help_.settings),
                "saves": help_.saves,
                "of": help_.of,
                "how": help_.how,
                "evidence": {"steps": list(help_.steps), "rollouts": list(help_.rollouts)},
            }
            for help_ in helps
        ],
        "notes": list(found.notes),
    }


def show_profile(found: Profile, helps: Sequence[Help]) -> None:
    """Print the profile and the helps as sentences and tables."""
    first, last, count = found.steps[0].step, found.steps[-1].step, len(found.steps)
    say(f"{escape(found.run)}, steps {first} to {last}: {found.seconds:.1f} s, {found.seconds / count:.2f} s a step")
    parts = sorted(found.parts.items(), key=lambda part: -part[1])
    print_table(
        ["wall time", "seconds of a step", "share"],
        [
            [
                name.replace("_", " ") + (" (waiting for rollouts)" if name in ROLLOUT_PARTS else ""),
                f"{seconds / count:.2f}",
                f"{seconds / found.seconds:.0%}",
            ]
            for name, seconds in parts
            if seconds >= 0.001 * found.seconds
        ],
    )
    waiting = found.waiting or 1.0
    say(
        f"while steps waited for rollouts, the policy server had no call for {found.server_idle / waiting:.0%} of the time and "
        f"{found.places_idle:.0%} of the places for agents were empty"
    )
    _show_tokens(found)
    say("")
    if not helps:
        say("nothing that is known to help would save 3 % or more")
    for help_ in helps:
        of = "of a step" if help_.of == STEP else f"for each {help_.of}"
        say(f"[bold]{escape(help_.cause)}[/]: saves about {help_.saves:.0%} {of} ({escape(help_.how)})")
        say(f"  {escape(help_.text)}")
        for setting in help_.settings:
            say(f"  --set {escape(shlex.quote(setting))}")
        shown = ", ".join(map(str, help_.steps[:3])) + (
            f"; rollouts {', '.join(help_.rollouts)}" if help_.rollouts else ""
        )
        say(f"  see steps {escape(shown)}")
    for note in found.notes:
        say(f"[yellow]note[/] {escape(note)}")


def _show_tokens(found: Profile) -> None:
    tokens = found.tokens
    cached = "not known how many" if tokens.cached is None else f"{tokens.cached}"
    say(f"tokens: {tokens.prompt} of prompts ({cached} found in the prefix cache), {tokens.sampled} sampled")
    reasons = ", ".join(f"{escape(reason)} {count}" for reason, count in tokens.untaught.items())
    say(
        f"of those sampled, {tokens.trained} were trained ({said(tokens.useful, '.0%')}); "
        f"{tokens.failed} are of rollouts that failed{f', {tokens.cancelled} of cancelled ones' if tokens.cancelled else ''}, "
        f"{sum(tokens.untaught.values())} of others, whose groups taught nothing{f' ({reasons})' if reasons else ''}"
    )


class Action(StrEnum):
    """The actions of `lightning reward`."""

    TRY = "try"


def reward(
    action: Annotated[Action, typer.Argument(help="try: grade recorded rollouts again.")],
    grader: Annotated[
        str,
        typer.Argument(
            help="Your reward function as MODULE:FUNCTION: it is called with a transcript and returns a reward. Or a "
            "judge as MODULE:JUDGE."
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
        print_json(_trial_json(trial))
    else:
        show_trial(trial, limit)
        next_steps(("read the rollouts", ["runs", "show", *run_words(run, runs)]))
    raise typer.Exit(0 if trial.same else 1)


def _load_grader(name: str) -> Grader | GroupGrader:
    found = import_named(name, "grader")
    if not (callable(found) or isinstance(found, GroupGrader)):
        raise ConfigError(
            f"{name!r} is a {type(found).__name__}: a grader is a function of a transcript, or has a weight and judge(groups)"
        )
    return cast("Grader | GroupGrader", found)


def _trial_json(trial: RewardTrial) -> dict[str, object]:
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


def show_trial(trial: RewardTrial, limit: int) -> None:
    """Print the result of regrading as sentences and tables, with at most `limit` changed rollouts."""
    graded = len(trial.rollouts)
    say(f"{escape(trial.grader)} on {counted(graded, 'rollout')} of {counted(trial.groups, 'group')}")
    if graded:
        _show_changes(trial)
    _show_judge(trial)
    for why, count in trial.failed.items():
        ungraded = counted(count, "rollout could not be graded and is", "rollouts could not be graded and are")
        say(f"[red]{ungraded} in no figure: {escape(why)}")
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
                for each in changed[:limit]
            ],
            title="rollouts whose reward changes most",
        )
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
