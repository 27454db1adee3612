"""Whatever model an agent asks for the policy answers; a name that is not the policy's is said once."""

from __future__ import annotations

import logging

import pytest
from lightning.errors import StoreError
from lightning.gateway import policy as gateway_policy
from lightning.store.memory import MemoryStore
from lightning.types import Rollout, Run, Task

HI = [{"role": "user", "content": "hi there"}]
BASE = "/models/Qwen/Qwen3-4B"


class DeafStore(MemoryStore):
    """A store that does not say what a run is."""

    async def get_run(self, run):
        raise StoreError("the store is away")


async def ask_for(house, *names: object, run: str = "trained") -> None:
    """Calls of one rollout of a run that trains `BASE`, each by another model's name."""
    await house.store.put_run(Run(run, run, {"model": BASE}))
    await house.store.create_rollouts([Rollout(f"{run}/0", run, Task("x"), "g")])
    (lease,) = await house.store.lease(run, "worker")
    http = await house.http(house.gateway.llm(lease))
    for name in names:
        answer = await http.post("/chat/completions", json={"messages": HI, **({"model": name} if name else {})})
        assert answer.status_code == 200
    assert len(await house.store.transitions(f"{run}/0")) == len(names)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == gateway_policy.log.name]


async def test_another_models_name_is_said_once_for_each_run(house, caplog):
    with caplog.at_level(logging.WARNING):
        await ask_for(house, "gpt-4o-mini", "policy", "gpt-4o-mini")
        await ask_for(house, "gpt-4o-mini", run="another")
    first, second = told(caplog)
    assert first.startswith("'gpt-4o-mini' was asked for in run trained, and the policy answers")
    assert "base_url and an API key of its own" in first
    assert "train_agents" in first
    assert "in run another" in second


@pytest.mark.parametrize("name", [None, "policy", "policy:judge", BASE, "Qwen3-4B", "tiny"])
async def test_the_policys_own_names_are_as_expected(house, caplog, name):
    assert house.fake.model == "tiny"
    with caplog.at_level(logging.WARNING):
        await ask_for(house, name)
    assert told(caplog) == []


async def test_a_name_costs_no_call_and_little_memory(build, caplog, monkeypatch):
    monkeypatch.setattr(gateway_policy, "NAMES", 2)
    house = await build(store=DeafStore())
    with caplog.at_level(logging.WARNING):
        await ask_for(house, "x" * 100_000, "b", "c", "d")
    *_, limit = told(caplog)
    assert len(told(caplog)) == 3
    assert limit == "agents have asked for 2 models' names: from here on none is looked at, nor said here"
    assert all(len(text) < 1000 for text in told(caplog))
