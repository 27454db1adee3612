"""The plugin that brings the trackers `jsonl`, `tensorboard` and `otel`; each is imported when it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.tracking.protocol import Tracker


@hookimpl
def register_trackers(register: Callable[[str, Callable[[Config], Tracker]], None]) -> None:
    """`trackers=["jsonl", "tensorboard", "otel"]`."""
    register("jsonl", json_lines)
    register("tensorboard", tensor_board)
    register("otel", open_telemetry)


def json_lines(_: Config) -> Tracker:
    """See `lightning.tracking.jsonl`."""
    from lightning.tracking.jsonl import JsonLines

    return JsonLines()


def tensor_board(_: Config) -> Tracker:
    """See `lightning.tracking.tensorboard`."""
    from lightning.tracking.tensorboard import TensorBoard

    return TensorBoard()


def open_telemetry(_: Config) -> Tracker:
    """See `lightning.tracking.otel`."""
    from lightning.tracking.otel import OpenTelemetry

    return OpenTelemetry()
