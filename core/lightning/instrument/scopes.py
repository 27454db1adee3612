"""Which agents, tools and model calls are under way, for the adapter of a framework that does not say so itself.

The invariant: a scope is seen by the code that runs inside it, in its thread or task and in threads that are started there; by
no other, and by none once it has ended. So a name never outlives the code that it was given for.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeVar

from lightning.instrument.components import component_path
from lightning.instrument.starters import starter, starter_here
from lightning.types import Caller

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
