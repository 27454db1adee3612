"""The operations of a store: each has a signature, and a rule that keeps a project's data from other projects. Plugins bring
further operations to every store.

The invariant: an operation whose arguments do not tell which project it touches cannot be made without a rule. A store without
a plugin's functions refuses the plugin's operations by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import (
    Any,
    Concatenate,
    Final,
    NoReturn,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_type_hints,
)

from lightning.errors import StoreError
from lightning.store.protocol import Store
from lightning.types import Run, Scope

P = ParamSpec("P")
R = TypeVar("R")

# The scopes of tokens that may use an operation. Admins may use every operation.
ADMIN: Final[tuple[Scope, ...]] = ()
TRAIN: Final = (Scope.TRAINER,)
RUN: Final = (Scope.RUNNER, Scope.TRAINER)
LOOK: Final = (Scope.VIEWER, Scope.TRAINER)
ANY: Final = (Scope.VIEWER, Scope.RUNNER, Scope.TRAINER)

OWNED: Final = {
    *("run", "rollout", "rollouts", "attempts", "transitions", "spans"),
    *("lease", "record", "worker"),
}
"""Arguments that name, or are, something of one project. By these arguments a project's data is kept from other projects."""
Rule: TypeAlias = "Callable[[Store, str, Operation, dict[str, Any]], Awaitable[Any]]"
"""Does an operation for the holder of a project's token. `rule(store, project, operation, arguments)` checks the arguments,
awaits `operation(store, **arguments)` and leaves other projects' data out of the answer. It raises the same `UnseenError` for
another project's data as for data that never existed."""


class UnseenError(StoreError):
    """The requested data does not exist, or belongs to another project."""


async def for_admins(store: Store, project: str, operation: Operation, arguments: dict[str, Any]) -> NoReturn:
    """The rule of an operation that only admins may use: raise `StoreError`."""
    raise StoreError(
        f"{operation.name} is for admins of all projects, and this token is of project {project!r}. Ask whoever runs the "
        "server for: lightning token create admin --project '*'"
    )


@dataclass(frozen=True, slots=True)
class HttpLine:
    """How an operation is called over HTTP, and which tokens may call it. Servers read this; a store does not.

    `route` is a method and a path with arguments in braces, such as `GET /rollouts/{rollout}/notes`. `body` names the argument
    that is the whole body, and `answer` the field that holds the answer; either may be a type to send instead. `query` explains
    the parameters of the query. `cursor` names the fields that tell one item of a list from all others. `missing` is the cure
    if nothing is found. With `empty` a caller who asks for another project's data gets an empty answer; otherwise the call is
    refused.
    """

    route: str
    scopes: tuple[Scope, ...]
    doc: str = ""
    body: str | type = ""
    answer: str | type = ""
    cursor: Sequence[str] = ()
    empty: bool = False
    missing: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    unsent: Sequence[str] = ()
    answer_seconds: float | None = None


class Operation:
    """One operation. `function` gives its signature, with `self` for the store.

    `owned` is the rule that keeps projects apart; it is needed if no argument is named in `OWNED`. `group` is the group of the
    plugin that brings the operation, None for the store's own operations. `line` is the operation over HTTP.
    """

    group: OperationGroup | None = None

    def __init__(
        self, function: Callable[..., Any], line: HttpLine | None = None, *, owned: Rule | None = None
    ) -> None:
        self.name: str = function.__name__
        self.function, self.line, self.owned = function, line, owned
        whole = inspect.signature(function)
        self.signature = whole.replace(parameters=list(whole.parameters.values())[1:])
        kinds = self.signature.parameters.values()
        self._defaults = {part.name: part.default for part in kinds if part.default is not part.empty}
        self._positional = tuple(part.name for part in kinds if part.kind is not part.KEYWORD_ONLY)
        named = owned is not None or not OWNED.isdisjoint(self.signature.parameters)
        if not named and get_type_hints(function)["return"] != list[Run]:  # which are cut down by what each says itself
            raise TypeError(
                f"the operation {self.name} names nothing of a project: give it an argument of {sorted(OWNED)}, or a rule of "
                "its own: owned=RULE, owned=for_admins where no project's token may use it"
            )

    def __repr__(self) -> str:
        return f"Operation({self.name})"

    def __call__(self, store: Any, /, *given: Any, **named: Any) -> Any:
        """Do the operation on a store: `operation(store, ...)` is `store.operation(...)`."""
        return self.__get__(store)(*given, **named)

    def __get__(self, store: Any, owner: type | None = None) -> Any:
        """Return the operation as a method of a store; the operation itself if it is read from the class."""
        if store is None:
            return self

        async def call(*given: Any, **named: Any) -> Any:
            arguments = self._defaults | dict(zip(self._positional, given, strict=False)) | named
            if len(arguments) != len(self.signature.parameters) or len(given) > len(self._positional):
                self.signature.bind(*given, **named)  # says what is missing or unknown
            return await store.call(self, arguments)

        call.__name__, call.__doc__ = self.name, self.function.__doc__
        return call

    def on(self, store: Any) -> Callable[..., Awaitable[Any]]:
        """Return the function that does the operation on a store: the store's own method, or a plugin's operation bound to the
        store."""
        does: Callable[..., Awaitable[Any]] = getattr(store, self.name) if self.group is None else self.__get__(store)
        return does


class OperationGroup:
    """The operations that a plugin brings to every store, registered by `register_operations` under the group's `name`.

    `parts` gives the plugin's functions for each kind of store as `package.module:NAME`: for `sql` a
    `lightning.store.relational.transaction.SqlPart`, for `redis` a mapping of functions by the operations' names. The module is
    imported when a store of that kind is first asked. A store over HTTP needs no part. `distribution` is the package that
    brings the group.
    """

    def __init__(
        self, name: str, operations: Sequence[Callable[..., Any]], *, parts: Mapping[str, str], distribution: str
    ) -> None:
        self.name, self.parts, self.distribution = name, parts, distribution
        self.operations = tuple(cast("Sequence[Operation]", operations))
        for one in self.operations:
            if one.owned is None and "key" in one.signature.parameters:
                raise TypeError(
                    f"the operation {one.name} has an argument `key`, which means a key of the state: give it another name, or "
                    "the operation a rule of its own (owned=)"
                )
            one.group = self

    def __repr__(self) -> str:
        return f"OperationGroup({self.name!r})"

    def part(self, operation: Operation, kind: str, store: object) -> Any:
        """Return the plugin's part for a kind of store. Raises `StoreError` if the plugin has none for that kind."""
        place = self.parts.get(kind)
        if place is None:
            known = " or ".join(self.parts) or "no store but one over HTTP"
            raise StoreError(
                f"{store!r} cannot do {operation.name}: the plugin that brings {self.name!r} has nothing for a store of the "
                f"kind {kind!r}. Use {known}, or a release of {self.distribution} that has it"
            )
        module, _, name = place.partition(":")
        return getattr(import_module(module), name)

    def function(self, operation: Operation, functions: Mapping[str, Any], store: object) -> Any:
        """Return the function of an operation from the functions of a part. Raises `StoreError` if there is none."""
        found = functions.get(operation.name)
        if found is None:
            raise StoreError(
                f"{store!r} cannot do {operation.name}: the plugin that brings {self.name!r} has no function for it here. "
                f"Install another release of {self.distribution}"
            )
        return found


def operation(
    function: Callable[Concatenate[Any, P], Awaitable[R]],
    route: str = "",
    scopes: tuple[Scope, ...] = ADMIN,
    *,
    owned: Rule | None = None,
    **line: Any,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Make an `Operation` of a function. In a class with `async call(operation, arguments)` it is a method; in a module it is a
    function that is called with a store. `route`, `scopes` and `line` are the fields of its `HttpLine`. The store's own
    operations have no `route` here, because the server has their lines."""
    made: Any = Operation(function, HttpLine(route, scopes, **line) if route else None, owned=owned)
    return cast("Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]", made)


def operations_of(table: type) -> tuple[Operation, ...]:
    """Return the operations that a class defines, in order."""
    return tuple(entry for entry in vars(table).values() if isinstance(entry, Operation))


class Operations:
    """A `Store` without `open`, `close` and `watch`. Each method is one `call`, which a subclass implements."""

    list_runs = operation(Store.list_runs)
    put_run = operation(Store.put_run)
    get_run = operation(Store.get_run)
    list_rollouts = operation(Store.list_rollouts)
    count_rollouts = operation(Store.count_rollouts)
    create_rollouts = operation(Store.create_rollouts)
    get_rollout = operation(Store.get_rollout)
    lease = operation(Store.lease)
    release = operation(Store.release)
    renew = operation(Store.renew)
    complete = operation(Store.complete)
    next_seq = operation(Store.next_seq)
    transitions = operation(Store.transitions)
    append = operation(Store.append)
    transitions_of = operation(Store.transitions_of)
    attempts_of = operation(Store.attempts_of)
    steps = operation(Store.steps)
    last_step = operation(Store.last_step)
    commit_step = operation(Store.commit_step)
    metrics = operation(Store.metrics)
    log_metrics = operation(Store.log_metrics)
    get_state = operation(Store.get_state)
    put_state = operation(Store.put_state)
    keep_state = operation(Store.keep_state)

    async def call(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        """Do an operation; `arguments` are all of its arguments by name."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it calls {operation.name}")
