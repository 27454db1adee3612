"""Pages of lists that a store gives whole, and of what an attempt has.

The invariant: whoever follows the cursors sees each item that was there from the first page to the last exactly once, also
when others are added before, between or behind them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lightning.store.protocol import Attempt, Page
from lightning.store.rollout_state import no_cursor
from lightning.types import StepRecord, Transition

from lightning_server.api.table import ApiCall, Paging

T = TypeVar("T")
PAGE_BYTES = 16 * 1024 * 1024
"""Bytes of one answer, about; an attempt, a call or an event that is longer comes alone."""
ATTEMPT_CURSOR = re.compile(r"([0-9]{1,18})\.(.+)")
"""The attempt of a page whose request names none, and the cursor within it."""


def page(items: Sequence[T], asked: Paging, identity: Callable[[T], str] | None = None) -> Page[T]:
    """The part of `items` that was asked for. The cursor is the `identity` of the last item given, which no other has;
    without one, its number, for lists that only grow at their end. A page ends when its items exceed `PAGE_BYTES` in sum; it
    has at least one.

    Raises `DataError` for a cursor that belongs to no item.
    """
    start = _start(items, asked.cursor, identity)
    end = _fitting(items, start, min(start + asked.limit, len(items)))
    chosen = tuple(items[start:end])
    if end == len(items) or not chosen:
        return Page(chosen)
    return Page(chosen, str(end) if identity is None else identity(chosen[-1]))


def _start(items: Sequence[T], cursor: str, identity: Callable[[T], str] | None) -> int:
    if not cursor:
        return 0
    if identity is None:
        if cursor.isascii() and cursor.isdecimal() and len(cursor) < 10:
            return min(int(cursor), len(items))
    else:
        for number, item in enumerate(items):
            if identity(item) == cursor:
                return number + 1
    raise no_cursor(cursor)


def _fitting(items: Sequence[T], start: int, end: int) -> int:
    used = 0
    for number in range(start, end):
        used += size_of(items[number])
        if used > PAGE_BYTES and number > start:
            return number
    return end


def size_of(item: object) -> int:
    """Bytes of an item of a list, about; what agents tell may be long anywhere."""
    if isinstance(item, (Attempt, StepRecord)):
        return _size(item.extras) + len(repr(replace(item, extras={})))
    if isinstance(item, Transition):
        numbers = len(item.prompt_ids) + len(item.response_ids) + len(item.logprobs)
        return 4 * numbers + 500 + _size(item.extras) + len(item.error)
    return sum(map(size_of, item)) if isinstance(item, list) else len(repr(item))


def _size(extras: Mapping[str, bytes]) -> int:
    return sum(map(len, extras.values()))


async def page_of_attempt(
    call: ApiCall[Any, None],
    read: Callable[[str, int | None], Awaitable[Sequence[T]]],
    identity: Callable[[T], str] | None = None,
) -> Page[T]:
    """A page of what an attempt has. Where none was named its cursors name it: the next attempt may begin between two pages."""
    asked, rollout = call.query, call.path["rollout"]
    if asked.attempt is not None:
        return page(await read(rollout, asked.attempt), asked, identity)
    attempt, cursor = await _place(call)
    found = page(await read(rollout, attempt), Paging(cursor, asked.limit), identity)
    return replace(found, cursor=f"{attempt}.{found.cursor}") if found.cursor else found


async def _place(call: ApiCall[Any, None]) -> tuple[int | None, str]:
    """The attempt whose pages are asked for, and the cursor within it. Raises `DataError` for a cursor of something else.

    The attempt is None for a rollout that is not there: reading from it says so.
    """
    if not call.query.cursor:
        rollout = await call.store.get_rollout(call.path["rollout"])
        return (None if rollout is None else rollout.attempt), ""
    said = ATTEMPT_CURSOR.fullmatch(call.query.cursor)
    if said is None:
        raise no_cursor(call.query.cursor)
    return int(said[1]), said[2]
