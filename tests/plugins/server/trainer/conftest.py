"""A run whose policy server is scripted."""

import pytest

from tests.core.trainer.conftest import answering  # noqa: F401 — fixtures
from tests.core.trainer.test_opening import house  # noqa: F401 — a fixture
from tests.plugins.bench import bench  # noqa: F401 — a fixture


@pytest.fixture(autouse=True)
def without_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few agents nothing is gained by looking at much news together."""
    monkeypatch.setattr("lightning_server.client_agents.SETTLE_SECONDS", 0.005)
