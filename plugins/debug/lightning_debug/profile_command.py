"""`lightning profile`: where a run's time and tokens went, and what would help.

The invariant: it only reads the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.locate import locate, with_store
from lightning.cli.output import AsJson, escape, print_json, print_table, say
from lightning.errors import ConfigError
from lightning.trainer.summary import said

from lightning_debug.bottlenecks import STEP, Help, find_helps
from lightning_debug.profile import ROLLOUT_PARTS, Profile, read_profile


def profile(
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps from A to before B; default: all but the first.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show where a run's wall time and tokens went, what would help, and by how much."""
    first, end = _range(steps)
    url, run_id = locate(run, runs)
    found = asyncio.run(with_store(url, lambda store: read_profile(store, run_id, first, end)))
    helps = find_helps(found)
    if as_json:
        print_json(document(found, helps))
    else:
        show(found, helps)


def _range(steps: str) -> tuple[int | None, int | None]:
    """`A:B` as numbers; either may be missing. Raises `ConfigError` for anything else."""
    if not steps:
        return None, None
    first, colon, end = steps.partition(":")
    if not colon or not all(not part or part.isdecimal() for part in (first, end)):
        raise ConfigError(f"--steps {steps}: write A:B, the first step and the one after the last, as in 5:10")
    return int(first or 0), int(end) if end else None


def document(found: Profile, helps: Sequence[Help]) -> dict[str, object]:
    """The profile as plain values."""
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


def show(found: Profile, helps: Sequence[Help]) -> None:
    """The profile in words and tables."""
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
            say(f"  --set {escape(_quoted(setting))}")
        shown = ", ".join(map(str, help_.steps[:3])) + (
            f"; rollouts {', '.join(help_.rollouts)}" if help_.rollouts else ""
        )
        say(f"  see steps {escape(shown)}")
    for note in found.notes:
        say(f"[yellow]note[/] {escape(note)}")


def _quoted(setting: str) -> str:
    return f"'{setting}'" if set(setting) & set(' "[]{}') else setting


def _show_tokens(found: Profile) -> None:
    tokens = found.tokens
    cached = "not known how many" if tokens.cached is None else f"{tokens.cached}"
    say(f"tokens: {tokens.prompt} of prompts ({cached} found in the prefix cache), {tokens.sampled} sampled")
    reasons = ", ".join(f"{escape(reason)} {count}" for reason, count in tokens.untaught.items())
    say(
        f"of those sampled, {tokens.trained} were trained ({said(tokens.useful, '.0%')}); "
        f"{sum(tokens.untaught.values())} are of groups that taught nothing{f' ({reasons})' if reasons else ''}, "
        f"{tokens.failed} of rollouts that failed"
    )
