"""A run whose policy server is scripted."""

from tests.core.trainer.conftest import answering  # noqa: F401 — fixtures
from tests.plugins.bench import bench  # noqa: F401 — a fixture
