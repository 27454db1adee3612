"""A run whose policy server is scripted."""

from tests.core.trainer.conftest import answering, bench  # noqa: F401 — fixtures
