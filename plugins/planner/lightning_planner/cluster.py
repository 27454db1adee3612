"""GPUs to plan for: their data sheets, how they are divided among the trainer and the policy servers, and assumptions on how
well they are used.

The invariant: peak numbers are the manufacturer's, dense and without sparsity. Every share of a peak is an assumption with a
name, can be set, and is printed with the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from lightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: `memory` in bytes; per second, bfloat16 operations, bytes of memory traffic, and bytes over links to its
    neighbours (one way)."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float = 32e9


GPUS: Mapping[str, Gpu] = {
    # https://www.nvidia.com/en-us/data-center/h100/ (SXM): 80 GB, 989 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s both ways
    "h100": Gpu("H100 SXM 80 GB", 80e9, 989e12, 3.35e12, 450e9),
    # https://www.nvidia.com/en-us/data-center/h200/ (SXM): 141 GB, 989 TFLOP/s, 4.8 TB/s, NVLink 900 GB/s both ways
    "h200": Gpu("H200 SXM 141 GB", 141e9, 989e12, 4.8e12, 450e9),
    # https://www.nvidia.com/en-us/data-center/a100/ (SXM): 80 GB, 312 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s both ways
    "a100": Gpu("A100 SXM 80 GB", 80e9, 312e12, 2.039e12, 300e9),
}
_OWN = {"memory": ("memory", 1e9), "tflops": ("flops", 1e12), "bandwidth": ("bandwidth", 1e12), "link": ("link", 1e9)}


def find_gpu(text: str) -> Gpu:
    """Return a GPU: a preset by its name, or `memory=48,tflops=362,bandwidth=0.864[,link=32]` in GB, TFLOP/s, TB/s and GB/s.

    Raises `ConfigError` for anything else.
    """
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, number = part.partition("=")
        try:
            name, unit = _OWN[key.strip()]
            values[name] = float(number) * unit
        except (KeyError, ValueError):
            values = {}
            break
    if not {"memory", "flops", "bandwidth"} <= values.keys() or min(values.values()) <= 0:
        raise ConfigError(
            f"{text!r} is no GPU: use one of {', '.join(GPUS)}, or its data sheet as "
            "memory=48,tflops=362,bandwidth=0.864,link=32 (GB, dense bfloat16 TFLOP/s, TB/s, GB/s)"
        )
    return Gpu("a GPU of your own", **values)


def _assumed(value: float, why: str) -> float:
    found: float = field(default=value, metadata={"why": why})
    return found


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions of a plan for GPUs, on which nothing was measured. Each field's metadata has the reason."""

    train_mfu: float = _assumed(
        0.35, "share of peak operations in training; arXiv 2407.21783 reached 0.38 to 0.43 on H100"
    )
    prompt_mfu: float = _assumed(0.5, "share of peak operations while prompts are computed")
    bandwidth_share: float = _assumed(0.6, "share of peak memory traffic while tokens are decoded")
    iteration_seconds: float = _assumed(0.003, "scheduling and sampling of each of vLLM's iterations, on its CPU")
    sequence_seconds: float = _assumed(1e-5, "the same for each sequence in an iteration")
    exchange_seconds: float = _assumed(
        2e-5, "the least that a sum over the GPUs of one vLLM takes, twice in each layer"
    )
    call_seconds: float = _assumed(0.01, "network and client of each call")
    gateway_processes: float = _assumed(
        4, "gateway processes where gateway.processes is null: one for eight cores, at most 4"
    )
    network: float = _assumed(50e9, "bytes a second for each GPU between machines (400 Gb/s)")
    files: float = _assumed(2e9, "bytes a second of the file system, for weights and checkpoints")
    max_calls: float = _assumed(256, "calls in one server's batch (vLLM's --max-num-seqs)")
    gpus_per_machine: float = _assumed(8, "GPUs that NVLink connects")
    overhead: float = _assumed(3e9, "bytes of CUDA contexts, NCCL and fragmentation on a GPU")

    def listed(self) -> list[tuple[str, float, str]]:
        """Return the name, value and reason of each assumption."""
        return [(one.name, getattr(self, one.name), one.metadata["why"]) for one in dataclasses.fields(self)]


def assume(given: Sequence[str]) -> Assumptions:
    """Return the assumptions, with those in `given` replaced (`train_mfu=0.4`). Raises `ConfigError` for an unknown name or a
    number that is not above 0."""
    names = [one.name for one in dataclasses.fields(Assumptions)]
    values: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition("=")
        if name not in names:
            near = get_close_matches(name, names, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f": there are {', '.join(names)}"
            raise ConfigError(f"there is no assumption {name!r}{meant}")
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigError(f"--assume {text}: {number!r} is not a number") from None
        if not values[name] > 0:
            raise ConfigError(f"--assume {text}: the number has to be above 0")
    return Assumptions(**values)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of `gpus` GPUs of one kind. `serving` of them only serve; if `serving` is 0, all GPUs train, and some of them
    also serve.

    The policy has `replicas` servers of `gpus_each` GPUs each (0: the GPUs that may serve, divided among the servers), each
    with the whole model. `gateways` processes beside the trainer's answer the agents' calls (0: the trainer's own). Raises
    `ConfigError` for a division that leaves no GPU for training, and for servers that need another number of GPUs.
    """

    gpu: Gpu
    gpus: int
    serving: int = 0
    replicas: int = 1
    gpus_each: int = 0
    gateways: int = 0
    assumptions: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"--gpus {self.gpus}: a cluster has at least one GPU: give 1 or more")
        if not 0 <= self.serving < self.gpus:
            raise ConfigError(f"--serve-on {self.serving} of {self.gpus} GPUs: at least one GPU has to train")
        taken, most = self.replicas * self.server_gpus, self.serving or self.gpus
        if not self.server_gpus or taken > most or (self.serving and taken < most):
            each = f" with policy_server.gpus_each = {self.gpus_each}" if self.gpus_each else ""
            where = f"--serve-on gives them {self.serving}" if self.serving else f"the cluster has {self.gpus}"
            raise ConfigError(
                f"policy_server.replicas = {self.replicas}{each} cannot be dealt the GPUs: {where}, and each server has "
                f"equally many. Give numbers whose product is {most}{'' if self.serving else ' or less'}"
            )

    @property
    def shared(self) -> bool:
        """Whether the policy servers' GPUs also train."""
        return self.serving == 0

    @property
    def training(self) -> int:
        """The number of GPUs that train."""
        return self.gpus - self.serving

    @property
    def server_gpus(self) -> int:
        """The number of GPUs of each policy server."""
        return self.gpus_each or (self.serving or self.gpus) // self.replicas

    @property
    def exchange(self) -> float:
        """Bytes per second that each training GPU can exchange with the others."""
        return self.link(self.training)

    def link(self, gpus: int) -> float:
        """Return the bytes per second that each of so many GPUs can exchange with the others."""
        inside = gpus <= self.assumptions.gpus_per_machine
        return self.gpu.link if inside else min(self.gpu.link, self.assumptions.network)
