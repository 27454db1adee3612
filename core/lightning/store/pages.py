"""Reads what is listed in pages, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator

from lightning.store.protocol import Store
from lightning.types import Rollout


async def each_rollout(
    store: Store, run: str, *, split: str | None = None, step: int | None = None
) -> AsyncIterator[Rollout]:
    """The rollouts of a run in creation order. Only a page of them is kept: a run of weeks has gigabytes."""
    cursor = ""
    while True:
        page = await store.list_rollouts(run, split=split, step=step, cursor=cursor)
        for rollout in page.rollouts:
            yield rollout
        cursor = page.cursor
        if not cursor:
            return
