"""What the demonstration reached by each engine: results of single runs, a table and a picture of them.

The invariant: everything published follows from `docs/data/engines.json` alone, in which every run is whole.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.errors import ConfigError
from page import replace_table
from repeats import Kept, against, span, spread
from summary import draw_arm, machine

BASE = "torch"
NAMES = {
    BASE: "torch",
    "verl-1": "verl, 1 worker",
    "verl-2": "verl, 2 workers",
}
STEP = ("rollout", "train", "checkpoint", "update")
"""The phases that a step is made of."""


@dataclass(frozen=True, slots=True)
class Result(Kept):
    """One run. `settings` is what decides what is computed, besides engine and seed; `report` is the `report.json` that it
    wrote (`lightning.trainer.Summary`); `seconds` and `cpu` are those of its process tree from start to end, `load` the
    machine's just after it."""

    engine: str
    seed: int
    settings: Mapping[str, Any]
    report: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float
    cpu: float
    load: float

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Held-out reward after so many optimizer steps."""
        told = self.report["evaluations"]
        return [(float(result["step"]), result["reward"]) for result in told if result["reward"] is not None]

    @property
    def training(self) -> list[tuple[float, float]]:
        """Mean reward of the rollouts of each step, which the policy of the steps before it sampled."""
        return [(float(step), reward) for step, reward in enumerate(self.report["rewards"])]

    def per_step(self, *phases: str) -> float:
        """Wall seconds of some phases in a step."""
        return float(sum(self.report["time"][phase] for phase in phases)) / max(1, self.report["steps"])


def read_all(out: Path, settings: Mapping[str, Any]) -> list[Result]:
    """The runs that are there, of any engine and seed. Raises `ConfigError` when one was made with other settings: numbers
    of different trainings do not belong into one table, nor is such a run the one that is wanted."""
    results = []
    for file in sorted(out.glob("*/seed-*.json")):
        result = Result.read(file)
        if result.settings != settings:
            raise ConfigError(
                f"{file} is of a run with {result.settings}, and now it is {settings}: give another folder (--out), "
                "or remove this one"
            )
        results.append(result)
    return results


COLUMNS = (
    "engine", "seeds", "held-out before", "after", "against torch, same seeds", "training reward, all steps", "a step, s",
    "of it training, s", "CPU-minutes", "largest logprob gap, nats",
)  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """One row for each engine, in markdown."""
    by_engine = {name: [result for result in results if result.engine == name] for name in NAMES}
    afters = {name: _known(mine, "after") for name, mine in by_engine.items()}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, mine in by_engine.items():
        if not mine:
            continue
        cells = [
            NAMES[name],
            str(len(mine)),
            spread(list(_known(mine, "before").values())),
            spread(list(afters[name].values())),
            "" if name == BASE else against(afters[name], afters[BASE]),
            spread([statistics.fmean(rewards) for result in mine if (rewards := result.report["rewards"])]),
            spread([result.per_step(*STEP) for result in mine], 1),
            spread([result.per_step("train") for result in mine], 2),
            spread([result.cpu / 60 for result in mine], 1),
            f"{max(gaps):.1e}" if (gaps := _known(mine, "max_logprob_gap").values()) else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def note(results: Sequence[Result]) -> str:
    """What is not in the columns, and what could make a number worthless."""
    reports = [result.report for result in results]
    tasks = sorted({entry["rollouts"] for report in reports for entry in report["evaluations"]})
    steps = sorted({report["steps"] for report in reports})
    versions = {name: text for result in results for name, text in result.versions.items() if text != "-"}
    told = ", ".join(f"{name} {text}" for name, text in sorted(versions.items()))
    return (
        f"{span(tasks)} held-out tasks, {span(steps)} steps; set: {_set(results)}; {told}. "
        f"Failed rollouts: {sum(report['failed'] for report in reports)}; tokens that were not exactly what was sampled: "
        f"{sum(report['drift_tokens'] for report in reports)}; load after each run "
        f"{span([round(result.load, 1) for result in results])}."
    )


def publish(results: Sequence[Result], docs: Path) -> None:
    """Write the data, the page's table and its picture."""
    data = docs / "data" / "engines.json"
    data.parent.mkdir(exist_ok=True)
    on = machine()
    data.write_text(json.dumps({"machine": on, "runs": [asdict(result) for result in results]}, indent=1) + "\n")
    draw(results, docs / "engines.svg")
    where = f"Measured on {on['cores']} cores of {on['cpu']}, Python {on['python']}: {note(results)}"
    picture = "![Learning curves of both engines](engines.svg)"
    replace_table(docs / "multi-gpu.md", "engines", "\n\n".join([table(results), picture, where]))


def draw(results: Sequence[Result], file: Path) -> None:
    """Held-out and training reward over optimizer steps: every seed thin, the mean of an engine thick."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, what in zip(figure.subplots(1, 2, sharey=True), ("curve", "training"), strict=True):
        for number, name in enumerate(name for name in NAMES if any(result.engine == name for result in results)):
            curves = [getattr(result, what) for result in results if result.engine == name]
            draw_arm(axes, [curve for curve in curves if curve], f"C{number}", NAMES[name])
        axes.set(title={"curve": "held-out", "training": "training"}[what], xlabel="optimizer steps", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("reward")
    figure.axes[0].legend(loc="lower right")
    figure.savefig(file, format="svg", metadata={"Date": None})


def _known(results: Sequence[Result], name: str) -> dict[int, float]:
    """A number of the reports by seed, where there is one."""
    return {result.seed: result.report[name] for result in results if result.report[name] is not None}


def _set(results: Sequence[Result]) -> str:
    found = dict.fromkeys(item for result in results for item in result.settings["set"])
    return ", ".join(f"`{item}`" for item in found) or "nothing"
