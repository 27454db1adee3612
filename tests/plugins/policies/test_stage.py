"""The call stage `policies`: which policy a call has, as its record says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lightning.config import load_config
from lightning.gateway.identity import Claims
from lightning.store.memory import MemoryStore
from lightning.types import Caller, CallStatus, Run, VersionRun

HI = [{"role": "user", "content": "hi there"}]
SETTINGS = (
    'policies.writer.agents=["sql/writer", "editor"]',
    'policies.checker.agents=["checker"]',
    "policies.checker.train=false",
    'policies.guest.models=["gpt-*"]',
)


class Counting(MemoryStore):
    """Counts how often a run is read."""

    reads = 0

    async def get_run(self, run: str) -> Run | None:
        self.reads += 1
        return await super().get_run(run)


async def opened(build: Any, *overrides: str) -> Any:
    """Return a gateway for a run with these settings."""
    store = Counting()
    await store.open()
    config = load_config(overrides=overrides, env={}).model_dump(mode="json")
    await store.put_run(Run("run", "run", {"config": config} if overrides else {}))
    made = await build(store=store, version=3)
    store.reads = 0
    return made


async def ask(house: Any, llm: Any, path: str, model: str = "policy") -> Any:
    names = path.split("/")
    caller = json.dumps({"agent": names[-1], "path": names})
    http = await house.http(llm)
    body = {"model": model, "messages": HI}
    return await http.post("/chat/completions", json=body, headers={"x-lightning-caller": caller})


async def test_a_call_has_the_policy_of_its_agent_or_of_the_model_that_it_asks_for(build: Any) -> None:
    house = await opened(build, *SETTINGS)
    llm = await house.llm()
    asked = [("sql/writer", ""), ("team/editor", ""), ("checker", ""), ("sql/other", "gpt-4o"), ("writer", "")]
    for path, model in asked:
        assert (await ask(house, llm, path, model or "policy")).status_code == 200
    found = [(call.policy, call.versions[0].version) for call in await house.transitions()]
    assert found == [("writer", 3), ("writer", 3), ("checker", 0), ("guest", 3), ("base", 0)]


async def test_models_lists_the_names_that_a_call_may_ask_for(build: Any) -> None:
    house = await opened(build, *SETTINGS, 'policies.editor.models=["small", "tiny-*"]')
    llm = await house.llm()
    names = [card["id"] for card in (await (await house.http(llm)).get("/models")).json()["data"]]
    assert names == ["policy", "small"], "the policy of the calling agent, and no globs"
    answers = [await ask(house, llm, "unknown", name) for name in names]
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_served_session_lists_its_policies_alone(build: Any) -> None:
    """`lightning serve RUN` gives each policy the model of its name; a call that asks for `policy` is refused there."""
    house = await opened(build, 'policies.writer.models=["writer"]', 'policies.editor.models=["editor"]')
    found = await house.gateway.parts.line.models(Claims("run/0", 1, 1e10, session="run"))
    assert found == {"writer": "writer", "editor": "editor"}


async def test_an_agent_without_a_policy_is_refused_where_the_model_is_not_served_untrained(build: Any) -> None:
    house = await opened(build, 'policies.writer.agents=["writer"]')
    llm = await house.llm()
    assert (await ask(house, llm, "writer")).status_code == 200
    answer = await ask(house, llm, "planner")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_policy")
    assert "set policies.untrained.agents = ['planner'] with policies.untrained.train = false" in answer.text
    assert [call.policy for call in await house.transitions() if call.status is CallStatus.OK] == ["writer"]


async def test_an_agent_without_a_policy_is_named_once(build: Any, warnings_of: Any) -> None:
    house = await opened(build, *SETTINGS)
    llm = await house.llm()
    for path in ("planner", "planner", "sql/planner"):
        await ask(house, llm, path)
    assert [
        said.partition(" has no policy: it is answered by the untrained model, and is not trained")[::2]
        for said in warnings_of()
    ] == [
        (f"the agent {name!r} of run run", ". To train it, add it to policies.NAME.agents (said once for each agent)")
        for name in ("planner", "sql/planner")
    ]
    assert {call.versions for call in await house.transitions()} == {(VersionRun(0, 0, "base"),)}


async def test_a_call_of_two_policies_is_refused_with_the_cure(build: Any) -> None:
    house = await opened(build, *SETTINGS)
    answer = await ask(house, await house.llm(), "checker", "gpt-4o")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "several_policies"
    said = answer.json()["error"]["message"]
    assert "The call of the agent 'checker' (model 'gpt-4o') matches policies.checker and policies.guest" in said
    (call,) = await house.transitions()
    assert (call.status, call.caller) == (CallStatus.REFUSED, Caller("checker", ("checker",)))
    assert house.fake.requests == []


@pytest.mark.parametrize("overrides", [(), ("trainer.steps=3",)])
async def test_a_run_without_policies_has_one_and_is_read_once_by_each_stage(
    build: Any, overrides: tuple[str, ...]
) -> None:
    house = await opened(build, *overrides)
    llm = await house.llm()
    for _ in range(3):
        await ask(house, llm, "writer")
    assert {call.versions for call in await house.transitions()} == {(VersionRun(0, 3, "policy"),)}
    assert house.store.reads == 2, "once by each stage that must know the run"


async def test_a_record_that_nothing_here_accepts_fails_the_call(build: Any) -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run", {"config": {"policies": {"writer": {"agents": 3}}}}))
    house = await build(store=store)
    answer = await ask(house, await house.llm(), "writer")
    assert answer.status_code == 500
    assert "The stage 'policies' of the plugin 'policies' failed on this call (admitted: ConfigError)" in answer.text
