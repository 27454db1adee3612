"""What is wrong in a run and what past runs did better, as blocks, with the evidence to click on."""

from __future__ import annotations

import shlex

from lightning_debug.advise import Alarm, Tuning
from lightning_debug.advise_command import override, written

from lightning_console.blocks import Block, Link, Notice, Notices
from lightning_console.pages.words import number, to
from lightning_console.places import Located
from lightning_console.queries.insight import Advised

LINKS = 6
"""Steps and rollouts that a finding links to."""


def advice_blocks(found: Located, advised: Advised | None) -> list[Block]:
    """Alarms, the most urgent first; then hints and settings with which past runs fared better. None: they are on their way."""
    if advised is None:
        return [Notices([Notice("the rules look at the run …", "muted")], title="Alarms")]
    advice = advised.advice
    if advice is None:
        return [Notices([Notice("there is no advice", "muted", detail=advised.why)], title="Alarms")]
    alarms = [_alarm(found, alarm) for alarm in advice.alarms]
    if not alarms:
        looked = f"the rules looked at {advice.steps} steps"
        alarms = [Notice("no alarm", "good", detail=looked)] if advice.steps else [Notice("no step yet", "muted")]
    if advice.unread:
        alarms.append(Notice(advice.unread, "warn"))
    hints = [Notice(hint.text, "warn", links=_evidence(found, hint.steps, hint.rollouts)) for hint in advice.hints]
    tuning = [_tuning(each) for each in advice.tuning]
    others = advice.compared - 1
    note = (
        f"settings are compared with {others} other {'run' if others == 1 else 'runs'} of this model and these tasks"
        if others
        else "no other run of this model and these tasks was measured alike: settings are not compared"
    )
    return [
        Notices(alarms, title="Alarms"),
        Notices(
            [*hints, *tuning],
            title="Advice",
            note=note,
            empty="none of them fared better for a setting that is different" if others else "nothing to say",
        ),
    ]


def _alarm(found: Located, alarm: Alarm) -> Notice:
    what = alarm.found
    if alarm.since is None:
        when = "in the last steps" if alarm.still else "in the last steps, and not in the very last"
    else:
        first = f"first seen after {alarm.since + 1} steps"
        when = first if alarm.still else f"{first}, and no more at the end"
    steps = what.steps if alarm.since is None else tuple(dict.fromkeys((alarm.since, *what.steps)))
    tone = "bad" if what.serious and alarm.still else "warn"
    links = _evidence(found, steps, what.rollouts)
    return Notice(what.text, tone, detail=when, links=links, key=what.cause)  # type: ignore[arg-type]


def _evidence(found: Located, steps: tuple[int, ...], rollouts: tuple[str, ...]) -> list[Link]:
    return [
        *(Link(f"step {step}", to("step", found.key, step)) for step in steps[:LINKS]),
        *(
            Link(rollout.removeprefix(f"{found.run.id}/"), to("rollout", found.key, rollout))
            for rollout in rollouts[:LINKS]
        ),
    ]


def _tuning(each: Tuning) -> Notice:
    line = override(each.setting, each.better)
    runs = f"{number(each.better_reward)} in {each.better_runs} runs beside {number(each.my_reward)} in {each.my_runs}"
    beside = "those runs differ in nothing else" if each.alone else "those runs differ in other settings, too"
    return Notice(
        f"{each.setting} = {written(each.better)} instead of {written(each.mine)}: {runs}",
        detail=beside,
        commands=[f"--set {shlex.quote(line)}"] if line is not None else (),
    )
