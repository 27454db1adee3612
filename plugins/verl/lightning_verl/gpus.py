"""The checks of GPUs and NCCL in `lightning doctor`, and the list of a machine's GPUs.

The invariant: no finding about GPUs is fatal, since `lightning demo` needs no GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning.cli.check import Check, ProbeError

SMI_FIELDS = "name,memory.total,memory.used,driver_version"
SMI_SECONDS = 20
BUSY = 0.5
"""The share of a GPU's memory in use above which this is a finding."""
CUDA_TORCH = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine; memory in GiB, 0 if the driver does not tell (the GPU shares the machine's memory)."""

    name: str
    total: float
    used: float
    driver: str

    @property
    def free(self) -> float:
        """The unused memory in GiB."""
        return self.total - self.used


@dataclass(frozen=True, slots=True)
class TorchView:
    """What torch was built with, and how many GPUs it sees. `cuda` and `nccl` are versions, empty if torch was built without
    them."""

    cuda: str
    nccl: str
    gpus: int


def check_gpus(tried: str | None) -> Iterator[Check]:
    """Yield the findings about GPUs, whether torch sees them, and NCCL."""
    if tried is not None:
        yield Check("gpus", "low", "--try gpus has nothing slower to try", "leave --try gpus out")
    torch = torch_view()
    try:
        gpus = list_gpus()
    except ProbeError as error:
        cure = "reboot if the driver was updated, or install it again; start a container with --gpus all"
        gpus = []
        yield Check("gpus", "broken", f"nvidia-smi fails: {error}", cure)
    else:
        yield _gpus(gpus, torch)
    if torch is not None:
        yield _nccl(gpus, torch)


def list_gpus() -> list[Gpu]:
    """Return this machine's NVIDIA GPUs, even those hidden from this process. Raises `ProbeError` when nvidia-smi fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)  # noqa: S603 — ours
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(str(error)) from error
    rows = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines() if line.strip()]
    try:
        return [Gpu(name, _gib(total), _gib(used), driver) for name, total, used, driver in rows]
    except ValueError as error:
        raise ProbeError(" ".join((ran.stdout + ran.stderr).split())[:300]) from error


def _gib(mebibytes: str) -> float:
    return 0.0 if mebibytes == "[N/A]" else float(mebibytes) / 1024


def torch_view() -> TorchView | None:
    """Return what torch sees; None if torch cannot be imported, which another check reports."""
    try:
        import torch
    except Exception:  # noqa: BLE001 — a broken binary raises anything; the check of torch says what
        return None
    nccl = ""
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return TorchView(torch.version.cuda or "", nccl, torch.cuda.device_count())


def _gpus(gpus: Sequence[Gpu], torch: TorchView | None) -> Check:
    if not gpus:
        seen = f"{torch.gpus}, as torch says" if torch and torch.gpus else "none: everything runs on the CPU"
        return Check("gpus", "ok", seen)
    kinds = ", ".join(f"{sum(gpu.name == kind for gpu in gpus)} x {kind}" for kind in sorted({g.name for g in gpus}))
    least = min(gpus, key=lambda gpu: gpu.free)
    memory = f"; {least.free:.0f} of {least.total:.0f} GiB free" if least.total else ""
    detail = f"{kinds}{memory}; driver {gpus[0].driver}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch is not None and not torch.cuda:
        return Check("gpus", "broken", f"{detail}; torch is built without CUDA", CUDA_TORCH)
    if torch is not None and torch.gpus != len(gpus):
        detail += f"; torch sees {torch.gpus}"
        if visible is None:
            cure = f"update the driver to one for CUDA {torch.cuda}, or start the container with --gpus all"
            return Check("gpus", "broken", detail, cure)
        detail += f" (CUDA_VISIBLE_DEVICES={visible})"
    if any(gpu.used > BUSY * gpu.total for gpu in gpus):
        return Check(
            "gpus", "low", detail, "nvidia-smi names the processes that hold memory; end those that are left over"
        )
    return Check("gpus", "ok", detail)


def _nccl(gpus: Sequence[Gpu], torch: TorchView) -> Check:
    if torch.nccl:
        return Check("nccl", "ok", f"{torch.nccl}, which torch was built with (CUDA {torch.cuda})")
    if gpus:
        return Check("nccl", "broken", "torch is built without it: GPUs cannot exchange gradients", CUDA_TORCH)
    return Check("nccl", "ok", "not in this torch; workers on a CPU talk gloo")
