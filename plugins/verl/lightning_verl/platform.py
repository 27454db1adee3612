"""A CPU platform for verl, with gloo. verl finds it through the entry-point group `verl.plugins`.

The invariant: it is used only where it was asked for (`VERL_PLATFORM=cpu`, which `choose` sets on a machine without an
accelerator), and all other code of verl is what runs on GPUs.
"""

from __future__ import annotations

import os
import resource
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"


class _Device(types.ModuleType):
    """`torch.cpu` with the further functions that verl calls on a device's module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """Return False: verl asks for an accelerator by this."""
        return False

    def max_memory_allocated(self, _device: object = None) -> int:
        """Return the largest resident size of this process so far, in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        """Return the free and the total memory of the machine, in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, _device: object = None) -> str:
        """Return the device's name in logs."""
        return "CPU"

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        """Return torch's random state."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _device: object = None) -> None:
        """Set torch's random state."""
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random state."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: a CPU has no cache to empty and no device to choose."""

    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = _nothing


@PlatformRegistry.register(platform=NAME)
class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl has no types
    """The CPU as a platform: one worker process for each rank, which communicate by gloo."""

    device_name = vendor_name = NAME
    device_module = _Device("lightning_verl_cpu")
    """The module that verl uses in place of `torch.cuda`."""

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return whether the CPU was asked for: a process that merely fails to see its GPU must not train on a CPU."""
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME

    def current_device(self) -> str:
        """Return the device that verl passes to `Tensor.to`, where a number would mean a GPU."""
        return "cpu"

    def device_count(self) -> int:
        """Return 1: one device for each process."""
        return 1

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the name of a variable, which verl requires."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """Return the Ray resource of a worker. A local cluster is started with as many "GPUs" as workers, so that workers are
        placed by the code that runs on GPUs."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return an empty list."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: processes do not share tensors here."""
        return False

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no version: only CUDA devices have one."""
        return None, None

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random state."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing: there is no profiler."""
        yield

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: a CPU is one synchronous device without a cache, an allocator's settings, a runtime or a profiler
        here."""

    set_device = synchronize = empty_cache = set_allocator_settings = cudart = _nothing
    profiler_start = profiler_stop = _nothing
