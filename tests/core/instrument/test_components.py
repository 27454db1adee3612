"""`component` and `tool` name and report, and change nothing else."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import DataError
from lightning.instrument import ActiveAttempt, activate, component, component_path, tool
from lightning.instrument.threads import carry_names
from lightning.types import LLM


@pytest.fixture
def session() -> Iterator[ActiveAttempt]:
    undo = carry_names()
    with activate(LLM("http://127.0.0.1:1/v1", "key", "policy")) as active:
        yield active
    undo()


# component ------------------------------------------------------------------------------------------------------------
@given(st.lists(st.text(min_size=1).filter(lambda name: "/" not in name), max_size=6))
def test_components_nest_and_unwind(names: list[str]) -> None:
    def descend(rest: list[str], above: tuple[str, ...]) -> None:
        assert component_path() == above
        if rest:
            with component(rest[0]):
                descend(rest[1:], (*above, rest[0]))
            assert component_path() == above

    descend(names, ())


@pytest.mark.parametrize("name", ["", "a/b", None, 3])
def test_a_name_that_cannot_be_in_a_path_is_an_error(name: object) -> None:
    with pytest.raises(DataError, match="non-empty string without '/'"):
        component(name)  # type: ignore[arg-type]


def test_the_name_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), component("a"):
        raise KeyError
    assert component_path() == ()


def test_it_decorates_a_function() -> None:
    @component("outer")
    def outer(value: int) -> tuple[int, tuple[str, ...]]:
        """Docs."""
        with component("inner"):
            return value, component_path()

    assert outer(3) == (3, ("outer", "inner"))
    assert outer.__name__ == "outer"
    assert outer.__doc__ == "Docs."
    assert component_path() == ()


async def test_it_decorates_a_coroutine_and_tasks_keep_their_own_path() -> None:
    @component("worker")
    async def worker(number: int) -> tuple[str, ...]:
        with component(f"n{number}"):
            await asyncio.sleep(0)
            return component_path()

    assert inspect.iscoroutinefunction(worker)
    with component("boss"):
        paths = await asyncio.gather(*(worker(number) for number in range(4)))
    assert paths == [("boss", "worker", f"n{number}") for number in range(4)]


def test_a_generator_does_not_leak_its_name_between_items() -> None:
    @component("stream")
    def numbers() -> Iterator[tuple[str, ...]]:
        yield component_path()
        yield component_path()

    assert inspect.isgeneratorfunction(numbers)
    for inside in numbers():
        assert inside == ("stream",)
        assert component_path() == ()


async def test_an_async_generator_does_not_leak_its_name_between_items() -> None:
    @component("stream")
    async def numbers() -> AsyncIterator[tuple[str, ...]]:
        yield component_path()
        await asyncio.sleep(0)
        yield component_path()

    assert inspect.isasyncgenfunction(numbers)
    async for inside in numbers():
        assert inside == ("stream",)
        assert component_path() == ()


def test_an_object_with_call_and_a_partial_can_be_decorated() -> None:
    class Agent:
        def __call__(self, value: int) -> tuple[int, tuple[str, ...]]:
            return value, component_path()

    assert component("object")(Agent())(1) == (1, ("object",))
    assert component("partial")(functools.partial(Agent(), 2))() == (2, ("partial",))


# tool -----------------------------------------------------------------------------------------------------------------
def test_a_tool_that_works(session: ActiveAttempt) -> None:
    @tool
    def add(a: int, b: int = 2) -> int:
        return a + b

    assert add(1) == 3
    (event,) = session.tool_events
    assert (event.name, event.status, event.arguments, event.output, event.error) == ("add", "ok", {"a": 1}, "3", "")


def test_a_tool_that_raises(session: ActiveAttempt) -> None:
    @tool(name="calculator")
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError) as caught:
        divide(1, b=0)
    assert caught.traceback[-1].name == "divide"
    (event,) = session.tool_events
    assert (event.name, event.status, event.arguments) == ("calculator", "error", {"a": 1, "b": 0})
    assert event.error == "ZeroDivisionError: division by zero"
    assert event.output == ""


async def test_an_async_tool(session: ActiveAttempt) -> None:
    @tool
    async def fetch(url: str) -> str:
        await asyncio.sleep(0)
        if url == "bad":
            raise LookupError(url)
        return "page"

    assert inspect.iscoroutinefunction(fetch)
    assert await fetch("good") == "page"
    with pytest.raises(LookupError):
        await fetch("bad")
    assert [(event.status, event.output) for event in session.tool_events] == [("ok", "page"), ("error", "")]


async def test_a_cancelled_tool_is_an_error(session: ActiveAttempt) -> None:
    @tool
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await forever()
    assert [event.status for event in session.tool_events] == ["error"]


def test_a_generator_tool(session: ActiveAttempt) -> None:
    @tool
    def words(text: str) -> Iterator[str]:
        yield from text.split(" ")
        if "!" in text:
            raise ValueError(text)

    assert list(words("a b")) == ["a", "b"]
    with pytest.raises(ValueError, match="!"):
        list(words("a !"))
    for _ in words("left early"):
        break
    assert [(event.status, event.output) for event in session.tool_events] == [
        ("ok", "ab"),
        ("error", ""),
        ("unknown", ""),
    ]


def test_a_generator_tool_hears_what_its_consumer_sends_and_throws(session: ActiveAttempt) -> None:
    @tool
    def echo() -> Iterator[object]:
        received: object = None
        while received != "stop":
            try:
                received = yield received
            except KeyError as error:
                received = repr(error)
        return "done"

    talk = echo()
    assert next(talk) is None
    assert talk.send("a") == "a"  # type: ignore[attr-defined]
    assert talk.throw(KeyError("k")) == "KeyError('k')"  # type: ignore[attr-defined]
    with pytest.raises(StopIteration) as stopped:
        talk.send("stop")  # type: ignore[attr-defined]
    assert stopped.value.value == "done"
    assert [(event.status, event.output) for event in session.tool_events] == [("ok", "done")]


async def test_an_async_generator_tool(session: ActiveAttempt) -> None:
    closed = []

    @tool
    async def words(text: str) -> AsyncIterator[str]:
        try:
            for word in text.split(" "):
                yield word
        finally:
            closed.append(text)

    assert [word async for word in words("a b")] == ["a", "b"]
    stream = words("left early")
    assert await anext(stream) == "left"
    await stream.aclose()  # type: ignore[attr-defined]
    assert closed == ["a b", "left early"]
    assert [(event.status, event.output) for event in session.tool_events] == [("ok", "ab"), ("unknown", "")]


def test_calls_inside_a_tool_belong_to_component_slash_tool(session: ActiveAttempt) -> None:
    @tool
    def ask() -> tuple[str, ...]:
        return component_path()

    assert ask() == ()
    with component("boss"):
        assert ask() == ("boss", "ask")
        assert component_path() == ("boss",)


def test_methods_do_not_report_self(session: ActiveAttempt) -> None:
    class Box:
        @tool
        def put(self, item: object) -> None:
            """Nothing."""

    Box().put({1, 2})
    Box().put(float("nan"))
    Box().put("\ud800")
    assert [event.arguments for event in session.tool_events] == [
        {"item": "{1, 2}"},
        {"item": "nan"},
        {"item": "\ud800"},
    ]


def test_a_tool_may_change_its_arguments_afterwards(session: ActiveAttempt) -> None:
    @tool
    def drain(items: list[int]) -> None:
        items.clear()

    drain([1, 2])
    assert session.tool_events[0].arguments == {"items": [1, 2]}


def test_long_texts_are_clipped_and_broken_reprs_stay_out_of_the_agent(session: ActiveAttempt) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    @tool
    def make(value: object) -> object:
        return value

    make("x" * 10_000)
    broken = Broken()
    assert make(broken) is broken
    first, second = session.tool_events
    assert len(first.output) == 4096
    assert second.output == "<Broken>"


def test_outside_a_rollout_a_tool_just_runs() -> None:
    @tool
    def add(a: int) -> int:
        return a + 1

    assert add(1) == 2


@pytest.mark.parametrize("wrong", [lambda function: tool(function), lambda function: component("c")(function)])
def test_wrong_arguments_are_still_the_functions_own_error(
    session: ActiveAttempt, wrong: Callable[..., Callable[..., int]]
) -> None:
    def one(a: int) -> int:
        return a

    with pytest.raises(TypeError, match="one"):
        wrong(one)(1, 2)


def test_a_generator_that_is_closed_inside_a_block_of_its_consumer_takes_its_name_along() -> None:
    def items() -> Iterator[int]:
        with component("items"):
            yield 1

    stream = items()
    assert next(stream) == 1
    with component("consumer"):
        stream.close()  # type: ignore[attr-defined]
        assert component_path() == ("consumer",)
    assert component_path() == ()


def inner() -> Iterator[tuple[str, ...]]:
    with component("inner"):
        yield component_path()
        yield component_path()


async def inner_async() -> AsyncIterator[tuple[str, ...]]:
    await asyncio.sleep(0)
    with component("inner"):
        yield component_path()
        await asyncio.sleep(0)
        yield component_path()


async def inner_of_a_stack() -> AsyncIterator[tuple[str, ...]]:
    with ExitStack() as stack:
        stack.enter_context(component("inner"))
        yield component_path()
        yield component_path()


def test_a_block_around_a_yield_is_not_around_whoever_iterates() -> None:
    for inside in inner():
        assert (inside, component_path()) == (("inner",), ())
    left = inner()
    next(left)
    with component("outer"):
        assert (next(left), component_path()) == (("outer", "inner"), ("outer",))
    assert component_path() == ()


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("make", [inner_async, inner_of_a_stack])
async def test_an_async_generator_that_is_left_or_closed_elsewhere_leaves_no_name(
    make: Callable[[], AsyncGenerator[tuple[str, ...]]],
) -> None:
    async def path() -> tuple[str, ...]:
        return component_path()

    async for inside in make():
        assert inside == ("inner",)
        assert component_path() == ()
        assert await asyncio.create_task(path()) == ()
        break
    assert component_path() == await asyncio.create_task(path()) == ()
    kept = make()
    assert await anext(kept) == ("inner",)
    assert component_path() == ()
    await asyncio.create_task(kept.aclose())  # type: ignore[arg-type]
    assert component_path() == ()
    with component("inner"):
        assert component_path() == ("inner",)
    assert component_path() == ()


def closed() -> Iterator[tuple[str, ...]]:
    stack = ExitStack()
    stack.enter_context(component("a"))
    assert component_path() == ("a",)
    stack.close()
    yield component_path()


def moved() -> Iterator[tuple[str, ...]]:
    with ExitStack() as stack:
        stack.enter_context(component("a"))
        stack.pop_all().close()
        yield component_path()


def left_by_a_callback() -> Iterator[tuple[str, ...]]:
    with ExitStack() as stack:
        named = component("a")
        named.__enter__()
        stack.callback(lambda: named.__exit__(None, None, None))
    yield component_path()


def given() -> Iterator[tuple[str, ...]]:
    stack = ExitStack()
    stack.enter_context(component("a"))

    def inside() -> Iterator[tuple[str, ...]]:
        with stack:
            pass
        yield component_path()

    yield from inside()


async def closed_async() -> AsyncIterator[tuple[str, ...]]:
    stack = AsyncExitStack()
    stack.enter_context(component("a"))
    assert component_path() == ("a",)
    await stack.aclose()
    yield component_path()


@pytest.mark.parametrize("make", [closed, moved, left_by_a_callback, given, closed_async])
async def test_a_component_is_left_by_whatever_closes_its_stack(make: Callable[[], Iterator[tuple[str, ...]]]) -> None:
    async def path() -> tuple[str, ...]:
        return component_path()

    found = make()
    inside = [each async for each in found] if isinstance(found, AsyncIterator) else list(found)
    assert inside == [()]
    assert component_path() == await asyncio.create_task(path()) == ()


async def test_a_stack_that_is_closed_in_another_task_holds_on_to_no_frame() -> None:
    named = component("a")

    async def items() -> AsyncIterator[int]:
        stack = AsyncExitStack()
        stack.enter_context(named)
        try:
            yield 1
        finally:
            await stack.aclose()

    stream = items()
    assert await anext(stream) == 1
    await asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]
    assert component_path() == ()
    assert not named._rooms


def test_a_component_leaves_no_room_of_another_with_its_name() -> None:
    one, other = component("a"), component("a")
    with one:
        other.__exit__(None, None, None)
        assert component_path() == ("a",)
    assert component_path() == ()


async def test_a_context_manager_made_of_a_generator_is_around_its_block() -> None:
    @contextmanager
    def named() -> Iterator[None]:
        with component("inner"):
            yield

    @asynccontextmanager
    async def named_async() -> AsyncIterator[None]:
        with named():
            await asyncio.sleep(0)
            yield

    async def items() -> AsyncIterator[tuple[str, ...]]:
        async with named_async():
            yield component_path()

    with named():
        assert component_path() == ("inner",)
    async with named_async():
        assert component_path() == ("inner",)
        assert await asyncio.create_task(asyncio.to_thread(component_path)) == ("inner",)  # type: ignore[arg-type]
    async for inside in items():
        assert (inside, component_path()) == (("inner",), ())
    assert component_path() == ()


async def test_tasks_of_a_generator_keep_its_name_when_it_waits_or_has_ended() -> None:
    async def path(until: asyncio.Event) -> tuple[str, ...]:
        await until.wait()
        return component_path()

    async def items() -> AsyncIterator[tuple[asyncio.Event, asyncio.Task[tuple[str, ...]]]]:
        with component("inner"):
            for _ in range(2):
                until = asyncio.Event()
                yield until, asyncio.create_task(path(until))

    stream = items()
    first, second = await anext(stream), await anext(stream)
    first[0].set()
    assert await first[1] == ("inner",)
    await stream.aclose()  # type: ignore[attr-defined]
    second[0].set()
    assert (await second[1], component_path()) == (("inner",), ())


@pytest.mark.parametrize("name", ["a/b", "/", 3])
def test_a_tool_cannot_have_a_name_that_cannot_be_in_a_path(name: object) -> None:
    with pytest.raises(DataError, match=r"tool\(name=.*non-empty string without '/'"):
        tool(name=name)  # type: ignore[call-overload]


def test_an_exception_without_words_is_what_the_agent_sees(session: ActiveAttempt) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @tool
    def fail() -> None:
        raise SilentError

    with pytest.raises(SilentError):
        fail()
    assert [(event.status, event.error) for event in session.tool_events] == [("error", "SilentError")]
