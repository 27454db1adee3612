"""`import lightning` is cheap: agents pay for it in every process."""

from __future__ import annotations

import statistics
import subprocess
import sys

BUDGET = 0.15
"""CPU seconds. The assertion gives a busy machine twice that."""

HEAVY = {
    "numpy",
    "torch",
    "aiohttp",
    "starlette",
    "uvicorn",
    "pydantic",
    "transformers",
    "vllm",
    "rich",
    "typer",
    "pluggy",
}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, lightning; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    assert not HEAVY & set(run(code).split())


def test_what_an_agent_needs_is_light() -> None:
    code = (
        "import sys, lightning\nlightning.Task, lightning.LLM, lightning.component, lightning.tool, lightning.reward\n"
        "print(*sorted(name.partition('.')[0] for name in sys.modules))"
    )
    assert not HEAVY - {"pluggy"} & set(run(code).split())


def test_import_takes_little_cpu() -> None:
    code = "import time; began = time.process_time(); import lightning; print(time.process_time() - began)"
    median = statistics.median(float(run(code)) for _ in range(5))
    assert median <= 2 * BUDGET, f"import lightning took {median:.3f} s of CPU; the budget is {BUDGET} s"
