"""Stores under test, databases to look after, and a way to run commands."""

from tests.core.cli.conftest import lightning  # noqa: F401 — a fixture
from tests.servers.stores import call, rollout  # noqa: F401 — fixtures
