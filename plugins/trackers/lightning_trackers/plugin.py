"""The plugin that brings trackers of other systems; each is imported when it is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.tracking.protocol import Tracker

TRACKERS = {
    "tensorboard": "lightning_trackers.tensorboard:TensorBoard",
    "otel": "lightning_trackers.otel:OpenTelemetry",
    "wandb": "lightning_trackers.wandb:WandB",
    "mlflow": "lightning_trackers.mlflow:MLflow",
    "trackio": "lightning_trackers.trackio:Trackio",
}


@hookimpl
def register_trackers(register: Callable[[str, Callable[[Config], Tracker]], None]) -> None:
    """`trackers=["tensorboard", "otel", "wandb", "mlflow", "trackio"]`."""
    for name, place in TRACKERS.items():
        register(name, partial(make_tracker, place))


def make_tracker(place: str, _: Config) -> Tracker:
    """The tracker whose class is at `MODULE:NAME`."""
    made: Tracker = resolve_name(place)()
    return made
