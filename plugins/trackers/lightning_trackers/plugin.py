"""The trackers plugin. A tracker's module and its library are imported when the tracker is made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightning.errors import import_extra
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.hooks import RegisterTracker
    from lightning.tracking.protocol import Tracker

TRACKERS = {
    "tensorboard": "TensorBoard",
    "otel": "OpenTelemetry",
    "wandb": "WandB",
    "mlflow": "MLflow",
    "trackio": "Trackio",
}
"""The class of each tracker, by the tracker's name, which its module and the extra for its library have, too."""
USUAL = "tensorboard"
"""The tracker that is used if the user names none."""


@hookimpl
def register_trackers(register: RegisterTracker) -> None:
    """Register the trackers `tensorboard`, `otel`, `wandb`, `mlflow` and `trackio`."""
    for name in TRACKERS:
        register(name, partial(make_tracker, name), usual=name == USUAL)


def make_tracker(name: str, _: Config) -> Tracker:
    """Make the tracker of a name. Raises `MissingExtraError` if its library is not installed."""
    made: Tracker = getattr(import_extra(name, f"lightning_trackers.{name}"), TRACKERS[name])()
    return made
