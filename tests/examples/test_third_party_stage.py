"""`examples/third_party_stage`, installed as a stranger's distribution."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_example_passes_its_own_tests(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/third_party_stage", tmp_path / "source")
    install = ["uv", "pip", "install", "--no-deps", "--no-build-isolation", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", *install, tmp_path / "source"], check=True, capture_output=True)
    shutil.copytree(tmp_path / "source/tests", tmp_path / "tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "3 passed" in ran.stdout, ran.stdout + ran.stderr
