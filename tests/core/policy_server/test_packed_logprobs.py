"""Packed logprobs: the numbers, and for which requests they are wanted. Real vLLM's are held in `test_real_vllm.py`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.policy_server import packed_logprobs as packed
from lightning.policy_server.packed_logprobs import HEADER, LOWEST, WANTED, PackedLogprobs, pack, unpack


@given(st.lists(st.floats(width=32, allow_nan=False, max_value=0.0)))
def test_what_is_unpacked_is_what_was_packed(values: list[float]) -> None:
    assert list(unpack(pack(array("f", values)))) == [max(value, LOWEST) for value in values]


def test_the_lowest_byte_comes_first() -> None:
    assert pack(array("f", [1.0])) == "AACAPw=="


@pytest.mark.parametrize(("headers", "wanted"), [({HEADER: WANTED}, True), ({HEADER: "json"}, False), ({}, False)])
async def test_they_are_wanted_for_a_request_with_the_header_alone(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], wanted: bool
) -> None:
    monkeypatch.setattr(packed, "install", lambda: None)
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(packed._wanted.get())

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    await PackedLogprobs(app)(scope, None, None)
    await PackedLogprobs(app)({"type": "lifespan"}, None, None)
    assert seen == [wanted, False]


def test_a_vllm_that_is_built_otherwise_answers_in_json_and_says_so(
    monkeypatch: pytest.MonkeyPatch, warnings_of: Callable[[], list[str]]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    packed.install.cache_clear()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Never called."""

    PackedLogprobs(app)
    (said,) = warnings_of()
    assert said.startswith("logprobs are sent as JSON: this vLLM is not one that they can be packed in")
