"""`lightning advise`: what is wrong in a run, and what past runs did better.

The invariant: it only reads. Exit code 0: no alarm; 1: the last step still has a serious one.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.locate import locate, with_store
from lightning.cli.output import AsJson, escape, fail, print_json, say
from lightning.cli.runs import answers, databases
from lightning.config import load_config
from lightning.errors import ConfigError, LightningError
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.types import Json, Run

from lightning_debug.advise import Advice, Alarm, Past, Tuning, config_of, is_comparable, past_of
from lightning_debug.advise import advise as advise_run


def advise(
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs, with which this one is compared.")] = Path(
        "runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Name what is wrong in a run, and settings with which past runs of its tasks fared better."""
    url, run_id = locate(run, runs)
    mine = asyncio.run(with_store(url, lambda store: _mine(store, run_id)))
    past = _past(url, *mine, runs) if mine else []
    advice = asyncio.run(with_store(url, lambda store: advise_run(store, run_id, past)))
    if as_json:
        print_json(_plain(advice))
    else:
        show(advice)
    raise typer.Exit(int(any(alarm.found.serious and alarm.still for alarm in advice.alarms)))


async def _mine(store: Store, run_id: str) -> tuple[Run, Mapping[str, Json]] | None:
    """The run with the configuration that it is compared by."""
    run = await store.get_run(run_id)
    return (run, await config_of(store, run)) if run else None


def _past(url: str, mine: Run, config: Mapping[str, Json], runs: Path) -> list[Past]:
    """The other runs of the same model and tasks, in the run's own store and in those of the folder."""

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
    """What tells a run from one of the same name in another store."""
    return run.id, run.created_at


def _plain(advice: Advice) -> dict[str, object]:
    return {
        "run": advice.run,
        "steps": advice.steps,
        "alarms": [{**alarm.found.to_json(), "since": alarm.since, "still": alarm.still} for alarm in advice.alarms],
        "hints": [hint.to_json() for hint in advice.hints],
        "tuning": [{**asdict(each), "set": override(each.setting, each.better)} for each in advice.tuning],
        "compared_runs": advice.compared,
        "unread": advice.unread,
    }


def show(advice: Advice) -> None:
    """The advice in words."""
    say(f"{escape(advice.run)}: {advice.steps} steps")
    if not advice.alarms:
        say("no alarm" if advice.steps else "nothing was looked at: the run has no step yet")
    for alarm in advice.alarms:
        _show_alarm(alarm)
    for hint in advice.hints:
        say(f"[yellow]{escape(hint.text)}")
    if advice.unread:
        say(f"[yellow]{escape(advice.unread)}")
    _show_tuning(advice.tuning, advice.compared)


def _show_alarm(alarm: Alarm) -> None:
    found = alarm.found
    if alarm.since is None:
        when = "in the last steps" if alarm.still else "in the last steps, and not in the very last"
    else:
        first = f"first seen after {alarm.since + 1} steps"
        when = first if alarm.still else f"{first}, and no more at the end"
    say(f"{'[red]' if found.serious and alarm.still else '[yellow]'}{escape(found.text)}[/] ({when})")
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
        runs = f"{each.better_reward:.3f} in {_runs(each.better_runs)} beside {each.my_reward:.3f} in {_runs(each.my_runs)}"
        beside = "" if each.alone else "; these runs differ in other settings, too"
        values = f"{written(each.better)} instead of {written(each.mine)}"
        say(f"{escape(each.setting)} = {escape(values)}: {runs}{beside}")
        line = override(each.setting, each.better)
        if line is not None:
            say(f"  --set {escape(shlex.quote(line))}")


def override(setting: str, value: Json) -> str | None:
    """What `--set` takes for a setting; None where it takes nothing: an argument of the algorithm, a setting of another
    release."""
    line = f"{setting}={written(value)}"
    try:
        load_config(overrides=[line], env={})
    except ConfigError:
        return None
    return line


def written(value: Json) -> str:
    """A value as `--set` reads it: JSON, with the tables of TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"
