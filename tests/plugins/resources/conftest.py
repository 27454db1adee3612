"""The stores under test, a way to run commands, and a run whose policy server is scripted."""

from tests.core.cli.conftest import lightning  # noqa: F401 — a fixture
from tests.core.trainer.conftest import answering  # noqa: F401 — fixtures
from tests.plugins.bench import bench  # noqa: F401 — a fixture
from tests.servers.stores import (  # noqa: F401 — fixtures
    branched,
    call,
    make_redis,
    make_store,
    postgres_url,
    rollout,
    sqlite,
    store,
    store_url,
)
