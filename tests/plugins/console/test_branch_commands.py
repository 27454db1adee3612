"""How branches are made: the command on a rollout's page, where they can begin, and what they inherit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.testing import ToolCall, rollout
from lightning.types import Fault, Outcome, Rollout, Run, Task
from lightning_branching.recorded import RecordedCall, RecordedRollout, prefix_of
from lightning_console.places import SERVER, Places
from lightning_console.queries.branches import inherited
from lightning_record.exchanges import Exchange

from tests.plugins.branching.test_branch import INLINE, recorded
from tests.plugins.branching.test_branch import runs as runs
from tests.plugins.console.made_branches import PROMPTS, TRUNK, write
from tests.plugins.console.made_rollouts import call
from tests.plugins.console.reading import places_of, shown, texts, to
from tests.plugins.debug.evaluating import ScriptedVLLM, said
from tests.plugins.debug.evaluating import vllm as vllm


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    found = MemoryStore()
    await found.open()
    yield found
    await found.close()


def test_what_is_inherited_is_what_the_gateway_answers_from_the_record() -> None:
    """Of calls at the same time those that were not answered yet are a branch's own."""
    made = Rollout("r", "run", Task("q"), "g", attempt=1)
    times = [(0.0, 1.0), (1.0, 3.0), (1.5, 2.0), (2.0, 4.0), (4.0, 5.0)]
    calls = [
        replace(call(made, seq, "solver", [1], (2,)), started_at=begin, ended_at=end)
        for seq, (begin, end) in enumerate(times)
    ]
    recorded = RecordedRollout(
        made,
        tuple(RecordedCall(n, each, Exchange("/x", {}, {}, 200)) for n, each in enumerate(calls, 1)),
        refusals=(),
        tool_events=(),
    )
    found = {seq: inherited(calls, seq) for seq in range(5)}
    for seq, each in found.items():
        assert each.answered == tuple(one.transition.seq for one in prefix_of(recorded, seq).answered)
        assert each.at == seq
    assert [each.shared for each in found.values()] == [0, 1, 1, 1, 4]
    assert found[3].answered == (0, 2)


def asks(*words: str, choices: int = 1) -> Callable[[Task, lightning.LLM], float]:
    """An agent that says these, one after the other."""

    def agent(task: Task, llm: lightning.LLM) -> float:
        import openai

        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        for word in words:
            client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": word}], n=choices)
        return 0.5

    return agent


async def stored(store: Store, record: Any) -> str:
    """Put a recorded rollout into a store as the first one of a run, and return its page's address."""
    made = record.rollout
    await store.put_run(Run("run", "run", {}, 1.0))
    await store.create_rollouts([Rollout(made.id, "run", made.task, "g")])
    await store.lease("run", "worker")
    await store.append(record.transitions)
    await store.complete(made.id, 1, Outcome(reward=0.5, tool_events=record.tool_events))
    return to("rollout", "run", made.id)


async def test_the_command_that_branches_has_the_calls_number_and_place(store: MemoryStore) -> None:
    record = rollout(asks("one", "two", "three"), Task("q"), ["1", "2", "3"], adapters=("raw",))
    address = await stored(store, record)
    said = (await shown(places_of(store, "sqlite:///a b.db"), f"{address}?call=2"))["Branch it"]["notices"][0]
    assert said["commands"] == [
        f"lightning branch {record.rollout.id} MODULE:AGENT --at 2 -n 8 --runs 'sqlite:///a b.db'"
    ]
    assert "with a vLLM that has the weights of this call" in said["detail"]
    served = await shown(places_of(store, SERVER), f"{address}?call=3")
    assert served["Branch it"]["notices"][0]["commands"][0].endswith("--at 3 -n 8 --runs PLACE")
    assert served["Replay this rollout"]["notices"][0]["commands"][0].endswith("--runs PLACE")


async def test_an_earlier_attempt_is_branched_as_such(store: MemoryStore) -> None:
    record = rollout(asks("one", "two"), Task("q"), ["1", "2"], adapters=("raw",))
    await store.put_run(Run("run", "run", {}, 1.0))
    await store.create_rollouts([Rollout(record.rollout.id, "run", Task("q"), "g", max_attempts=3)])
    await store.lease("run", "worker")
    await store.append(record.transitions)
    await store.complete(record.rollout.id, 1, Outcome(fault=Fault.INFRASTRUCTURE, error="the machine went away"))
    await store.lease("run", "worker")  # the second attempt goes on
    address = to("rollout", "run", record.rollout.id, attempt=1, call=2)
    said = (await shown(places_of(store), address))["Branch it"]["notices"][0]
    assert said["commands"][0].endswith("--at 2 -n 8 --runs memory:// --attempt 1")


async def test_calls_are_counted_as_the_command_counts_them(store: MemoryStore) -> None:
    """Choices of one call are rows of their own on the page, and one call for `--at`."""
    record = rollout(asks("one", "two", choices=2), Task("q"), ["1", "2", "3", "4"], adapters=("raw",))
    assert [each.choice for each in record.transitions] == [0, 1, 0, 1]
    address = await stored(store, record)
    ats = []
    for number in range(1, 5):
        said = (await shown(places_of(store), f"{address}?call={number}"))["Branch it"]["notices"][0]
        ats.append(said["commands"][0].partition("--at ")[2][0])
    assert ats == ["1", "1", "2", "2"]


async def test_what_cannot_be_branched_says_why(store: MemoryStore) -> None:
    secret = "sk-proj-" + "a1B2c3D4e5F6g7H8" * 3
    record = rollout(asks(f"my key is {secret}", "two"), Task("q"), ["1", "2"], adapters=("raw",))
    said = (await shown(places_of(store), await stored(store, record)))["Branch it"]["notices"][0]
    assert said["commands"] == []
    assert "a credential was left out" in said["text"]
    other = MemoryStore()
    await other.open()
    await write(other, ended=False)
    await other.append([call(replace(await rollout_of(other, "again/1"), attempt=1), 0, "solver", PROMPTS[2], (40,))])
    for address, why in {
        to("rollout", "run", TRUNK): "requests were not recorded",
        to("rollout", "run", "run/1/0/2"): "it is itself a branch of run/1/0/0: branch that one",
        to("rollout", "run", "run/1/0/3"): "it is itself a branch",
    }.items():
        said = (await shown(places_of(other), address))["Branch it"]["notices"][0]
        assert said["commands"] == []
        assert why in said["text"], said
    await other.close()


async def rollout_of(store: Store, name: str) -> Rollout:
    found = await store.get_rollout(name)
    assert found is not None
    return found


async def test_a_rollout_that_goes_on_is_not_branched_yet(store: MemoryStore) -> None:
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("q"), "g")])
    (lease,) = await store.lease("run", "worker")
    await store.append([call(lease.rollout, 0, "solver", [1], (2,))])
    going = (await shown(places_of(store), to("rollout", "run", "r")))["Branch it"]["notices"][0]
    assert "it has not ended" in going["text"]


async def test_a_tree_names_what_tools_gave(store: MemoryStore) -> None:
    @lightning.tool
    def search(query: str) -> dict[str, str]:
        return {"found": query.upper()}

    def agent(task: Task, llm: lightning.LLM) -> float:
        import openai

        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        messages: list[Any] = [{"role": "user", "content": task.input}]
        made: Any = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message
        messages.append(made.model_dump(exclude_none=True))
        for asked in made.tool_calls or ():
            result = search(**json.loads(asked.function.arguments))
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": json.dumps(result)})
        client.chat.completions.create(model=llm.model, messages=messages)
        return 0.5

    record = rollout(agent, Task("cats"), [ToolCall("search", '{"query": "cats"}'), "CATS"], adapters=("raw",))
    await stored(store, record)
    nodes = (await shown(places_of(store), "group/run/g"))["The calls of all rollouts, as a tree"]["nodes"]
    ((name, gave),) = nodes[1]["tools"]
    assert (name, json.loads(gave)) == ("search", {"found": "CATS"})
    assert [node["tools"] for node in nodes[2:]] == [[]]


def test_branches_of_the_command_are_read_with_what_they_change(runs: ScriptedVLLM) -> None:
    """As `lightning branch` itself records them: by default nothing is another than it was."""
    parent = recorded("agent", "--temperature", "0.25")
    command = ["branch", parent, "wandering:agent", "--at", "3", "-n", "1", *INLINE]
    assert said(command) == 0
    assert said([*command, "--set", "temperature=0.7", "--edit", "said 9"]) == 0

    async def read() -> dict[str, Any]:
        places = Places(str(Path("runs/first").resolve()))
        try:
            return await shown(places, to("rollout", "first", parent, call=3))
        finally:
            await places.close()

    blocks = asyncio.run(read())
    assert [(row["at call"], row["changed"], row["how it ended"]) for row in texts(blocks["Branches"])] == [
        ("3", "–", "no error"),
        ("3", "edit: said 9, temperature 0.7", "no error"),
    ]
    assert texts(blocks["Calls"])[2]["branches"] == "2"
    assert blocks["Branch it"]["notices"][0]["commands"][0].startswith(
        f"lightning branch {parent} wandering:agent --at 3"
    )
    assert f"lightning replay {parent} wandering:agent" in blocks["Replay this rollout"]["notices"][0]["commands"][0]
