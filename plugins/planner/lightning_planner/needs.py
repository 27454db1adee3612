"""The stages that say what a run needs of memory: of that of its GPUs, from the planner's own formulas, or of this machine's,
where both the engine and vLLM compute on its CPU.

The invariant: only models are counted whose parameters are counted exactly; of others nothing is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning.config import Config, LoraConfig
from lightning.errors import ConfigError, PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import (
    DTYPE_BYTES,
    TRAINING_BYTES,
    Demand,
    choose,
    pick_device,
    shares_gpu,
    this_machine,
)
from lightning.policy_server.model_folder import folder_tensors, read_facts
from lightning.policy_server.servers import served_models, settings_of_servers
from lightning.trainer.needs import Need, adapter_weights, ranks_of_adapters, size
from lightning.trainer.run_stages import API, RunStage, Start

from lightning_planner.memory import Item, ranks_of, training_items
from lightning_planner.shape import read_shape


class GpuNeeds(RunStage):
    """What training needs of each GPU that trains, and vLLM's share where it stays on the same GPU meanwhile."""

    api = API

    async def needs(self, start: Start) -> Sequence[Need]:
        """Return the need of the memory of the GPU that trains, or of the first of several; nothing for a model that the
        planner cannot count."""
        config = start.config
        ranks, engine = ranks_of(config.engine) if start.described.get("engine") == "verl" else 1, config.engine
        if rank := ranks_of_adapters(config):
            engine = engine.model_copy(update={"lora": LoraConfig(rank=rank)})
        try:
            items = training_items(read_shape(str(start.model)), ranks, engine)
        except ConfigError:
            return []
        free, whole = gpu_memory(config.engine.device)
        if (
            shares_gpu(config) and config.trainer.max_staleness
        ):  # otherwise vLLM gives its memory back while the engine trains
            share = config.policy_server.gpu_memory_utilization
            items = [*items, Item("vLLM", share * whole, f"gpu_memory_utilization = {share:g}")]
        cure = "Lower engine.tokens_per_microbatch, set engine.gradient_checkpointing = true"
        cure += "" if engine.lora else ", train adapters alone (engine.lora)"
        cure += f", or train on more GPUs than {ranks} (--engine verl --set engine.verl.world_size=N)"
        parts = ", ".join(f"{item.name} {size(item.bytes)}" for item in items)
        return [Need("the memory of each GPU that trains", sum(item.bytes for item in items), parts, free, cure)]


class CpuNeeds(RunStage):
    """What training and vLLM need of the memory of this machine, where both compute on its CPU."""

    api = API

    async def needs(self, start: Start) -> Sequence[Need]:
        """Return the need of memory; nothing where it is not known."""
        engine = str(start.described.get("engine"))
        need = await asyncio.to_thread(memory_need, start.model, start.config, engine, start.requests)
        return [] if need is None else [need]


def memory_need(model: Path, config: Config, engine: str, requests: int) -> Need | None:
    """Return what training and vLLM need of the memory of this machine, where both compute on its CPU. `config` has the dtypes,
    `requests` is how many requests run at once. None where this is not known: another engine, a GPU, or a model whose
    weights cannot be read."""
    device = config.engine.device
    if engine != "torch" or device not in ("auto", "cpu") or pick_device(config.policy_server) != "cpu":
        return None
    models, machine, parts = served_models(model, config), this_machine(), list[str]()
    trained = served = 0
    several = plugins().policy_set(config) is not None
    count = 0 if config.policy_server.is_elsewhere else len(settings_of_servers(config)) // len(models)
    for each in models:
        try:
            facts = read_facts(each.folder)
            shapes = [spec.shape for spec in folder_tensors(each.folder).values()]
        except PolicyServerError:
            return None
        trained += _training_bytes(facts.parameters, shapes, each.trained, config.engine.dtype)
        if count:
            demand = Demand(-(-requests // count), servers=count * len(models))
            chosen = choose(config.policy_server, facts, "cpu", machine, demand=demand)
            numbers = facts.parameters + (served_adapters(shapes, each.trained) if several else 0)
            weights, cache = numbers * DTYPE_BYTES.get(chosen.dtype, 2), chosen.kv_cache_bytes or 0
            of, times = f" of {each.folder.name}" * (len(models) > 1), f", in each of {count} processes" * (count > 1)
            parts.append(f"vLLM{of} {size(weights)} of weights and {size(cache)} of KV cache{times}")
            served += count * (weights + cache)
    return Need(
        "memory",
        trained + served,
        ", ".join([f"training {size(trained)} and its activations", *parts]),
        machine.memory,
        "The system may end the run. End other programs, take a smaller model"
        + ("" if all(None not in each.trained for each in models) else ", or train adapters alone (engine.lora)"),
    )


def _training_bytes(
    parameters: int, shapes: Sequence[tuple[int, ...]], trained: Sequence[LoraConfig | None], dtype: str
) -> int:
    """Return the bytes of weights, gradients and moments of policies that begin as one model. Their adapters share that model
    in memory."""
    adapters = [adapter_weights(shapes, lora) for lora in trained]
    base = parameters * DTYPE_BYTES.get(dtype, 2) if any(adapters) else 0
    return base + TRAINING_BYTES * sum(own or parameters for own in adapters)


def with_all_adapters(config: Config) -> Config:
    """Return the settings with the adapters of all policies as those of one: together they have as many weights. Without
    adapters if a policy trains all weights."""
    if plugins().policy_set(config) is None:
        return config
    rank = ranks_of_adapters(config)
    lora = LoraConfig(rank=rank) if rank else None
    return config.model_copy(update={"engine": config.engine.model_copy(update={"lora": lora})})


def served_adapters(shapes: Sequence[tuple[int, ...]], trained: Sequence[LoraConfig | None]) -> int:
    """Return the least number of weights of adapters that a vLLM has with several policies: as many for each of its policies
    that trains adapters as for that with the highest rank."""
    ranks = [lora.rank for lora in trained if lora]
    return len(ranks) * max(ranks, default=0) * sum(sum(shape) for shape in shapes if len(shape) == 2)


def gpu_memory(device: str) -> tuple[float, float]:
    """Return the free bytes of a GPU, and all of its bytes. `device` is as in `engine.device`: auto or cuda is the first GPU,
    cuda:1 the second."""
    import torch

    free, whole = torch.cuda.mem_get_info(int(device.partition(":")[2] or 0))
    return float(free), float(whole)


def on_gpus(config: Config) -> GpuNeeds | None:
    """Make the stage for a run that trains on a GPU; None for a run on a CPU, or without torch: the engine asks for torch."""
    if find_spec("torch") is None:
        return None
    import torch

    trains = config.engine.device == "auto" or config.engine.device.startswith("cuda")
    return GpuNeeds() if trains and torch.cuda.is_available() else None
