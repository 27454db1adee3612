"""Pages of lists that a store gives whole.

The invariant: whoever follows the cursors sees each item that was there from the first page to the last exactly once, also
when others are added before, between or behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning.server.api.table import Paging
from lightning.store.json_codec import Slice
from lightning.store.rollout_state import no_cursor

T = TypeVar("T")


def page(
    items: Sequence[T],
    asked: Paging,
    identity: Callable[[T], str] | None = None,
    *,
    size: Callable[[T], int] | None = None,
    most: int = 0,
) -> Slice[T]:
    """The part of `items` that was asked for. The cursor is the `identity` of the last item given, which no other has;
    without one, its number, for lists that only grow at their end. With `size` a page ends when its items exceed `most`
    in sum; it has at least one.

    Raises `DataError` for a cursor that belongs to no item.
    """
    start = _start(items, asked.cursor, identity)
    end = min(start + asked.limit, len(items))
    if size is not None:
        end = _fitting(items, start, end, size, most)
    chosen = tuple(items[start:end])
    if end == len(items) or not chosen:
        return Slice(chosen)
    return Slice(chosen, str(end) if identity is None else identity(chosen[-1]))


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


def _fitting(items: Sequence[T], start: int, end: int, size: Callable[[T], int], most: int) -> int:
    used = 0
    for number in range(start, end):
        used += size(items[number])
        if used > most and number > start:
            return number
    return end
