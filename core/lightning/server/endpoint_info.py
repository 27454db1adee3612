"""What a server that did not begin a run must know to let the run's agents call the model.

The invariant: it is kept with the run by its trainer before a rollout of the run can be leased, so every server over the store
tells agents the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from lightning.store.protocol import Store
from lightning.types import Rollout

STATE = "how_to_call"
TRAIN = "train"
"""The split of rollouts that are trained on; all others evaluate."""


@dataclass(frozen=True, slots=True)
class HowToCall:
    """`own` are prompt templates by component, `bound` the resources of the other components, `versions` what a rollout runs
    with unless it says otherwise, by resource. `eval_temperature` is that of evaluations, None for the agent's own.
    `seed` is the run's, from which those of its agents follow; None where they get none.
    """

    own: Mapping[str, str] = field(default_factory=dict)
    bound: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)
    eval_temperature: float | None = None
    seed: int | None = None

    def agent_seed(self, rollout: Rollout) -> int | None:
        """63 bits for the agent's process: siblings and attempts get others, the same rollout of a repeated run the same."""
        if self.seed is None:
            return None
        place = json.dumps([self.seed, rollout.task.id, rollout.index, rollout.attempt])
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1

    @classmethod
    async def of_run(cls, store: Store, run: str) -> HowToCall:
        """What the run's trainer has kept; of a run without one, nothing."""
        kept = await store.get_state(run, STATE)
        return cls(**cast("dict[str, Any]", kept)) if isinstance(kept, Mapping) else cls()

    async def keep(self, store: Store, run: str) -> None:
        """Tell every server."""
        await store.put_state(run, STATE, asdict(self))
