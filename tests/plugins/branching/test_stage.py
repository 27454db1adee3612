"""What the stage of branches has at hand of parents, and what a gateway without that stage says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config, with_settings
from lightning.errors import ConfigError, GatewayError, StoreError
from lightning.gateway.http import RefusalError
from lightning.gateway.identity import Claims
from lightning.plugins import Plugins
from lightning.runner.attempt_completion import report
from lightning.trainer import samplers
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.samplers import Asked
from lightning.types import UNSERVED, CallStatus, Fault, Outcome, Rollout, Task
from lightning_branching.branch_answers import Branches
from lightning_branching.recorded import is_void
from lightning_record import exchanges

from tests.core.gateway.conftest import build as build
from tests.core.gateway.conftest import house as house

ASKED = {"messages": [{"role": "user", "content": "hi there"}]}


class Told:
    """The stage of texts, as branches need it."""

    def __init__(self) -> None:
        self.given: dict[str, Sequence[exchanges.Said]] = {}

    def inherit(self, attempt: tuple[str, int], calls: Sequence[exchanges.Said]) -> None:
        self.given[attempt[0]] = calls


async def test_siblings_are_told_against_the_very_same_texts(house, monkeypatch):
    """They come at once and later, at this call and at the next one: nothing is unpacked again, and nothing is there twice."""
    http = await house.http()
    for n in range(4):
        await http.post("/chat/completions", json={"messages": [{"role": "user", "content": "hi" * (n + 1)}]})
    await house.recorded(4)
    rollout = house.leases[0].rollout
    first = [call.key for call in await house.transitions()]
    keys = {f"b{n}": first[3] for n in range(4)} | {"late": first[3], "other": first[2]}
    await house.store.create_rollouts(
        [Rollout(name, rollout.run, Task("q"), name, parent=at) for name, at in keys.items()]
    )
    unpacked: list[int] = []
    told, said_in_parent = Told(), exchanges.said_in_parent
    monkeypatch.setattr(
        exchanges, "said_in_parent", lambda calls, numbers: unpacked.extend(numbers) or said_in_parent(calls, numbers)
    )
    known = Branches(house.store, told)
    await asyncio.gather(*(known.of(Claims(f"b{n}", 1, 0.0)) for n in range(4)))
    await known.of(Claims("late", 1, 0.0))
    await known.of(Claims("other", 1, 0.0))
    given = told.given
    assert sorted(unpacked) == [0, 1, 2, 3]
    assert [said.seq for said in given["b0"]] == [3, 0, 1, 2]
    for name in ("b1", "b2", "b3", "late"):
        assert all(one is other for one, other in zip(given[name], given["b0"], strict=True))
    assert all(said is given["b0"][said.seq + 1] for said in given["other"])


async def test_a_parent_that_could_not_be_read_is_asked_for_again(house, monkeypatch):
    await (await house.http()).post("/chat/completions", json={"messages": [{"role": "user", "content": "hi there"}]})
    (call,) = await house.recorded()
    await house.store.create_rollouts([Rollout("b", "run", Task("q"), "b", parent=call.key)])
    known = Branches(house.store, None)
    with monkeypatch.context() as broken:
        broken.setattr(house.store, "attempts_of", AsyncMock(side_effect=StoreError("the disk is full")))
        with pytest.raises(RefusalError, match="the disk is full"):
            await known.of(Claims("b", 1, 0.0))
    assert (await known.of(Claims("b", 1, 0.0))).prefix.at.transition.key == call.key


async def test_a_gateway_without_the_stage_refuses_branches_by_name(build, monkeypatch):
    """Also with a key that another server has signed, which has the stage."""
    monkeypatch.setenv("LIGHTNING_DISABLE_PLUGINS", "branching")
    found = Plugins()
    monkeypatch.setattr("lightning.plugins.stages.plugins", lambda: found)
    house = await build()
    monkeypatch.setattr(samplers, "plugins", lambda: found)
    tree = Asked(with_settings(Config(), {"trainer.sampling": "tree"}), AlgorithmSchedule.of(LightningRL("grpo")))
    with pytest.raises(ConfigError, match=r"trainer\.sampling is 'tree', and no plugin .* 'branching' .* is disabled"):
        samplers.sampler_of(tree)
    await (await house.http()).post("/chat/completions", json=ASKED)
    (parent,) = await house.recorded()
    await house.store.create_rollouts([Rollout("b", "run", Task("q"), "g", parent=parent.key)])
    (lease,) = await house.store.lease("run", "worker")
    with pytest.raises(GatewayError, match="the rollout b is a branch, and no stage of this gateway answers"):
        house.gateway.llm(lease)
    llm = replace(await house.llm(), api_key=house.gateway.issue("b", 1, branch=True))
    answer = await (await house.http(llm)).post("/chat/completions", json=ASKED)
    said = answer.json()["error"]
    assert (answer.status_code, said["code"]) == (501, "no_stage")
    assert said["message"].startswith("This key is of a branch, and no stage of this gateway ")
    assert "LIGHTNING_DISABLE_PLUGINS" in said["message"]
    (call,) = await house.store.transitions("b")
    assert (call.status, call.finish_reason, call.error) == (CallStatus.ERROR, UNSERVED, said["message"])
    ended = await report(house.store, "b", 1, Outcome(error="no answer", fault=Fault.AGENT))
    assert (ended.fault, is_void(ended)) == (Fault.INFRASTRUCTURE, False), "another server may have the stage"
