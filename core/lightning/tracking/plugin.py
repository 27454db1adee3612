"""The plugin that brings the trackers `jsonl`, `tensorboard` and `otel`."""

from __future__ import annotations

from collections.abc import Callable

from lightning.config import Config
from lightning.hooks import hookimpl
from lightning.tracking.jsonl import JsonLines
from lightning.tracking.otel import OpenTelemetry
from lightning.tracking.protocol import Tracker
from lightning.tracking.tensorboard import TensorBoard


@hookimpl
def register_trackers(register: Callable[[str, Callable[[Config], Tracker]], None]) -> None:
    """`trackers=["jsonl", "tensorboard", "otel"]`."""
    register("jsonl", lambda config: JsonLines())
    register("tensorboard", lambda config: TensorBoard())
    register("otel", lambda config: OpenTelemetry())
