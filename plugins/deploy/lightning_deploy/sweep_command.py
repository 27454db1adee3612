"""`lightning sweep`: the same training with several seeds and settings, and what each led to."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.output import AsJson, escape, print_json, print_table, say, stoppable

from lightning_deploy.sweep_file import read_sweep
from lightning_deploy.sweep_queue import Ended, alone, check_begun, slots, work


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file: train, seeds, settings, variants.")],
    out: Annotated[
        Path | None, typer.Option(help="The folder of the runs; default: runs/ and the file's name.")
    ] = None,
    at_once: Annotated[
        int, typer.Option(help="Runs at the same time; 0: as many as --gpus allows, one without GPUs.", min=0)
    ] = 0,
    gpus: Annotated[int, typer.Option(help="GPUs of each run, by CUDA_VISIBLE_DEVICES; 0 assigns none.", min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs, and begin none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train with several seeds and settings, and compare. The same command goes on where it was stopped."""
    runs, folder = read_sweep(file), out or Path("runs") / file.stem
    if dry_run:
        if as_json:
            print_json(runs)
        else:
            print_table(
                ("run", "lightning train"), [(escape(run.name), escape(" ".join(run.arguments))) for run in runs]
            )
        return
    places = slots(at_once, gpus)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its runs would go on without it
    with alone(folder), stoppable("the same command"):
        check_begun(runs, folder)
        ended = work(runs, folder, places, lambda text: None if as_json else say(escape(text)))
    rows = [summed(variant, ended) for variant in dict.fromkeys(run.variant for run in runs)]
    if as_json:
        print_json({"folder": str(folder), "variants": rows, "runs": ended})
    else:
        _show(rows, folder)
    if any(one.report is None for one in ended):
        raise typer.Exit(1)


def summed(variant: str, ended: Sequence[Ended]) -> dict[str, object]:
    """The runs of a variant in numbers. `after` has the held-out rewards, a failed rollout counted as 0; `spread` is their
    standard deviation over seeds, None of fewer than two."""
    own = [one for one in ended if one.run.variant == variant]
    done = [one.report for one in own if one.report is not None]
    before, after = ([_held_out(report, place) for report in done] for place in (0, -1))
    known = [value for value in after if value is not None]
    first = [value for value in before if value is not None]
    return {
        "variant": variant,
        "done": len(done),
        "failed": [f"{one.run.name} {one.why}" for one in own if one.report is None],
        "before": statistics.fmean(first) if first else None,
        "after": statistics.fmean(known) if known else None,
        "spread": statistics.stdev(known) if len(known) > 1 else None,
        "least": min(known, default=None),
        "most": max(known, default=None),
        "failed_rollouts": sum(report["failed"] for report in done),
    }


def _held_out(report: dict[str, object], place: int) -> float | None:
    evaluations = report["evaluations"]
    assert isinstance(evaluations, list)
    return evaluations[place]["reward_with_failures"] if evaluations else None


def _show(rows: Sequence[dict[str, object]], folder: Path) -> None:
    def number(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else "-"

    print_table(
        ("variant", "seeds", "held-out before", "after", "± over seeds", "least", "most", "failed rollouts"),
        [
            (
                escape(str(row["variant"])),
                str(row["done"]),
                *(number(row[key]) for key in ("before", "after", "spread", "least", "most")),
                str(row["failed_rollouts"]),
            )
            for row in sorted(rows, key=lambda row: -(row["after"] if isinstance(row["after"], float) else -1.0))
        ],
    )
    for row in rows:
        assert isinstance(row["failed"], list)
        for text in row["failed"]:
            say(escape(f"not counted: {text}"))
    say(escape(f"Held-out rewards count a failed rollout as 0. Compare curves: lightning console {folder}"))
