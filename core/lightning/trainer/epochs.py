"""Config epochs: the settings that a run's steps were taken with, and from which step on; and whether a run is over.

The invariant: the settings of a committed step never change. What a resume changes begins a new epoch behind the last
committed step; epoch 0 is the configuration that the run was started with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning.store.protocol import Store
from lightning.types import Json, Run

STATE: Final = "epochs"
"""The key of a run's state that lists its epochs from 1 on: `first`, `at` and what in `config` is not as in the run's."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Settings from a step on. `config` has the keys of `Run.config`, `at` is Unix time; `first` may be a step that is yet
    to come, where a schedule of algorithms says so."""

    number: int
    first: int
    config: Mapping[str, Json]
    at: float = 0.0

    def setting(self, section: str, name: str) -> Json:
        """A setting of a section; None where the run has none, as one that no trainer began."""
        config = self.config.get("config")
        found = config.get(section) if isinstance(config, Mapping) else None
        return found.get(name) if isinstance(found, Mapping) else None

    @property
    def max_staleness(self) -> int | None:
        """`trainer.max_staleness`; None where there is none, and in a run that is trained on a record, whose versions are
        others."""
        if self.config.get("recorded"):
            return None
        bound = self.setting("trainer", "max_staleness")
        return bound if isinstance(bound, int) else None

    @property
    def max_reuse(self) -> int:
        """`trainer.max_reuse`; 0 where there is none."""
        limit = self.setting("trainer", "max_reuse")
        return limit if isinstance(limit, int) else 0


OVER: Final = "over"
"""The key of a run's state that is true from the end of its training until it is resumed."""


async def mark_over(store: Store, run: str, over: bool) -> None:
    """Say that a run has come to its end, or that it goes on."""
    if over or await is_over(store, run):
        await store.put_state(run, OVER, over, once=None)


async def is_over(store: Store, run: str) -> bool:
    """Whether a run has come to its end and no trainer has resumed it since."""
    return await store.get_state(run, OVER) is True


async def read_epochs(store: Store, run: Run) -> list[Epoch]:
    """The epochs of a run, in order; at least one."""
    kept = await store.get_state(run.id, STATE)
    epochs = [Epoch(0, 1, run.config, run.created_at)]
    for item in kept if isinstance(kept, list) else ():
        first, at, changed = item["first"], item["at"], item["config"]
        epochs.append(Epoch(len(epochs), int(first), {**run.config, **changed}, float(at)))
    return epochs


async def keep_epochs(store: Store, run: Run, epochs: Sequence[Epoch]) -> None:
    """Make these the run's epochs. The first of them is the run's own configuration."""
    if len(epochs) == 1 and await store.get_state(run.id, STATE) is None:
        return
    listed: list[Json] = [
        {
            "first": epoch.first,
            "at": epoch.at,
            "config": {key: value for key, value in epoch.config.items() if value != run.config.get(key)},
        }
        for epoch in epochs[1:]
    ]
    await store.put_state(run.id, STATE, listed)


def epoch_at(epochs: Sequence[Epoch], step: int) -> Epoch:
    """The epoch that a step belongs to."""
    return [epoch for epoch in epochs if epoch.first <= step][-1]
