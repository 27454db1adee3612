"""Which models agents ask for. Whatever the name, the run's policy answers: one that is not the policy's may be meant for
another model, such as a judge in the reward, and is said in the log.

The invariant: a name changes nothing of its call. Each is looked at once, and how many are remembered is bounded: the log says
when no more are.
"""

from __future__ import annotations

import logging
from pathlib import PurePath

from lightning.errors import StoreError
from lightning.gateway.auth.caller_identity import ALIAS
from lightning.gateway.policy_state import Policy
from lightning.gateway.upstream.client import MODEL
from lightning.store.protocol import Store

log = logging.getLogger(__name__)

NAMES = 256
"""Names that are looked at in all; agents choose them."""
LONGEST = 100
"""Characters of a name that are looked at."""


class AskedModels:
    """The names that were asked for at one gateway."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: set[tuple[str, str]] = set()
        self._told_of_limit = False

    async def look(self, run: str, policy: Policy, model: object) -> None:
        """Warn when a call asks for a model that is not called as the run's policy is; once for each run and name."""
        if not isinstance(model, str) or not model or model == MODEL or model.startswith(ALIAS):
            return
        name = model[:LONGEST]
        if (run, name) in self._seen:
            return
        if len(self._seen) >= NAMES:
            if not self._told_of_limit:
                self._told_of_limit = True
                log.warning(
                    "agents have asked for %d models' names: from here on none is looked at, nor said here", NAMES
                )
            return
        self._seen.add((run, name))
        if any(slot.upstream.model == model for slot in policy.pool.slots) or await self._is_trained(run, model):
            return
        log.warning(
            "%r was asked for%s, and the policy answers, as it does under any name: such calls are recorded as the agent's "
            "own, and trained on where a trainer works. A judge or another model that is not to be trained needs a client "
            "with a base_url and an API key of its own, read before the rollout (in it OPENAI_BASE_URL and OPENAI_API_KEY "
            "are the policy's); or name its calls and leave that name out of train_agents (said once for each name)",
            name,
            f" in run {run}" if run else "",
        )

    async def _is_trained(self, run: str, model: str) -> bool:
        """Whether it is the model that the run was started with, by its whole name or the last part of it."""
        try:
            found = await self._store.get_run(run) if run else None
        except StoreError:
            return False
        name = str(found.config.get("model", "")) if found is not None else ""
        return model in (name, PurePath(name).name)
