"""The `tensorboard` tracker: write scalars to `tensorboard/` in the run's folder, for `tensorboard --logdir runs`.

The invariant: it needs only TensorBoard; neither torch nor TensorFlow is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from lightning.types import Json
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lightning_trackers.shared import finite

FOLDER = "tensorboard"


class TensorBoard:
    """The tracker `tensorboard`, which writes every finite metric as a scalar of its name."""

    _writer: EventFileWriter

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None:
        """Open a new event file; a resumed run has several, which TensorBoard shows as one."""
        self._writer = EventFileWriter(str(folder / FOLDER))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in finite(values).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
