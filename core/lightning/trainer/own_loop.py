"""What a loop of somebody's own did in a step that cannot be recomputed from the store: each update's rows and rate.

The invariant: the step's digest covers all of it, so that no weight, advantage, rate or number of updates can be changed
afterwards; and a step whose rows were not the algorithm's says so.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning.errors import DataError
from lightning.types import Json, StepRecord

OWN_LOOP: Final = "own_loop"
"""The key in a step's context that says it was taken by a loop of somebody's own (`lightning.trainer.session`), and how."""


@dataclass(frozen=True, slots=True)
class OwnStep:
    """A step of such a loop. `batch` is the digest of the rows as the run's algorithm made them; `updates` has for each update
    its learning rate and the digest of the rows that its gradient was computed on (`rows_digest`)."""

    batch: str
    updates: tuple[tuple[float, str], ...]

    @property
    def changed(self) -> bool:
        """Whether an update was computed on other rows than the batch's: some of them, or with other weights or advantages."""
        return any(rows != self.batch for _, rows in self.updates)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all of it."""
        digest = hashlib.sha256(self.batch.encode())
        for rate, rows in self.updates:
            digest.update(struct.pack("<d", rate) + rows.encode())
        return digest.hexdigest()

    def to_json(self) -> dict[str, Json]:
        """What the step's context says under `OWN_LOOP`."""
        return {"batch": self.batch, "updates": [{"lr": rate, "rows": rows} for rate, rows in self.updates]}


def own_step(context: Mapping[str, Json]) -> OwnStep | None:
    """What a step's context says of such a loop; None where none took it. Raises `DataError` for what cannot be read."""
    found = context.get(OWN_LOOP)
    if not found:
        return None
    try:
        if not isinstance(found, Mapping) or not isinstance(updates := found["updates"], (list, tuple)):
            raise TypeError("no list of updates")
        return OwnStep(str(found["batch"]), tuple((float(each["lr"]), str(each["rows"])) for each in updates))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the step's record does not say which updates its own loop took: {found!r:.200}. Restore the database from a "
            "backup"
        ) from error


def changed_by_loop(record: StepRecord) -> bool:
    """Whether a loop of somebody's own computed a step on other rows than the algorithm's."""
    own = own_step(record.context)
    return own is not None and own.changed
