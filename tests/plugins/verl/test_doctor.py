"""`lightning doctor` on flash attention, verl and Megatron: every finding has its cure, and none is fatal."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from lightning.cli.check import Check
from lightning.installation import install_command
from lightning_verl import doctor
from lightning_verl.doctor import check_verl
from lightning_verl.gpus import Gpu


def answering(code: int, out: str = "", err: str = "") -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *_, **__: subprocess.CompletedProcess([], code, out, err)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Check]]:
    """The findings when the probe's process comes to this."""

    def examine(
        run: Callable[..., object],
        *,
        verl: bool = False,
        gpus: bool = False,
        version: str | None = "0.9.1",
        **versions: str,
    ) -> dict[str, Check]:
        monkeypatch.setattr(doctor, "list_gpus", lambda: [Gpu("H100", 80.0, 1.0, "570")] * gpus)
        monkeypatch.setattr(subprocess, "run", run)
        known = {"verl": version, **{name.replace("_", "-"): what for name, what in versions.items()}}
        monkeypatch.setattr(doctor, "version_of", known.get)
        found = {check.name: check for check in check_verl("" if verl else None)}
        assert not any(check.fatal for check in found.values())
        assert all(check.cure for check in found.values() if check.status != "ok")
        return found

    return examine


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        (None, "missing", install_command("verl")),
        ("0.8.0", "broken", "pip install 'verl>=0.9.1,<0.10'"),
        ("0.10.0.dev1", "broken", "pip install 'verl>=0.9.1,<0.10'"),
        ("0.9.1.post2", "ok", ""),
    ],
)
def test_versions_of_verl(probed, version: str | None, status: str, words: str) -> None:
    found = probed(answering(0), version=version)["verl"]
    assert (found.status, found.cure) == (status, words)


def test_verl_is_imported_only_when_asked(probed) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    assert "lightning doctor --try verl" in probed(never)["verl"].detail
    works = probed(answering(0, 'noise\n{"device": "cuda"}\n'), verl=True)["verl"]
    assert (works.status, "compute on cuda" in works.detail) == ("ok", True)
    broken = probed(answering(1, "", "Traceback\n  ...\nImportError: no module x\n"), verl=True)["verl"]
    assert (broken.status, "ImportError: no module x" in broken.detail) == ("broken", True)
    assert broken.cure


def test_what_verl_cannot_try_is_said() -> None:
    first = next(iter(check_verl("somewhere")))
    assert (first.status, first.cure) == ("low", "use --try verl")
    assert "verl=somewhere" in first.detail


def test_megatron_is_looked_at_with_verl(probed) -> None:
    fine = answering(0, '{"device": "cpu"}\n')
    assert "megatron" not in probed(fine, megatron_core="0.16.1")
    missing = probed(fine, verl=True)["megatron"]
    assert (missing.status, missing.cure) == ("missing", install_command("verl-megatron"))
    assert "mbridge" not in probed(fine, verl=True), "one word is enough"
    assert probed(fine, verl=True, megatron_core="0.16.1")["mbridge"].status == "missing"
    works = probed(fine, verl=True, megatron_core="0.16.1", mbridge="0.15.1")
    assert "mbridge" not in works
    assert (works["megatron"].status, "compute on cpu" in works["megatron"].detail) == ("ok", True)
    assert "transformer-engine" not in works, "it computes on GPUs"
    found = probed(answering(1, "", "ImportError: no mbridge\n"), verl=True, gpus=True, megatron_core="0.16.1")
    assert (found["megatron"].status, "no mbridge" in found["megatron"].detail) == ("broken", True)
    assert (found["transformer-engine"].status, "pip install" in found["transformer-engine"].cure) == ("missing", True)


def test_flash_attention_is_looked_for_beside_gpus(probed) -> None:
    assert "flash-attn" not in probed(answering(0))
    found = probed(answering(0), gpus=True)["flash-attn"]
    assert (found.status, "pip install flash-attn" in found.cure) == ("missing", True)


def test_a_probe_that_hangs_is_a_finding(probed) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("probe", timeout)

    assert "more than 300 s" in probed(hang, verl=True)["verl"].detail


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_workers() -> None:
    found = {check.name: check for check in check_verl("")}
    assert (found["verl"].status, found["megatron"].status) == ("ok", "ok"), found
