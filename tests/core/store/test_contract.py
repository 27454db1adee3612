"""What `lightning.store.protocol.Store` promises, for every store."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from lightning.errors import ConflictError, DataError, StaleAttemptError, StoreError
from lightning.plugins import plugins
from lightning.store import Store
from lightning.store.pages import each_step
from lightning.store.protocol import KNOWN_SECONDS, Attempt
from lightning.store.relational import operations as relational_operations
from lightning.store.relational import transaction
from lightning.store.relational.store import RelationalStore
from lightning.store.rollout_state import EXCUSED
from lightning.store.rows import LARGEST_EXTRA
from lightning.types import (
    Caller,
    CallStatus,
    Fault,
    Outcome,
    Rollout,
    Run,
    Status,
    StepRecord,
    StepReward,
    StepState,
    Task,
    ToolEvent,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)

from tests.core.store.backends import everywhere
from tests.servers.stores import is_served

RolloutOf = Callable[..., Rollout]
CallOf = Callable[..., Transition]
INFRASTRUCTURE = Outcome(fault=Fault.INFRASTRUCTURE, error="node gone")


@pytest.fixture
async def leased(store: Store, rollout: RolloutOf) -> Store:
    """A store whose rollout `a` runs its attempt 1 at worker `w`."""
    await store.create_rollouts([rollout()])
    assert [lease.attempt for lease in await store.lease("run", "w")] == [1]
    return store


# life -----------------------------------------------------------------------------------------------------------


async def test_open_and_close_are_idempotent(make_store: Callable[[], Store]) -> None:
    store = make_store()
    await asyncio.gather(store.open(), store.open())
    await store.put_state("run", "k", 1)
    await store.open()
    assert await store.get_state("run", "k") == 1
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="not open"):
        await store.get_state("run", "k")
    await store.open()
    await store.list_runs()
    await store.close()


async def test_use_before_open_says_so(make_store: Callable[[], Store]) -> None:
    with pytest.raises(StoreError, match="not open"):
        await make_store().list_runs()


async def test_close_waits_for_what_is_queued(make_store: Callable[[], Store], rollout: RolloutOf) -> None:
    store = make_store()
    await store.open()
    writes = [asyncio.ensure_future(store.create_rollouts([rollout(str(i))])) for i in range(50)]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*writes) == [1] * 50


@everywhere
async def test_any_loop_of_any_thread_may_await(store: Store, rollout: RolloutOf) -> None:
    def elsewhere(name: str) -> None:
        created.append(asyncio.run(store.create_rollouts([rollout(name)])))

    created: list[int] = []
    threads = [threading.Thread(target=elsewhere, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join() for thread in threads])
    assert created == [1] * 4
    assert len((await store.list_rollouts("run")).items) == 4


async def test_a_caller_that_gives_up_disturbs_nobody(store: Store, rollout: RolloutOf) -> None:
    tasks = [asyncio.ensure_future(store.create_rollouts([rollout(str(i))])) for i in range(40)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    stored = {r.id for r in (await store.list_rollouts("run")).items}
    assert {str(i) for i in range(1, 40, 2)} <= stored


# runs -----------------------------------------------------------------------------------------------------------


@everywhere
async def test_a_run_is_created_once(store: Store) -> None:
    first = await store.put_run(Run("r1", "one", {"model": "m", "nested": {"lr": 1e-6, "tags": ["a", None]}}))
    assert first.created_at > 1e9
    again = await store.put_run(Run("r1", "other name", {"model": "other"}))
    assert again == first == await store.get_run("r1")
    assert await store.get_run("nobody") is None


async def test_runs_are_listed_newest_first(store: Store) -> None:
    await store.put_run(Run("old", "old", created_at=1.0))
    await store.put_run(Run("new", "new", created_at=4e9))
    assert [run.id for run in await store.list_runs()] == ["new", "run", "old"]


@everywhere
async def test_runs_are_listed_in_pages(store: Store) -> None:
    for number in range(7):
        await store.put_run(
            Run(f"r{number}", "one", created_at=float(number // 3 + 1), project="odd" if number % 2 else "even")
        )
    whole = [run.id for run in await store.list_runs()]
    assert whole == ["run", "r6", "r5", "r4", "r3", "r2", "r1", "r0"]
    assert [run.id for run in await store.list_runs("even")] == ["r6", "r4", "r2", "r0"]
    for limit in (1, 3, 8, 9):
        seen: list[str] = []
        while page := await store.list_runs(after=seen[-1] if seen else "", limit=limit):
            assert len(page) <= limit
            seen += [run.id for run in page]
        assert seen == whole
    assert [run.id for run in await store.list_runs("even", after="r4", limit=1)] == ["r2"]
    assert [run.id for run in await store.list_runs("even", after="r4")] == ["r2", "r0"]
    assert await store.list_runs("even", after="r0", limit=1) == []


@everywhere
async def test_runs_are_listed_without_their_configurations(store: Store) -> None:
    for number in range(3):
        await store.put_run(Run(f"r{number}", "one", {"tasks": ["a", "b"]}, created_at=number + 1.0, project="theirs"))
    whole = await store.list_runs("theirs", after="r2")
    assert [dict(run.config) for run in whole] == [{"tasks": ["a", "b"]}] * 2
    assert await store.list_runs("theirs", after="r2", brief=True) == [replace(run, config={}) for run in whole]
    assert [run.id for run in await store.list_runs(limit=2, brief=True)] == ["run", "r2"]


@everywhere
async def test_runs_behind_none_of_them_are_refused(store: Store) -> None:
    await store.put_run(Run("theirs", "one", project="theirs"))
    for project, after in ((None, "nobody"), ("ours", "theirs"), ("theirs", "run")):
        with pytest.raises(DataError, match="is not a cursor"):
            await store.list_runs(project, after=after)
    with pytest.raises(DataError, match="limit=0"):
        await store.list_runs(limit=0)


# creating and listing rollouts ----------------------------------------------------------------------------------


@everywhere
async def test_a_rollout_is_created_once(store: Store, rollout: RolloutOf) -> None:
    given = rollout("a", task=Task({"q": "π \ud800 \0"}, expected=[1.5, None], metadata={"k": "v"}), step=3, index=2)
    assert await store.create_rollouts([given, rollout("b"), rollout("a")]) == 2
    assert await store.create_rollouts([replace(given, step=9), rollout("c")]) == 1
    assert await store.create_rollouts([]) == 0
    assert await store.get_rollout("a") == given
    assert await store.get_rollout("nobody") is None


@pytest.mark.parametrize(
    "changes", [{"status": Status.RUNNING}, {"attempt": 1}, {"reward": 1.0}, {"max_attempts": 0}], ids=str
)
async def test_only_new_rollouts_are_created(store: Store, rollout: RolloutOf, changes: dict[str, object]) -> None:
    with pytest.raises(DataError, match="'bad'"):
        await store.create_rollouts([rollout("good"), rollout("bad", **changes)])
    assert await store.get_rollout("good") is None


async def test_a_task_that_is_not_json_is_named(store: Store, rollout: RolloutOf) -> None:
    graph: dict[str, object] = {}
    task = Task(graph, id="odd")  # type: ignore[arg-type]
    graph["state"] = object()  # changed after it was checked
    with pytest.raises(DataError, match="task 'odd' is not JSON"):
        await store.create_rollouts([rollout("a", task=task)])


async def test_pages_run_through_everything_in_creation_order(store: Store, rollout: RolloutOf) -> None:
    names = [f"r{i}" for i in (5, 3, 9, 1, 7, 2, 8)]
    await store.create_rollouts([rollout(name) for name in names])
    await store.create_rollouts([rollout("elsewhere", run="other")])
    seen, cursor, pages = [], "", 0
    while True:
        page = await store.list_rollouts("run", cursor=cursor, limit=3)
        seen += [r.id for r in page.items]
        pages += 1
        cursor = page.cursor
        if not cursor:
            break
    assert seen == names
    assert pages == 3


@everywhere
async def test_lists_are_filtered(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts(
        [rollout("t0", step=0), rollout("t1", step=1), rollout("v1", step=1, split="val"), rollout("t2", step=1)]
    )
    await store.lease("run", "w", limit=2)

    async def ids(**filters: object) -> list[str]:
        return [r.id for r in (await store.list_rollouts("run", **filters)).items]  # type: ignore[arg-type]

    assert await ids(step=1) == ["t1", "v1", "t2"]
    assert await ids(split="val") == ["v1"]
    assert await ids(status=Status.RUNNING) == ["t0", "t1"]
    assert await ids(split="train", step=1, status=Status.PENDING) == ["t2"]
    assert await ids(step=7) == []


async def test_bad_pages_are_refused(store: Store) -> None:
    with pytest.raises(DataError, match="cursor"):
        await store.list_rollouts("run", cursor="x")
    with pytest.raises(DataError, match="limit"):
        await store.list_rollouts("run", limit=0)


# leases ---------------------------------------------------------------------------------------------------------


@everywhere
async def test_leases_come_in_creation_order_and_once(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout(name) for name in "cab"])
    first = await store.lease("run", "w1", limit=2, ttl=60)
    second = await store.lease("run", "w2", limit=5, ttl=60)
    assert [(x.rollout.id, x.worker, x.attempt) for x in first + second] == [
        ("c", "w1", 1),
        ("a", "w1", 1),
        ("b", "w2", 1),
    ]
    assert await store.lease("run", "w3", limit=5) == []
    assert await store.lease("other", "w3") == []
    stored = await store.get_rollout("c")
    assert stored == first[0].rollout
    assert stored is not None
    assert stored.status is Status.RUNNING


async def test_lease_times_are_the_databases(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout()])
    (lease,) = await store.lease("run", "w", ttl=100)
    longer = await store.renew(lease, ttl=1000)
    assert 800 < longer.expires_at - lease.expires_at < 1000
    assert replace(longer, expires_at=lease.expires_at) == lease


@everywhere
async def test_an_expired_lease_is_taken_over_and_its_holder_fenced(
    store: Store, rollout: RolloutOf, call: CallOf
) -> None:
    await store.create_rollouts([rollout(max_attempts=2)])
    (lost,) = await store.lease("run", "w1", ttl=0)
    await store.append([call(0)])  # nobody has taken over yet
    (taken,) = await store.lease("run", "w2", ttl=60)
    assert taken.attempt == 2
    for late in (
        store.renew(lost),
        store.complete("a", 1, Outcome(reward=1.0)),
        store.append([call(1)]),
    ):
        with pytest.raises(StaleAttemptError, match="attempt 2 has taken its place"):
            await late
    assert await store.append([call(0, attempt=2)]) == 1
    assert (await store.complete("a", 2, Outcome(reward=0.5))).reward == 0.5


async def test_an_expired_lease_can_be_renewed_until_it_is_taken(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout()])
    (lease,) = await store.lease("run", "w1", ttl=0)
    await store.renew(lease, ttl=60)
    assert await store.lease("run", "w2") == []


async def test_the_last_allowed_attempt_expires_into_failure(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout(max_attempts=1), rollout("b")])
    await store.lease("run", "w1", limit=1, ttl=0)
    assert [x.rollout.id for x in await store.lease("run", "w2", limit=5)] == ["b"]
    failed = await store.get_rollout("a")
    assert failed is not None
    assert (failed.status, failed.fault, failed.reward) == (Status.FAILED, Fault.INFRASTRUCTURE, None)
    assert "'w1'" in failed.error
    with pytest.raises(StaleAttemptError, match="it has ended"):
        await store.complete("a", 1, Outcome(reward=1.0))


async def test_a_lease_of_nothing_ends_what_was_lost_and_takes_nothing(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout(max_attempts=1), rollout("b"), rollout("c")])
    await store.lease("run", "w1", limit=2, ttl=0)
    assert await store.lease("run", "w2", limit=0) == []
    found = {one.id: (one.status, one.attempt) for one in (await store.list_rollouts("run")).items}
    assert found == {"a": (Status.FAILED, 1), "b": (Status.RUNNING, 1), "c": (Status.PENDING, 0)}


@everywhere
async def test_only_the_holder_renews(store: Store, rollout: RolloutOf) -> None:
    await store.create_rollouts([rollout()])
    (lease,) = await store.lease("run", "w1")
    with pytest.raises(StaleAttemptError, match="'w1'"):
        await store.renew(replace(lease, worker="w2"))
    await store.complete("a", 1, Outcome(reward=1.0))
    with pytest.raises(StaleAttemptError, match="ended"):
        await store.renew(lease)
    with pytest.raises(StoreError, match="'nobody' is unknown"):
        await store.renew(replace(lease, rollout=replace(lease.rollout, id="nobody")))


@everywhere
async def test_release_gives_back_without_spending_the_retry(store: Store, rollout: RolloutOf, call: CallOf) -> None:
    await store.create_rollouts([rollout(max_attempts=1), rollout("b"), rollout("c")])
    await store.lease("run", "w1", limit=2)
    await store.lease("run", "w2")
    assert await store.release("w1") == 2
    assert await store.release("w1") == 0
    for late in (store.append([call(0)]), store.complete("a", 1, Outcome(reward=1.0))):
        with pytest.raises(StaleAttemptError):
            await late
    again = await store.lease("run", "w3", limit=5)
    assert [(x.rollout.id, x.attempt) for x in again] == [("a", 2), ("b", 2)]
    assert (await store.complete("a", 2, INFRASTRUCTURE)).status is Status.FAILED


@pytest.mark.parametrize("expires", [False, True])
async def test_a_released_attempt_leaves_all_retries(store: Store, rollout: RolloutOf, expires: bool) -> None:
    await store.create_rollouts([rollout(max_attempts=2)])
    await store.lease("run", "w")
    await store.release("w")
    await store.lease("run", "w", ttl=0 if expires else 60)
    if not expires:
        assert (await store.complete("a", 2, INFRASTRUCTURE)).status is Status.PENDING
    assert [lease.attempt for lease in await store.lease("run", "w")] == [3]
    assert (await store.complete("a", 3, INFRASTRUCTURE)).status is Status.FAILED


async def test_an_attempt_that_is_not_to_be_spent_is_given_back_a_few_times(store: Store, rollout: RolloutOf) -> None:
    if is_served(store):
        pytest.skip("the server decides what is spent")
    await store.create_rollouts([rollout(max_attempts=1)])
    for attempt in range(1, EXCUSED + 1):
        await store.lease("run", "w")
        if attempt == 2:
            await store.release("w")  # counts, too
            continue
        pending = await store.complete("a", attempt, INFRASTRUCTURE, spend=False)
        assert (pending.status, pending.fault, pending.error) == (Status.PENDING, Fault.INFRASTRUCTURE, "node gone")
        assert await store.complete("a", attempt, INFRASTRUCTURE, spend=False) == pending
    await store.lease("run", "w")
    assert (await store.complete("a", EXCUSED + 1, INFRASTRUCTURE, spend=False)).status is Status.FAILED


@pytest.mark.parametrize(
    "outcome", [Outcome(reward=1.0), *(Outcome(fault=each) for each in (Fault.AGENT, Fault.TIMEOUT, Fault.CANCELLED))]
)
async def test_only_what_the_infrastructure_lost_is_given_back(leased: Store, outcome: Outcome) -> None:
    ended = await leased.complete("a", 1, outcome, spend=False)
    ends = {None: Status.SUCCEEDED, Fault.CANCELLED: Status.CANCELLED}
    assert ended.status is ends.get(outcome.fault, Status.FAILED)


@pytest.mark.parametrize("asked", [{"ttl": math.nan}, {"ttl": -1.0}, {"limit": -1}, {"worker": ""}], ids=str)
async def test_impossible_leases_are_refused(store: Store, asked: dict[str, object]) -> None:
    with pytest.raises(DataError):
        await store.lease(**{"run": "run", "worker": "w", **asked})  # type: ignore[arg-type]


# outcomes -------------------------------------------------------------------------------------------------------


@everywhere
async def test_a_reward_ends_the_rollout_with_its_events(leased: Store) -> None:
    events = (
        ToolEvent(
            "search", "ok", "c1", {"q": ["\ud800", 1]}, "out\0", "", Caller("a", ("r", "a"), "s", "p", "raw"), 2.5
        ),
        ToolEvent("run", "error", error="boom"),
        ToolEvent("run", "ok", at=1.0, response_id="call-0"),
        ToolEvent("run", "ok", result='{"rows": [1, "\\ud800"]}'),
        ToolEvent("run", "ok", incomplete=True),
    )
    states = (StepState({"board": [1, None, "\ud800"]}, "state", "call-0", 3.0), StepState("a text"))
    steps = (StepReward(0.25, "format", "call-0", 3.0), StepReward(-1.0))
    outcome = Outcome(reward=0.999, rewards={"a": 1, "b": -0.1}, seconds=2.5, tool_events=events, step_rewards=steps)
    outcome = replace(outcome, step_states=states)
    done = await leased.complete("a", 1, outcome)
    assert (done.status, done.reward, dict(done.rewards), done.seconds) == (
        Status.SUCCEEDED,
        0.999,
        {"a": 1.0, "b": -0.1},
        2.5,
    )
    assert done == await leased.get_rollout("a")
    assert list((await leased.attempts_of([("a", None)]))[0].tool_events) == list(events)
    assert list((await leased.attempts_of([("a", 1)]))[0].step_rewards) == list(steps)
    assert (await leased.attempts_of([("a", 1)]))[0].step_states == states
    assert list((await leased.attempts_of([("a", 2)]))[0].tool_events) == []


@everywhere
async def test_repeating_an_outcome_changes_nothing_and_contradicting_it_is_refused(leased: Store) -> None:
    done = await leased.complete("a", 1, Outcome(reward=1.0, seconds=3.0))
    assert await leased.complete("a", 1, Outcome(reward=1, seconds=3)) == done
    for other in (Outcome(reward=0.0, seconds=3.0), Outcome(reward=1.0, seconds=3.0, step_rewards=(StepReward(1.0),))):
        with pytest.raises(StaleAttemptError, match="ended"):
            await leased.complete("a", 1, other)
    assert await leased.get_rollout("a") == done
    assert await leased.lease("run", "w2") == []


@everywhere
async def test_labels_name_the_callers_of_their_calls(leased: Store, rollout: RolloutOf, call: CallOf) -> None:
    await leased.create_rollouts([rollout("b")])
    await leased.lease("run", "w")
    choices = [call(1, id="reply", response=[choice], choice=choice) for choice in (0, 1)]
    calls = [call(0), choices[0], replace(choices[1], seq=2), call(3, status=CallStatus.ABORTED)]
    elsewhere = call(1, rollout="b", id="reply")
    await leased.append([*calls, elsewhere])
    boss, critic = Caller("boss", ("team \ud800", "boss"), "s", "p", "f"), Caller("critic")
    labels = {"reply": boss, "call-3": critic, "nobody's": critic, "\ud800\0": critic}
    await leased.complete("a", 1, Outcome(reward=1.0, labels=labels))
    expected = [
        calls[0],
        replace(calls[1], caller=boss),
        replace(calls[2], caller=boss),
        replace(calls[3], caller=critic),
    ]
    assert await leased.transitions("a") == expected
    assert await leased.transitions("b") == [elsewhere]


@everywhere
async def test_a_reason_that_becomes_known_later_is_put_on_its_call(leased: Store, call: CallOf) -> None:
    """Beside a label and without one; the reason that the call had is replaced."""
    calls = [call(0, untrained="title"), call(1), call(2, rejects={"call-1": "said in passing"}), call(3)]
    await leased.append(calls)
    said = {"call-0": "title, late", "call-1": "rejected", "nobody's": "rejected"}
    await leased.complete("a", 1, Outcome(reward=1.0, labels={"call-1": Caller("x")}, untrained=said))
    marked = [
        replace(calls[0], untrained="title, late"),
        replace(calls[1], untrained="rejected", caller=Caller("x")),
        *calls[2:],
    ]
    assert await leased.transitions("a") == marked
    assert await leased.append([*calls, *marked]) == 0
    with pytest.raises(ConflictError):
        await leased.append([replace(calls[3], untrained="rejected")])
    with pytest.raises(StaleAttemptError, match="ended"):
        await leased.complete("a", 1, Outcome(reward=1.0, untrained={**said, "call-0": "other"}))


@pytest.mark.parametrize("reason", ["", "  ", "r" * 81, "two\nlines", "\N{SNOWMAN}", 3])
async def test_a_reason_that_no_header_can_carry_is_refused(leased: Store, call: CallOf, reason: str) -> None:
    await leased.append([call(0)])
    told = (
        r"the reason of the call 'call-0' is .*: say in 1 to 80 printable ASCII|3 is not a text"  # a client reads types
    )
    with pytest.raises(DataError, match=told):
        await leased.complete("a", 1, Outcome(reward=1.0, untrained={"call-0": reason}))
    assert await leased.transitions("a") == [call(0)]


async def test_labels_stay_with_their_attempt(store: Store, rollout: RolloutOf, call: CallOf) -> None:
    await store.create_rollouts([rollout(max_attempts=2)])
    for attempt, fault in ((1, Fault.INFRASTRUCTURE), (2, Fault.AGENT)):
        await store.lease("run", "w")
        await store.append([call(0, attempt=attempt)])
        await store.complete("a", attempt, Outcome(fault=fault, labels={"call-0": Caller(f"name {attempt}")}))
    first, second = await store.transitions_of([("a", 1), ("a", 2)])
    assert [(t.attempt, t.caller.agent) for t in first + second] == [(1, "name 1"), (2, "name 2")]


async def test_labels_are_part_of_an_outcome_whatever_their_order(leased: Store, call: CallOf) -> None:
    await leased.append([call(0), call(1)])
    names = {"call-0": Caller("x"), "call-1": Caller("y", ("x", "y"))}
    done = await leased.complete("a", 1, Outcome(reward=1.0, labels=names))
    named = await leased.transitions("a")
    assert await leased.complete("a", 1, Outcome(reward=1.0, labels=dict(reversed(names.items())))) == done
    for other in ({}, {"call-0": Caller("x")}, {**names, "call-0": Caller("z")}, {**names, "nobody's": Caller("x")}):
        with pytest.raises(StaleAttemptError, match="ended"):
            await leased.complete("a", 1, Outcome(reward=1.0, labels=other))
    assert await leased.transitions("a") == named
    assert [t.caller for t in named] == list(names.values())


async def test_a_labelled_call_may_be_appended_again_as_it_was(leased: Store, call: CallOf) -> None:
    """The gateway's answer got lost and it repeats itself after the attempt has ended: still a no-op."""
    await leased.append([call(0), call(1)])
    await leased.complete("a", 1, Outcome(reward=1.0, labels={"call-0": Caller("x")}))
    named = await leased.transitions("a")
    assert await leased.append([call(0), *named, call(1)]) == 0
    assert await leased.transitions("a") == named
    for other in (call(0, temperature=0.5), call(0, id="other"), call(1, caller=Caller("x"))):
        with pytest.raises(ConflictError):
            await leased.append([other])


async def test_a_refused_outcome_labels_nothing(leased: Store, call: CallOf) -> None:
    await leased.append([call(0)])
    for outcome in (Outcome(), Outcome(reward=1.0, labels={"call-0": Caller(object())})):  # type: ignore[arg-type]
        with pytest.raises(DataError):
            await leased.complete("a", 1, replace(outcome, labels={"call-0": Caller("x"), **outcome.labels}))
    with pytest.raises(StaleAttemptError):
        await leased.complete("a", 2, Outcome(reward=1.0, labels={"call-0": Caller("x")}))
    assert await leased.transitions("a") == [call(0)]


@everywhere
async def test_infrastructure_faults_are_retried_then_fail(leased: Store) -> None:
    pending = await leased.complete("a", 1, INFRASTRUCTURE)
    assert (pending.status, pending.fault, pending.error) == (Status.PENDING, Fault.INFRASTRUCTURE, "node gone")
    assert await leased.complete("a", 1, INFRASTRUCTURE) == pending
    (lease,) = await leased.lease("run", "w")
    assert (lease.attempt, lease.rollout.fault, lease.rollout.error) == (2, None, "")
    assert lease.rollout == await leased.get_rollout("a")
    # the answer to the first call was lost, and it is sent once more while attempt 2 runs: a no-op
    assert (await leased.complete("a", 1, INFRASTRUCTURE)).attempt == 2
    failed = await leased.complete("a", 2, INFRASTRUCTURE)
    assert (failed.status, failed.reward) == (Status.FAILED, None)


@pytest.mark.parametrize("fault", [Fault.AGENT, Fault.TIMEOUT])
async def test_the_agents_own_faults_are_final(leased: Store, fault: Fault) -> None:
    failed = await leased.complete("a", 1, Outcome(fault=fault, error="bad \udcff bytes"))
    assert (failed.status, failed.fault, failed.reward) == (Status.FAILED, fault, None)
    assert failed.error == "bad \\udcff bytes"
    assert await leased.lease("run", "w2") == []


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(reward=math.nan),
        Outcome(reward=math.inf),
        Outcome(reward="1"),  # type: ignore[arg-type]
        Outcome(reward=1.0, rewards={"x": -math.inf}),
        Outcome(reward=1.0, step_rewards=(StepReward(math.nan),)),
        Outcome(),
        Outcome(reward=1.0, fault=Fault.AGENT),
    ],
    ids=str,
)
async def test_impossible_outcomes_are_refused(leased: Store, outcome: Outcome) -> None:
    with pytest.raises(DataError):
        await leased.complete("a", 1, outcome)
    running = await leased.get_rollout("a")
    assert running is not None
    assert running.status is Status.RUNNING


async def test_unknown_rollouts_and_future_attempts_are_refused(leased: Store, call: CallOf) -> None:
    with pytest.raises(StoreError, match="'nobody' is unknown"):
        await leased.complete("nobody", 1, Outcome(reward=1.0))
    with pytest.raises(StoreError, match="'nobody' is unknown"):
        await leased.append([call(rollout="nobody")])
    for read in (
        leased.transitions("nobody"),
        leased.transitions_of([("nobody", 1)]),
        leased.attempts_of([("nobody", 1)]),
    ):
        with pytest.raises(StoreError, match="'nobody' is unknown"):
            await read
    with pytest.raises(StaleAttemptError, match="it has not begun"):
        await leased.complete("a", 2, Outcome(reward=1.0))


# transitions ----------------------------------------------------------------------------------------------------


@everywhere
async def test_a_transition_comes_back_exactly(leased: Store, call: CallOf) -> None:
    given = [
        call(0, range(500), range(600, 700)),
        call(
            1,
            [*range(500), *range(600, 700), 1, 2],
            [-5, 2**31 - 1],
            logprobs=logprobs([-math.inf, 0.1]),
            caller=Caller("b", ("x", "b"), "s", "p", "langchain"),
            versions=(VersionRun(0, 3), VersionRun(1, 4)),
            status=CallStatus.ABORTED,
            finish_reason="abort",
            choice=2,
            temperature=0.7,
            constrained=True,
            started_at=1.7e9 + 0.123456,
            ended_at=1.7e9 + 1.5,
            tool_calls=("call_1", "\ud800 \0"),
            extras={"texts": bytes(range(256)), "é masks": b"", "a": b"\0"},
        ),
        call(
            2,
            (),
            (),
            logprobs=logprobs(),
            extras={"texts": b""},
            status=CallStatus.ERROR,
            caller=Caller(""),
        ),
    ]
    assert await leased.append(given) == 3
    found = await leased.transitions("a")
    assert found == given
    assert [(t.prompt_ids.format, t.response_ids.format, t.logprobs.format) for t in found] == [("i", "i", "f")] * 3


TWO = {"masks": bytes(range(256)), "é texts": b""}
"""What two plugins keep side by side."""


@everywhere
async def test_extras_come_back_byte_for_byte_whatever_their_order(
    trained: Store, rollout: RolloutOf, call: CallOf
) -> None:
    """Of a call, of the outcome that ended its attempt, and of the step that trained it."""
    await trained.create_rollouts([rollout("x")])
    await trained.lease("run", "w", limit=2)
    await trained.append([call(0, rollout="x", extras=TWO)])
    ended = Outcome(reward=1.0, extras=TWO)
    await trained.complete("x", 1, ended)
    step = record(rollouts=(("x", 1),), extras=TWO, policy="solver")
    await trained.commit_step(step)
    other_way = dict(reversed(TWO.items()))
    assert await trained.append([call(0, rollout="x", extras=other_way)]) == 0, "the same extras"
    await trained.complete("x", 1, replace(ended, extras=other_way))
    assert [each.extras for each in await trained.transitions("x")] == [TWO]
    assert [each.extras for each in await trained.attempts_of([("x", 1), ("a", 1)])] == [TWO, {}]
    assert await trained.steps("run") == [step]
    assert await trained.last_step("run") == step
    assert [each.extras for each in await trained.steps("run", brief=True)] == [{}]
    with pytest.raises(ConflictError):
        await trained.append([call(0, rollout="x", extras={"masks": TWO["masks"]})])
    with pytest.raises(StaleAttemptError):
        await trained.complete("x", 1, replace(ended, extras={}))


@everywhere
async def test_extras_that_are_too_large_are_refused_by_name_and_nothing_is_kept(trained: Store, call: CallOf) -> None:
    await trained.lease("run", "w")
    large = {"masks": b"\1", "pixels": bytes(10_000_000)}
    why = "plugin 'pixels' gives 10000000 bytes, and a plugin may keep 8912896"
    with pytest.raises(DataError, match=rf"the extras of transition \('p', 1, 1\) are too large: {why}"):
        await trained.append([call(0, rollout="p"), call(1, rollout="p", extras=large)])
    with pytest.raises(DataError, match=f"the extras of the outcome of rollout 'p' are too large: {why}"):
        await trained.complete("p", 1, Outcome(reward=1.0, extras=large))
    kept = await trained.get_rollout("p")
    assert kept is not None
    assert (kept.status, kept.reward) == (Status.RUNNING, None)
    with pytest.raises(DataError, match=f"the extras of step 1 of run 'run' are too large: {why}"):
        await trained.commit_step(record(extras=large))
    assert await trained.steps("run") == []
    assert [each.trained_at_step for each in (await trained.list_rollouts("run")).items] == [None] * 4
    assert await trained.transitions("p") == []
    await trained.commit_step(record())
    assert await trained.append([call(1, rollout="p", extras={"masks": b"\1"})]) == 1
    assert (await trained.complete("p", 1, Outcome(reward=1.0))).status is Status.SUCCEEDED


@everywhere
async def test_the_largest_extras_are_kept(leased: Store, call: CallOf) -> None:
    largest = {"pixels": bytes(range(256)) * (LARGEST_EXTRA // 256)}
    await leased.append([call(0, extras=largest)])
    await leased.complete("a", 1, Outcome(reward=1.0, extras=largest))
    assert (await leased.transitions("a"))[0].extras == largest
    assert (await leased.attempts_of([("a", 1)]))[0].extras == largest


@pytest.mark.parametrize("name", ["", "x" * 65, "é" * 33, "a\nb", "\ud800", "a\0"])
async def test_extras_have_the_name_of_a_plugin(leased: Store, call: CallOf, name: str) -> None:
    with pytest.raises(
        DataError, match=r"\('a', 1, 0\) are of a plugin .*give the plugin's name, printable text of 1 to 64"
    ):
        await leased.append([call(0, extras={name: b""})])


@everywhere
async def test_what_is_appended_is_what_was_given(leased: Store, call: CallOf) -> None:
    """The list is the caller's, who may go on to use it."""
    given = [call(0), call(1)]
    appending = asyncio.create_task(leased.append(given))
    await asyncio.sleep(0)
    given.clear()
    assert await appending == 2


@everywhere
async def test_appending_again_is_a_no_op_and_other_content_a_conflict(leased: Store, call: CallOf) -> None:
    nan = call(0, logprobs=logprobs([math.nan, -1.0]))
    assert await leased.append([nan]) == 1
    assert await leased.append([nan, call(1), call(1)]) == 1
    for other in (
        replace(nan, response_ids=token_ids([4, 6])),
        replace(nan, logprobs=logprobs([math.nan, -1.5])),
        replace(nan, versions=(VersionRun(0, 1),)),
        replace(nan, id="other"),
        replace(nan, caller=Caller("other")),
        replace(nan, tool_calls=("call_1",)),
        replace(nan, versions=(VersionRun(0, 0, "critic"),)),
        replace(nan, extras={"texts": b""}),
    ):
        with pytest.raises(ConflictError, match=r"\('a', 1, 0\)"):
            await leased.append([call(7), other])
    assert [t.seq for t in await leased.transitions("a")] == [0, 1]


@everywhere
@pytest.mark.parametrize("status", [CallStatus.OK, CallStatus.MEDIA])
async def test_a_call_whose_answer_did_not_arrive_is_aborted_from_then_on(
    leased: Store, call: CallOf, status: CallStatus
) -> None:
    """It keeps its place and its tokens, and calls that are told against it are read as before."""
    await leased.append([first := call(0, status=status, extras={"texts": b"x", "masks": b"\0"}), second := call(1)])
    gone = replace(first, status=CallStatus.ABORTED)
    assert await leased.append([gone]) == 0
    assert await leased.append([gone]) == 0, "said twice"
    assert await leased.transitions("a") == [gone, second]
    assert await leased.append([third := call(2)]) == 1
    assert await leased.transitions("a") == [gone, second, third]
    new = call(3, status=CallStatus.ABORTED)
    assert await leased.append([new]) == 1, "the first word of it was lost"
    for other in (first, replace(gone, temperature=0.5), replace(new, status=CallStatus.OK)):
        with pytest.raises(ConflictError):
            await leased.append([other])
    await leased.complete("a", 1, Outcome(reward=1.0))
    with pytest.raises(StaleAttemptError):
        await leased.append([replace(second, status=CallStatus.ABORTED)])
    assert await leased.append([gone]) == 0


@everywhere
async def test_a_labelled_call_whose_answer_did_not_arrive_is_told_too_late(leased: Store, call: CallOf) -> None:
    """As it was appended, and as it is named since: in both the attempt has ended, and the call is no other one."""
    await leased.append([call(0), call(1)])
    await leased.complete("a", 1, Outcome(reward=1.0, labels={"call-0": Caller("x")}))
    named = await leased.transitions("a")
    for late in (call(0), named[0], named[1]):
        with pytest.raises(StaleAttemptError, match="ended"):
            await leased.append([replace(late, status=CallStatus.ABORTED)])
    with pytest.raises(ConflictError):
        await leased.append([replace(named[0], status=CallStatus.ABORTED, temperature=0.5)])
    assert await leased.transitions("a") == named


@everywhere
@pytest.mark.parametrize("known", [False, True], ids=["new", "stored"])
async def test_a_call_may_be_answered_and_aborted_in_one_append(leased: Store, call: CallOf, known: bool) -> None:
    first = call(0)
    gone = replace(first, status=CallStatus.ABORTED)
    if known:
        await leased.append([first])
    assert await leased.append([first, gone, call(1)]) == (1 if known else 2)
    assert await leased.append([first, gone, call(1)]) == 0, "said twice"
    assert await leased.transitions("a") == [gone, call(1)]
    for other in ([gone, first], [first, replace(gone, temperature=0.5)]):
        with pytest.raises(ConflictError):
            await leased.append(other)


async def test_nothing_is_added_to_an_ended_attempt_but_repeats_are_harmless(leased: Store, call: CallOf) -> None:
    await leased.append([call(0)])
    await leased.complete("a", 1, Outcome(reward=1.0))
    assert await leased.append([call(0)]) == 0
    with pytest.raises(StaleAttemptError, match="ended"):
        await leased.append([call(1)])


async def test_nothing_is_added_before_the_first_lease(store: Store, rollout: RolloutOf, call: CallOf) -> None:
    await store.create_rollouts([rollout()])
    for attempt in (0, 1):
        with pytest.raises(StaleAttemptError):
            await store.append([call(0, attempt=attempt)])


async def test_seq_orders_calls_whenever_they_arrive(leased: Store, call: CallOf) -> None:
    assert await leased.next_seq("a", 1) == 0
    turns = [call(i, range(10 * (i + 1))) for i in range(4)]
    for i in (2, 0, 3, 1):
        await leased.append([turns[i]])
    assert await leased.transitions("a") == turns
    assert await leased.next_seq("a", 1) == 4
    assert await leased.next_seq("a", 2) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": math.nan},
        {"started_at": math.inf},
        {"seq": -1},
        {"prompt_ids": [1, 2]},
        {"logprobs": token_ids([1])},
        {"seq": 2**70},
        {"id": "\ud800"},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_impossible_transitions_are_refused(leased: Store, call: CallOf, changes: dict[str, object]) -> None:
    with pytest.raises(DataError):
        await leased.append([replace(call(0), **changes)])  # type: ignore[arg-type]
    assert await leased.append([call(0)]) == 1


async def test_attempts_do_not_mix(store: Store, rollout: RolloutOf, call: CallOf) -> None:
    await store.create_rollouts([rollout(max_attempts=3)])
    await store.lease("run", "w")
    await store.append([call(0, [1, 2]), call(1, [1, 2, 3])])
    await store.complete("a", 1, INFRASTRUCTURE)
    await store.lease("run", "w")
    assert await store.transitions("a") == []
    second = call(0, [1, 2, 9], attempt=2)
    await store.append([second])
    assert await store.transitions("a") == [second]
    assert [len(x) for x in await store.transitions_of([("a", 2), ("a", 1), ("a", 3), ("a", 2)])] == [1, 2, 0, 1]


@everywhere
async def test_groups_and_interleaved_agents_come_back_exactly(store: Store, rollout: RolloutOf, call: CallOf) -> None:
    """Sub-agents take turns, siblings share their prompts, choices of one call share everything: whatever is stored against
    whatever, each call comes back as it was."""
    rollouts = [rollout(f"r{i}", index=i) for i in range(4)]
    await store.create_rollouts(rollouts)
    await store.lease("run", "w", limit=4)
    written: dict[str, list[Transition]] = {}
    for i, name in enumerate(r.id for r in rollouts):
        a, b, calls = list(range(300)), list(range(1000, 1200)), []
        for seq in range(0, 9, 3):
            for offset, context in ((0, a), (1, b), (2, b)):  # the third is another choice of the second's prompt
                answer = [i * 1000 + seq * 10 + offset] * 20
                calls.append(call(seq + offset, list(context), answer, rollout=name))
            a += [*calls[-3].response_ids, 7, 7]
            b += [*calls[-1].response_ids, 8, 8]
        written[name] = calls
    await asyncio.gather(*(store.append([c]) for calls in written.values() for c in calls))
    found = await store.transitions_of([(name, 1) for name in written])
    assert found == list(written.values())


@everywhere
async def test_calls_of_branches_are_read_as_they_were_appended(store: Store, rollout: RolloutOf, call: CallOf) -> None:
    """Of the group of their trunk and of another, at a call that there is and one that there is not, of a trunk nobody has."""
    turns = [call(seq, range(100 * seq + 50)) for seq in range(4)]
    parents = [("a", 1, 2), ("a", 1, 0), ("a", 1, 9), ("a", 2, 2), ("nobody", 1, 2)]
    branches = [
        rollout(f"{group}{at}", group=group, parent=parent)
        for group in ("g", "far")
        for at, parent in enumerate(parents)
    ]
    await store.create_rollouts([rollout(), *branches])
    await store.lease("run", "w", limit=11)
    await store.append(turns)
    made = [[call(seq, turns[seq].prompt_ids, [7, seq], rollout=each.id) for seq in (2, 3)] for each in branches]
    for calls in made:
        assert [await store.append([each]) for each in calls] == [1, 1]
    assert await store.transitions_of([("a", 1), *((each.id, 1) for each in branches)]) == [turns, *made]


# steps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def trained(store: Store, rollout: RolloutOf) -> Store:
    """A store with succeeded rollouts `a` and `b`, failed `f`, and running `p`."""
    await store.create_rollouts([rollout(name) for name in "abfp"])
    await store.lease("run", "w", limit=4)
    await store.complete("a", 1, Outcome(reward=1.0))
    await store.complete("b", 1, Outcome(reward=0.0))
    await store.complete("f", 1, Outcome(fault=Fault.AGENT))
    return store


def record(
    step: int = 1, rollouts: tuple[tuple[str, int], ...] = (("a", 1), ("b", 1)), **changes: object
) -> StepRecord:
    fields: dict[str, object] = {
        "run": "run",
        "step": step,
        "policy_version": step,
        "rollouts": rollouts,
        "digests": ("d1", "d2"),
        "digest": f"digest-{step}",
        "checkpoint": "ckpt",
        "metrics": {"loss": 0.5},
        "at": 5.0,
        "context": {"epoch": 1, "versions": {"torch": "2"}, "base": "é"},
        **changes,
    }
    return StepRecord(**fields)  # type: ignore[arg-type]


@everywhere
async def test_a_step_may_train_what_the_policy_itself_failed(trained: Store, rollout: RolloutOf) -> None:
    await trained.create_rollouts([rollout("x")])
    await trained.lease("run", "w")
    await trained.complete("x", 1, Outcome(fault=Fault.POLICY, error="max_turns (...): no end"))
    await trained.commit_step(record(rollouts=(("a", 1), ("x", 1))))
    kept = await trained.get_rollout("x")
    assert kept is not None
    assert (kept.status, kept.reward, kept.fault, kept.trained_at_step) == (Status.FAILED, None, Fault.POLICY, 1)
    with pytest.raises(ConflictError, match="trained it already"):
        await trained.commit_step(record(2, rollouts=(("x", 1),)))


@everywhere
async def test_steps_count_from_1(trained: Store) -> None:
    for step in (0, -1):
        with pytest.raises(
            DataError, match=f"the number of step {step} of run 'run' is {step}: count the steps .*from 1"
        ):
            await trained.commit_step(record(step))
    assert await trained.last_step("run") is None
    marks = [each.trained_at_step for each in (await trained.list_rollouts("run")).items]
    assert marks == [None] * 4


@everywhere
async def test_a_step_is_committed_once_with_its_rollouts(trained: Store) -> None:
    await trained.commit_step(record())
    await trained.commit_step(record())
    assert await trained.steps("run") == [record()]
    marks = [(r.id, r.trained_at_step) for r in (await trained.list_rollouts("run")).items]
    assert marks == [("a", 1), ("b", 1), ("f", None), ("p", None)]
    with pytest.raises(ConflictError, match="step 1"):
        await trained.commit_step(record(digest="other"))


@pytest.mark.parametrize(
    ("rollouts", "error"),
    [
        ((("a", 1), ("f", 1)), StaleAttemptError),
        ((("a", 1), ("p", 1)), StaleAttemptError),
        ((("a", 1), ("b", 2)), StaleAttemptError),
        ((("a", 1), ("a", 1)), ConflictError),
        ((("a", 1), ("b", 1), ("a", 1)), ConflictError),
        ((("a", 1), ("nobody", 1)), StoreError),
    ],
    ids=str,
)
async def test_a_step_with_one_wrong_rollout_changes_nothing(
    trained: Store, rollouts: tuple[tuple[str, int], ...], error: type[StoreError]
) -> None:
    with pytest.raises(error):
        await trained.commit_step(record(rollouts=rollouts))
    assert await trained.steps("run") == []
    untouched = await trained.get_rollout("a")
    assert untouched is not None
    assert untouched.trained_at_step is None


def reusing(step: int, *names: str, limit: int = 1, trained: str = "ab", **changes: object) -> StepRecord:
    """A record of a step that declares what it reuses."""
    context = {"reuse": {"limit": limit, "rollouts": [*names]}}
    return record(step, tuple((name, 1) for name in trained), context=context, **changes)


@everywhere
async def test_a_declared_reuse_enters_as_many_steps_as_its_limit_says(trained: Store) -> None:
    await trained.commit_step(record(1, (("a", 1),)))
    both = reusing(2, "a", digest="digest-1")  # the same rows in another step are another step
    await trained.commit_step(both)
    await trained.commit_step(both)
    assert (await trained.steps("run"))[1] == both
    marks = [(r.id, r.trained_at_step) for r in (await trained.list_rollouts("run")).items]
    assert marks == [("a", 1), ("b", 2), ("f", None), ("p", None)]  # the first step of each
    with pytest.raises(ConflictError, match=r"it was in 2 steps already, and trainer.max_reuse = 1"):
        await trained.commit_step(reusing(3, "a", "b"))
    await trained.commit_step(reusing(3, "b", trained="b"))
    await trained.commit_step(reusing(4, "a", "b", limit=2))
    assert [each.step for each in await trained.steps("run")] == [1, 2, 3, 4]


@everywhere
async def test_a_reuse_that_is_not_so_is_refused_and_changes_nothing(
    trained: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trained.commit_step(record(5, (("a", 1),)))
    wrong = {
        "reuse is declared": record(6),  # not declared
        "no step before has trained it": reusing(6, "a", "b"),  # b was never trained
        "'a': it is declared as reused, and no step before": reusing(5 - 1, "a"),  # before its first step
        "which it does not train": reusing(6, "b", trained="a"),
        "says not which rollouts": record(6, context={"reuse": {"rollouts": ["a"]}}),
        "max_reuse = 0": reusing(6, "a", limit=0, trained="a"),
        "rollout 'a'": reusing(6, "a", trained="aa"),
    }
    monkeypatch.setattr(relational_operations, "IDS_AT_ONCE", 1)  # a bound between the two
    for problem, refused in wrong.items():
        with pytest.raises((ConflictError, DataError), match=problem):
            await trained.commit_step(refused)
    assert [each.step for each in await trained.steps("run")] == [5]
    kept = await trained.get_rollout("b")
    assert kept is not None
    assert kept.trained_at_step is None


@everywhere
async def test_of_two_steps_that_reuse_a_rollout_at_once_one_is_refused(trained: Store) -> None:
    await trained.commit_step(record(1, (("a", 1),)))
    records = [reusing(step, "a", trained="a") for step in (2, 3, 4)]
    ended = await asyncio.gather(*map(trained.commit_step, records), return_exceptions=True)
    assert [type(each) for each in ended if each is not None] == [ConflictError] * 2
    assert len(await trained.steps("run")) == 2


@everywhere
async def test_a_rollout_enters_one_step_only(trained: Store) -> None:
    await trained.commit_step(record(1, (("a", 1),)))
    with pytest.raises(ConflictError, match="step 1 trained it"):
        await trained.commit_step(record(2, (("b", 1), ("a", 1))))
    await trained.commit_step(record(2, (("b", 1),), at=0.0))
    steps = await trained.steps("run")
    assert [step.step for step in steps] == [1, 2]
    assert steps[1].at > 1e9


@everywhere
async def test_steps_are_read_in_pages_in_brief_and_from_the_end(store: Store) -> None:
    assert await store.steps("run") == []
    assert await store.last_step("run") is None
    await store.put_run(Run("run", "a run"))
    whole = [record(number, (), groups=(f"g{number}",), digests=("d",)) for number in range(1, 13)]
    for each in whole:
        await store.commit_step(each)
    assert await store.steps("run", after=4, limit=2) == whole[4:6]
    assert await store.steps("run", after=11, limit=5) == whole[11:]
    assert await store.steps("run", after=12) == []
    assert await store.last_step("run") == whole[11]
    brief = [replace(each, rollouts=(), digests=(), groups=()) for each in whole]
    assert await store.steps("run", brief=True) == brief
    assert [step async for step in each_step(store, "run")] == whole
    with pytest.raises(DataError, match="limit=0"):
        await store.steps("run", limit=0)


@everywhere
async def test_rollouts_are_counted_by_split_and_status(trained: Store, rollout: RolloutOf) -> None:
    await trained.create_rollouts([replace(rollout("held-out"), split="val")])
    counted = {(each.split, each.status): each.rollouts for each in await trained.count_rollouts("run")}
    pages = await trained.list_rollouts("run")
    assert counted == Counter((each.split, each.status) for each in pages.items)
    assert len(counted) == 4
    assert await trained.count_rollouts("nobody's") == []


@everywhere
async def test_many_attempts_are_read_at_once(leased: Store) -> None:
    event, reward = ToolEvent("run", "ok", at=1.0), StepReward(0.25, "format", "call-0", 3.0)
    await leased.complete("a", 1, Outcome(reward=1.0, tool_events=(event,), step_rewards=(reward,)))
    asked = [("a", None), ("a", 7), ("a", 1)] * 300
    told = Attempt("a", 1, (event,), (reward,))
    assert await leased.attempts_of(asked) == [told, Attempt("a", 7), told] * 300
    assert await leased.attempts_of([]) == []


async def test_a_step_of_many_rollouts_is_committed_and_loaded_in_few_calls(store: Store, rollout: RolloutOf) -> None:
    names = [f"r{number:04}" for number in range(900)]
    await store.put_run(Run("run", "a run"))
    await store.create_rollouts([rollout(name) for name in names])
    leases = await store.lease("run", "w", limit=len(names))
    for lease in leases:
        await store.complete(lease.rollout.id, 1, Outcome(reward=1.0))
    await store.commit_step(record(1, tuple((name, 1) for name in names), digests=("d",) * len(names)))
    found = (await store.list_rollouts("run", limit=2000)).items
    assert {each.trained_at_step for each in found} == {1}
    with pytest.raises(ConflictError, match="step 1 trained it"):
        await store.commit_step(record(2, ((names[-1], 1),)))
    assert [each.rollout for each in await store.attempts_of([(name, 1) for name in names])] == names


async def test_a_step_trains_rollouts_of_its_run_only(trained: Store) -> None:
    with pytest.raises(StoreError, match="belongs to run 'run'"):
        await trained.commit_step(record(run="other"))


# metrics and state ----------------------------------------------------------------------------------------------


@everywhere
async def test_metrics_merge_by_step(store: Store) -> None:
    await store.log_metrics("run", 2, {"loss": 1.0, "reward": 0.5})
    await store.log_metrics("run", 1, {"loss": math.nan, "gap": -math.inf})
    await store.log_metrics("run", 2, {"loss": 2.0, "tokens": 10})
    await store.log_metrics("other", 1, {"x": 1.0})
    first, second = await store.metrics("run")
    assert (first.step, second.step) == (1, 2)
    assert math.isnan(first.values["loss"])
    assert first.values["gap"] == -math.inf
    assert second.values == {"loss": 2.0, "reward": 0.5, "tokens": 10.0}
    assert second.at > 1e9


@everywhere
async def test_state_is_replaced(store: Store) -> None:
    assert await store.get_state("run", "cursor") is None
    await store.put_state("run", "cursor", {"k": [1, "x", None]})
    await store.put_state("run", "cursor", "new")
    await store.put_state("other", "cursor", False)
    assert await store.get_state("run", "cursor") == "new"
    assert await store.get_state("other", "cursor") is False
    with pytest.raises(DataError, match="'cursor' is not JSON"):
        await store.put_state("run", "cursor", b"bytes")  # type: ignore[arg-type]


@everywhere
async def test_a_watch_hears_every_change_and_no_lease(store: Store, rollout: Callable[..., Rollout]) -> None:
    async with store.watch("run") as watch:
        assert not await watch.wait(0)
        await store.create_rollouts([rollout("a")])
        assert await watch.wait(30)
        assert not await watch.wait(0)
        (lease,) = await store.lease("run", "w")
        await store.append([])
        assert not await watch.wait(0)
        await store.complete("a", lease.attempt, Outcome(reward=1.0))
        assert await watch.wait(30)
        await store.put_state("run", "key", 1)
        assert await watch.wait(30)
        await store.put_state("another", "key", 1)
        assert not await watch.wait(0)


async def test_a_change_between_the_look_and_the_wait_is_heard_at_once(store: Store) -> None:
    async with store.watch("run") as watch:
        waiting = asyncio.create_task(watch.wait(30))
        await asyncio.sleep(0)
        await store.put_state("run", "key", 1)
        assert await asyncio.wait_for(waiting, 120)


@everywhere
async def test_one_of_several_values_is_kept(store: Store) -> None:
    kept = await asyncio.gather(*(store.keep_state("", "cursor", number) for number in range(8)))
    assert len(set(kept)) == 1
    assert await store.get_state("", "cursor") == kept[0]


async def test_an_id_of_another_run_is_refused_and_nothing_is_created(
    store: Store, rollout: Callable[..., Rollout]
) -> None:
    await store.put_run(Run("other", "other"))
    await store.create_rollouts([rollout("a")])
    with pytest.raises(ConflictError, match="another run"):
        await store.create_rollouts([rollout("b", run="other"), rollout("a", run="other")])
    assert await store.get_rollout("b") is None


@everywhere
async def test_a_call_that_comes_again_under_its_id_is_done_once(store: Store) -> None:
    """Its answer was lost, and somebody else changed the same things before it was sent again."""
    await store.put_state("run", "k", "mine", once="1")
    await store.put_state("run", "k", "newer")
    await store.put_state("run", "k", "mine", once="1")
    assert await store.get_state("run", "k") == "newer"
    await store.put_state("run", "k", "another", once="1")  # with other arguments it is another call
    assert await store.get_state("run", "k") == "another"
    for value in ("mine", "newer", "mine"):
        await store.put_state("run", "k", value, once=None)
        assert await store.get_state("run", "k") == value
    await store.log_metrics("run", 0, {"loss": 2.0}, once="1")
    await store.log_metrics("run", 0, {"loss": 1.0})
    await store.log_metrics("run", 0, {"loss": 2.0}, once="1")
    assert [point.values for point in await store.metrics("run")] == [{"loss": 1.0}]


async def test_an_answer_is_known_for_its_time_and_no_longer(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "FORGOTTEN_AT_ONCE", 0)  # what is old stays in the database, and is not known
    store = plugins().store(store_url)
    assert isinstance(store, RelationalStore)
    await store.open()
    for _ in range(2):
        await store.put_state("run", "k", "mine", once="1")
        assert await store.get_state("run", "k") == "mine"
        await store.put_state("run", "k", "newer", once=None)
        await store.put_state("run", "k", "mine", once="1")
        assert await store.get_state("run", "k") == "newer"
        await store._write(lambda tx: tx.run("UPDATE answers SET until = until - ?", (KNOWN_SECONDS + 1,)))
    await store.close()


@everywhere
async def test_a_lease_that_is_asked_for_again_under_its_id_is_the_same(store: Store, rollout: RolloutOf) -> None:
    """Those of its rollouts that are nobody else's by now; when none is left, others."""
    await store.create_rollouts([rollout(name) for name in "abcd"])
    given = await store.lease("run", "w", limit=2, ttl=100, once="1")
    again = await store.lease("run", "w", limit=2, ttl=100, once="1")
    assert [lease.rollout for lease in again] == [lease.rollout for lease in given]
    assert [lease.rollout.id for lease in again] == ["a", "b"]
    assert all(new.expires_at >= old.expires_at for new, old in zip(again, given, strict=True))
    assert (await store.complete("a", 1, Outcome(reward=1.0))).status is Status.SUCCEEDED
    assert [lease.rollout.id for lease in await store.lease("run", "w", limit=2, ttl=100, once="1")] == ["b"]
    assert [lease.rollout.id for lease in await store.lease("run", "w", limit=1, ttl=100, once="2")] == ["c"]
    assert await store.release("w") == 2
    for _ in range(2):
        found = await store.lease("run", "w", limit=2, ttl=100, once="1")
        assert [(lease.rollout.id, lease.attempt) for lease in found] == [("b", 2), ("c", 2)]


@everywhere
async def test_a_lease_of_nothing_under_an_id_gives_what_was_given_and_changes_nothing(
    store: Store, rollout: RolloutOf
) -> None:
    """So a server that may begin nothing now gives what was leased before the answer was lost."""
    await store.create_rollouts([rollout("a")])
    assert [lease.rollout.id for lease in await store.lease("run", "w", limit=1, ttl=100, once="1")] == ["a"]
    await store.create_rollouts([rollout("b", max_attempts=1), rollout("c")])
    await store.lease("run", "lost", ttl=0)
    for run, worker, ttl, once in (("run", "w", 100, "2"), ("run", "v", 100, "1"), ("run", "w", 99, "1")):
        assert await store.lease(run, worker, limit=0, ttl=ttl, once=once) == []
    for _ in range(2):
        (again,) = await store.lease("run", "w", limit=0, ttl=100, once="1")
        assert (again.rollout.id, again.attempt) == ("a", 1)
    found = {one.id: (one.status, one.attempt) for one in (await store.list_rollouts("run")).items}
    assert found == {"a": (Status.RUNNING, 1), "b": (Status.RUNNING, 1), "c": (Status.PENDING, 0)}


@everywhere
async def test_what_is_released_again_under_an_id_was_leased_before(store: Store, rollout: RolloutOf) -> None:
    """A worker that was started anew under the same name keeps what it has leased since."""
    assert await store.release("w", once="0") == 0
    await store.create_rollouts([rollout(name) for name in "ab"])
    await store.lease("run", "w", limit=2)
    assert await store.release("w", once="1") == 2
    (held,) = await store.lease("run", "w")
    assert await store.release("w", once="1") == 2
    assert await store.release("w", once="0") == 0
    await store.renew(held)


@everywhere
async def test_runs_are_listed_by_project(store: Store) -> None:
    made = await store.put_run(Run("elsewhere", "elsewhere", project="theirs"))
    assert await store.list_runs("theirs") == [made]
    assert {run.id for run in await store.list_runs()} == {"run", "elsewhere"}
