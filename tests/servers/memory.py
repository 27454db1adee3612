"""A store in memory for a test: none of its tests is slow, unlike those of `stores`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from lightning.store.memory import MemoryStore


@pytest.fixture
async def memory_store() -> AsyncIterator[MemoryStore]:
    """An open store."""
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()
