"""What the agent of a leased attempt needs to call the model, from whichever server it was leased.

The invariant: every server over a store says the same of a lease, whoever's token it is: how the agents of a run are to call
the model is kept with the run by its trainer (`HowToCall`), and the rest is in the rollout. Prompts are those of the run's
project.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from lightning.bounded import Aging, Bounded
from lightning.errors import StoreError
from lightning.gateway.gateway import Gateway
from lightning.store.protocol import Store
from lightning.trainer.how_to_call import HowToCall
from lightning.trainer.plan import TRAIN
from lightning.trainer.run_server import of_project
from lightning.types import DEFAULT_PROJECT, LLM, Lease
from lightning_resources import ResourceKind, get_resource

from lightning_server.projects import Names

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
        rollout = Names(project).rollout_out(lease.rollout)
        prompts = await how.prompts(rollout, partial(self._text, seen, lease.rollout.run))
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
            found = await get_resource(store, name, version)
            if found is None or found.kind is not ResourceKind.PROMPT:
                raise StoreError(f"a rollout runs with version {version} of the prompt {name!r}, and there is none")
            text = self._texts.keep(key, str(found.content))
        return text
