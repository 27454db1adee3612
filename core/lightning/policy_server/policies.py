"""Several policies in one run: the contract of the plugin that brings them.

The invariant: the gateway records with each call which policy answered (`Transition.policy`), and everything that trains,
judges or proves reads it there. All trained policies have one version number: after step N each of them is version N. A policy
that is not trained has version 0 in every record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.config import Config, LoraConfig
    from lightning.engines.protocol import Engine
    from lightning.policy_server.weights import WeightTransfer


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
    def untrained(self) -> Sequence[str]:
        """The names under which calls are recorded that are never trained."""

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
