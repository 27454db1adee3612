"""The plugin that brings trackers of other systems; each is imported when it is made."""

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
"""The class of each tracker. Its module has the tracker's name, as has the extra that installs its library."""
USUAL = "tensorboard"
"""The one that is meant where a user names none."""


@hookimpl
def register_trackers(register: RegisterTracker) -> None:
    """`trackers=["tensorboard", "otel", "wandb", "mlflow", "trackio"]`."""
    for name in TRACKERS:
        register(name, partial(make_tracker, name), usual=name == USUAL)


def make_tracker(name: str, _: Config) -> Tracker:
    """The tracker of a name. Raises `MissingExtraError` when its library is not installed."""
    made: Tracker = getattr(import_extra(name, f"lightning_trackers.{name}"), TRACKERS[name])()
    return made
