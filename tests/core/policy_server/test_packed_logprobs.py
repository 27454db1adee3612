"""Packed logprobs and ids: the numbers, and for which requests they are wanted. Real vLLM's are held in `test_real_vllm.py`."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.policy_server import packed_logprobs as packed
from lightning.policy_server.packed_logprobs import (
    HEADER,
    IDS_HEADER,
    LOWEST,
    WANTED,
    PackedLogprobs,
    pack,
    pack_ids,
    unpack,
    unpack_ids,
)


@given(st.lists(st.floats(width=32, allow_nan=False, max_value=0.0)))
def test_what_is_unpacked_is_what_was_packed(values: list[float]) -> None:
    assert list(unpack(pack(array("f", values)))) == [max(value, LOWEST) for value in values]


def test_the_lowest_byte_comes_first() -> None:
    assert pack(array("f", [1.0])) == "AACAPw=="


@given(st.lists(st.integers(0, 2**20 - 1)))
def test_ids_survive_json(ids: list[int]) -> None:
    said = json.dumps(pack_ids(ids), ensure_ascii=False).encode()
    assert unpack_ids(orjson.loads(said)).tolist() == ids


def test_an_id_that_no_character_has_is_refused() -> None:
    with pytest.raises(ValueError, match="utf-32"):
        pack_ids([2**20])


def test_vllms_answer_packs_ids_for_a_marked_request_alone() -> None:
    class Answer:
        def __init__(self, **given: Any) -> None:
            self.given = given

    made = packed._packing_ids(Answer)
    token = packed._ids_wanted.set(True)
    marked = made(prompt_token_ids=[3, 4], id="x")
    packed._ids_wanted.reset(token)
    assert marked.given == {"prompt_token_ids": pack_ids([3, 4]), "id": "x"}
    assert made(prompt_token_ids=[3, 4]).given == {"prompt_token_ids": [3, 4]}


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({HEADER: WANTED}, (True, False)),
        ({IDS_HEADER: WANTED}, (False, True)),
        ({HEADER: "json"}, (False, False)),
        ({}, (False, False)),
    ],
)
async def test_they_are_wanted_for_a_request_with_the_header_alone(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], wanted: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(packed, "install", lambda: None)
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((packed._wanted.get(), packed._ids_wanted.get()))

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    await PackedLogprobs(app)(scope, None, None)
    await PackedLogprobs(app)({"type": "lifespan"}, None, None)
    assert seen == [wanted, (False, False)]


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
