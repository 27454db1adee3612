"""The settings `engine.verl`."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Literal

from lightning.config import LoraConfig, PluginSettings
from lightning.errors import ConfigError
from pydantic import Field, JsonValue


class VerlConfig(PluginSettings):
    """The verl engine: training on many GPUs, by verl's workers on Ray. The settings of the section `engine` hold for it,
    too."""

    place: ClassVar[str] = "engine.verl"
    of_training_state: ClassVar[Collection[str]] = ("strategy",)

    world_size: int = Field(default=1, ge=0)
    """Number of worker processes, one per GPU; on a machine without a GPU they run on its CPU. 0 trains in the trainer's
    process, without Ray."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines, with the same number of workers on each. All must have access to the same files: the model and
    the run's folder."""
    address: str = ""
    """Ray cluster: `auto`, or `HOST:6379` of its head; empty starts one on this machine."""
    restarts: int = Field(default=3, ge=0)
    """How often, within one step, workers that died are restarted from the last checkpoint. The step is then repeated."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Time limit in seconds until all workers are placed in the cluster and have loaded the model."""
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    """How the model is sharded: `fsdp2`, or `megatron` (the extra `verl-megatron`) with tensor, pipeline, context and expert
    parallelism, set in the table `megatron`. Megatron trains all weights, without LoRA or a critic."""
    model: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of verl's `HFModelConfig`, passed unchanged."""
    sharding: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of verl's `FSDPEngineConfig`, passed unchanged: `param_offload`, `ulysses_sequence_parallel_size`,
    ..."""
    megatron: dict[str, JsonValue] = Field(default_factory=dict)
    """With the strategy `megatron`, instead of `sharding`: further options of verl's `McoreEngineConfig`, passed unchanged:
    `tensor_model_parallel_size`, `pipeline_model_parallel_size`, `expert_model_parallel_size`, `optimizer_offload`, ..."""
    optimizer: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of verl's `FSDPOptimizerConfig`, or `McoreOptimizerConfig` with Megatron, passed unchanged."""


def whole_alpha(lora: LoraConfig) -> int:
    """Return `alpha` as verl takes it. Raises `ConfigError` for a fraction."""
    if lora.alpha != int(lora.alpha):
        raise ConfigError(f"engine.lora.alpha is {lora.alpha}: verl takes whole numbers only")
    return int(lora.alpha)
