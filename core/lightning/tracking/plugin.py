"""The plugin that brings the tracker `jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.tracking.protocol import Tracker


@hookimpl
def register_trackers(register: Callable[[str, Callable[[Config], Tracker]], None]) -> None:
    """`trackers=["jsonl"]`."""
    register("jsonl", json_lines)


def json_lines(_: Config) -> Tracker:
    """See `lightning.tracking.jsonl`."""
    from lightning.tracking.jsonl import JsonLines

    return JsonLines()
