"""What `lightning doctor` says of training on many GPUs: GPUs, NCCL, flash attention, verl, Megatron and Ray.

The invariant: nothing here is fatal, since `lightning demo` needs none of it; and what takes more than a moment (importing
verl, attaching to a cluster) is done only when it was asked for, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning.cli.check import Check
from lightning.cli.installed import version_of

SMI_FIELDS = "name,memory.total,memory.used,driver_version"
SMI_SECONDS, CONNECT_SECONDS, RAY_SECONDS, VERL_SECONDS = 20, 3, 60, 300
"""Time limits: for nvidia-smi, for a connection, for attaching to a cluster, for importing verl."""
BUSY = 0.5
"""Share of a GPU's memory beyond which what others use is a finding."""
OLDEST, TOO_NEW = (0, 9, 1), (0, 10)
"""Versions of verl: the first with the workers that are used, and the first that was not looked at."""
CUDA_TORCH = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
RAY_PORT = 6379
REFUSED = "InvalidAuthToken"
"""What Ray writes when a cluster was started with a token and this process has not sent it."""
AUTHENTICATE = (
    "copy ~/.ray/auth_token of the cluster's head to this machine, and set RAY_AUTH_MODE=token here and for training"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine; memory in GiB, 0 where the driver does not tell (it shares the machine's)."""

    name: str
    total: float
    used: float
    driver: str

    @property
    def free(self) -> float:
        """What nobody uses."""
        return self.total - self.used


@dataclass(frozen=True, slots=True)
class TorchView:
    """What torch was built with and sees; empty texts where it was built without."""

    cuda: str
    nccl: str
    gpus: int


class ProbeError(Exception):
    """Why something could not be found out. `log` is all that was written about it."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


def examine_cluster(ray_address: str, *, verl: bool) -> Iterator[Check]:
    """Every check of this module. With `verl` its workers are imported; a `ray_address` is attached to."""
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
    if gpus:
        yield _flash_attention()
    yield _verl(try_it=verl)
    if verl:
        yield from _megatron(gpus=bool(gpus))
    yield from _ray(ray_address)


def list_gpus() -> list[Gpu]:
    """This machine's NVIDIA GPUs, whichever of them this process may see. Raises `ProbeError` when nvidia-smi fails."""
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
    """None where torch cannot be imported: there is a check of its own for that."""
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


def _flash_attention() -> Check:
    if importlib.util.find_spec("flash_attn") is not None:
        return Check("flash-attn", "ok", version_of("flash-attn") or "installed")
    detail = "the verl engine takes torch's attention instead, which computes what lies between packed rows, too"
    return Check("flash-attn", "missing", detail, "pip install flash-attn --no-build-isolation")


def _verl(*, try_it: bool) -> Check:
    found = version_of("verl")
    if found is None:
        return Check("verl", "missing", "for training on many GPUs (--engine verl)", "pip install 'lightning[verl]<1'")
    if not OLDEST <= _numbers(found) < TOO_NEW:
        detail = f"{found} has not the workers that the verl engine uses"
        return Check("verl", "broken", detail, "pip install 'verl>=0.9.1,<0.10'")
    if not try_it:
        return Check("verl", "ok", f"{found}; `lightning doctor --verl` imports its workers, which takes half a minute")
    try:
        answer = _probe(["verl"], VERL_SECONDS)
    except ProbeError as error:
        detail = f"{found}, but its workers cannot be imported: {error}"
        return Check("verl", "broken", detail, "pip install --upgrade 'lightning[verl]<1'")
    return Check("verl", "ok", f"{found}; its workers can be imported, and would compute on {answer['device']}")


def _megatron(*, gpus: bool) -> Iterator[Check]:
    """Of the strategy `megatron`, which few need."""
    found, install = version_of("megatron-core"), "pip install 'lightning[verl-megatron]<1'"
    if found is None:
        yield Check("megatron", "missing", "for engine.verl.strategy = megatron; fsdp2 needs none", install)
        return
    if version_of("mbridge") is None:
        yield Check("mbridge", "missing", "engine.verl.strategy = megatron loads and exports models by it", install)
    if gpus and version_of("transformer-engine") is None:
        cure = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
        yield Check("transformer-engine", "missing", "engine.verl.strategy = megatron computes with it on GPUs", cure)
    try:
        answer = _probe(["megatron"], VERL_SECONDS)
    except ProbeError as error:
        yield Check("megatron", "broken", f"{found}, but verl's engine over it cannot be imported: {error}", install)
    else:
        detail = f"{found}; verl's engine over it can be imported, and would compute on {answer['device']}"
        yield Check("megatron", "ok", detail)


def _ray(address: str) -> Iterator[Check]:
    found = version_of("ray")
    if found is None:
        if address:
            yield Check("ray", "missing", f"{address} cannot be attached to", "pip install 'lightning[verl]<1'")
        return
    if not address:
        detail = f"{found}; no cluster was named (--ray-address, RAY_ADDRESS): training starts Ray on this machine"
        yield Check("ray", "ok", detail)
        return
    start = f"ray start --head --port={RAY_PORT} on one machine, ray start --address=HOST:{RAY_PORT} on the others"
    try:
        _listening(address)
        answer = _probe(["ray", address], RAY_SECONDS)
    except ProbeError as error:
        if REFUSED in error.log:
            yield Check("ray", "broken", f"the cluster at {address} wants a token", AUTHENTICATE)
        else:
            yield Check("ray", "broken", f"no cluster answers at {address}: {error}", start)
        return
    gpus = answer["gpus"]
    assert isinstance(gpus, list), "the probe counts them by node"
    detail = f"{answer['version']} at {address}: {len(gpus)} nodes, GPUs on them: {', '.join(map(str, gpus))}"
    if any(gpus):
        yield Check("ray", "ok", detail)
    else:
        yield Check("ray", "low", detail, f"workers need GPUs: {start}, with --num-gpus=N where Ray does not find them")


def _listening(address: str) -> None:
    """Raise `ProbeError` at once where nobody listens: Ray would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # `auto`, `local`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ProbeError(str(error)) from error


def _probe(arguments: Sequence[str], seconds: float) -> dict[str, object]:
    """What `lightning.cli.probe` finds. Raises `ProbeError` with the last line of what it wrote."""
    command = [sys.executable, "-P", "-m", "lightning.cli.probe", *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 — ours
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it took more than {seconds:.0f} s") from error
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        raise ProbeError(lines[-1][:300] if lines else f"exit code {ran.returncode}", ran.stderr)
    answer: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, as numbers."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()
