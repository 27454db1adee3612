"""What is built can be installed: the wheel and the source distribution, each in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.house.test_install_commands import resolve

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = [
    "algorithms", "attach", "autogen.autogen_core", "branching", "command", "console", "credits", "crewai.crewai", "db",
    "debug", "deploy", "dialects", "dspy.dspy", "engines", "examples", "finetuning", "harnesses", "jsonl", "k8s",
    "langchain.langchain_core",
    "llama-index.llama_index.core", "openai-agents.agents", "otel-traces", "otel.opentelemetry.trace", "planner", "policies",
    "policy_server", "postgres", "prompts", "proof", "raw", "ray", "record", "redis", "replicas", "resources", "runners",
    "samplers", "sandbox", "server", "session", "smolagents.smolagents", "stores", "trackers", "verl",
]  # fmt: skip

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


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, what the core itself needs, and nothing else."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False)
    programs = folder / "venv/bin"
    constraints = ROOT / "requirements/constraints.txt"
    run(
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        programs / "python",
        "-c",
        constraints,
        wheel,
        cwd=folder,
    )
    return programs


def test_the_wheel_works_in_a_fresh_environment(fresh: Path, tmp_path: Path) -> None:
    python = fresh / "python"
    run(python, "-c", "import lightning; [getattr(lightning, name) for name in lightning.__all__]", cwd=tmp_path)
    assert "doctor" in run(fresh / "lightning", "--help", cwd=tmp_path)
    code = "from importlib.metadata import entry_points; print(sorted(e.name for e in entry_points(group='lightning')))"
    assert run(python, "-c", code, cwd=tmp_path).strip() == str(ENTRY_POINTS)
    code = (
        "from lightning.plugins import plugins\n"
        "print([(info.name, info.error) for info in plugins().plugins() if info.state not in ('loaded', 'waiting')])"
    )
    assert run(python, "-c", code, cwd=tmp_path).strip() == "[]"


def test_doctor_names_the_cure_in_a_bare_environment(fresh: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [fresh / "lightning", "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stderr
    assert re.search(r"pip install --find-links '\S+/dist' 'lightning\[torch\]<1'", ran.stdout), ran.stdout


def test_a_wheel_in_a_folder_is_taken_before_the_index_s_lightning(built: Path) -> None:
    """And what its extra names of the project's own."""
    text = resolve({"verl"}, (), "--find-links", str(built), own="<1")
    assert re.search(r"^lightning==0\.", text, re.MULTILINE), text
    assert re.search(r"^torch==", text, re.MULTILINE), text


def test_the_archives_hold_what_they_should(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "lightning/py.typed",
        "lightning_raw/py.typed",
        "lightning_k8s/py.typed",
        "lightning_examples/__init__.py",
    } <= names
    assert {
        f"lightning_redis/lua/{file.name}" for file in (ROOT / "plugins/redis/lightning_redis/lua").iterdir()
    } <= names
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
