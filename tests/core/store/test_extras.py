"""Bytes of plugins as one value of a database."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError, StoreError
from lightning.store.rows import extras_digest, pack_extras, unpack_extras

NAMES = st.text(min_size=1, max_size=16).filter(str.isprintable)


@given(st.dictionaries(NAMES, st.binary(max_size=300), max_size=4), st.integers(0, 9))
def test_equal_extras_are_equal_bytes_and_come_back(extras: dict[str, bytes], seed: int) -> None:
    packed = pack_extras(extras, "them")
    assert unpack_extras(packed, "them") == extras
    shuffled = list(extras.items())
    random.Random(seed).shuffle(shuffled)
    assert pack_extras(dict(shuffled), "them") == packed
    assert (packed is None) == (not extras) == (extras_digest(packed) == "")


@given(NAMES, st.binary(max_size=30), st.data())
def test_a_value_that_is_cut_off_is_refused(name: str, kept: bytes, data: st.DataObject) -> None:
    packed = pack_extras({name: kept}, "them") or b""
    with pytest.raises(StoreError, match="the extras of x are corrupt in the database"):
        unpack_extras(packed[: data.draw(st.integers(1, len(packed) - 1))], "the extras of x")


def test_extras_are_bytes() -> None:
    with pytest.raises(DataError, match="a str of plugin 'x': let the plugin give bytes"):
        pack_extras({"x": "text"}, "they")  # type: ignore[dict-item]
