"""A loop of one's own leaves a run as any other, and cannot leave another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.audit import audit
from lightning.errors import AuditError, ConfigError, DataError, RunnerError
from lightning.trainer.session import Session
from lightning.trainer.training_data import all_rollouts
from lightning.types import Status, Task

Open = Callable[..., AbstractAsyncContextManager[Any]]
TASKS = [Task("one"), Task("two")]


async def take(session: Session, *, updates: int = 1) -> dict[str, float]:
    """A step of GRPO, with several updates on its batch."""
    batch = await session.batch(await session.rollout(TASKS))
    for _ in range(updates):
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
    return dict(await session.publish())


async def test_steps_of_ones_own_are_recorded_served_and_audited(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        for step in range(3):
            assert session.step == step
            metrics = await take(session, updates=2)
            assert (metrics["updates"], metrics["lr"], metrics["drift_tokens"]) == (2.0, 0.5, 0.0)
            assert made.policy.version == step + 1
            assert made.policy.ledger == made.engine.ledger
        assert len(made.engine.ledger) == 6
        assert made.engine.ledger[0].startswith("0.5:")
        records = await made.store.steps("run")
        assert [record.policy_version for record in records] == [1, 2, 3]
        assert all(record.context["own_loop"] and record.checkpoint for record in records)
        report = await audit(made.store, "run")
        assert (report.steps, report.ok) == (3, True)


async def test_it_goes_on_where_it_was_killed(bench: Open, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with bench(folder, own_loop=True) as made:

        async def killed() -> None:
            async with Session(made.loop) as session:
                await take(session)
                made.engine.crash_at = "update:1"
                await take(session)

        with pytest.raises(made.Crash):
            await killed()
        first = made.engine.ledger
    async with bench(folder, own_loop=True) as made, Session(made.loop) as session:
        assert (session.step, made.engine.ledger, made.policy.ledger) == (1, first, first)
        await take(session)
        assert len(made.engine.ledger) == 2
        assert (await audit(made.store, "run")).ok
        begun = await all_rollouts(made.store, "run", split="train", step=1)
        assert len(begun) == 16  # those of the step that was lost stay in the record
        used = {name for name, _ in (await made.store.last_step("run")).rollouts}
        assert all("~1/" in name for name in used)


async def test_a_state_is_on_disk_before_its_step_is_committed(bench: Open, tmp_path: Path) -> None:
    """Nobody could take such a step again."""
    async with bench(tmp_path / "run", own_loop=True) as made:
        made.engine.crash_at = "save:1"

        async def killed() -> None:
            async with Session(made.loop) as session:
                await take(session)

        with pytest.raises(made.Crash):
            await killed()
        assert await made.store.steps("run") == []


async def test_its_steps_are_not_taken_again_by_the_loop(bench: Open, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with bench(folder, own_loop=True) as made, Session(made.loop) as session:
        await take(session)
    for file in (folder / "checkpoints").rglob("*"):
        if file.is_file():
            file.unlink()
    for place in sorted((folder / "checkpoints").glob("*")):
        place.rmdir()
    async with bench(folder) as made:
        with pytest.raises(AuditError, match="was taken by a loop of its own"):
            await made.loop.restore()


async def test_parts_of_a_batch_and_several_calls_of_rollout_make_one_step(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        groups = await session.rollout(TASKS[:1], n=3) + await session.rollout([{"input": "more"}], n=2)
        assert [len(group.trajectories) for group in groups] == [3, 2]
        batch = await session.batch(groups)
        for row in batch.samples:
            await session.forward_backward(batch, [row])
        await session.optim_step()
        metrics = await session.publish()
        assert metrics["rollouts"] == 5.0
        assert metrics["passes"] == len(batch.samples)
        assert (await audit(made.store, "run")).ok


async def test_what_no_step_can_be_made_of_is_refused_by_name(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        with pytest.raises(DataError, match="nothing was updated"):
            await session.publish()
        with pytest.raises(DataError, match=r"call forward_backward\(\) with a batch"):
            await session.optim_step()
        groups = await session.rollout(TASKS)
        batch, other = await session.batch(groups), await session.batch(groups)
        await session.forward_backward(batch)
        with pytest.raises(DataError, match="a step has one batch"):
            await session.forward_backward(other)
        with pytest.raises(DataError, match=r"publish\(\) before evaluate\(\)"):
            await session.evaluate()
        await session.optim_step()
        await session.publish()
        with pytest.raises(DataError, match="was trained in a step before"):
            await session.batch(groups)
        with pytest.raises(DataError, match=r"not made by session.batch"):
            await session.forward_backward(batch)
        with pytest.raises(DataError, match="the list of tasks is empty"):
            await session.rollout([])
        assert session.step == 1


async def test_older_rollouts_need_the_setting_that_allows_them(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        old = await session.rollout(TASKS)
        await take(session)
        with pytest.raises(DataError, match=r"sampled 1 steps ago, and trainer.max_staleness is 0"):
            await session.batch(old)


async def test_a_batch_that_teaches_nothing_says_why(bench: Open, answering: Any, tmp_path: Path) -> None:
    async def constant(task: Task, llm: Any) -> float:
        await answering(task, llm)
        return 1.0

    async with bench(tmp_path / "run", constant, own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        with pytest.raises(DataError, match="no row to train on"):
            await session.forward_backward(batch)


async def test_agents_that_all_fail_are_an_error(bench: Open, tmp_path: Path) -> None:
    async def broken(task: Task, llm: Any) -> float:
        raise ValueError("no luck")

    async with bench(tmp_path / "run", broken, own_loop=True) as made, Session(made.loop) as session:
        with pytest.raises(RunnerError, match="no luck"):
            await session.rollout(TASKS)
        found = await all_rollouts(made.store, "run", split="train", step=0)
        assert {rollout.status for rollout in found} == {Status.FAILED}


async def test_held_out_tasks_are_evaluated_when_asked(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        before = await session.evaluate()
        await take(session)
        after = await session.evaluate()
        assert before is not None
        assert after is not None
        assert (before.step, after.step, after.rollouts) == (0, 1, 3)


async def test_a_critic_needs_fit(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", algorithm=LightningRL("ppo"), own_loop=True) as made:
        with pytest.raises(ConfigError, match=r"a critic is trained by Trainer.fit"):
            Session(made.loop)


async def test_a_record_has_no_loop_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    trainer = lightning.Trainer(tmp_path, recorded=str(tmp_path), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="a loop of your own samples rollouts"):
        async with trainer.session(lambda task, llm: 1.0):
            pass
