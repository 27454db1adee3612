"""Where metrics go besides the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lightning.types import Json


class Tracker(Protocol):
    """Receives the metrics of each step. Slow or failing trackers must never stop training: the trainer logs and goes on."""

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
