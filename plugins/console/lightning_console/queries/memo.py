"""A cache of answers about runs, each kept until its run has changed.

The invariant: an answer is computed again only when its run has changed, and for a run that goes on, computing it takes only a
small share of the time.
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
from lightning.trainer.context import is_over

T = TypeVar("T")
SHARE: Final = 20.0
"""An answer is kept at least for this many times the time that computing it took, even if the run has changed meanwhile."""
KEPT: Final = 64
"""Most answers that are kept for one store."""


@dataclass
class _Answer(Generic[T]):
    value: T
    stamp: Hashable
    until: float


class Memo(Generic[T]):
    """A cache of answers for each store, by their subject (`about`). It keeps `kept` answers of a store and drops those that
    were not used for longest. Making an answer is at work for the share `busy` of its time, and rests for the others."""

    def __init__(self, kept: int = KEPT, *, busy: float = 1.0) -> None:
        self._kept, self._busy = kept, busy
        self._answers: WeakKeyDictionary[Store, Bounded[Hashable, _Answer[T]]] = WeakKeyDictionary()
        self._making: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, store: Store, about: Hashable, stamp: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """Return the kept answer if its `stamp` is the same or it is still too new to be made again; else make a new one. Calls
        at the same time share one `make`."""
        found = self._kept_answer(store, about, stamp)
        return found.value if found is not None else await asyncio.shield(self._made(store, about, stamp, make))

    async def soon(
        self, store: Store, about: Hashable, stamp: Hashable, make: Callable[[], Awaitable[T]], patience: float | None
    ) -> T | None:
        """Return as `get` does, but wait at most `patience` seconds (None: no limit). After that, return the older answer, or
        None if there is none, while the new one is made in the background."""
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
        """Return the task that makes an answer; callers in the same event loop share it."""
        key = (id(asyncio.get_running_loop()), id(store), about)

        async def made() -> T:
            began = time.monotonic()
            try:
                value = await make()
            finally:
                self._making.pop(key, None)
            ended = time.monotonic()
            self._of(store).keep(about, _Answer(value, stamp, ended + SHARE * self._busy * (ended - began)))
            return value

        if key not in self._making:
            task = self._making[key] = asyncio.create_task(made())
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # read the error, because nobody may be waiting any more
        return self._making[key]


async def stamp_of(store: Store, run: str) -> Hashable:
    """Return a value that differs once a run has changed: its last step, whether it is over, else its counts of rollouts.
    Raises `StoreError`."""
    over, last = await is_over(store, run), await store.last_step(run)
    at = (last.step, last.digest) if last else None
    return (at, "over") if over else (at, tuple(await store.count_rollouts(run)))


async def apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in an event loop of its own in a thread, so that a long computation does not delay other requests."""
    return await asyncio.to_thread(lambda: asyncio.run(make()))
