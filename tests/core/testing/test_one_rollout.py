"""One rollout against a script gives what training would see of it."""

from __future__ import annotations

import lightning
import openai
import pytest
from lightning.batch.trajectory import Trajectory
from lightning.credit.intermediate import with_tool_rewards
from lightning.testing import Reply, ToolCall, rollout
from lightning.types import LLM, Fault, Status, Task

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@lightning.tool
def add(a: int, b: int) -> dict[str, int]:
    return {"sum": a + b}


def agent(task: Task, llm: LLM) -> dict[str, float]:
    client = openai.OpenAI(max_retries=0)  # from the variables of the environment, as in a worker
    messages: list[dict[str, object]] = [{"role": "user", "content": str(task.input)}]
    with client, lightning.component("solver"):
        lightning.state(turn=0)
        first = client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)  # type: ignore[call-overload]
        told = add(2, 2)
        lightning.reward(0.25, name="format")
        lightning.reward(0.5, name="format")
        messages += [first.choices[0].message, {"role": "user", "content": str(told)}]  # type: ignore[list-item]
        last = client.chat.completions.create(model=llm.model, messages=messages)  # type: ignore[call-overload]
    return {"reward": float("4" in last.choices[0].message.content), "brief": 0.5}


SCRIPT = [ToolCall("add", '{"a": 2, "b": 2}'), "it is 4"]


def check(record: lightning.testing.RolloutRecord) -> None:  # type: ignore[name-defined]
    assert (record.rollout.status, record.rollout.reward) == (Status.SUCCEEDED, 1.0)
    assert record.rollout.rewards == {"reward": 1.0, "brief": 0.5}
    first, last = record.transitions
    assert [call.caller.agent for call in record.transitions] == ["solver", "solver"]
    (event,) = record.tool_events
    assert (event.name, event.result, event.response_id) == ("add", '{"sum": 4}', first.id)
    assert record.rewards_of_calls == {first.id: {"format": 0.75}}
    (state,) = record.step_states
    assert (state.values, state.response_id) == ({"turn": 0}, first.id)
    assert last.prompt_ids


def test_what_training_would_see_of_a_rollout() -> None:
    check(rollout(agent, "2 + 2", SCRIPT))


async def test_it_may_be_called_where_an_event_loop_runs() -> None:
    check(rollout(agent, Task("2 + 2"), SCRIPT))


def test_an_async_agent_and_a_script_that_is_a_function() -> None:
    async def ask(task: Task, llm: LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            said = await client.responses.create(model=llm.model, input=str(task.input))
        return float(said.output_text == "the word is tea")

    record = rollout(ask, "tea", lambda body: Reply(f"the word is {body['messages'][-1]['content']}"))
    assert record.rollout.reward == 1.0


def test_what_the_agent_raises_is_in_the_record() -> None:
    def broken(task: Task, llm: LLM) -> float:
        raise LookupError("no such page")

    record = rollout(broken, 1, [])
    assert (record.rollout.fault, record.transitions) == (Fault.AGENT, ())
    assert "LookupError: no such page" in record.rollout.error


def test_a_call_after_the_last_reply_is_refused_with_the_cause() -> None:
    record = rollout(agent, 1, SCRIPT[:1])
    assert record.rollout.reward is None
    assert "the script has 1 replies, and the agent asks once more" in record.rollout.error


@pytest.mark.parametrize("name", ["rollout", "RolloutRecord"])
def test_it_is_public(name: str) -> None:
    assert name in lightning.testing.__all__  # type: ignore[attr-defined]


def invented(llm: LLM, api: str) -> None:
    """One call that offers `add`, through one of the APIs."""
    asked = [{"role": "user", "content": "2 + 2"}]
    with openai.OpenAI(max_retries=0) as client:
        if api == "responses":
            client.responses.create(model=llm.model, input="2 + 2", tools=[{"type": "function", "name": "add"}])  # type: ignore[call-overload]
        elif api == "messages":
            body = {"model": llm.model, "max_tokens": 9, "messages": asked}
            tools = [{"name": "add", "input_schema": {"type": "object"}}]
            client.post("/messages", body={**body, "tools": tools}, cast_to=object)
        elif api == "stream":
            list(client.chat.completions.create(model=llm.model, messages=asked, tools=TOOLS, stream=True))  # type: ignore[call-overload]
        else:
            client.chat.completions.create(model=llm.model, messages=asked, tools=TOOLS)  # type: ignore[call-overload]


@pytest.mark.parametrize("api", ["chat", "stream", "responses", "messages"])
def test_a_tool_that_the_model_has_invented_is_an_error_of_its_call(api: str) -> None:
    def agent(task: Task, llm: LLM) -> float:
        with lightning.component("solver"):
            invented(llm, api)
        return 1.0

    calls = [
        ToolCall("add", '{"a": 2, "b": 2}', "good"),
        ToolCall("divide", '{"a": 1}', "bad"),
        ToolCall("x", "{", "worse"),
    ]
    record = rollout(agent, "2 + 2", [Reply("", tool_calls=calls)])
    (call,) = record.transitions
    assert [
        (event.name, event.status, event.kind, event.call_id, event.arguments, event.response_id, event.caller)
        for event in record.tool_events
    ] == [
        ("divide", "error", "unknown_tool", "bad", {"a": 1}, call.id, call.caller),
        ("x", "error", "unknown_tool", "worse", "{", call.id, call.caller),
    ]
    assert "it offers add" in record.tool_events[0].error
    trajectory = Trajectory(record.rollout, record.transitions, tool_events=record.tool_events, trainable=(True,))
    rewards = with_tool_rewards(trajectory, {"error": -0.5}).step_rewards
    assert [(step.name, step.value, step.response_id) for step in rewards] == [
        ("tool:divide", -0.5, call.id),
        ("tool:x", -0.5, call.id),
    ]


def test_where_no_tools_are_offered_none_is_invented() -> None:
    def agent(task: Task, llm: LLM) -> float:
        with openai.OpenAI(max_retries=0) as client:
            client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "my tools: add"}])
        return 1.0

    assert rollout(agent, "2 + 2", [ToolCall("add")]).tool_events == ()


def test_an_async_agent_that_keeps_its_client_may_be_run_again() -> None:
    kept: list[openai.AsyncOpenAI] = []

    async def agent(task: Task, llm: LLM) -> float:
        if not kept:
            kept.append(openai.AsyncOpenAI(max_retries=0))
        asked = kept[0].with_options(base_url=llm.base_url, api_key=llm.api_key)
        await asked.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": str(task.input)}])
        if task.input == "second":
            await kept[0].close()
        return 1.0

    assert [rollout(agent, turn, ["4"]).rollout.error for turn in ("first", "second")] == ["", ""]
