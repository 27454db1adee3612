"""Answers that are kept until they can have changed.

The invariant: an answer about a run is made again only when the run has changed, and, while the run goes on, only in a small
share of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from lightning.store.epochs import is_over
from lightning.store.protocol import Store

T = TypeVar("T")
SHARE: Final = 20.0
"""An answer is kept for so many times what making it took, also when the run has gone on meanwhile."""
KEPT: Final = 64
"""Answers that are kept of a store."""


@dataclass
class _Answer(Generic[T]):
    value: T
    stamp: Hashable
    until: float


class Memo(Generic[T]):
    """Keeps answers of a store, by what they are about; the oldest are forgotten."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._answers: WeakKeyDictionary[Store, OrderedDict[Hashable, _Answer[T]]] = WeakKeyDictionary()

    async def get(self, store: Store, about: Hashable, stamp: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The answer that was made for this `stamp`, or a new one."""
        answers = self._answers.setdefault(store, OrderedDict())
        answer = answers.get(about)
        if answer is None or (answer.stamp != stamp and time.monotonic() >= answer.until):
            began = time.monotonic()
            value = await make()
            ended = time.monotonic()
            answer = answers[about] = _Answer(value, stamp, ended + SHARE * (ended - began))
            while len(answers) > self._kept:
                answers.popitem(last=False)
        answers.move_to_end(about)
        return answer.value


async def stamp_of(store: Store, run: str) -> Hashable:
    """What changes when a run has gone on. Raises `StoreError`."""
    over, last = await is_over(store, run), await store.last_step(run)
    at = (last.step, last.digest) if last else None
    return (at, "over") if over else (at, tuple(await store.count_rollouts(run)))


async def apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The same in a thread of its own: what computes for long must not hold up who else is served."""
    return await asyncio.to_thread(lambda: asyncio.run(make()))
