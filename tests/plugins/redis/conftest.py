"""Stores under test, and databases to look after, as the core's have them."""

from tests.plugins.db.databases import database, filled  # noqa: F401 — fixtures
from tests.plugins.server.strangers import lab  # noqa: F401 — a fixture
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
