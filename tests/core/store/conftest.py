"""The stores under test: `tests/servers/stores.py` makes them, and `backends.py` says which a test runs against."""

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
