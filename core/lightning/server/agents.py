"""What the agent of a leased attempt needs to call the model, from whichever server it was leased.

The invariant: every server over a store says the same of a lease, whoever's token it is: how the agents of a run are to call
the model is kept with the run by its trainer (`HowToCall`), and the rest is in the rollout. Prompts are those of the run's
project.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

from lightning.bounded import Aging, Bounded
from lightning.errors import StoreError
from lightning.gateway import Gateway
from lightning.server.names import Names
from lightning.server.projects import of_project
from lightning.store.protocol import Store
from lightning.types import DEFAULT_PROJECT, LLM, Lease, ResourceKind, Rollout

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

    async def prompts(
        self, rollout: Rollout, project: str, text: Callable[[str, int], Awaitable[str]]
    ) -> dict[str, str]:
        """The prompt of each component in a rollout of the project. `text` gives that of a resource's version."""
        found = dict(self.own)
        chosen = {**self.versions, **Names(project).rollout_out(rollout).resources}
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


REMEMBERED = 1024
"""Runs, and texts of prompts, that a server has at hand."""
FRESH_SECONDS = 2.0
"""How long it is believed what a run's trainer has said."""


class AgentAccess:
    """Gives agents access to the model behind a gateway. `url` is where agents reach it, empty: where it listens."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self._gateway, self._url = gateway, url.rstrip("/")
        self._runs = Aging[str, tuple[HowToCall, str]](REMEMBERED)
        self._texts = Bounded[tuple[str, str, int], str](REMEMBERED)

    async def llm_for(self, lease: Lease, store: Store) -> LLM:
        """The model as the agent of a lease is to see it; `store` is the one that the lease's holder sees."""
        how, project = await self._how(lease.rollout.run, store)
        temperature = None if lease.rollout.split == TRAIN else how.eval_temperature
        llm = self._gateway.llm(lease, sampling=None if temperature is None else {"temperature": temperature})
        seen = of_project(store, project)
        prompts = await how.prompts(lease.rollout, project, partial(self._text, seen, lease.rollout.run))
        return replace(
            llm,
            base_url=f"{self._url}/v1" if self._url else llm.base_url,
            prompts=prompts,
            seed=how.agent_seed(lease.rollout),
        )

    async def _how(self, run: str, store: Store) -> tuple[HowToCall, str]:
        """What the trainer of a run has kept, and the run's project."""
        now = time.monotonic()
        if (known := self._runs.fresh(run, now, FRESH_SECONDS)) is not None:
            return known
        how, found = await HowToCall.of_run(store, run), await store.get_run(run)
        project = DEFAULT_PROJECT if found is None else found.project
        self._runs.keep(run, ((how, project), now))
        return how, project

    async def _text(self, store: Store, run: str, name: str, version: int) -> str:
        key = (run, name, version)  # the same name is another resource in another project, and a run is in one
        text = self._texts.get(key)
        if text is None:
            found = await store.get_resource(name, version)
            if found is None or found.kind is not ResourceKind.PROMPT:
                raise StoreError(f"a rollout runs with version {version} of the prompt {name!r}, and there is none")
            text = self._texts.keep(key, str(found.content))
        return text
