"""The routes of operations, made from the table in `lightning_server.operations` and from those of plugins.

The invariant: an operation is served as its line in the table says, on the store of the caller's project. Values that are
stored are redacted and checked first, by their type. A client that follows the cursors of a list sees each item that was there
from the first page to the last exactly once, even when other items are added meanwhile.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, make_dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from lightning.errors import DataError, StoreError
from lightning.redaction import redacted, redacted_span
from lightning.store.protocol import Attempt, Page
from lightning.store.rollout_state import no_cursor
from lightning.types import Span, StepRecord, Transition
from lightning_record.conversation import CONVERSATION, conversation_in, storable

from lightning_server.api.table import ApiCall, NoQuery, Paging, Route, nothing_there, parsed
from lightning_server.auth import check_token
from lightning_server.operations import REQUIRED, HttpOperation
from lightning_server.tokens import Token

READ_AT_ONCE = 16
"""Attempts that are read from the store at once. What does not fit into the answer was read for nothing, so they are few."""
Handler = Callable[[ApiCall[Any, Any]], Awaitable[Any]]


def route_of(operation: HttpOperation, handler: Handler | None = None) -> Route:
    """Make the route of an operation. `handler` serves it where that takes more than asking the store; None: the store is
    asked."""

    async def handle(call: ApiCall[Any, Any]) -> Any:
        return await (_serve(call, operation) if handler is None else handler(call))

    handle.__name__, handle.__doc__ = operation.name, operation.doc
    return Route(
        operation.method,
        operation.path,
        handle,
        operation.scopes,
        operation.answered,
        operation.sent,
        query=_query(operation),
        heavy=operation.item is not None or operation.is_read_in_parts,
        once=operation.once is not None,
    )


def _query(operation: HttpOperation) -> type:
    """Make the type of an operation's query: its parameters, and those of a page where it answers a list."""
    base = Paging if operation.item is not None else NoQuery
    if not operation.query:
        return base
    return make_dataclass(
        f"{operation.name}_query",
        [
            (
                part.name,
                part.hint,
                field(
                    default="" if part.default is REQUIRED else part.default,
                    metadata={"doc": operation.told[part.name]},
                ),
            )
            for part in operation.query
        ],
        bases=(base,),
        frozen=True,
        slots=True,
    )


async def _serve(call: ApiCall[Any, Any], operation: HttpOperation) -> Any:
    """Ask the store for an operation, and return the answer in the type that travels. Raises `ApiError` (404) for None."""
    arguments = await _arguments(call, operation)
    ask = operation.operation.on(call.store)
    if operation.item is not None:
        return await _page(call, operation, ask, arguments)
    if operation.is_read_in_parts:
        return operation.answered(**{operation.field: await _first_of(operation, ask, arguments)})
    found = await ask(**arguments)
    if operation.result is type(None):
        return call.body
    if found is None and operation.is_optional:
        what = operation.name.partition("_")[2].replace("_", " ")
        raise nothing_there(f"{what} {' at '.join(map(repr, call.path.values()))}", operation.missing)
    return operation.answered(**{operation.field: found}) if operation.field else found


async def _arguments(call: ApiCall[Any, Any], operation: HttpOperation) -> dict[str, Any]:
    """Return the operation's arguments from a request, without those of a page. Raises `ApiError` (403) where a caller who is
    no admin asks for what belongs to the whole store."""
    found = {
        part.name: parsed(call.path[part.name], part.hint, f"the {part.name} in the path") for part in operation.in_path
    }
    found |= {part.name: getattr(call.query, part.name) for part in operation.query}
    if operation.whole_body:
        found[operation.whole_body] = await _stored(call.body)
    else:
        found |= {part.name: await _stored(getattr(call.body, part.name)) for part in operation.body}
    if operation.once is not None:
        found["once"] = call.once or ("" if operation.once.hint is str else None)
    if found.get("run") == "":
        call.principal.require()  # raises unless an admin asks
    return found


async def _page(
    call: ApiCall[Any, Any], operation: HttpOperation, ask: Callable[..., Awaitable[Any]], arguments: dict[str, Any]
) -> Page[Any]:
    asked: Paging = call.query
    if operation.is_page:
        found: Page[Any] = await ask(**arguments, cursor=asked.cursor, limit=asked.limit)
        return found
    if operation.pages_itself:
        if asked.cursor:
            arguments["after"] = _after(asked.cursor, operation)
        items = await ask(**arguments, limit=asked.limit + 1)
        more = len(items) > asked.limit
        return Page(tuple(items[: asked.limit]), _identity(operation, items[asked.limit - 1]) if more else "")

    by = partial(_identity, operation) if operation.cursor else None
    if "attempt" in arguments and "rollout" in arguments:
        return await page_of_attempt(call, ask, by)
    return page(await ask(**arguments), asked, by)


def _identity(operation: HttpOperation, item: Any) -> str:
    """Return an item's identity, which no other item of the list has."""
    return "@".join(str(getattr(item, name)) for name in operation.cursor)


def _after(cursor: str, operation: HttpOperation) -> Any:
    if operation.operation.signature.parameters["after"].default == "":
        return cursor
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise no_cursor(cursor)
    return int(cursor)


async def _first_of(
    operation: HttpOperation, ask: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]
) -> Sequence[Any]:
    """Ask the store for the items of the request in order, and return the results of the first ones: as many as fit into one
    answer."""
    name = operation.body[0].name
    found: list[Any] = []
    used = 0
    for start in range(0, len(arguments[name]), READ_AT_ONCE):
        for item in await ask(**{**arguments, name: arguments[name][start : start + READ_AT_ONCE]}):
            used += size_of(item)
            if found and used > PAGE_BYTES:
                return found
            found.append(item)
    return found


# what is done with a value before it is stored ------------------------------------------------------------------


async def _stored(value: Any) -> Any:
    """Return a value of a request as it may be stored: checked or redacted, by its type. Long values are redacted in a
    thread."""
    if isinstance(value, Token):
        return _checked(value)
    if isinstance(value, tuple) and value and type(value[0]) in REDACT:
        redact = REDACT[type(value[0])]
        return await asyncio.to_thread(lambda: tuple(map(redact, value)))
    return value


def _storable(call: Transition) -> Transition:
    try:
        said = conversation_in(call)
    except StoreError as error:
        raise DataError(f"the extra {CONVERSATION!r} of transition {call.key} is none that a gateway wrote") from error
    kept = said is None or storable(said) is not None
    extras = {name: brought for name, brought in call.extras.items() if kept or name != CONVERSATION}
    return replace(call, extras=extras, error=call.error and redacted(call.error, "error"))


def _checked(token: Token) -> Token:
    check_token(token)
    if len(token.digest) != 64 or set(token.digest) - set("0123456789abcdef"):
        raise DataError("digest is not the SHA-256 of a secret as 64 lower-case hexadecimal digits")
    if token.revoked_at is not None:
        raise DataError("a token cannot be made revoked: leave revoked_at out")
    return replace(token, created_at=token.created_at or time.time())


REDACT: Final[Mapping[type, Callable[[Any], Any]]] = {Transition: _storable, Span: redacted_span}
"""Functions that remove secrets from what agents said, by type."""


T = TypeVar("T")
PAGE_BYTES = 16 * 1024 * 1024
"""About how many bytes one answer has; a single longer item comes alone."""
ATTEMPT_CURSOR = re.compile(r"([0-9]{1,18})\.(.+)")
"""Cursor of a list whose first request named no attempt: the attempt, and the cursor within its list."""


def page(items: Sequence[T], asked: Paging, identity: Callable[[T], str] | None = None) -> Page[T]:
    """Return the page of `items` that was asked for. Its cursor is the `identity` of the last item returned, which must be
    unique; with `identity` None it is the item's number, for lists that only grow at their end. A page ends when its items
    exceed `PAGE_BYTES` in sum; it has at least one item if any are left.

    Raises `DataError` for a cursor that belongs to no item.
    """
    start = _start(items, asked.cursor, identity)
    end = _fitting(items, start, min(start + asked.limit, len(items)))
    chosen = tuple(items[start:end])
    if end == len(items) or not chosen:
        return Page(chosen)
    return Page(chosen, str(end) if identity is None else identity(chosen[-1]))


def _start(items: Sequence[T], cursor: str, identity: Callable[[T], str] | None) -> int:
    if not cursor:
        return 0
    if identity is None:
        if cursor.isascii() and cursor.isdecimal() and len(cursor) < 10:
            return min(int(cursor), len(items))
    else:
        for number, item in enumerate(items):
            if identity(item) == cursor:
                return number + 1
    raise no_cursor(cursor)


def _fitting(items: Sequence[T], start: int, end: int) -> int:
    used = 0
    for number in range(start, end):
        used += size_of(items[number])
        if used > PAGE_BYTES and number > start:
            return number
    return end


def size_of(item: object) -> int:
    """Return roughly how many bytes an item of a list has; texts of agents may be long in any of its parts."""
    if isinstance(item, (Attempt, StepRecord)):
        return _size(item.extras) + len(repr(replace(item, extras={})))
    if isinstance(item, Transition):
        numbers = len(item.prompt_ids) + len(item.response_ids) + len(item.logprobs)
        return 4 * numbers + 500 + _size(item.extras) + len(item.error)
    return sum(map(size_of, item)) if isinstance(item, list) else len(repr(item))


def _size(extras: Mapping[str, bytes]) -> int:
    return sum(map(len, extras.values()))


async def page_of_attempt(
    call: ApiCall[Any, None],
    read: Callable[[str, int | None], Awaitable[Sequence[T]]],
    identity: Callable[[T], str] | None = None,
) -> Page[T]:
    """Return a page of a list that an attempt has. Where the request names no attempt, the cursors name it, since a new attempt
    may begin between two pages."""
    asked, rollout = call.query, call.path["rollout"]
    if asked.attempt is not None:
        return page(await read(rollout, asked.attempt), asked, identity)
    attempt, cursor = await _place(call)
    found = page(await read(rollout, attempt), Paging(cursor, asked.limit), identity)
    return replace(found, cursor=f"{attempt}.{found.cursor}") if found.cursor else found


async def _place(call: ApiCall[Any, None]) -> tuple[int | None, str]:
    """Return the attempt whose pages are asked for, and the cursor within its list. Raises `DataError` for any other cursor.

    The attempt is None for an unknown rollout: reading its list then raises.
    """
    if not call.query.cursor:
        rollout = await call.store.get_rollout(call.path["rollout"])
        return (None if rollout is None else rollout.attempt), ""
    said = ATTEMPT_CURSOR.fullmatch(call.query.cursor)
    if said is None:
        raise no_cursor(call.query.cursor)
    return int(said[1]), said[2]
