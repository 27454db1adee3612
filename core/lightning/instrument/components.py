"""Names for the parts of an agent: `component("writer")` around its calls, `@tool` on its tools; and the current caller.

The invariant: a wrapped function behaves as before (same result, same exceptions, sync stays sync, streams stay streams), and a
name never leaks to code outside the block or decorated function: not between the items of a generator, and not from a generator
that is never closed, or is closed in another task. For the current caller, functions that users registered are asked first,
then the adapters. None of them can make the agent's call fail: one that raises is skipped and logged once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import FrameType, TracebackType
from typing import ParamSpec, Self, TypeVar, cast, overload

from lightning.errors import DataError
from lightning.instrument.context import calling_attempt, current_attempt, log_once
from lightning.instrument.last_call import flow_ident, starter_here
from lightning.instrument.texts import MAX_TEXT, error_text, named_arguments, result_of, signature_of, text_of
from lightning.instrument.tool_slots import tool_slot
from lightning.types import Caller, Json, ToolEvent, read_reason

P = ParamSpec("P")
R = TypeVar("R")

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_MANAGERS = frozenset({"__enter__", "__aenter__", "__exit__", "__aexit__", "enter_context", "enter_async_context"})
"""Names of methods by which a context manager, such as `ExitStack`, enters and leaves other context managers."""


class Room:
    """An entered component; with an empty name, an entered block whose calls are `untrained` for this reason.

    If a generator entered it, it holds for the code inside the generator and for tasks that this code starts, but not for the
    code that iterates the generator, although both share one context.
    """

    __slots__ = ("_flow", "generator", "name", "owner", "untrained")

    def __init__(
        self, name: str, generator: FrameType | None = None, owner: _Around | None = None, untrained: str = ""
    ) -> None:
        self.name, self.generator, self.owner, self.untrained = name, generator, owner, untrained
        self._flow = 0 if generator is None else flow_ident()

    def is_around(self) -> bool:
        """Whether the calling code runs inside this component."""
        if not self._flow or self._flow != flow_ident():
            return True
        return (
            self.generator is not None and self.generator.f_back is not None
        )  # a generator that waits at a `yield` has no calling frame


def _generator_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the generator that entered a `with` block from `frame`; None if a plain function entered it, or the
    generator of a `@contextmanager`, whose component holds while its `with` block runs."""
    while frame is not None:
        managed = frame.f_code.co_name in _MANAGERS
        if frame.f_code.co_flags & _GENERATORS:
            managed = frame.f_back is not None and frame.f_back.f_code.co_name in _MANAGERS
            if not managed:
                return frame
        if not managed:
            return None
        frame = frame.f_back
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, the frame that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


_nothing = nullcontext()
_path: ContextVar[tuple[Room, ...]] = ContextVar("lightning_component_path", default=())


_prompts: dict[str, str | None] = {}


def declared_prompts() -> dict[str, str | None]:
    """Return the prompts that components of this process were made with, by the component's name; None for a name with several
    different prompts."""
    return dict(_prompts)


def component_path() -> tuple[str, ...]:
    """Return the names of the components that this code runs in, outermost first; empty outside of any."""
    starter, here = starter_here(), tuple(room.name for room in _path.get() if room.name and room.is_around())
    return here if starter is None else starter.components + here


def untrained_here() -> str:
    """Return why the model calls of this code are not trained: the innermost `untrained` around it, or around the code that
    started this thread; empty outside of any."""
    here = next((room.untrained for room in reversed(_path.get()) if room.untrained and room.is_around()), "")
    starter = starter_here()
    return here if here or starter is None else starter.context.copy().run(untrained_here)


def only_around() -> AbstractContextManager[object]:
    """Return a context in which started tasks inherit the components around this code, and not those of a waiting generator."""
    rooms = _path.get()
    around = tuple(room for room in rooms if room.is_around())
    return _nothing if len(around) == len(rooms) else _Scope(around)


class _Around:
    """A block that its code can ask for: a context manager and a decorator of functions, coroutines, generators and async
    generators."""

    def __init__(self, name: str, untrained: str = "") -> None:
        self.name, self._untrained = name, untrained
        self._rooms: list[Room] = []  # of generators, which may be closed in another context than they began in

    def __enter__(self) -> Self:
        generator = _generator_of(sys._getframe(1))  # noqa: SLF001 — the one way to the frame
        room = Room(self.name, generator, self, self._untrained)
        if generator is not None:
            self._rooms.append(room)
        _path.set(_path_in(room))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        path = _path.get()
        room = self._left(sys._getframe(1), path)  # noqa: SLF001
        if room is None:
            return
        _path.set(tuple(each for each in path if each is not room))
        if room.generator is not None:
            self._rooms.remove(room)
            room.generator = None

    def _left(self, frame: FrameType, path: tuple[Room, ...]) -> Room | None:
        """Return the room that `__exit__`, called from `frame`, leaves; None if there is none. The room need not be the last
        one, since a generator may be closed inside a block that its consumer opened. The code that leaves the room need not be
        the code that entered it, since an `ExitStack` may be closed by hand or handed on."""
        generator = _generator_of(frame)
        if generator is not None:
            for room in reversed(self._rooms):
                if room.generator is generator:
                    return room
        for room in reversed(path):
            if room.owner is self and room.is_around():
                return room
        callers = tuple(_callers(frame)) if self._rooms else ()
        return next((room for room in reversed(self._rooms) if room.generator in callers), None)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function wrapped so that every call of it runs in this block."""
        return _wrap(function, lambda _: _Scope(_path_in(Room(self.name, untrained=self._untrained))))


class untrained(_Around):  # noqa: N801 — as below
    """Leave the model calls inside out of training, and say why: `with lightning.untrained("title"):`, or as a decorator.

    The calls are recorded as others are, with the reason, and belong to the environment like calls of another agent. The
    innermost block counts. For a call of which this is known only after its answer, use `lightning.reject`.

    Raises `DataError` for a reason that is not 1 to 80 printable ASCII characters.
    """

    def __init__(self, reason: str) -> None:
        super().__init__("", read_reason(reason, "the reason of lightning.untrained()"))


class component(_Around):  # noqa: N801 — used as a verb: `with component("writer"):` and `@component("writer")`
    """Name the agent that makes the model calls inside: a context manager and a decorator. Components nest into a path.

    Decorates functions, coroutines, generators and async generators. Raises `DataError` for an empty name or one with a slash,
    since slashes separate the names of a path in `train_agents`.

    `prompt` gives the component a prompt template. The agent must read the template from `.prompt`: in a rollout this is the
    template to try (of `runner.prompts`, or of a prompt optimizer), elsewhere it is the given template.
    """

    def __init__(self, name: str, prompt: str | None = None) -> None:
        super().__init__(
            _checked(name, "component({!r}): a name is a non-empty string without '/'; nest two components instead")
        )
        self._prompt = prompt
        if prompt is not None:
            _prompts[self.name] = prompt if _prompts.get(self.name, prompt) == prompt else None

    @property
    def prompt(self) -> str:
        """The prompt template to use in the current rollout. Raises `DataError` if the component was made without one."""
        if self._prompt is None:
            raise DataError(
                f"component({self.name!r}) has no prompt: give it one, component({self.name!r}, prompt=...)"
            )
        attempt = current_attempt()
        return self._prompt if attempt is None else attempt.prompt(self.name, self._prompt)


def _path_in(room: Room) -> tuple[Room, ...]:
    """Return the path inside a component that is entered here. Also open a flow of calls for the component, so that its last
    call is distinguished from the last calls of components beside it."""
    attempt = calling_attempt()
    if attempt is not None:
        attempt.calls.open()
    path = _path.get()
    around = [each for each in path if each.is_around()]
    waiting = [each for each in path if each not in around and each.generator is not None]  # these may go on inside it
    return (*around, room, *waiting)


class _Scope:
    """One call of a wrapped function. It is entered only while the wrapped code runs, not while a generator waits."""

    def __init__(self, path: tuple[Room, ...]) -> None:
        self.path = path
        self._before = path

    def __enter__(self) -> None:
        self._before = _path.get()
        _path.set(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _path.set(self._before)

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function and return its result: for a generator function a generator that has not begun, for a coroutine
        function a coroutine that is not awaited."""
        return function(*args, **kwargs)

    def wait(self) -> None:
        """Block until the call may begin."""

    async def wait_here(self) -> None:
        """Wait on the event loop until the call may begin."""

    def ended(self, output: object = None, error: BaseException | None = None) -> None:
        """Note the end of the call: it returned `output`, or raised `error`."""


StandIn = Callable[[str, Json, object], Callable[[], object] | None]
"""A function from a tool's name, arguments and function to a function that is called in place of the tool; None lets the tool
run. An exception that it raises is raised by the tool."""

_stand_ins: dict[str, StandIn] = {}


@contextmanager
def replace_tools(api_key: str, stand_in: StandIn) -> Iterator[None]:
    """Inside the block, each run of a `lightning.tool` in the rollout with this key is replaced by a call of the function that
    `stand_in` returns for the run (None: the tool runs). This holds in every thread and task of this process in which the
    rollout's code runs."""
    _stand_ins[api_key] = stand_in
    try:
        yield
    finally:
        del _stand_ins[api_key]


class _ToolScope(_Scope):
    def __init__(self, name: str, caller: Caller | None, arguments: Json) -> None:
        path = _path.get()
        super().__init__((*path, Room(name)) if component_path() else path)
        self.name, self.caller, self.arguments = name, caller, arguments
        self._session = current_attempt()
        # Now, not at its end: the tool may make model calls itself, and none of these asked for it.
        agent = caller.name if caller else ""
        self._asked_by = self._session.calls.last(agent) if self._session else ""
        self._slot = tool_slot(name)

    def wait(self) -> None:
        self._slot.__enter__()

    async def wait_here(self) -> None:
        await self._slot.__aenter__()

    def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = _target(function)
        ask = _stand_ins.get(self._session.llm.api_key) if _stand_ins and self._session else None
        stand_in = None if ask is None else ask(self.name, self.arguments, kind)
        return function(*args, **kwargs) if stand_in is None else cast("R", stand_in())

    def ended(self, output: object = None, error: BaseException | None = None) -> None:
        self._slot.__exit__(None, None, None)
        if self._session is None:
            return
        abandoned = isinstance(error, GeneratorExit)
        result, incomplete = ("", abandoned) if error is not None else result_of(output)
        if isinstance(output, _Items) and output.cut:
            result, incomplete = "", True
        self._session.add_tool_event(
            ToolEvent(
                name=self.name,
                status="unknown" if abandoned else "ok" if error is None else "error",
                arguments=self.arguments,
                output="" if error is not None else text_of(output),
                error="" if error is None or abandoned else error_text(error),
                caller=self.caller,
                response_id=self._asked_by,
                result=result,
                incomplete=incomplete,
            )
        )


_WRONG_TOOL = "tool(name={!r}): a name is a non-empty string without '/', which separates the names of a path"


def _checked(name: object, complaint: str) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise DataError(complaint.format(name))
    return name


@overload
def tool(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def tool(*, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None, /, *, name: str = ""
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that reports every run of a function as a `ToolEvent`: `ok`, or `error` if it raises (the exception goes on).

    Works on functions, coroutines, generators and async generators; a stream that its consumer leaves early is `unknown`.
    Model calls that a tool makes inside a component are named `component/tool`. Outside a rollout the function runs as without
    the decorator. `name` defaults to the function's name. Raises `DataError` for a name with a slash.
    """
    if function is None:
        return functools.partial(_tool, _checked(name, _WRONG_TOOL) if name else "")
    return _tool(name, function)


def _tool(name: str, function: Callable[P, R]) -> Callable[P, R]:
    label = _checked(name or getattr(function, "__name__", type(function).__name__), _WRONG_TOOL)
    signature = signature_of(function)

    def scope(call: tuple[tuple[object, ...], dict[str, object]]) -> _Scope:
        if current_attempt() is None:
            return _Scope(_path.get())
        return _ToolScope(label, current_caller(), named_arguments(signature, *call))

    return _wrap(function, scope)


_Call = tuple[tuple[object, ...], dict[str, object]]


def _wrap(function: Callable[P, R], open_scope: Callable[[_Call], _Scope]) -> Callable[P, R]:
    """Run every call of `function` inside a scope of its own, whatever kind of function it is."""
    target = _target(function)
    wrapper: Callable[P, object]
    if inspect.isasyncgenfunction(target):
        wrapper = _wrap_async_generator(cast("Callable[P, AsyncGenerator[object, object]]", function), open_scope)
    elif inspect.isgeneratorfunction(target):
        wrapper = _wrap_generator(cast("Callable[P, Generator[object, object, object]]", function), open_scope)
    elif inspect.iscoroutinefunction(target):
        wrapper = _wrap_coroutine(cast("Callable[P, Awaitable[object]]", function), open_scope)
    else:
        wrapper = _wrap_function(function, open_scope)
    return cast("Callable[P, R]", functools.wraps(function)(wrapper))


def _target(function: Callable[P, R]) -> Callable[P, R]:
    """Return the object whose kind (coroutine function, generator function, ...) a callable has: the callable itself, or its
    class's `__call__`."""
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    return getattr(function, "__call__", function)  # noqa: B004 — an object is as async as its __call__


def _wrap_function(function: Callable[P, object], open_scope: Callable[[_Call], _Scope]) -> Callable[P, object]:
    def call(*args: P.args, **kwargs: P.kwargs) -> object:
        scope = open_scope((args, kwargs))
        scope.wait()
        try:
            with scope:
                result = scope.run(function, *args, **kwargs)
        except BaseException as error:
            scope.ended(error=error)
            raise
        scope.ended(result)
        return result

    return call


def _wrap_coroutine(
    function: Callable[P, Awaitable[object]], open_scope: Callable[[_Call], _Scope]
) -> Callable[P, Awaitable[object]]:
    async def call(*args: P.args, **kwargs: P.kwargs) -> object:
        scope = open_scope((args, kwargs))
        await scope.wait_here()
        try:
            with scope:
                result = await scope.run(function, *args, **kwargs)
        except BaseException as error:
            scope.ended(error=error)
            raise
        scope.ended(result)
        return result

    return call


def _wrap_generator(
    function: Callable[P, Generator[object, object, object]], open_scope: Callable[[_Call], _Scope]
) -> Callable[P, Generator[object, object, object]]:
    def call(*args: P.args, **kwargs: P.kwargs) -> Generator[object, object, object]:
        scope = open_scope((args, kwargs))
        items = _Items()
        generator = scope.run(function, *args, **kwargs)
        step: Callable[[], object] = functools.partial(next, generator)
        scope.wait()
        try:
            while True:
                try:
                    with scope:
                        item = step()
                except StopIteration as stop:
                    scope.ended(items if stop.value is None else stop.value)
                    return stop.value
                _keep(items, item)
                try:
                    step = functools.partial(generator.send, (yield item))
                except GeneratorExit:
                    with scope:
                        generator.close()
                    raise
                except BaseException as thrown:  # noqa: BLE001 — an exception thrown in by the consumer is for the generator
                    step = functools.partial(generator.throw, thrown)
        except BaseException as error:
            scope.ended(error=error)
            raise

    return call


def _wrap_async_generator(
    function: Callable[P, AsyncGenerator[object, object]], open_scope: Callable[[_Call], _Scope]
) -> Callable[P, AsyncGenerator[object, object]]:
    async def call(*args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[object, object]:
        scope = open_scope((args, kwargs))
        items = _Items()
        generator = scope.run(function, *args, **kwargs)
        step: Callable[[], Awaitable[object]] = generator.__anext__
        await scope.wait_here()
        try:
            while True:
                try:
                    with scope:
                        item = await step()
                except StopAsyncIteration:
                    scope.ended(items)
                    return
                _keep(items, item)
                try:
                    step = functools.partial(generator.asend, (yield item))
                except GeneratorExit:
                    with scope:
                        await generator.aclose()
                    raise
                except BaseException as thrown:  # noqa: BLE001 — an exception thrown in by the consumer is for the generator
                    step = functools.partial(generator.athrow, thrown)
        except BaseException as error:
            scope.ended(error=error)
            raise

    return call


class _Items(list[object]):
    """The first items of a stream, for the event's output. `cut` says that there were more."""

    cut = False


def _keep(items: _Items, item: object) -> None:
    """Add an item of a stream, or set `cut` if there are `MAX_TEXT` items already."""
    if len(items) < MAX_TEXT:
        items.append(item)
    else:
        items.cut = True


_asked: tuple[Callable[[], Caller | None], ...] = ()


def ask(identify: Callable[[], Caller | None]) -> None:
    """Register a function that names the current caller. `current_caller` asks the registered functions before any adapter. A
    second registration of the same function does nothing.

    This is for a handler that users register with their framework by hand, and that must work even if its adapter is not
    installed or is disabled. `identify` stays registered for the life of the process, so it must return None for a call that
    the handler does not observe.
    """
    global _asked
    if identify not in _asked:
        _asked = (*_asked, identify)


def current_caller() -> Caller | None:
    """Return the caller of a model call that this thread or task is about to send; None if unknown.

    If no framework names a caller in this thread, the caller is that of the code that started the thread, with the components
    entered since.
    """
    caller, starter = _caller_here(), starter_here()
    if starter is None or is_framework(caller):
        return caller
    around = starter.context.copy().run(current_caller)
    if around is None or not is_framework(around):
        return caller
    since = component_path()[len(starter.components) :]
    agent = since[-1] if since else around.agent
    return replace(around, agent=agent, path=around.path + since, span_id="")


def is_framework(caller: Caller | None) -> bool:
    """Whether a framework's adapter named the caller. False for a caller that `raw` named, the adapter that answers if no other
    does, and for a caller that is unknown because an adapter failed."""
    from lightning.plugins.attached_adapters import failed_adapter

    return caller is not None and caller.framework not in ("", "raw") and not failed_adapter(caller)


def _caller_here() -> Caller | None:
    for identify in _asked:
        try:
            if (caller := identify()) is not None:
                return caller
        except Exception as error:  # noqa: BLE001 — isolates what a user registered
            log_once(f"asked {identify!r}", "%r failed to name the current caller: %r (logged once)", identify, error)
    from lightning.plugins import plugins

    return plugins().identify()
