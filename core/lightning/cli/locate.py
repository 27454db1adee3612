"""Where a run is: a folder, or an id below the folder of runs."""

from __future__ import annotations

from pathlib import Path

from lightning.errors import ConfigError

DATABASE = "lightning.db"


def locate(run: str, runs: Path) -> tuple[str, str]:
    """The store's URL and the run's id. Raises `ConfigError` naming where it looked."""
    for folder in (Path(run), runs / run):
        if (folder / DATABASE).is_file():
            folder = folder.resolve()
            return f"sqlite:///{folder / DATABASE}", folder.name
    raise ConfigError(
        f"no run {run!r}: neither {run} nor {runs / run} has a {DATABASE}. `lightning runs` lists what there is"
    )
