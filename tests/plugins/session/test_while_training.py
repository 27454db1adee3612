"""Agents run while the engine trains: what excludes what, whole groups, and nothing half made."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group
from lightning.errors import DataError, RunnerError, UnavailableError
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Rollout, Status, Task
from lightning_proof.audit import audit
from lightning_session.session import Session

Open = Callable[..., AbstractAsyncContextManager[Any]]
OLDER = {"own_loop": True, "trainer__max_staleness": 1}


async def take(session: Session, groups: Sequence[Group]) -> dict[str, float]:
    batch = await session.batch(groups)
    if batch.samples:
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
        return dict(await session.publish())
    return {}


class Gates:
    """An agent that calls the model, waits at the gate of its task, if it has one, and calls it again. Of each two rollouts
    of a task one earns more, so that every group teaches."""

    def __init__(self, answering: Any) -> None:
        self.answering = answering
        self.gates: dict[Any, asyncio.Event] = {}
        self.arrived = asyncio.Event()
        self.begun = self.ended = 0
        self.of_task = Counter[str]()

    async def __call__(self, task: Task, llm: Any) -> float:
        self.begun += 1
        self.of_task[str(task.input)] += 1
        even = self.of_task[str(task.input)] % 2
        try:
            return even + 0.25 * await self.solved(task, llm, self.begun)
        finally:
            self.ended += 1

    async def solved(self, task: Task, llm: Any, number: int) -> float:
        reward: float = await self.answering(task, llm)
        gate = self.gates.get(task.input) or self.gates.get(number)
        if gate is not None:
            self.arrived.set()
            await gate.wait()
            await self.answering(task, llm)
        return reward


@pytest.fixture
def gates(answering: Any) -> Gates:
    return Gates(answering)


async def of_step(made: Any, step: int) -> list[Rollout]:
    return await all_rollouts(made.store, "run", split="train", step=step)


async def test_agents_run_while_the_engine_computes_and_another_batch_is_made(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    """Each waits for the other: in turns this would never end."""
    computing, go = asyncio.Event(), threading.Event()
    loop, gates.gates = asyncio.get_running_loop(), {"slow": asyncio.Event()}

    async with bench(tmp_path / "run", gates, **OLDER) as made, Session(made.loop) as session, asyncio.timeout(60):
        plain = made.engine.forward_backward

        def blocked(*given: Any) -> Any:
            loop.call_soon_threadsafe(computing.set)
            assert go.wait(60)
            return plain(*given)

        made.engine.forward_backward = blocked
        slow = asyncio.create_task(session.rollout([Task("slow")]))
        first, other = await session.rollout([Task("one")]), await session.rollout([Task("two")])
        training = asyncio.create_task(take(session, first))
        await computing.wait()
        gates.gates["slow"].set()
        late = await slow  # while the engine computes
        prepared = await session.batch(other)
        go.set()
        metrics = await training
        assert metrics["overlap_seconds"] > 0
        await session.forward_backward(prepared)  # it was made before the step was published
        await session.optim_step(lr=0.5)
        await session.publish()
        assert session.step == 2
        with pytest.raises(DataError, match=r"older than trainer.max_staleness = 1 steps"):
            await session.batch(late)  # begun for step 1
        assert (await audit(made.store, "run")).ok


async def test_a_publish_during_a_rollout_needs_the_setting_and_versions_say_what_sampled(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    gates.gates = {"slow": asyncio.Event()}
    async with bench(tmp_path / "run", gates, **OLDER) as made, Session(made.loop) as session, asyncio.timeout(60):
        slow = asyncio.create_task(session.rollout([Task("slow")]))
        await gates.arrived.wait()
        await take(session, await session.rollout([Task("one")]))
        gates.gates["slow"].set()
        groups = await slow
        assert {member.rollout.step for group in groups for member in group.trajectories} == {1}
        called = [[call.version for call in member.transitions] for member in groups[0].trajectories]
        assert called == [[0, 0, 1, 1]] * 4
        metrics = await take(session, groups)
        assert (session.step, metrics["staleness_max"]) == (2, 1.0)
        assert (await audit(made.store, "run")).ok


async def test_a_publish_during_a_rollout_is_refused_where_no_token_may_be_older(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    gates.gates = {"slow": asyncio.Event()}
    async with (
        bench(tmp_path / "run", gates, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        batch = await session.batch(await session.rollout([Task("one")]))
        slow = asyncio.create_task(session.rollout([Task("slow")]))
        await gates.arrived.wait()
        await session.forward_backward(batch)
        await session.optim_step(lr=0.5)
        with pytest.raises(
            DataError, match=r"rollouts are under way, and trainer.max_staleness = 0 .* set trainer.max_st"
        ):
            await session.publish()
        gates.gates["slow"].set()
        await slow
        await session.publish()
        assert session.step == 1


async def test_agents_and_engine_take_turns_on_one_gpu(
    bench: Open, gates: Gates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM sleeps while the engine computes. Neither waits for ever for the other."""
    monkeypatch.setattr("lightning_session.sampling.shares_gpu", lambda config: True)
    gates.gates = {"slow": asyncio.Event()}
    async with (
        bench(tmp_path / "run", gates, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        running: list[int] = []
        plain = made.engine.forward_backward

        def looks(*given: Any) -> Any:
            running.append(gates.begun - gates.ended)
            return plain(*given)

        made.engine.forward_backward = looks
        batch = await session.batch(await session.rollout([Task("one")]))
        slow = asyncio.create_task(session.rollout([Task("slow")]))
        await gates.arrived.wait()
        training = asyncio.create_task(session.forward_backward(batch))
        later = asyncio.create_task(session.rollout([Task("later")]))
        await asyncio.sleep(0)
        assert running == []
        gates.gates["slow"].set()
        await asyncio.gather(slow, training, later)
        assert (running, gates.begun) == ([0], 12)
        await session.optim_step(lr=0.5)
        assert (await session.publish())["overlap_seconds"] == 0.0


async def test_the_first_rollouts_that_end_are_a_group_and_the_others_are_cancelled(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    gates.gates = {number: asyncio.Event() for number in (2, 3, 5)}  # these never end by themselves
    async with (
        bench(tmp_path / "run", gates, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        (group,) = await session.rollout([Task("one")], n=6, keep=3)
        assert len(group.trajectories) == 3
        ended = await of_step(made, 1)
        faults = [rollout.fault for rollout in ended]
        assert [rollout.status.ended for rollout in ended] == [True] * len(ended)
        assert faults.count(Fault.CANCELLED) == 3
        assert "3 rollouts of its group had ended" in next(one.error for one in ended if one.fault)
        metrics = await take(session, [group])
        assert (metrics["rollouts"], metrics["failed"]) == (3.0, 0.0)
        assert (await audit(made.store, "run")).ok
        for wrong in (0, 7):
            with pytest.raises(DataError, match=rf"keep = {wrong}: of the n = 6 rollouts of a group 1 to 6"):
                await session.rollout([Task("one")], n=6, keep=wrong)


async def test_groups_come_as_they_complete_and_a_loop_may_be_left(bench: Open, gates: Gates, tmp_path: Path) -> None:
    gates.gates = {"slow": asyncio.Event()}
    asked = 0

    def endless() -> Iterator[Task]:
        nonlocal asked
        while True:
            asked += 1
            yield Task("slow" if asked == 1 else f"quick {asked}")

    async with (
        bench(tmp_path / "run", gates, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        found: list[Group] = []
        async for group in session.stream(endless(), n=2, ahead=3):
            found.append(group)
            if len(found) == 4:
                break
        names = {group.trajectories[0].rollout.task.input for group in found}
        assert len(names - {"slow"}) == 4, "each is another task, and none waited for the slow one"
        assert asked <= 7, "tasks are taken when they can begin"
        await take(session, found)  # at once: what was under way is given up
        assert session.step == 1
        ended = await of_step(made, 1)
        assert {rollout.status for rollout in ended} <= {Status.SUCCEEDED, Status.CANCELLED}
        assert {one.fault for one in ended if one.task.input == "slow"} == {Fault.CANCELLED}
        assert (await audit(made.store, "run")).ok


async def test_what_breaks_in_a_stream_is_raised_where_groups_are_taken(
    bench: Open, answering: Any, tmp_path: Path
) -> None:
    def broken() -> Iterator[str]:
        yield "good"
        raise ValueError("the curriculum has no more")

    async def agent(task: Task, llm: Any) -> float:
        if task.input == "bad":
            raise ValueError("no luck")
        reward: float = await answering(task, llm)
        return reward

    async with (
        bench(tmp_path / "run", agent, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):

        async def inputs(tasks: Any, **named: Any) -> list[Any]:
            return sorted([group.trajectories[0].rollout.task.input async for group in session.stream(tasks, **named)])

        with pytest.raises(ValueError, match="the curriculum has no more"):
            await inputs(broken(), n=2)
        with pytest.raises(RunnerError, match="no luck"):
            await inputs((Task("bad", metadata={"n": n}) for n in range(10**9)), n=2, ahead=2)
        assert await inputs(["b", "a"], n=2) == ["a", "b"]
        with pytest.raises(DataError, match="ahead = 0"):
            session.stream([], ahead=0)


async def test_a_cancelled_call_leaves_nothing_half_made(bench: Open, gates: Gates, tmp_path: Path) -> None:
    """Neither of sampling nor of training."""
    gates.gates = {"slow": asyncio.Event()}
    go = threading.Event()
    async with (
        bench(tmp_path / "run", gates, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        slow = asyncio.create_task(session.rollout([Task("slow"), Task("never begun")], n=8))
        await gates.arrived.wait()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        batch = await session.batch(await session.rollout([Task("one")]))
        plain = made.engine.forward_backward

        def blocked(*given: Any) -> Any:
            assert go.wait(60)
            return plain(*given)

        made.engine.forward_backward = blocked
        computing = asyncio.create_task(session.forward_backward(batch))
        await asyncio.sleep(0)
        computing.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await computing
        await session.optim_step(lr=0.5)  # the gradient is there
        await session.publish()
        ended = await of_step(made, 1)
        assert [one.fault for one in ended if one.task.input == "slow"] == [Fault.CANCELLED] * 8
        assert not any(one.task.input == "never begun" for one in ended)
        assert (await audit(made.store, "run")).ok


async def test_a_call_that_is_under_way_when_the_session_ends_is_an_error(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    gates.gates = {"slow": asyncio.Event()}
    async with bench(tmp_path / "run", gates, **OLDER) as made, asyncio.timeout(60):
        async with Session(made.loop) as session:
            calls = [asyncio.create_task(session.rollout([Task("slow")], n=6)) for _ in range(2)]
            stream = session.stream([Task("slow")])
            await gates.arrived.wait()
        for call in (*calls, asyncio.create_task(session.rollout([Task("one")]))):
            with pytest.raises(RunnerError, match="the session is over"):
                await call
        assert [group async for group in stream] == []
        assert {rollout.fault for rollout in await of_step(made, 1)} == {Fault.CANCELLED}


async def test_a_worker_that_dies_is_an_error_of_every_call(bench: Open, gates: Gates, tmp_path: Path) -> None:
    gates.gates = {"slow": asyncio.Event()}

    async def lives(session: Session, made: Any) -> None:
        async with session:
            calls = [asyncio.create_task(session.rollout([Task("slow")])) for _ in range(2)]
            await gates.arrived.wait()

            async def broken(*given: Any, **named: Any) -> Any:
                raise RunnerError("no process can be started")

            made.store.lease = broken
            gates.gates["slow"].set()
            await asyncio.gather(*calls)

    async with bench(tmp_path / "run", gates, **OLDER, runner__concurrency=5) as made, asyncio.timeout(60):
        with pytest.raises(RunnerError, match="no process can be started"):
            await lives(Session(made.loop), made)


async def test_branches_of_a_group_with_cancelled_rollouts_are_rollouts_of_their_own(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    gates.gates = {number: asyncio.Event() for number in (4, 5, 6)}  # these never end by themselves
    async with (
        bench(tmp_path / "run", gates, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        (group,) = await session.rollout([Task("one")], n=6, keep=3)
        cancelled = {one.id for one in await of_step(made, 1) if one.fault is Fault.CANCELLED}
        grown = await session.branch(group, group.trajectories[0].transitions[-1], n=3)
        branches = {each.rollout.id for each in grown.trajectories if each.rollout.parent is not None}
        assert (len(cancelled), len(branches), len(branches & cancelled)) == (3, 3, 0)
        metrics = await take(session, [grown])
        assert (metrics["rollouts"], metrics["failed"]) == (6.0, 0.0)
        assert (await audit(made.store, "run")).ok


async def test_a_branch_beside_a_rollout_leaves_it_the_news_of_its_end(
    bench: Open, gates: Gates, tmp_path: Path
) -> None:
    """The store knows that a rollout has ended before the worker says so, over a network much sooner."""
    async with bench(tmp_path / "run", gates, own_loop=True) as made, Session(made.loop) as session:
        (group,) = await session.rollout([Task("one")], n=2)
        told, ended, go, plain = made.loop.sampler, asyncio.Event(), asyncio.Event(), made.store.complete

        async def complete(*given: Any, **named: Any) -> Any:
            found = await plain(*given, **named)
            if found.task.input == "two":
                ended.set()
                await go.wait()
            return found

        made.store.complete = complete
        async with asyncio.timeout(30):
            beside = asyncio.create_task(session.rollout([Task("two")], n=1))
            await ended.wait()
            grown = await session.branch(group, group.trajectories[0].transitions[-1], n=1)
            go.set()
            assert (len(grown.trajectories), len(await beside), told.idle) == (3, 1, True)


@pytest.mark.parametrize("call", ["forward_backward", "optim_step"])
async def test_a_batch_on_which_the_engine_computes_keeps_its_groups(
    bench: Open, answering: Any, tmp_path: Path, call: str
) -> None:
    computing, go, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    async with (
        bench(tmp_path / "run", answering, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        groups = await session.rollout([Task("one"), Task("two")])
        plain = getattr(made.engine, call)

        def blocked(*given: Any) -> Any:
            loop.call_soon_threadsafe(computing.set)
            assert go.wait(60)
            return plain(*given)

        setattr(made.engine, call, blocked)
        training = asyncio.create_task(take(session, groups))
        await computing.wait()
        with pytest.raises(DataError, match="is in the batch that this step trains on"):
            await session.branch(groups[0], groups[0].trajectories[0].transitions[-1], n=1)
        go.set()
        await training
        assert session.step == 1


async def test_a_group_of_a_stream_that_was_not_handed_over_comes_again(
    bench: Open, answering: Any, tmp_path: Path
) -> None:
    async with (
        bench(tmp_path / "run", answering, own_loop=True) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        plain, reading = made.store.transitions_of, asyncio.Event()

        async def never(*given: Any) -> Any:
            reading.set()
            await asyncio.Event().wait()

        stream, made.store.transitions_of = session.stream([Task("one"), Task("two")], n=2), never
        waiting = asyncio.ensure_future(anext(stream))
        await reading.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        made.store.transitions_of = plain
        groups = [group async for group in stream]
        assert {group.trajectories[0].rollout.task.input for group in groups} == {"one", "two"}
        assert (await take(session, groups))["rollouts"] == 4.0


@pytest.mark.parametrize(
    ("error", "left"), [(DataError("the record is damaged"), ["two"]), (UnavailableError("no answer"), ["one", "two"])]
)
async def test_a_group_of_a_stream_that_cannot_be_read_is_passed_and_one_that_cannot_be_read_now_comes_again(
    bench: Open, answering: Any, tmp_path: Path, error: Exception, left: list[str]
) -> None:
    async with (
        bench(tmp_path / "run", answering, own_loop=True, runner__concurrency=1) as made,
        Session(made.loop) as session,
        asyncio.timeout(60),
    ):
        plain = made.store.transitions_of

        async def broken(*given: Any) -> Any:
            made.store.transitions_of = plain
            raise error

        stream, made.store.transitions_of = session.stream([Task("one"), Task("two")], n=2), broken
        with pytest.raises(type(error), match=str(error)):
            await anext(stream)
        groups = [group async for group in stream]
        assert [group.trajectories[0].rollout.task.input for group in groups] == left
        assert (await take(session, groups))["rollouts"] == 2.0 * len(left)


@pytest.mark.parametrize("failing", [2, 1])
async def test_a_stream_all_of_whose_agents_fail_ends_also_where_their_groups_become_too_old(
    bench: Open, answering: Any, tmp_path: Path, failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each group all rollouts fail. If one fails, and the other still runs when the group is too old, nobody knows."""
    begun = Counter[str]()

    async def solve(task: Task, llm: Any) -> float:
        begun[str(task.input)] += 1
        if task.input == "good":
            reward = begun["good"] % 2
            return reward + 0.0 * await answering(task, llm)
        if begun[str(task.input)] > failing:
            await asyncio.Event().wait()
        raise ValueError("no such file")

    async with bench(tmp_path / "run", solve, **OLDER) as made, Session(made.loop) as session, asyncio.timeout(60):
        stream = session.stream([Task(name) for name in "abcd"[: 4 // failing]], n=2, ahead=2, again=0)
        steps = list[dict[str, float]]()  # two make the groups too old that began before them
        for number in range(4):
            groups = 2 if number < 2 or failing == 2 else 4
            while sum(one.status is Status.FAILED for one in await all_rollouts(made.store, "run")) < groups * failing:
                await asyncio.sleep(0.01)
            steps.append(await take(session, await session.rollout([Task("good")], n=2)))
        assert session.step == 4
        if failing == 2:
            with pytest.raises(RunnerError, match=r"rollouts of a stream: all 4 failed.*no such file"):
                await anext(stream)
        assert [group async for group in stream] == []
        late = sum(each.get("groups_too_old", 0.0) for each in steps)
        late += session._queue.left_out["groups_too_old"]  # since the last step
        assert late == (0.0 if failing == 2 else 4.0), "what has failed would be left out at any age"
        assert f"rollouts of a group: {failing} of {failing} failed: " in caplog.text


@pytest.mark.parametrize("again", [0, 1])
async def test_the_task_of_a_group_that_became_too_old_is_asked_again_also_after_a_resume(
    bench: Open, answering: Any, tmp_path: Path, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that keeps what it has not trained trains each task once, but for those that are not asked again."""

    async def answered(task: Task, llm: Any) -> float:
        return 0.0 * await answering(task, llm)

    gates, older = Gates(answered), OLDER | {"trainer__max_staleness": 2}
    gates.gates = {"slow": asyncio.Event()}
    names, trained, metrics = ["slow", *"abcdef"], list[Any](), list[dict[str, float]]()

    async def train(session: Session, *, until: int) -> None:
        session.state = session.state or list(names)
        stream = session.stream([Task(name) for name in session.state], n=2, ahead=2, again=again)
        async for group in stream:
            (task,) = {member.rollout.task.input for member in group.trajectories}
            session.state = [name for name in session.state if name != task]
            metrics.append(await take(session, [group]))
            trained.append(task)
            if session.step == until:
                break
            if session.step == 3:
                gates.gates.clear()
                while again and (gates.of_task["slow"] < 4 or gates.begun > gates.ended):
                    await asyncio.sleep(0.01)
        await stream.aclose()

    async def dies() -> None:
        async with bench(tmp_path / "run", gates, **older) as made, Session(made.loop) as session, asyncio.timeout(60):
            await train(session, until=5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await dies()
    async with bench(tmp_path / "run", gates, **older) as made, asyncio.timeout(60):
        async with Session(made.loop) as session:
            assert set(session.state) == {*names} - {*trained}
            await train(session, until=9)
        counted = [sum(each.get(name, 0.0) for each in metrics) for name in ("groups_too_old", "groups_asked_again")]
        assert counted == [1.0, again]
        assert ("its task is asked again (again = 1)" if again else "is not asked once more (again = 0)") in caplog.text
        assert sorted(trained) == sorted(names), "the state had those that were not trained"
        assert ("slow" in trained[:5]) == bool(again)
        first = [one.fault for one in await of_step(made, 1) if one.task.input == "slow"]
        assert first == [Fault.CANCELLED] * 2, "they were ended when they could not be trained any more"
        assert (await audit(made.store, "run")).ok
        async with Session(made.loop) as session:
            with pytest.raises(DataError, match="again = -1: give how often to ask"):
                session.stream([], again=-1)


@pytest.mark.parametrize("seed", range(2))
async def test_any_interleaving_leaves_a_run_that_can_be_proved(
    bench: Open, answering: Any, tmp_path: Path, seed: int
) -> None:
    """Streams, rollouts and cancellations beside a loop that trains. Every rollout is in one step at most, none is left
    unfinished, and every step is derived again from the record."""
    rng = random.Random(seed)

    async def agent(task: Task, llm: Any) -> float:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            raise ValueError("no luck")
        return float(await answering(task, llm)) + rng.randrange(2)

    def tasks(name: str) -> Iterator[Task]:
        number = 0
        while True:
            number += 1
            yield Task(f"{name} {number}")

    async with bench(tmp_path / "run", agent, **OLDER, algorithm=LightningRL("grpo", group_size=3)) as made:
        async with Session(made.loop) as session, asyncio.timeout(120):
            over = asyncio.Event()

            async def disturb(name: str) -> None:
                while not over.is_set():
                    call = asyncio.create_task(session.rollout([*map(Task, (f"{name} a", f"{name} b"))], n=3, keep=2))
                    await asyncio.wait([call], timeout=rng.choice([0.0, 0.02, 10]))
                    call.cancel()
                    await asyncio.gather(call, return_exceptions=True)

            beside = [asyncio.create_task(disturb(f"beside {number}")) for number in range(2)]
            while session.step < 3:
                found = []
                async for group in session.stream(tasks(f"step {session.step}"), keep=rng.choice([None, 2])):
                    found.append(group)
                    if len(found) == 2:
                        break
                await take(session, found)
            over.set()
            await asyncio.gather(*beside)
        every = await all_rollouts(made.store, "run", split="train")
        assert all(rollout.status.ended for rollout in every)
        report = await audit(made.store, "run")
        assert report.ok, report.findings
        assert (report.steps, report.reused) == (3, 0)
