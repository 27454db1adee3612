"""What the runner's tests share."""

from tests.core.runner.conftest import _nothing_is_left_behind, lease, server  # noqa: F401 — fixtures
