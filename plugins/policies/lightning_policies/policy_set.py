"""The policies of a run as the trainer sees them: which of them a step trains, their engine, and their weights in vLLM.

The invariant: policies that cannot be trained as the settings say are refused before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning.errors import ConfigError

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
        self._policies, self._lr = policies, config.engine.lr
        self._adapters = {name: _adapters(name, policy, config) for name, policy in policies.items() if policy.train}
        self._turns = [name for name, steps in _turns(config, self._adapters) for _ in range(steps)]

    @property
    def adapters(self) -> Mapping[str, LoraConfig]:
        """The adapters of each trained policy, by its name."""
        return self._adapters

    @property
    def globs(self) -> Mapping[str, Sequence[str]]:
        """The globs of the calls of each policy, by its name, in the spelling of `train_agents`."""
        return {name: globs_of(policy) for name, policy in self._policies.items()}

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

    @property
    def described(self) -> Mapping[str, str]:
        """The agents of each policy, and how it is trained, in words for people, by its name."""
        return {
            name: f"answers {', '.join(globs_of(policy))}; {self._training(name)}"
            for name, policy in self._policies.items()
        }

    def _training(self, name: str) -> str:
        if (lora := self.adapters.get(name)) is None:
            return "not trained"
        return (
            f"trained with a learning rate of {self._policies[name].lr or self._lr:g} and adapters of rank {lora.rank}"
        )

    def resting(self, step: int) -> Sequence[str]:
        """Return the trained policies whose turn this step is not; empty if policies take no turns."""
        if not self._turns:
            return ()
        turn = self._turns[(step - 1) % len(self._turns)]
        return tuple(name for name in self.adapters if name != turn)

    def engine(self, make: Callable[[Config], Engine], config: Config) -> Engine:
        """Return one engine with the adapters of all trained policies. Raises `ConfigError` for an engine that cannot share its
        base model."""
        from lightning_policies.engine import PolicyEngine, TrainedPolicy

        trained = {name: TrainedPolicy(lora, self._policies[name].lr) for name, lora in self.adapters.items()}
        return PolicyEngine(trained, make, config)

    def transfer(self, transfer: WeightTransfer, model: Path) -> WeightTransfer:
        """Return how the adapters of all trained policies come into a vLLM with the base `model`, as files. Raises
        `ConfigError` if `transfer` sends no files."""
        from lightning_policies.transfer import PolicyAdapters

        return PolicyAdapters(transfer, model, self.adapters, self.untrained)


def policy_set(config: Config) -> Policies | None:
    """Return the policies of a run; None without the settings `policies`. Raises `ConfigError` for a trained policy without
    adapters, and for turns that are not those of the trained policies."""
    policies: Mapping[str, PolicyConfig] = PoliciesConfig.of(config).by_name
    if policies:
        return Policies(policies, config)
    _turns(config, {})
    return None


def _adapters(name: str, policy: PolicyConfig, config: Config) -> LoraConfig:
    """Return the adapters of a trained policy. Raises `ConfigError` if there are none."""
    lora = policy.lora or config.engine.lora
    if lora is None:
        raise ConfigError(
            f"policies.{name} has no adapters to train: all policies share the weights of the run's model, and only adapters "
            f"differ between them. Give all policies adapters with --set engine.lora.rank=8, or this one with --set "
            f"policies.{name}.lora.rank=8"
        )
    return lora


def _turns(config: Config, trained: Mapping[str, LoraConfig]) -> list[tuple[str, int]]:
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
