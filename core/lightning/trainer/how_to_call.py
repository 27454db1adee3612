"""How the agents of a run are to call the model: kept with the run by its trainer, for whoever runs one of them elsewhere or
again.

The invariant: what is said of an attempt depends on nothing but what is kept and the rollout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from lightning.errors import StoreError
from lightning.store.protocol import Store
from lightning.types import Rollout

STATE = "how_to_call"


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
        """63 bits for the agent's process: the same for the same rollout of a repeated run, whatever that is called, and others
        for every other rollout and attempt, also of the same task in a later pass. A branch has that of its parent."""
        if self.seed is None:
            return None
        where, attempt = rollout.id.removeprefix(rollout.run), rollout.attempt
        if rollout.parent is not None:
            parent, attempt, _ = rollout.parent
            mine = parent.startswith(f"{rollout.run}/")
            where = parent.removeprefix(rollout.run) if mine else f"/{parent.partition('/')[2]}"
        place = json.dumps([self.seed, where, rollout.task.id, attempt])
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest()) >> 1

    async def prompts(self, rollout: Rollout, text: Callable[[str, int], Awaitable[str]]) -> dict[str, str]:
        """The prompt of each component in a rollout as its project sees it. `text` gives that of a resource's version."""
        found = dict(self.own)
        chosen = {**self.versions, **rollout.resources}
        for component, name in self.bound.items():
            if name in chosen:
                found[component] = await text(name, chosen[name])
        return found

    @classmethod
    async def of_run(cls, store: Store, run: str) -> HowToCall:
        """What the run's trainer has kept; of a run without one, nothing."""
        kept = await store.get_state(run, STATE)
        try:
            return cls(**cast("Any", kept)) if isinstance(kept, Mapping) else cls()
        except TypeError as error:
            raise StoreError(
                f"what the trainer of run {run!r} keeps for servers is not of this version of lightning ({error}): "
                "use the trainer's version, or begin a new run"
            ) from error

    async def keep(self, store: Store, run: str) -> None:
        """Tell every server."""
        await store.put_state(run, STATE, asdict(self))
