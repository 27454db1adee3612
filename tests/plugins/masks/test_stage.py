"""The call stage before a fake vLLM: when it asks, what it keeps, and what it says."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.batch import mask_of, sampler_logprobs
from lightning.gateway.dialects import Choice
from lightning.gateway.http import UpstreamError
from lightning.types import CallStatus
from lightning.types.recorded import UNTRAINED_HEADER
from lightning_masks import stage, worker
from lightning_masks.codes import ASKED, HEADER, WANTED, code_of
from lightning_masks.middleware import carrying
from lightning_masks.stage import extra_of
from lightning_masks.texts import SPENT, Budget, Texts, joined

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("asked", "wants"),
    [
        ({}, False),
        ({"top_p": 1.0, "top_k": -1}, False),
        ({"top_p": 0.9}, True),
        ({"top_p": 0.9, "temperature": 0}, False),
        ({"bad_words": ["no"]}, True),
        ({"logit_bias": {"5": 1.5}}, True),
        ({"logit_bias": {"x": 1.5}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"min_tokens": 3}, True),
        ({"top_p": 0.9, "frequency_penalty": 0.1}, False),
        ({"top_p": 0.9, "vllm_xargs": {"a": 1}}, False),
        ({"top_p": 0.9, "echo": True}, False),
    ],
)
async def test_only_calls_under_a_mask_ask_for_it(house: Any, asked: dict[str, Any], wants: bool) -> None:
    http = await house.http()
    assert (await http.post("/chat/completions", json={"messages": HI, **asked})).status_code == 200
    assert (house.fake.requests[0].headers.get(HEADER) == WANTED) is wants
    assert ASKED not in str(house.fake.requests[0].body)


async def test_a_call_that_is_not_trained_asks_for_none(house: Any) -> None:
    http = await house.http()
    await http.post("/chat/completions", json={"messages": HI, "top_p": 0.9}, headers={UNTRAINED_HEADER: "a title"})
    assert HEADER not in house.fake.requests[0].headers
    (call,) = await house.transitions()
    assert call.untrained == "a title"


async def test_an_agent_cannot_ask(house: Any) -> None:
    http = await house.http()
    await http.post("/chat/completions", json={"messages": HI}, headers={HEADER: WANTED})
    assert HEADER not in house.fake.requests[0].headers


async def test_a_vllm_that_sends_none_is_said_once_and_the_call_has_the_ratio_1(house: Any, caplog: Any) -> None:
    http = await house.http()
    for _ in range(2):
        await http.post("/chat/completions", json={"messages": HI, "top_p": 0.9})
    for call in await house.transitions():
        assert call.constrained
        assert mask_of(call) is None
        assert np.isnan(sampler_logprobs(call)).all()
    (said,) = [line for line in caplog.messages if "sampling masks" in line]
    assert "--middleware lightning_masks.middleware.SamplingMasks` and LIGHTNING_WORKER_PARTS=lightning_masks" in said


async def test_a_penalty_is_said_once(house: Any, caplog: Any) -> None:
    caplog.set_level("INFO")
    http = await house.http()
    for _ in range(2):
        await http.post("/chat/completions", json={"messages": HI, "presence_penalty": 0.5})
    assert len([line for line in caplog.messages if line.startswith("calls with presence_penalty are trained")]) == 1


class Kept:
    """A call with one choice."""

    def __init__(self, choice: Choice) -> None:
        self.capture, self.untrained = SimpleNamespace(choices={0: choice}), ""


async def test_masks_that_no_store_takes_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    texts = texts_of(300, [code_of(np.arange(300) % 2 == 0)])
    choice = Choice(response_ids=array("i", [0]), beside={"masks": texts})
    kept = Kept(choice)
    answered = SimpleNamespace(outcome=CallStatus.OK)
    for large in (1 << 20, 0):  # also in a thread
        monkeypatch.setattr(stage, "LARGE", large)
        made, choice.extras = stage.MasksStage(None), {}  # type: ignore[arg-type]
        made._asked = {kept: {}}  # type: ignore[assignment]
        await made.settled(kept, answered)  # type: ignore[arg-type]
        assert "masks" in choice.extras
    monkeypatch.setattr(stage, "LARGEST_EXTRA", 3)
    made._asked, choice.extras = {kept: {}}, {}  # type: ignore[assignment]
    await made.settled(kept, answered)  # type: ignore[arg-type]
    assert not choice.extras
    assert "the sampling masks of a call are larger than vLLM sends, or than the" in caplog.text


def texts_of(size: int, *chunks: Sequence[bytes], budget: Budget | None = None) -> list[str]:
    """The texts of the chunks of a choice, whose tokens have these codes."""
    texts = Texts(budget or Budget())
    return [texts.text([texts.note(size, code) for code in codes]) for codes in chunks]


CODES = [code_of(np.random.default_rng(seed).random(4000) < 0.3) for seed in range(4)]


@given(st.lists(st.lists(st.sampled_from(CODES), min_size=1), min_size=1))
def test_texts_are_read_as_they_were_written(chunks: list[list[bytes]]) -> None:
    every = [code for chunk in chunks for code in chunk]
    assert joined(texts_of(4000, *chunks)) == (4000, every)
    assert joined(texts_of(4000, every)) == (4000, every)


def test_equal_codes_are_sent_once_and_none_beyond_the_budget() -> None:
    one, many = (len("".join(texts_of(4000, *[CODES] * times))) for times in (1, 1000))
    assert many < one + 1000 * 20
    assert one < 4 * len(CODES[0])
    assert texts_of(4000, CODES[:1], CODES, budget=Budget(codes=len(CODES[0])))[1] == SPENT
    assert texts_of(4000, CODES[:1], CODES, CODES, budget=Budget(sent=one))[2] == SPENT
    choice = Choice(response_ids=array("i", [0]), beside={"masks": texts_of(4000, CODES, budget=Budget(sent=9))})
    assert extra_of(choice, {}) == stage.TOO_LARGE


def test_masks_of_some_tokens_alone_are_not_kept() -> None:
    code, other = code_of(np.array([True, False, True])), code_of(np.array([True, True, False]))
    first, second, third = texts_of(3, [code], [other], [code])
    choice = Choice(response_ids=array("i", [0, 0, 2]), beside={"masks": [first, second]})
    assert extra_of(choice, {}) == stage.INCOMPLETE
    choice.beside["masks"] = [first, third, third]
    assert extra_of(choice, {}) == stage.INCOMPLETE, "one text is lost"
    choice.beside["masks"] = [first, second, third]
    assert isinstance(extra_of(choice, {}), bytes)
    for wrong in (*texts_of(4, [code]), "3:0:0:9:", "3:0:0::", "3:2:9::", "3:0:0:0:", "3:0:0:3:AAAA", "x", 7):
        choice.beside["masks"] = [first, second, wrong]  # type: ignore[list-item]
        with pytest.raises(UpstreamError, match="sampling masks of another shape"):
            extra_of(choice, {})


@pytest.mark.parametrize("values", [array("f", [-1.0, -2.0, -3.0]), [{1: "a"}, {2: "b"}, {3: "c"}]])
def test_masks_go_with_their_logprobs_through_slices_and_merged_chunks(values: Any) -> None:
    codes = [code_of(np.arange(9) == own) for own in range(3)]

    def held() -> Any:
        made = carrying(values, Texts(Budget()))
        for code in codes:
            made.note(1, (9, code))
        return made

    whole = held()
    merged = whole[:1]
    merged.extend(whole[-2:])
    assert list(merged) == list(values)
    assert joined([merged.text(3)]) == (9, codes)
    assert held()[:0].text(0) == ""
    assert joined([held().text(2)]) == (9, codes[:2]), "tokens behind a stop are left out"
    streamed = held()
    assert joined([streamed[place : place + 1].text(1) for place in range(3)]) == (9, codes)
    for count, mask in ((1, None), (2, (9, codes[0]))):
        broken = held()
        broken.note(count, mask)
        assert broken.text(3 + count) == ""
        assert broken.text(5 + count) == ""


class Runner:
    """The parts of vLLM's model runner that are used, with three requests of which the last asks."""

    def __init__(self) -> None:
        asked = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={ASKED: True}))
        other = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None))
        self.requests = {"a": other, "b": other, "c": asked}
        self.input_batch = SimpleNamespace(req_ids=["a", "b", "c"])
        self.sampler = self.Sampler()

    class Sampler:
        """A sampler that keeps ids up to the row's number."""

        logprobs_mode = "processed_logprobs"

        def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
            rows, ids = torch.arange(3)[:, None], torch.arange(5)[None]
            return torch.zeros(3), torch.where(ids <= rows, -1.0, -torch.inf)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        tokens, _ = self.sampler.sample()
        ranks = torch.arange(3) + 1
        return SamplerOutput(tokens, LogprobsTensors(torch.zeros(3, 1), torch.zeros(3, 1), ranks))


@pytest.mark.slow  # imports vLLM
def test_the_worker_sends_the_mask_of_requests_that_ask_behind_the_rank() -> None:
    runner = Runner()
    worker.install(runner)
    tensors = runner._sample(None, None).logprobs_tensors.to_cpu_nonblocking()
    for found in (lists := tensors.tolists(), pickle.loads(pickle.dumps(lists))):
        assert worker.in_front(found.slice_request(0, 1).sampled_token_ranks) is None
        ranks = found.slice_request(2, 1).sampled_token_ranks
        assert int(ranks[0]) == 3
        assert worker.in_front(ranks) == (5, code_of(np.array([1, 1, 1, 0, 0], np.bool_)))
        assert len(found.slice_request(2, 0).sampled_token_ranks) == 0, "a token that is thrown away"
    assert "sample" not in vars(runner.sampler)
    plain = runner._sample(None, object()).logprobs_tensors
    assert not hasattr(plain, "codes"), "speculative decoding"
    runner.requests["c"] = runner.requests["a"]
    assert not hasattr(runner._sample(None, None).logprobs_tensors, "codes")


@pytest.mark.parametrize("lacks", ["sampler", "mode"])
def test_a_worker_that_cannot_is_left_as_it_is(lacks: str, caplog: Any) -> None:
    runner = Runner()
    if lacks == "sampler":
        del runner.sampler
    else:
        runner.sampler.logprobs_mode = "raw_logprobs"
    worker.install(runner)
    assert "_sample" not in vars(runner)
    assert "no sampling masks" in caplog.text
