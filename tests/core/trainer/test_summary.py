"""A run's summary says what was measured first and last, whatever was measured between."""

from __future__ import annotations

import json
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Page
from lightning.trainer.summary import Evaluation, HeldOut, summarize
from lightning.types import Fault, Outcome, Rollout, Run, Status, StepRecord, Task


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    yield store
    await store.close()


async def begin(store: MemoryStore, name: str, step: int, version: int) -> None:
    """What a search asks for: two held-out tasks with a version of a prompt."""
    names = [f"run/{name}/{place}" for place in range(2)]
    made: dict[str, Any] = {"split": "val", "step": step, "max_attempts": 1, "resources": {"writer": version}}
    await store.create_rollouts([Rollout(one, "run", Task(one), one, **made) for one in names])


async def evaluate(store: MemoryStore, name: str, step: int, version: int, reward: float | None) -> None:
    await begin(store, name, step, version)
    outcome = Outcome(reward=reward) if reward is not None else Outcome(fault=Fault.INFRASTRUCTURE, error="lost")
    for lease in await store.lease("run", "worker", limit=2):
        await store.complete(lease.rollout.id, lease.attempt, outcome)


async def test_the_last_winner_of_a_search_is_what_came_after(store: MemoryStore) -> None:
    """It ended for want of budget, and was resumed with more: both winners were measured in the same round."""
    await evaluate(store, "val/v1", 0, 1, 0.25)
    await evaluate(store, "final/v3", 2, 3, None)
    await evaluate(store, "final/v3~1", 2, 3, 0.5)
    await begin(store, "final/v9", 2, 9)
    assert (await summarize(store, "run")).after == 0.5, "the other has not ended"
    await evaluate(store, "final/v9", 2, 9, 0.75)
    found = await summarize(store, "run")
    assert (found.before, found.after) == (0.25, 0.75)
    assert [(one.step, one.reward, one.rollouts) for one in found.evaluations] == [
        (0, 0.25, 2),
        (2, 0.5, 2),
        (2, 0.75, 2),
    ]


async def test_a_search_that_is_resumed_with_fewer_rounds_has_the_winner_of_those(store: MemoryStore) -> None:
    await evaluate(store, "val/v1", 0, 1, 0.25)
    await evaluate(store, "final/v5", 3, 5, 0.75)
    await evaluate(store, "final/v2", 1, 2, 0.5)
    assert (await summarize(store, "run")).after == 0.5


async def test_what_no_step_measured_is_null_and_what_some_measured_is_of_these(store: MemoryStore) -> None:
    nothing = {"rollouts": 12.0, "failed": 0.0, "tokens": 40.0, "tokens_compared": 0.0}
    await store.commit_step(StepRecord("run", 1, 1, (), (), "a", metrics=nothing))
    found = json.loads(json.dumps((await summarize(store, "run")).to_json()))
    assert (found["rewards"], found["rewards_with_failures"]) == ([None], [None])
    assert (found["max_logprob_gap"], found["max_probe_gap"]) == (None, None)
    some = {**nothing, "reward": 0.5, "reward_with_failures": 0.25, "max_logprob_gap": 0.125}
    await store.commit_step(StepRecord("run", 2, 2, (), (), "b", metrics=some))
    found = (await summarize(store, "run")).to_json()
    assert (found["rewards"], found["max_logprob_gap"]) == ((None, 0.5), 0.125)


async def test_the_final_reward_is_that_of_the_last_step_alone(store: MemoryStore) -> None:
    for step in (1, 2):
        await store.commit_step(StepRecord("run", step, step, (), (), "a", metrics={"rollouts": 2.0, "failed": 0.0}))
    await evaluate(store, "val/v1", 0, 1, 0.25)
    await evaluate(store, "val/v2", 1, 2, 0.5)
    ended = await summarize(store, "run")
    assert (ended.after, ended.final_reward) == (0.5, None), "a budget ended the run after step 2"
    await evaluate(store, "val/v3", 2, 3, 0.75)
    assert (await summarize(store, "run")).final_reward == 0.75


def test_an_evaluation_without_any_score_is_no_evaluation_of_0(tmp_path: Path) -> None:
    empty, lost = Evaluation(1, None, 4, 0), Evaluation(2, None, 4, 4)
    assert (empty.known, empty.reward_with_failures, lost.known, lost.reward_with_failures) == (False, None, True, 0.0)
    held_out = HeldOut(tmp_path)
    held_out.add([Evaluation(0, -0.5, 4, 0), empty])
    assert held_out.best == Evaluation(0, -0.5, 4, 0), "what is not known is not better than what is"


class Kept(Rollout):
    """One of which it can be told whether somebody still has it."""

    __slots__ = ("__weakref__",)


class Pages(MemoryStore):
    """A run of ten pages of held-out rollouts, which are made when they are read. `most` of them were alive at once."""

    size, most = 50, 0

    def __init__(self) -> None:
        super().__init__()
        self._given: list[weakref.ref[Rollout]] = []

    async def list_rollouts(self, run: str, *, cursor: str = "", **_: Any) -> Page[Rollout]:
        number = int(cursor or 0)
        made = {"reward": 0.5, "status": Status.SUCCEEDED, "split": "val", "step": 0 if number < 9 else 9}
        page = [Kept(f"{number}/{place}", run, Task("q"), "g", **made) for place in range(self.size)]
        self._given += map(weakref.ref, page)
        self.most = max(self.most, sum(one() is not None for one in self._given))
        return Page(tuple(page), str(number + 1) if number < 9 else "")


async def test_rollouts_are_counted_page_by_page() -> None:
    """All those of a run of weeks do not fit into memory."""
    store = Pages()
    await store.open()
    found = await summarize(store, "run")
    await store.close()
    assert ([one.rollouts for one in found.evaluations], found.after) == ([450, 50], 0.5)
    assert store.most <= 2 * store.size
