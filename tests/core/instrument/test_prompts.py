"""A prompt template as a component: the agent's own everywhere, another one in rollouts that try it."""

from __future__ import annotations

import logging

import lightning
import pytest
from lightning.bounded import Once
from lightning.config import RunnerConfig
from lightning.instrument import activate, context
from lightning.runner.process import ProcessRunner
from lightning.types import LLM, Lease, Rollout, Task

writer = lightning.component("writer", prompt="Write a poem about {topic}.")


def test_outside_a_rollout_the_prompt_is_the_agents_own() -> None:
    assert writer.prompt.format(topic="rain") == "Write a poem about rain."


def test_a_rollout_may_bring_another_one_and_ends_with_it() -> None:
    with activate(LLM("http://x/v1", "key", "policy", {"writer": "Rhyme on {topic}!"})):
        assert writer.prompt.format(topic="rain") == "Rhyme on rain!"
        assert lightning.component("checker", prompt="Check.").prompt == "Check."
    assert writer.prompt == "Write a poem about {topic}."


def test_a_component_without_a_prompt_says_so() -> None:
    with pytest.raises(lightning.LightningError, match=r"component\('writer'\) has no prompt"):
        _ = lightning.component("writer").prompt


def test_a_prompt_that_nobody_asked_for_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_said", Once())
    llm = LLM("http://x/v1", "key", "policy", {"writre": "?"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with activate(llm):
                assert writer.prompt == "Write a poem about {topic}."
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no component asked for the prompt 'writre' in a rollout"
    ]


def agent(task: Task, llm: LLM) -> float:
    return float(writer.prompt == task.expected)


@pytest.mark.slow
async def test_prompts_travel_to_worker_processes() -> None:
    runner = ProcessRunner(agent, RunnerConfig(concurrency=1))
    await runner.start()
    try:
        lease = Lease(Rollout("r", "run", Task("x", expected="Rhyme!"), "g", attempt=1), "w", 0.0)
        outcome = await runner.run(lease, LLM("http://x/v1", "key", "policy", {"writer": "Rhyme!"}))
    finally:
        await runner.close()
    assert outcome.reward == 1.0, outcome
