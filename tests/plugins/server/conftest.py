"""Stores under test, and databases to look after."""

from tests.core.maintenance.databases import filled  # noqa: F401 — a fixture
from tests.servers.stores import call, rollout  # noqa: F401 — fixtures
