"""The routes of operations, made from the table in `lightning_server.operations` and from those of plugins.

The invariant: an operation is served as its line in the table says, with its project's store; what is stored is redacted and
checked first, by its type, whichever operation stores it. Whoever follows the cursors of a list sees each item that was there
from the first page to the last exactly once, also when others are added before, between or behind them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, make_dataclass, replace
from typing import Any, Final, TypeVar

from lightning.errors import DataError, StoreError
from lightning.redaction import redacted, redacted_span, storable
from lightning.store.protocol import Attempt, Page
from lightning.store.rollout_state import no_cursor
from lightning.types import Span, StepRecord, Token, Transition
from lightning_record.conversation import CONVERSATION, conversation_in

from lightning_server.api.table import ApiCall, NoQuery, Paging, Route, nothing_there, parsed
from lightning_server.auth import check_token
from lightning_server.http_operation import REQUIRED, HttpOperation

READ_AT_ONCE = 16
"""Attempts read from the store at once: what does not fit into the answer was read for nothing."""
Handler = Callable[[ApiCall[Any, Any]], Awaitable[Any]]


def route_of(operation: HttpOperation, handler: Handler | None = None) -> Route:
    """The route of an operation; a `handler` of its own where serving it is more than asking the store."""

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
    """The parameters of an operation's query."""
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
    """Ask the store for an operation, and answer as its answer travels."""
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
    """The arguments that a request has, but for those of a page."""
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
        call.principal.require()  # what belongs to the whole store is for admins
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

    def identity(item: Any) -> str:
        return _identity(operation, item)

    by = identity if operation.cursor else None
    if "attempt" in arguments and "rollout" in arguments:
        return await page_of_attempt(call, ask, by)
    return page(await ask(**arguments), asked, by)


def _identity(operation: HttpOperation, item: Any) -> str:
    """What no other item of a list has."""
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
    """What is told of the first things asked for, of as many as fit into one answer."""
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
    """A value of a request as the store is to have it. What may be long is redacted beside the event loop."""
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
"""What takes secrets out of what agents said."""


T = TypeVar("T")
PAGE_BYTES = 16 * 1024 * 1024
"""Bytes of one answer, about; an attempt, a call or an event that is longer comes alone."""
ATTEMPT_CURSOR = re.compile(r"([0-9]{1,18})\.(.+)")
"""The attempt of a page whose request names none, and the cursor within it."""


def page(items: Sequence[T], asked: Paging, identity: Callable[[T], str] | None = None) -> Page[T]:
    """The part of `items` that was asked for. The cursor is the `identity` of the last item given, which no other has;
    without one, its number, for lists that only grow at their end. A page ends when its items exceed `PAGE_BYTES` in sum; it
    has at least one.

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
    """Bytes of an item of a list, about; what agents tell may be long anywhere."""
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
    """A page of what an attempt has. Where none was named its cursors name it: the next attempt may begin between two pages."""
    asked, rollout = call.query, call.path["rollout"]
    if asked.attempt is not None:
        return page(await read(rollout, asked.attempt), asked, identity)
    attempt, cursor = await _place(call)
    found = page(await read(rollout, attempt), Paging(cursor, asked.limit), identity)
    return replace(found, cursor=f"{attempt}.{found.cursor}") if found.cursor else found


async def _place(call: ApiCall[Any, None]) -> tuple[int | None, str]:
    """The attempt whose pages are asked for, and the cursor within it. Raises `DataError` for a cursor of something else.

    The attempt is None for a rollout that is not there: reading from it says so.
    """
    if not call.query.cursor:
        rollout = await call.store.get_rollout(call.path["rollout"])
        return (None if rollout is None else rollout.attempt), ""
    said = ATTEMPT_CURSOR.fullmatch(call.query.cursor)
    if said is None:
        raise no_cursor(call.query.cursor)
    return int(said[1]), said[2]
