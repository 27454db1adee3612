"""`lightning demo`: which of the demonstrations runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.cli import demo as command
from lightning.errors import DataError
from lightning.installation import install_command
from lightning.plugins import plugins
from lightning_examples import smollm2


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path]]:
    """What the trainer was made for: the model and the folder."""
    made: list[tuple[Any, Path]] = []

    def trainer(model: Any, algorithm: Any, **options: Any) -> None:
        made.append((model, options["out"]))
        raise DataError("that is enough")

    monkeypatch.setattr(command, "Trainer", trainer)
    return made


def test_without_the_real_model_the_tiny_one_is_trained_and_it_is_said(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    lightning("demo")
    ((model, folder),) = chosen
    assert (model.parent.name, folder.name.startswith("demo-tiny-")) == ("raw_python", True)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert smollm2.INSTALL in warning.getMessage()
    assert "The demonstration 'tiny' runs instead" in warning.getMessage()


def test_a_framework_that_is_missing_is_told_with_the_line_that_installs_it(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in [name for name in sys.modules if name.startswith("lightning_examples.calculator_autogen")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "autogen_agentchat.agents", None)
    lightning("demo")
    ((model, _),) = chosen
    assert model.parent.name == "raw_python"
    assert install_command("examples") in caplog.text


def test_a_demonstration_that_was_named_is_never_replaced(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    ran = lightning("demo", "calculator")
    assert (ran.code, chosen) == (2, [])
    assert smollm2.INSTALL in ran.err


def test_a_damaged_model_file_is_an_error_and_no_reason_for_another_demonstration(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "damaged_package").mkdir()
    (tmp_path / "damaged_package" / smollm2.GGUF).write_bytes(b"half of it")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "PACKAGE", "damaged_package")
    ran = lightning("demo")
    assert (ran.code, chosen) == (2, [])
    assert "is not the published file" in ran.err


def test_with_the_real_model_it_is_the_default(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = SimpleNamespace(
        name="calculator", title="", settings={}, model=tmp_path, algorithm=lambda: None, train_agents=()
    )
    monkeypatch.setattr(type(plugins()), "demo", lambda self, name: {"calculator": lambda: real}[name])
    lightning("demo")
    assert [(model, folder.name.startswith("demo-calculator-")) for model, folder in chosen] == [(tmp_path, True)]


def test_a_console_that_cannot_be_shown_is_said_before_anything_is_trained(
    lightning, chosen: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else found(name))
    ran = lightning("demo", "tiny", "--console")
    assert ran.code == 2
    assert install_command("console") in ran.err
    assert chosen == []


def test_a_console_that_dies_is_no_matter_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[list[str]] = []

    def start(line: list[str]) -> subprocess.Popen[bytes]:
        started.append(line)
        return subprocess_popen([sys.executable, "-c", "import os; os.abort()"], stderr=subprocess.DEVNULL)

    subprocess_popen = subprocess.Popen
    monkeypatch.setattr(command.subprocess, "Popen", start)
    with command._console(tmp_path / "run"):
        time.sleep(0.5)
    assert started[0][1:] == ["-m", "lightning", "console", str(tmp_path / "run")]
    assert "the console ended before the training did, with exit code -6" in caplog.text


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "exit code 3"), ("echo no room >&2; exit 3", "no room"), ("exec sleep 30", "in 0.2 s")],
)
def test_pages_that_cannot_be_written_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, said: str
) -> None:
    run = subprocess.run
    monkeypatch.setattr(command.subprocess, "run", lambda line, **how: run(["/bin/sh", "-c", script], **how))
    monkeypatch.setattr(command, "PAGES_SECONDS", 0.2)
    began = time.monotonic()
    assert command._write_pages(tmp_path) is None
    assert time.monotonic() - began < 20
    assert said in caplog.text
