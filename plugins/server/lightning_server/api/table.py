"""What a route is: the one description that requests are checked by, that routes are found in and that the OpenAPI page is made
of.

The invariant: everything that is served is described: a handler is reached only through a `Route`, which declares its scopes,
parameters, body and answer.
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

LARGEST_PAGE = 1000
Q = TypeVar("Q")
B = TypeVar("B")

LlmFor = Callable[[Lease, Store], Awaitable[LLM]]
"""Returns the access to the model for the agent of a lease; the store is the view of the lease's holder."""
Finish = Callable[[Store, str, int, Outcome], Awaitable[Rollout]]
"""Ends an attempt (store, rollout, attempt, outcome) and returns the rollout as it stands afterwards."""
Served = Callable[[str], Awaitable[bool]]
"""Tells whether a policy server answers the calls of a run's agents now."""


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers use besides the store. `llm_for` is None without a gateway; `served` is None where models can always be
    called."""

    watchers: Watchers
    finish: Finish
    llm_for: LlmFor | None
    served: Served | None
    describe: Callable[[], Mapping[str, Json]]
    """Returns the OpenAPI document, which is made at the first request for it."""


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[Q, B]):
    """One request, after all checks. `query` and `body` have the types that the route declares. `store` shows the caller's
    project alone. `once` is the caller's id for the request, made distinct for its token; empty without one."""

    principal: Principal
    store: Store
    services: Services
    path: dict[str, str]
    query: Q
    body: B
    once: str = ""

    @property
    def attempt(self) -> int:
        """The number `{attempt}` in the path. Raises `DataError` for what is no 64-bit integer."""
        return _integer(self.path["attempt"], "the attempt in the path")


@dataclass(frozen=True, slots=True)
class NoQuery:
    """The query of a route without parameters."""


@dataclass(frozen=True, slots=True)
class Paging:
    """The query for one page of a list."""

    cursor: str = field(default="", metadata={"doc": "The `cursor` of the page before; empty for the first page."})
    limit: int = field(
        default=100, metadata={"doc": "Items at most.", "minimum": 1, "maximum": LARGEST_PAGE, "unit": "items"}
    )

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= LARGEST_PAGE:
            raise DataError(f"limit={self.limit} asks for an impossible page: it must be between 1 and {LARGEST_PAGE}")


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path below `messages.PREFIX`. `scopes` is None where no token is needed; an admin may use every route.

    The answers of `heavy` routes may be long, so their JSON is written in a thread. A request of a `once` route may carry an
    id; it is then done only once, however often it is sent.
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
        """The operation's name, which is the handler's."""
        return getattr(self.handler, "__name__", "")

    @property
    def doc(self) -> str:
        """The operation's description: its handler's docstring as one line."""
        return " ".join((self.handler.__doc__ or "").split())


def query_of(route: Route, given: list[tuple[str, str]]) -> Any:
    """Parse the query of a request into the route's type. Raises `DataError` for unknown, repeated and invalid parameters."""
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
    """Parse a value of the query or of the path as the type `hint`. Raises `DataError` that names `where`."""
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
    """Return the 404 error for something that does not exist."""
    return ApiError(404, "not_found", f"There is no {what}: {cure}" if cure else f"There is no {what}.")
