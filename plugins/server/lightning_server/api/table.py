"""What a route is: the one description from which requests are checked, routes are found and the OpenAPI page is written.

The invariant: nothing is served that is not described: a handler is reached through a `Route`, which says its scopes, its
parameters, its body and its answer.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, Generic, TypeVar, get_type_hints

from lightning.errors import DataError
from lightning.store.protocol import Store
from lightning.types import LLM, Json, Lease, Outcome, Rollout, Scope

from lightning_server import json_codec
from lightning_server.api.change_waiters import Watchers
from lightning_server.auth import Principal
from lightning_server.errors import ApiError

PREFIX = "/api/v1"
LARGEST_PAGE = 1000
Q = TypeVar("Q")
B = TypeVar("B")

LlmFor = Callable[[Lease, Store], Awaitable[LLM]]
"""What the agent of a lease needs to call the model; the store is the one that the lease's holder sees."""
Finish = Callable[[Store, str, int, Outcome], Awaitable[Rollout]]
"""Ends an attempt of a rollout and returns the rollout as it then stands."""
Served = Callable[[str], Awaitable[bool]]
"""Whether the calls of a run's agents would find a policy server now."""


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with beside the store."""

    watchers: Watchers
    finish: Finish
    llm_for: LlmFor | None
    served: Served | None
    describe: Callable[[], Mapping[str, Json]]
    """The OpenAPI document, written when it is first asked for."""


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[Q, B]):
    """One request, checked: `query` and `body` are what the route declares; `store` shows the caller's project alone; `once` is
    the caller's id for the request, of this token alone, empty where it has none."""

    principal: Principal
    store: Store
    services: Services
    path: dict[str, str]
    query: Q
    body: B
    once: str = ""

    @property
    def attempt(self) -> int:
        """The path's `{attempt}`. Raises `DataError`."""
        return _integer(self.path["attempt"], "the attempt in the path")


@dataclass(frozen=True, slots=True)
class NoQuery:
    """No parameters in the query."""


@dataclass(frozen=True, slots=True)
class Paging:
    """Which part of a list is wanted."""

    cursor: str = field(default="", metadata={"doc": "The `cursor` of the page before; empty for the first page."})
    limit: int = field(
        default=100, metadata={"doc": "Items at most.", "minimum": 1, "maximum": LARGEST_PAGE, "unit": "items"}
    )

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= LARGEST_PAGE:
            raise DataError(f"limit={self.limit} asks for an impossible page: it must be between 1 and {LARGEST_PAGE}")


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path below `PREFIX`. `scopes` is None where no token is needed; an admin may use every route.

    The answers of `heavy` routes may be long: their JSON is written beside the event loop. A request of a route that is `once`
    may carry an id, under which it is done once however often it comes.
    """

    method: str
    path: str
    handler: Callable[[Any], Awaitable[Any]]
    scopes: tuple[Scope, ...] | None
    answer: Any
    body: Any = None
    query: type = NoQuery
    heavy: bool = False
    once: bool = False

    @property
    def name(self) -> str:
        """The operation's name: that of its handler."""
        return getattr(self.handler, "__name__", "")

    @property
    def doc(self) -> str:
        """What the operation does: its handler's docstring, in one line."""
        return " ".join((self.handler.__doc__ or "").split())


def query_of(route: Route, given: list[tuple[str, str]]) -> Any:
    """The query of a request as the route's own type. Raises `DataError` for unknown, repeated and impossible parameters."""
    if not given:
        return route.query()
    found = dict(given)
    if len(found) != len(given):
        raise DataError("the query has a parameter twice: send each of them once")
    hints = _hints(route.query)
    json_codec.check_names(found, hints, "the query")
    return route.query(**{name: parsed(text, hints[name], f"the parameter {name}") for name, text in found.items()})


@cache
def _hints(query: type) -> dict[str, Any]:
    return get_type_hints(query)


def parameters(query: type) -> dict[str, Field[Any]]:
    """The parameters of a query type; all of them may be left out."""
    found = {item.name: item for item in fields(query)}
    assert all(item.default is not MISSING for item in found.values()), f"{query} has a parameter without a default"
    return found


def parsed(text: str, hint: Any, where: str) -> Any:
    """A value of the query or of the path. Raises `DataError` that names `where`."""
    if hint == int | str:
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else text
    if hint in (int, int | None):
        return _integer(text, where)
    if hint is bool:
        if text not in ("true", "false"):
            raise json_codec.wrong(text, where, "true or false")
        return text == "true"
    if hint in (float, float | None):
        try:
            return float(text)
        except ValueError:
            raise json_codec.wrong(text, where, "a number of seconds") from None
    return json_codec.codec_of(hint).decode(text, where, True)


def _integer(text: str, where: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,19}", text):
        raise json_codec.wrong(text, where, "an integer of 64 bits")
    value: int = json_codec.codec_of(int).decode(int(text), where, True)
    return value


def nothing_there(what: str, cure: str) -> ApiError:
    """The answer for what nobody created."""
    return ApiError(404, "not_found", f"There is no {what}: {cure}" if cure else f"There is no {what}.")
