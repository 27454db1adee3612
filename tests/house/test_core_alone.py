"""The core is the line from a POST to a gradient: a wheel of `core/` alone trains a model behind an agent, is killed, and goes
on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.errors import SchemaError
from lightning.store.sqlite import SqliteStore
from lightning.types import StepRecord

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/lightning_examples/raw_python/model"
AGENT = '''
import json
from urllib.request import Request, urlopen


def digits(task, llm):
    """Write as many digits as possible."""
    asked = {"model": llm.model, "messages": [{"role": "user", "content": task.input}], "max_tokens": 8}
    request = Request(f"{llm.base_url}/chat/completions", json.dumps(asked).encode())
    request.add_header("Authorization", f"Bearer {llm.api_key}")
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=300) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or ""
    return sum(map(str.isdigit, said)) / 8
'''
STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the core's wheel and with other people's packages, but with no plugin of lightning's:
    what is installed for this checkout is not read from there."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "core/lightning", folder / "source/lightning", ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (folder / "source/pyproject.toml").write_text(core_project(project))
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--python", python, folder / "source"], check=True)
    return python.parent


def core_project(project: Mapping[str, Any]) -> str:
    """A `pyproject.toml` with what of the project's is the core's."""
    own = {
        name: place for name, place in project["entry-points"]["lightning"].items() if place.startswith("lightning.")
    }
    tables = {"project.scripts": project["scripts"], "project.entry-points.lightning": own}
    lines = [
        *("[build-system]", 'requires = ["setuptools"]', 'build-backend = "setuptools.build_meta"'),
        *("[project]", 'name = "lightning"', 'dynamic = ["version"]'),
        f"dependencies = {json.dumps(project['dependencies'])}",
        *("[tool.setuptools.dynamic]", 'version = {attr = "lightning._version.__version__"}'),
        *("[tool.setuptools.packages.find]", 'include = ["lightning*"]'),
    ]
    for title, table in tables.items():
        lines += [f"[{title}]", *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in table.items())]
    return "\n".join(lines)


def test_the_core_alone_trains_is_killed_and_resumes(programs: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as util, pkgutil; from lightning.plugins import plugins; import lightning\n"
        "print([each.name for each in pkgutil.iter_modules() if each.name.startswith('lightning_')])\n"
        "print(sorted(each.name for each in plugins().plugins()))\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    seen = subprocess.run(
        [programs / "python", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert seen.stdout.splitlines() == [
        "[]",
        str(["algorithms", "engines", "jsonl", "policy_server", "runners", "stores"]),
    ]

    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"input": f"{n} + 1"}) + "\n" for n in range(16)))
    command: list[str | Path] = [
        *(programs / "lightning", "train", "agent:digits", "--model", MODEL, "--tasks", "tasks.jsonl", "--out", "run"),
        *("--set", f"trainer.steps={STEPS}", "--set", "trainer.tasks_per_step=4"),
    ]  # fmt: skip
    output = tmp_path / "output.txt"

    def started(*more: str) -> subprocess.Popen[bytes]:
        with output.open("ab") as log:
            return subprocess.Popen([*command, *more], cwd=tmp_path, env=env, stdout=log, stderr=log)

    first = started()
    while not committed(tmp_path):
        assert first.poll() is None, output.read_text()
        time.sleep(0.1)
    children = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    before = committed(tmp_path)
    assert 0 < len(before) < STEPS, "it was killed in the middle"

    assert started("--resume").wait(timeout=600) == 0, output.read_text()
    after = committed(tmp_path)
    assert after[: len(before)] == before, "a committed step is never undone"
    assert [record.step for record in after] == list(range(1, STEPS + 1))
    assert any(record.rollouts for record in after[len(before) :]), "the resumed run goes on learning"
    assert list((tmp_path / "run/model").glob("*.safetensors"))


def committed(folder: Path) -> list[StepRecord]:
    """The steps that are in the run's store."""
    file = folder / "run/lightning.db"

    async def read() -> list[StepRecord]:
        store = SqliteStore(file)
        try:
            await store.open(make=False)
        except SchemaError:  # the run is making it at this moment
            return []
        try:
            runs = await store.list_runs()
            return await store.steps(runs[0].id) if runs else []
        finally:
            await store.close()

    return asyncio.run(read()) if file.exists() else []
