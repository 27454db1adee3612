"""A run with several policies, served by one vLLM: the run's model, and the adapters of each trained policy.

The invariant: a request is answered by the policy that it names as its model, or by the policy of its agent, as in the run. A
request of no policy is refused, so that nobody gets an untrained answer without knowing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning.config import Config, recorded_config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.policy_server.model_folder import ADAPTERS_OF_ALL
from lightning.store.places import run_id_of, store_in
from lightning.trainer.context import base_digest
from lightning.trainer.model import check_one_model, models_in, resolve_model
from lightning.trainer.run_stages import MODEL
from lightning.types import POLICY, Json

SECTION = "policies"
"""The section of the settings that has a run's policies."""


@dataclass(frozen=True, slots=True)
class ServedPolicies:
    """The policies of a run. `base` is the folder of the model that they began as, `adapters` the file with their adapters.
    `said` are their settings, as in a run's record; calls that ask for the model NAME are those of the policy NAME."""

    base: Path
    adapters: Path
    said: Mapping[str, Json]

    @property
    def names(self) -> list[str]:
        """The names of the policies."""
        own = self.said[SECTION]
        return [*own] if isinstance(own, Mapping) else []

    def within(self, config: Config) -> Config:
        """Return settings with these policies in place of their own."""
        recorded = recorded_config(self.said)[0]
        engine = config.engine.model_copy(update={"lora": recorded.engine.lora})
        return config.model_copy(update={SECTION: getattr(recorded, SECTION), "engine": engine})


def has_policies(run: Path) -> bool:
    """Return whether a run's folder has models of several policies."""
    return bool(models := models_in(run / "model")) and POLICY not in models


async def policies_in(run: Path) -> ServedPolicies:
    """Return the policies of a run by its folder. Raises `ConfigError` if one vLLM cannot answer them together, if the model
    that they began as is gone or has changed, or if the file with their adapters is gone."""
    example = next(iter(models_in(run / "model").values()))
    async with plugins().opened_store(store_in(run), make=False) as store:
        found = await store.get_run(run_id_of(run))
        if found is None or not isinstance(said := found.config.get("config"), Mapping):
            raise ConfigError(f"the store of {run} does not know its run: serve one of its policies, as {example}")
        records = await store.steps(found.id)
    try:
        check_one_model(found)
    except ConfigError as error:
        raise ConfigError(f"{error}: serve one of its policies, as {example}") from error
    base = resolve_model(run / MODEL if (run / MODEL).is_dir() else str(found.config.get("model")), fetch=False)
    digest = records[-1].context.get("base") if records else None
    if digest is not None and digest != await asyncio.to_thread(base_digest, base):
        raise ConfigError(
            f"the model in {base} is not the one that the policies of {run} began as: its weights have changed. Bring them "
            f"back, or serve one policy, as {example}"
        )
    adapters = run / "model" / ADAPTERS_OF_ALL
    if not adapters.is_file():
        raise ConfigError(f"{adapters} is gone, with the adapters of all policies: serve one policy, as {example}")
    own, engine = said.get(SECTION), said.get("engine")
    policies = {name: _asked_for(name, policy) for name, policy in (own if isinstance(own, Mapping) else {}).items()}
    lora = engine.get("lora") if isinstance(engine, Mapping) else None
    return ServedPolicies(base, adapters, {SECTION: policies, "engine": {"lora": lora}})


def _asked_for(name: str, policy: Json) -> dict[str, Json]:
    """Return the settings of a policy that also has the calls which ask for the model of its name."""
    own = policy if isinstance(policy, Mapping) else {}
    models = own.get("models")
    given = models if isinstance(models, list | tuple) else ()
    return {**own, "models": [*dict.fromkeys([*map(str, given), name])]}
