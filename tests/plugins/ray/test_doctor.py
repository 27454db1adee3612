"""`lightning doctor` on Ray: a cluster is attached to where one was named, and every finding has its cure."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest
from lightning.cli.app import main
from lightning.cli.check import Check
from lightning.installation import install_command
from lightning_ray import doctor
from lightning_ray.doctor import check_ray


def answering(code: int, out: str = "", err: str = "") -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *_, **__: subprocess.CompletedProcess([], code, out, err)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Check]:
    """The finding when the probe's process comes to this."""

    def examine(address: str | None, run: Callable[..., object]) -> Check:
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(doctor, "version_of", {"ray": "2.60.0"}.get)
        (found,) = check_ray(address)
        return found

    return examine


def test_no_cluster_is_asked_where_none_was_named(probed) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    assert probed(None, never).status == "ok"


def test_a_probe_that_hangs_is_a_finding(probed) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", timeout)

    assert "more than 60 s" in probed("", hang).detail


@pytest.mark.parametrize(("gpus", "status"), [("[0, 8]", "ok"), ("[0]", "low")])
def test_a_cluster_that_answers(probed, gpus: str, status: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        found = probed(address, answering(0, f'{{"version": "2.60.0", "gpus": {gpus}}}\n'))
    assert found.status == status
    assert found.detail.startswith(f"2.60.0 at {address}: ")
    assert found.detail.endswith(gpus.strip("[]"))


def test_a_cluster_that_wants_a_token(probed) -> None:
    log = "gcs_client.cc:210: RPC error: InvalidAuthToken: Authentication token is missing\nConnectionError: Failed\n"
    found = probed("auto", answering(1, "", log))
    assert (found.status, "wants a token" in found.detail) == ("broken", True)
    assert "RAY_AUTH_MODE=token" in found.cure


def test_the_environment_names_the_cluster_that_is_tried(probed, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answering(0, '{"version": "2.60.0", "gpus": [1]}\n')
    assert " at auto: " in probed("", answer).detail
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert " at local: " in probed("", answer).detail
    assert " at local: " in probed(None, answer).detail


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    (found,) = [check for check in report["checks"] if check["name"] == "ray"]
    assert (found["status"], found["needed"]) == ("broken", False)
    assert f"no cluster answers at {address}" in found["detail"]
    assert "ray start --head --port=6379" in found["cure"]


def test_ray_is_asked_for_but_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    (found,) = check_ray("head:6379")
    assert (found.status, found.cure) == ("missing", install_command("ray"))


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
def test_a_real_cluster(started: str) -> None:
    (found,) = check_ray(started)
    assert found.status == "ok", found
    assert found.detail.endswith(": 2")
