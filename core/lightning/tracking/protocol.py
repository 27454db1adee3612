"""The protocols of trackers, which receive metrics, finished rollouts and alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning.store.protocol import Store
from lightning.types import Json, Rollout, StepReward, ToolEvent, Transition


class Tracker(Protocol):
    """Receives the metrics of each step. A slow or failing tracker never stops training: its failure is logged. `start` comes
    first; if it fails, nothing else is called."""

    def start(self, run: str, config: Mapping[str, Json], folder: Path) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of a finished rollout and everything recorded about it; the last attempt is `rollout.attempt`."""

    rollout: Rollout
    attempt: int
    transitions: Sequence[Transition]
    tool_events: Sequence[ToolEvent]
    step_rewards: Sequence[StepReward]


@runtime_checkable
class RolloutTracker(Tracker, Protocol):
    """A tracker that is also told of each attempt of each rollout that has ended for good. `store` is the run's store, for
    anything else it needs."""

    async def attempt(self, record: AttemptRecord, store: Store) -> None: ...


@runtime_checkable
class AlertTracker(Tracker, Protocol):
    """A tracker that is also told of alarms. `alert` has the keys that targets of `trainer.alerts` get (`run`, `step`, `cause`,
    `text` with the cure, ...), and comes even without such targets."""

    def alert(self, alert: Mapping[str, Json]) -> None: ...
