"""What an ablation saw: results of single runs, and tables of their means and spreads.

The invariant: everything published follows from `docs/data/ablation.json` alone, in which every run is whole.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from page import replace_table
from repeats import Kept, against, span, spread
from summary import machine
from variants import BASE, MISMATCH, SUITES

MISMATCH_METRICS = ("masked_share", "ess", "approx_kl", "clip_fraction", "staleness_mean")


@dataclass(frozen=True, slots=True)
class Result(Kept):
    """One run. `rewards[i]` is the mean reward of the rollouts of step i, `evaluations` held-out results by step;
    `tool_events` counts the tool runs of the first step by status; times are those of the training, without vLLM's start."""

    demo: str
    variant: str
    says: str
    seed: int
    algorithm: Mapping[str, object]
    settings: Mapping[str, object]
    held_out_tasks: int
    before: float | None
    after: float | None
    evaluations: Sequence[tuple[int, float | None]]
    rewards: Sequence[float]
    rollouts: int
    failed: int
    drift_tokens: int
    max_logprob_gap: float
    tool_events: Mapping[str, int]
    seconds: float
    cpu: float
    load: float
    mismatch: Mapping[str, float] = field(default_factory=dict)
    """`MISMATCH_METRICS` in the mean over steps; empty in results of before they were measured."""
    sampled: Sequence[int] = field(default_factory=list)
    """Response tokens of each step's rollouts; empty as above."""
    taught: Sequence[tuple[int, int]] = field(default_factory=list)
    """How many groups of each step taught something, of how many; empty as above."""

    def held_out_at(self, tokens: float) -> float | None:
        """The held-out reward when so many tokens had been sampled, between two evaluations in proportion."""
        points = [(float(sum(self.sampled[:step])), reward) for step, reward in self.evaluations if reward is not None]
        for (first, before), (last, after) in pairwise(points):
            if first <= tokens <= last:
                return before + (after - before) * (tokens - first) / max(last - first, 1.0)
        return points[-1][1] if points and tokens >= points[-1][0] else None


def against_base(mine: Sequence[Result], base: Sequence[Result]) -> str:
    """Mean difference of the held-out reward to the base's run with the same seed, with its range."""
    afters = [{result.seed: result.after for result in some if result.after is not None} for some in (mine, base)]
    return against(*afters)


COLUMNS = (
    "", "seeds", "held-out reward", "against the base, same seeds", "training reward, all steps", "rollouts",
    "CPU-minutes",
)  # fmt: skip


def row(says: str, mine: Sequence[Result], base: Sequence[Result], *, is_base: bool) -> str:
    """One variant of one demonstration."""
    cells = [
        says,
        str(len(mine)),
        spread([result.after for result in mine if result.after is not None]),
        "" if is_base else against_base(mine, base),
        spread([statistics.fmean(result.rewards) for result in mine if result.rewards]),
        spread([float(result.rollouts) for result in mine], 0).split(" ")[0],
        spread([result.cpu / 60 for result in mine], 1),
    ]
    return "| " + " | ".join(cells) + " |"


def table(results: Sequence[Result], names: Mapping[str, str]) -> str:
    """The variants `names` (name to words) of one demonstration, the untrained policy first."""
    base = [result for result in results if result.variant == BASE]
    befores = [result.before for result in results if result.before is not None]
    untrained = spread(befores) if befores else "-"
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines.append(f"| untrained, {len(befores)} evaluations | | {untrained} | | | | |")
    for name, says in names.items():
        mine = [result for result in results if result.variant == name]
        if mine:
            lines.append(row(says, mine, base, is_base=name == BASE))
    return "\n".join(lines)


def tables(results: Sequence[Result]) -> str:
    """All demonstrations and suites, in markdown."""
    parts = []
    for demo in sorted({result.demo for result in results}):
        mine = [result for result in results if result.demo == demo]
        known = {name for suite in SUITES.values() for name in suite}
        own = {result.variant: result.says for result in mine if result.variant not in known}
        suites = {title: {name: item.says for name, item in suite.items()} for title, suite in SUITES.items()}
        for title, names in (suites | ({"Own": {BASE: "the base", **own}} if own else {})).items():
            if any(result.variant in names and result.variant != BASE for result in mine):
                parts += [f"### `{demo}`: {title.lower()}", table(mine, names)]
        parts.append(_note(mine))
        if any(result.variant in MISMATCH and result.variant != BASE for result in mine):
            parts.append(_mismatch(mine))
        if equal := _at_equal_tokens(mine):
            parts.append(equal)
    return "\n\n".join(parts)


def _note(mine: Sequence[Result]) -> str:
    """What is not in the columns, and what could make a number worthless."""
    events: dict[str, int] = {}
    for result in mine:
        for status, count in result.tool_events.items():
            events[status] = events.get(status, 0) + count
    told = ", ".join(f"{count} {status}" for status, count in sorted(events.items())) or "none"
    failed, drift = sum(result.failed for result in mine), sum(result.drift_tokens for result in mine)
    gap, held_out = max(result.max_logprob_gap for result in mine), {result.held_out_tasks for result in mine}
    steps = {len(result.rewards) for result in mine}
    return (
        f"{span([*held_out])} held-out tasks, {span([*steps])} steps. Tool runs reported in the first steps of all runs: "
        f"{told}. Failed rollouts: {failed}; tokens that were not exactly what was sampled: {drift}; largest logprob gap: "
        f"{gap:.1e} nats."
    )


def _mismatch(results: Sequence[Result]) -> str:
    """How far apart trainer and sampler were under each variant."""
    lines = []
    for name in dict.fromkeys(result.variant for result in results if result.mismatch):
        mine = [result.mismatch for result in results if result.variant == name]
        numbers = {key: [each[key] for each in mine if key in each] for key in MISMATCH_METRICS}
        lines.append(
            f"- `{name}`: " + ", ".join(f"{key} {spread(values, 5)}" for key, values in numbers.items() if values)
        )
    return "\n".join(lines)


def _at_equal_tokens(results: Sequence[Result]) -> str:
    """Each variant and the base, for each seed, when as many tokens had been sampled as by the run that sampled fewer."""
    runs = {(result.variant, result.seed): result for result in results if result.sampled}
    lines = []
    for variant, seed in sorted(runs):
        if variant == BASE or (BASE, seed) not in runs:
            continue
        pair = [runs[BASE, seed], runs[variant, seed]]
        tokens = min(sum(run.sampled) for run in pair)
        rewards = [run.held_out_at(tokens) for run in pair]
        shares = [sum(used for used, _ in run.taught) / max(1, sum(groups for _, groups in run.taught)) for run in pair]
        cells = [
            f"`{variant}`",
            str(seed),
            str(tokens),
            *("-" if run.before is None else f"{run.before:.3f}" for run in pair),
        ]
        cells += [
            *("-" if reward is None else f"{reward:.3f}" for reward in rewards),
            *(f"{share:.0%}" for share in shares),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return ""
    heads = ["variant", "seed", "sampled tokens"]
    heads += [f"{what}, {whose}" for what in ("untrained", "held-out reward", "groups that taught")
              for whose in ("the base", "the variant")]  # fmt: skip
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def say(results: Sequence[Result]) -> str:
    """The tables for a terminal."""
    return tables(results) if results else "nothing was run yet"


def publish(results: Sequence[Result], docs: Path, part: str) -> None:
    """Write the data, and the tables of a part of the page."""
    data = docs / "data" / f"{part}.json"
    data.parent.mkdir(exist_ok=True)
    on = machine()
    content = {"machine": on, "runs": [asdict(result) for result in results]}
    data.write_text(json.dumps(content, indent=1) + "\n")
    note = f"Measured on {on['cores']} cores of {on['cpu']}, Python {on['python']}."
    replace_table(docs / "ablation.md", part, f"{tables(results)}\n\n{note}")
