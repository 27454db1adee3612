"""A loop of one's own leaves a run as any other, and cannot leave another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch import given_rows
from lightning.config import Config, with_settings
from lightning.engines.step import NonFiniteError
from lightning.errors import ConfigError, DataError, RunnerError
from lightning.losses.correction import Correction
from lightning.losses.protocol import TokenBatch, name_of
from lightning.trainer.training_data import all_rollouts
from lightning.types import Status, Task, token_ids
from lightning_proof.audit import audit
from lightning_proof.recorded_step import own_step
from lightning_session.session import Session

Open = Callable[..., AbstractAsyncContextManager[Any]]
TASKS = [Task("one"), Task("two")]


async def take(session: Session, *, updates: int = 1) -> dict[str, float]:
    """A step of GRPO, with several updates on its batch."""
    batch = await session.batch(await session.rollout(TASKS))
    for _ in range(updates):
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
    return dict(await session.publish())


async def test_a_falling_rate_counts_steps_and_is_never_silently_0(bench: Open, tmp_path: Path) -> None:
    settings = {"engine__lr_schedule": "linear", "engine__lr": 0.5, "trainer__steps": 2}
    async with bench(tmp_path / "run", own_loop=True, **settings) as made, Session(made.loop) as session:
        rates = []
        for _ in range(2):
            batch = await session.batch(await session.rollout(TASKS))
            for _ in range(3):
                await session.forward_backward(batch)
                rates.append((await session.optim_step())["lr"])
            await session.publish()
        assert rates == [0.5] * 3 + [0.25] * 3
        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch)
        with pytest.raises(DataError, match=r"fallen to 0, since trainer.steps = 2 steps are over: set trainer.steps"):
            await session.optim_step()
        await session.optim_step(lr=0.125)
        assert (await session.publish())["lr"] == 0.125


async def test_a_row_whose_tokens_were_changed_in_place_is_refused(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        batch.samples[0].logprobs[:] -= 1
        with pytest.raises(DataError, match="a row is none of the batch's"):
            await session.forward_backward(batch)


async def test_rows_with_a_loss_of_the_loops_own_add_up_and_are_said(bench: Open, tmp_path: Path) -> None:
    """Imitation beside GRPO: answers that no policy sampled are trained in the same update, and the record says so."""

    def imitate(tokens: TokenBatch) -> Any:
        return -tokens.logprobs

    shown = given_rows([(token_ids([1, 2]), token_ids([3]))])
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        for rows in (None, shown):
            batch = await session.batch(await session.rollout(TASKS))
            with pytest.raises(DataError, match=r"a row is none of the batch's.*loss=\.\.\."):
                await session.forward_backward(batch, shown)
            await session.forward_backward(batch)
            if rows is not None:
                await session.forward_backward(batch, rows, loss=imitate)
            await session.optim_step(lr=0.5)
            await session.publish()
        plain, mixed = [own_step(record.context) for record in await made.store.steps("run")]
        assert plain is not None
        assert mixed is not None
        assert (plain.changed, mixed.changed) == (False, True)
        assert [name_of(getattr(loss, "given", loss)) for loss in made.engine.losses][-1] == "imitate"

        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch, shown, loss=imitate)
        await session.optim_step(lr=0.5)
        with pytest.raises(DataError, match="of the batch were in no gradient"):
            await session.publish()
        await session.forward_backward(batch, loss=imitate)
        await session.optim_step(lr=0.5)
        await session.publish()


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
        with pytest.raises(DataError, match=r"in a step before \(1 in all\), and trainer.max_reuse = 0"):
            await session.batch(groups)
        with pytest.raises(DataError, match=r"not made by session.batch"):
            await session.forward_backward(batch)
        other_rows = await session.batch(await session.rollout(TASKS))
        with pytest.raises(DataError, match="a row is none of the batch's"):
            await session.forward_backward(other_rows, batch.samples)
        with pytest.raises(DataError, match="a group is there twice"):
            await session.batch([groups[0], groups[0]])
        with pytest.raises(DataError, match="the list of tasks is empty"):
            await session.rollout([])
        assert session.step == 1


async def test_older_rollouts_need_the_setting_that_allows_them(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        old = await session.rollout(TASKS)
        await take(session)
        with pytest.raises(DataError, match=r"older than trainer.max_staleness = 0"):
            await session.batch(old)


async def test_updates_that_are_in_no_step_are_not_exported(bench: Open, tmp_path: Path) -> None:
    async def forgets(session: Session) -> None:
        async with session:
            batch = await session.batch(await session.rollout(TASKS))
            await session.forward_backward(batch)
            await session.optim_step()

    async with bench(tmp_path / "run", own_loop=True) as made:
        with pytest.raises(DataError, match=r"publish\(\) before the session ends"):
            await forgets(Session(made.loop))
        assert not (tmp_path / "run" / "model").exists()


async def test_rows_that_were_in_no_gradient_are_not_recorded_as_trained(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch, batch.samples[1:])
        await session.optim_step()
        with pytest.raises(DataError, match="1 row of the batch was in no gradient"):
            await session.publish()
        await session.forward_backward(batch, batch.samples[:1])
        with pytest.raises(DataError, match="a gradient that no update has used"):
            await session.publish()
        await session.optim_step()
        assert (await session.publish())["updates"] == 2.0


async def test_updates_on_parts_of_a_batch_are_no_drift(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        half = len(batch.samples) // 2
        for rows in (batch.samples[:half], batch.samples[half:]):
            await session.forward_backward(batch, rows)
            await session.optim_step(lr=0.5)
        assert (await session.publish())["drift_tokens"] == 0
        assert "are not the ones the policy server sampled" not in caplog.text


async def test_policies_that_take_turns_are_trained_in_their_own(bench: Open, tmp_path: Path) -> None:
    """Rollouts of one turn may be trained in another one, which their batch has to know."""
    async with bench(tmp_path / "run", own_loop=True, trainer__max_staleness=1) as made, Session(made.loop) as session:
        made.loop.resting = lambda step: (("other", "policy")[step == 2],)
        first, second, third = [await session.rollout(TASKS) for _ in range(3)]
        early = await session.batch(second)
        batch = await session.batch(first)
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
        await session.publish()
        with pytest.raises(DataError, match=r"not made by session.batch"):
            await session.forward_backward(early)  # it is a batch of the turn before
        assert not (await session.batch(third)).samples, "the policy rests"
        batch = await session.batch(third, ["policy"])
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
        await session.publish()
        assert [record.context["resting"] for record in await made.store.steps("run")] == [["other"], []]
        assert (await audit(made.store, "run")).ok


async def test_rows_whose_gradient_was_lost_are_not_recorded_as_trained(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch, batch.samples[:1])
        made.engine.fail_next = NonFiniteError("the loss is nan")
        with pytest.raises(NonFiniteError):
            await session.forward_backward(batch, batch.samples[1:])
        await session.forward_backward(batch, batch.samples[1:])
        await session.optim_step()
        with pytest.raises(DataError, match="1 row of the batch was in no gradient"):
            await session.publish()
        await session.forward_backward(batch, batch.samples[:1])
        await session.optim_step()
        assert (await session.publish())["updates"] == 2.0


async def test_rollouts_side_by_side_are_other_groups(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        one, other = await asyncio.gather(session.rollout(TASKS[:1]), session.rollout(TASKS[1:]))
        assert one[0].id != other[0].id
        assert {one[0].trajectories[0].rollout.task.input, other[0].trajectories[0].rollout.task.input} == {
            "one",
            "two",
        }


async def test_an_update_that_failed_leaves_room_for_another_batch(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        made.engine.fail_next = NonFiniteError("the loss is nan")
        with pytest.raises(NonFiniteError):
            await session.forward_backward(batch)
        with pytest.raises(DataError, match="there is no gradient"):
            await session.optim_step()
        assert (await take(session))["updates"] == 1.0


async def test_a_loss_that_would_be_another_one_is_refused(bench: Open, tmp_path: Path) -> None:
    algorithm = LightningRL("grpo", group_size=4, correction=Correction("tis"))
    async with bench(tmp_path / "run", algorithm=algorithm, own_loop=True) as made, Session(made.loop) as session:
        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch)
        await session.optim_step()
        with pytest.raises(ConfigError, match=r"'tis' .* not kept over several updates"):
            await session.forward_backward(batch)
        await session.publish()


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
        found = await all_rollouts(made.store, "run", split="train", step=1)
        assert {rollout.status for rollout in found} == {Status.FAILED}


async def test_held_out_tasks_are_evaluated_when_asked(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        before = await session.evaluate()
        await take(session)
        after = await session.evaluate()
        assert before is not None
        assert after is not None
        assert (before.step, after.step, after.rollouts) == (0, 1, 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "ppo"}, r"the head 'critic' is trained by Trainer.fit"),
        ({"config": {"trainer.order": "learnable"}}, "your own loop chooses its tasks"),
        ({"config": {"engine.epochs": 2}}, "your own loop chooses its tasks"),
        ({"config": {"trainer.keep": "best"}}, "held-out"),
        ({"recorded": "somewhere"}, "a loop of your own samples rollouts"),
    ],
)
async def test_what_belongs_to_fit_is_refused_before_anything_is_opened(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = with_settings(Config(), settings.pop("config", {}))
    trainer = lightning.Trainer(tmp_path, out=tmp_path / "run", config=config, **settings)
    with pytest.raises(ConfigError, match=said):
        async with trainer.session(lambda task, llm: 1.0):
            pass
    assert not (tmp_path / "run").exists()
