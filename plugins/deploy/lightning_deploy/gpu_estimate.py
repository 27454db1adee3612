"""What the trainer's machine has to have: GPUs by what the engine uses, memory by the planner's formulas, disk by checkpoints.

The invariant: the number of GPUs is what the command would use, never more; a model that does not fit there is refused with
what would help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning.config import Config
from lightning.errors import ConfigError
from lightning_planner.cluster import GPUS, Cluster, find_gpu
from lightning_planner.roofline import Memory, memory
from lightning_planner.shape import Shape, read_shape

GIB = 2**30
LEAST_MEMORY, LEAST_DISK = 32, 60
"""GiB of a machine without counting: vLLM, torch and the agents' records; images of the hub, logs and the database's dumps."""
MOST = 8
"""GPUs that one machine has at most."""


@dataclass(frozen=True, slots=True)
class MachineNeeds:
    """One machine: `gpus` of the kind `gpu` (a name of the planner's table), GiB of memory, shared memory and disk."""

    gpu: str
    gpus: int
    memory: int
    shared_memory: int
    disk: int
    uses: tuple[Memory, ...]
    notes: tuple[str, ...]


def estimate(model: str, config: Config, engine: str, gpu: str) -> MachineNeeds:
    """The needs of a training. Raises `ConfigError` for one that does not fit, or that needs several machines."""
    if gpu not in GPUS:
        raise ConfigError(f"{gpu!r} is no GPU that deployments know: use one of {', '.join(GPUS)}")
    gpus = _gpus(config, engine)
    try:
        shape = read_shape(model)
    except ConfigError as error:
        return MachineNeeds(
            gpu, gpus, LEAST_MEMORY, 8, LEAST_DISK, (), (f"memory was not estimated, so check that it fits: {error}",)
        )
    uses = _uses(shape, config, gpu, gpus)
    _check_fits(shape, config, gpu, gpus, uses)
    weights = 4 * shape.parameters
    # Weights pass through memory on their way to vLLM, and the optimizer's two moments on their way to a checkpoint.
    machine = LEAST_MEMORY + math.ceil(3 * weights / GIB)
    kept = (config.trainer.keep_checkpoints + 1) * 3 * weights
    return MachineNeeds(
        gpu, gpus, machine, min(64, 8 * gpus), LEAST_DISK + math.ceil((kept + weights) / GIB), tuple(uses), ()
    )


def _gpus(config: Config, engine: str) -> int:
    if engine != "verl":
        return 1
    workers, nodes = config.engine.verl.world_size, config.engine.verl.nodes
    if nodes > 1 or workers > MOST:
        raise ConfigError(
            f"{workers} workers on {nodes} machines: deployments are made for one machine of up to {MOST} GPUs. Start Ray on "
            "several yourself, and set engine.verl.address (docs/multi-gpu.md)"
        )
    return max(1, workers)


def _uses(shape: Shape, config: Config, gpu: str, gpus: int) -> list[Memory]:
    return memory(shape, Cluster(find_gpu(gpu), gpus), config.engine, config.policy_server.gpu_memory_utilization)


def _check_fits(shape: Shape, config: Config, gpu: str, gpus: int, uses: list[Memory]) -> None:
    short = next((use for use in uses if not use.fits), None)
    if short is None:
        return
    enough = [f"{count} x {name}" for name in GPUS if (count := _least(shape, config, name))]
    cure = "train adapters (engine.lora), or fewer tokens at once (engine.tokens_per_microbatch)"
    if enough:
        cure = f"it would fit on {', '.join(enough)} (--gpu; --engine verl --set engine.verl.world_size=N)"
    raise ConfigError(
        f"{shape.name} needs {short.used / 1e9:.0f} GB of each of {gpus} {gpu} for {short.role}, which has "
        f"{short.available / 1e9:.0f}: {cure}"
    )


def _least(shape: Shape, config: Config, gpu: str) -> int:
    """The smallest number of GPUs of one machine on which it fits; 0 for none."""
    fitting = (n for n in (1, 2, 4, MOST) if all(use.fits for use in _uses(shape, config, gpu, n)))
    return next(fitting, 0)
