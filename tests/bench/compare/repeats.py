"""What measurements over many trainings share: one file for each run, numbers of several seeds, the command line.

The invariant: a run's file is whole or not there, so that a measurement goes on where it was stopped. Nothing but the standard
library is needed: the peers' environments import it, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Kept:
    """A dataclass of JSON values that is kept in a file."""

    def write(self, file: Path) -> None:
        """As JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.replace(file)

    @classmethod
    def read(cls, file: Path) -> Self:
        """One as `write` wrote it."""
        return cls.of(json.loads(file.read_text()))

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """One from its JSON."""
        return cls(**values)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds; the mean alone of a single one."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def against(mine: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Mean difference to the base's number for the same seed, with its range; both are by seed."""
    gaps = [value - base[seed] for seed, value in mine.items() if seed in base]
    if not gaps:
        return "-"
    mean = f"{statistics.fmean(gaps):+.3f}"
    return f"{mean} ({min(gaps):+.3f} to {max(gaps):+.3f})" if len(gaps) > 1 else mean


def span(values: Sequence[float]) -> str:
    """The smallest and the largest, once where they are one."""
    if not values:
        return "no"
    least, most = min(values), max(values)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def add_arguments(parser: argparse.ArgumentParser, *, out: str, page: str, eval_every: int) -> None:
    """What every measurement can be told: which seeds, for how long, with which settings, and where it goes."""
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of each demonstration's own number")
    parser.add_argument("--held-out", type=int, default=200, help="held-out tasks of each evaluation")
    parser.add_argument(
        "--eval-every", type=int, default=eval_every, help="evaluate every so many steps; 0: before and after only"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--out", type=Path, default=Path(out), help="where results are kept")
    parser.add_argument("--keep", action="store_true", help="keep the runs' folders, too (database, checkpoints)")
    parser.add_argument("--publish", action="store_true", help=f"write {page}")
