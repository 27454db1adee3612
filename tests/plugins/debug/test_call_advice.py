"""What is said of an agent's calls: a name that is not the policy's, which answers whatever model is asked for, and tools that
the model is not shown."""

from __future__ import annotations

import logging
import time

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config
from lightning.errors import StoreError
from lightning.gateway import Gateway, Upstream
from lightning.gateway.http import UpstreamError
from lightning.gateway.identity import gateway_secret
from lightning.gateway.stages import NO_LINE
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import Reply
from lightning.trainer.stages import StepTaken, step_line
from lightning.types import Rollout, Run, Task
from lightning_debug import call_advice
from lightning_debug.call_advice import ADVICE, ShownTools, hidden_tools
from lightning_dialects.chat_template import prompt_of
from lightning_server.fleet.owner import Owner

HI = [{"role": "user", "content": "hi there"}]
BASE = "/models/Qwen/Qwen3-4B"


class DeafStore(MemoryStore):
    """A store that says what a run is to the two stages that must know it, for the run's policies and for its rules of
    untrained calls, and then no more."""

    asked = 0

    async def get_run(self, run):
        self.asked += 1
        if self.asked > 2:
            raise StoreError("the store is away")
        return await super().get_run(run)


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
    return [record.getMessage() for record in caplog.records if record.name == call_advice.log.name]


async def test_another_models_name_is_said_once_for_each_run(house, caplog):
    with caplog.at_level(logging.WARNING):
        await ask_for(house, "gpt-4o-mini", "policy", "gpt-4o-mini")
        await ask_for(house, "gpt-4o-mini", run="another")
    first, second = told(caplog)
    assert first.startswith(
        "an agent in run trained asked for the model 'gpt-4o-mini'. The gateway always answers with the policy"
    )
    assert "base_url and an API key of its own" in first
    assert "train_agents" in first
    assert "in run another" in second


@pytest.mark.parametrize("name", [None, "policy", "policy:judge", BASE, "Qwen3-4B", "tiny"])
async def test_the_policys_own_names_are_as_expected(house, caplog, name):
    assert house.fake.model == "tiny"
    with caplog.at_level(logging.WARNING):
        await ask_for(house, name)
    assert told(caplog) == []


async def test_a_policys_name_may_be_longer_than_what_is_kept_of_a_name(house, caplog, monkeypatch):
    name = "/models/" + "x" * 300
    monkeypatch.setitem(globals(), "BASE", name)
    with caplog.at_level(logging.WARNING):
        await ask_for(house, name)
        await ask_for(house, name[:-200], run="another")
    assert ["run another" in said for said in told(caplog)] == [True]


async def test_a_name_costs_no_call_and_little_memory(build, caplog, monkeypatch):
    monkeypatch.setattr(call_advice, "NAMES", 2)
    house = await build(store=DeafStore())
    with caplog.at_level(logging.WARNING):
        await ask_for(house, "x" * 100_000, "b", "c", "d")
    *_, limit = told(caplog)
    assert len(told(caplog)) == 3
    assert limit == "agents have asked for 2 different models: further names are neither checked nor logged"
    assert all(len(text) < 1000 for text in told(caplog))


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("shows", [False, True])
async def test_tools_that_the_chat_template_hides_are_said_once_and_counted(house, shows, warnings_of):
    house.fake.shows_tools = shows
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI)
    assert await hidden_tools(house.gateway.parts) == 0
    for _ in range(3):
        await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)
    await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS, tool_choice="none")
    assert await hidden_tools(house.gateway.parts) == (0 if shows else 3)
    said = warnings_of()
    assert len(said) == (0 if shows else 1)
    assert all("chat template does not show the tools" in line and "--chat-template" in line for line in said)


async def test_a_policy_server_that_cannot_say_is_asked_a_few_times_and_nothing_is_claimed(house, warnings_of):
    house.fake.tokenizes = False
    client = await house.client()
    for _ in range(5):
        await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)
        assert await hidden_tools(house.gateway.parts) == 0
    assert not warnings_of()


async def test_the_metric_of_a_step_counts_calls_whose_tools_are_hidden(house):
    house.fake.shows_tools = False
    line, parts = step_line(Config()), house.gateway.parts
    step = StepTaken(1, [], [], LightningRL("grpo").batch([]), {}, parts=parts)
    others = (await line.taken(step)).metrics
    assert "advice/hidden_tools" not in others
    client = await house.client()
    for _ in range(2):
        await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)
    assert (await line.taken(step)).metrics == {**others, "advice/hidden_tools": 2.0}


async def test_a_gateway_in_another_process_tells_the_trainer_of_hidden_tools(house, monkeypatch):
    """Here another gateway over the same store; told of once a second at most."""
    monkeypatch.setattr(call_advice, "TELL_SECONDS", 0.0)
    house.fake.shows_tools = False
    await Owner(house.store, "run").open([Upstream(house.fake.url, house.fake.model)], 0)
    other = Gateway(house.store, [], Config().gateway, secret=await gateway_secret(house.store), shared=True)
    await other.start()
    client = await house.client(other.llm(await house.lease()))
    for _ in range(3):
        await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)
        await other.parts.line.named(ADVICE)._tools[other.parts.policies.of("run")].hidden()
    parts = house.gateway.parts
    assert await hidden_tools(parts, "run") == 0, "it is alone, and nobody else tells"
    parts.shared = True
    assert await hidden_tools(parts, "run") == 3
    assert await hidden_tools(parts, "another") == 0
    parts.line.named(ADVICE)._since = time.time() + 1
    assert await hidden_tools(parts, "run") == 0, "told before this trainer began"
    await other.close()


@pytest.mark.slow
async def test_whether_the_template_of_a_real_vllm_shows_tools_is_found_out(build, served):
    """The tiny model's template knows them."""
    real = await build(upstreams=[Upstream(served.vllm.url, served.vllm.model)], version=served.vllm.version)
    client = await real.client()
    await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS, seed=3, max_tokens=12)
    assert await hidden_tools(real.gateway.parts) == 0
    stage = real.gateway.parts.line.named(ADVICE)
    assert [tools.shown for tools in stage._tools.values()] == [True]


async def test_the_tools_of_calls_that_were_not_answered_are_not_looked_at(house):
    house.fake.shows_tools = False
    house.fake.queue(Reply(status=500), Reply(status=400))
    http = await house.http()
    for status in (500, 400):
        answer = await http.post("/chat/completions", json={"messages": HI, "tools": TOOLS})
        assert answer.status_code == status
    assert await hidden_tools(house.gateway.parts) == 0


async def test_what_fails_here_is_logged_and_fails_no_call(house, caplog, monkeypatch):
    def fails(*given: object) -> None:
        raise UpstreamError("of the test")

    monkeypatch.setattr(call_advice.AskedModels, "look", fails)
    monkeypatch.setattr(call_advice.ShownTools, "look", fails)
    client = await house.client()
    await client.chat.completions.create(model="policy", messages=HI, tools=TOOLS)
    assert len(told(caplog)) == 2
    assert len(await house.transitions()) == 1


async def test_a_gateway_without_the_stage_has_seen_no_hidden_tools(house):
    house.gateway.parts.line = NO_LINE
    assert await hidden_tools(house.gateway.parts) == 0


async def test_tools_are_compared_with_none_in_the_same_prompt():
    """Its own template and the documents are part of it."""
    given = {"chat_template": "{{ messages }}", "documents": [{"text": "d"}], "reasoning_effort": "low"}
    chat = {"messages": HI, "tools": TOOLS, **given}
    asked, looked = [], ShownTools()

    async def tokenize(body):
        asked.append(body)
        return 200, b'{"tokens": [%d]}' % len(asked)

    looked.look(chat, tokenize)
    assert await looked.hidden() == 0
    prompt = prompt_of(chat)
    assert asked == [prompt, {name: value for name, value in prompt.items() if name != "tools"}]
    assert prompt["chat_template"] == given["chat_template"]
