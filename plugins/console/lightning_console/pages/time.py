"""Where a run's time and tokens went, and what would make it faster, as blocks."""

from __future__ import annotations

import shlex

from lightning_debug.bottlenecks import STEP, Help
from lightning_debug.profile import ROLLOUT_PARTS, Profile

from lightning_console.blocks import Block, Cell, Column, Fact, Facts, Link, Notice, Notices, Table
from lightning_console.pages.words import NONE, count, seconds, share, to
from lightning_console.places import Located
from lightning_console.queries.curves import Curves
from lightning_console.queries.insight import Profiled

PHASES = {
    "rollout": "waiting for rollouts", "train": "training", "update": "update of the policy server", "checkpoint": "checkpoint",
    "eval": "evaluation", "start": "start",
}  # fmt: skip


def time_blocks(found: Located, curves: Curves, profiled: Profiled | None, ask: str) -> list[Block]:
    """The profile; where there is none, the phases that the trainer measured and why. `ask` is the address that profiles. None:
    it is on its way."""
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
        note=f"steps {first} to {last}, counted from 0: {seconds(profile.seconds / steps)} a step",
    )


def _tokens(profile: Profile) -> Facts:
    tokens = profile.tokens
    untaught = ", ".join(f"{reason.replace('_', ' ')} {count(many)}" for reason, many in tokens.untaught.items())
    return Facts(
        [
            Fact(
                "useful tokens",
                share(tokens.useful),
                f"{count(tokens.trained)} trained of {count(tokens.sampled)} sampled",
            ),
            Fact("in groups that taught nothing", count(sum(tokens.untaught.values())), untaught),
            Fact("in rollouts that failed", count(tokens.failed)),
            Fact(
                "in calls that are not trained",
                count(max(0, tokens.sampled - tokens.trained - sum(tokens.untaught.values()) - tokens.failed)),
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
            links=[
                *(Link(f"step {step}", to("step", found.key, step)) for step in each.steps[:3]),
                *(
                    Link(one.removeprefix(f"{found.run.id}/"), to("rollout", found.key, one))
                    for one in each.rollouts[:3]
                ),
            ],
            commands=[f"--set {shlex.quote(setting)}" for setting in each.settings],
        )
        for each in helps
    ]
    notices += [Notice(note, "muted") for note in profile.notes]
    if profile.tools:
        said = ", ".join(f"{name} {seconds(took)}" for name, took in list(profile.tools.items())[:5])
        notices.append(Notice(f"time in tools, all rollouts together: {said}", "muted"))
    return Notices(notices, title="What would be faster", empty="nothing that is known to help would save 3 % or more")
