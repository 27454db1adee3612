"""`lightning doctor` on GPUs and NCCL: every finding has its cure, and none is fatal."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from lightning.cli.check import Check
from lightning.cli.doctor import examine
from lightning_verl import gpus
from lightning_verl.gpus import TorchView, check_gpus

H100 = "NVIDIA H100 80GB HBM3, 81559, {used}, 570.86\n"
CUDA = TorchView("12.8", "2.27.3", 8)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """The findings on a machine with what nvidia-smi prints (None: there is no nvidia-smi), and a torch."""

    def examine(smi: str | None, torch: TorchView | None) -> dict[str, Check]:
        monkeypatch.setattr(shutil, "which", lambda name: None if smi is None else f"/usr/bin/{name}")
        answer = subprocess.CompletedProcess([], 0, smi or "", "")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
        monkeypatch.setattr(gpus, "torch_view", lambda: torch)
        found = {check.name: check for check in check_gpus(None)}
        assert not any(check.fatal for check in found.values())
        assert all(check.cure for check in found.values() if check.status != "ok")
        return found

    return examine


def test_a_machine_without_gpus_lacks_nothing(machine) -> None:
    found = machine(None, TorchView("", "", 0))
    assert {name: check.status for name, check in found.items()} == dict.fromkeys(["gpus", "nccl"], "ok")
    assert "everything runs on the CPU" in found["gpus"].detail
    assert "gloo" in found["nccl"].detail


def test_a_machine_with_gpus_names_them(machine) -> None:
    found = machine(H100.format(used=500) * 7 + H100.format(used=2048), CUDA)
    assert found["gpus"].detail == "8 x NVIDIA H100 80GB HBM3; 78 of 80 GiB free; driver 570.86"
    assert (found["gpus"].status, found["nccl"].status) == ("ok", "ok")
    assert "2.27.3" in found["nccl"].detail


def test_gpus_that_torch_does_not_see(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = H100.format(used=0) * 8
    cpu_build = machine(smi, TorchView("", "", 0))
    assert (cpu_build["gpus"].status, cpu_build["nccl"].status) == ("broken", "broken")
    assert "build of torch for CUDA" in cpu_build["gpus"].cure
    old_driver = machine(smi, TorchView("12.8", "2.27.3", 0))["gpus"]
    assert (old_driver.status, "CUDA 12.8" in old_driver.cure) == ("broken", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    chosen = machine(smi, TorchView("12.8", "2.27.3", 2))["gpus"]
    assert (chosen.status, "torch sees 2 (CUDA_VISIBLE_DEVICES=0,1)" in chosen.detail) == ("ok", True)


def test_gpus_that_others_use(machine) -> None:
    busy = machine(H100.format(used=0) * 7 + H100.format(used=70000), CUDA)["gpus"]
    assert busy.status == "low"
    assert "11 of 80 GiB free" in busy.detail


def test_a_driver_that_fails_and_one_that_does_not_tell_memory(machine) -> None:
    broken = machine("Failed to initialize NVML: Driver/library version mismatch\n", TorchView("12.8", "2.27.3", 0))
    assert (broken["gpus"].status, "version mismatch" in broken["gpus"].detail) == ("broken", True)
    unified = machine("NVIDIA GB10, [N/A], [N/A], 580.1\n", TorchView("13.0", "2.27.3", 1))["gpus"]
    assert (unified.status, unified.detail) == ("ok", "1 x NVIDIA GB10; driver 580.1")


def test_torch_says_where_there_is_no_nvidia_smi(machine) -> None:
    assert machine(None, CUDA)["gpus"].detail == "8, as torch says"
    assert "nccl" not in machine(None, None)


def test_doctor_has_the_findings_and_nothing_slower_to_try() -> None:
    checks = {check.name: check for check in examine(["gpus"])}
    assert {"gpus", "nccl"} <= checks.keys()
    first = next(iter(check_gpus("")))
    assert (first.status, first.cure) == ("low", "leave --try gpus out")
