"""What is built can be installed: the wheel and the source distribution, each in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = ["algorithms", "engines", "examples", "raw", "runners", "stores", "trackers"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> str:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, built from the source distribution, which is built from the tracked files."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", folder / "dist", source, cwd=folder)
    return folder / "dist"


def test_the_wheel_works_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    # The core's own needs and nothing else: an optional dependency that crept in shows here.
    run("uv", "pip", "install", "--python", python, "-c", ROOT / "requirements/constraints.txt", wheel, cwd=tmp_path)
    run(
        python,
        "-c",
        "import lightning; lightning.Task, lightning.Trainer, lightning.LightningRL, lightning.tool",
        cwd=tmp_path,
    )
    assert "doctor" in run(tmp_path / "venv/bin/lightning", "--help", cwd=tmp_path)
    code = "from importlib.metadata import entry_points; print(sorted(e.name for e in entry_points(group='lightning')))"
    assert run(python, "-c", code, cwd=tmp_path).strip() == str(ENTRY_POINTS)
    code = (
        "from lightning.plugins import plugins\n"
        "print([(info.name, info.error) for info in plugins().plugins() if info.state != 'loaded'])"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == "[]"


def test_doctor_names_the_cure_in_a_bare_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    run("uv", "pip", "install", "--python", python, "-c", ROOT / "requirements/constraints.txt", wheel, cwd=tmp_path)
    ran = subprocess.run(
        [tmp_path / "venv/bin/lightning", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "pip install 'lightning[torch]<1'" in ran.stdout


def test_the_archives_hold_what_they_should(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"lightning/py.typed", "lightning_raw/py.typed", "lightning_examples/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "core/", "docs/"))]
    assert any(
        name.startswith("lightning_examples/raw_python/model/") and name.endswith(".safetensors") for name in names
    )
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "Makefile",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "docs/index.md",
        "requirements/constraints.txt",
    } <= inside
    assert not [name for name in inside if name.startswith((".venv", "runs/", "bench/"))]
