"""`lightning demo`: which demonstration runs, and what its report shows."""

from __future__ import annotations

import io
import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.cli.report import Story, draw_rewards, show_story, show_summary, tell_story
from lightning.store.memory import MemoryStore
from lightning.terminal import Terminal
from lightning.trainer.gains import NO_CHANGE
from lightning.trainer.summary import Summary, summarize
from lightning.types import Fault, Outcome, Rollout, Run, StepRecord, Task, Transition, logprobs, token_ids


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    """Two held-out tasks before and after one step. The reward of the first rises most, `correct` of the second alone."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    outcomes = {
        ("val", 0, "a"): {"reward": 0.0, "correct": 0.0},
        ("val", 0, "b"): {"reward": 0.2, "correct": 0.0},
        ("train", 1, "c"): {"reward": 0.5, "correct": 0.25},
        ("val", 1, "a"): {"reward": 0.9, "correct": 0.0},
        ("val", 1, "b"): {"reward": 1.0, "correct": 1.0},
    }
    for (split, step, name), parts in outcomes.items():
        rollout = Rollout(f"{split}/{step}/{name}", "run", Task(name, id=name), name, split=split, step=step)
        await store.create_rollouts([rollout])
        (lease,) = await store.lease("run", "w", limit=1)
        call = Transition(rollout.id, lease.attempt, 0, name, token_ids([1, 2]), token_ids([step + 3]), logprobs([0.0]))
        await store.append([call])
        await store.complete(rollout.id, lease.attempt, Outcome(reward=parts["reward"], rewards=parts))
    metrics = {"reward": 0.5, "reward/correct": 0.25, "tokens": 1.0}
    record = StepRecord("run", 1, 1, (("train/1/c", 1),), ("e",), "d", metrics=metrics)
    await store.commit_step(record)
    yield store
    await store.close()


def printed(show: Callable[[Terminal], None]) -> str:
    out = io.StringIO()
    show(Terminal(file=out, width=120))
    return out.getvalue()


async def test_a_named_part_of_the_reward_is_what_the_table_shows(store: MemoryStore) -> None:
    summary = await summarize(store, "run")
    assert [one.rewards for one in summary.evaluations] == [{"correct": 0.0}, {"correct": 0.5}]
    assert summary.named_rewards == {"correct": (0.25,)}
    assert json.loads(json.dumps(summary.to_json()))["evaluations"][1]["rewards"] == {"correct": 0.5}
    table = printed(lambda console: show_summary(summary, "title", console, "correct"))
    assert "correct before" in table
    assert "+0.500" in table
    told = printed(lambda console: show_summary(summary, "title", console))
    assert "+0.850" in told
    assert "1 step: 1 training rollout (0 failed) and 4 held-out rollouts in 2 evaluations" in told
    few = replace(summary, evaluations=tuple(replace(one, reward=0.5) for one in summary.evaluations))
    assert f"2 held-out tasks: {NO_CHANGE}" in printed(lambda console: show_summary(few, "title", console))
    idle = printed(lambda console: show_summary(replace(few, idle_steps=1), "title", console))
    assert "1 of 1 steps trained nothing and left the weights as they were: before and after are the same model" in idle
    none = replace(summary, evaluations=())
    assert "no held-out tasks were given" in printed(lambda console: show_summary(none, "title", console))


async def test_what_failed_counts_as_0_beside_the_reward_of_what_came_through(
    store: MemoryStore, tmp_path: Path
) -> None:
    rollout = Rollout("val/1/c", "run", Task("c", id="c"), "c", split="val", step=1)
    await store.create_rollouts([rollout])
    (lease,) = await store.lease("run", "w", limit=1)
    await store.complete(rollout.id, lease.attempt, Outcome(fault=Fault.AGENT, error="broken"))
    summary = await summarize(store, "run")
    last = json.loads(json.dumps(summary.to_json()))["evaluations"][1]
    assert math.isclose(last["reward"], 0.95)
    assert math.isclose(last["reward_with_failures"], 1.9 / 3)
    table = printed(lambda console: show_summary(summary, "title", console))
    assert "if failures count as 0" in table
    assert "0.633" in table
    draw_rewards(summary, "title", tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 1000


async def test_the_story_is_of_the_task_whose_measure_rose(store: MemoryStore) -> None:
    words = {1: "system: sums", 2: "user: 2 + 2", 3: "assistant: five", 4: "assistant: four"}

    def decode(ids: list[int]) -> str:
        return "\n".join(words[token] for token in ids)

    by_reward = await tell_story(store, "run", 1, lambda task: task.id, decode)
    story = await tell_story(store, "run", 1, lambda task: task.id, decode, "correct")
    assert by_reward is not None
    assert story is not None
    assert (by_reward.task, by_reward.before_value, by_reward.after_value) == ("a", 0.0, 0.9)
    assert (story.task, story.before_value, story.after_value) == ("b", 0.0, 1.0)
    shown = printed(lambda console: show_story(story, console))
    assert "before training (correct 0; after the same 2 turns)\nassistant: five\n" in shown
    assert "after training (correct 1; after the same 2 turns)\nassistant: four\n" in shown
    assert "system" not in shown


def test_a_story_whose_turns_are_all_alike_still_shows() -> None:
    shown = printed(lambda console: show_story(Story("t", "one\ntwo", 0.0, "one", 1.0), console))
    assert "after the same 1 turn)" in shown


async def test_the_picture_has_the_measure_s_curves(store: MemoryStore, tmp_path: Path) -> None:
    summary: Summary = await summarize(store, "run")
    draw_rewards(summary, "title", tmp_path / "reward.png", "correct")
    assert (tmp_path / "reward.png").stat().st_size > 1000
