"""A recorded rollout runs again without a model, in each API, and what it does otherwise is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import lightning
import pytest
from lightning.errors import ConfigError
from lightning.instrument import emit
from lightning.plugins import Plugins
from lightning.testing import Reply, ToolCall, rollout
from lightning.types import LLM, Task, ToolEvent
from lightning_branching import recorded_tools
from lightning_branching.recorded import RecordedRollout, recorded_rollout
from lightning_branching.replay import ReplayResult, replay_agent, result_of
from lightning_branching.replay_server import ReplayServer

from tests.plugins.branching.branching import brancher, numbered
from tests.plugins.branching.test_branches import chain

SCRIPT = ("first", "second", "third", "fourth")


def record(agent: Callable[..., Any], script: Sequence[Reply | ToolCall | str] = SCRIPT, **how: Any) -> RecordedRollout:
    found = rollout(agent, Task("a task"), script, adapters=("raw",))
    return recorded_rollout(found.rollout, found.transitions, found.tool_events, found.step_rewards, **how)


def replay(recorded: RecordedRollout, agent: Callable[..., Any], **how: Any) -> ReplayResult:
    return replay_agent(recorded, agent, adapters=("raw",), **how)


def ask(llm: LLM, content: str, **more: Any) -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}], **more}
    reply = httpx.post(
        f"{llm.base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {llm.api_key}"}
    )
    if reply.is_error:
        raise RuntimeError(reply.json()["error"]["message"])
    return str(reply.json()["choices"][0]["message"]["content"])


def two_turns(task: Task, llm: LLM) -> float:
    said = ask(llm, f"Do {task.input}")
    return float(len(ask(llm, f"And then? {said}")))


def test_the_same_agent_is_answered_from_the_record() -> None:
    recorded = record(two_turns)
    result = replay(recorded, two_turns)
    assert result.same, result
    assert (result.calls, result.answered, result.missing) == (2, 2, ())
    assert result.outcome is not None
    assert result.outcome.reward == 6.0
    assert "0 calls of a model" in str(result)


@pytest.mark.parametrize("name", ["adapters", "reroute"])
def test_a_text_in_the_place_of_several_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replay_agent(record(two_turns), two_turns, **{name: "raw"})


def test_a_replay_that_compared_nothing_says_neither_yes_nor_no() -> None:
    result = replay(record(two_turns), two_turns, until=0)
    assert (result.answered, result.same) == (0, None)
    assert str(result).endswith("nothing was compared: no recorded call was asked for")
    partly = replay(record(two_turns), two_turns, until=1)
    assert str(partly).endswith("the replay is the recorded rollout up to call 1; how it ends was not compared")


def test_it_ends_after_the_calls_that_are_asked_for() -> None:
    result = replay(record(two_turns), two_turns, until=1)
    assert result.same
    assert result.stopped
    assert result.answered == 1
    assert result.outcome is not None
    assert "The replay ends after 1 call," in result.outcome.error


def test_a_changed_prompt_is_shown_where_it_differs() -> None:
    def changed(task: Task, llm: LLM) -> float:
        said = ask(llm, f"Do {task.input}")
        return float(len(ask(llm, f"And now? {said}")))

    result = replay(record(two_turns), changed)
    assert not result.same
    (found,) = result.divergences
    assert found.nearest is not None
    assert (found.nearest.number, found.place) == (2, "messages[0].content")
    assert (found.recorded, found.sent) == ("'And then? first'", "'And now? first'")
    assert found.suspect.startswith("Suspect: the agent's code or its prompt has changed")
    assert result.missing == ("two_turns/ask",)
    assert "1 recorded calls were not asked for: two_turns/ask (1)" in str(result)


def test_an_agent_that_stops_early_leaves_calls() -> None:
    def early(task: Task, llm: LLM) -> float:
        return float(len(ask(llm, f"Do {task.input}"))) + 1

    result = replay(record(two_turns), early)
    assert not result.same
    assert result.missing == ("two_turns/ask",)


def test_an_agent_that_asks_once_more_is_told_that_the_record_is_over() -> None:
    def more(task: Task, llm: LLM) -> float:
        reward = two_turns(task, llm)
        ask(llm, "once more")
        return reward

    result = replay(record(two_turns), more)
    (found,) = result.divergences
    assert found.nearest is None
    assert "have been answered already" in str(found)


def test_another_reward_is_a_change() -> None:
    result = replay(record(two_turns), lambda task, llm: two_turns(task, llm) + 1)
    assert not result.same
    assert result.changes == ("the reward is 7 {}, and was 6 {}",)


NOW = [1_790_000_000.0]
ORDERS = [["apple", "pear", "plum"]]
PLANTED = {
    "random": (lambda: f"pick {random.SystemRandom().randrange(10**12)}", "a random number"),
    "uuid": (lambda: f"session {uuid.uuid1()}", "a uuid"),
    "clock": (lambda: f"It is {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(NOW[0]))}", "the clock"),
    "set": (lambda: ", ".join(ORDERS[0]), "the order of a set"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_usual_causes_are_named(name: str) -> None:
    make, said = PLANTED[name]

    def agent(task: Task, llm: LLM) -> float:
        ask(llm, f"Context: {make()}. Answer.")
        return 1.0

    recorded = record(agent)
    NOW[0] += 3.0
    ORDERS[0] = ORDERS[0][::-1]
    (found,) = replay(recorded, agent).divergences
    assert said in found.suspect


async def test_the_order_of_a_set_is_no_race_inside_a_loop_either() -> None:
    async def agent(task: Task, llm: LLM) -> float:
        ask(llm, f"Context: {', '.join(ORDERS[0])}. Answer.")
        return 1.0

    recorded = await asyncio.to_thread(record, agent)
    ORDERS[0] = ORDERS[0][::-1]
    (found,) = replay(recorded, agent).divergences
    assert "the order of a set" in found.suspect


def test_messages_in_another_order_are_named() -> None:
    said = [
        {"role": "user", "content": "one"},
        {"content": "two", "role": "user"},
        {"role": "user", "content": "three"},
    ]

    def agent(task: Task, llm: LLM) -> float:
        ask(llm, "", messages=said)
        return 1.0

    recorded = record(agent)
    said.reverse()
    (found,) = replay(recorded, agent).divergences
    assert "order" in found.suspect


def test_null_is_told_from_nothing() -> None:
    more: dict[str, Any] = {"stop": None}

    def agent(task: Task, llm: LLM) -> float:
        ask(llm, "hi", **more)
        return 1.0

    recorded = record(agent)
    more.clear()
    (found,) = replay(recorded, agent).divergences
    assert (found.place, found.recorded, found.sent) == ("stop", "'null'", "'nothing'")


def test_a_race_is_told_from_the_order_of_a_set() -> None:
    turn = [0.0, 0.15]

    def agent(task: Task, llm: LLM) -> float:
        found: dict[str, str] = {}

        def work(name: str, wait: float) -> None:
            time.sleep(wait)
            found[name] = name

        threads = [threading.Thread(target=work, args=pair) for pair in zip(("left", "right"), turn, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda word: ask(llm, word), ("one", "two")))
        ask(llm, f"Both: {' '.join(found)}")
        return 1.0

    recorded = record(agent, lambda body: Reply("x", delay=0.1))  # type: ignore[arg-type]
    turn.reverse()
    (found,) = replay(recorded, agent).divergences
    assert "a race" in found.suspect


def test_seeded_generators_draw_what_they_drew() -> None:
    def agent(task: Task, llm: LLM) -> float:
        ask(llm, f"{random.random()} {uuid.uuid4()}")
        return 1.0

    found = []
    for seed in (5, 5, 6):
        recorded = record(two_turns)
        result = replay(recorded, agent, seed=seed)
        found.append(result.divergences[0].sent)
    assert found[0] == found[1] != found[2]


def test_parallel_calls_get_their_own_answers() -> None:
    def agent(task: Task, llm: LLM) -> float:
        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(lambda number: ask(llm, f"say {number}"), range(8)))
        assert said == [f"say {number}!" for number in range(8)], said
        return 1.0

    recorded = record(agent, lambda body: Reply(f"{body['messages'][0]['content']}!"))  # type: ignore[arg-type]
    result = replay(recorded, agent)
    assert result.same, result


def test_equal_requests_are_answered_in_their_order() -> None:
    def agent(task: Task, llm: LLM) -> float:
        assert [ask(llm, "again") for _ in range(3)] == ["first", "second", "third"]
        return 1.0

    assert replay(record(agent), agent).same


async def test_it_runs_in_a_loop_too() -> None:
    async def agent(task: Task, llm: LLM) -> float:
        return float(len(await asyncio.to_thread(ask, llm, "hi")))

    recorded = await asyncio.to_thread(record, agent)
    assert replay(recorded, agent).same


ran: list[str] = []


@lightning.tool
def weather(city: str) -> dict[str, object]:
    ran.append(city)
    return {"city": city, "degrees": len(ran)}


@lightning.tool
async def later(city: str) -> str:
    ran.append(city)
    return f"{city} {len(ran)}"


@lightning.tool
def items(count: int) -> Any:
    ran.append("items")
    yield from (f"{len(ran)}/{number}" for number in range(count))


@lightning.tool
def broken() -> None:
    ran.append("broken")
    raise KeyError(f"no {len(ran)}")


async def with_tools(task: Task, llm: LLM) -> float:
    said = [weather("Rome"), weather("Rome"), await later("Paris"), list(items(2))]
    try:
        broken()
    except KeyError as error:
        said.append(str(error))
    return float(len(await asyncio.to_thread(ask, llm, str(said))))


def test_tools_give_what_they_gave_without_running() -> None:
    ran.clear()
    recorded = record(with_tools)
    assert ran == ["Rome", "Rome", "Paris", "items", "broken"]
    result = replay(recorded, with_tools)
    assert len(ran) == 5, "no tool has run"
    assert result.same, result


def test_live_tools_run_and_their_changed_output_is_named() -> None:
    ran.clear()
    recorded = record(with_tools)
    result = replay(recorded, with_tools, recorded_tools=False)
    assert len(ran) == 10
    assert not result.same
    assert len(result.divergences) == 1


def test_the_changed_output_of_a_tool_that_ran_is_a_change() -> None:
    ran.clear()

    def agent(task: Task, llm: LLM) -> float:
        weather("Rome")
        return float(len(ask(llm, "hi")))

    recorded = record(agent)
    result = replay(recorded, agent, recorded_tools=False)
    assert sorted(change.rsplit(" ", 1)[-1] for change in result.changes) == ["now", "recorded"]
    assert all(change.startswith('the tool weather({"city": "Rome"}) gave ok') for change in result.changes)


class OwnError(Exception):
    pass


@lightning.tool
def raises() -> None:
    ran.append("raises")
    raise OwnError("no")


@lightning.tool
async def slow() -> str:
    ran.append("slow")
    await asyncio.sleep(60)
    return "late"


@lightning.tool
def breaks() -> Any:
    ran.append("breaks")
    yield 1
    raise OwnError("in the middle")


async def test_tools_of_other_threads_errors_and_timeouts_are_answered_too() -> None:
    async def agent(task: Task, llm: LLM) -> float:
        with ThreadPoolExecutor(1) as pool:
            said = [str(pool.submit(weather, "Oslo").result())]
        try:
            raises()
        except (OwnError, RuntimeError):
            said.append("failed")
        try:
            await asyncio.wait_for(slow(), 0.2)
        except TimeoutError:
            said.append("late")
        return float(len(await asyncio.to_thread(ask, llm, str(said))))

    ran.clear()
    recorded = await asyncio.to_thread(record, agent)
    assert ran == ["Oslo", "raises", "slow"]
    result = await asyncio.to_thread(replay, recorded, agent)
    assert len(ran) == 3, "no tool has run"
    assert result.same, result


def test_a_tool_that_the_record_does_not_answer_does_not_run_unless_it_may() -> None:
    city = ["Rome"]

    def agent(task: Task, llm: LLM) -> float:
        weather(city[0])
        return float(len(ask(llm, "hi")))

    ran.clear()
    recorded = record(agent)
    city[0] = "Bari"
    result = replay(recorded, agent)
    assert ran == ["Rome"]
    assert not result.same
    assert "the tool weather has no recorded run with the arguments" in str(result)
    assert not replay(recorded, agent, run_unrecorded=True).same
    assert ran == ["Rome", "Bari"]


def test_what_a_stream_gave_before_it_raised_is_not_known() -> None:
    def agent(task: Task, llm: LLM) -> float:
        with contextlib.suppress(OwnError):
            list(breaks())
        return float(len(ask(llm, "hi")))

    ran.clear()
    recorded = record(agent)
    assert "has no recorded run" in str(replay(recorded, agent))
    assert ran == ["breaks"]


def test_changed_rewards_of_calls_are_a_change() -> None:
    value = [0.1]

    def agent(task: Task, llm: LLM) -> float:
        ask(llm, "hi")
        lightning.reward(value[0], name="polite")
        return 1.0

    recorded = record(agent)
    assert replay(recorded, agent).same
    value[0] = 0.9
    assert "the rewards of single calls are [('polite', 0.9)], and were [('polite', 0.1)]" in str(
        replay(recorded, agent)
    )


def test_several_choices_come_again() -> None:
    seen = []

    def agent(task: Task, llm: LLM) -> float:
        body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}], "n": 2}
        headers = {"authorization": f"Bearer {llm.api_key}"}
        seen.append(httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers).json())
        return 1.0

    result = replay(record(agent), agent)
    assert result.same, result
    assert seen[0] == seen[1]
    assert len(seen[0]["choices"]) == 2


def test_a_call_that_failed_fails_again_and_is_tried_again() -> None:
    def agent(task: Task, llm: LLM) -> float:
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                return float(len(ask(llm, "hi")))
        return 0.0

    result = replay(record(agent, [Reply(status=500), Reply("better")]), agent)
    assert result.same, result
    assert result.outcome is not None
    assert result.outcome.reward == 6.0


def test_of_an_earlier_attempt_the_outcome_is_not_compared_and_tools_are() -> None:
    recorded = replace(record(two_turns), has_outcome=False)
    result = replay(recorded, lambda task, llm: two_turns(task, llm) + 1)
    assert result.same
    assert "the outcome of this attempt is not kept" in str(result)

    def with_tool(task: Task, llm: LLM) -> float:
        weather("Rome")
        return two_turns(task, llm)

    ran.clear()
    recorded = replace(record(with_tool), has_outcome=False)
    assert not replay(recorded, with_tool, recorded_tools=False).same


def test_a_call_that_the_agent_broke_off_is_broken_off_again() -> None:
    patience = [0.3]

    def agent(task: Task, llm: LLM) -> float:
        body = {"model": llm.model, "messages": [{"role": "user", "content": "slow"}]}
        headers = {"authorization": f"Bearer {llm.api_key}"}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=patience[0])
        return float(len(ask(llm, "quick")))

    def script(body: dict[str, Any]) -> Reply:
        return Reply("late", delay=5.0) if body["messages"][0]["content"] == "slow" else Reply("soon")

    recorded = record(agent, script)  # type: ignore[arg-type]
    assert [call.exchange.status for call in recorded.calls] == [0, 200]
    assert replay(recorded, agent).same
    patience[0] = 30.0
    result = replay(recorded, agent, longer=0.1)
    assert "the agent broke off call 1 before its end, and does not now" in str(result)


async def test_a_tool_that_was_cancelled_and_is_not_now_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float | None] = [0.2]

    async def agent(task: Task, llm: LLM) -> float:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(slow(), patience[0])
        return float(len(await asyncio.to_thread(ask, llm, "hi")))

    recorded = await asyncio.to_thread(record, agent)
    patience[0] = None
    monkeypatch.setattr(recorded_tools, "PATIENCE", 0.1)
    result = await asyncio.to_thread(replay, recorded, agent)
    assert "the tool slow was cancelled when it was recorded, and is not now" in str(result)


def test_a_frameworks_event_of_a_tool_does_not_answer_it() -> None:
    def agent(task: Task, llm: LLM) -> float:
        said = []
        for call_id in ("one", "two"):
            said.append(weather("Rome"))
            emit(ToolEvent("weather", "ok", call_id, {"city": "Rome"}, output="as text"))
        return float(len(ask(llm, str(said))))

    ran.clear()
    recorded = record(agent)
    result = replay(recorded, agent)
    assert result.same, result
    assert ran == ["Rome", "Rome"]


async def test_a_server_ends_with_the_last_call_also_when_that_was_refused() -> None:
    def agent(task: Task, llm: LLM) -> float:
        ask(llm, "hi")
        with contextlib.suppress(RuntimeError):
            ask(llm, "hi", temperature="hot")
        return 1.0

    recorded = await asyncio.to_thread(record, agent)
    async with ReplayServer(recorded) as server:
        await asyncio.to_thread(agent, Task("x"), server.llm)
        await asyncio.wait_for(server.finished(), 5)
        assert result_of(server).same


@pytest.mark.parametrize("edit", [None, "said 500"])
def test_a_branch_is_replayed_as_a_whole(edit: str | None) -> None:
    with brancher(numbered()) as made:
        parent = made.run(chain(4))
        config: dict[str, Any] = {"branch": {"edit": edit}} if edit else {}
        branch = made.run(chain(4), parent=parent.key(3), config=config)
        whole = made.whole(branch.rollout.id)
        assert [call.number for call in whole.calls] == [1, 2, 3, 4]
        assert len(branch.calls) == (1 if edit else 2)
        assert whole.calls[1].transition.id == parent.calls[1].id
        result = replay_agent(whole, chain(4))
        assert result.same, result
        assert result.outcome is not None
        assert result.outcome.reward == branch.rollout.reward != parent.rollout.reward
        last = made.run(chain(2), parent=parent.key(1), config={"branch": {"edit": "said 9"}})
        assert len(made.whole(last.rollout.id).calls) == 2


SCRATCH = """
import os
import tempfile
from contextlib import contextmanager

import lightning
from lightning.runner.stages import AttemptStage


class Scratch(AttemptStage):
    api, before = 1, ("branches",)

    @contextmanager
    def around(self, task, llm):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SCRATCH"] = folder
            yield
        del os.environ["SCRATCH"]


@lightning.hookimpl
def register_attempt_stages(register):
    register("scratch", lambda runner_config: Scratch())
"""


def test_the_stages_of_plugins_stand_around_a_replay_as_around_the_attempt(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("scratch-stage", {"scratch": "scratch_stage"}, {"scratch_stage": SCRATCH})
    found = Plugins()
    monkeypatch.setattr("lightning.plugins.stages.plugins", lambda: found)

    def agent(task: Task, llm: LLM) -> float:
        folder = Path(os.environ["SCRATCH"])
        (folder / "note").write_text(ask(llm, "Write a note."))
        return float(len(ask(llm, (folder / "note").read_text())))

    result = replay(record(agent), agent)
    assert result.same, result
    assert result.answered == 2
    assert "SCRATCH" not in os.environ
