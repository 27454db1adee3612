"""What an operation of a store is: a method of `Store`, where it is over HTTP, who may use it, and how it travels; and how a
plugin brings operations of its own to every store.

The invariant: everything that client, server and project check must know of an operation is derived from its signature and its
one line in `store.operations`, or in a plugin's table; an operation that would not say what it touches cannot be made. A store
that has no part for a plugin's operations says so by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
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
    get_args,
    get_origin,
    get_type_hints,
)

from lightning.errors import StoreError
from lightning.store import json_codec
from lightning.store.protocol import Alias, Page, Store
from lightning.types import Resource, Rollout, Run, Scope

P = ParamSpec("P")
R = TypeVar("R")

REQUIRED: Final = inspect.Parameter.empty
PAGING: Final = ("after", "cursor", "limit")
"""Arguments that say which part of a list is wanted."""
RESOURCES: Final = {"name", "resource", "key"}
"""Arguments that name a resource, are one, or are a key of the state: such words mean something else to a plugin."""
OWNED: Final = {
    *("run", "rollout", "rollouts", "attempts", "transitions", "spans"),
    *("lease", "record", "name", "resource", "worker"),
}
"""Arguments that name something of a project, or are it: by them a project is kept from another's."""
FILTERED: Final = (Run, Resource, Alias)
"""What belongs to a project by what it says itself, so that a list of all can be cut down to a project's."""
QUERY: Final[Mapping[str, str]] = {
    "project": "Runs of this project only.",
    "split": "Of this split only: `train` or the name of an evaluation.",
    "step": "Sampled for this optimizer step only.",
    "status": "With this status only.",
    "attempt": "The attempt; by default the rollout's current one.",
    "run": "The run; empty for what belongs to the whole store, which is for admins.",
    "name": "Of this resource only.",
}
"""What parameters of a query mean, where an operation does not say."""
ANSWER_SECONDS: Final = 90.0
"""Without a byte from a server for so long, it counts as gone."""
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
class Argument:
    """An argument of an operation. `default` is `REQUIRED` where it must be given."""

    name: str
    hint: Any
    default: Any = REQUIRED


class Operation:
    """One operation. `path` has arguments in braces; `query` and `body` have the others, but for `once` and for which part of
    a list is wanted.

    `told` says what the parameters of the query mean. `sent` and `answered` are the types that travel, `item` is that of a
    list's items. `empty` says that a caller who asks for what is not its project's gets what there is of nothing; otherwise it
    is refused. `owned` is the rule by which a project is kept from another's, where the arguments' names do not say it; `group`
    is the plugin's that brings the operation, None for the store's own.
    """

    group: OperationGroup | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        route: str,
        scopes: tuple[Scope, ...],
        *,
        doc: str = "",
        body: str | type = "",
        answer: str | type = "",
        cursor: Sequence[str] = (),
        empty: bool = False,
        missing: str = "",
        query: Mapping[str, str] = QUERY,
        unsent: Sequence[str] = (),
        answer_seconds: float = ANSWER_SECONDS,
        owned: Rule | None = None,
    ) -> None:
        self.name: str = function.__name__
        self.owned = owned
        self.scopes, self.cursor, self.empty, self.missing = scopes, tuple(cursor), empty, missing
        self.answer_seconds = answer_seconds
        self.doc = doc or " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        self.method, _, path = route.partition(" ")
        self.path, _, listed = path.partition("?")
        self.signature = _bare(inspect.signature(function))
        kinds = self.signature.parameters.values()
        self._defaults = {part.name: part.default for part in kinds if part.default is not REQUIRED}
        self._positional = tuple(part.name for part in kinds if part.kind is not part.KEYWORD_ONLY)
        hints = get_type_hints(function, localns=json_codec.LOCAL)
        self.result = hints["return"]
        found = {name: Argument(name, hints[name], part.default) for name, part in self.signature.parameters.items()}
        self.once = found.get("once")
        lists = get_origin(self.result) is list and not answer and self.method == "GET"
        self.item = Rollout if self.result is Page else get_args(self.result)[0] if lists else None
        self.pages_itself = self.item is not None and not found.keys().isdisjoint(PAGING)
        left_out = {"once", *unsent, *(PAGING if self.item is not None else ())}
        in_path = re.findall(r"{(\w+)}", self.path)
        rest = [part for name, part in found.items() if name not in left_out and name not in in_path]
        self.in_path = tuple(found[name] for name in in_path if name in found)
        self.query = tuple(part for part in rest if self.method in ("GET", "DELETE") or part.name in listed.split("&"))
        self.body = tuple(part for part in rest if part not in self.query)
        self.whole_body = body if isinstance(body, str) else ""
        self.field = answer if isinstance(answer, str) else ""
        self.is_optional = type(None) in get_args(self.result)
        self.told = {part.name: query.get(part.name) or QUERY.get(part.name, "") for part in self.query}
        self.sent = body if isinstance(body, type) else self._sent()
        self.answered = answer if isinstance(answer, type) else self._answered()
        if owned is None and found.keys().isdisjoint(OWNED) and self._listed() not in FILTERED:
            raise TypeError(
                f"the operation {self.name} names nothing of a project: give it an argument of {sorted(OWNED)}, or a rule of "
                "its own: owned=RULE, owned=for_admins where no project's token may use it"
            )

        if not all(self.told.values()):
            raise TypeError(
                f"the operation {self.name} does not say what its parameters mean: give it query={self.told}"
            )

    def __repr__(self) -> str:
        return f"Operation({self.name}: {self.method} {self.path})"

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

        call.__name__, call.__doc__ = self.name, self.doc
        return call

    def on(self, store: Any) -> Callable[..., Awaitable[Any]]:
        """What does it on a store: the store's own method, for a plugin's operation its `call`."""
        does: Callable[..., Awaitable[Any]] = getattr(store, self.name) if self.group is None else self.__get__(store)
        return does

    @property
    def is_in_parts(self) -> bool:
        """Whether a long request may be several: items to be kept, of which the answer is the number."""
        return self.result is int and len(self.body) == 1 and _is_sequence(self.body[0].hint)

    @property
    def is_read_in_parts(self) -> bool:
        """Whether an answer may have only what is asked for by the first items of the request."""
        return get_origin(self.result) is list and len(self.body) == 1 and _is_sequence(self.body[0].hint)

    def nothing(self) -> Any:
        """What is answered of what is not there."""
        if self.result is Page:
            return Page(())
        return [] if get_origin(self.result) is list else 0 if self.result is int else None

    def _listed(self) -> Any:
        return get_args(self.result)[0] if get_origin(self.result) is list else None

    def _sent(self) -> Any:
        if not self.body:
            return None
        if self.whole_body:
            return next(part.hint for part in self.body if part.name == self.whole_body)
        return _record(f"{_camel(self.name)}Request", f"What `{self.name}` is asked.", self.body)

    def _answered(self) -> Any:
        if self.field:
            told = [Argument(self.field, self.result)]
            return _record(f"{_camel(self.name)}Answer", f"What `{self.name}` answers.", told)
        if self.item is not None:
            item: Any = self.item
            return json_codec.Slice[item]
        if self.is_optional:
            return next(part for part in get_args(self.result) if part is not type(None))
        return self.sent if self.result is type(None) else self.result


class OperationGroup:
    """The operations that a plugin brings to every store, registered by `register_operations` under the group's `name`.

    `parts` says for each kind of store where the plugin's part for it stands, as `package.module:NAME`: `sql` is a
    `lightning.store.relational.brought.SqlPart`, `redis` a mapping of functions by the operations' names. It is imported when
    such a store is first asked. A store over HTTP needs none. `distribution` is what must be installed where the group is not.
    """

    def __init__(
        self, name: str, operations: Sequence[Callable[..., Any]], *, parts: Mapping[str, str], distribution: str
    ) -> None:
        self.name, self.parts, self.distribution = name, parts, distribution
        self.operations = tuple(cast("Sequence[Operation]", operations))
        for one in self.operations:
            if one.owned is None and not RESOURCES.isdisjoint(one.signature.parameters):
                words = ", ".join(sorted(RESOURCES & one.signature.parameters.keys()))
                raise TypeError(
                    f"the operation {one.name} has an argument that means a resource or a key of the state ({words}): give it "
                    "another name, or the operation a rule of its own (owned=)"
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

    def lacking(self, operation: Operation, where: str) -> StoreError:
        """The error for a server that does not have the plugin."""
        return StoreError(
            f"{where} cannot do {operation.name}: it has no plugin that brings {self.name!r}, or another release of it. "
            f"Install {self.distribution} there, and start the server again"
        )


def operation(
    function: Callable[Concatenate[Any, P], Awaitable[R]], route: str, scopes: tuple[Scope, ...], **how: Any
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """An `Operation` as a method of the class that it stands in, which has `async call(operation, arguments)`; or as a function
    of a module, which is called with a store."""
    made: Any = Operation(function, route, scopes, **how)
    return cast("Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]", made)


def operations_of(table: type) -> tuple[Operation, ...]:
    """The operations that stand in a class, in order."""
    return tuple(entry for entry in vars(table).values() if isinstance(entry, Operation))


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """Without `self`."""
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _is_sequence(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _record(name: str, doc: str, parts: Sequence[Argument]) -> type:
    """A dataclass with these fields. What may be nothing (any JSON, a mapping) may be left out."""
    fields = []
    for part in parts:
        options: dict[str, Any] = {} if part.default is REQUIRED else {"default": part.default}
        if part.hint is json_codec.AnyJson:
            options = {"default": None}
        elif get_origin(part.hint) is Mapping:
            options = {"default_factory": dict}
        fields.append((part.name, part.hint, field(**options)))
    made = make_dataclass(name, fields, frozen=True, kw_only=True)
    made.__doc__ = doc
    return made


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
