"""Where a run is: a folder, or an id below the folder of runs."""

from __future__ import annotations

from pathlib import Path

from lightning.errors import ConfigError
from lightning.store.reference import DATABASE, store_in
from lightning.trainer.runs import run_id_of


def locate(run: str, runs: Path) -> tuple[str, str]:
    """The store's URL and the run's id. Raises `ConfigError` naming where it looked."""
    for folder in (Path(run), runs / run):
        if url := store_in(folder):
            return url, run_id_of(folder)
    raise ConfigError(
        f"no run {run!r}: neither {run} nor {runs / run} has a {DATABASE}, or a run.json that names a store. "
        "`lightning runs` lists what there is"
    )
