"""The plugin that brings trackers of other systems; each is imported when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.tracking.protocol import Tracker


@hookimpl
def register_trackers(register: Callable[[str, Callable[[Config], Tracker]], None]) -> None:
    """`trackers=["tensorboard", "otel", "wandb", "mlflow", "trackio"]`."""
    register("tensorboard", tensor_board)
    register("otel", open_telemetry)
    register("wandb", weights_and_biases)
    register("mlflow", ml_flow)
    register("trackio", track_io)


def tensor_board(_: Config) -> Tracker:
    """See `lightning_trackers.tensorboard`."""
    from lightning_trackers.tensorboard import TensorBoard

    return TensorBoard()


def open_telemetry(_: Config) -> Tracker:
    """See `lightning_trackers.otel`."""
    from lightning_trackers.otel import OpenTelemetry

    return OpenTelemetry()


def weights_and_biases(_: Config) -> Tracker:
    """See `lightning_trackers.wandb`."""
    from lightning_trackers.wandb import WandB

    return WandB()


def ml_flow(_: Config) -> Tracker:
    """See `lightning_trackers.mlflow`."""
    from lightning_trackers.mlflow import MLflow

    return MLflow()


def track_io(_: Config) -> Tracker:
    """See `lightning_trackers.trackio`."""
    from lightning_trackers.trackio import Trackio

    return Trackio()
