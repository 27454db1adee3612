"""Iterates over rollouts and steps, which are read page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, TypeVar

from lightning.store.protocol import Store
from lightning.types import Rollout, StepRecord

T = TypeVar("T")

STEPS: Final = 100
"""How many steps are read at a time: 4 MB for steps of 512 rollouts."""


async def each_rollout(
    store: Store, run: str, *, split: str | None = None, step: int | None = None
) -> AsyncIterator[Rollout]:
    """Yield the rollouts of a run in creation order. Memory holds one page of them, because a long run has gigabytes."""
    cursor = ""
    while True:
        page = await store.list_rollouts(run, split=split, step=step, cursor=cursor)
        for rollout in page.items:
            yield rollout
        cursor = page.cursor
        if not cursor:
            return


async def each_step(store: Store, run: str) -> AsyncIterator[StepRecord]:
    """Yield the committed steps of a run in order. Memory holds one page of them."""
    after = 0
    while page := await store.steps(run, after=after, limit=STEPS):
        for record in page:
            yield record
        after = page[-1].step


async def batched(items: AsyncIterator[T], size: int) -> AsyncIterator[list[T]]:
    """Yield the items in lists of `size`, in order; the last list may be shorter."""
    some: list[T] = []
    async for item in items:
        some.append(item)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
