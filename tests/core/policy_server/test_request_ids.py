"""Engine request ids lead back to the ids that the gateway sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.policy_server.control import client_counts, client_key

IDS = st.text(min_size=1, max_size=40)
SUFFIX = st.text("0123456789abcdef", min_size=8, max_size=8)


@pytest.mark.parametrize(
    ("engine_id", "key"),
    [
        ("chatcmpl-r1/0/3-0123abcd", "r1/0/3"),
        ("2_chatcmpl-r1/0/3-0123abcd", "2_r1/0/3"),
        ("cmpl-r1-0-0123abcd", "r1"),
        ("1_cmpl-r1-0-0123abcd", "1_r1"),
        ("cmpl-r1-2-0123abcd", "2_r1"),
        ("1_cmpl-r1-2-0123abcd", "1_r1-2"),
        ("embd-r1-0123abcd", "embd-r1"),
        ("chatcmpl-deadbeef-0123abcd", "deadbeef"),
        ("chatcmpl-x-deadbeef-0123abcd", "x-deadbeef"),
    ],
)
def test_names(engine_id: str, key: str) -> None:
    assert client_key(engine_id) == key


def test_without_randomization_an_id_keeps_what_looks_like_a_suffix() -> None:
    assert client_key("chatcmpl-x-deadbeef", randomized=False) == "x-deadbeef"


@given(request_id=IDS, suffix=SUFFIX, choice=st.integers(0, 99))
def test_every_id_survives_the_engine(request_id: str, suffix: str, choice: int) -> None:
    assert client_key(f"chatcmpl-{request_id}-{suffix}") == request_id
    assert client_key(f"cmpl-{request_id}-0-{suffix}") == request_id
    assert client_key(f"{choice}_chatcmpl-{request_id}-{suffix}") == f"{choice}_{request_id}"
    assert client_key(f"{choice}_cmpl-{request_id}-0-{suffix}") == f"{choice}_{request_id}"


def test_a_repeated_id_counts_its_furthest_try() -> None:
    counts = {"chatcmpl-a-00000000": 3, "chatcmpl-a-00000001": 7, "0_chatcmpl-b-00000000": 1}
    assert client_counts(counts) == {"a": 7, "0_b": 1}
