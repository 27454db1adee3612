"""Translates our settings to verl's configuration.

The invariant: every option of verl can be given. An option that verl does not know is refused by name, and so is one that this
engine decides, with the setting that decides it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.engines.loading import read_model
from lightning.engines.protocol import OptimizerConfig
from lightning.errors import ConfigError

from lightning_verl import api
from lightning_verl.config import VerlConfig, whole_alpha
from lightning_verl.megatron_settings import (
    OWN_ENGINE,
    OWN_OPTIMIZER,
    SHARING,
    given,
    megatron_engine,
    megatron_optimizer,
    refuse,
    refuse_model,
)

if TYPE_CHECKING:
    from lightning.config import Config

T = TypeVar("T")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
OWN = {
    "model": {
        "path": "the model that is trained",
        "lora_rank": "engine.lora.rank",
        "lora_alpha": "engine.lora.alpha",
        "target_modules": "engine.lora.target_modules",
        "enable_gradient_checkpointing": "engine.gradient_checkpointing",
        "use_fused_kernels": "the engine, which computes logprobs and entropies in chunks of tokens",
        "model_type": "the engine",
        "load_tokenizer": "the engine",
    },
    "sharding": {
        "strategy": "engine.verl.strategy",
        "max_token_len_per_gpu": "engine.tokens_per_microbatch",
        "infer_max_token_len_per_gpu": "engine.tokens_per_microbatch",
        "use_dynamic_bsz": "the engine",
        "forward_only": "the engine",
        "reshard_after_forward": "the engine, which reads shards",
        "mixed_precision": "engine.dtype",
        "seed": "trainer.seed",
        "entropy_checkpointing": "the engine, which computes entropies in chunks of tokens",
        "entropy_from_logits_with_chunking": "the engine, which computes entropies in chunks of tokens",
        "entropy_from_logits_chunk_size": "the engine, which computes entropies in chunks of tokens",
    },
    "optimizer": {
        "lr": "engine.lr",
        "betas": "engine.betas",
        "weight_decay": "engine.weight_decay",
        "clip_grad": "engine.max_grad_norm",
        "grad_clip": "engine.max_grad_norm",
        "override_optimizer_config": "engine.betas and engine.eps",
        "lr_warmup_steps": "engine.warmup_steps",
        "lr_scheduler_type": "engine.warmup_steps",
    },
}
"""Options of verl that other settings decide, with that setting."""


def worker_config(config: Config, model: Path, optimizer: OptimizerConfig, *, seed: int, device: str) -> Any:
    """Return verl's `TrainingWorkerConfig`. Raises `ConfigError` for options that verl does not know or cannot meet,
    `MissingExtraError` for a strategy that is not installed."""
    theirs = VerlConfig.of(config)
    cut, unused, other = (
        ("megatron", "sharding", "fsdp2") if theirs.strategy == "megatron" else ("fsdp2", "megatron", "megatron")
    )
    if options := getattr(theirs, unused):
        raise ConfigError(
            f"engine.verl.{unused} is not for engine.verl.strategy = {cut}: leave {', '.join(sorted(options))} out, or set "
            f"engine.verl.strategy = {other}"
        )
    if theirs.strategy == "megatron":
        refuse(config, device)
    of_model = _model(config, model, device)
    if theirs.strategy == "megatron":
        refuse_model(config, of_model.hf_config)
        of_engine, ours = _megatron(config, seed, device), megatron_optimizer(optimizer)
        of_optimizer = _made(api.McoreOptimizerConfig, "optimizer", ours, theirs.optimizer, OWN_OPTIMIZER)
    else:
        of_engine = _fsdp2(config, of_model, seed, device)
        of_optimizer = _made(api.FSDPOptimizerConfig, "optimizer", _optimizer(optimizer), theirs.optimizer)
    return api.TrainingWorkerConfig(
        model_type="language_model",
        model_config=of_model,
        engine_config=of_engine,
        optimizer_config=of_optimizer,
        checkpoint_config=api.CheckpointConfig(),
    )


def teacher_config(config: Config, teacher: Path, optimizer: OptimizerConfig, device: str) -> Any:
    """Return verl's `TrainingWorkerConfig` of a teacher, which is loaded beside the trained model and never trained: all its
    weights, without adapters; with a GPU they are on the CPU between passes."""
    verl, engine = VerlConfig.of(config), config.engine
    sharding = {**verl.sharding, **({"param_offload": True} if device != "cpu" else {})}
    plain = engine.model_copy(
        update={"lora": None, "gradient_checkpointing": False, "verl": verl.model_copy(update={"sharding": sharding})}
    )
    return worker_config(config.model_copy(update={"engine": plain}), teacher, optimizer, seed=0, device=device)


def refuse_holes(made: Any) -> None:
    """Raise `EngineError` for a folder that does not have all weights of the model. verl's workers read it the same way, and
    would make up missing weights without a word."""
    model = made.model_config
    read_model(
        Path(model.local_path),
        api.get_hf_auto_model_class(model.hf_config),
        config=model.hf_config,
        trust_remote_code=model.trust_remote_code,
        device_map="meta",
        attn_implementation="eager",  # this machine may lack what the workers' attention needs
    )


def compute_dtype(config: Config, device: str) -> str:
    """Return the dtype of computation and export, `float32` or `bfloat16`. Weights are trained in float32."""
    auto = "float32" if device == "cpu" else "bfloat16"
    return auto if config.engine.dtype == "auto" else config.engine.dtype


def _model(config: Config, model: Path, device: str) -> Any:
    ours, theirs = config.engine, dict(VerlConfig.of(config).model)
    override = theirs.pop("override_config", {})
    if not isinstance(override, dict):
        raise ConfigError("engine.verl.model.override_config must be a table of options of the model's configuration")
    flash = compute_dtype(config, device) == "bfloat16" and device == "cuda" and find_spec("flash_attn") is not None
    values: dict[str, object] = {
        "path": str(model.resolve()),
        "use_remove_padding": True,
        "enable_gradient_checkpointing": ours.gradient_checkpointing,
        # Packed rows are kept apart by their positions; flash attention does not compute attention between rows.
        "override_config": {"attn_implementation": "flash_attention_2" if flash else "sdpa", **override},
    }
    if ours.lora is not None:
        modules = ours.lora.target_modules
        values |= {
            "lora_rank": ours.lora.rank,
            "lora_alpha": whole_alpha(ours.lora),
            "target_modules": modules if isinstance(modules, str) else list(modules),
        }
    return _made(api.HFModelConfig, "model", values, theirs)


def _fsdp2(config: Config, of_model: Any, seed: int, device: str) -> Any:
    values = {
        "strategy": "fsdp2",
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": config.engine.tokens_per_microbatch,
        "infer_max_token_len_per_gpu": config.engine.tokens_per_microbatch,
        "seed": seed,
        "mixed_precision": {"param_dtype": _DTYPES[compute_dtype(config, device)], "reduce_dtype": "fp32"},
        "use_torch_compile": device == "cuda",
    }
    made = _made(api.FSDPEngineConfig, "sharding", values, VerlConfig.of(config).sharding)
    if made.ulysses_sequence_parallel_size != 1:
        _refuse_shared_rows(config, made.ulysses_sequence_parallel_size, of_model.hf_config)
    return made


def _refuse_shared_rows(config: Config, size: object, model: Any) -> None:
    """Raise `ConfigError` for a number of workers that cannot share the rows of this model (its configuration)."""
    setting = SHARING["fsdp2"]
    attention = model._attn_implementation  # noqa: SLF001 — where transformers keeps it
    if attention != "flash_attention_2":
        raise ConfigError(
            f"{setting} needs flash_attention_2, and the model computes with {attention}: install flash-attn and train in "
            "bfloat16 on GPUs, or leave it out"
        )
    if hasattr(model, "vision_config"):
        raise ConfigError(f"{setting}: workers cannot share the rows of a model with vision: leave it out")
    workers, text = max(1, VerlConfig.of(config).world_size), model.get_text_config()
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    fits = [
        own for own in range(1, workers + 1)
        if workers % own == heads % own == 0 and (keys % own == 0 or own % keys == 0)
    ]  # fmt: skip
    if size not in fits:
        choice = f"set it to {' or '.join(map(str, fits[1:]))}" if fits[1:] else "leave it out"
        raise ConfigError(
            f"{setting} is {size!r}, and {workers} workers that divide {heads} attention heads and {keys} heads of keys evenly "
            f"cannot share rows so: {choice}"
        )


def _megatron(config: Config, seed: int, device: str) -> Any:
    dtype = compute_dtype(config, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that mbridge is the older bridge, and that one rank shares out no sequence
        made = _made(api.McoreEngineConfig, "megatron", megatron_engine(config, seed), given(config), OWN_ENGINE)
    object.__setattr__(made, "dtype", dtype)  # verl's check knows bfloat16 alone, its engine float32 as well
    return made


def _optimizer(optimizer: OptimizerConfig) -> dict[str, object]:
    return {
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.max_grad_norm,
        "override_optimizer_config": {"eps": optimizer.eps},
    }


def _made(
    kind: type[T],
    section: str,
    ours: Mapping[str, object],
    theirs: Mapping[str, object],
    own: Mapping[str, str] | None = None,
) -> T:
    """Make one of verl's dataclasses from our values and the user's. Raises `ConfigError` for an unknown option, and for one in
    `own`, which another setting decides."""
    own = OWN[section] if own is None else own
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]  # verl has no types
    for name in theirs:
        setting = f"engine.verl.{section}.{name}"
        if name in own:
            raise ConfigError(f"{setting} is decided by {own[name]}: leave it out")
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{setting}: verl's {kind.__name__} has no option {name!r}.{meant}")
    try:
        return kind(**{**ours, **theirs})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"verl refuses the options of engine.verl.{section}: {error}") from error
