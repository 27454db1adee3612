"""A run in one process, as the core tests have it."""

from tests.core.trainer.conftest import answering, bench, without_settling  # noqa: F401 — fixtures
