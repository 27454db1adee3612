"""What a recipe is: an agent, how it is trained, and the numbers; the cluster's numbers lie in files of their own.

The invariant: what is learned depends on the recipe alone, except for the age of the trained tokens (`max_staleness`), which
is the cluster's: 0 on one GPU, which samples and trains in turns. A larger cluster takes the same steps in less time.
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
TRAIN, VAL = "tasks.jsonl", "val.jsonl"
"""The files that every `prepare` writes into its folder: the training tasks and the held-out ones."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind, `gpus` in each machine. `serving` of them all are vLLM's alone; 0: it shares the GPU that trains."""

    settings: Path
    engine: str
    gpus: int
    machines: int = 1
    serving: int = 0


CLUSTERS = {
    "1x1": Cluster(HERE / "one_gpu.toml", "torch", 1),
    "1x8": Cluster(HERE / "one_node.toml", "verl", 8, serving=4),
    "2x8": Cluster(HERE / "two_nodes.toml", "verl", 8, machines=2, serving=8),
}
"""Machines x GPUs of each."""


def full_size(name: str, cluster: str, overrides: Sequence[str] = ()) -> Config:
    """The settings of an experiment: the cluster's, the recipe's, `LIGHTNING_*`, `overrides`; each wins over the one before."""
    return load_config(HERE / name / "settings.toml", overrides, base=load_config(CLUSTERS[cluster].settings, env={}))


@dataclass(frozen=True, slots=True)
class Recipe:
    """One experiment. `agent` makes the agent for a folder that `prepare` has filled."""

    agent: Callable[[Path], Agent]
    group_size: int
    train_agents: tuple[str, ...] = ()

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
