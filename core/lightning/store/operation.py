"""What an operation of a store is: a signature, and a rule that says whose its things are. And how a plugin brings operations
of its own to every store.

The invariant: an operation that would not say what it touches cannot be made. A store that has no part for a plugin's
operations says so by name.
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

# Who may use an operation, beside admins, who may use every one.
ADMIN: Final[tuple[Scope, ...]] = ()
TRAIN: Final = (Scope.TRAINER,)
RUN: Final = (Scope.RUNNER, Scope.TRAINER)
LOOK: Final = (Scope.VIEWER, Scope.TRAINER)
ANY: Final = (Scope.VIEWER, Scope.RUNNER, Scope.TRAINER)

OWNED: Final = {
    *("run", "rollout", "rollouts", "attempts", "transitions", "spans"),
    *("lease", "record", "worker"),
}
"""Arguments that name something of a project, or are it: by them a project is kept from another's."""
Rule: TypeAlias = "Callable[[Store, str, Operation, dict[str, Any]], Awaitable[Any]]"
"""Does an operation for the holder of a project's token: `rule(store, project, operation, arguments)` looks at the arguments,
awaits `operation(store, **arguments)` and leaves out of the answer what is another project's. It raises `UnseenError` for what
is another's exactly as for what never was."""


class UnseenError(StoreError):
    """What is asked for is not there, or is another project's."""


async def for_admins(store: Store, project: str, operation: Operation, arguments: dict[str, Any]) -> NoReturn:
    """The rule of an operation that no project's token may use."""
    raise StoreError(
        f"{operation.name} is for admins of all projects, and this token is of project {project!r}. Ask whoever runs the "
        "server for: lightning token create admin --project '*'"
    )


@dataclass(frozen=True, slots=True)
class HttpLine:
    """Where an operation is over HTTP, who may use it, and how it travels. What serves it reads it; a store does not.

    `route` is a method and a path with arguments in braces, such as `GET /rollouts/{rollout}/notes`. `body` and `answer` name
    the argument that is the whole body and the field that the answer is in, or are types that travel. `query` says what the
    parameters of the query mean, `cursor` what no other item of a list has, `missing` the cure where there is nothing.
    `empty`: a caller who asks for what is not its project's gets what there is of nothing; otherwise it is refused.
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
    """One operation: `function` is its signature, with `self` for the store.

    `owned` is the rule by which a project is kept from another's, where the arguments' names do not say it; `group` is the
    plugin's that brings the operation, None for the store's own; `line` is how it is over HTTP.
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
        """As the method of a class is called."""
        return self.__get__(store)(*given, **named)

    def __get__(self, store: Any, owner: type | None = None) -> Any:
        """The method of a store; the operation itself where it is asked of the class."""
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
        """What does it on a store: the store's own method, for a plugin's operation its `call`."""
        does: Callable[..., Awaitable[Any]] = getattr(store, self.name) if self.group is None else self.__get__(store)
        return does


class OperationGroup:
    """The operations that a plugin brings to every store, registered by `register_operations` under the group's `name`.

    `parts` says for each kind of store where the plugin's part for it stands, as `package.module:NAME`: `sql` is a
    `lightning.store.relational.transaction.SqlPart`, `redis` a mapping of functions by the operations' names. It is imported
    when such a store is first asked. A store over HTTP needs none. `distribution` is what must be installed where the group is
    not.
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
        """The plugin's part for a kind of store. Raises `StoreError` where the plugin has none."""
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
        """What does one of the operations, of a part's functions. Raises `StoreError` where the part has none."""
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
    """An `Operation` as a method of the class that it stands in, which has `async call(operation, arguments)`; or as a function
    of a module, which is called with a store. `line` are further fields of its `HttpLine`; the lines of the store's own
    operations, which have no `route` here, stand where the store is served."""
    made: Any = Operation(function, HttpLine(route, scopes, **line) if route else None, owned=owned)
    return cast("Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]", made)


def operations_of(table: type) -> tuple[Operation, ...]:
    """The operations that stand in a class, in order."""
    return tuple(entry for entry in vars(table).values() if isinstance(entry, Operation))


class Operations:
    """A `Store` but for `open`, `close` and `watch`, each of whose methods is one `call` of what derives from this."""

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
        """Do one operation with all of its arguments, by name."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it calls {operation.name}")
