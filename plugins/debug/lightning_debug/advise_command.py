"""`lightning advise`: what is wrong in a run, and what past runs did better.

The invariant: it only reads. Exit code 0: no alarm; 1: the last step still has a serious one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.locate import locate, with_store
from lightning.cli.output import AsJson, escape, fail, print_json, say
from lightning.cli.runs import answers, databases
from lightning.errors import LightningError
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.types import Run

from lightning_debug.advise import Advice, Alarm, Past, Tuning, is_comparable, past_of
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
    mine = asyncio.run(with_store(url, lambda store: store.get_run(run_id)))
    past = _past(url, mine, runs) if mine else []
    advice = asyncio.run(with_store(url, lambda store: advise_run(store, run_id, past)))
    if as_json:
        print_json(_plain(advice))
    else:
        show(advice)
    raise typer.Exit(int(any(alarm.found.serious and alarm.still for alarm in advice.alarms)))


def _past(url: str, mine: Run, runs: Path) -> list[Past]:
    """The other runs of the same model and tasks, in the run's own store and in those of the folder."""

    async def comparable(_: str, store: Store) -> dict[tuple[str, float], Past]:
        others = [one for one in await store.list_runs() if is_comparable(mine, one) and _key(one) != _key(mine)]
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
        "tuning": advice.tuning,
        "compared_runs": advice.compared,
        "unread": advice.unread,
    }


def show(advice: Advice) -> None:
    """The advice in words."""
    say(f"{escape(advice.run)}: {advice.steps} steps")
    if not advice.alarms:
        say("no alarm")
    for alarm in advice.alarms:
        _show_alarm(alarm)
    for hint in advice.hints:
        say(f"[yellow]{escape(hint.text)}")
    if advice.unread:
        say(f"[yellow]{escape(advice.unread)}")
    _show_tuning(advice.tuning, advice.compared)


def _show_alarm(alarm: Alarm) -> None:
    found = alarm.found
    when = f"since step {alarm.since + 1}" if alarm.still else f"from step {alarm.since + 1} on, and no more at the end"
    say(f"{'[red]' if found.serious and alarm.still else '[yellow]'}{escape(found.text)}[/] ({when})")
    if found.rollouts:
        say(f"  look at: {escape(', '.join(found.rollouts))}")


def _show_tuning(tuning: Sequence[Tuning], compared: int) -> None:
    if compared == 1:
        say("there is no other run of this model and these tasks to compare settings with")
    elif not tuning:
        say(
            f"none of {compared - 1} other runs of this model and these tasks fared better for a setting that is different"
        )
    for each in tuning:
        runs = f"{each.better_reward:.3f} in {_runs(each.better_runs)} beside {each.my_reward:.3f} in {_runs(each.my_runs)}"
        beside = "" if each.alone else "; these runs differ in other settings, too"
        say(f"{escape(each.setting)} = {escape(str(each.better))} instead of {escape(str(each.mine))}: {runs}{beside}")
        if each.setting.split(".")[0] in ("trainer", "engine", "gateway", "runner"):
            say(f"  --set {escape(each.setting)}={escape(str(each.better))}")


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"
