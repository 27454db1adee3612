"""What a recipe is: an agent, how it is trained, and the numbers; the cluster's numbers lie in files of their own.

The invariant: what is learned depends on the recipe alone. A larger cluster takes the same steps in less time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning import LightningRL
from lightning.config import Config, load_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning.runner.protocol import Agent

HERE = Path(__file__).parent
CLUSTERS = {"1x8": HERE / "one_node.toml", "2x8": HERE / "two_nodes.toml"}
"""Settings of one machine with eight GPUs of 80 GB, and of two."""
TRAIN, VAL = "tasks.jsonl", "val.jsonl"
"""What every `prepare` writes into its folder."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One experiment. `agent` makes the agent for a folder that `prepare` has filled."""

    agent: Callable[[Path], Agent]
    settings: Path
    group_size: int
    train_agents: tuple[str, ...] = ()

    def config(self, cluster: str, overrides: Sequence[str] = ()) -> Config:
        """The settings: the cluster's, the recipe's, `LIGHTNING_*`, `overrides`; each wins over the one before."""
        return load_config(self.settings, overrides, base=load_config(CLUSTERS[cluster], env={}))

    def algorithm(self) -> LightningRL:
        """GRPO without a KL penalty, as all recipes have it."""
        return LightningRL(
            "grpo",
            group_size=self.group_size,
            clip_low=0.2,  # published; PPO's own (arXiv 1707.06347)
            clip_high=0.3,  # published; DAPO (arXiv 2503.14476, §3.1) has 0.28, too, so that rare tokens may become likely
            kl_coefficient=0.0,  # published, and DAPO's §2.3: a verifiable reward needs no leash, and saves a forward pass
            entropy_coefficient=0.0,  # published
        )
