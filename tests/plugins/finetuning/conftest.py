"""A policy so small that its losses can be written down by hand, as the core tests have it."""

from tests.core.losses.conftest import tiny  # noqa: F401 — a fixture
