"""Groups that are sampled as trees are trained, audited and resumed as others, at no more tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import lightning
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import with_settings
from lightning.config.plugin_settings import Config
from lightning.errors import ConfigError, DataError
from lightning.testing.fake_vllm import Reply
from lightning.tracking.trackers import attempts_of
from lightning.trainer.algorithm import AlgorithmSchedule
from lightning.trainer.samplers import Asked
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Status, Task
from lightning_branching.planned import warn_of_credit
from lightning_branching.tree_sampling import check_tree
from lightning_credits import Branched
from lightning_proof.audit import audit
from lightning_record import exchanges
from lightning_session.session import Session

from tests.tiny_families import make_tiny_family

Open = Callable[..., AbstractAsyncContextManager[Any]]
TREE = {"trainer__sampling": "tree"}
BRANCH = LightningRL("rloo", credit="branch", group_size=4)


def script() -> Callable[[Any], Reply]:
    """Each answer is another one."""
    count = itertools.count()
    return lambda body: Reply("x" * (1 + zlib.crc32(str(next(count)).encode()) % 8))


async def ask(session: aiohttp.ClientSession, llm: Any, text: str) -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": text}]}
    async with session.post(f"{llm.base_url}/chat/completions", json=body) as reply:
        reply.raise_for_status()
        return str((await reply.json())["choices"][0]["message"]["content"])


async def chain(task: Task, llm: Any) -> float:
    """Four calls, each of which has all that was said before."""
    said = str(task.input)
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
        for _ in range(4):
            said += "|" + await ask(session, llm, said)
    return float(len(said) % 3)


@pytest.mark.parametrize("by", ["random", "entropy", "variance"])
async def test_a_run_of_trees_is_trained_and_audited(bench: Open, tmp_path: Path, by: str) -> None:
    async with bench(
        tmp_path / "run", chain, algorithm=BRANCH, script=script(), trainer__branch_by=by, trainer__steps=2, **TREE
    ) as made:
        await made.loop.run({})
        report = await audit(made.store, "run")
        assert (report.steps, report.ok) == (2, True), report.findings
        metrics = [record.metrics for record in await made.store.steps("run")]
        assert all(each["branches"] > 2 and each["branches_void"] == 0 for each in metrics)
        assert all(0.2 < each["branch_tokens"] < 0.7 for each in metrics)
        every = await all_rollouts(made.store, "run", split="train", step=1)
        assert all(each.status is Status.SUCCEEDED for each in every), [each.error for each in every]
        trunks = [each for each in every if each.parent is None]
        assert len(trunks) == 2 * 2  # tasks, and half of the group size
        ids = {each.id for each in trunks}
        assert all(each.parent[0] in ids for each in every if each.parent is not None)
        assert metrics[0]["calls_per_rollout"] == 4.0


async def test_a_group_samples_no_more_tokens_than_without(bench: Open, tmp_path: Path) -> None:
    words = itertools.cycle(["one word", "two"])
    async with bench(
        tmp_path / "run", chain, algorithm=BRANCH, script=lambda body: Reply(next(words)), trainer__steps=1, **TREE
    ) as made:
        await made.loop.run({})
        every = await all_rollouts(made.store, "run", split="train", step=1)
        for group in await load_groups(made.store, every, ()):
            for member in group.trajectories:  # also where a flawed parent is left out of the group, for a judge
                asked = exchanges.read(member.transitions, exchanges.parent_of(member))
                assert all(each is not None and each.request for each in asked)
                (record,) = await attempts_of(made.store, member.rollout)
                (parent,) = await exchanges.parents_of(made.store, [member.rollout])
                assert exchanges.read(record.transitions, parent) == asked
            tokens = [
                (member.rollout.parent is not None, sum(len(call.response_ids) for call in member.transitions))
                for member in group.trajectories
            ]
            trunks = [count for is_branch, count in tokens if not is_branch]
            branches = [count for is_branch, count in tokens if is_branch]
            assert len(trunks) == 2
            assert (
                sum(branches) <= sum(trunks) + 8
            )  # what branches cost is what their trunks did, give or take a word a call


async def test_a_step_goes_on_with_the_branches_that_it_had(bench: Open, tmp_path: Path) -> None:
    """As a kill -9 in the middle of a step's branches."""
    folder, turns = tmp_path / "run", itertools.count()

    async def dies(task: Task, llm: Any) -> float:
        if llm.extras.get("branches") and next(turns) == 2:
            dead.set()
            await asyncio.sleep(60)
        return await chain(task, llm)

    dead = asyncio.Event()
    async with bench(folder, dies, algorithm=BRANCH, script=script(), trainer__steps=1, **TREE) as made:
        running = asyncio.create_task(made.loop.run({}))
        await dead.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        before = [each for each in await all_rollouts(made.store, "run", split="train") if each.status.ended]
    async with bench(folder, chain, algorithm=BRANCH, script=script(), trainer__steps=1, **TREE) as made:
        await made.loop.run({})
        after = {each.id: each for each in await all_rollouts(made.store, "run", split="train")}
        assert all(after[each.id].reward == each.reward for each in before)
        (record,) = await made.store.steps("run")
        assert "~" not in record.groups[0]  # no second try
        report = await audit(made.store, "run")
        assert report.ok, report.findings


async def test_void_branches_are_counted_and_never_trained(bench: Open, tmp_path: Path) -> None:
    clock = itertools.count(1_790_000_000)

    async def agent(task: Task, llm: Any) -> float:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            said = await ask(session, llm, f"{task.input} at {next(clock)}")
            said += await ask(session, llm, f"and then {said}")
        return float(len(said) % 3)

    async with bench(tmp_path / "run", agent, algorithm=BRANCH, script=script(), trainer__steps=1, **TREE) as made:
        await made.loop.run({})
        (record,) = await made.store.steps("run")
        assert record.metrics["branches"] == 0
        assert record.metrics["branches_void"] >= 4
        used = {name for name, _ in record.rollouts}
        every = await all_rollouts(made.store, "run", split="train")
        void = [each for each in every if each.parent is not None]
        assert all("the clock" in each.error for each in void)
        assert not used & {each.id for each in void}
        assert (await audit(made.store, "run")).ok


async def test_agents_of_one_call_are_said_to_have_no_branches(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def once(task: Task, llm: Any) -> float:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            return float(len(await ask(session, llm, str(task.input))) % 3)

    async with bench(tmp_path / "run", once, algorithm=BRANCH, script=script(), trainer__steps=1, **TREE) as made:
        await made.loop.run({})
    assert "no call can be branched" in caplog.text


async def test_the_audit_names_a_branch_that_is_none(bench: Open, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with bench(folder, chain, algorithm=BRANCH, script=script(), trainer__steps=1, **TREE) as made:
        await made.loop.run({})
        every = await all_rollouts(made.store, "run", split="train")
        branch = next(each for each in every if each.parent is not None and each.trained_at_step is not None)
    rollout, attempt, seq = branch.parent
    for parent, problem in (
        ((rollout, attempt, seq - 1), "no call with the prompt"),
        (("elsewhere", 1, 0), "that the store does not have"),
    ):
        database = sqlite3.connect(folder / "lightning.db")
        with database:
            database.execute("UPDATE rollouts SET parent = ? WHERE id = ?", (json.dumps(parent), branch.id))
        database.close()
        async with bench(folder, chain, algorithm=BRANCH, trainer__steps=1, **TREE) as made:
            report = await audit(made.store, "run")
        assert any(found.rollout == branch.id and problem in found.problem for found in report.findings)


async def test_a_loop_goes_on_where_all_branches_are_void(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count(1_790_000_000)

    async def agent(task: Task, llm: Any) -> float:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {llm.api_key}"}) as session:
            said = await ask(session, llm, f"{task.input} at {next(clock)}")
            return float(len(await ask(session, llm, said)) % 3)

    async with (
        bench(tmp_path / "run", agent, algorithm=BRANCH, script=script(), own_loop=True) as made,
        Session(made.loop) as session,
    ):
        (group,) = await session.rollout([Task("one")], n=4)
        grown = await session.branch(group, group.trajectories[0].transitions[1], n=3)
        assert len(grown.trajectories) == 4
        assert "3 of 3 failed: 3 x This branch is void" in caplog.text
        assert "the clock" in caplog.text
        await session.forward_backward(await session.batch([grown]))
        await session.optim_step()
        assert (await session.publish())["failed"] == 3.0


async def test_a_loop_of_ones_own_branches_where_it_likes(bench: Open, tmp_path: Path) -> None:
    async with (
        bench(tmp_path / "run", chain, algorithm=BRANCH, script=script(), own_loop=True) as made,
        Session(made.loop) as session,
    ):
        (group,) = await session.rollout([Task("one")], n=2)
        trunk = group.trajectories[0]
        grown = await session.branch(group, trunk.transitions[2], n=3)
        assert len(grown.trajectories) == 5
        grown = await session.branch(grown, trunk.transitions[1], n=2)
        branches = [member for member in grown.trajectories if member.rollout.parent is not None]
        assert [len(member.transitions) for member in branches] == [2, 2, 2, 3, 3]
        with pytest.raises(DataError, match="was changed"):
            await session.batch([group])
        with pytest.raises(DataError, match="no group of this step"):
            await session.branch(group, trunk.transitions[2])
        with pytest.raises(DataError, match="is a branch of"):
            await session.branch(grown, branches[0].transitions[1])
        batch = await session.batch([grown])
        await session.forward_backward(batch)
        await session.optim_step()
        metrics = await session.publish()
        assert metrics["rollouts"] == 7.0
        report = await audit(made.store, "run")
        assert report.ok, report.findings


def asked(settings: dict[str, Any], *sizes: int, recorded: str | None = None) -> Asked:
    """What a run asks of its sampler whose algorithms have groups of these sizes."""
    algorithms = [LightningRL("reinforce++", group_size=size) for size in sizes]
    return Asked(
        with_settings(Config(), settings), AlgorithmSchedule(tuple(enumerate(algorithms, 1))), recorded=recorded
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.sampling": "tree", "trainer.max_staleness": 1}, "max_staleness to 0"),
        ({"trainer.sampling": "tree", "gateway.record_requests": False}, "needs gateway.record_requests"),
        ({"trainer.sampling": "tree", "trainer.trunks": 8}, "8 trunks in groups of 8 rollouts leaves no tokens"),
        ({"trainer.trunks": 2}, "are for trainer.sampling = tree"),
        ({"trainer.branch_by": "entropy"}, "are for trainer.sampling = tree"),
    ],
)
def test_settings_that_make_no_trees_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_tree(asked(settings, 8))


def test_a_record_has_no_trees() -> None:
    with pytest.raises(ConfigError, match="a record and a search do not"):
        check_tree(asked({"trainer.sampling": "tree"}, 8, recorded="runs/one"))


def test_a_group_of_one_has_no_branches() -> None:
    tree = {"trainer.sampling": "tree"}
    check_tree(asked(tree, 8, 2))
    with pytest.raises(ConfigError, match="1 trunk in groups of 1 rollout"):
        check_tree(asked(tree, 8, 1))


def test_trees_belong_to_fit(tmp_path: Path) -> None:
    model = make_tiny_family(tmp_path / "model", "llama2")
    config = with_settings(Config(), {"trainer.sampling": "tree"})
    trainer = lightning.Trainer(model, "grpo", out=tmp_path / "out", config=config)

    async def opened() -> None:
        async with trainer.session(chain):
            pass

    with pytest.raises(ConfigError, match=r"session\.branch"):
        asyncio.run(opened())


async def test_a_step_is_planned_again_where_trees_were_switched_off(bench: Open, tmp_path: Path) -> None:
    """Branches stand in the places of rollouts that begin at their task: the two are never one group."""
    folder, turns = tmp_path / "run", itertools.count()

    async def dies(task: Task, llm: Any) -> float:
        if llm.extras.get("branches") and next(turns) == 2:
            dead.set()
            await asyncio.sleep(60)
        return await chain(task, llm)

    dead = asyncio.Event()
    async with bench(folder, dies, algorithm=BRANCH, script=script(), trainer__steps=1, **TREE) as made:
        running = asyncio.create_task(made.loop.run({}))
        await dead.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with bench(folder, chain, algorithm=BRANCH, script=script(), trainer__steps=1) as made:
        await made.loop.run({})
        (record,) = await made.store.steps("run")
        assert all("~1/" in group for group in record.groups)
        every = {each.id: each for each in await all_rollouts(made.store, "run", split="train")}
        assert all(every[name].parent is None for name, _ in record.rollouts)


async def test_a_group_whose_branches_were_interrupted_is_not_trained(bench: Open, tmp_path: Path) -> None:
    slow = asyncio.Event()

    async def agent(task: Task, llm: Any) -> float:
        if llm.extras.get("branches") and not slow.is_set():
            await asyncio.sleep(60)
        return await chain(task, llm)

    async with (
        bench(tmp_path / "run", agent, algorithm=BRANCH, script=script(), own_loop=True) as made,
        Session(made.loop) as session,
    ):
        (group,) = await session.rollout([Task("one")], n=2)
        trunk = group.trajectories[0]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.branch(group, trunk.transitions[3], n=2), 0.5)
        slow.set()
        with pytest.raises(DataError, match="no group of this step"):
            await session.branch(group, trunk.transitions[1], n=2)
        with pytest.raises(DataError, match="branch\\(\\) was interrupted on it"):
            await session.batch([group])
        (other,) = await session.rollout([Task("two")], n=2)
        grown = await session.branch(other, other.trajectories[0].transitions[1], n=2)
        assert len(grown.trajectories) == 4
        await session.forward_backward(await session.batch([grown]))
        await session.optim_step()
        await session.publish()
        report = await audit(made.store, "run")
        assert report.ok, report.findings


def test_a_credit_that_knows_no_branches_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_credit([BRANCH, LightningRL("rloo", credit=Branched(prior=0.0)), LightningRL("grpo")])
    (record,) = caplog.records
    assert "the credit is identical" in record.message


def test_a_bonus_that_may_outweigh_the_credit_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_credit([LightningRL("grpo", credit="branch", entropy_coefficient=0.02)])
    (record,) = caplog.records
    assert "with entropy_coefficient = 0.02" in record.message


async def test_a_group_that_changes_is_in_no_batch_of_before(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = LightningRL("rloo", group_size=4)
    async with (
        bench(tmp_path / "run", chain, algorithm=plain, script=script(), own_loop=True) as made,
        Session(made.loop) as session,
    ):
        (group,) = await session.rollout([Task("one")])
        before = await session.batch([group])
        grown = await session.branch(group, group.trajectories[0].transitions[2], n=2)
        assert caplog.text.count("the credit is identical") == 1
        with pytest.raises(DataError, match="not made by"):
            await session.forward_backward(before)
        await session.forward_backward(await session.batch([grown]))
        with pytest.raises(DataError, match="branch before that"):
            await session.branch(grown, grown.trajectories[0].transitions[1], n=2)
        await session.optim_step()
        await session.publish()
        report = await audit(made.store, "run")
        assert report.ok, report.findings
