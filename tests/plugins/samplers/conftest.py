"""A run in one process, as the core tests have it."""

from tests.core.trainer.conftest import answering  # noqa: F401 — fixtures
from tests.plugins.bench import bench  # noqa: F401 — a fixture
