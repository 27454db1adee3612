"""The section of the verl engine. Every field is documented here and nowhere else."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from lightning.config.section import Section


class VerlConfig(Section):
    """The verl engine: training on many GPUs, by verl's workers on Ray. What the `engine` section says holds for it too."""

    world_size: int = Field(default=1, ge=0)
    """Worker processes, one for each GPU (on a machine without one: processes on its CPU); 0 computes in the trainer's own
    process, without Ray."""
    nodes: int = Field(default=1, ge=1)
    """Machines that the workers are spread over evenly. All must see the same files: the model, and the run's folder."""
    address: str = ""
    """The Ray cluster: `auto`, or `HOST:6379` of its head; empty starts one on this machine."""
    restarts: int = Field(default=3, ge=0)
    """How often within one step workers that died are started again, from the last checkpoint; the step is then taken again."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds until all workers must have found their places in the cluster and loaded the model."""
    strategy: Literal["fsdp2", "megatron"] = "fsdp2"
    """How the model is cut for the workers: `fsdp2` gives each a piece of every weight; `megatron` (the extra `verl-megatron`)
    cuts by tensors, layers, tokens and experts, as the table `megatron` says. Megatron trains all weights, without LoRA or a
    critic; it has run on CPUs, not on a GPU yet."""
    model: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of verl's `HFModelConfig`, as they are."""
    sharding: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of verl's `FSDPEngineConfig`, as they are: `param_offload`, `ulysses_sequence_parallel_size`, ..."""
    megatron: dict[str, JsonValue] = Field(default_factory=dict)
    """In the place of `sharding` where the strategy is `megatron`: further options of verl's `McoreEngineConfig`, as they are:
    `tensor_model_parallel_size`, `pipeline_model_parallel_size`, `expert_model_parallel_size`, `optimizer_offload`, ..."""
    optimizer: dict[str, JsonValue] = Field(default_factory=dict)
    """Further options of verl's `FSDPOptimizerConfig`, or `McoreOptimizerConfig` with Megatron, as they are."""
