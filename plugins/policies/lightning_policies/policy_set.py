"""The policies of a run as the trainer sees them: which of them a step trains, their engine, and their weights in vLLM.

The invariant: policies that cannot be trained as the settings say are refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lightning.errors import ConfigError
from lightning.policy_server.policies import ServedModel
from lightning.trainer.model import local_model

from lightning_policies.bases import Served, folders_of, named, served_of
from lightning_policies.calls import BASE, globs_of, policy_of
from lightning_policies.config import PoliciesConfig, PolicyConfig, TurnsConfig

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.config import Config, LoraConfig
    from lightning.engines.protocol import Engine
    from lightning.policy_server.weights import WeightTransfer
    from lightning.types import Caller


class Policies:
    """Implements `lightning.policy_server.policies.PolicySet`."""

    def __init__(self, policies: Mapping[str, PolicyConfig], config: Config) -> None:
        lora = config.engine.lora
        self._policies, self._lr, self._lora = policies, config.engine.lr, lora
        self._adapters = {name: policy.lora or lora for name, policy in policies.items() if policy.train}
        self._served = served_of(policies, lora)
        self._turns = [name for name, steps in _turns(config, self._adapters) for _ in range(steps)]

    @property
    def adapters(self) -> Mapping[str, LoraConfig | None]:
        """The adapters of each trained policy, by its name; None for a policy of which all weights are trained."""
        return self._adapters

    @property
    def bases(self) -> Mapping[str, str]:
        """The model that each policy begins as, by its name; without the policies that begin as the run's model."""
        return {name: policy.base for name, policy in self._policies.items() if policy.base is not None}

    @property
    def globs(self) -> Mapping[str, Sequence[str]]:
        """The globs of the calls of each policy, by its name, in the spelling of `train_agents`."""
        return {name: globs_of(policy) for name, policy in self._policies.items()}

    def check(self) -> None:
        """Raise `ConfigError` for a base that is no model folder on this machine and no name on the hub."""
        for name, base in self.bases.items():
            try:
                local_model(base)
            except ConfigError as error:
                raise ConfigError(f"policies.{name}.base: {error}") from error

    @property
    def untrained(self) -> Sequence[str]:
        """The names of the policies that are not trained, and that of the untrained model."""
        return (*(name for name in self._policies if name not in self.adapters), BASE)

    def policy_of(self, caller: Caller, model: str) -> str:
        """Return the name of the policy of an agent that asks for a model, or that of the untrained model. Raises `ConfigError`
        for a call that several policies match."""
        return policy_of(self._policies, caller, model)

    def without(self, config: Config) -> Config:
        """Return settings that are otherwise the same for a run with one policy."""
        trainer = config.trainer.model_copy(update={"policy_turns": ""})
        return config.model_copy(update={PoliciesConfig.place: PoliciesConfig(), TurnsConfig.place: trainer})

    def within(self, config: Config) -> Config:
        """Return settings that are otherwise the same with these policies, and with the adapters of those that have none of
        their own."""
        engine = config.engine.model_copy(update={"lora": self._lora})
        return config.model_copy(update={PoliciesConfig.place: PoliciesConfig(**self._policies), "engine": engine})

    @property
    def described(self) -> Mapping[str, str]:
        """The agents of each policy, and how it is trained, in words for people, by its name."""
        return {
            name: f"answers {', '.join(globs_of(policy))}; {self._training(name)}"
            for name, policy in self._policies.items()
        }

    def _training(self, name: str) -> str:
        base, rate = self._policies[name].base, self._policies[name].lr or self._lr
        how = [] if rate is None else [f"a learning rate of {rate:g}"]  # branches and evaluations have none
        if name not in self.adapters:
            return f"not trained, stays {base}" if base else "not trained"
        if (lora := self.adapters[name]) is None:
            return " with ".join([f"trains all weights of {base or 'the model'}", *how])
        how.append(f"adapters of rank {lora.rank}{f' on {base}' if base else ''}")
        return f"trained with {' and '.join(how)}"

    def resting(self, step: int) -> Sequence[str]:
        """Return the trained policies whose turn this step is not; empty if policies take no turns."""
        if not self._turns:
            return ()
        turn = self._turns[(step - 1) % len(self._turns)]
        return tuple(name for name in self.adapters if name != turn)

    def engine(self, make: Callable[[Config], Engine], config: Config) -> Engine:
        """Return one engine that trains all trained policies. Raises `ConfigError` for an engine that cannot share a base
        model."""
        from lightning_policies.engine import PolicyEngine, TrainedPolicy

        own = self._policies
        trained = {
            name: TrainedPolicy(lora, own[name].lr, named(own[name].base)) for name, lora in self.adapters.items()
        }
        return PolicyEngine(trained, make, config)

    @property
    def count(self) -> int:
        """The number of models with vLLMs of their own."""
        return len(self._served)

    def models(self, model: Path) -> Sequence[ServedModel]:
        """Return each model with vLLMs of its own. Raises `ConfigError` for a policy's base that does not exist, that is the
        run's model, or that is named in two ways."""
        folders = folders_of([served.base for served in self._served], model)
        return [
            ServedModel(
                folders[served.base],
                [self.adapters[name] for name in served.trained],
                partial(self._transfer, served, folders[served.base]),
            )
            for served in self._served
        ]

    def _transfer(self, served: Served, model: Path, transfer: WeightTransfer) -> WeightTransfer:
        """Return how the weights of the policies of one vLLM, which starts with the folder `model`, come there. Raises
        `ConfigError` if `transfer` does not read files."""
        from lightning_policies.transfer import PolicyAdapters, PolicyPart

        adapters, trained = served.adapters, [each for each in self._served if each.trained]
        own = PolicyAdapters(transfer, model, adapters, served.untrained) if adapters else transfer
        if adapters and len(trained) == 1:
            return own
        return PolicyPart(own, served.trained, served.untrained)


def policy_set(config: Config) -> Policies | None:
    """Return the policies of a run; None without the settings `policies`. Raises `ConfigError` for turns that are not
    those of the trained policies."""
    policies: Mapping[str, PolicyConfig] = PoliciesConfig.of(config).by_name
    if policies:
        return Policies(policies, config)
    _turns(config, {})
    return None


def _turns(config: Config, trained: Mapping[str, LoraConfig | None]) -> list[tuple[str, int]]:
    """Return the turns of the trained policies; empty if they take none. Raises `ConfigError` for a turn of another policy, and
    for a trained policy that never has a turn."""
    turns, setting = TurnsConfig.of(config).turns, "trainer.policy_turns"
    for name, _ in turns:
        if name not in trained:
            known = f"the trained policies are {', '.join(trained)}" if trained else "[policies.NAME] names no policy"
            raise ConfigError(f"{setting} has a turn of {name!r}, and {known}")
    if missing := [name for name in trained if turns and name not in dict(turns)]:
        raise ConfigError(
            f"{setting} has no turn of {missing[0]!r}, which would never be trained: add {missing[0]}:STEPS, or set "
            f"policies.{missing[0]}.train = false"
        )
    return turns
