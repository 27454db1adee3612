"""The scopes of an adapter's framework: who is inside whom, in every thread and task, and no longer than it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import lightning
import pytest
from lightning.instrument import Scopes, activate, install_tap
from lightning.types import LLM

ONE, OTHER = LLM("http://127.0.0.1:1/v1", "one", "policy"), LLM("http://127.0.0.1:1/v1", "other", "policy")


@pytest.fixture
def scopes() -> Iterator[Scopes]:
    undo = install_tap()
    yield Scopes("acme")
    undo()


def path(scopes: Scopes) -> str:
    caller = scopes.caller()
    return "/".join(caller.path) if caller else ""


def in_thread(function: Callable[[], str]) -> str:
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(function()))
    thread.start()
    thread.join()
    return said[0]


def test_a_caller_has_the_names_around_it_and_a_span_only_in_a_model_call(scopes: Scopes) -> None:
    assert scopes.caller() is None
    with scopes.inside("agent", "boss"), scopes.inside("tool", "ask") as tool:
        in_tool = scopes.caller()
        with scopes.inside("agent", "solver") as solver, scopes.inside("call") as call:
            in_call = scopes.caller()
    assert in_tool == lightning.Caller("ask", ("boss", "ask"), "", tool.id, "acme")
    assert in_call == lightning.Caller("solver", ("boss", "ask", "solver"), call.id, solver.id, "acme")
    assert scopes.caller() is None


def test_a_repeated_name_stands_once_and_one_without_a_name_not_at_all(scopes: Scopes) -> None:
    with scopes.inside("agent", "boss"), scopes.inside("tool", "solver"), scopes.inside("agent", "solver"):
        assert path(scopes) == "boss/solver"
        with scopes.inside("agent", ""):
            assert path(scopes) == "boss/solver"
    with scopes.inside("agent", ""):
        assert scopes.caller() is None


def test_components_stand_where_they_were_entered(scopes: Scopes) -> None:
    with lightning.component("outer"), scopes.inside("agent", "boss"):
        assert path(scopes) == "outer/boss"
        with lightning.component("inner"):
            assert path(scopes) == "outer/boss/inner"
            with scopes.inside("agent", "solver"):
                assert path(scopes) == "outer/boss/inner/solver"


def test_a_generator_is_inside_only_while_it_makes_an_item(scopes: Scopes) -> None:
    seen, closed = [], []

    def items() -> Generator[int, None, str]:
        try:
            for number in range(2):
                seen.append(path(scopes))
                yield number
            return "all"
        finally:
            closed.append(path(scopes))

    def through() -> Generator[int, None, None]:
        returned.append((yield from each))

    returned: list[object] = []
    with scopes.inside("agent", "boss"):
        each = scopes.each(items(), "agent", "solver")
    assert [path(scopes) for _ in through()] == ["", ""]
    assert returned == ["all"]
    assert seen == ["boss/solver", "boss/solver"]
    left = scopes.each(items(), "agent", "solver")
    next(left)
    left.close()
    assert closed == ["boss/solver", "solver"]


def test_a_thread_without_a_context_is_in_the_scope_of_who_started_it(scopes: Scopes) -> None:
    with activate(ONE), ThreadPoolExecutor(1) as pool:
        with scopes.inside("agent", "boss"):
            assert in_thread(lambda: in_thread(lambda: path(scopes))) == "boss"

            def tool() -> str:
                with scopes.inside("tool", "ask"):
                    return path(scopes)

            assert pool.submit(tool).result() == "boss/ask"
        assert pool.submit(path, scopes).result() == ""


def test_a_pools_thread_forgets_the_rollout_it_worked_for(scopes: Scopes) -> None:
    def tool() -> str:
        with scopes.inside("tool", "ask"):
            return path(scopes)

    with ThreadPoolExecutor(1) as pool:
        with activate(ONE), scopes.inside("agent", "boss"):
            assert pool.submit(tool).result() == "boss/ask"
            with activate(OTHER), scopes.inside("agent", "writer"):
                assert pool.submit(tool).result() == "boss/writer/ask"
        with activate(OTHER):
            assert pool.submit(tool).result() == "ask"


def test_a_scope_that_has_ended_names_nobody_in_what_it_left_running(scopes: Scopes) -> None:
    ended = threading.Event()
    said: list[str] = []

    def left() -> None:
        ended.wait()
        said.append(path(scopes))

    with activate(ONE), scopes.inside("agent", "boss"):
        with scopes.inside("tool", "ask"):
            thread = threading.Thread(target=left)
            thread.start()
        ended.set()
        thread.join()
    assert said == ["boss"]


async def test_tasks_beside_one_another_do_not_mix(scopes: Scopes) -> None:
    async def agent(name: str) -> str:
        with scopes.inside("agent", name):
            await asyncio.sleep(0)
            return path(scopes)

    with scopes.inside("agent", "boss"):
        assert await asyncio.gather(agent("a"), agent("b")) == ["boss/a", "boss/b"]
