"""A run whose policy server is scripted."""

from tests.core.trainer.conftest import answering, bench, without_settling  # noqa: F401 — fixtures
