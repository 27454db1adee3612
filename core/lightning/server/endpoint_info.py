"""What a server that did not begin a run must know to let the run's agents call the model.

The invariant: it is kept with the run by its trainer before a rollout of the run can be leased, so every server over the store
tells agents the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from lightning.store.protocol import Store

STATE = "how_to_call"
TRAIN = "train"
"""The split of rollouts that are trained on; all others evaluate."""


@dataclass(frozen=True, slots=True)
class HowToCall:
    """`own` are prompt templates by component, `bound` the resources of the other components, `versions` what a rollout runs
    with unless it says otherwise, by resource. `eval_temperature` is that of evaluations, None for the agent's own."""

    own: Mapping[str, str] = field(default_factory=dict)
    bound: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    eval_temperature: float | None = None

    @classmethod
    async def of_run(cls, store: Store, run: str) -> HowToCall:
        """What the run's trainer has kept; of a run without one, nothing."""
        kept = await store.get_state(run, STATE)
        return cls(**cast("dict[str, Any]", kept)) if isinstance(kept, Mapping) else cls()

    async def keep(self, store: Store, run: str) -> None:
        """Tell every server."""
        await store.put_state(run, STATE, asdict(self))
