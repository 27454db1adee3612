"""What a worker notes of a token is what training reads, whatever was kept."""

from __future__ import annotations

import base64
import hashlib
import pickle
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import Ragged, SamplingMask, mask_of, transition_digest
from lightning.batch import masks as core_masks
from lightning.bounded import Once
from lightning.errors import DataError
from lightning.plugins import Plugins
from lightning.testing.trajectories import make_call, make_trajectory
from lightning.trainer.training_data import rollout_digest
from lightning.types import Transition
from lightning_masks.codes import Codes, code_of, packed, unpacked
from lightning_masks.extra import HEAD, read, written
from lightning_masks.texts import MOST_CODES, joined

Kept = Sequence[Sequence[int]]


def call_of(kept: Kept, vocab: int, bias: dict[int, float] | None = None) -> Transition:
    """A call whose tokens are the first of the ids that each mask keeps."""
    table = np.zeros((len(kept), vocab), np.bool_)
    for row, ids in zip(table, kept, strict=True):
        row[list(ids)] = True
    extra = written(vocab, [code_of(row) for row in table], bias or {})
    call = make_call((1,), [min(ids) for ids in kept])
    return replace(call, constrained=True, extras={"masks": extra})


@st.composite
def masks(draw: st.DrawFn) -> tuple[Kept, int]:
    vocab = draw(st.sampled_from([5, 300, 40_000]))
    every = st.sets(st.integers(0, vocab - 1), min_size=1, max_size=min(vocab, 200))
    whole = set(range(vocab))
    one = every | every.map(lambda ids: (whole - ids) or whole) | st.just(whole)
    return [sorted(ids) for ids in draw(st.lists(one, min_size=1, max_size=5))], vocab


def apart(mask: SamplingMask) -> SamplingMask:
    """The same with a list of its own for each token."""
    parts = []
    for part in (mask.ids, mask.bias):
        _, ids, values = part.expanded()
        parts.append(Ragged(np.arange(len(part)), np.cumsum([0, *part.counts]), ids, values))
    return SamplingMask(mask.vocab_size, mask.is_left_out, *parts)


def said(mask: SamplingMask) -> str:
    """The digest of a mask."""
    digest = hashlib.sha256()
    mask.update(digest)
    return digest.hexdigest()


def biases(mask: SamplingMask) -> dict[int, float]:
    """The biases of the tokens of a mask, by id."""
    _, ids, values = mask.bias.expanded()
    assert values is not None
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


@given(masks(), st.dictionaries(st.integers(0, 4), st.floats(-100, 100, width=32)))
def test_a_mask_is_read_as_it_was_noted(given_masks: tuple[Kept, int], bias: dict[int, float]) -> None:
    kept, vocab = given_masks
    mask = mask_of(call := call_of(kept, vocab, bias))
    assert mask is not None
    assert mask.vocab_size == vocab
    for place, ids in enumerate(kept):
        one = mask[place : place + 1]
        held = set(one.ids.expanded()[1].tolist())
        assert (set(range(vocab)) - held if one.is_left_out[0] else held) == set(ids)
        assert 2 * len(held) <= vocab
        assert bias == biases(one)
    assert mask.is_set.tolist() == [len(ids) < vocab or bool(bias) for ids in kept]
    backwards = mask[np.arange(len(mask))[::-1]]
    same = (backwards[::-1], pickle.loads(pickle.dumps(mask)), SamplingMask.joined([mask[:1], mask[1:]]), apart(mask))
    assert {said(each) for each in (*same, read(call))} == {said(mask)}, (
        "a digest does not depend on which lists are shared"
    )
    tokens = np.random.default_rng(0).integers(0, vocab, len(kept))
    for own in (tokens, np.array([max(ids) for ids in kept])):
        assert mask.keeps(own).tolist() == [int(token) in set(ids) for token, ids in zip(own, kept, strict=True)]


@given(st.lists(st.integers(0, 2**35 - 1)))
def test_numbers_are_read_as_they_were_packed(numbers: list[int]) -> None:
    assert unpacked(packed(np.array(numbers, np.int64))).tolist() == numbers


def test_a_workers_codes_are_those_of_the_masks_and_bounded() -> None:
    codes, generator = Codes(most=3), np.random.default_rng(0)
    masks = [generator.random(40_000) < chance for chance in (0.001, 0.1, 0.3, 0.5, 0.9, 0.999)]
    for mask in [*masks, *masks[::-1], *masks]:
        assert codes.of(mask) == code_of(mask)
    assert len(codes._kept) == 3


def test_equal_masks_are_kept_once() -> None:
    kept = [list(range(0, 40_000, 3)), list(range(0, 40_000, 7))]
    one, many = (len(call_of(kept * times, 40_000).extras["masks"]) for times in (1, 100))
    assert many < one + 50


def test_equal_masks_take_the_memory_of_one() -> None:
    one = code_of(np.arange(150_000) % 3 == 0)
    call = replace(make_call((1,), [0] * 1000), constrained=True)
    call = replace(call, extras={"masks": written(150_000, [one] * 1000, {})})
    tracemalloc.start()
    mask = mask_of(call)
    assert mask is not None
    row = SamplingMask.placed(2000, {9: mask})
    assert row[np.arange(5, 1500)].keeps(np.zeros(1495, np.int64)).all()
    assert said(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_lists_that_are_not_ascending_are_a_flaw() -> None:
    mask = mask_of(call_of([[1, 2], [3]], 9))
    assert mask is not None
    wrong = replace(mask, ids=replace(mask.ids, ids=mask.ids.ids[::-1]))
    assert wrong.flaw() == "its sampling mask has ids that are not in ascending order"


def test_a_digest_tells_masks_apart() -> None:
    call, other = call_of([[1, 2], [3]], 9), call_of([[1, 2], [3, 4]], 9)
    biased = call_of([[1, 2], [3]], 9, {1: 0.5})
    free = replace(call, extras={})
    assert len({transition_digest(each) for each in (call, other, biased, free)}) == 4
    plain = replace(free, constrained=False)
    assert transition_digest(call_of([range(9)] * 2, 9)) != transition_digest(plain), "another response"
    assert transition_digest(replace(plain, extras={"other": b""})) == transition_digest(plain)


GOOD = call_of([[1, 2], [3]], 9).extras["masks"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (b"\x07" + GOOD[1:], r"are of version 7, and this release of lightning reads 1"),
        (b"", "are of version none"),
        (GOOD[:-3], r"are damaged \(their codes do not end\): leave the rollout out"),
        (GOOD[:5], "are damaged"),
        (HEAD.pack(1, 9, 2, 0) + zlib.compress(b"\x00\x01\x04\x01\x00\x02\x83"), "end within a number"),
        (HEAD.pack(1, 9, 3, 0) + zlib.compress(b"\x00\x01"), "are of 2 tokens, not 3"),
        (HEAD.pack(1, 9, 2, 0) + zlib.compress(b"\x00\x00\x04\x01\x00\x02\x03"), "do not end with the codes"),
        (HEAD.pack(1, 9, 2, 0) + zlib.compress(b"\x00\x01\x04\x01\x00\x04\x03"), "do not end with the codes"),
        (HEAD.pack(1, 3, 2, 0) + zlib.compress(b"\x00\x01\x04\x01\x00\x02\x03"), "outside of their vocabulary of 3"),
        (HEAD.pack(1, 9, 1, 0) + zlib.compress(b"\x00\x02\x01"), "masks of 1 tokens and 2 tokens"),
        (HEAD.pack(1, 9, 2, 0) + zlib.compress(b"\x00\x01\x02\x05\x02\x03"), "leaves out a token that was drawn"),
    ],
)
def test_a_damaged_mask_is_refused_by_its_call(extra: bytes, said: str) -> None:
    call = replace(call_of([[1, 2], [3]], 9), extras={"masks": extra})
    with pytest.raises(DataError, match=rf"rollout .* attempt \d+ call \d+ cannot be trained on: .*{said}"):
        mask_of(call)


def test_a_damaged_mask_of_a_call_that_is_not_trained_ends_no_step() -> None:
    call = replace(call_of([[1, 2], [3]], 9), extras={"masks": b"damaged"}, untrained="a title")
    made = replace(make_trajectory([((1,), (1, 3))]), transitions=(call,), trainable=(False,))
    other = replace(made, transitions=(replace(call, untrained="another"),))
    assert rollout_digest(made) != rollout_digest(other)
    with pytest.raises(DataError, match="its sampling masks are of version"):
        rollout_digest(replace(made, trainable=(True,)))


def test_masks_that_no_plugin_reads_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    there = Plugins()
    monkeypatch.setattr(there, "names", lambda kind: [])
    monkeypatch.setattr(core_masks, "plugins", lambda: there)
    monkeypatch.setattr(core_masks, "_said", Once())
    call = call_of([[1, 2], [3]], 9)
    for _ in range(2):
        assert mask_of(replace(call, extras={**call.extras, "texts": b"other"})) is None
    (said,) = [line for line in caplog.messages if "sampling masks" in line]
    assert "calls have sampling masks by 'masks', which no plugin reads here" in said
    assert "The plugin 'masks' brings it. Run: pip install" in said


def test_small_texts_of_large_codes_are_refused_before_they_are_unpacked() -> None:
    """A policy server cannot fill the gateway's memory: the limit is for all texts of a choice together."""
    packing, texts = zlib.compressobj(), list[str]()
    for number in range(3):
        piece = packing.compress(bytes(MOST_CODES)) + packing.flush(zlib.Z_SYNC_FLUSH)
        texts.append(f"100:{number}:{number}:{MOST_CODES}:{base64.b64encode(piece).decode()}")
    assert len(joined(texts[:2]) or ()) == 2
    with pytest.raises(ValueError, match=f"its codes are of {3 * MOST_CODES} bytes"):
        joined(texts)
