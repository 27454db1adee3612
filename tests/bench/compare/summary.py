"""What the comparison saw: the time each arm needed to a held-out reward, in a table and a picture.

The invariant: everything published follows from `docs/data/comparison*.json` alone, in which every run is whole.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from page import replace_table
from repeats import Kept

LEVELS = {"tiny": (0.6, 0.7, 0.8), "calculator": (0.3, 0.45, 0.6)}
"""Held-out rewards to reach, by demonstration, well above those of the untrained model."""
NAMES = {
    "lightning": "lightning",
    "lightning-2threads": "lightning, 2 threads",
    "lightning-tree": "lightning, `engine.step = \"tree\"`",
    "lightning-async": "lightning, `trainer.max_staleness = 1`",
    "trl": "TRL, 1 thread",
    "trl-2threads": "TRL, 2 threads",
    "trl-vllm": "TRL with vLLM in its process",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """The state after an optimizer step: wall and CPU-seconds since the program's start, the mean reward of the rollouts
    it was trained on, and the mean reward on the held-out tasks (None where it was not evaluated)."""

    step: int
    seconds: float
    cpu: float
    reward: float
    held_out: float | None
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Run(Kept):
    """One training of one arm. `start_*` is what it took until the first rollout began (imports, servers, the model);
    `load` the machine's load just after it, which says whether it was alone."""

    arm: str
    seed: int
    setting: Mapping[str, object]
    versions: Mapping[str, str]
    start_seconds: float
    start_cpu: float
    total_seconds: float
    total_cpu: float
    load: float
    points: Sequence[Point]
    base: float | None = None
    held_out_tasks: int = 0

    def with_held_out(self, base: Sequence[float], rewards: Mapping[int, Sequence[float]]) -> Run:
        """The run with the held-out rewards of the untrained model and after some steps."""
        points = [
            replace(point, held_out=statistics.fmean(rewards[point.step]) if point.step in rewards else None)
            for point in self.points
        ]
        return replace(self, base=statistics.fmean(base), held_out_tasks=len(base), points=points)

    def curve(self, cost: Callable[[Point], float], start: float) -> list[tuple[float, float]]:
        """Held-out reward over a cost since the first rollout began, from the untrained model on."""
        first = [(0.0, self.base)] if self.base is not None else []
        return first + [(cost(point) - start, point.held_out) for point in self.points if point.held_out is not None]

    @property
    def by_seconds(self) -> list[tuple[float, float]]:
        """Held-out reward over wall seconds."""
        return self.curve(lambda point: point.seconds, self.start_seconds)

    @property
    def by_cpu(self) -> list[tuple[float, float]]:
        """Held-out reward over CPU-seconds."""
        return self.curve(lambda point: point.cpu, self.start_cpu)

    def to_json(self) -> dict[str, object]:
        """Everything but where the weights lay."""
        points = [{key: value for key, value in asdict(point).items() if key != "weights"} for point in self.points]
        return {**asdict(self), "points": points}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """A run from its JSON."""
        return cls(**{**values, "points": [Point(**point) for point in values["points"]]})


def cost_to(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The cost at which a curve reaches a level for good: after it, the mean of what is left never lies below it.

    Between two evaluations reward is taken to grow evenly. "For good" keeps one lucky evaluation from counting.
    """
    for index, (cost, reward) in enumerate(curve):
        rest = [later for _, later in curve[index:]]
        if reward < level or statistics.fmean(rest) < level:
            continue
        if index == 0:
            return cost
        before_cost, before = curve[index - 1]
        share = (level - before) / (reward - before) if before < level else 0.0
        return before_cost + share * (cost - before_cost)
    return None


def _spread(values: Sequence[float | None], digits: int = 0) -> str:
    """Mean and range of what was reached; how many runs did not is said."""
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    text = f"{statistics.fmean(reached):.{digits}f}"
    if len(reached) > 1:
        text += f" ({min(reached):.{digits}f} to {max(reached):.{digits}f})"
    return text if len(reached) == len(values) else f"{text}, {len(values) - len(reached)} of {len(values)} never"


def table(runs: Sequence[Run]) -> str:
    """One row for each arm, in markdown."""
    arms = [arm for arm in NAMES if any(run.arm == arm for run in runs)]
    levels = LEVELS[str(runs[0].setting.get("demo", "tiny"))]
    header = ["", "seeds", "held-out before", "after", "start, s", "a step, s", "a step, CPU-s"]
    header += [f"to {level}, {unit}" for unit in ("s", "CPU-s") for level in levels]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for arm in arms:
        mine = [run for run in runs if run.arm == arm]
        steps = [len(run.points) for run in mine]
        cells = [
            NAMES[arm],
            str(len(mine)),
            _spread([run.base for run in mine if run.base is not None][:1], 3).split(" ")[0],
            _spread([run.points[-1].held_out for run in mine], 3),
            _spread([run.start_seconds for run in mine]),
            _spread([(run.points[-1].seconds - run.start_seconds) / n for run, n in zip(mine, steps, strict=True)], 1),
            _spread([(run.points[-1].cpu - run.start_cpu) / n for run, n in zip(mine, steps, strict=True)], 1),
        ]
        curves = ([run.by_seconds for run in mine], [run.by_cpu for run in mine])
        cells += [_spread([cost_to(curve, level) for curve in each]) for each in curves for level in levels]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_tools(runs: Sequence[Run]) -> dict[float, list[Run]]:
    """The runs by how long their tools took."""
    groups: dict[float, list[Run]] = {}
    for run in runs:
        groups.setdefault(float(str(run.setting["tool_seconds"])), []).append(run)
    return dict(sorted(groups.items()))


def heading(tool_seconds: float) -> str:
    """What a table is about."""
    return f"### Tools that take {1000 * tool_seconds:g} ms" if tool_seconds else "### Tools that answer at once"


def say(runs: Sequence[Run]) -> str:
    """The tables for a terminal, with what they were measured under."""
    if not runs:
        return "nothing was measured yet"
    parts = [f"{heading(seconds)}\n\n{table(mine)}" for seconds, mine in by_tools(runs).items()]
    loads = f"load after each run: {', '.join(f'{run.arm}/{run.seed} {run.load:.1f}' for run in runs)}"
    return "\n\n".join([*parts, loads])


def machine() -> dict[str, object]:
    """What it ran on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def publish(runs: Sequence[Run], docs: Path, name: str = "comparison") -> None:
    """Write the data, the table and the pictures of the page's section `name`."""
    data = docs / "data" / f"{name}.json"
    data.parent.mkdir(exist_ok=True)
    content = {"machine": machine(), "runs": [run.to_json() for run in runs]}
    data.write_text(json.dumps(content, indent=1) + "\n")
    versions = {(name, text) for run in runs for name, text in run.versions.items() if text != "-"}
    told = ", ".join(f"{name} {text}" for name, text in sorted(versions))
    common = {name: value for name, value in runs[0].setting.items() if name != "tool_seconds"}
    setting = ", ".join(f"{name} {value}" for name, value in common.items())
    on = content["machine"]
    note = f"Measured on {on['cores']} cores of {on['cpu']}, Python {on['python']}; {told}. Setting: {setting}."  # type: ignore[index]
    parts = []
    for number, (seconds, mine) in enumerate(by_tools(runs).items()):
        picture = f"{name}-{number}.svg"
        draw(mine, docs / picture)
        parts += [heading(seconds), table(mine), f"![Learning curves of both sides]({picture})"]
    replace_table(docs / "comparison.md", name, "\n\n".join([*parts, note]))


def draw(runs: Sequence[Run], file: Path) -> None:
    """Held-out reward over wall seconds and over CPU-seconds: every seed thin, the mean of an arm thick."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("seconds", "cpu"), strict=True):
        for number, arm in enumerate(arm for arm in NAMES if any(run.arm == arm for run in runs)):
            curves = [getattr(run, f"by_{what}") for run in runs if run.arm == arm]
            draw_arm(axes, curves, f"C{number}", NAMES[arm].replace("`", ""))
        axes.set(xlabel={"seconds": "wall seconds of training", "cpu": "CPU-seconds of training"}[what], ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("held-out reward")
    figure.axes[0].legend(loc="lower right")
    figure.savefig(file, format="svg", metadata={"Date": None})


def draw_arm(axes: Any, curves: Sequence[Sequence[tuple[float, float]]], color: str, label: str) -> None:
    """Curves of (cost, reward) that begin at 0: each thin, and their mean thick, as far as all of them go. None is no line."""
    import numpy as np

    if not curves:
        return
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), color=color, alpha=0.3, linewidth=1)
    grid = np.linspace(0.0, min(curve[-1][0] for curve in curves), 100)
    mean = np.mean([np.interp(grid, *zip(*curve, strict=True)) for curve in curves], axis=0)
    axes.plot(grid, mean, color=color, linewidth=2.5, label=label)
