"""Chooses the policy of a model call, by the agent that calls and by the model that it asks for.

The invariant: the policies are those that are recorded with the run, so that all gateways of the run choose alike. The record
of a call says which policy answered it; nothing afterwards matches agents again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lightning.bounded import Bounded, Once
from lightning.config import recorded_config
from lightning.gateway.call import Call, Request
from lightning.gateway.calls import Parts
from lightning.gateway.http import RefusalError
from lightning.gateway.stages import CallStage
from lightning.store.protocol import Store
from lightning.types import Run

from lightning_policies.calls import BASE, policies_of
from lightning_policies.config import PoliciesConfig, PolicyConfig

log = logging.getLogger(__name__)

RUNS = 1024
"""The most runs whose policies are remembered."""


class PoliciesStage(CallStage):
    """The stage `policies`."""

    api, after, before = 1, ("conversations",), ("history",)

    def __init__(self, store: Store) -> None:
        self._store = store
        self._policies = Bounded[str, Mapping[str, PolicyConfig]](RUNS)
        self._said = Once()

    async def admitted(self, call: Call, request: Request) -> None:
        """Set the policy of a call, and whether it is frozen, if the call's run has policies; that of a served model is the
        session. Raises `RefusalError` for a call that two policies match, and for a call of no served policy."""
        run = call.claims.run or call.claims.session
        if not (policies := await self._of(run)):
            return
        model = request.model if isinstance(request.model, str) else ""
        found = policies_of(policies, call.caller, model)
        if len(found) > 1:
            raise RefusalError(400, "several_policies", _several(call.caller.name, model, found))
        if not found and not call.claims.run:
            told = f"No policy has the agent {call.caller.name!r} or the model {model!r}: ask for the model "
            raise RefusalError(404, "no_policy", f"{told}{' or '.join(map(repr, policies))}.")
        if not found and self._said.first((run, call.caller.name)):
            log.warning(
                "the agent %r of run %s has no policy: it is answered by the untrained model, and is not trained. To train it, "
                "add it to policies.NAME.agents (said once for each agent)",
                call.caller.name,
                run,
            )
        call.policy_name = found[0] if found else BASE
        call.frozen = not found or not policies[found[0]].train

    async def _of(self, run: str) -> Mapping[str, PolicyConfig]:
        """Return the policies of a run; empty for a run without, and for calls of no run. Raises `StoreError`."""
        if (known := self._policies.used(run)) is not None or not run:
            return known or {}
        found = await self._store.get_run(run)
        return {} if found is None else self._policies.keep(run, recorded_policies(found))


def recorded_policies(run: Run) -> Mapping[str, PolicyConfig]:
    """Return the policies of a run's record by their names; empty for a run without. Raises `ConfigError` for a record that
    this release does not accept."""
    said = run.config.get("config")
    if not isinstance(said, Mapping) or not said.get(PoliciesConfig.place):
        return {}
    return PoliciesConfig.of(recorded_config({PoliciesConfig.place: said[PoliciesConfig.place]})[0]).by_name


def _several(agent: str, model: str, found: list[str]) -> str:
    """Return the message for a call that several policies match."""
    names = " and ".join(f"policies.{name}" for name in found)
    asked = f" (model {model!r})" if model else ""
    return (
        f"The call of the agent {agent!r}{asked} matches {names}, and a call has one policy: take the agent out of all but one "
        f"with a glob such as '!{agent}' in policies.{found[-1]}.agents."
    )


def stage(parts: Parts) -> PoliciesStage:
    """Make the stage for a gateway. It stands in all gateways alike, since a gateway learns from a run's record whether the run
    has policies."""
    return PoliciesStage(parts.store)
