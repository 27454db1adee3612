"""The worker loop: leases, heartbeats, verdicts, retries; nothing is lost and nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import lightning
import pytest
from lightning.config import RunnerConfig
from lightning.errors import RunnerError, StaleAttemptError, StoreError
from lightning.gateway.stages import CallStage, Line
from lightning.plugins import plugins
from lightning.plugins.stages import NamedStage, StageError
from lightning.runner.attempt_completion import judge, report
from lightning.runner.inline import InlineRunner
from lightning.runner.lease_loop import work
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Runner
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.store.rollout_state import EXCUSED
from lightning.types import (
    EXPIRED,
    LLM,
    UNSERVED,
    Caller,
    CallStatus,
    Fault,
    Lease,
    Outcome,
    Rollout,
    Run,
    Status,
    StepReward,
    Task,
    ToolEvent,
    Transition,
    logprobs,
    token_ids,
)

RUN = "run-1"


def llm_for(lease: Lease) -> LLM:
    return LLM("http://127.0.0.1:1/v1", f"key-{lease.rollout.id}-{lease.attempt}", "policy")


def call(lease: Lease, seq: int = 0, status: CallStatus = CallStatus.OK) -> Transition:
    rollout = lease.rollout.id
    return Transition(
        rollout, lease.attempt, seq, f"{rollout}-{seq}", token_ids([1]), token_ids([2]), logprobs([-0.5]), status=status
    )


@dataclass
class WithCalls:
    """A runner in front of another: it stores the model calls that a gateway would have stored."""

    inner: Runner
    store: Store
    statuses: Callable[[Lease], list[CallStatus]] = lambda lease: [CallStatus.OK]
    running: int = 0
    most: int = 0
    leases: list[tuple[str, int]] = field(default_factory=list)

    @property
    def concurrency(self) -> int:
        return self.inner.concurrency

    async def start(self) -> None:
        await self.inner.start()

    async def close(self) -> None:
        await self.inner.close()

    async def run(self, lease: Lease, llm: LLM) -> Outcome:
        self.leases.append((lease.rollout.id, lease.attempt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.store.append([call(lease, seq, status) for seq, status in enumerate(self.statuses(lease))])
            return await self.inner.run(lease, llm)
        finally:
            self.running -= 1


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run(RUN, "test"))
    yield store
    await store.close()


def rollouts(count: int, **fields: object) -> list[Rollout]:
    return [Rollout(f"r{index}", RUN, Task(index), "g", index=index, **fields) for index in range(count)]  # type: ignore[arg-type]


async def everything(store: Store) -> dict[str, Rollout]:
    return {rollout.id: rollout for rollout in (await store.list_rollouts(RUN)).items}


CONFIG = RunnerConfig(concurrency=3, timeout=30)


async def test_it_runs_everything_a_few_at_once_and_tells(store: MemoryStore) -> None:
    async def agent(task: Task, llm: LLM) -> dict[str, float]:
        lightning.reward(0.5)
        await asyncio.sleep(0.01)
        return {"reward": float(str(task.input)), "format": 1.0}

    await store.create_rollouts(rollouts(8))
    runner = WithCalls(InlineRunner(agent, CONFIG), store)
    heard: list[Rollout] = []
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG, on_finished=heard.append)
    await runner.close()
    found = await everything(store)
    assert {name: rollout.reward for name, rollout in found.items()} == {
        f"r{index}": float(index) for index in range(8)
    }
    assert found["r3"].rewards == {"reward": 3.0, "format": 1.0}
    assert [step.value for step in list((await store.attempts_of([("r3", None)]))[0].step_rewards)] == [0.5]
    assert runner.most == 3
    assert sorted(rollout.id for rollout in heard) == sorted(found)
    assert all(rollout.status is Status.SUCCEEDED for rollout in heard)


async def test_agents_that_fail_are_failed_rollouts_and_the_rest_goes_on(store: MemoryStore) -> None:
    finished: list[Rollout] = []

    def agent(task: Task, llm: LLM) -> object:
        return {0: lambda: 1 / 0, 1: lambda: "1.0", 2: lambda: float("nan")}.get(int(str(task.input)), lambda: 1.0)()

    await store.create_rollouts(rollouts(4))
    runner = WithCalls(InlineRunner(agent, CONFIG), store)
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG, on_finished=finished.append)
    await runner.close()
    found = await everything(store)
    assert [found[f"r{index}"].status for index in range(4)] == [Status.FAILED] * 3 + [Status.SUCCEEDED]
    assert all(found[f"r{index}"].fault is Fault.AGENT and found[f"r{index}"].reward is None for index in range(3))
    assert [found[f"r{index}"].attempt for index in range(3)] == [1, 1, 1], "an agent's fault is not retried"
    assert len(finished) == 4


async def test_an_agent_that_never_calls_the_model_has_failed(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(1))
    runner = WithCalls(InlineRunner(lambda task, llm: 1.0, CONFIG), store, statuses=lambda lease: [])
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG)
    await runner.close()
    (found,) = (await everything(store)).values()
    assert (found.status, found.reward, found.fault) == (Status.FAILED, None, Fault.AGENT)
    assert "never called the model: use llm.base_url and llm.api_key" in found.error


async def test_an_agent_that_failed_because_the_policy_server_did_is_retried(store: MemoryStore) -> None:
    def agent(task: Task, llm: LLM) -> float:
        if llm.api_key.endswith("-1"):
            raise ConnectionError("500 from the gateway")
        return 1.0

    await store.create_rollouts(rollouts(1))
    runner = WithCalls(
        InlineRunner(agent, CONFIG),
        store,
        statuses=lambda lease: [CallStatus.OK, CallStatus.ERROR] if lease.attempt == 1 else [CallStatus.OK],
    )
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG)
    await runner.close()
    (found,) = (await everything(store)).values()
    assert (found.status, found.attempt, found.reward) == (Status.SUCCEEDED, 2, 1.0)


@pytest.mark.parametrize("ends", ["returns", "raises", "hangs"])
async def test_labels_are_stored_however_the_agent_ends_and_unknown_ones_are_logged(
    ends: str, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunnerConfig(concurrency=1, timeout=0.5)

    async def agent(task: Task, llm: LLM) -> float:
        lightning.label("r0-0", agent="writer", path=["boss", "writer"])
        lightning.label("elsewhere", agent="writer")
        if ends == "hangs":
            await asyncio.Event().wait()
        return 1 / (ends == "returns")

    await store.create_rollouts(rollouts(1))
    runner = WithCalls(InlineRunner(agent, config), store, statuses=lambda lease: [CallStatus.OK] * 2)
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=config)
    await runner.close()
    fault = {"returns": None, "raises": Fault.AGENT, "hangs": Fault.TIMEOUT}[ends]
    assert (await everything(store))["r0"].fault is fault
    assert [found.caller for found in await store.transitions("r0")] == [
        Caller("writer", ("boss", "writer")),
        Caller("agent"),
    ]
    (said,) = [record.message for record in caplog.records if "lightning.label()" in record.message]
    assert (
        "rollout r0, attempt 1: lightning.label() named 1 responses that are not recorded, such as 'elsewhere'" in said
    )


@pytest.mark.parametrize(
    ("outcome", "statuses", "fault", "says"),
    [
        (Outcome(reward=1.0), [CallStatus.OK, CallStatus.ERROR], None, ""),
        (Outcome(reward=1.0), [], Fault.AGENT, "never called the model"),
        (Outcome(reward=1.0), [CallStatus.ABORTED], Fault.AGENT, "none of its model calls came to an end"),
        (Outcome(reward=1.0), [CallStatus.ERROR], Fault.INFRASTRUCTURE, "failed at the policy server"),
        (Outcome(reward=-1e20), [CallStatus.OK], Fault.AGENT, "the reward is -1e+20, which cannot be trained on"),
        (
            Outcome(reward=1.0, step_rewards=(StepReward(2e12, "fit"),)),
            [CallStatus.OK],
            Fault.AGENT,
            "reward 'fit' is 2",
        ),
        (Outcome(fault=Fault.AGENT, error="boom"), [CallStatus.OK], Fault.AGENT, "boom"),
        (Outcome(fault=Fault.AGENT, error="boom"), [CallStatus.ERROR], Fault.INFRASTRUCTURE, "then the agent: boom"),
        (Outcome(fault=Fault.TIMEOUT, error="slow"), [CallStatus.ERROR], Fault.INFRASTRUCTURE, "then the agent: slow"),
        (Outcome(fault=Fault.TIMEOUT, error="slow"), [CallStatus.OK, CallStatus.ABORTED], Fault.TIMEOUT, "slow"),
        (Outcome(fault=Fault.TIMEOUT, error="slow"), [], Fault.TIMEOUT, "slow"),
    ],
)
def test_verdicts(outcome: Outcome, statuses: list[CallStatus], fault: Fault | None, says: str) -> None:
    lease = Lease(Rollout("r", RUN, Task(1), "g", attempt=1), "w", 0.0)
    verdict = judge(outcome, [call(lease, seq, status) for seq, status in enumerate(statuses)])
    assert verdict.fault is fault
    assert (verdict.reward is None) == (fault is not None)
    assert says in verdict.error


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(reward=0.0, rewards={"format": 1.0}),
        Outcome(fault=Fault.AGENT, error="Error code: 401"),
        Outcome(fault=Fault.TIMEOUT, error="slow"),
    ],
)
@pytest.mark.parametrize("statuses", [[], [CallStatus.OK]], ids=["never called", "called"])
def test_an_agent_that_outlived_its_key_is_not_at_fault_and_has_no_reward(
    outcome: Outcome, statuses: list[CallStatus]
) -> None:
    lease = Lease(Rollout("r", RUN, Task(1), "g", attempt=1), "w", 0.0)
    calls = [call(lease, seq, status) for seq, status in enumerate(statuses)]
    verdict = judge(outcome, [*calls, replace(call(lease, 9, CallStatus.ERROR), finish_reason=EXPIRED)])
    assert (verdict.fault, verdict.reward, dict(verdict.rewards)) == (Fault.INFRASTRUCTURE, None, {})
    assert "gateway.token_ttl" in verdict.error
    assert verdict.error.endswith(outcome.error)


@pytest.mark.parametrize(
    ("reason", "outcome", "attempts"),
    [
        (UNSERVED, Outcome(fault=Fault.AGENT, error="boom"), EXCUSED + 2),
        (UNSERVED, Outcome(fault=Fault.TIMEOUT, error="slow"), EXCUSED + 2),
        (UNSERVED, Outcome(reward=1.0), EXCUSED + 2),
        (UNSERVED, Outcome(fault=Fault.INFRASTRUCTURE, error="the worker died"), 2),
        (EXPIRED, Outcome(reward=1.0), 2),
        ("", Outcome(fault=Fault.AGENT, error="boom"), 2),
    ],
)
async def test_what_no_policy_server_served_is_not_spent_and_comes_to_an_end(
    store: MemoryStore, reason: str, outcome: Outcome, attempts: int
) -> None:
    await store.create_rollouts(rollouts(1, max_attempts=2))
    for attempt in range(1, attempts + 1):
        (lease,) = await store.lease(RUN, "w")
        await store.append([replace(call(lease, 0, CallStatus.ERROR), finish_reason=reason)])
        found = await report(store, "r0", attempt, outcome)
        assert found == await report(store, "r0", attempt, outcome), "told again"
        assert found.fault is Fault.INFRASTRUCTURE
        assert found.status is (Status.FAILED if attempt == attempts else Status.PENDING)


async def test_an_agent_that_got_over_an_outage_keeps_its_reward(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(1))
    (lease,) = await store.lease(RUN, "w")
    lost = replace(call(lease, 0, CallStatus.ERROR), finish_reason=UNSERVED)
    await store.append([lost, call(lease, 1)])
    assert (await report(store, "r0", 1, Outcome(reward=1.0))).status is Status.SUCCEEDED


async def test_a_reward_that_an_agent_made_of_an_outage_is_none(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(1))
    (lease,) = await store.lease(RUN, "w")
    lost = replace(call(lease, 1, CallStatus.ERROR), finish_reason=UNSERVED)
    await store.append([call(lease), lost])
    found = await report(store, "r0", 1, Outcome(reward=0.0, rewards={"reward": 0.0}))
    assert (found.status, found.reward, found.rewards) == (Status.PENDING, None, {})
    assert found.fault is Fault.INFRASTRUCTURE
    assert "after its last model call had failed because no policy server was there" in found.error
    (again,) = await store.lease(RUN, "w")
    assert again.attempt == 2


class LateStage(CallStage):
    """Knows of a tool that nobody had told of, or fails on a credential."""

    api = 1

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    async def ended(self, rollout: Rollout, outcome: Outcome, calls: Sequence[Transition]) -> Outcome:
        if self._fails:
            raise KeyError("password=secret")
        return replace(outcome, tool_events=(*outcome.tool_events, ToolEvent("search", "ok")))


async def test_a_branch_has_no_reward_where_no_stage_looks_whether_it_branched(store: MemoryStore) -> None:
    await store.create_rollouts([replace(rollouts(1)[0], parent=("parent", 1, 0))])
    (lease,) = await store.lease(RUN, "w")
    await store.append([call(lease)])
    found = await report(store, lease.rollout.id, 1, Outcome(reward=1.0, rewards={"reward": 1.0}))
    assert (found.reward, found.rewards, found.fault) == (None, {}, Fault.INFRASTRUCTURE)
    assert "is a branch, and no stage of this gateway answers the calls of a branch" in found.error


async def test_an_outcome_told_again_after_a_stage_knows_more_is_the_one_that_was_taken(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(1))
    (lease,) = await store.lease(RUN, "w")
    await store.append([call(lease)])
    outcome = Outcome(reward=1.0, seconds=2.0)
    first = await report(store, lease.rollout.id, 1, outcome)
    late = Line([NamedStage("late", LateStage())])
    assert await report(store, lease.rollout.id, 1, outcome, late) == first
    with pytest.raises(StaleAttemptError):
        await report(store, lease.rollout.id, 1, Outcome(reward=0.0, seconds=2.0), late)


async def test_an_attempt_on_whose_outcome_a_stage_fails_is_made_again(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(1, max_attempts=2))
    for attempt in (1, 2):
        (lease,) = await store.lease(RUN, "w")
        await store.append([call(lease)])
        line = Line([NamedStage("late", LateStage(fails=True), plugin="p")])
        found = await report(store, "r0", attempt, Outcome(reward=1.0, seconds=2.0), line)
        assert (found.status, found.reward) == (Status.PENDING if attempt == 1 else Status.FAILED, None)
        assert found.fault is Fault.INFRASTRUCTURE
        assert "the stage 'late' of the plugin 'p' failed on this outcome (ended: KeyError" in found.error
        assert "password=secret" not in found.error


async def test_kill_9_of_a_worker_costs_an_attempt_and_nothing_else(store: MemoryStore, tmp_path: Path) -> None:
    def agent(task: Task, llm: LLM) -> float:
        marker = tmp_path / llm.api_key
        marker.write_text(str(os.getpid()))
        if llm.api_key == "key-r1-1":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    await store.create_rollouts(rollouts(4))
    runner = WithCalls(ProcessRunner(agent, CONFIG), store)
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG)
    await runner.close()
    found = await everything(store)
    assert {name: (rollout.status, rollout.attempt) for name, rollout in found.items()} == {
        "r0": (Status.SUCCEEDED, 1),
        "r1": (Status.SUCCEEDED, 2),
        "r2": (Status.SUCCEEDED, 1),
        "r3": (Status.SUCCEEDED, 1),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["key-r0-1", "key-r1-1", "key-r1-2", "key-r2-1", "key-r3-1"]
    )


async def test_a_stage_that_fails_on_a_lease_costs_that_attempt_alone(store: MemoryStore) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        return 1.0

    def llm_or_failure(lease: Lease) -> LLM:
        if lease.rollout.id == "r1":
            raise StageError("the stage 'mine' failed")
        return llm_for(lease)

    finished: list[Rollout] = []
    await store.create_rollouts(rollouts(3, max_attempts=2))
    runner = WithCalls(InlineRunner(agent, CONFIG), store)
    await runner.start()
    await work(store, runner, RUN, llm_or_failure, worker="w", config=CONFIG, on_finished=finished.append)
    await runner.close()
    found = await everything(store)
    assert [found[name].reward for name in ("r0", "r2")] == [1.0, 1.0]
    failed = found["r1"]
    assert (failed.status, failed.attempt, failed.fault) == (Status.FAILED, 2, Fault.INFRASTRUCTURE)
    assert failed.error == "the stage 'mine' failed"
    assert sorted(rollout.id for rollout in finished) == ["r0", "r1", "r2"]


@pytest.mark.slow
async def test_an_agent_that_always_dies_fails_after_its_attempts(store: MemoryStore) -> None:
    finished: list[Rollout] = []
    await store.create_rollouts(rollouts(1, max_attempts=2))
    runner = WithCalls(ProcessRunner(lambda task, llm: os._exit(7), CONFIG), store)
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG, on_finished=finished.append)
    await runner.close()
    (found,) = (await everything(store)).values()
    assert (found.status, found.attempt, found.fault) == (Status.FAILED, 2, Fault.INFRASTRUCTURE)
    assert "exited with code 7" in found.error
    assert [rollout.id for rollout in finished] == ["r0"]


async def test_long_rollouts_keep_their_lease(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunnerConfig(concurrency=1, timeout=60, lease_ttl=0.3)
    expiries: list[float] = []
    enough = asyncio.Event()
    renew, lease = store.renew, store.lease

    async def counted(lease: Lease, *, ttl: float = 60.0) -> Lease:
        assert ttl == config.lease_ttl
        renewed = await renew(lease, ttl=200 * ttl)  # a busy machine may miss a beat
        expiries.append(renewed.expires_at)
        if len(expiries) == 3:
            enough.set()
        return renewed

    async def agent(task: Task, llm: LLM) -> float:
        await enough.wait()
        return 1.0

    monkeypatch.setattr(store, "renew", counted)
    monkeypatch.setattr(store, "lease", lambda *who, ttl, **how: lease(*who, ttl=200 * ttl, **how))
    await store.create_rollouts(rollouts(1))
    runner = WithCalls(InlineRunner(agent, config), store)
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=config)
    await runner.close()
    assert expiries == sorted(set(expiries)), "each renewal prolongs it"
    assert (await everything(store))["r0"].attempt == 1


async def test_an_agent_whose_lease_was_taken_is_ended(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    config = RunnerConfig(concurrency=1, timeout=30, lease_ttl=0.3)
    began, ended = asyncio.Event(), []

    async def agent(task: Task, llm: LLM) -> float:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return 1.0

    await store.create_rollouts(rollouts(1))
    runner = WithCalls(InlineRunner(agent, config), store)
    await runner.start()
    working = asyncio.create_task(work(store, runner, RUN, llm_for, worker="w", config=config))
    await began.wait()
    assert await store.release("w") == 1
    (stolen,) = await store.lease(RUN, "thief")
    while not ended:
        await asyncio.sleep(0.02)
    assert not working.done(), "the other one may still fail, so this one stays ready"
    await store.append([call(stolen)])
    await store.complete("r0", stolen.attempt, Outcome(reward=0.25))
    await working
    await runner.close()
    assert (await everything(store))["r0"].reward == 0.25
    assert "1 outcomes came too late" in caplog.text


async def test_a_late_outcome_is_counted_not_fatal(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        began.set()
        await go.wait()
        return 1.0

    await store.create_rollouts(rollouts(1))
    runner = WithCalls(InlineRunner(agent, CONFIG), store)
    await runner.start()
    working = asyncio.create_task(work(store, runner, RUN, llm_for, worker="w", config=CONFIG))
    await began.wait()
    await store.release("w")
    (stolen,) = await store.lease(RUN, "thief")
    go.set()
    await asyncio.sleep(0.05)
    await store.append([call(stolen)])
    await store.complete("r0", stolen.attempt, Outcome(reward=0.25))
    await working
    await runner.close()
    assert (await everything(store))["r0"].reward == 0.25
    assert "came too late" in caplog.text


async def test_cancelling_ends_the_agents_and_gives_the_leases_back(store: MemoryStore) -> None:
    ended = []
    began = asyncio.Semaphore(0)

    async def agent(task: Task, llm: LLM) -> float:
        began.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(task.input)
        return 1.0

    await store.create_rollouts(rollouts(5))
    runner = WithCalls(InlineRunner(agent, CONFIG), store)
    await runner.start()
    working = asyncio.create_task(work(store, runner, RUN, llm_for, worker="w", config=CONFIG))
    for _ in range(3):
        await began.acquire()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await runner.close()
    assert sorted(ended) == [0, 1, 2]
    assert {rollout.status for rollout in (await everything(store)).values()} == {Status.PENDING}


async def test_what_it_held_before_a_restart_is_done_again(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(2))
    (left,) = await store.lease(RUN, "w", ttl=1000.0)
    runner = WithCalls(InlineRunner(lambda task, llm: 1.0, CONFIG), store)
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG)
    await runner.close()
    found = await everything(store)
    assert all(rollout.status is Status.SUCCEEDED for rollout in found.values())
    assert found[left.rollout.id].attempt == 2


async def test_an_empty_run_is_done_at_once(store: MemoryStore) -> None:
    runner = InlineRunner(lambda task, llm: 1.0, CONFIG)
    await work(store, runner, RUN, llm_for, worker="w", config=CONFIG)


@pytest.mark.parametrize("where", ["complete", "renew", "lease"])
async def test_errors_of_the_store_propagate_and_end_the_agents(
    where: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunnerConfig(concurrency=2, timeout=30, lease_ttl=0.2 if where == "renew" else 60)
    begun, ended = [], []

    async def agent(task: Task, llm: LLM) -> float:
        begun.append(task.input)
        try:
            await asyncio.sleep(0 if where == "complete" and task.input == 0 else 30)
        finally:
            ended.append(task.input)
        return 1.0

    async def fail(*args: object, **kwargs: object) -> None:
        while where != "lease" and len(begun) < 2:  # or there is nothing to end
            await asyncio.sleep(0.01)
        raise StoreError("the disk is full")

    await store.create_rollouts(rollouts(2))
    runner = WithCalls(InlineRunner(agent, config), store)
    await runner.start()
    monkeypatch.setattr(store, where, fail)
    with pytest.raises(StoreError, match="the disk is full"):
        await work(store, runner, RUN, llm_for, worker="w", config=config)
    await runner.close()
    assert sorted(ended) == ([] if where == "lease" else [0, 1])
    assert runner.running == 0


async def test_leases_that_cannot_be_given_back_do_not_hide_the_first_error(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> LLM:
        raise LookupError("the first error")

    released = 0

    async def release(worker: str) -> int:
        nonlocal released
        released += 1
        if released > 1:
            raise StoreError("the disk is full")
        return 0

    await store.create_rollouts(rollouts(1))
    runner = WithCalls(InlineRunner(lambda task, llm: 1.0, CONFIG), store)
    monkeypatch.setattr(store, "release", release)
    with pytest.raises(LookupError, match="the first error"):
        await work(store, runner, RUN, fail, worker="w", config=CONFIG)
    assert released == 2
    assert "leases were not given back and will expire: the disk is full" in caplog.text


async def test_a_timeout_while_the_policy_server_failed_is_retried(store: MemoryStore) -> None:
    config = RunnerConfig(concurrency=1, timeout=0.2)

    async def agent(task: Task, llm: LLM) -> float:
        if llm.api_key.endswith("-1"):
            await asyncio.Event().wait()
        return 1.0

    await store.create_rollouts(rollouts(1))
    runner = WithCalls(
        InlineRunner(agent, config),
        store,
        statuses=lambda lease: [CallStatus.ERROR if lease.attempt == 1 else CallStatus.OK],
    )
    await runner.start()
    await work(store, runner, RUN, llm_for, worker="w", config=config)
    await runner.close()
    (found,) = (await everything(store)).values()
    assert (found.status, found.attempt, found.reward) == (Status.SUCCEEDED, 2, 1.0)


async def test_no_agent_at_all_is_an_error(store: MemoryStore) -> None:
    await store.create_rollouts(rollouts(1))
    with pytest.raises(RunnerError, match="has not been started"):
        await work(store, InlineRunner(lambda task, llm: 1.0, CONFIG), RUN, llm_for, worker="w", config=CONFIG)
    assert (await everything(store))["r0"].status is Status.PENDING


def test_the_runners_are_found_by_name() -> None:
    from lightning.config import Config

    assert isinstance(plugins().runner("process")(lambda task, llm: 1.0, Config()), ProcessRunner)
    assert isinstance(plugins().runner("inline")(lambda task, llm: 1.0, Config()), InlineRunner)


@dataclass
class Endless:
    """Two rollouts at a time, each pair made when there is room and the one before has begun."""

    store: Store
    made: int = 0
    limit: int = 4
    asked: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ends: str = ""

    def unwanted(self, rollout: Rollout) -> str:
        return "enough of its group had ended" if rollout.id == self.ends else ""

    async def refill(self) -> bool:
        self.asked += 1
        if self.made >= self.limit:
            return False
        made = [Rollout(f"r{self.made + place}", RUN, Task(place), "g") for place in range(2)]
        self.made += 2
        await self.store.create_rollouts(made)
        return True


async def test_a_source_is_asked_when_there_is_room_and_wakes_the_worker(store: MemoryStore) -> None:
    """The worker goes on until it is cancelled; more work is begun at once when the source says that there is some."""
    going = asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        await going.wait()
        return 1.0

    config = RunnerConfig(concurrency=3)
    runner = WithCalls(InlineRunner(agent, config), store)
    await runner.start()
    source, ended = Endless(store), asyncio.Queue[str]()
    working = asyncio.create_task(
        work(
            store,
            runner,
            RUN,
            llm_for,
            worker="w",
            config=config,
            on_finished=lambda rollout: ended.put_nowait(rollout.id),
            source=source,
        )
    )
    async with asyncio.timeout(30):
        while runner.running < 3:
            await asyncio.sleep(0.01)
        assert source.made == 4, "two pairs for three places; the fourth rollout waits"
        assert source.asked == 2, "with a rollout waiting there is no reason to ask"
        going.set()
        assert {await ended.get() for _ in range(4)} == {"r0", "r1", "r2", "r3"}
        source.limit = 6
        source.changed.set()
        assert {await ended.get() for _ in range(2)} == {"r4", "r5"}
        while source.changed.is_set():  # the worker takes it off when it next waits
            await asyncio.sleep(0.01)
    assert not working.done()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await runner.close()


async def test_the_clean_up_of_an_unwanted_attempt_is_not_cut_short(store: MemoryStore) -> None:
    """Whatever news there is meanwhile."""
    cleaning, cleaned, go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await go.wait()
            cleaned.set()
        return 1.0

    config = RunnerConfig(concurrency=2)
    runner = WithCalls(InlineRunner(agent, config), store)
    await runner.start()
    source, ended = Endless(store, limit=2), asyncio.Queue[Rollout]()
    working = asyncio.create_task(
        work(store, runner, RUN, llm_for, worker="w", config=config, on_finished=ended.put_nowait, source=source)
    )
    async with asyncio.timeout(30):
        while len((await store.list_rollouts(RUN, status=Status.RUNNING)).items) < 2:
            await asyncio.sleep(0.01)
        source.ends = "r0"
        source.changed.set()
        await cleaning.wait()
        for _ in range(3):
            source.changed.set()
            await asyncio.sleep(0.01)
        assert not cleaned.is_set()
        go.set()
        assert ((await ended.get()).fault, cleaned.is_set()) == (Fault.CANCELLED, True)
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    await runner.close()


async def test_an_unwanted_rollout_is_ended_before_and_during_its_attempt(store: MemoryStore) -> None:
    """It ends as cancelled, whatever was recorded of it, and is not retried; the others are untouched."""
    begun, going, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def agent(task: Task, llm: LLM) -> float:
        try:
            begun.set()
            await going.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    config = RunnerConfig(concurrency=2)
    runner = WithCalls(InlineRunner(agent, config), store)
    await runner.start()
    source, ended = Endless(store, limit=4, ends="r1"), asyncio.Queue[Rollout]()
    working = asyncio.create_task(
        work(store, runner, RUN, llm_for, worker="w", config=config, on_finished=ended.put_nowait, source=source)
    )
    async with asyncio.timeout(30):
        before = await ended.get()
        assert (before.id, before.fault, before.attempt) == ("r1", Fault.CANCELLED, 1)
        assert before.error == "enough of its group had ended"
        await begun.wait()  # r0 is the first to begin
        source.ends = "r0"
        source.changed.set()
        during = await ended.get()
        assert (during.id, during.fault, during.status) == ("r0", Fault.CANCELLED, Status.CANCELLED)
        assert cancelled.is_set()
        going.set()
        assert {(await ended.get()).reward for _ in range(2)} == {1.0}
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await runner.close()
