"""Reads what is listed in pages, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, TypeVar

from lightning.store.protocol import Store
from lightning.types import Rollout, StepRecord

T = TypeVar("T")

STEPS: Final = 100
"""Steps read at once: 4 MB of 512 rollouts each."""


async def each_rollout(
    store: Store, run: str, *, split: str | None = None, step: int | None = None
) -> AsyncIterator[Rollout]:
    """The rollouts of a run in creation order. Only a page of them is kept: a run of weeks has gigabytes."""
    cursor = ""
    while True:
        page = await store.list_rollouts(run, split=split, step=step, cursor=cursor)
        for rollout in page.items:
            yield rollout
        cursor = page.cursor
        if not cursor:
            return


async def each_step(store: Store, run: str) -> AsyncIterator[StepRecord]:
    """The committed steps of a run in order. Only a page of them is kept."""
    after = 0
    while page := await store.steps(run, after=after, limit=STEPS):
        for record in page:
            yield record
        after = page[-1].step


async def batched(items: AsyncIterator[T], size: int) -> AsyncIterator[list[T]]:
    """The items in order, that many at once; fewer at the end."""
    some: list[T] = []
    async for item in items:
        some.append(item)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
