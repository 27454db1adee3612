"""What an operation of a store is over HTTP: where it is, who may use it, and how it travels.

The invariant: everything that client, server and project check must know of an operation is derived from its signature and its
one line, in `lightning_server.operations` or in a plugin's table.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Final, get_args, get_origin, get_type_hints

from lightning.store.operation import HttpLine, Operation
from lightning.store.protocol import Page

from lightning_server import json_codec

REQUIRED: Final = inspect.Parameter.empty
PAGING: Final = ("after", "cursor", "limit")
"""Arguments that say which part of a list is wanted."""
QUERY: Final[Mapping[str, str]] = {
    "project": "Runs of this project only.",
    "split": "Of this split only: `train` or the name of an evaluation.",
    "step": "Sampled for this optimizer step only.",
    "status": "With this status only.",
    "attempt": "The attempt; by default the rollout's current one.",
    "run": "The run; empty for what belongs to the whole store, which is for admins.",
}
"""What parameters of a query mean, where an operation does not say."""
ANSWER_SECONDS: Final = 90.0
"""Without a byte from a server for so long, it counts as gone."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an operation. `default` is `REQUIRED` where it must be given."""

    name: str
    hint: Any
    default: Any = REQUIRED


class HttpOperation:
    """An operation as its line says. `path` has arguments in braces; `query` and `body` have the others, but for `once` and for
    which part of a list is wanted.

    `told` says what the parameters of the query mean. `sent` and `answered` are the types that travel, `item` is that of a
    list's items. `empty` says that a caller who asks for what is not its project's gets what there is of nothing; otherwise it
    is refused.
    """

    def __init__(self, operation: Operation, line: HttpLine) -> None:
        self.operation, self.name = operation, operation.name
        self.scopes, self.cursor, self.empty, self.missing = line.scopes, tuple(line.cursor), line.empty, line.missing
        self.answer_seconds = ANSWER_SECONDS if line.answer_seconds is None else line.answer_seconds
        self.doc = line.doc or " ".join((inspect.getdoc(operation.function) or "").partition("\n\n")[0].split())
        self.method, _, path = line.route.partition(" ")
        self.path, _, listed = path.partition("?")
        hints = get_type_hints(operation.function, localns=json_codec.LOCAL)
        self.result = hints["return"]
        found = {
            name: Argument(name, hints[name], part.default) for name, part in operation.signature.parameters.items()
        }
        self.once = found.get("once")
        lists = get_origin(self.result) is list and not line.answer and self.method == "GET"
        self.is_page = get_origin(self.result) is Page
        self.item = get_args(self.result)[0] if lists or self.is_page else None
        self.pages_itself = self.item is not None and not found.keys().isdisjoint(PAGING)
        left_out = {"once", *line.unsent, *(PAGING if self.item is not None else ())}
        in_path = re.findall(r"{(\w+)}", self.path)
        rest = [part for name, part in found.items() if name not in left_out and name not in in_path]
        self.in_path = tuple(found[name] for name in in_path if name in found)
        self.query = tuple(part for part in rest if self.method in ("GET", "DELETE") or part.name in listed.split("&"))
        self.body = tuple(part for part in rest if part not in self.query)
        self.whole_body = line.body if isinstance(line.body, str) else ""
        self.field = line.answer if isinstance(line.answer, str) else ""
        self.is_optional = type(None) in get_args(self.result)
        self.told = {part.name: line.query.get(part.name) or QUERY.get(part.name, "") for part in self.query}
        self.sent = line.body if isinstance(line.body, type) else self._sent()
        self.answered = line.answer if isinstance(line.answer, type) else self._answered()
        if not all(self.told.values()):
            raise TypeError(
                f"the operation {self.name} does not say what its parameters mean: give it query={self.told}"
            )

    def __repr__(self) -> str:
        return f"HttpOperation({self.name}: {self.method} {self.path})"

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
        if self.is_page:
            return Page(())
        return [] if get_origin(self.result) is list else 0 if self.result is int else None

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
            return Page[item]
        if self.is_optional:
            return next(part for part in get_args(self.result) if part is not type(None))
        return self.sent if self.result is type(None) else self.result


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
