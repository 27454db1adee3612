"""`trainer.order = "learnable"`: tasks whose groups teach are preferred, none is forgotten, and a resume plans the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.trainer.context import mark_over
from lightning.trainer.plan import train_rollouts
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Outcome, Rollout, Run, Status, StepRecord, StepReward, Task
from lightning_samplers.task_choice import STATE, TaskChoice

TASKS = [Task(f"question {number}", id=str(number)) for number in range(6)]
SOLVED, HOPELESS, MIXED, FAILING = TASKS[:4]
REWARDS = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))
HISTORY = st.lists(st.lists(st.tuples(st.integers(0, 5), REWARDS), max_size=12), max_size=8)


class Recorded:
    """Of a store what a choice reads while a run goes on: rewards inside rollouts, of which there are none."""

    async def attempts_of(self, attempts: Sequence[tuple[str, int]]) -> list[Any]:
        return [type("Attempt", (), {"step_rewards": ()}) for _ in attempts]


def ended(step: int, earned: Sequence[tuple[int, float | None]]) -> list[Rollout]:
    """Rollouts of tasks with rewards; None: the agent failed."""
    (one,) = train_rollouts("run", step, TASKS[:1], 1, 1)
    return [
        replace(one, id=f"{step}/{number}", task=TASKS[place], reward=reward, status=Status.SUCCEEDED)
        if reward is not None
        else replace(one, id=f"{step}/{number}", task=TASKS[place], status=Status.FAILED, fault=Fault.POLICY)
        for number, (place, reward) in enumerate(earned)
    ]


async def after(history: Sequence[Sequence[tuple[int, float | None]]], seed: int = 0) -> TaskChoice:
    choice, store = TaskChoice(TASKS, seed), Recorded()
    for step, earned in enumerate(history, 1):
        await choice.learn(store, step, ended(step, earned))  # type: ignore[arg-type]
    return choice


async def first_places(choice: TaskChoice, draws: int = 300) -> Counter[str]:
    return Counter(choice.ranked(f"draw {number}", 8)[0].id for number in range(draws))


@given(history=HISTORY, size=st.integers(1, 64), seed=st.integers())
@example(history=[[(0, 0.0), (0, 7.2451710564919956e-211)]], size=1, seed=0)  # whose square is 0
async def test_any_history_gives_every_task_once_and_the_same_again(history: Any, size: int, seed: int) -> None:
    one, again = await after(history, seed), await after([step[::-1] for step in history], seed)
    ranked = one.ranked("step 9", size)
    assert sorted(task.id for task in ranked) == [task.id for task in TASKS]
    assert again.ranked("step 9", size) == ranked, "whatever order the rollouts of a step come in"
    assert one.of_step(9, size, 0, 4) + one.of_step(9, size, 4, 4) == (2 * one.of_step(9, size, 0, 6))[:8]


async def test_mixed_tasks_come_first_and_the_others_now_and_then() -> None:
    history = [(0, 1.0), (1, 0.0), (3, None)] * 8 + [(2, float(number % 2)) for number in range(8)]
    history += [(4, 1.0), (5, 0.0)] * 8
    places = await first_places(await after([history]))
    assert places[MIXED.id] > 200
    later = await first_places(await after([history] + [[] for _ in range(80)]))
    assert set(later) == {task.id for task in TASKS}, "evidence fades"
    assert later[MIXED.id] < places[MIXED.id]


@settings(max_examples=8)
@given(history=HISTORY)
async def test_whatever_happened_every_task_comes_again(history: Any) -> None:
    later = await first_places(await after([*history, *[[]] * 100]))
    assert set(later) == {task.id for task in TASKS}


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 100.0), (0.2, 0.3), (-3e307, 3e307)])
async def test_rewards_of_any_range_count_by_their_variance(low: float, high: float) -> None:
    """Always the middle is as good as always the highest: nothing to compare."""
    history = [(0, high), (1, low), (3, (low + high) / 2), (4, high), (5, low)] * 8
    history += [(2, low if number % 2 else high) for number in range(8)]
    assert (await first_places(await after([history])))[MIXED.id] > 200


@pytest.mark.parametrize("reward", [0.0, 0.1, -0.3, 1e6 + 0.1])
async def test_where_all_rewards_are_equal_untried_tasks_come_first(reward: float) -> None:
    history = [[(place, reward)] * 7 for place in (0, 1, 2, 3)]
    places = await first_places(await after(history))
    assert places["4"] + places["5"] > 200, "by chance 100"


async def test_a_task_that_sometimes_fails_is_mixed_and_one_that_always_fails_is_hopeless() -> None:
    history: list[tuple[int, float | None]] = [(0, 1.0), (1, None), (3, None), (4, 1.0), (5, None)] * 8
    history += [(2, None if number % 2 else 1.0) for number in range(8)]
    assert (await first_places(await after([history])))[MIXED.id] > 200


async def test_the_infrastructure_says_nothing_of_a_task() -> None:
    lost = [
        replace(one, fault=Fault.INFRASTRUCTURE)
        for one in ended(0, [(place, None) for place in (0, 1) for _ in range(50)])
    ]
    choice = TaskChoice(TASKS, 0)
    await choice.learn(Recorded(), 0, lost)  # type: ignore[arg-type]
    assert choice.ranked("here", 8) == (await after([[]])).ranked("here", 8)


@pytest.mark.parametrize("always", [True, False])
async def test_a_task_whose_agent_crashes_is_no_mixed_one(always: bool) -> None:
    """What crashes is left out of its group: of one that is solved otherwise nothing is left to compare."""
    choice, store = TaskChoice(TASKS, 0), Recorded()
    for step in range(1, 5):
        earned: list[tuple[int, float | None]] = [(0, 1.0), (1, 0.0), (3, 0.0), (4, 1.0), (5, 0.0)] * 8
        earned += [(2, None if always or number % 2 else 1.0) for number in range(8)]
        crashed = [replace(one, fault=Fault.AGENT) if one.fault else one for one in ended(step, earned)]
        await choice.learn(store, step, crashed)  # type: ignore[arg-type]
    assert (await first_places(choice))[MIXED.id] < 100


async def test_one_outlier_does_not_make_all_other_rewards_alike() -> None:
    history: list[list[tuple[int, float | None]]] = [[(0, -100.0)]]
    rest: list[tuple[int, float | None]] = [(0, 1.0), (1, 0.0), (3, 0.0), (4, 1.0), (5, 0.0)]
    history += [rest * 8 + [(2, float(number % 2)) for number in range(8)]] * 3
    places = await first_places(await after(history))
    assert places[MIXED.id] > 100
    assert places[MIXED.id] + places[SOLVED.id] > 280, "the outlier was one of the solved task's"


async def test_open_tasks_come_last() -> None:
    ranked = (await after([])).ranked("group 3", 4, without={"0", "1", "2"})
    assert {task.id for task in ranked[:3]} == {"3", "4", "5"}


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    made = plugins().store(f"sqlite:///{tmp_path / 'past.db'}")
    await made.open()
    yield made
    await made.close()


async def a_run(store: Store, name: str, rewards: Sequence[float], *, project: str = "mine", over: bool = True) -> Run:
    """A run of one step in which every task but the third earned 1, and the third these."""
    run = await store.put_run(Run(name, name, {}, project=project))
    planned = train_rollouts(name, 1, TASKS, len(rewards), 1)
    await store.create_rollouts(planned)
    for lease in await store.lease(name, "worker", limit=100):
        rollout = lease.rollout
        reward = rewards[rollout.index] if rollout.task.id == MIXED.id else 1.0
        # One half returned by the agent, one given by lightning.reward.
        await store.complete(rollout.id, 1, Outcome(reward / 2, step_rewards=(StepReward(reward / 2),)))
    groups = tuple(dict.fromkeys(rollout.group for rollout in planned))
    await store.commit_step(StepRecord(name, 1, 1, (), (), "", groups=groups))
    await mark_over(store, name, over)
    return run


async def test_past_runs_are_read_once_those_of_the_project_that_are_over(store: Any) -> None:
    mixed = [0.0, 1.0] * 8
    await a_run(store, "other-project", mixed, project="theirs")
    await a_run(store, "still-going", mixed, over=False)
    run = await store.put_run(Run("new", "new", {}, project="mine"))
    nothing = TaskChoice(TASKS, 0)
    await nothing.recall(store, run)
    assert nothing.ranked("here", 8) == (await after([])).ranked("here", 8)
    await a_run(store, "past", mixed)
    later = TaskChoice(TASKS, 0)
    await later.recall(store, run)
    assert later.ranked("here", 8) == nothing.ranked("here", 8), "what ends after the first start changes nothing"
    newer = await store.put_run(Run("newer", "newer", {}, project="mine"))
    knows = TaskChoice(TASKS, 0)
    await knows.recall(store, newer)
    assert (await first_places(knows))[MIXED.id] > 200
    kept = await store.get_state("newer", STATE)
    assert kept["runs"] == ["past"]
    assert all(sum(sums[::3]) <= 8 for sums in kept["tasks"].values()), "16 rollouts count for 8"
    others = TaskChoice([replace(task, input="another question") for task in TASKS], 0)
    await others.recall(store, newer)
    assert others._sums.sum() == 0, "a task with the same id and another input is another task"


async def test_what_was_learned_on_the_way_is_read_again(store: Any) -> None:
    run = await a_run(store, "run", [0.0, 1.0, 1.0, 0.0], over=False)
    read, told = TaskChoice(TASKS, 5), TaskChoice(TASKS, 5)
    await read.recall(store, run)
    await told.recall(store, replace(run, id="nobody"))
    rollouts = await all_rollouts(store, "run")
    await told.learn(store, 1, rollouts[::-1])
    assert (read._sums == told._sums).all()
    assert math.isclose(read._sums[2, 1], 2.0), "returned and given inside"
    assert [read.ranked(str(number), 4) for number in range(9)] == [told.ranked(str(number), 4) for number in range(9)]


DAPO = LightningRL("dapo", group_size=4)


@pytest.fixture
def partly(answering: Any) -> Any:
    """An agent that has always solved the first three tasks, and depends on luck for the others."""

    async def agent(task: Task, llm: Any) -> float:
        reward = float(await answering(task, llm))
        return 1.0 if str(task.input).endswith(("0", "1", "2")) else reward

    return agent


@pytest.mark.parametrize("algorithm", [LightningRL("grpo", group_size=4), DAPO], ids=["grpo", "dapo"])
async def test_a_resumed_run_plans_what_it_had_planned(
    bench: Any, partly: Any, tmp_path: Path, algorithm: LightningRL
) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "trainer__order": "learnable", "trainer__steps": 4}
    settings |= {"trainer__eval_every": 0, "trainer__max_waves": 2}
    async with bench(tmp_path, partly, **settings) as made:
        made.loop.val = []
        made.engine.crash_at = "step:2"
        with pytest.raises(made.Crash):
            await made.loop.run({})
        begun = await all_rollouts(made.store, "run", split="train")
    async with bench(tmp_path, partly, **settings) as made:
        made.loop.val = []
        await made.loop.run({})
        after_it = await all_rollouts(made.store, "run", split="train")
        records = await made.store.steps("run")
        again = TaskChoice(made.loop.train, 0)
        planned = {}
        await again.recall(made.store, replace(made.loop.stack.run, id="nobody"))
        for record in records:
            planned[record.step] = [task.id for task in again.of_step(record.step, 4, 0, len(record.groups))]
            mine = [rollout for rollout in after_it if rollout.group in record.groups]
            await again.learn(made.store, record.step, mine)
    assert [rollout.id for rollout in after_it[: len(begun)]] == [rollout.id for rollout in begun], (
        "none is planned anew"
    )
    for step, tasks in planned.items():
        mine = [rollout.task.id for rollout in after_it if rollout.step == step and not rollout.index]
        assert mine == tasks, "each step has the tasks that follow from the committed steps before it"
        assert len(set(mine[:5])) == min(len(mine), 5), "each once while there are others"
    used = sum(record.metrics["groups_used"] for record in records)
    assert used > 0


async def test_groups_that_begin_while_the_engine_trains_are_distinct_and_not_begun_twice(
    bench: Any, partly: Any, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"algorithm": LightningRL("grpo", group_size=2), "trainer__order": "learnable"}
    settings |= {"trainer__max_staleness": 1, "trainer__steps": 4, "trainer__eval_every": 0}
    async with bench(tmp_path, partly, **settings) as made:
        made.loop.val = []
        made.engine.crash_at = "step:2"
        with pytest.raises(made.Crash):
            await made.loop.run({})
        begun = await all_rollouts(made.store, "run", split="train")
    async with bench(tmp_path, partly, **settings) as made:
        made.loop.val = []
        await made.loop.run({})
        rollouts = await all_rollouts(made.store, "run", split="train")
        records = await made.store.steps("run")
    assert [rollout.id for rollout in rollouts[: len(begun)]] == [rollout.id for rollout in begun]
    tasks = {rollout.group: rollout.task.id for rollout in rollouts}
    for record in records:
        assert len({tasks[group] for group in record.groups}) == len(record.groups) == 2
    assert len(tasks) == 8
