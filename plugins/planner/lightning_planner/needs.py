"""The stage that says what a run needs of the memory of its GPUs, from the planner's own formulas.

The invariant: only models are counted whose parameters the formulas count exactly; of others nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from lightning.config import Config
from lightning.errors import ConfigError
from lightning.policy_server.auto_settings import shares_gpu
from lightning.trainer.needs import Need, size
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
        ranks = ranks_of(config.engine) if start.described.get("engine") == "verl" else 1
        try:
            items = training_items(read_shape(str(start.model)), ranks, config.engine)
        except ConfigError:
            return []
        free, whole = gpu_memory(config.engine.device)
        if (
            shares_gpu(config) and config.trainer.max_staleness
        ):  # otherwise vLLM gives its memory back while the engine trains
            share = config.policy_server.gpu_memory_utilization
            items = [*items, Item("vLLM", share * whole, f"gpu_memory_utilization = {share:g}")]
        cure = "Lower engine.tokens_per_microbatch, set engine.gradient_checkpointing = true"
        cure += "" if config.engine.lora else ", train adapters alone (engine.lora)"
        cure += f", or train on more GPUs than {ranks} (--engine verl --set engine.verl.world_size=N)"
        parts = ", ".join(f"{item.name} {size(item.bytes)}" for item in items)
        return [Need("the memory of each GPU that trains", sum(item.bytes for item in items), parts, free, cure)]


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
