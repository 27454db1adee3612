"""An empty store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from lightning.store import Store
from lightning.store.memory import MemoryStore


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """An open store with nothing in it."""
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()
