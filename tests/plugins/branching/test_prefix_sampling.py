"""Groups that begin behind prefixes of earlier rollouts are trained, audited, taken again and resumed as others."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import lightning
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch import is_prefix
from lightning.config import with_settings
from lightning.config.plugin_settings import Config
from lightning.errors import ConfigError
from lightning.store.url import sqlite_url
from lightning.testing.fake_vllm import Reply
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.samplers import Asked
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Rollout, Run, Status, Task
from lightning_branching import prefix_sampling
from lightning_branching.config import BranchingConfig
from lightning_branching.prefix_choice import HALF, Beginning, Begun, Chooser, Parent, Place, ends
from lightning_branching.prefix_sampling import prefix_sampler
from lightning_db.keeper import keeper_of
from lightning_db.prune import RunPlan, carry_out
from lightning_proof.audit import audit

Open = Callable[..., AbstractAsyncContextManager[Any]]
GRPO = LightningRL("grpo", group_size=8)
CALLS = 4
PREFIX = {
    "trainer__sampling": "prefix",
    "trainer__task_share": 0.3,
    "trainer__steps": 3,
    "trainer__tasks_per_step": 3,
    "trainer__eval_every": 0,
}
TASKS = [Task(f"question {number}") for number in range(4)]


def answers() -> Callable[[Any], Reply]:
    """`y` in two of three answers, `n` else."""
    count = itertools.count()
    return lambda body: Reply("n" if zlib.crc32(str(next(count)).encode()) % 3 == 0 else "y")


async def ask(session: aiohttp.ClientSession, llm: Any, text: str) -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": text}]}
    async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
        reply.raise_for_status()
        return str((await reply.json())["choices"][0]["message"]["content"])


async def lucky(task: Task, llm: Any) -> float:
    """Four calls, each with all that was said before: all have to be answered with `y`, which a fifth of the rollouts earns."""
    said = str(task.input)
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
        for _ in range(CALLS):
            said += "|" + await ask(session, llm, said)
    return float(said.endswith("|y" * CALLS))


async def test_groups_begin_behind_prefixes_and_are_trained_audited_and_counted(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", lucky, algorithm=GRPO, script=answers(), train=TASKS, **PREFIX) as made:
        await made.loop.run({})
        report = await audit(made.store, "run")
        assert (report.steps, report.ok) == (3, True), report.findings
        records = await made.store.steps("run")
        assert records[0].metrics["prefix_groups"] == 0.0  # nothing is known yet
        every = await all_rollouts(made.store, "run", split="train")
        assert all(each.status is Status.SUCCEEDED for each in every), [each.error for each in every]
        by_id = {each.id: each for each in every}
        begun = [each for each in every if each.parent is not None]
        assert begun
        for each in begun:
            assert each.parent is not None
            parent = by_id[each.parent[0]]
            assert parent.step < each.step
            assert parent.parent is None
            assert parent.task.id == each.task.id
        for record in records:
            groups = await load_groups(made.store, [each for each in every if each.step == record.step], ())
            assert all(len({member.rollout.parent for member in group.trajectories}) == 1 for group in groups)
            kept = sum(
                len(call.response_ids)
                for group in groups
                for member in group.trajectories
                for at in member.parent_calls
                if at.key == member.rollout.parent
                for call in member.parent_calls
                if is_prefix(call, at)
            )
            assert record.metrics["prefix_tokens"] == kept
            for group in groups:  # a prefix is no call of the group: nothing of it is trained
                for member in group.trajectories:
                    own = CALLS if member.rollout.parent is None else CALLS - member.rollout.parent[2]
                    assert len(member.transitions) == own


async def test_a_killed_step_goes_on_with_the_prefixes_that_it_had(bench: Open, tmp_path: Path) -> None:
    folder, turns = tmp_path / "run", itertools.count()
    dead = asyncio.Event()

    async def dies(task: Task, llm: Any) -> float:
        if llm.extras.get("branches") and next(turns) == 5:
            dead.set()
            await asyncio.sleep(60)
        return await lucky(task, llm)

    async with bench(folder, dies, algorithm=GRPO, script=answers(), train=TASKS, **PREFIX) as made:
        running = asyncio.create_task(made.loop.run({}))
        await dead.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        before = {each.id: each for each in await all_rollouts(made.store, "run", split="train")}
        assert any(each.parent is not None and not each.status.ended for each in before.values())
    async with bench(folder, lucky, algorithm=GRPO, script=answers(), train=TASKS, **PREFIX) as made:
        await made.loop.run({})
        after = {each.id: each for each in await all_rollouts(made.store, "run", split="train")}
        assert all(after[name].parent == each.parent and after[name].task == each.task for name, each in before.items())
        assert all(after[name].reward == each.reward for name, each in before.items() if each.status.ended)
        records = await made.store.steps("run")
        assert not any("~" in group for record in records for group in record.groups)  # no second try
        report = await audit(made.store, "run")
        assert report.ok, report.findings


async def test_void_prefixes_are_counted_said_and_not_begun_behind_again(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(1_790_000_000)

    async def agent(task: Task, llm: Any) -> float:
        said = ""
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            for _ in range(CALLS):
                said += await ask(session, llm, f"{task.input} at {next(clock)}")
        return float(said == "y" * CALLS)

    settings = PREFIX | {"trainer__steps": 4}
    async with bench(tmp_path / "run", agent, algorithm=GRPO, script=answers(), train=TASKS, **settings) as made:
        await made.loop.run({})
        records = await made.store.steps("run")
        assert len(records) == 4
        void = sum(record.metrics["prefix_void"] for record in records)
        assert void == sum(record.metrics.get("prefix_void/other_request", 0.0) for record in records) > 0
        every = await all_rollouts(made.store, "run", split="train")
        behind = {each.group: each.parent[0] for each in every if each.parent is not None}
        by_step = [parent for _, parent in sorted(behind.items())]
        assert len(set(by_step)) == len(by_step)  # nothing begins twice behind a rollout that was void
        assert (await audit(made.store, "run")).ok
    said = [record.getMessage() for record in caplog.records if "teaches nothing" in record.getMessage()]
    assert len(said) == len(by_step)
    assert "its 8 rollouts are void" in said[0]
    assert "the clock" in said[0]


async def test_agents_of_one_call_are_said_to_have_no_prefixes(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = itertools.count()

    async def once(task: Task, llm: Any) -> float:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            await ask(session, llm, str(task.input))
        return float(next(count) % 8 == 0)

    async with bench(tmp_path / "run", once, algorithm=GRPO, script=answers(), train=TASKS, **PREFIX) as made:
        await made.loop.run({})
        assert all(record.metrics["prefix_groups"] == 0.0 for record in await made.store.steps("run"))
    assert caplog.text.count("no call can be begun at: agents make one call each") == 1


async def test_groups_begin_behind_rollouts_of_another_run(
    bench: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    async with bench(
        folder, lucky, algorithm=GRPO, script=answers(), train=TASKS, trainer__steps=2, trainer__eval_every=0
    ) as made:
        await made.loop.run({})
        store = made.store
        run = await store.get_run("run")
        assert run is not None
        sampler = prefix_sampler(asked({"trainer.sampling": "prefix", "trainer.prefix_run": "run"}))
        assert sampler is not None

        sampler.stack = cast("Any", SimpleNamespace(store=store, run=Run("other", "other")))
        sampler.config = asked({"trainer.prefix_run": "run", "trainer.sampling": "prefix"}).config.trainer
        sampler.tasks, sampler.agents = TASKS, ()
        await sampler.start()
        again = prefix_sampler(asked({"trainer.sampling": "prefix", "trainer.prefix_run": "run"}))
        assert again is not None
        again.stack, again.config, again.tasks, again.agents = sampler.stack, sampler.config, TASKS, ()
        monkeypatch.setattr(prefix_sampling, "each_rollout", None)  # the lender goes on; this run has what it had
        await again.start()
        assert again._chooser._tasks == sampler._chooser._tasks
        monkeypatch.undo()
        for task, one in itertools.product(TASKS, (sampler, again)):
            one._chooser.add(task.id, 1, [Begun(f"other/1/0/{index}", 1, 0.0) for index in range(8)])
        found = [each async for each in sampler._beginnings(2, 4)]
        assert found
        assert all(each.parent.run == "run" and each.parent.reward == 1.0 for each in found)
        for own, name, tasks, problem in (
            ("other", "none", TASKS, "has no other run of that name"),
            ("other", "other", TASKS, "has no other run of that name"),
            ("third", "run", [Task("else")], "none of its rollouts with a reward is of a training task"),
        ):
            sampler.stack, sampler.tasks = cast("Any", SimpleNamespace(store=store, run=Run(own, own))), tasks
            sampler.config = asked({"trainer.prefix_run": name, "trainer.sampling": "prefix"}).config.trainer
            with pytest.raises(ConfigError, match=problem):
                await sampler.start()
        keeper, every = keeper_of(sqlite_url(folder / "lightning.db")), await all_rollouts(store, "run", split="train")
        await carry_out(store, keeper, [RunPlan("run", groups=tuple({each.group for each in every}))])
        await again._look_for_pruned()
        assert [each async for each in again._beginnings(2, 4)] == []
        assert caplog.text.count("`lightning db prune` removed calls of earlier rollouts") == 1


def asked(settings: dict[str, Any], recorded: str | None = None) -> Asked:
    """What a run asks of its sampler."""
    return Asked(with_settings(Config(), settings), AlgorithmSchedule.of(GRPO), recorded=recorded)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.sampling": "prefix", "trainer.max_staleness": 1}, "Set max_staleness to 0"),
        ({"trainer.sampling": "prefix", "gateway.record_requests": False}, "needs gateway.record_requests"),
        ({"trainer.task_share": 0.2}, "are for trainer.sampling = prefix"),
        ({"trainer.sampling": "tree", "trainer.prefix_run": "one"}, "are for trainer.sampling = prefix"),
        ({"trainer.sampling": "prefix", "trainer.trunks": 2}, "are for trainer.sampling = tree"),
        ({"trainer.sampling": "prefix", "trainer.task_share": 0.0}, "task_share"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prefix_sampler(asked(settings))


def test_a_record_has_no_prefixes() -> None:
    with pytest.raises(ConfigError, match="a record and a search do not"):
        prefix_sampler(asked({"trainer.sampling": "prefix"}, recorded="runs/one"))
    assert prefix_sampler(asked({})) is None
    assert BranchingConfig.of(Config()).task_share == HALF


# --- where a group begins ---------------------------------------------------------------------------------------------


def made_parent(reward: float, calls: int = 7) -> Parent:
    rollout = Rollout("run/1/0/0", "run", Task("one", id="one"), "run/1/0", reward=reward, attempt=1)
    return Parent(rollout, tuple(Place(seq, 1 - seq / (calls + 1)) for seq in range(1, calls + 1)), reward)


def group(rewards: Sequence[float], step: int = 1) -> list[Begun]:
    return [Begun(f"run/{step}/0/{index}", 1, reward) for index, reward in enumerate(rewards)]


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8), min_size=1, max_size=6))
def test_only_skewed_tasks_get_prefixes_and_only_of_the_rollouts_that_help(groups: list[list[float]]) -> None:
    chooser = Chooser()
    for step, rewards in enumerate(groups, 1):
        chooser.add("one", step, group(rewards, step))
    shares = [sum(rewards) / len(rewards) for rewards in groups]
    weights = [0.5**age for age in range(len(groups))][::-1]
    rate = sum(share * weight for share, weight in zip(shares, weights, strict=True)) / sum(weights)
    same = len({reward for rewards in groups for reward in rewards}) == 1
    assert chooser.skewed() == (["one"] if not same and abs(rate - 0.5) > 0.25 else [])
    for each in chooser.parents("one") if chooser.skewed() else ():
        assert each.reward == (1.0 if rate < 0.5 else 0.0)


def test_a_hard_task_begins_earlier_as_groups_succeed_and_later_as_they_fail() -> None:
    def begins(rewards: Sequence[float]) -> list[int]:
        chooser, parent, found = Chooser(), made_parent(1.0), []
        chooser.add("one", 1, group([1.0, *[0.0] * 15]))
        for step in range(2, 12):
            beginning = chooser.choose("one", parent, step)
            if beginning is None:
                break
            found.append(beginning.seq)
            chooser.add_behind("one", step, parent, beginning.seq, group(rewards, step))
        return found

    middle, *earlier = begins([1.0] * 7 + [0.0])
    assert min(earlier) < middle
    assert max(begins([0.0] * 7 + [1.0])) > middle
    assert set(begins([1.0] * 4 + [0.0] * 4)) <= {middle - 1, middle, middle + 1}


@pytest.mark.parametrize(("calls", "chance"), [(4, 0.35), (4, 0.6), (8, 0.6), (8, 0.75)])
def test_a_hard_task_begins_where_half_of_its_equally_hard_calls_would_succeed(calls: int, chance: float) -> None:
    """Also where no rollout of the run has succeeded: another run lent the good one."""
    for solved in (1, 0):
        chooser = Chooser()
        chooser.lend("one", group([1.0], 9))
        chooser.add("one", 1, group([*[1.0] * solved, *[0.0] * (round(1 / chance**calls) - solved)]))
        beginning = chooser.choose("one", made_parent(1.0, calls - 1), 2)
        assert beginning is not None
        if solved:
            behind = [chance ** (calls - seq) for seq in range(1, calls)]
            assert abs(behind[beginning.seq - 1] - HALF) <= min(abs(share - HALF) for share in behind) + 0.05
        assert beginning.seq > calls / 2


def test_a_prefix_after_which_no_more_succeed_than_from_the_task_is_not_begun_at() -> None:
    chooser, parent = Chooser(), made_parent(1.0, 1)
    chooser.add("one", 1, group([1.0, *[0.0] * 31]))
    for step in range(2, 40):
        if (beginning := chooser.choose("one", parent, step)) is None:
            break
        chooser.add_behind("one", step, parent, beginning.seq, group([0.0] * 8, step))
    else:
        pytest.fail("the prefix never helped")


def test_an_easy_task_begins_behind_a_bad_rollout() -> None:
    chooser = Chooser()
    chooser.add("one", 1, group([0.0, *[1.0] * 15]))
    assert [each.reward for each in chooser.parents("one")] == [0.0]
    beginning = chooser.choose("one", made_parent(0.0), 2)
    assert beginning is not None
    assert beginning.seq == 4, "half of the way of seven calls"


def test_groups_repeat_a_prefix_that_was_begun_behind_in_place_of_those_that_teach_nothing() -> None:
    chooser, parent = Chooser(), made_parent(1.0)
    for step in range(1, 4):
        chooser.add("one", step, group([1.0, *[0.0] * 7], step))
        for name in ("two", "three", "four"):
            chooser.add(name, step, group([0.0] * 8, step))
    found = [Beginning(parent.rollout, 4)]
    assert chooser.repeated(found, 8, 4) == found, "nobody knows yet whether its calls can be repeated"
    chooser.add_behind("one", 4, parent, 4, group([1.0, 0.0], 4))
    assert chooser.repeated(found, 8, 5) == found * 6, "three groups of four taught nothing"
    assert chooser.repeated(found, 4, 5) == found * 3
    chooser.add_void(parent.rollout.id)
    chooser.add_void(parent.rollout.id)
    assert chooser.voided == 1, "all groups of a step behind one parent count as one"
    assert Chooser().repeated([], 8, 1) == []


def test_tasks_take_turns() -> None:
    chooser = Chooser()
    for step, name in enumerate(("one", "two", "three"), 1):
        chooser.add(name, step, group([1.0, *[0.0] * 7], step))
    assert chooser.skewed() == ["three", "two", "one"]
    chooser.add_behind("three", 4, None, 1, group([1.0], 4))
    assert chooser.skewed() == ["two", "one", "three"]
    chooser.add_void("run/2/0/0")
    assert not list(chooser.parents("two"))


def test_a_failure_that_costs_much_does_not_make_other_rollouts_good() -> None:
    """A task of which few succeed stays hard, also where `trainer.policy_fault` is below all rewards."""
    chooser = Chooser()
    fault = Begun("run/1/0/9", 1, -1.0, able=False)
    chooser.add("one", 1, [*group([1.0, *[0.0] * 7]), fault])
    assert chooser.skewed() == ["one"]
    assert [each.reward for each in chooser.parents("one")] == [1.0]
    chooser.add("two", 1, [*group([1.0]), *[fault] * 7])
    assert "two" in chooser.skewed(), "where all others earned the same, failures are the other end"


def test_a_run_lends_a_few_rollouts_of_each_end() -> None:
    lent = ends(group([float(number) for number in range(20)]))
    assert [each.reward for each in lent] == [0.0, 1.0, 2.0, 3.0, 16.0, 17.0, 18.0, 19.0]
    assert len(ends(lent[:5])) == 5


async def test_what_agents_reward_inside_counts(bench: Open, tmp_path: Path) -> None:
    """An agent that gives its reward by `lightning.reward`, and returns 0."""

    async def inside(task: Task, llm: Any) -> float:
        lightning.reward(await lucky(task, llm), name="solved")
        return 0.0

    async with bench(tmp_path / "run", inside, algorithm=GRPO, script=answers(), train=TASKS, **PREFIX) as made:
        await made.loop.run({})
        records = await made.store.steps("run")
        assert sum(record.metrics["prefix_groups"] for record in records) > 0
        assert records[0].metrics["differing/task"] > 0
        assert (await audit(made.store, "run")).ok
