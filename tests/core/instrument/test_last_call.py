"""The last call before now: each thread and task sees its own, without a clock."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from lightning.instrument import ActiveAttempt, activate, component, current_attempt, emit, last_call, reward, tool
from lightning.types import LLM, Caller, ToolEvent

LLM_ = LLM("http://127.0.0.1:1/v1", "key", "policy")


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    with activate(LLM_) as active:
        yield active


def answered(response_id: str, agent: str = "agent") -> None:
    """A call has been answered here, as the tap says it."""
    session = current_attempt()
    assert session is not None
    session.calls.add(response_id, agent)


def rewarded(session: ActiveAttempt) -> dict[str, str]:
    """Which call each reward names."""
    return {given.name: given.response_id for given in session.step_rewards}


def test_a_reward_names_the_last_call_or_the_one_it_was_given(session: ActiveAttempt) -> None:
    reward(1.0, "before")
    answered("a")
    reward(1.0, "after a")
    answered("b")
    reward(1.0, "after b")
    reward(1.0, "told", response_id="a")
    assert rewarded(session) == {"before": "", "after a": "a", "after b": "b", "told": "a"}


def test_a_tool_belongs_to_the_last_call_of_the_agent_that_runs_it(session: ActiveAttempt) -> None:
    answered("a", "writer")
    answered("b", "judge")
    for caller in (Caller("writer"), Caller("judge"), Caller("nobody"), None):
        emit(ToolEvent("search", "ok", caller=caller))
    emit(ToolEvent("search", "ok", caller=Caller("writer"), response_id="told"))
    assert [event.response_id for event in session.tool_events] == ["a", "b", "b", "b", "told"]


async def test_a_tool_that_asks_the_model_itself_runs_for_the_call_before_it(session: ActiveAttempt) -> None:
    @tool
    async def research(text: str) -> str:
        answered("inner")
        return text

    answered("outer")
    await research("x")
    reward(1.0, "after it")
    (event,) = session.tool_events
    assert event.response_id == "outer"
    assert rewarded(session) == {"after it": "inner"}


async def test_tasks_side_by_side_see_their_own_calls_and_those_of_their_own_tasks(session: ActiveAttempt) -> None:
    turn = asyncio.Barrier(3)

    async def branch(name: str) -> None:
        with component(name):
            await turn.wait()
            await asyncio.wait_for(asyncio.create_task(asyncio.to_thread(answered, f"call-{name}")), 10)
            await turn.wait()
            reward(1.0, name)
            await asyncio.to_thread(reward, 1.0, f"{name} in a thread")
            await turn.wait()

    answered("first")
    await asyncio.gather(*map(branch, "abc"))
    assert rewarded(session) == {given: f"call-{name}" for name in "abc" for given in (name, f"{name} in a thread")}
    reward(1.0, "all")
    assert rewarded(session)["all"] in {"call-a", "call-b", "call-c"}, "what it started has called since"


def plain(work: Callable[[str], None]) -> Callable[[str], None]:
    return work


def with_context(work: Callable[[str], None]) -> Callable[[str], None]:
    copied = contextvars.copy_context()
    return lambda name: copied.copy().run(work, name)


@pytest.mark.parametrize("carried", [plain, with_context])
def test_threads_side_by_side_see_their_own_calls(
    carried: Callable[[Callable[[str], None]], Callable[[str], None]], session: ActiveAttempt
) -> None:
    turn = threading.Barrier(3, timeout=30)

    def branch(name: str) -> None:
        answered(f"call-{name}")
        turn.wait()
        reward(1.0, name)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(carried(branch), "abc"))
    assert rewarded(session) == {name: f"call-{name}" for name in "abc"}
    reward(1.0, "all")
    assert rewarded(session)["all"] in {"call-a", "call-b", "call-c"}


async def test_steps_in_tasks_and_contexts_of_their_own_see_the_step_before(session: ActiveAttempt) -> None:
    """As LangGraph runs its nodes: each in a copy of the context that the graph was called in."""

    async def node(response_id: str) -> None:
        answered(response_id)

    async def check(name: str) -> None:
        reward(1.0, name)

    for number in range(2):
        await asyncio.create_task(node(f"task-{number}"))
        await asyncio.create_task(check(f"task {number}"))
        contextvars.copy_context().run(answered, f"copy-{number}")
        contextvars.copy_context().run(reward, 1.0, f"copy {number}")
    assert rewarded(session) == {f"{kind} {number}": f"{kind}-{number}" for number in "01" for kind in ("task", "copy")}


async def test_rollouts_side_by_side_do_not_mix() -> None:
    async def rollout(number: int) -> dict[str, str]:
        with activate(LLM(LLM_.base_url, f"key-{number}", "policy")) as session:
            for turn in range(3):
                await asyncio.sleep(0)
                answered(f"{number} {turn}")
                await asyncio.sleep(0)
                reward(1.0, str(turn))
        return rewarded(session)

    found = await asyncio.gather(*map(rollout, range(8)))
    assert found == [{str(turn): f"{number} {turn}" for turn in range(3)} for number in range(8)]


def test_a_context_that_an_earlier_rollout_has_used_begins_anew() -> None:
    kept = contextvars.copy_context()

    def in_thread(work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=kept.run, args=(work, *args))
        thread.start()
        thread.join()

    for number in range(2):
        with activate(LLM_) as session:
            in_thread(reward, 1.0, "before")
            in_thread(answered, f"call-{number}")
            in_thread(reward, 1.0, "after")
        assert rewarded(session) == {"before": "", "after": f"call-{number}"}


class Pool:
    """Runs calls in a pool's thread, which is given no context."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    async def answered(self, response_id: str, agent: str = "agent") -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, answered, response_id, agent)


def test_the_agent_sees_the_calls_of_threads_without_context() -> None:
    async def agent(session: ActiveAttempt) -> None:
        session.calls.begin()
        answered("plan")
        await Pool().answered("draft")
        reward(1.0, "after the pool's")
        tool(name="grade")(lambda: None)()
        await asyncio.create_task(said("a task"))
        answered("review")
        reward(1.0, "after its own")
        await asyncio.create_task(said("a task after its own"))

    async def said(name: str) -> None:
        reward(1.0, name)

    with activate(LLM_) as session:
        asyncio.run(agent(session))
    named = {"after the pool's": "draft", "a task": "", "after its own": "review", "a task after its own": "review"}
    assert rewarded(session) == named
    assert [event.response_id for event in session.tool_events] == ["draft"]


def test_a_branch_takes_no_call_for_its_own_that_may_be_anybodys() -> None:
    async def agent(session: ActiveAttempt) -> None:
        session.calls.begin()
        turn = asyncio.Barrier(3)
        await asyncio.gather(*(branch(name, turn) for name in "abc"))
        reward(1.0, "all")

    async def branch(name: str, turn: asyncio.Barrier) -> None:
        with component(name):
            pool = Pool()
            await turn.wait()
            answered(f"plan-{name}", name)
            reward(1.0, f"{name} planned")
            await turn.wait()
            await pool.answered(f"draft-{name}")
            await turn.wait()
            reward(1.0, f"{name} drafted")
            grade()
            await asyncio.to_thread(reward, 1.0, f"{name} in a thread")
            await turn.wait()
            answered(f"review-{name}", name)
            await turn.wait()
            reward(1.0, f"{name} reviewed")

    grade = tool(name="grade")(lambda: None)
    with activate(LLM_) as session:
        asyncio.run(agent(session))
    named = rewarded(session)
    assert named.pop("all") in {"review-a", "review-b", "review-c"}
    assert named == {
        f"{name} {when}": response_id
        for name in "abc"
        for when, response_id in [
            ("planned", f"plan-{name}"),
            ("drafted", ""),
            ("in a thread", ""),
            ("reviewed", f"review-{name}"),
        ]
    }
    assert sorted(event.response_id for event in session.tool_events) == ["plan-a", "plan-b", "plan-c"], "of that name"


def test_without_word_where_the_agent_begins_no_stale_call_is_named() -> None:
    async def agent() -> None:
        answered("plan")
        await Pool().answered("draft")
        reward(1.0, "drafted")
        answered("review")
        reward(1.0, "reviewed")

    with activate(LLM_) as session:
        asyncio.run(agent())
    assert rewarded(session) == {"drafted": "", "reviewed": "review"}


async def test_a_chain_of_tasks_stays_short_and_goes_on(session: ActiveAttempt) -> None:
    async def link(left: int) -> None:
        answered(f"call-{left}")
        flow = session.calls.open()
        assert flow.depth == len(list(flow.outwards())) - 1 <= last_call.DEEPEST
        if left:
            await asyncio.create_task(link(left - 1))

    await link(3 * last_call.DEEPEST)
    reward(1.0, "end")
    assert rewarded(session) == {"end": "call-0"}


def test_agents_without_end_do_not_fill_the_memory(session: ActiveAttempt) -> None:
    for number in range(last_call.MOST_AGENTS + 5):
        answered(f"call-{number}", f"agent-{number}")
    assert len(session.calls.open().last) == last_call.MOST_AGENTS
    assert session.calls.last("agent-0") == session.calls.last() == f"call-{last_call.MOST_AGENTS + 4}"
