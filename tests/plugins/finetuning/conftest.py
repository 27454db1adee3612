"""The small policy of the core's losses, whose losses can be written down by hand, and the run in one process of its trainer."""

from tests.core.losses.conftest import tiny  # noqa: F401 — a fixture
from tests.core.trainer.conftest import bench  # noqa: F401 — a fixture
