"""What adapters need of a framework: whether its version is one that they were made for, what an exception of it is, methods of
it replaced where it has no hook, one attachment for all installations, the hooks themselves; and, where the framework does not
say so itself, which agents, tools and model calls are under way.

The invariant: nothing of the framework is imported here, and what was replaced can be put back. A scope is seen by the code
that runs inside it, in its thread or task and in threads that are started there; by no other, and by none once it has ended.
So a name never outlives the code that it was given for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from lightning.errors import PluginError
from lightning.hooks import hookimpl
from lightning.instrument.components import component_path
from lightning.instrument.last_call import starter, starter_here
from lightning.types import Caller, StepState, ToolEvent

User = TypeVar("User")
Emit: TypeAlias = Callable[[Any], None]


def check_supported(supported: Mapping[str, tuple[str, str]]) -> None:
    """Raise `PluginError`, with the command that cures it, for an installed distribution outside its range.

    `supported` is distribution -> (first version that works, first that is not known to), such as `("1.2", "2")`. Only the
    numbers of a release count: `2.0rc1` is 2.0. What is not installed, or has no metadata, is not checked.
    """
    for distribution, (low, high) in supported.items():
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not _numbers(low) <= _numbers(installed) < _numbers(high):
            wanted = f"{distribution}>={low},<{high}"
            raise PluginError(
                f"{distribution} {installed} is installed, but this adapter works with {wanted}. "
                f"Run: pip install '{wanted}'"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """`1.10.0rc1` as (1, 10); zeros at the end do not count, so that 2 equals 2.0."""
    release = re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in release[1].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def by_type(error: BaseException, table: Mapping[str, str]) -> str | None:
    """The table's word for the type of an error, or for the nearest type that it is derived from; None where it has none.

    Types are written as the package and the class: `openai.LengthFinishReasonError`, whichever module of the package has it.
    """
    names = (f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__)
    return next((table[name] for name in names if name in table), None)


def replace_method(owner: type | ModuleType, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """Put `instead`, under the method's name and with its description, in the place of a class's method, or of a module's
    function; returns the undo. It is called with that method, and then with what the method would have been called with.

    A method is given as its class binds it: what another library has put there may need that to find its instance. So `instead`
    gets a class method with its class. The method is a coroutine function, or one of an asynchronous generator, where `instead`
    is.
    """
    inherited, original = name not in vars(owner), vars(owner).get(name)
    found = getattr(owner, name)

    @functools.wraps(found)
    def call(*args: Any, **more: Any) -> Any:
        return instead(found, *args, **more)

    @functools.wraps(found)
    async def call_async(*args: Any, **more: Any) -> Any:
        return await instead(found, *args, **more)

    @functools.wraps(found)
    async def items(*args: Any, **more: Any) -> AsyncIterator[Any]:
        async with aclosing(instead(found, *args, **more)) as made:
            async for item in made:
                yield item

    wrapper: Callable[..., Any] = call
    if inspect.iscoroutinefunction(instead):
        wrapper = call_async
    elif inspect.isasyncgenfunction(instead):
        wrapper = items
    ours = staticmethod(wrapper) if inspect.ismethod(found) else wrapper
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner)[name] is not ours:
            return  # somebody else stands before it now
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


class ReplacedMethods:
    """Methods that were replaced, each once however often it is asked for. Safe to use from any thread."""

    def __init__(self) -> None:
        self._undos: dict[tuple[object, str], Callable[[], None]] = {}
        self._lock = threading.Lock()

    def replace(self, owner: type | ModuleType, name: str, instead: Callable[..., Any]) -> None:
        """See `replace_method`."""
        with self._lock:
            if (owner, name) not in self._undos:
                self._undos[owner, name] = replace_method(owner, name, instead)

    def put_back(self) -> None:
        """Put back all of them."""
        with self._lock:
            while self._undos:
                self._undos.popitem()[1]()

    def __len__(self) -> int:
        return len(self._undos)


class Attachment(Generic[User]):
    """What is attached to a library once, for all of its users: `attach` is called for the first one and returns the undo,
    which is called with the last. The `lock` is held meanwhile."""

    def __init__(self, attach: Callable[[], Callable[[], None]]) -> None:
        self._attach = attach
        self._detach: Callable[[], None] | None = None
        self.users: list[User] = []
        self.lock = threading.RLock()

    def add(self, user: User) -> Callable[[], None]:
        """Attach for one more; returns the undo, of which only the first call counts."""
        with self.lock:
            self.users.append(user)
            try:
                self._detach = self._detach or self._attach()
            except BaseException:
                self.users.remove(user)
                raise
        added = [user]

        def undo() -> None:
            with self.lock:
                if added:
                    self.users.remove(added.pop())
                if not self.users and self._detach is not None:
                    detach, self._detach = self._detach, None
                    detach()

        return undo


class Installations(Attachment[Emit]):
    """The installations of an adapter: `add` is what `lightning_install` returns. The newest of them hears of what happens, so
    that each run of a tool is reported once; without any, `otherwise` does."""

    def __init__(self, attach: Callable[[], Callable[[], None]], otherwise: Emit | None = None) -> None:
        super().__init__(attach)
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        return bool(self.users)

    def tell(self, report: ToolEvent | StepState) -> None:
        """Report a tool's run, or a state."""
        emit = self.users[-1] if self.users else self._otherwise
        if emit is not None:
            emit(report)

    @contextmanager
    def reported(
        self, run: ToolEvent, error_text: Callable[[Exception], str] = repr
    ) -> Iterator[Callable[[object], None]]:
        """Report a tool's run that the block makes: its output is what the function is given that the block gets."""
        outputs: list[object] = []
        try:
            yield outputs.append
            run = replace(run, status="ok", output=in_words(outputs[0]))
        except Exception as error:
            run = replace(run, status="error", error=error_text(error))
            raise
        finally:
            self.tell(run)


@dataclass(eq=False)
class FrameworkAdapter:
    """The hooks of a framework's adapter, for its entry point: `"acme.acme" = "lightning_acme:adapter"`.

    `supported` is what `check_supported` takes, and `identify` says who is calling. `policy_fault` tells of exceptions that are
    the model's own fault; by default no exception of the framework's is.
    """

    supported: Mapping[str, tuple[str, str]]
    installations: Installations
    identify: Callable[[], Caller | None]
    policy_fault: Callable[[BaseException], str | None] = lambda error: None

    @hookimpl
    def lightning_install(self, emit: Emit) -> Callable[[], None]:
        """Attach to the framework. Raises `PluginError` for versions out of range."""
        check_supported(self.supported)
        return self.installations.add(emit)

    @hookimpl(tryfirst=True)  # before the spans of whoever instruments the framework as well
    def lightning_identify(self) -> Caller | None:
        """Who is calling, if the framework knows."""
        return self.identify()

    @hookimpl
    def lightning_policy_fault(self, error: BaseException) -> str | None:
        """What an exception of the framework's tells of the model."""
        return self.policy_fault(error)


def in_words(value: object) -> str:
    """A value as its class writes it; the name of a class that cannot."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 — isolates the user's class
        return type(value).__name__


T = TypeVar("T")

Kind = Literal["agent", "tool", "call"]


class ActiveScope:
    """An agent, a tool or a model call that is under way. `subject` is the framework's own object, if the adapter keeps it."""

    def __init__(self, kind: Kind, name: str, subject: object, around: ActiveScope | None) -> None:
        self.kind, self.name, self.subject, self.around = kind, name, subject, around
        self.id = uuid.uuid4().hex
        self.is_open = True
        self._components = component_path()
        path = around.path if around else self._components
        self._path = (*path, name) if name and kind != "call" and path[-1:] != (name,) else path

    @property
    def path(self) -> tuple[str, ...]:
        """The names from the outermost to its own, and behind them the `lightning.component`s entered since it began."""
        now, known = component_path(), len(self._components)
        return self._path + (now[known:] if now[:known] == self._components else ())

    def outwards(self) -> Iterator[ActiveScope]:
        """It, and what is around it."""
        scope: ActiveScope | None = self
        while scope is not None:
            yield scope
            scope = scope.around


class Scopes:
    """The scopes of one framework's adapter.

        scopes = Scopes("acme")

        with scopes.inside("agent", "writer"):      # also around an await
            ...
        scopes.caller()                             # what `lightning_identify` returns

    A name that a scope repeats stands in the path once; a scope without a name, and a model call, do not stand in it.
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self._innermost: ContextVar[ActiveScope | None] = ContextVar(f"lightning_{framework}", default=None)

    def here(self) -> ActiveScope | None:
        """The innermost scope that this code runs in; in a thread, that of the code which started it."""
        scope, around = self._innermost.get(), starter_here()
        while scope is None and around is not None:
            scope, around = around.context.get(self._innermost), around.context.get(starter)
        while scope is not None and not scope.is_open:
            scope = scope.around
        return scope

    @contextmanager
    def inside(self, kind: Kind, name: str = "", subject: object = None) -> Iterator[ActiveScope]:
        """Run the block in a new scope."""
        scope = ActiveScope(kind, name, subject, self.here())
        try:
            with self._seen(scope):
                yield scope
        finally:
            scope.is_open = False

    def each(
        self, items: Generator[T, None, object], kind: Kind, name: str = "", subject: object = None
    ) -> Generator[T, None, object]:
        """The items of a generator, each made inside a new scope, which whoever iterates does not see between them."""
        return self._each(items, ActiveScope(kind, name, subject, self.here()))

    def _each(self, items: Generator[T, None, object], scope: ActiveScope) -> Generator[T, None, object]:
        try:
            while True:
                with self._seen(scope):
                    try:
                        item = next(items)
                    except StopIteration as stop:
                        return stop.value
                yield item
        finally:
            with self._seen(scope):
                items.close()
            scope.is_open = False

    @contextmanager
    def _seen(self, scope: ActiveScope) -> Iterator[None]:
        # What was there, not what is around: a pool's thread serves other rollouts when this one's work is done.
        before = self._innermost.get()
        self._innermost.set(scope)
        try:
            yield
        finally:
            self._innermost.set(before)

    def caller(self, scope: ActiveScope | None = None) -> Caller | None:
        """Who calls from a scope, by default from here; None where no agent is under way.

        Only a model call has a span id: code of an agent or a tool may run another framework's agents.
        """
        scope = scope or self.here()
        path = scope.path if scope else ()
        if scope is None or not path:
            return None
        if scope.kind != "call":
            return Caller(path[-1], path, "", scope.id, self.framework)
        return Caller(path[-1], path, scope.id, scope.around.id if scope.around else "", self.framework)
