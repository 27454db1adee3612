"""A policy so small that its losses can be written down by hand, and a run in one process, both as the core tests have them."""

from tests.core.losses.conftest import tiny  # noqa: F401 — a fixture
from tests.core.trainer.conftest import bench  # noqa: F401 — a fixture
