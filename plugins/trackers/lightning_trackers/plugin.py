"""The plugin that brings the trackers `tensorboard` and `otel`; each is imported when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.tracking.protocol import Tracker


@hookimpl
def register_trackers(register: Callable[[str, Callable[[Config], Tracker]], None]) -> None:
    """`trackers=["tensorboard", "otel"]`."""
    register("tensorboard", tensor_board)
    register("otel", open_telemetry)


def tensor_board(_: Config) -> Tracker:
    """See `lightning_trackers.tensorboard`."""
    from lightning_trackers.tensorboard import TensorBoard

    return TensorBoard()


def open_telemetry(_: Config) -> Tracker:
    """See `lightning_trackers.otel`."""
    from lightning_trackers.otel import OpenTelemetry

    return OpenTelemetry()
