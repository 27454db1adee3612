"""Reports reach the rollout they were made in, or none."""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import httpx
import httpx2
import pytest
from lightning.bounded import Once
from lightning.errors import DataError
from lightning.instrument import activate, context, current_attempt, emit, label, last_call, reward
from lightning.types import LLM, Caller, ToolEvent

ONE = LLM("http://127.0.0.1:8000/v1", "one", "policy")
TWO = LLM("http://127.0.0.1:8000/v1", "two", "policy")


@pytest.fixture(autouse=True)
def _says_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_said", Once())


def test_a_reward_is_kept_with_its_time() -> None:
    with activate(ONE) as session:
        reward(0.5, name="format", response_id="chat-1")
        reward(1)
    first, second = session.step_rewards
    assert (first.value, first.name, first.response_id) == (0.5, "format", "chat-1")
    assert (second.value, second.name, second.response_id) == (1.0, "reward", "")
    assert 0 < first.at <= second.at


def test_a_reward_outside_a_rollout_does_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    reward(1.0)
    reward(1.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "outside a rollout" in caplog.text


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, "1.0", b"1", None, [1.0], 1e31, -1e39, pytest.param(10**400, id="huge")]
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_reward_that_is_no_number_is_an_error(value: object, inside: bool) -> None:
    if inside:
        with activate(ONE) as session, pytest.raises(DataError, match="finite number"):
            reward(value)  # type: ignore[arg-type]
        assert session.step_rewards == ()
    else:
        with pytest.raises(DataError, match="finite number"):
            reward(value)  # type: ignore[arg-type]


def test_the_last_label_of_a_call_is_kept() -> None:
    path = ["boss", "writer"]
    with activate(ONE) as session:
        label("chat-1", agent="nobody")
        label("chat/2", agent="writer", path=path)
        label("chat-1", agent="critic")
        path.append("later")
    assert session.labels == {"chat-1": Caller("critic"), "chat/2": Caller("writer", ("boss", "writer"))}


def test_a_label_outside_a_rollout_does_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    label("chat-1", agent="writer")
    label("chat-2", agent="writer")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "lightning.label() was called outside a rollout" in caplog.text


@pytest.mark.parametrize(
    ("response_id", "agent", "path"),
    [
        *[("", "writer", ()), (None, "writer", ()), (7, "writer", ())],
        *[("chat-1", "", ()), ("chat-1", None, ()), ("chat-1", Caller("writer"), ())],
        *[("chat-1", "writer", path) for path in ("boss", b"boss", None, 7, ("boss", ""), ("boss", None))],
        *[("chat-1", "boss/writer", ()), ("chat-1", "writer", ("boss/writer",))],
        *[("chat-1", "w" * 8192, ()), ("c" * 8192, "writer", ()), ("chat-1", "writer", ("boss",) * 3000)],
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_label_that_names_nobody_is_an_error(response_id: object, agent: object, path: object, inside: bool) -> None:
    with activate(ONE) if inside else nullcontext() as session, pytest.raises(DataError, match=r"lightning\.label"):
        label(response_id, agent=agent, path=path)  # type: ignore[arg-type]
    assert session is None or session.labels == {}


def test_labels_end_with_their_rollout_and_have_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "MAX_REPORTS", 2)
    with activate(ONE) as session:
        for turn in range(5):
            label(f"chat-{turn}", agent="writer")
        label("chat-1", agent="critic")
    session.add_label("chat-0", Caller("late"))
    assert session.labels == {"chat-0": Caller("writer"), "chat-1": Caller("critic")}
    assert ["more than 2 labels" in caplog.records[0].message, "had ended" in caplog.records[1].message] == [True] * 2


def test_a_tool_event_keeps_its_own_time_and_gets_one_if_it_has_none() -> None:
    with activate(ONE) as session:
        emit(ToolEvent("a", "ok", at=7.0))
        emit(ToolEvent("b", "ok"))
    assert [event.at == 7.0 for event in session.tool_events] == [True, False]
    assert session.tool_events[1].at > 0


def test_a_tool_run_that_is_reported_again_stays_one_event() -> None:
    """By two adapters, or once when it began to wait and once when it ended. Runs under other ids, and without, are others."""
    with activate(LLM("http://127.0.0.1:1/v1", "key", "policy")) as session:
        emit(ToolEvent("pay", "ok", "call-1", arguments={"text": "a"}, output="paid"))
        emit(ToolEvent("pay", "ok", "call-1", caller=Caller("boss")))
        emit(ToolEvent("wait", "unknown", "call-2"))
        emit(ToolEvent("wait", "error", "call-2", error="late"))
        emit(ToolEvent("wait", "unknown", "call-2"))
        for _ in range(2):
            emit(ToolEvent("pay", "ok"))
    found = [(event.name, event.status, event.call_id, event.output, event.error) for event in session.tool_events]
    assert found == [
        ("pay", "ok", "call-1", "paid", ""),
        ("wait", "error", "call-2", "", "late"),
        *[("pay", "ok", "", "", "")] * 2,
    ]
    assert (session.tool_events[0].arguments, session.tool_events[0].caller) == ({"text": "a"}, Caller("boss"))


PAYER = Caller("payer", framework="acme")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ToolEvent("pay", "ok", "c", {"to": "a"}, "paid"), ToolEvent("pay", "error", "c", error="no money")),
        (ToolEvent("pay", "error", "c", error="no money", caller=PAYER), ToolEvent("pay", "error", "c", caller=PAYER)),
        (
            ToolEvent("pay", "ok", "c", {"to": "a"}, caller=PAYER),
            ToolEvent("pay", "ok", "c", {"to": "a"}, caller=PAYER),
        ),
    ],
)
def test_two_ends_under_one_call_id_are_two_runs(first: ToolEvent, second: ToolEvent) -> None:
    with activate(ONE) as session:
        emit(first)
        emit(second)
    found = [(event.status, event.arguments, event.output, event.error) for event in session.tool_events]
    assert found == [(event.status, event.arguments, event.output, event.error) for event in (first, second)]


def test_what_a_forked_process_reports_is_said_once_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_said_in_fork", mmap.mmap(-1, 1))
    log = logging.FileHandler(tmp_path / "log")
    context.logger.addHandler(log)
    try:
        with activate(ONE) as session:
            for _ in range(2):
                child = os.fork()
                if child == 0:
                    try:
                        reward(1.0)
                        emit(ToolEvent("pay", "ok"))
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)
    finally:
        context.logger.removeHandler(log)
        log.close()
    assert (session.step_rewards, session.tool_events) == ((), ())
    assert (tmp_path / "log").read_text().count("\n") == 1
    assert "step rewards reported in a process that the agent forked" in (tmp_path / "log").read_text()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what this is about
@pytest.mark.parametrize("module", [context, last_call], ids=["context", "last call"])
def test_a_process_that_is_forked_while_another_thread_reports_does_not_wait_for_it(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_said_in_fork", mmap.mmap(-1, 1))
    held, let_go = threading.Event(), threading.Event()

    def report() -> None:
        with module._lock:
            held.set()
            let_go.wait(20)

    with activate(ONE), ThreadPoolExecutor(1) as pool:
        reporting = pool.submit(report)
        held.wait(20)
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(3)  # ends it where it waits
                reward(1.0)
                emit(ToolEvent("pay", "ok"))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        let_go.set()
        reporting.result()
    assert status == 0


async def test_concurrent_rollouts_do_not_mix() -> None:
    async def rollout(number: int) -> tuple[float, ...]:
        with activate(LLM("http://127.0.0.1:1/v1", f"key-{number}", "policy")) as session:
            for _ in range(3):
                await asyncio.sleep(0)
                reward(number)
                await asyncio.to_thread(reward, number)
                found = current_attempt()
                assert found is not None
                assert found.llm.api_key == f"key-{number}"
            return tuple(given.value for given in session.step_rewards)

    assert await asyncio.gather(*(rollout(number) for number in range(8))) == [(number,) * 6 for number in range(8)]


def test_a_thread_without_context_belongs_to_the_only_rollout() -> None:
    with activate(ONE) as session:
        thread = threading.Thread(target=reward, args=(1.0,))
        thread.start()
        thread.join()
    assert len(session.step_rewards) == 1


def test_a_thread_without_context_belongs_to_none_of_several_rollouts() -> None:
    with activate(ONE) as first, activate(TWO) as second:
        thread = threading.Thread(target=reward, args=(1.0,))
        thread.start()
        thread.join()
    assert first.step_rewards == second.step_rewards == ()


class Bare:
    """A thread of its own, without a context, that reports a reward when it is told to."""

    def __init__(self) -> None:
        self.go, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.go.wait(30)
        reward(100.0)
        self.done.set()

    def report(self) -> None:
        self.go.set()
        self.thread.join(30)
        assert self.done.is_set()


def test_a_thread_left_behind_reports_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with activate(ONE) as first:
        left = Bare()
    with activate(TWO) as second:
        left.report()
        assert second.step_rewards == ()
        Bare().report()
    assert first.step_rewards == ()
    assert [given.value for given in second.step_rewards] == [100.0], "its own threads still count"
    assert "busy before this rollout began" in caplog.text


def test_a_thread_left_behind_by_a_neighbour_reports_to_nobody() -> None:
    with activate(ONE) as first:
        mine = Bare()
        with activate(TWO) as second:
            left = Bare()
        left.report()
        assert first.step_rewards == second.step_rewards == ()
        mine.report()
        assert [given.value for given in first.step_rewards] == [100.0]


def test_a_pools_thread_belongs_to_the_rollout_that_gives_it_work() -> None:
    with ThreadPoolExecutor(1) as pool:
        with activate(ONE) as first:
            pool.submit(reward, 1.0).result()
        (thread,) = pool._threads
        while sys._current_frames()[thread.ident or 0].f_code.co_name != "_worker":
            time.sleep(0.001)
        with activate(TWO) as second:
            pool.submit(reward, 2.0).result()
    assert [given.value for given in first.step_rewards] == [1.0]
    assert [given.value for given in second.step_rewards] == [2.0]


def test_events_of_adapters_are_clipped_and_made_clean() -> None:
    class NoText:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    arguments = {"long": "x" * 10_000, "odd": NoText(), "fine": [1, {"a": None}]}
    with activate(ONE) as session:
        emit(ToolEvent("t" * 5000, "ok", output="x" * 10_000, error=NoText(), arguments=arguments))  # type: ignore[arg-type]
        emit(ToolEvent("t", "ok", arguments="x" * 10_000, caller=Caller("a" * 5000, ("b" * 5000,))))
    first, second = session.tool_events
    assert (len(first.name), len(first.output), first.error) == (4096, 4096, "<NoText>")
    assert first.arguments == {"long": "x" * 4095 + "…", "odd": "<NoText>", "fine": [1, {"a": None}]}
    assert isinstance(second.arguments, str)
    assert len(second.arguments) == 4096
    assert second.caller == Caller("a" * 4095 + "…", ("b" * 4095 + "…",))


def test_long_reports_do_not_fill_the_memory_and_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "MAX_REPORTED_TEXT", 1000)
    with activate(ONE) as session:
        for number in range(5):
            emit(ToolEvent("t", "ok", output="x" * 300, arguments={"a": "x" * 100}))
            reward(float(number), name="x" * 300)
            label(f"{number}", agent="x" * 300)
        emit(ToolEvent("short", "ok"))
    assert [event.name for event in session.tool_events] == ["t", "t", "short"]
    assert [given.value for given in session.step_rewards] == [0.0, 1.0, 2.0]
    assert list(session.labels) == ["0", "1", "2"]
    assert len([record for record in caplog.records if "1000 characters of" in record.message]) == 3


def test_nesting_ends_where_it_began() -> None:
    with activate(ONE) as outer:
        with activate(TWO):
            assert current_attempt() is not outer
        assert current_attempt() is outer
    assert current_attempt() is None


def test_a_rollout_that_has_ended_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with activate(ONE) as session:
        pass
    session.add_tool_event(ToolEvent("late", "ok"))
    assert session.tool_events == ()
    assert "after their rollout had ended" in caplog.text


def test_an_endless_loop_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(context, "MAX_REPORTS", 3)
    with activate(ONE) as session:
        for _ in range(5):
            reward(1.0)
    assert len(session.step_rewards) == 3
    assert len(caplog.records) == 1


LOCAL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize("library", [httpx, httpx2])
@pytest.mark.parametrize(
    ("base", "asked", "ours"),
    [
        (LOCAL, "http://127.0.0.1:8000/v1/chat/completions", True),
        (LOCAL, "http://127.0.0.1:8000/r/token/v1/chat/completions", True),
        (LOCAL, "http://127.0.0.1:8001/v1", False),
        (LOCAL, "http://127.0.0.1/v1/chat/completions", False),
        (LOCAL, "https://127.0.0.1:8000/v1/chat/completions", False),
        (LOCAL, "https://api.openai.com/v1/chat/completions", False),
        ("http://GPU1:8123/v1", "http://GPU1:8123/v1/chat/completions", True),
        ("http://GPU1:8123/v1", "http://gpu1:8123/v1/chat/completions", True),
        ("http://GPU1:8123/v1", "http://gpu10:8123/v1/chat/completions", False),
        ("HTTPS://Host:443/v1/", "https://host/v1/chat/completions", True),
        ("https://host:443", "https://host:443/v1/chat/completions", True),
        ("http://host:80/v1", "http://host/v1/chat/completions", True),
        ("http://host/v1", "http://host:80/v1/chat/completions", True),
        ("https://host:80/v1", "https://host/v1/chat/completions", False),
        ("http://Bücher.example:8000/v1", "http://bücher.example:8000/v1/chat/completions", True),
        ("http://bücher.example:8000/v1", "http://xn--bcher-kva.example:8000/v1/chat/completions", True),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1/chat/completions", True),
        ("https://host/lightning ü/v1", "https://host/lightning ü/v1/chat/completions", True),
        ("https://host/lightning/v1", "https://host/lightning2/v1/chat/completions", False),
    ],
)
def test_which_urls_are_the_gateway(library: ModuleType, base: str, asked: str, ours: bool) -> None:
    url = library.URL(asked)
    assert not context.is_gateway(url)
    with activate(LLM(base, "key", "policy")) as session:
        assert context.is_gateway(url) is session.serves(url) is ours
    assert not context.is_gateway(url)
