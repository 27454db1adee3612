"""Stores under test, and databases to look after, as the core's have them."""

from tests.plugins.db.databases import database, filled  # noqa: F401 — fixtures
from tests.servers.stores import (  # noqa: F401 — fixtures
    call,
    make_redis,
    make_store,
    postgres_url,
    rollout,
    sqlite,
    store,
    store_url,
)
