"""A CPU platform for verl, with gloo: found by verl through the entry-point group `verl.plugins`.

The invariant: it is used only where it was asked for (`VERL_PLATFORM=cpu`, which `choose` sets on a machine without an
accelerator), and everything else of verl is the code that runs on GPUs.
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
    """`torch.cpu`, and what verl calls on every device's module besides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """verl asks so for an accelerator."""
        return False

    def max_memory_allocated(self, _device: object = None) -> int:
        """The largest resident size of this process so far, in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        """Free and all memory of the machine, in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, _device: object = None) -> str:
        """What logs call it."""
        return "CPU"

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        """torch's own random state."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _device: object = None) -> None:
        """torch's own random state."""
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """torch's own random state."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def _nothing(self, *_: object, **__: object) -> None:
        """A CPU has no cache to empty and no device to choose."""

    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = _nothing


@PlatformRegistry.register(platform=NAME)
class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl has no types
    """One worker process for each rank; ranks talk gloo."""

    device_name = vendor_name = NAME
    device_module = _Device("lightning_verl_cpu")
    """What stands in for `torch.cuda`."""

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Only where it was asked for: a process that merely fails to see its GPU must not train on a CPU."""
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME

    def current_device(self) -> str:
        """verl passes this to `Tensor.to`, where a number would mean a GPU."""
        return "cpu"

    def device_count(self) -> int:
        """One for each process."""
        return 1

    def communication_backend_name(self) -> str:
        """torch.distributed's."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """verl wants one."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """A worker's place in the cluster: a local cluster is started with as many "GPUs" as workers, so that placement is
        the code that runs on GPUs."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None."""
        return []

    def is_ipc_supported(self) -> bool:
        """Tensors are not shared between processes here."""
        return False

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """CUDA's; a CPU has none."""
        return None, None

    def manual_seed(self, seed: int) -> None:
        """torch's own random state."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Nothing is profiled."""
        yield

    def _nothing(self, *_: object, **__: object) -> None:
        """A CPU is one device that computes at once. It has no cache, no allocator's settings and no runtime; nothing is
        profiled."""

    set_device = synchronize = empty_cache = set_allocator_settings = cudart = _nothing
    profiler_start = profiler_stop = _nothing
