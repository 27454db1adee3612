"""Engines and rows, as the core's tests of engines have them, and a run in one process."""

from tests.core.engines.conftest import make_row, model, open_engine  # noqa: F401 — fixtures
from tests.core.trainer.conftest import answering  # noqa: F401 — fixtures
from tests.plugins.bench import bench  # noqa: F401 — a fixture
from tests.servers.memory import memory_store as store  # noqa: F401 — a fixture
