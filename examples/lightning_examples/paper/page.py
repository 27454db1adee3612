"""The page of results: a table of all trainings, what is not known yet, and where the settings differ from the paper's.

The invariant: the page is made of the results' files alone, and says of each training that has no result that it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_examples.paper.experiments import MODEL, PAPER_MODEL, Experiment, Options
from lightning_examples.paper.training import Result, gain

PAGE = "results.md"
TITLE = "# The experiments of the Agent Lightning paper (arXiv 2508.03680, §4)"
NOT_FULL_SIZE = (
    "**Not run at full size.** These are agents like the paper's, with the shipped tiny models on made-up tasks. They show "
    "that the command works and that such agents learn. They say nothing about the paper's models and data."
)
COLUMNS = (
    "experiment", "seed", "held-out before", "after", "gain (95 % interval)", "tasks", "steps", "wall time", "commit",
)  # fmt: skip
PUBLISHED = (
    "The paper names its model, data, agents and rewards, and shows rewards as curves. The other settings in the column "
    "*published* are those of the examples that its authors released."
)


def page(
    experiments: Sequence[Experiment], seeds: int, results: Mapping[tuple[str, int], Result | None], options: Options
) -> str:
    """The page as Markdown. `results` has each training by its experiment and seed; None where it was not run yet."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for each in experiments:
        of_seeds = [(seed, results[each.name, seed]) for seed in range(seeds)]
        done = [result for _, result in of_seeds if result is not None and not result["error"]]
        rows += [_row(each, str(seed), [result] if result else [], result) for seed, result in of_seeds]
        if len(done) > 1:
            rows.append(_row(each, f"all {len(done)}", done, done[0]))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    parts = [TITLE, *([NOT_FULL_SIZE] if options.size == "cores" else []), table, _legend(), *_where(results)]
    if options.size == "full":
        parts.append(_beside(experiments, options))
    return "\n\n".join(parts) + "\n"


def write_page(text: str, folder: Path) -> Path:
    """Write the page into the folder of all results."""
    (folder / PAGE).write_text(text, encoding="utf-8")
    return folder / PAGE


def _row(experiment: Experiment, seed: str, results: Sequence[Result], first: Result | None) -> tuple[str, ...]:
    if first is None:
        return (experiment.title, seed, "not run", *[""] * 6)
    if first["error"]:
        return (
            experiment.title,
            seed,
            f"failed: {' '.join(str(first['error']).split())}".replace("|", "\\|"),
            *[""] * 6,
        )
    found, tasks = gain(results), f"{min(len(each['held_out']) for each in results)} of {first['held_out_tasks']}"
    steps, commits = {str(each["steps"]) for each in results}, {str(each["commit"]) for each in results}
    time = clock(sum(float(each["seconds"]) for each in results))
    cells = ("unknown", "unknown", "unknown")
    if found is not None:
        before, after, estimate = found
        cells = f"{before:.3f}", f"{after:.3f}", f"{estimate.value:+.3f}{_interval(estimate.interval)}"
    return (experiment.title, seed, *cells, tasks, ", ".join(sorted(steps)), time, ", ".join(sorted(commits)))


def _interval(interval: tuple[float, float] | None) -> str:
    return " (unknown)" if interval is None else f" ({interval[0]:+.3f} to {interval[1]:+.3f})"


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _legend() -> str:
    return (
        "*Before* is the untrained policy, *after* the trained one: mean rewards of the held-out tasks whose rollouts were "
        "scored both times (*tasks*). The interval of a gain is over tasks; the rows show how much seeds differ. The wall "
        "time is that of start, steps and evaluations. A `+` after a commit: files were changed since."
    )


def _where(results: Mapping[tuple[str, int], Result | None]) -> list[str]:
    """The machines, models and versions of the results, each set once."""
    lines = dict.fromkeys(
        f"{result['experiment']}: {result['model']} with the engine {result['engine']} on {result['machine']}; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
        for result in results.values()
        if result is not None and not result["error"]
    )
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def _beside(experiments: Sequence[Experiment], options: Options) -> str:
    rows = [("experiment", "setting", "published", "here"), ("---",) * 4]
    rows += [("all", "model", PAPER_MODEL, options.model)] if options.model != PAPER_MODEL else []
    rows += [("all", "seeds", "not given", "see the table")]
    rows += [(each.name, *row) for each in experiments for row in each.differs]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    default = f" (`--model {PAPER_MODEL}` takes the paper's)" if options.model == MODEL else ""
    return f"## Where the settings differ from the published ones\n\n{PUBLISHED}{default}\n\n{table}"
