"""One Ray for all of its tests, and agents' processes that must not be left behind by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning_ray.cluster import connect
from lightning_ray.config import RayConfig

from tests.core.policy_server.conftest import fake, model  # noqa: F401 — fixtures
from tests.core.runner.conftest import gone, lease, server  # noqa: F401 — fixtures


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster on this machine, begun as the runner begins one. A process has one: it is gone before others begin theirs."""
    cluster = asyncio.run(connect(RunnerConfig(concurrency=2, ray=RayConfig(num_cpus=0.5))))
    yield cluster.ray
    asyncio.run(cluster.close())


def _agents() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "lightning.runner.forkserver_main" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Ray keeps processes for later; those that agents ran in must go."""
    yield
    _, alive = psutil.wait_procs(_agents(), timeout=120)
    assert not alive
