"""Masked calls of a real vLLM on a CPU, trained as any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from lightning.batch import Sample, Trajectory, build_samples, mask_of
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.gateway import Upstream
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.types import Rollout, Task, Transition

from tests.core.gateway.conftest import House, build

__all__ = ["build"]
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


async def ask(real: House, **asked: Any) -> list[Transition]:
    """Make one call, and return its transitions."""
    llm = await real.llm()
    http = await real.http(llm)
    body = {"messages": HI, "max_tokens": 12, **asked}
    reply = await http.post("chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "beside" not in reply.text and "masks" not in reply.text
    return await real.transitions(len(real.leases) - 1)


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
    assert call.constrained and mask is not None and mask.is_set.any()
    found = gap(engine, rows_of(calls))
    print(f"{name}: gap {found:.1e}, {len(call.extras['masks']) / len(call.response_ids):.1f} bytes a token")
    assert found <= 1e-3
