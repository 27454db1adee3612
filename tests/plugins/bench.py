"""A run whose policy server is scripted, with the stages that plugins have at its beginning and its end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.trainer.conftest import open_bench


@pytest.fixture
def bench() -> Any:
    """See `tests.core.trainer.conftest.bench`."""
    return open_bench
