"""The policy that is small enough to write losses down by hand, as in the tests of the core's losses."""

from tests.core.losses.conftest import tiny  # noqa: F401 — a fixture
