"""What every test may use: throw-away distributions, and the warnings that were logged."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

Install = Callable[..., Path]

# No test has a deadline: a busy machine is not a fault.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

FRAMEWORKS = (
    "adapters/autogen/", "adapters/langchain/", "adapters/openai_agents/", "adapters/otel/",
    "core/gateway/test_framework_clients.py", "examples/test_math_", "examples/test_rag_", "examples/test_sql_",
)  # fmt: skip
"""Tests that import an agent framework, which takes seconds: `make test-frameworks`."""


def needs_framework(path: Path) -> bool:
    """Whether a file of tests imports an agent framework."""
    root = Path(__file__).parent
    return path.is_relative_to(root) and str(path.relative_to(root)).startswith(FRAMEWORKS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what the marker expression leaves out: importing is what takes the time."""
    if collection_path.suffix != ".py":
        return None
    wanted, needs = config.option.markexpr, needs_framework(collection_path)
    return ("not framework" in wanted and needs) or (wanted.startswith("framework") and not needs) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell those that need a framework from the fast ones."""
    for item in items:
        if needs_framework(item.path):
            item.add_marker(pytest.mark.framework)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution that exists for one test: `install("name", {"plugin": "module"}, {"module": source})`.

    It is found exactly as an installed one is: by its metadata in a folder on `sys.path`.
    """
    made: set[str] = set()

    def install(
        name: str,
        entry_points: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
    ) -> Path:
        folder = tmp_path / "site" / name
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{key} = {value}" for key, value in (entry_points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[lightning]", *lines, ""]))
        for module, source in (modules or {}).items():
            file = folder / f"{module.replace('.', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
            made.add(module.partition(".")[0])
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    yield install
    for module in [module for module in sys.modules if module.partition(".")[0] in made]:
        del sys.modules[module]


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings and errors that were logged so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]
