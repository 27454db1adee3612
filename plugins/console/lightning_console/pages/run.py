"""The page of a run: alarms first, then advice, figures, curves, and how its time was spent."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from lightning.errors import UnavailableError
from lightning.store.protocol import PRUNED
from lightning.trainer.context import is_over, read_epochs
from lightning.trainer.gains import gain_of as held_out_gain_of
from lightning.trainer.gains import margin
from lightning.trainer.summary import POLICY_FAULT
from lightning_debug.advise import Advice, Alarm, Tuning
from lightning_debug.bottlenecks import STEP, Help, find_helps
from lightning_debug.profile import ROLLOUT_PARTS, Profile, read_profile
from lightning_debug.run_commands import override
from lightning_debug.run_commands import written as setting_written

from lightning_console.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)
from lightning_console.pages.audits import audit_blocks
from lightning_console.pages.metrics import charts_of, picker
from lightning_console.pages.policies import policies_table
from lightning_console.pages.tools import more_links
from lightning_console.pages.versions import compare_versions
from lightning_console.pages.words import (
    NONE,
    change,
    count,
    counted,
    located,
    name_of,
    number,
    plus_or_minus,
    rollout_link,
    seconds,
    share,
    to,
    when,
    written,
)
from lightning_console.places import Located, Places, folder_of
from lightning_console.queries.advice import advice_of
from lightning_console.queries.branches import audits_of, parent_of
from lightning_console.queries.curves import Curves, gain_of, held_out_points, read_curves, total
from lightning_console.queries.memo import Memo, apart, stamp_of
from lightning_console.queries.runs import ODD, RunLine, chosen_settings, line_of, points_of, said_of
from lightning_console.router import Address

OF_SERVER: Final = re.compile(r"server_(\d+)/version")
"""The name of a metric that each of several policy servers has."""
MOST_LINKS: Final = 24
"""Most links to steps on the page of a run."""
SMALL: Final = 3000
"""A run with more rollouts than this is profiled only when the visitor asks for it."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """The profile of a run's time and tokens, and changes that would make it faster. `profile` is None if there is none, and
    `why` says why. `asked` is False for a long run that nobody has asked to profile yet."""

    profile: Profile | None
    helps: tuple[Help, ...] = ()
    why: str = ""
    asked: bool = True


_profiles: Memo[Profiled] = Memo()
_gains: Memo[tuple[tuple[float, float] | None]] = Memo()


async def profile_of(places: Places, found: Located, rollouts: int, *, asked: bool) -> Profiled | None:
    """Profile a run's time and tokens; None if that is not ready within the patience of the places. A run with more than
    `SMALL` `rollouts` is profiled only if somebody `asked` for it."""
    if not asked and rollouts > SMALL:
        return Profiled(None, why=f"the run has {counted(rollouts, 'rollout')}: it takes a while", asked=False)

    async def make() -> Profiled:
        try:
            profile = await read_profile(found.store, found.run.id)
        except ODD as error:
            return Profiled(None, why=said_of(error))
        return Profiled(profile, tuple(find_helps(profile)))

    stamp = await stamp_of(found.store, found.run.id)
    return await _profiles.soon(found.store, found.run.id, stamp, lambda: apart(make), places.patience)


async def _gain_on_new(places: Places, found: Located, line: RunLine) -> tuple[bool, tuple[float, float] | None]:
    """Return the 95 % interval of the gain from the first held-out evaluation to the last on new tasks, None if there is none;
    and whether that was found within the patience of the places."""
    first, last = line.before, line.after
    if first is None or last is None:
        return True, None
    one, other = f"{found.key}@{first.step}", f"{found.key}@{last.step}"

    async def make() -> tuple[tuple[float, float] | None]:
        try:
            return ((await compare_versions(places, one, other)).interval,)
        except ODD:
            return (None,)

    made = await _gains.soon(
        found.store, (one, other), await stamp_of(found.store, found.run.id), make, places.patience
    )
    return made is not None, made[0] if made else None


LENGTH: Final = "length"
"""The name of a curve that is derived from other metrics: trained tokens for each rollout."""
CURVES: Final[Sequence[tuple[str, str, tuple[tuple[str, str], ...], tuple[float | None, float | None]]]] = (
    ("Entropy", "nats", (("entropy", "entropy"),), (0.0, None)),
    (
        "Trainer to sampler",
        "nats",
        (("mean_logprob_gap", "mean |Δ logprob|"), ("max_logprob_gap", "largest"), ("approx_kl", "KL")),
        (0.0, None),
    ),
    (
        "Clipped and masked",
        "share of tokens",
        (("clip_fraction", "clipped"), ("dual_clip_fraction", "clipped twice"), ("masked_share", "masked")),
        (0.0, 1.0),
    ),
    ("Norm of the gradient", "", (("grad_norm", "norm"),), (0.0, None)),
    ("Length", "trained tokens of a rollout", ((LENGTH, "tokens"),), (0.0, None)),
    ("Calls of a rollout", "calls", (("calls_per_rollout", "calls"),), (0.0, None)),
    ("Cut off", "share of calls", (("truncated", "ended at the limit of tokens"),), (0.0, 1.0)),
    ("Age of the trained tokens", "steps", (("staleness_mean", "mean"), ("staleness_max", "oldest")), (0.0, None)),
    ("Sampling", "tokens per second", (("tokens_per_second", "sampled"),), (0.0, None)),
    ("Prefix cache", "share of prompt tokens", (("prefix_hit_share", "found again"),), (0.0, 1.0)),
)
"""The small charts of a run's page: title, unit, metrics with their names, and bounds of the y axis."""


async def page(places: Places, address: Address) -> Page:
    """Make the page `run/KEY?chart=NAME,NAME`; with `profile=yes`, a long run is profiled as well."""
    found = await located(places, address)
    line = await line_of(found.store, found.run, found.url)
    try:
        curves = await read_curves(found.store, found.run)
    except UnavailableError:
        raise
    except ODD as error:
        return _unread(found, line, address, line.unread or said_of(error))
    blocks: list[Block] = [await _state(found, line, curves)]
    waiting = False
    if curves.steps:
        advised = await advice_of(places, found, places.patience)
        blocks += advice_blocks(found, advised)
        waiting = advised is None
    known, new = await _gain_on_new(places, found, line)
    opened = Control("id", "open rollout (such as 2/4/7), then Enter", "")
    blocks += [_facts(found, line, curves, new), *_step_links(found, curves), more_links(found)]
    blocks += [Controls(to("rollout", found.key), [opened])] if line.rollouts else []
    waiting = waiting or not known
    blocks += _charts(found, curves)
    blocks += [*picker(address, curves), *charts_of(found, curves, address)]
    if curves.steps:
        blocks += _servers(curves)
        blocks += policies_table((await read_epochs(found.store, found.run))[-1], curves.values[-1])
        profiled = await profile_of(places, found, line.rollouts, asked=address.option("profile") == "yes")
        blocks += time_blocks(found, curves, profiled, str(address.having(profile="yes")))
        waiting = waiting or profiled is None
    audits, more = await audits_of(found, patience=places.patience)
    blocks += audit_blocks(found, audits)
    waiting = waiting or more
    blocks.append(_settings(curves))
    blocks.append(_commands(found, line))
    return Page(
        str(address),
        name_of(found.run.id, found.url, "~" in found.key),
        blocks,
        (Link("Runs", "runs"),),
        live=waiting or line.state.name == "running",
        partial=waiting,
        next=to("step", found.key, curves.steps[-1]) if curves.steps else "",
    )


def _unread(found: Located, line: RunLine, address: Address, why: str) -> Page:
    """Make the page of a run whose curves cannot be read: the reason, its state and its counts."""
    notices = Notices([Notice("the run cannot be read whole", "bad", detail=why)])
    counts = Facts([Fact("state", line.state.name, line.state.why), Fact("rollouts", count(line.rollouts))])
    above = (Link("Runs", "runs"),)
    return Page(str(address), name_of(found.run.id, found.url, "~" in found.key), [notices, counts], above)


async def _state(found: Located, line: RunLine, curves: Curves) -> Notices:
    """Return the notices at the top of the page: the run's state, missing data, and where it started from."""
    tones = {"stopped": "warn", "failed": "bad"}
    notices = [Notice(f"{line.state.name}: {line.state.why}", tones.get(line.state.name, ""))]  # type: ignore[arg-type]
    pruned = await found.store.get_state(found.run.id, PRUNED)
    if isinstance(pruned, dict):
        what = "calls that were trained among them" if pruned.get("trained") else "none that was trained"
        lost, at = pruned.get("rollouts"), when(pruned.get("at"))
        text = f"calls of {counted(lost, 'rollout')} were removed on {at} (lightning db prune)"
        notices.append(Notice(text, "warn", detail=f"{what}; their texts and tokens cannot be shown"))
    if line.unread:
        notices.append(Notice("the run cannot be read whole", "warn", detail=line.unread))
    if not curves.steps:
        over = await is_over(found.store, found.run.id)
        what = "it trained nothing: it evaluates, or searched for prompts" if over else "no step is committed yet"
        detail = f"{counted(line.rollouts, 'rollout')}, {count(line.failed)} of them failed"
        notices.append(
            Notice(
                what,
                detail=detail,
                links=[Link("what is sampled of step 1", to("step", found.key, 1))]
                if line.rollouts and not over
                else (),
            )
        )
    if line.about.forked_from:
        notices.append(Notice(f"it began with the weights of {line.about.forked_from}"))
    if (parent := await parent_of(found)) is not None:
        key, rollout = parent
        of = Link("their parent", to("rollout", key, rollout)) if rollout else Link("the run", to("run", key))
        what = f"it has branches of {rollout}" if rollout else "it has the branches of a credit audit"
        notices.append(Notice(what, links=[of]))
    return Notices(notices)


def _facts(found: Located, line: RunLine, curves: Curves, new: tuple[float, float] | None) -> Facts:
    model = Fact("model", line.about.model or NONE, f"{line.about.algorithm or 'no algorithm'}, seed {line.about.seed}")
    rollouts = Fact(
        "rollouts",
        count(line.rollouts),
        f"{count(line.failed)} failed",
        "warn" if (line.failed_share or 0.0) > 0.1 else "",
        hint=f"{share(line.failed_share)} of the last step failed" if curves.steps else "",
    )
    facts = [_held_out_fact(found, line, new), rollouts, model]
    if curves.steps:
        facts = [*_trained_facts(found, line, curves), *facts]
    note = f"begun {when(found.run.created_at)}; project {found.run.project}; {found.url}"
    return Facts(facts, title="Figures", note=note)


def _servers(curves: Curves) -> list[Table]:
    """Return the table of the policy servers in the last step; nothing for a run with one server."""
    last = curves.values[-1]
    numbers = sorted(int(found[1]) for name in last if (found := OF_SERVER.fullmatch(name)))
    if not numbers:
        return []

    def row(server: int) -> list[Cell]:
        version, calls, hits = (
            last.get(f"server_{server}/{name}") for name in ("version", "requests", "prefix_hit_share")
        )
        return [Cell(str(server)), Cell(count(version)), Cell(count(calls)), Cell(share(hits))]

    columns = [Column("server"), Column("version"), Column("calls"), Column("prefix cache")]
    note = "calls of the last step; the share of prompt tokens that the server found in its prefix cache"
    return [Table(columns, [row(server) for server in numbers], title="Policy servers", note=note)]


def _settings(curves: Curves) -> Table:
    """Return the table of settings that differ from the defaults, with these."""
    return Table(
        [Column("setting"), Column("value"), Column("default")],
        [
            [
                Cell(name),
                Cell(written(value, 80), hint=written(value, 1000)),
                Cell(NONE if usual is None else written(usual, 80)),
            ]
            for name, (value, usual) in chosen_settings(curves.settings).items()
        ],
        title="Settings that were chosen",
        empty="all settings are the defaults",
        note="those that change what is learned; all others are the defaults"
        + ("; the run changed some on its way, and these are the last" if curves.changes else ""),
    )


def _trained_facts(found: Located, line: RunLine, curves: Curves) -> list[Fact]:
    gain = gain_of(curves)
    trained, sampled = total(curves.named("tokens")), curves.tokens[-1]
    return [
        Fact(
            "reward of the last step",
            number(line.reward_with_failures),
            f"{number(line.reward)} of those that succeeded" if line.failed_share else "no rollout of it failed",
            hint="mean over the rollouts of the step; a failed one counts as 0",
            to=to("step", found.key, curves.steps[-1]),
        ),
        Fact(
            "80 % of the gain",
            counted(gain.steps, "step") if gain else NONE,
            f"{seconds(gain.seconds)} of training; {gain.measure}" if gain else "nothing gained, or too short to say",
        ),
        Fact("steps", count(len(curves.steps)), f"{seconds(curves.seconds[-1])} of training"),
        Fact("trained tokens", count(trained), f"of about {count(sampled)} sampled" if sampled else ""),
        Fact(
            "useful tokens",
            share(min(1.0, trained / sampled)) if sampled and trained is not None else NONE,
            "trained of sampled, about",
            hint="sampled tokens are the measured speed times the time of sampling; the profile below counts them",
        ),
    ]


def _said_of_new(new: tuple[float, float] | None) -> str:
    if new is None:
        return "not known"
    low, high = new
    return f"{'not sure' if low <= 0.0 <= high else 'too'} ({low:+.3f} to {high:+.3f})"


def _held_out_fact(found: Located, line: RunLine, new: tuple[float, float] | None) -> Fact:
    first, last = line.before, line.after
    if first is None:
        why = "not evaluated yet" if line.about.held_out else "this run has no held-out tasks"
        return Fact("held-out", NONE, why, "muted")
    if last is None:
        return Fact(
            "held-out", number(first.score), f"{plus_or_minus(margin(first))} after {counted(first.step, 'step')}"
        )
    gain = held_out_gain_of((first, last), with_failures=True)
    sure = "interval unknown" if gain is None or gain.interval is None else "{:+.3f} to {:+.3f}".format(*gain.interval)
    if gain is None or gain.interval is None:
        told = sure
    elif not gain.is_certain:
        told = f"this may be chance ({sure})"
    else:
        told = f"beyond chance on these tasks ({sure}); on new tasks {_said_of_new(new)}"
    failed = f"; {last.failed} of {last.rollouts} failed" if last.failed else ""
    return Fact(
        "held-out",
        change(first.score, last.score),
        f"{told}{failed}",
        "good" if gain is not None and gain.is_certain and gain.change > 0 else "",
        hint=f"with intervals of 95 %; after {counted(last.step, 'step')}; failed rollouts count as 0; a click compares the "
        "first with the last, task by task",
        to=to("versions", of=f"{found.key}@{first.step},{found.key}@{last.step}"),
    )


def _step_links(found: Located, curves: Curves) -> list[Block]:
    """Return links to the steps, and to those that moved the reward most: to all of a short run, else to the first and the
    last, and to others between them."""
    steps = curves.steps
    if not steps:
        return []
    shown = _spread(steps)
    links = [Link(f"step {step}", to("step", found.key, step)) for step in shown]
    text = "Each step's groups and rollouts:" if len(shown) == len(steps) else f"Some of the {count(len(steps))} steps:"
    reward = Notice("Reward", links=[Link("what it follows, and which rollout earned most", to("rewards", found.key))])
    return [Notices([*_moves(found, curves), reward, Notice(text, links=links)], title="Steps and rewards")]


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `MOST_LINKS` of the steps, evenly, with the first and the last."""
    return sorted({steps[round(at * (len(steps) - 1) / (MOST_LINKS - 1))] for at in range(MOST_LINKS)})


def _charts(found: Located, curves: Curves) -> list[Block]:
    if not curves.steps and not curves.evaluations:
        return []
    marks = [
        (float(change_.step), f"settings changed: {'; '.join(change_.changes)[:200]}") for change_ in curves.changes
    ]

    def series(metric: str, name: str, *, dashed: bool = False) -> Series:
        values = curves.lengths if metric == LENGTH else curves.named(metric)
        points, places = points_of(curves.steps, values)
        return Series(name, points, to=[to("step", found.key, curves.steps[place]) for place in places], dashed=dashed)

    failed = any(curves.named("failed"))
    rewards = [series("reward_with_failures", "failed as 0" if failed else "reward")]
    if failed:
        rewards.append(series("reward", "those that succeeded", dashed=True))
    parts = [name for name in curves.names if name.startswith("reward/")]
    rewards += [series(name, name.removeprefix("reward/"), dashed=True) for name in parts[:6]]
    held_out = held_out_points(curves)
    blocks: list[Block] = [
        Chart(
            rewards,
            "step",
            "reward",
            marks=marks,
            whole=True,
            title="Reward",
            note="a click on a point opens its step, which says why the reward moved there",
        )
        if curves.steps
        else Notices([]),
        Chart(
            [Series("held-out", held_out)],
            "after so many steps",
            "reward",
            marks=marks,
            whole=True,
            title="Held-out tasks",
            note="with the interval of 95 %; failed rollouts count as 0",
            empty="not evaluated yet" if curves.about.held_out else "this run has no held-out tasks",
        ),
    ]
    for title, unit, metrics, bounds in CURVES:
        made = [
            one for metric, name in metrics if metric in (LENGTH, *curves.names) and _has(one := series(metric, name))
        ]
        if made:
            small = Chart(made, "step", unit, marks=marks, bounds=bounds, whole=True, small=True, title=title)
            blocks.append(small)
    blocks += _failures(curves, series, marks)
    return [block for block in blocks if not (isinstance(block, Notices) and not block.notices)]


def _moves(found: Located, curves: Curves) -> list[Notice]:
    """Return links to the steps at which the reward fell and rose most, and to what each step pushed most."""
    values = zip(curves.steps, curves.named("reward_with_failures"), strict=True)
    known = [(step, value) for step, value in values if value is not None]
    moves = [(now - before, step) for (_, before), (step, now) in pairwise(known)]
    links = []
    if moves and (lowest := min(moves))[0] < 0:
        links.append(Link(f"why it fell by {number(-lowest[0])} at step {lowest[1]}", to("step", found.key, lowest[1])))
    if moves and (highest := max(moves))[0] > 0:
        text = f"why it rose by {number(highest[0])} at step {highest[1]}"
        links.append(Link(text, to("step", found.key, highest[1])))
    notices = [Notice("The steps at which the reward moved most", links=links)] if links else []
    if curves.steps:
        links = [Link(f"step {step}", to("pushed", found.key, step)) for step in _spread(curves.steps)]
        notices.append(Notice("Calls and tokens that a step pushed most:", links=links))
        notices.append(
            Notice("Every metric", links=[Link("all metrics, and charts of them", to("metrics", found.key))])
        )
    return notices


def _failures(curves: Curves, series: Callable[..., Series], marks: Sequence[tuple[float, str]]) -> list[Block]:
    faults = sorted(name for name in curves.names if name.startswith(POLICY_FAULT))
    made = [series("failed", "all that failed"), *(series(name, name.removeprefix(POLICY_FAULT)) for name in faults)]
    taught = [series("groups", "groups"), series("groups_used", "that taught")]
    found: list[Block] = []
    if any(curves.named("failed")):
        title = "Failed rollouts, and the policy's own faults" if faults else "Failed rollouts"
        found.append(
            Chart(made, "step", "rollouts", marks=marks, bounds=(0.0, None), whole=True, small=True, title=title)
        )
    if _has(taught[0]):
        found.append(
            Chart(taught, "step", "groups", marks=marks, bounds=(0.0, None), whole=True, small=True, title="Groups")
        )
    return found


def _has(series: Series) -> bool:
    return any(point[1] is not None for point in series.points)


def _commands(found: Located, line: RunLine) -> Notices:
    folder = folder_of(found)
    links = [Link("the reward", to("rewards", found.key)), Link("compare with other runs", to("runs", runs=found.key))]
    if not folder:
        text = "its store is not in the run's folder on this machine, where commands would find it"
        return Notices([Notice("Look further", detail=text, links=links)], title="Look further")
    place = shlex.quote(folder)
    commands = [
        f"lightning advise {place}",
        f"lightning profile {place}",
        f"lightning audit {place}",
        f"lightning replay {place} --train",
    ]
    notices = [Notice("look elsewhere", links=links)]
    if line.steps:
        notices.append(Notice("ask the same on the command line, and prove it", commands=commands))
    if line.state.name in ("stopped", "failed"):
        text = "go on from its last step: your own `lightning train`, or `Trainer(..., resume=True).fit(...)`, with"
        notices.append(Notice(text, commands=[f"--out {place} --resume"]))
    return Notices(notices, title="Look further")


LINKS = 6
"""Most steps, and most rollouts, that a finding links to."""


def advice_blocks(found: Located, advice: Advice | str | None) -> list[Block]:
    """Return the blocks for alarms, the most urgent first, and for advice: hints, and settings of past runs that earned more.
    A text says why there is no advice; None means that it is still being computed."""
    if advice is None:
        return [Notices([Notice("the rules look at the run …", "muted")], title="Alarms")]
    if isinstance(advice, str):
        return [Notices([Notice("there is no advice", "muted", detail=advice)], title="Alarms")]
    alarms = [_alarm(found, alarm) for alarm in advice.alarms]
    if not alarms:
        looked = f"the rules looked at {counted(advice.steps, 'step')}"
        alarms = [Notice("no alarm", "good", detail=looked)] if advice.steps else [Notice("no step yet", "muted")]
    if advice.unread:
        alarms.append(Notice(advice.unread, "warn"))
    hints = [Notice(hint.text, "warn", links=_evidence(found, hint.steps, hint.rollouts)) for hint in advice.hints]
    tuning = [_tuning(each) for each in advice.tuning]
    others = advice.compared - 1
    note = (
        f"settings are compared with {counted(others, 'other run')} of this model and these tasks"
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
    steps = what.steps if alarm.since is None else tuple(dict.fromkeys((alarm.since, *what.steps)))
    tone = "bad" if what.serious and alarm.still else "warn"
    links = _evidence(found, steps, what.rollouts)
    return Notice(what.text, tone, detail=alarm.when, links=links, key=what.cause)  # type: ignore[arg-type]


def _evidence(found: Located, steps: tuple[int, ...], rollouts: tuple[str, ...]) -> list[Link]:
    return [
        *(Link(f"step {step}", to("step", found.key, step)) for step in steps[:LINKS]),
        *(rollout_link(found, rollout) for rollout in rollouts[:LINKS]),
    ]


def _tuning(each: Tuning) -> Notice:
    line = override(each.setting, each.better)
    runs = (
        f"{number(each.better_reward)} in {counted(each.better_runs, 'run')} beside {number(each.my_reward)} in "
        f"{each.my_runs}"
    )
    beside = "those runs differ in nothing else" if each.alone else "those runs differ in other settings, too"
    return Notice(
        f"{each.setting} = {setting_written(each.better)} instead of {setting_written(each.mine)}: {runs}",
        detail=beside,
        commands=[f"--set {shlex.quote(line)}"] if line is not None else (),
    )


PHASES = {
    "rollout": "waiting for rollouts", "train": "training", "update": "update of the policy server", "checkpoint": "checkpoint",
    "eval": "evaluation", "start": "start",
}  # fmt: skip


def time_blocks(found: Located, curves: Curves, profiled: Profiled | None, ask: str) -> list[Block]:
    """Return the blocks for a profile; without one, the phases that the trainer measured, and why there is none. None means
    that it is still being computed. `ask` is the address that profiles the run."""
    if profiled is None:
        return [_phases(curves), Notices([Notice("the run's calls are looked at …", "muted")])]
    if profiled.profile is None:
        links = [] if profiled.asked else [Link("look anyway", ask)]
        why = Notice(
            "where the time within rollouts and the tokens went is not known", "muted", detail=profiled.why, links=links
        )
        return [_phases(curves), Notices([why])]
    profile = profiled.profile
    return [_parts(profile), _tokens(profile), _helps(found, profiled.helps, profile)]


def _phases(curves: Curves) -> Table:
    total = sum(curves.phases.values())
    rows = [
        [Cell(PHASES.get(name, name)), Cell(seconds(took)), Cell(share(took / total))]
        for name, took in sorted(curves.phases.items(), key=lambda each: -each[1])
        if total and took >= 0.001 * total
    ]
    columns = [Column("phase"), Column("in all", "number"), Column("share", "number")]
    return Table(columns, rows, title="Where time goes", empty="no times were recorded")


def _parts(profile: Profile) -> Table:
    steps = len(profile.steps)
    rows = [
        [
            Cell(name.replace("_", " ") + (" (waiting for rollouts)" if name in ROLLOUT_PARTS else "")),
            Cell(seconds(took / steps)),
            Cell(share(took / profile.seconds)),
        ]
        for name, took in sorted(profile.parts.items(), key=lambda each: -each[1])
        if took >= 0.001 * profile.seconds
    ]
    columns = [Column("wall time"), Column("of a step", "number"), Column("share", "number")]
    first, last = profile.steps[0].step, profile.steps[-1].step
    return Table(
        columns,
        rows,
        title="Where time goes",
        note=f"steps {first} to {last}: {seconds(profile.seconds / steps)} a step",
    )


def _tokens(profile: Profile) -> Facts:
    tokens = profile.tokens
    untaught = ", ".join(f"{reason.replace('_', ' ')} {count(many)}" for reason, many in tokens.untaught.items())
    known = tokens.trained + sum(tokens.untaught.values()) + tokens.failed + tokens.cancelled
    return Facts(
        [
            Fact(
                "useful tokens",
                share(tokens.useful),
                f"{count(tokens.trained)} trained of {count(tokens.sampled)} sampled",
            ),
            Fact(
                "in groups that taught nothing",
                count(sum(tokens.untaught.values())),
                untaught,
                hint="of rollouts that succeeded: those that failed or were cancelled are counted apart",
            ),
            Fact("in rollouts that failed", count(tokens.failed)),
            *([Fact("in cancelled rollouts", count(tokens.cancelled))] if tokens.cancelled else []),
            Fact(
                "in calls that are not trained",
                count(max(0, tokens.sampled - known)),
                "at least: of other agents, or left out by the algorithm",
                hint="`train_agents` says whose calls are trained",
            ),
            Fact(
                "tokens of prompts",
                count(tokens.prompt),
                "not known how many were in the prefix cache"
                if tokens.cached is None
                else f"{share(tokens.cached / tokens.prompt if tokens.prompt else 0.0)} found in the prefix cache",
            ),
            Fact("places for agents", share(1.0 - profile.places_idle), "busy while a step waited for rollouts"),
            Fact(
                "policy server",
                share(1.0 - profile.server_idle / profile.waiting) if profile.waiting else NONE,
                "busy while a step waited for rollouts",
            ),
        ],
        title="Tokens",
    )


def _helps(found: Located, helps: tuple[Help, ...], profile: Profile) -> Notices:
    notices = [
        Notice(
            f"{each.cause}: saves about {share(each.saves)} {'of a step' if each.of == STEP else f'for each {each.of}'}",
            detail=f"{each.text} ({each.how})",
            links=_evidence(found, each.steps[:3], each.rollouts[:3]),
            commands=[f"--set {shlex.quote(setting)}" for setting in each.settings],
        )
        for each in helps
    ]
    notices += [Notice(note, "muted") for note in profile.notes]
    if profile.tools:
        said = ", ".join(f"{name} {seconds(took)}" for name, took in list(profile.tools.items())[:5])
        notices.append(Notice(f"time in tools, all rollouts together: {said}", "muted"))
    return Notices(notices, title="What would be faster", empty="nothing that is known to help would save 3 % or more")
