"""Tools for writing an adapter of a framework: a check of the framework's version, a table of exceptions, replacing methods
that have no hook, one attachment for all installations, the adapter's hooks; and scopes, which track the running agents, tools
and model calls of a framework that does not track them itself.

The invariant: nothing of the framework is imported here, and every replacement can be undone. A scope is visible to the code
that runs inside it, in its thread or task and in threads that are started there; to no other code, and to none once it has
ended. So a name never outlives the code that it was given for.
"""

from __future__ import annotations

import functools
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
from lightning.installation import version_of
from lightning.instrument.components import component_path
from lightning.instrument.last_call import known_as, starter, starter_here
from lightning.types import Caller, StepState, ToolEvent

User = TypeVar("User")
Emit: TypeAlias = Callable[[Any], None]


def check_supported(supported: Mapping[str, tuple[str, str]]) -> None:
    """Raise `PluginError`, with the command that cures it, if an installed distribution is outside its range of versions.

    `supported` maps a distribution to the first version that works and the first that is not known to work, such as
    `("1.2", "2")`. Only the numbers of a release count: `2.0rc1` is 2.0. A distribution that is not installed, or has no
    metadata, is not checked.
    """
    for distribution, (low, high) in supported.items():
        if (installed := version_of(distribution)) is None:
            continue
        if not _numbers(low) <= _numbers(installed) < _numbers(high):
            wanted = f"{distribution}>={low},<{high}"
            raise PluginError(
                f"{distribution} {installed} is installed, but this adapter works with {wanted}. "
                f"Run: pip install '{wanted}'"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, `1.10.0rc1` as (1, 10); zeros at the end are dropped, so that 2 equals 2.0."""
    release = re.match(r"(?:\d+!)?v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in release[1].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def by_type(error: BaseException, table: Mapping[str, str]) -> str | None:
    """Return the table's entry for the type of an error, or for its nearest base type; None if the table has neither.

    Types are written as the package and the class: `openai.LengthFinishReasonError`, whichever module of the package has it.
    """
    names = (f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(error).__mro__)
    return next((table[name] for name in names if name in table), None)


def replace_method(owner: type | ModuleType, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    """Replace a class's method, or a module's function, by `instead`; return the undo. `instead` is called with the original
    method, followed by the arguments of the call. The replacement keeps the method's name and docstring.

    The original is passed as the class binds it, so a class method is bound to its class: a wrapper by another library may need
    that. The replacement is a coroutine function or an asynchronous generator function if `instead` is one.
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
            return  # another library has replaced the method since
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


class ReplacedMethods:
    """A collection of replaced methods. A method is replaced once, even if it is asked for several times. Safe to use from any
    thread."""

    def __init__(self) -> None:
        self._undos: dict[tuple[object, str], Callable[[], None]] = {}
        self._lock = threading.Lock()

    def replace(self, owner: type | ModuleType, name: str, instead: Callable[..., Any]) -> None:
        """Replace a method as `replace_method` does; do nothing if it was replaced here already."""
        with self._lock:
            if (owner, name) not in self._undos:
                self._undos[owner, name] = replace_method(owner, name, instead)

    def put_back(self) -> None:
        """Restore all replaced methods."""
        with self._lock:
            while self._undos:
                self._undos.popitem()[1]()

    def __len__(self) -> int:
        return len(self._undos)


class Attachment(Generic[User]):
    """An attachment to a library that all of its users share: `attach` is called when the first user comes and returns the
    undo, which is called when the last user goes. The `lock` is held during both calls."""

    def __init__(self, attach: Callable[[], Callable[[], None]]) -> None:
        self._attach = attach
        self._detach: Callable[[], None] | None = None
        self.users: list[User] = []
        self.lock = threading.RLock()

    def add(self, user: User) -> Callable[[], None]:
        """Add a user, and attach if it is the first; return the function that removes the user, of which only the first call
        counts."""
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
    """The installations of an adapter, each an `emit` function; `lightning_install` returns `add(emit)`. Reports go to the
    newest installation alone, so that each run of a tool is reported once; without an installation they go to `otherwise`."""

    def __init__(self, attach: Callable[[], Callable[[], None]], otherwise: Emit | None = None) -> None:
        super().__init__(attach)
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        return bool(self.users)

    def tell(self, report: ToolEvent | StepState) -> None:
        """Report a tool run or a state to the newest installation, or to `otherwise` if there is none."""
        emit = self.users[-1] if self.users else self._otherwise
        if emit is not None:
            emit(report)

    @contextmanager
    def reported(
        self, run: ToolEvent, error_text: Callable[[Exception], str] = repr
    ) -> Iterator[Callable[[object], None]]:
        """Report the tool run that the block makes, when the block ends. The block gets a function and calls it with the tool's
        output. An exception reports an error, with the text by `error_text`, and goes on."""
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

    `supported` is the argument of `check_supported`, and `identify` returns the caller of the model, None if unknown.
    `policy_fault` returns, for an exception that is the model's own fault, its cause (`lightning.runner.outcomes.CAUSES`), else
    None; by default always None.
    """

    supported: Mapping[str, tuple[str, str]]
    installations: Installations
    identify: Callable[[], Caller | None]
    policy_fault: Callable[[BaseException], str | None] = lambda error: None

    @hookimpl
    def lightning_install(self, emit: Emit) -> Callable[[], None]:
        """Attach to the framework and return the undo. Raises `PluginError` if the framework's version is out of range."""
        check_supported(self.supported)
        return self.installations.add(emit)

    @hookimpl(tryfirst=True)  # before the adapter that names callers by OpenTelemetry's spans
    def lightning_identify(self) -> Caller | None:
        """Return the caller of the model, or None if the framework does not know it."""
        return self.identify()

    @hookimpl
    def lightning_policy_fault(self, error: BaseException) -> str | None:
        """Return the cause of a fault of the model that an exception of the framework stands for, or None."""
        return self.policy_fault(error)


def in_words(value: object) -> str:
    """Return `str` of a value, or the name of its class if that raises."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 — isolates the user's class
        return type(value).__name__


T = TypeVar("T")

Kind = Literal["agent", "tool", "call"]


class ActiveScope:
    """A running agent, tool or model call. `around` is the scope that it runs in, None for an outermost one; `subject` is the
    framework's own object, if the adapter gives it."""

    def __init__(self, kind: Kind, name: str, subject: object, around: ActiveScope | None) -> None:
        self.kind, self.name, self.subject, self.around = kind, name, subject, around
        self.id = uuid.uuid4().hex
        self.is_open = True
        self._components = component_path()
        path = around.path if around else self._components
        self._path = (*path, name) if name and kind != "call" and path[-1:] != (name,) else path

    @property
    def path(self) -> tuple[str, ...]:
        """The names from the outermost scope to this one, followed by the `lightning.component`s entered since it began."""
        now, known = component_path(), len(self._components)
        return self._path + (now[known:] if now[:known] == self._components else ())

    def outwards(self) -> Iterator[ActiveScope]:
        """Yield this scope, the scope around it, and so on outwards."""
        scope: ActiveScope | None = self
        while scope is not None:
            yield scope
            scope = scope.around


class Scopes:
    """The running agents, tools and model calls of one framework, as its adapter reports them.

        scopes = Scopes("acme")

        with scopes.inside("agent", "writer"):      # also around an await
            ...
        scopes.caller()                             # for `lightning_identify`

    A scope with the same name as the one around it adds nothing to the path; nor does a scope without a name, or a model call.
    """

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self._innermost: ContextVar[ActiveScope | None] = ContextVar(f"lightning_{framework}", default=None)

    def here(self) -> ActiveScope | None:
        """Return the innermost scope that this code runs in; in a thread without one, the scope of the code that started the
        thread. None if there is none."""
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
            with known_as(self._innermost, scope):
                yield scope
        finally:
            scope.is_open = False

    def each(
        self, items: Generator[T, None, object], kind: Kind, name: str = "", subject: object = None
    ) -> Generator[T, None, object]:
        """Return a generator of the same items. `items` runs inside one new scope, but the code that iterates, between two
        items, does not."""
        return self._each(items, ActiveScope(kind, name, subject, self.here()))

    def _each(self, items: Generator[T, None, object], scope: ActiveScope) -> Generator[T, None, object]:
        try:
            while True:
                with known_as(self._innermost, scope):
                    try:
                        item = next(items)
                    except StopIteration as stop:
                        return stop.value
                yield item
        finally:
            with known_as(self._innermost, scope):
                items.close()
            scope.is_open = False

    def caller(self, scope: ActiveScope | None = None) -> Caller | None:
        """Return the caller of a model call from a scope (None: the innermost scope here); None if no agent is running.

        Only the scope of a model call gives a span id, because code of an agent or a tool may run another framework's agents.
        """
        scope = scope or self.here()
        path = scope.path if scope else ()
        if scope is None or not path:
            return None
        if scope.kind != "call":
            return Caller(path[-1], path, "", scope.id, self.framework)
        return Caller(path[-1], path, scope.id, scope.around.id if scope.around else "", self.framework)
