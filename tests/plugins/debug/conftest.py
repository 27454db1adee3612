"""A run whose policy server is scripted, with the stages of plugins at its steps; and the gateway of the core's tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from lightning.trainer.stages import step_line

from tests.core.gateway.conftest import build, house  # noqa: F401 — fixtures
from tests.core.trainer.conftest import open_bench


@pytest.fixture
def bench() -> Any:
    """See `tests.core.trainer.conftest.bench`."""
    return functools.partial(open_bench, stages=step_line)
