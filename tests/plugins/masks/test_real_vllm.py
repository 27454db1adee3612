"""Masked calls of a real vLLM on a CPU, trained as any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from lightning.batch import Sample, Trajectory, build_samples, mask_of
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.gateway import Upstream
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.trainer.metrics import is_greedy
from lightning.types import CallStatus, Rollout, Task, Transition

from tests.core.gateway.conftest import House

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "Write a long story about the number 42."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.5},
    "bad_words": {"bad_words": ["a", "the", "o"]},
    "logit_bias": {"logit_bias": {"65": 4.5, "70": -3, "71": 100}, "temperature": 0.7},
    "allowed": {"allowed_token_ids": [65, 66, 67, 70, 80]},
    "min_tokens": {"min_tokens": 10},
    "choice": {"structured_outputs": {"choice": ["yes please", "no thanks"]}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "regex": {"structured_outputs": {"regex": "[a-z]{6}[0-9]*"}},
    "all": {"top_p": 0.95, "top_k": 100, "min_p": 0.01, "temperature": 1.3, "logit_bias": {"66": 2}, "min_tokens": 4},
}


@pytest.fixture
async def real(build: Callable[..., Any], served: Any) -> House:
    vllm: OwnedVLLM = served.vllm
    made: House = await build(upstreams=[Upstream(vllm.url, vllm.model)], version=vllm.version)
    return made


@pytest.fixture
def engine(served: Any) -> Iterator[TorchEngine]:
    made = TorchEngine(device="cpu", dtype="float32")
    made.open(served.first, OptimizerConfig(), seed=0)
    yield made
    made.close()


async def ask(real: House, path: str = "chat/completions", **asked: Any) -> list[Transition]:
    """Make one call, and return its transitions."""
    llm = await real.llm()
    return await ask_by(real, len(real.leases) - 1, await real.http(llm), path, **asked)


async def ask_by(real: House, number: int, http: Any, path: str = "chat/completions", **asked: Any) -> list[Transition]:
    """Make the one call of an attempt, by its number, and return its transitions."""
    body = {name: value for name, value in {"messages": HI, "max_tokens": 12, **asked}.items() if value is not None}
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert "beside" not in reply.text
    return await real.transitions(number)


def rows_of(calls: list[Transition]) -> list[Sample]:
    """The training rows of calls, each of its own rollout."""
    found = [
        Trajectory(Rollout(call.rollout, "run", Task(0), "g", attempt=call.attempt), (call,), (True,)) for call in calls
    ]
    return list(build_samples(found, [[1.0]] * len(found)))


def gap(engine: TorchEngine, rows: list[Sample]) -> float:
    """The largest |trainer - sampler|, which every trained token has."""
    ours = engine.logprobs(rows)
    gaps = [abs(own - row.logprobs)[row.weights != 0] for own, row in zip(ours, rows, strict=True)]
    assert all(np.isfinite(each).all() and len(each) for each in gaps)
    return float(max(each.max() for each in gaps))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", SAMPLERS)
async def test_the_trainer_has_the_samplers_logprobs(real: House, engine: TorchEngine, name: str, stream: bool) -> None:
    calls = await ask(real, stream=stream, seed=5, **SAMPLERS[name])
    (call,) = calls
    mask = mask_of(call)
    assert call.constrained
    assert mask is not None
    assert mask.is_set.any()
    found = gap(engine, rows_of(calls))
    print(f"{name}: gap {found:.1e}, {len(call.extras['masks']) / len(call.response_ids):.1f} bytes a token")
    assert found <= 1e-3


FORMS: Mapping[str, Mapping[str, Any]] = {
    "several choices": {"n": 3},
    "several choices, streamed": {"n": 3, "stream": True},
    "a stop string": {"stop": ["e", "a", "\n", "1"], "max_tokens": 100},
    "a stop string, streamed": {"stop": ["e", "a", "\n", "1"], "max_tokens": 100, "stream": True},
    "logprobs for the agent": {"logprobs": True, "top_logprobs": 3},
    "logprobs for the agent, streamed": {"logprobs": True, "top_logprobs": 3, "stream": True},
    "completions": {"path": "completions", "prompt": ["once upon", "a"], "messages": None, "n": 2},
    "responses": {"path": "responses", "input": "Hello", "messages": None, "max_tokens": None, "max_output_tokens": 12},
    "messages": {"path": "messages", "stream": True, "model": "policy"},
}


@pytest.mark.parametrize("form", FORMS)
async def test_masks_come_with_every_form_of_answer(real: House, engine: TorchEngine, form: str) -> None:
    calls = await ask(real, **FORMS[form], top_p=0.8)
    assert len(calls) == {"completions": 4}.get(form, FORMS[form].get("n", 1))
    assert all(mask_of(call) is not None for call in calls)
    assert gap(engine, rows_of(calls)) <= 1e-3


async def test_calls_beside_masked_ones_have_none(real: House, engine: TorchEngine) -> None:
    """Requests with masks, without, greedy and seeded share steps of the engine."""
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.8},
        {},
        {"temperature": 0},
        {"seed": 3},
        {"top_k": 5, "temperature": 0.5},
    ] * 3
    clients = [await real.http() for _ in kinds]
    asking = [ask_by(real, number, http, **kinds[number]) for number, http in enumerate(clients)]
    found = [call for calls in await asyncio.gather(*asking) for call in calls]
    assert ["masks" in call.extras for call in found] == ["top_p" in kind or "top_k" in kind for kind in kinds]
    assert gap(engine, rows_of([call for call in found if not is_greedy(call)])) <= 1e-3


async def test_a_call_through_an_update_keeps_the_masks_of_both_versions(real: House, served: Any) -> None:
    vllm, length = served.vllm, 1500
    for _ in range(5):  # vLLM may have all tokens before a busy machine comes to the update
        task = asyncio.create_task(ask(real, top_p=0.9, max_tokens=length, ignore_eos=True, stream=True))
        await asyncio.sleep(0.3)
        async with real.gateway.hold():
            real.gateway.own.update(await vllm.update(served.second / "model.safetensors", vllm.version + 1))
        (call,) = await task
        if len(call.versions) == 2:
            break
        async with real.gateway.hold():
            real.gateway.own.update(await vllm.update(served.first / "model.safetensors", vllm.version + 1))
    assert len(call.versions) == 2
    mask, cut = mask_of(call), call.versions[1].start
    assert mask is not None
    assert mask[:cut].is_set.any()
    assert mask[cut:].is_set.any()
    made = TorchEngine(device="cpu", dtype="float32")
    made.open(served.first, OptimizerConfig(), seed=0)
    (row,) = rows_of([call])
    (ours,) = made.logprobs([row])
    made.close()
    begin = len(call.prompt_ids)
    assert np.abs(ours - row.logprobs)[begin : begin + cut].max() <= 1e-3


async def test_an_aborted_call_is_recorded_without_masks(real: House) -> None:
    llm = await real.llm()
    http = await real.http(llm)
    body = {"messages": HI, "max_tokens": 1500, "min_tokens": 1500, "top_p": 0.9, "stream": True}
    async with http.stream("POST", "chat/completions", json=body) as reply:
        await anext(reply.aiter_bytes())
    async with asyncio.timeout(30):
        while not (found := await real.transitions(len(real.leases) - 1)):
            await asyncio.sleep(0.05)
    assert found[0].status is CallStatus.ABORTED
    assert "masks" not in found[0].extras
    assert mask_of((await ask(real, top_p=0.9))[0]) is not None
