"""Read a committed step back: its rollouts, the values of its head, whether a batch is the one that it trained on, and which
updates a loop of somebody's own took.

The invariant: a batch is the recorded one only if it has the recorded digest. Where a loop of somebody's own took the step,
that digest covers the batch and the rows of each update.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from lightning.algorithms.protocol import Batch
from lightning.batch import Group, Sample, state_rows, with_values
from lightning.errors import DataError, StoreError
from lightning.store.protocol import Store
from lightning.trainer.plan import TRAIN
from lightning.trainer.training_data import (
    all_rollouts,
    batch_digest,
    digest_loss,
    digest_text,
    of_groups,
    values_key,
)
from lightning.types import POLICY, Json, Rollout, StepRecord


async def rollouts_of(store: Store, record: StepRecord, max_staleness: int) -> list[Rollout]:
    """The rollouts that a committed step looked at, group by group in the step's order."""
    steps = [
        await all_rollouts(store, record.run, split=TRAIN, step=step)
        for step in range(max(1, record.step - max_staleness), record.step + 1)
    ]
    return of_groups([rollout for found in steps for rollout in found], record.groups)


async def recorded_values(store: Store, run: str, step: int, groups: Sequence[Group]) -> list[Group]:
    """The groups with the values that the step was credited with. Raises `StoreError` when they are not there."""
    kept = await store.get_state(run, values_key(step))
    known = {
        (str(rollout), int(attempt), int(seq)): float(value)
        for rollout, attempt, seq, value in (kept if isinstance(kept, list) else ())
    }
    wanted = {(span.rollout, span.attempt, span.seq) for row in state_rows(groups) for span in row.spans}
    if missing := wanted - known.keys():
        rollout, attempt, seq = min(missing)
        raise StoreError(
            f"the head's values of step {step} are not in the store (rollout {rollout} attempt {attempt} call {seq})"
        )
    return with_values(groups, known)


OWN_LOOP: Final = "own_loop"
"""The key in a step's context that says it was taken by a loop of somebody's own (`lightning_session.session`), and how."""


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
        """Return this in JSON, as the step's context has it under `OWN_LOOP`."""
        return {"batch": self.batch, "updates": [{"lr": rate, "rows": rows} for rate, rows in self.updates]}


def own_step(context: Mapping[str, Json]) -> OwnStep | None:
    """Read from a step's context how a loop of somebody's own took the step; None if the trainer's loop took it. Raises
    `DataError` for a context that cannot be read."""
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


def row_digests(sample: Sample) -> tuple[str, str]:
    """SHA-256 (hex) of a row: of what was sampled, by which policy, and of what is to be learned from it (weights and
    advantages)."""
    what, how = hashlib.sha256(struct.pack("<qd", len(sample), sample.temperature)), hashlib.sha256()
    if sample.policy != POLICY:
        digest_text(what, sample.policy)
    for span in sample.spans:
        digest_text(what, span.rollout)
        what.update(struct.pack("<qqqq", span.attempt, span.seq, span.start, span.stop))
        how.update(struct.pack("<dd", span.value_target, span.value_weight))
    for digest, values, kind in (
        (what, sample.ids, "<i4"),
        (what, sample.logprobs, "<f4"),
        (what, sample.versions, "<i4"),
        (how, sample.weights, "<f4"),
        (how, sample.advantages, "<f4"),
    ):
        digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())
    if sample.mask is not None:
        sample.mask.update(what)
    return what.hexdigest(), how.hexdigest()


def rows_digest(rows: Iterable[tuple[str, str]], batch: Batch) -> str:
    """SHA-256 (hex) of rows by their own digests, which are those of a batch in its order or what became of them, and of the
    batch's loss."""
    digest = hashlib.sha256("".join(part for row in rows for part in row).encode())
    digest_loss(digest, batch)
    return digest.hexdigest()


def is_batch_of(record: StepRecord, batch: Batch) -> bool:
    """Whether a batch is the one that a step's algorithm made, by the digests in its record. What a loop of somebody's own did
    with its rows is another question (`OwnStep.changed`)."""
    own = own_step(record.context)
    if own is None:
        return batch_digest(batch) == record.digest
    return own.digest == record.digest and own.batch == rows_digest(map(row_digests, batch.samples), batch)
