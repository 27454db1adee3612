"""Several policies in one run: the contract of the plugin that brings them.

The invariant: the gateway records with each call which policy answered (`Transition.policy`), and everything that trains,
judges or proves reads it there. All trained policies have one version number: after step N each of them is version N. A policy
that is not trained has version 0 in every record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.config import Config, LoraConfig
    from lightning.engines.protocol import Engine
    from lightning.policy_server.weights import WeightTransfer
    from lightning.types import Caller


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with policy servers of its own, in a `folder`. `trained` has the adapters of each policy that is trained on it,
    or None for a policy of which all weights are trained. `transfer` makes the way of weights into these servers from the way
    that the settings name."""

    folder: Path
    trained: Sequence[LoraConfig | None]
    transfer: Callable[[WeightTransfer], WeightTransfer] = lambda transfer: transfer


class PolicySet(Protocol):
    """The policies of one run, as a plugin registers them with `register_policy_sets`. A call stage of the plugin says which of
    them answers a call (`Call.policy_name`)."""

    @property
    def adapters(self) -> Mapping[str, LoraConfig | None]:
        """The adapters of each trained policy, by its name; None for a policy of which all weights are trained."""

    @property
    def bases(self) -> Mapping[str, str]:
        """The model that each policy begins as, by its name; without the policies that begin as the run's model."""

    def check(self) -> None:
        """Raise `ConfigError` for a policy's model that is no model folder on this machine and no name on a hub."""

    @property
    def untrained(self) -> Sequence[str]:
        """The names under which calls are recorded that are never trained."""

    def policy_of(self, caller: Caller, model: str) -> str:
        """Return the name under which a call of this agent, which asks for this model, is recorded. Raises `ConfigError` for a
        call that several policies match."""

    @property
    def globs(self) -> Mapping[str, Sequence[str]]:
        """The globs of the calls of each policy, by its name, in the spelling of `train_agents`."""

    def without(self, config: Config) -> Config:
        """Return settings that are otherwise the same for a run with one policy."""

    def within(self, config: Config) -> Config:
        """Return settings that are otherwise the same with these policies."""

    @property
    def described(self) -> Mapping[str, str]:
        """The agents of each policy of the settings, and how it is trained, in words for people, by its name."""

    def resting(self, step: int) -> Sequence[str]:
        """Return the policies that this step does not train, because policies take turns; empty if it trains all."""

    def engine(self, make: Callable[[Config], Engine], config: Config) -> Engine:
        """Return one engine that trains each row with the policy of `Sample.policy`. `make` makes an engine for one policy.
        Raises `ConfigError` if this engine cannot train several."""

    @property
    def count(self) -> int:
        """The number of models that `models` returns."""

    def models(self, model: Path) -> Sequence[ServedModel]:
        """Return each model that needs policy servers of its own, in a run that trains the folder `model`. Fetches a model from
        the hub that is not on this machine. Raises `ConfigError` for a model that does not exist or is named twice."""
