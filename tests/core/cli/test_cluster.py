"""`lightning doctor` on GPUs, NCCL, flash attention, verl and Ray: every finding has its cure, and none is fatal."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest
from lightning.cli import cluster
from lightning.cli.check import Check
from lightning.cli.cluster import TorchView, examine_cluster

H100 = "NVIDIA H100 80GB HBM3, 81559, {used}, 570.86\n"
CUDA = TorchView("12.8", "2.27.3", 8)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """The findings on a machine with what nvidia-smi prints (None: there is no nvidia-smi), and a torch."""

    def examine(smi: str | None, torch: TorchView | None, **versions: str | None) -> dict[str, Check]:
        monkeypatch.setattr(shutil, "which", lambda name: None if smi is None else f"/usr/bin/{name}")
        answer = subprocess.CompletedProcess([], 0, smi or "", "")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
        monkeypatch.setattr(cluster, "torch_view", lambda: torch)
        known = {"verl": "0.9.1", "ray": "2.60.0", **{name.replace("_", "-"): what for name, what in versions.items()}}
        monkeypatch.setattr(cluster, "version_of", known.get)
        found = {check.name: check for check in examine_cluster("", verl=False)}
        assert not any(check.fatal for check in found.values())
        assert all(check.cure for check in found.values() if check.status != "ok")
        return found

    return examine


def test_a_machine_without_gpus_lacks_nothing(machine) -> None:
    found = machine(None, TorchView("", "", 0))
    assert {name: check.status for name, check in found.items()} == dict.fromkeys(["gpus", "nccl", "verl", "ray"], "ok")
    assert "everything runs on the CPU" in found["gpus"].detail
    assert "gloo" in found["nccl"].detail


def test_a_machine_with_gpus_names_them(machine) -> None:
    found = machine(H100.format(used=500) * 7 + H100.format(used=2048), CUDA)
    assert found["gpus"].detail == "8 x NVIDIA H100 80GB HBM3; 78 of 80 GiB free; driver 570.86"
    assert (found["gpus"].status, found["nccl"].status) == ("ok", "ok")
    assert "2.27.3" in found["nccl"].detail
    assert found["flash-attn"].status == "missing"
    assert "pip install flash-attn" in found["flash-attn"].cure


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


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (None, "missing", "pip install 'lightning[verl]<1'"),
        ("0.8.0", "broken", "pip install 'verl>=0.9.1,<0.10'"),
        ("0.10.0.dev1", "broken", "pip install 'verl>=0.9.1,<0.10'"),
        ("0.9.1.post2", "ok", ""),
    ],
)
def test_versions_of_verl(machine, version: str | None, status: str, words: str) -> None:
    found = machine(None, CUDA, verl=version)["verl"]
    assert (found.status, found.cure) == (status, words)


def answering(code: int, out: str = "", err: str = "") -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *_, **__: subprocess.CompletedProcess([], code, out, err)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """The findings when the probe's process comes to this."""

    def examine(address: str, run: Callable[..., object], *, verl: bool = False, **versions: str) -> dict[str, Check]:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(subprocess, "run", run)
        known = {"verl": "0.9.1", "ray": "2.60.0", **{name.replace("_", "-"): what for name, what in versions.items()}}
        monkeypatch.setattr(cluster, "version_of", known.get)
        return {check.name: check for check in examine_cluster(address, verl=verl)}

    return examine


def test_verl_is_imported_only_when_asked(probed) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    assert "lightning doctor --verl" in probed("", never)["verl"].detail
    works = probed("", answering(0, 'noise\n{"device": "cuda"}\n'), verl=True)["verl"]
    assert (works.status, "compute on cuda" in works.detail) == ("ok", True)
    broken = probed("", answering(1, "", "Traceback\n  ...\nImportError: no module x\n"), verl=True)["verl"]
    assert (broken.status, "ImportError: no module x" in broken.detail) == ("broken", True)
    assert broken.cure


def test_megatron_is_looked_at_with_verl(probed, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = answering(0, '{"device": "cpu"}\n')
    assert "megatron" not in probed("", fine, megatron_core="0.16.1")
    missing = probed("", fine, verl=True)["megatron"]
    assert (missing.status, missing.cure) == ("missing", "pip install 'lightning[verl-megatron]<1'")
    assert "mbridge" not in probed("", fine, verl=True), "one word is enough"
    assert probed("", fine, verl=True, megatron_core="0.16.1")["mbridge"].status == "missing"
    works = probed("", fine, verl=True, megatron_core="0.16.1", mbridge="0.15.1")
    assert "mbridge" not in works
    assert (works["megatron"].status, "compute on cpu" in works["megatron"].detail) == ("ok", True)
    assert "transformer-engine" not in works, "it computes on GPUs"
    monkeypatch.setattr(cluster, "list_gpus", lambda: [cluster.Gpu("H100", 80.0, 1.0, "570")])
    found = probed("", answering(1, "", "ImportError: no mbridge\n"), verl=True, megatron_core="0.16.1")
    assert (found["megatron"].status, "no mbridge" in found["megatron"].detail) == ("broken", True)
    assert (found["transformer-engine"].status, "pip install" in found["transformer-engine"].cure) == ("missing", True)


def test_a_probe_that_hangs_is_a_finding(probed) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", timeout)

    found = probed("auto", hang, verl=True)
    assert "more than 300 s" in found["verl"].detail
    assert "more than 60 s" in found["ray"].detail


@pytest.mark.parametrize(("gpus", "status"), [("[0, 8]", "ok"), ("[0]", "low")])
def test_a_cluster_that_answers(probed, gpus: str, status: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        found = probed(address, answering(0, f'{{"version": "2.60.0", "gpus": {gpus}}}\n'))["ray"]
    assert found.status == status
    assert found.detail.startswith(f"2.60.0 at {address}: ")
    assert found.detail.endswith(gpus.strip("[]"))


def test_a_cluster_that_wants_a_token(probed) -> None:
    log = "gcs_client.cc:210: RPC error: InvalidAuthToken: Authentication token is missing\nConnectionError: Failed\n"
    found = probed("auto", answering(1, "", log))["ray"]
    assert (found.status, "wants a token" in found.detail) == ("broken", True)
    assert "RAY_AUTH_MODE=token" in found.cure


def test_nobody_listens(lightning, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    report = json.loads(lightning("doctor", "--json").out)
    (found,) = [check for check in report["checks"] if check["name"] == "ray"]
    assert (found["status"], found["needed"]) == ("broken", False)
    assert f"no cluster answers at {address}" in found["detail"]
    assert "ray start --head --port=6379" in found["cure"]


def test_ray_is_asked_for_but_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "version_of", lambda name: None)
    (found,) = [check for check in examine_cluster("head:6379", verl=False) if check.name == "ray"]
    assert (found.status, found.cure) == ("missing", "pip install 'lightning[verl]<1'")


@pytest.fixture
def started() -> Iterator[str]:
    """The address of a Ray with two GPUs, as it believes."""
    import ray

    ray.init(
        address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        object_store_memory=128 * 2**20,
    )  # fmt: skip
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_real_cluster_and_the_real_workers(started: str) -> None:
    found = {check.name: check for check in examine_cluster(started, verl=True)}
    assert (found["ray"].status, found["verl"].status) == ("ok", "ok"), found
    assert found["ray"].detail.endswith(": 2")
