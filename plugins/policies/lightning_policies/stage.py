"""Chooses the policy of a model call, by the agent that calls and by the model that it asks for.

The invariant: the policies are those that are recorded with the run, so that all gateways of the run choose alike. The record
of a call says which policy answered it; nothing afterwards matches agents again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lightning.bounded import Bounded, Once
from lightning.config import recorded_config
from lightning.errors import ConfigError
from lightning.gateway.call import Call, Request
from lightning.gateway.calls import Parts
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import MODEL, Claims
from lightning.gateway.stages import CallStage
from lightning.store.protocol import Store
from lightning.types import Run

from lightning_policies.bases import is_base_served
from lightning_policies.calls import BASE, is_name, policy_of
from lightning_policies.config import PoliciesConfig, PolicyConfig

log = logging.getLogger(__name__)

RUNS = 1024
"""The most runs whose policies are remembered."""


class PoliciesStage(CallStage):
    """The stage `policies`."""

    api, after, before = 1, ("conversations",), ("history",)

    def __init__(self, store: Store) -> None:
        self._store = store
        self._policies = Bounded[str, tuple[Mapping[str, PolicyConfig], bool]](RUNS)
        self._said = Once()

    async def admitted(self, call: Call, request: Request) -> None:
        """Set the policy of a call, and whether it is frozen, if the call's run has policies; that of a served model is the
        session. Raises `RefusalError` for a call that two policies match, and for a call of no policy where the untrained model
        is not served."""
        run = call.claims.run or call.claims.session
        policies, serves_base = await self._of(run)
        if not policies:
            return
        model = request.model if isinstance(request.model, str) else ""
        try:
            name = policy_of(policies, call.caller, model)
        except ConfigError as error:
            raise RefusalError(400, "several_policies", str(error)) from error
        if name == BASE and not call.claims.run:
            told = f"No policy has the agent {call.caller.name!r} or the model {model!r}: ask for the model "
            raise RefusalError(404, "no_policy", f"{told}{' or '.join(map(repr, policies))}.")
        if name == BASE and not serves_base:
            raise RefusalError(404, "no_policy", _none(call.caller.name))
        if name == BASE and self._said.first((run, call.caller.name)):
            log.warning(
                "the agent %r of run %s has no policy: it is answered by the untrained model, and is not trained. To train it, "
                "add it to policies.NAME.agents (said once for each agent)",
                call.caller.name,
                run,
            )
        call.policy_name, call.frozen = name, name == BASE or not policies[name].train

    async def models(self, claims: Claims) -> Mapping[str, str] | None:
        """Return the model names by which a call may ask for a policy, and for keys of a run the name under which the policy of
        the calling agent answers; None for a run without policies."""
        policies, _ = await self._of(claims.run or claims.session)
        if not policies:
            return None
        asked = {name: policy for policy, own in policies.items() for name in own.models if is_name(name)}
        return {MODEL: "", **asked} if claims.run else asked

    async def _of(self, run: str) -> tuple[Mapping[str, PolicyConfig], bool]:
        """Return the policies of a run, and whether the run's model is served untrained. A run without policies has none, and
        calls of no run have none. Raises `StoreError`."""
        if (known := self._policies.used(run)) is not None or not run:
            return known or ({}, True)
        found = await self._store.get_run(run)
        return ({}, True) if found is None else self._policies.keep(run, recorded_policies(found))


def recorded_policies(run: Run) -> tuple[Mapping[str, PolicyConfig], bool]:
    """Return the policies of a run's record by their names, and whether the run's model is served untrained; no policies for a
    run without. Raises `ConfigError` for a record that this release does not accept."""
    said = run.config.get("config")
    if not isinstance(said, Mapping) or not said.get(PoliciesConfig.place):
        return {}, True
    engine = said.get("engine")
    lora = engine.get("lora") if isinstance(engine, Mapping) else None
    config, _ = recorded_config({PoliciesConfig.place: said[PoliciesConfig.place], "engine": {"lora": lora}})
    policies = PoliciesConfig.of(config).by_name
    return policies, is_base_served(policies, config.engine.lora)


def _none(agent: str) -> str:
    """Return the message for a call of an agent that has no policy, where the untrained model is not served."""
    return (
        f"No policy has the agent {agent!r}, and this run does not serve its model untrained, because each policy has another "
        f"base or trains all weights: add the agent to policies.NAME.agents, or set policies.untrained.agents = [{agent!r}] "
        "with policies.untrained.train = false."
    )


def stage(parts: Parts) -> PoliciesStage:
    """Make the stage for a gateway. It stands in all gateways alike, since a gateway learns from a run's record whether the run
    has policies."""
    return PoliciesStage(parts.store)
