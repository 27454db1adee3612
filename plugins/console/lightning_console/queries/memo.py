"""Answers that are kept until they can have changed.

The invariant: an answer about a run is made again only when the run has changed, and, while the run goes on, only in a small
share of the time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from lightning.bounded import Bounded
from lightning.store.protocol import Store
from lightning.trainer.epochs import is_over

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
        self._answers: WeakKeyDictionary[Store, Bounded[Hashable, _Answer[T]]] = WeakKeyDictionary()
        self._making: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, store: Store, about: Hashable, stamp: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The answer that was made for this `stamp`, or a new one."""
        found = self._kept_answer(store, about, stamp)
        return found.value if found is not None else await asyncio.shield(self._made(store, about, stamp, make))

    async def soon(
        self, store: Store, about: Hashable, stamp: Hashable, make: Callable[[], Awaitable[T]], patience: float | None
    ) -> T | None:
        """As `get`; what is not there after `patience` seconds is an older answer, or None, and is made meanwhile."""
        found = self._kept_answer(store, about, stamp)
        if found is not None:
            return found.value
        task = self._made(store, about, stamp, make)
        await asyncio.wait([task], timeout=patience)
        if task.done():
            return task.result()
        older = self._of(store).get(about)
        return older.value if older is not None else None

    def _of(self, store: Store) -> Bounded[Hashable, _Answer[T]]:
        return self._answers.setdefault(store, Bounded(self._kept))

    def _kept_answer(self, store: Store, about: Hashable, stamp: Hashable) -> _Answer[T] | None:
        answers = self._of(store)
        answer = answers.get(about)
        if answer is None or (answer.stamp != stamp and time.monotonic() >= answer.until):
            return None
        answers.move_to_end(about)
        return answer

    def _made(
        self, store: Store, about: Hashable, stamp: Hashable, make: Callable[[], Awaitable[T]]
    ) -> asyncio.Task[T]:
        """The task that makes an answer: one, however many ask for it in this loop."""
        key = (id(asyncio.get_running_loop()), id(store), about)

        async def made() -> T:
            began = time.monotonic()
            try:
                value = await make()
            finally:
                self._making.pop(key, None)
            ended = time.monotonic()
            self._of(store).keep(about, _Answer(value, stamp, ended + SHARE * (ended - began)))
            return value

        if key not in self._making:
            task = self._making[key] = asyncio.create_task(made())
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # somebody may have stopped waiting
        return self._making[key]


async def stamp_of(store: Store, run: str) -> Hashable:
    """What changes when a run has gone on. Raises `StoreError`."""
    over, last = await is_over(store, run), await store.last_step(run)
    at = (last.step, last.digest) if last else None
    return (at, "over") if over else (at, tuple(await store.count_rollouts(run)))


async def apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The same in a thread of its own: what computes for long must not hold up who else is served."""
    return await asyncio.to_thread(lambda: asyncio.run(make()))
