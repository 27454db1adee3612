"""A gateway between a fake vLLM and a memory store, as the core's own tests have it; and the stores that theirs run against."""

from __future__ import annotations

from tests.core.gateway.conftest import build, house  # noqa: F401 — fixtures
from tests.servers.stores import make_redis, make_store, postgres_url, rollout, sqlite, store, store_url  # noqa: F401
