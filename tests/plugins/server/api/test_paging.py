"""Pages of whole lists: everything that stays is seen once, whatever is added meanwhile."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning_server.api.store_routes import page, size_of
from lightning_server.api.table import Paging

NUMBERS = st.lists(st.integers(0, 999), unique=True, max_size=30).map(sorted)


@given(NUMBERS, st.integers(1, 7), st.data())
def test_what_stays_is_seen_once(numbers: list[int], limit: int, data: st.DataObject) -> None:
    now, seen, cursor = list(numbers), [], ""
    for _ in range(200):
        found = page(now, Paging(cursor, limit), str)
        assert len(found.items) <= limit
        seen += found.items
        cursor = found.cursor
        if not cursor:
            break
        now = sorted({*now, *data.draw(st.lists(st.integers(0, 999), max_size=2))})
    assert set(numbers) <= set(seen)
    assert len(seen) == len(set(seen))


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 100))
def test_a_page_is_as_large_as_it_may_be_and_never_empty(sizes: list[int], most: int) -> None:
    texts = ["x" * size for size in sizes]
    seen, cursor = [], ""
    with patch("lightning_server.api.store_routes.PAGE_BYTES", most):
        while True:
            found = page(texts, Paging(cursor, 1000))
            assert sum(map(size_of, found.items)) <= most or len(found.items) == 1
            seen += found.items
            cursor = found.cursor
            if not cursor:
                break
    assert seen == texts


@pytest.mark.parametrize("cursor", ["x", "-1", "1" * 30, "²"])
def test_a_cursor_of_nothing_is_refused(cursor: str) -> None:
    with pytest.raises(DataError, match="is not a cursor"):
        page([1, 2], Paging(cursor))
    with pytest.raises(DataError, match="is not a cursor"):
        page([1, 2], Paging(cursor), str)
