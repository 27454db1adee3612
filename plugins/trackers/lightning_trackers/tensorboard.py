"""The `tensorboard` tracker: scalars in `tensorboard/` of the run's folder, for `tensorboard --logdir runs`.

The invariant: it needs TensorBoard alone; neither torch nor TensorFlow is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.errors import MissingExtraError
from lightning.types import Json

from lightning_trackers.shared import finite

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FOLDER = "tensorboard"


class TensorBoard:
    """Writes every finite value as a scalar of its name. Raises `MissingExtraError` when TensorBoard is not installed."""

    _writer: EventFileWriter

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Open a new event file; a resumed run has several, which TensorBoard shows as one."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard") from error
        self._writer = EventFileWriter(str(folder / FOLDER))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in finite(values).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
