"""Stores under test, databases to look after, a stranger's plugin, and a way to run commands."""

from tests.core.cli.conftest import lightning  # noqa: F401 — a fixture
from tests.plugins.db.databases import filled  # noqa: F401 — a fixture
from tests.plugins.server.strangers import lab  # noqa: F401 — a fixture
from tests.servers.stores import (  # noqa: F401 — fixtures
    call,
    make_store,
    postgres_url,
    rollout,
    sqlite,
    store,
)
