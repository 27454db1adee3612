"""Our settings for Megatron, and refusals of what it cannot do here. Importing this imports neither verl nor Megatron.

The invariant: what the engine cannot do with Megatron is refused by name before a worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from math import lcm
from typing import TYPE_CHECKING

from lightning.engines.protocol import Head, OptimizerConfig
from lightning.errors import ConfigError, MissingExtraError
from lightning.losses.protocol import Loss, needs_top_logprobs, users_name_of

from lightning_verl.config import VerlConfig

if TYPE_CHECKING:
    from lightning.config import Config
    from pydantic import JsonValue

PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
EXPERTS = ("expert_tensor_parallel_size", "expert_model_parallel_size")
TRANSFORMER, DATA_PARALLEL = "override_transformer_config", "override_ddp_config"
OWN_ENGINE = {
    "strategy": "engine.verl.strategy",
    "use_megatron_fsdp": "engine.verl.strategy",
    "dtype": "engine.dtype",
    "seed": "trainer.seed",
    "max_token_len_per_gpu": "engine.tokens_per_microbatch",
    "infer_max_token_len_per_gpu": "engine.tokens_per_microbatch",
    "use_dynamic_bsz": "the engine",
    "dynamic_context_parallel": "the engine, which deals the rows out itself",
    "use_remove_padding": "the engine, which packs rows",
    "use_fused_kernels": "the engine, whose losses want the entropy",
    "use_mbridge": "the engine, which loads Hugging Face models",
    "use_distributed_optimizer": "the engine, whose checkpoints hold each rank's share",
    "use_dist_checkpointing": "the engine, which writes safetensors",
    "dist_checkpointing_path": "the engine, which writes safetensors",
    "dist_checkpointing_prefix": "the engine, which writes safetensors",
    "dist_ckpt_optim_fully_reshardable": "the engine, which writes safetensors",
    "distrib_optim_fully_reshardable_mem_efficient": "the engine, which writes safetensors",
    "forward_only": "the engine",
    "router_replay": "the engine, which has no recorded routes",
    "qat": "the engine, which exports the weights that it trains",
    "param_offload": "the engine, which keeps a gradient from its passes to the step: verl's offloading forgets it",
    "virtual_pipeline_model_parallel_size": "the engine, whose batches are of any number of rows",
}
"""Options of verl's `McoreEngineConfig` that other settings decide, with that setting."""
OWN_TRANSFORMER = {
    "attention_dropout": "the engine, which has none",
    "hidden_dropout": "the engine, which has none",
    "recompute_granularity": "engine.gradient_checkpointing",
    "recompute_method": "engine.gradient_checkpointing",
    "recompute_num_layers": "engine.gradient_checkpointing",
    "moe_router_bias_update_rate": "the engine, which changes a model by its gradient alone",
}
OWN_DATA_PARALLEL = {
    "overlap_param_gather": "the engine, which exports the weights right after a step",
    "use_distributed_optimizer": OWN_ENGINE["use_distributed_optimizer"],
}
OWN_OPTIMIZER = {
    "lr": "engine.lr",
    "betas": "engine.betas",
    "weight_decay": "engine.weight_decay",
    "clip_grad": "engine.max_grad_norm",
    "grad_clip": "engine.max_grad_norm",
    "lr_warmup_steps": "engine.warmup_steps",
    "lr_decay_style": "engine.warmup_steps",
    "lr_decay_steps": "engine.warmup_steps",
    "total_training_steps": "engine.warmup_steps",
    "optimizer": "the engine, whose checkpoints hold Adam's moments",
    "use_precision_aware_optimizer": "the engine, whose checkpoints hold float32 moments",
    "override_optimizer_config": "engine.betas and engine.eps",
}
"""Options of verl's `McoreOptimizerConfig` that other settings decide, with that setting."""


def refuse(config: Config, device: str) -> None:
    """Raise `ConfigError` for settings that the engine cannot meet with Megatron, `MissingExtraError` where Megatron is not
    installed."""
    engine, options = config.engine, VerlConfig.of(config).megatron
    if engine.lora is not None:
        raise ConfigError(
            "engine.lora has no adapters in a model that Megatron cuts: leave it out, or set engine.verl.strategy = fsdp2"
        )
    sizes = {name: _size(config, name) for name in (*PARALLEL, *EXPERTS)}
    _refuse_sizes(sizes, max(1, VerlConfig.of(config).world_size))
    older = bool(options.get("vanilla_mbridge", True))
    if device == "cpu":
        if sizes["context_parallel_size"] > 1:
            raise ConfigError(
                "engine.verl.megatron.context_parallel_size needs Transformer Engine's attention, which computes on GPUs: "
                "leave it out on a CPU"
            )
        if not older:
            raise ConfigError(
                "engine.verl.megatron.vanilla_mbridge = false is Megatron-Bridge, whose models compute on GPUs: leave it out "
                "on a CPU"
            )
    elif not _installed("transformer_engine"):
        raise ConfigError(
            "engine.verl.strategy = megatron computes with Transformer Engine on GPUs, which is not installed: pip install "
            "--no-build-isolation 'transformer-engine[pytorch]'"
        )
    for module in ("megatron.core", "mbridge" if older else "megatron.bridge"):
        if not _installed(module):
            raise MissingExtraError("verl-megatron", module)


def refuse_model(config: Config, hf_config: object) -> None:
    """Raise `ConfigError` for a model that mbridge would compute wrongly."""
    found = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kinds = [one for one in found.values() if isinstance(one, dict)] or [
        found
    ]  # some models have them for each kind of layer
    scaled = {str(one.get("rope_type", one.get("type", "default"))) for one in kinds} - {"default"}
    if scaled and VerlConfig.of(config).megatron.get("vanilla_mbridge", True):
        raise ConfigError(
            f"the model scales its positions ({', '.join(sorted(scaled))}), which mbridge leaves out: set "
            "engine.verl.strategy = fsdp2, or engine.verl.megatron.vanilla_mbridge = false, which has not been run"
        )


def refuse_beside(config: Config, *, head: Head | None, teacher: bool) -> None:
    """Raise `ConfigError` for a head, and for a teacher as reference model, where Megatron divides the model."""
    if head and VerlConfig.of(config).strategy == "megatron":
        raise ConfigError(
            f"the head {head.name!r} has no hidden states to value where Megatron cuts the model: set "
            "engine.verl.strategy = fsdp2, or take an algorithm and a credit function without one"
        )
    if teacher and VerlConfig.of(config).strategy == "megatron":
        raise ConfigError(
            "Megatron has the trained model's own weights alone for a reference, and a teacher is another model: set "
            "engine.verl.strategy = fsdp2 to distill it"
        )


def refuse_loss(config: Config, loss: Loss) -> None:
    """Raise `ConfigError` for a loss that wants the most probable tokens, where Megatron divides the model."""
    if (wanted := needs_top_logprobs(loss)) and VerlConfig.of(config).strategy == "megatron":
        raise ConfigError(
            f"the loss {users_name_of(loss)} has needs_top_logprobs = {wanted}, and Megatron cuts the vocabulary, so that no "
            "rank knows the most probable tokens: set engine.verl.strategy = fsdp2, or take another loss"
        )


def layout(config: Config) -> dict[str, object]:
    """Return how a training state is divided: a job that reads it must be divided the same way. FSDP2's can be read by any
    number of ranks."""
    verl = VerlConfig.of(config)
    if verl.strategy != "megatron":
        return {"strategy": verl.strategy}
    sizes = {name: _size(config, name) for name in (*PARALLEL, *EXPERTS)}
    return {"strategy": verl.strategy, "world_size": max(1, verl.world_size), **sizes}


def shared_rows(config: Config) -> int:
    """Return the number of ranks that share each row, which is verl's factor on the tokens of a micro-batch."""
    verl = VerlConfig.of(config)
    if verl.strategy == "megatron":
        return _size(config, "context_parallel_size")
    size = verl.sharding.get("ulysses_sequence_parallel_size", 1)
    return size if isinstance(size, int) and size > 0 else 1  # others are refused when the workers' settings are made


SHARING = {
    "fsdp2": "engine.verl.sharding.ulysses_sequence_parallel_size",
    "megatron": "engine.verl.megatron.context_parallel_size",
}
"""By strategy, the setting of `shared_rows`."""


def given(config: Config) -> dict[str, object]:
    """Return the user's options of `McoreEngineConfig`, except the table that `megatron_engine` merges with ours."""
    return {name: value for name, value in VerlConfig.of(config).megatron.items() if name != TRANSFORMER}


def megatron_engine(config: Config, seed: int) -> dict[str, object]:
    """Return our values of `McoreEngineConfig`."""
    engine = config.engine
    theirs = _table(config, TRANSFORMER, "TransformerConfig", OWN_TRANSFORMER)
    _table(config, DATA_PARALLEL, "DistributedDataParallelConfig", OWN_DATA_PARALLEL)
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ours: dict[str, object] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # The bias would change during the gradient, without an optimizer, and be in no checkpoint.
        "moe_router_bias_update_rate": 0.0,
        **(again if engine.gradient_checkpointing else {}),
    }
    return {
        "strategy": "megatron",
        "vanilla_mbridge": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": engine.tokens_per_microbatch,
        "infer_max_token_len_per_gpu": engine.tokens_per_microbatch,
        "seed": seed,
        TRANSFORMER: {**ours, **theirs},
    }


def megatron_optimizer(optimizer: OptimizerConfig) -> dict[str, object]:
    """Return our values of `McoreOptimizerConfig`. The rate is set before each step; Megatron needs a schedule, which is not
    used."""
    first, second = optimizer.betas
    return {
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.max_grad_norm,
        "lr_warmup_steps": 0,
        "lr_decay_style": "constant",
        "total_training_steps": 1,
        # verl passes no others on.
        "override_optimizer_config": {"adam_beta1": first, "adam_beta2": second, "adam_eps": optimizer.eps},
    }


def _table(config: Config, name: str, kind: str, own: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return the user's options of one of Megatron's configurations. Raises `ConfigError` for an option that another setting
    decides."""
    setting = f"engine.verl.megatron.{name}"
    theirs = VerlConfig.of(config).megatron.get(name, {})
    if not isinstance(theirs, dict):
        raise ConfigError(f"{setting} must be a table of options of Megatron's {kind}")
    for option in sorted(theirs.keys() & own.keys()):
        raise ConfigError(f"{setting}.{option} is decided by {own[option]}: leave it out")
    return theirs


def _size(config: Config, name: str) -> int:
    options = VerlConfig.of(config).megatron
    value = options.get(name)
    if value is None:
        return _size(config, PARALLEL[0]) if name == EXPERTS[0] else 1  # Megatron's own default
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"engine.verl.megatron.{name} is {value!r}, not a number of ranks")
    return value


def _refuse_sizes(sizes: dict[str, int], ranks: int) -> None:
    tensor, pipeline, context = (sizes[name] for name in PARALLEL)
    experts = sizes[EXPERTS[0]] * sizes[EXPERTS[1]]
    one_copy, of_experts = tensor * pipeline * context, experts * pipeline
    if ranks % one_copy or ranks % of_experts:
        said = ", ".join(f"{name} = {value}" for name, value in sizes.items() if value > 1)
        raise ConfigError(
            f"engine.verl.world_size is {ranks}, but engine.verl.megatron has {said}: it must be a multiple of "
            f"{lcm(one_copy, of_experts)}"
        )


def _installed(module: str) -> bool:
    top, _, _ = module.partition(".")
    return find_spec(top) is not None and find_spec(module) is not None
