"""The AutoGen agent for models without tools, against a scripted policy server behind the real gateway; its tasks; its demo."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.config import Config, GatewayConfig, RunnerConfig, with_settings
from lightning.gateway import Gateway, Upstream
from lightning.runner.inline import InlineRunner
from lightning.runner.lease_loop import work
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import Rollout, Run, Status, Task, ToolEvent, Transition
from lightning_examples.calculator import calculate
from lightning_examples.calculator_autogen import agent as module
from lightning_examples.calculator_autogen import demo as demonstration
from lightning_examples.calculator_autogen.agent import EXAMPLES, FORM, MAX_TURNS, NAME, SYSTEM, agent
from lightning_examples.calculator_autogen.tasks import tasks, val_tasks

TASK = Task("Ada has 12 pens and buys 3 more. How many pens does Ada have now?", 15)


@dataclass(frozen=True)
class Played:
    rollout: Rollout
    requests: Sequence[dict[str, Any]]
    calls: Sequence[Transition]
    events: Sequence[ToolEvent]


@pytest.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    """Connections belong to an event loop, and each test has its own."""
    yield
    await module._http().aclose()
    module._http.cache_clear()


async def play(*replies: str) -> Played:
    """One rollout with scripted replies: what it came to, and what the server and the store saw."""
    config = RunnerConfig(concurrency=1, timeout=60, adapters=("autogen",))
    store, runner = MemoryStore(), InlineRunner(agent, config)
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", TASK, "g")])
    async with FakeVLLM(model="policy") as fake:
        fake.queue(*(Reply(text) for text in replies))
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        await runner.start()
        try:
            await work(store, runner, "run", gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()
        requests = [dict(request.body) for request in fake.requests]
    (rollout,) = (await store.list_rollouts("run")).items
    played = Played(
        rollout, requests, await store.transitions("r"), list((await store.attempts_of([("r", None)]))[0].tool_events)
    )
    await store.close()
    return played


async def test_it_calculates_reads_the_result_and_answers() -> None:
    played = await play("12 + 3", "Answer: 15")
    assert (played.rollout.status, played.rollout.error) == (Status.SUCCEEDED, "")
    assert (played.rollout.reward, played.rollout.rewards["correct"]) == (1.0, 1.0)
    first, second = played.requests
    assert first["messages"][0] == {"role": "system", "content": SYSTEM}
    assert [message["role"] for message in first["messages"][1:-1]] == ["user", "assistant"] * 2 * len(EXAMPLES)
    assert first["messages"][-1]["content"] == TASK.input
    assert "tools" not in first, "the model's chat template knows none"
    assert (first["temperature"], first["stop"]) == (1.0, ["\n"])
    assert second["messages"][:-2] == first["messages"]
    assert [message["content"] for message in second["messages"][-2:]] == ["12 + 3", "15"]


async def test_the_adapter_names_the_agent_and_reports_each_run_of_the_calculator() -> None:
    played = await play("12 + 3", "15 * 2", "Answer: 30")
    assert {(call.caller.agent, call.caller.framework) for call in played.calls} == {(NAME, "autogen")}
    assert [(event.name, event.status) for event in played.events] == [("calculate", "ok")] * 2


async def test_what_is_no_calculation_ends_it_and_is_a_failed_run_of_the_tool() -> None:
    played = await play("Ada has 15 pens")
    assert (played.rollout.status, played.rollout.reward) == (Status.SUCCEEDED, 0.0)
    assert [(event.name, event.status) for event in played.events] == [("calculate", "error")]
    assert "cannot calculate that" in played.events[0].error


@pytest.mark.parametrize(
    ("replies", "reward", "correct"),
    [
        (["12 - 3", "Answer: 9"], FORM, 0.0),
        (["Answer: 15"], 1 - FORM, 1.0),
        (["12 + 3", "Answer: 15."], 1.0, 1.0),
        (["12 + 3", "Answer: 15 pens"], 0.0, 0.0),
        (["12 + 3", ""], 0.0, 0.0),
        (["12 + 3"] * MAX_TURNS, 0.0, 0.0),
    ],
)
async def test_only_the_exact_number_is_correct(replies: list[str], reward: float, correct: float) -> None:
    played = await play(*replies)
    assert played.rollout.reward == pytest.approx(reward)
    assert played.rollout.rewards["correct"] == correct
    assert len(played.requests) == len(replies)


@pytest.mark.parametrize(("problem", "calculation", "result"), EXAMPLES)
def test_the_examples_are_right_and_no_task(problem: str, calculation: str, result: str) -> None:
    assert calculate(calculation) == result
    assert problem not in {task.input for task in [*val_tasks(200), *tasks(4000, 0)]}


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_training_and_held_out_questions_are_never_the_same(seed: int) -> None:
    train = [str(task.input) for task in tasks(300, seed)]
    assert len(set(train)) == 300
    assert train == [task.input for task in tasks(300, seed)]
    assert not set(train) & {task.input for task in val_tasks(200)}


def test_answers_follow_from_the_numbers_of_the_question() -> None:
    made = tasks(600, 1)
    assert len({re.sub(r"\d+", "N", str(task.input)) for task in made}) > 300
    for task in made:
        numbers = [int(number) for number in re.findall(r"\d+", str(task.input))]
        one, two, three = (*numbers, 0)[:3]
        assert task.expected in {one - two, one + two, one * two, one / two, one + two - three, one + two * three}
        assert isinstance(task.expected, int)
        assert task.expected > 0


def test_the_demo_s_settings_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(demonstration, "model_folder", lambda: tmp_path)
    demo = demonstration.demo()
    config = with_settings(Config(), demo.settings)
    assert (demo.name, demo.measure, demo.model) == ("calculator", "correct", tmp_path)
    assert config.engine.dtype == config.policy_server.dtype, "vLLM and the trainer compute alike"
    assert demo.algorithm().group_size == 8
    assert demo.source is not None
    assert demo.source.is_file()
