"""What a loop of one's own keeps with its steps: its state, its rates, its metrics, and the groups of a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.batch.trajectory import Group
from lightning.errors import DataError, StoreError
from lightning.losses.correction import Correction
from lightning.losses.policy_gradient import ClippedPolicyGradient
from lightning.losses.protocol import TokenBatch
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Json, Rollout, StepRecord, Task
from lightning_proof.audit import audit
from lightning_session.kept import LARGEST_STATE, OTHERS, packed, unpacked
from lightning_session.session import Session

Open = Callable[..., AbstractAsyncContextManager[Any]]
TASKS = [Task("one"), Task("two")]
BUFFER = {"own_loop": True, "trainer__max_reuse": 1, "trainer__max_staleness": 3}


async def take(session: Session, groups: Sequence[Group], lr: float | None = None) -> dict[str, float]:
    batch = await session.batch(groups)
    await session.forward_backward(batch)
    await session.optim_step(lr)
    return dict(await session.publish())


@pytest.mark.parametrize("at", ["save:2", "weights:2"])
async def test_state_and_rate_are_those_of_the_last_committed_step(bench: Open, tmp_path: Path, at: str) -> None:
    """Killed before the commit of step 2, or behind it and before vLLM has its weights: the state is that step's or not."""
    folder, committed = tmp_path / "run", 2 if at == "weights:2" else 1
    async with bench(folder, own_loop=True, engine__lr=0.5) as made:

        async def killed() -> None:
            async with Session(made.loop) as session:
                assert session.state is None
                session.state = {"level": 0, "seen": []}
                session.policies["policy"].lr = 0.25
                for step in range(1, 4):
                    session.state["level"] = step
                    session.state["seen"].append(f"ü{step}")
                    made.engine.crash_at = at
                    await take(session, await session.rollout(TASKS))

        with pytest.raises(made.Crash):
            await killed()
    async with bench(folder, own_loop=True, engine__lr=0.5) as made, Session(made.loop) as session:
        assert session.step == committed
        assert session.state == {"level": committed, "seen": ["ü1", "ü2"][:committed]}
        assert session.policies["policy"].lr == 0.25
        session.policies["policy"].lr = None
        session.state = b"\n{}\xff"
        assert (await take(session, await session.rollout(TASKS)))["lr"] == 0.5
    async with bench(folder, own_loop=True, engine__lr=0.5) as made, Session(made.loop) as session:
        assert (session.state, session.policies["policy"].fixed) == (b"\n{}\xff", None)
        assert (await audit(made.store, "run")).ok


def test_what_cannot_be_kept_is_refused_by_its_place(bench: Open, tmp_path: Path) -> None:
    wrong: Any
    for wrong, said in (
        ({"a": [{1}]}, r"session.state is not JSON: its value\['a'\]\[0\] is a set"),
        (math.nan, r"its value is nan, not a finite number"),
        ("x" * LARGEST_STATE, r"session.state has 1048578 bytes, and each step keeps at most 1048576: keep the rest"),
        (bytes(LARGEST_STATE + 1), r"1048577 bytes"),
    ):
        with pytest.raises(DataError, match=said):
            packed(wrong, {})
    record = StepRecord("run", 3, 3, (), (), "", extras={"session": b"{}\n{"})
    with pytest.raises(StoreError, match=r"the session's state of step 3 cannot be read"):
        unpacked(record)
    assert packed(None, {}) == {}
    assert unpacked(None) == (None, {})


async def test_a_state_that_became_unkeepable_is_refused_before_the_commit(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        with pytest.raises(DataError, match="is a Task"):
            session.state = [TASKS[0]]  # type: ignore[list-item]
        state: dict[str, Json] = {}
        session.state = state
        state["when"] = math.inf
        with pytest.raises(DataError, match=r"\['when'\] is inf"):
            await take(session, await session.rollout(TASKS))
        assert session.step == 0
        del state["when"]
        await session.publish()
        assert (session.step, session.state) == (1, {})


async def test_metrics_of_a_loop_stand_in_its_step_and_take_no_name_of_others(bench: Open, tmp_path: Path) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        session.log({"mine/level": 1, "mine/share": 0.25})
        session.log({"mine/level": 2.0})
        metrics = await take(session, await session.rollout(TASKS))
        assert (metrics["mine/level"], metrics["mine/share"]) == (2.0, 0.25)
        (point,) = [one for one in await made.store.metrics("run") if one.step == 1]
        (record,) = await made.store.steps("run")
        assert point.values["mine/level"] == record.metrics["mine/level"] == 2.0
        for name, said in (
            ("level", r"needs a prefix of your own: name it 'mine/level'"),
            ("reward/level", r"begins as metrics of lightning or of a plugin do \(reward/...\): .* 'mine/level'"),
            ("seconds/x", "another prefix"),
            ("server_1/x", "another prefix"),
            ("tokens/x", "another prefix"),
            ("loss/x", "another prefix"),
            ("entropy/x", "another prefix"),
            ("calls_untrained/x", "another prefix"),
            ("/x", "needs a prefix"),
        ):
            with pytest.raises(DataError, match=said):
                session.log({name: 1.0})
        for value in (math.nan, math.inf, True, "1"):
            with pytest.raises(DataError, match=r"'mine/x' is .* no finite number: leave out"):
                session.log({"mine/x": value})  # type: ignore[dict-item]
        assert "mine/level" not in await take(session, await session.rollout(TASKS))


async def test_a_name_that_is_found_to_be_another_s_blocks_no_step(
    bench: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        plain = made.engine.forward_backward

        def with_own(*given: Any) -> Any:
            result = plain(*given)
            return replace(result, metrics={**result.metrics, "mine": 1.0})

        made.engine.forward_backward = with_own
        session.log({"mine/level": 1.0, "ours/level": 2.0})
        metrics = await take(session, await session.rollout(TASKS))
        assert (metrics["mine"], metrics.get("mine/level"), metrics["ours/level"]) == (1.0, None, 2.0)
        assert "the metrics mine/level are left out of the step" in caplog.text
        others = metrics.keys() - {"mine", "ours/level"}
        assert {name.partition("/")[0] for name in others} <= OTHERS, "the first step refuses what later ones do"


def test_a_loop_s_metrics_take_no_name_of_a_loss() -> None:
    some = torch.zeros(2)
    tokens = TokenBatch(
        some, old_logprobs=some, advantages=some, weights=some + 0.5, entropy=some, has_old=some == 0, reference=some
    )
    loss = ClippedPolicyGradient(kl_coefficient=0.1, correction=Correction("tis"))
    assert {"reference_kl", "truncated_share"} <= loss(tokens).metrics.keys() <= OTHERS


async def test_a_step_that_could_not_be_committed_loses_no_metric(bench: Open, tmp_path: Path) -> None:
    """Of the loop's own the next step has those that are logged while a step is committed."""
    async with bench(tmp_path / "run", own_loop=True) as made, Session(made.loop) as session:
        committed, plain = [], made.loop.take

        async def take_and_log(*given: Any) -> Any:
            session.log({"mine/level": 1.0})
            if not committed:
                committed.append(given[1].metrics)
                session._queue.left_out["groups_too_old"] += 1
                raise OSError("the disk is full")
            return await plain(*given)

        made.loop.take = take_and_log
        batch = await session.batch(await session.rollout(TASKS))
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
        session.log({"mine/level": 1.0, "mine/other": 2.0})
        session._queue.left_out.update(groups_too_old=2, groups_asked_again=1)
        with pytest.raises(OSError, match="disk"):
            await session.publish()
        metrics = await session.publish()
        assert (metrics["groups_too_old"], metrics["groups_asked_again"]) == (3.0, 1.0)
        assert metrics["seconds/rollout"] >= committed[0]["seconds/rollout"] > 0.0
        assert (metrics["mine/level"], metrics["mine/other"]) == (1.0, 2.0)
        metrics = await take(session, await session.rollout(TASKS))
        assert (metrics["mine/level"], metrics.get("mine/other")) == (1.0, None)


async def test_a_replay_buffer_is_read_again_after_a_resume(bench: Open, tmp_path: Path) -> None:
    """Its groups are trained again as often as they may be, and no oftener."""
    async with bench(tmp_path / "run", **BUFFER) as made, Session(made.loop) as session:
        groups = await session.rollout(TASKS)
        session.state = [group.id for group in groups]
        used = len((await session.batch(groups)).used)  # rollouts with the advantage 0 are not
        await take(session, groups)
    async with bench(tmp_path / "run", **BUFFER) as made, Session(made.loop) as session:
        assert session.step == 1
        ids = session.state
        assert isinstance(ids, list)
        await take(session, await session.rollout(TASKS))  # the buffer is read after a step
        again = await session.groups(ids)
        assert [group.id for group in again] == ids
        assert await session.groups(ids) == again
        for wrong, said in (
            (["run/1/9"], r"run/1/9 is no group that this run sampled for steps 1 to 3, .*max_staleness = 3"),
            ("run/1/0", "not a list of texts"),
        ):
            with pytest.raises(Exception, match=said):
                await session.groups(wrong)
        new = await session.rollout(TASKS)
        metrics = await take(session, [*new, *again])
        assert metrics["reused"] == used
        with pytest.raises(DataError, match=r"in a step before \(2 in all\), and trainer.max_reuse = 1"):
            await session.batch(again)
    async with bench(tmp_path / "run", **BUFFER) as made, Session(made.loop) as session:
        with pytest.raises(DataError, match=r"in a step before \(2 in all\)"):
            await session.batch(await session.groups(ids))
        report = await audit(made.store, "run")
        assert (report.ok, report.reused) == (True, used)


async def test_what_an_earlier_process_began_is_ended_and_not_run_again(
    bench: Open, answering: Any, tmp_path: Path
) -> None:
    """Not even once, and its groups keep their numbers."""
    ran = []

    async def agent(task: Task, llm: Any) -> float:
        ran.append(task.input)
        reward: float = await answering(task, llm)
        return reward

    left = Rollout("run/1/0/0", "run", Task("old"), "run/1/0", step=1)
    async with bench(tmp_path / "run", agent, own_loop=True) as made:
        await made.store.create_rollouts([left])
        async with Session(made.loop) as session:
            (group,) = await session.rollout(TASKS[:1])
            assert group.id == "run/1~1/0"
        assert ran == ["one"] * 4
        found = await all_rollouts(made.store, "run", split="train", step=1)
        assert {one.id: one.fault for one in found if one.task.input == "old"} == {"run/1/0/0": Fault.CANCELLED}
