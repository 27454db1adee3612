"""The OpenAPI 3.1 description of the control API, made from the table of routes and the types that travel.

The invariant: it describes every route and nothing else; what it says of a route comes from that table and those types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_type_hints

from lightning import __version__
from lightning.types import Scope

from lightning_server import json_codec
from lightning_server.api.table import Route, parameters
from lightning_server.messages import ONCE_HEADER, PREFIX, Failure

Schema = dict[str, Any]
ABOUT = (
    "Everything a run consists of, for trainers, runners and people that are somewhere else. Every operation but health and "
    "this description needs `Authorization: Bearer lt_<id>_<secret>`; `lightning token create` makes one. Times are Unix "
    "seconds, durations seconds. Ids in paths are percent-encoded, `/` as `%2F`. Lists come in pages: send the `cursor` of one "
    "to get the next."
)
FAILURES = {
    "400": "The request cannot be meant so: a field, a parameter or a value is not what it must be.",
    "401": "The token is missing, unknown, expired or revoked.",
    "403": "The token's scope does not allow this.",
    "404": "There is no such thing.",
    "409": "It contradicts what is stored, or comes too late: the attempt was superseded or has ended.",
    "413": "The body is larger than the server takes.",
    "422": "The store refuses it, for the reason that is given.",
    "429": "The server has too much to do; ask again after the seconds in `Retry-After`.",
    "503": "The store cannot be reached now; ask again after the seconds in `Retry-After`.",
}


ONCE = {
    "name": ONCE_HEADER,
    "in": "header",
    "description": "An id that you made for this very request. Sent again with it, because the answer was lost, the request is "
    "not done a second time, and is answered as it was.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


def describe(routes: Iterable[Route]) -> Schema:
    """Return the OpenAPI document of these routes."""
    paths: Schema = {}
    used: list[type] = [Failure]
    for route in routes:
        operation, uses = _operation(route)
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = operation
        used += uses
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lightning Server", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": _schemas(used),
            "responses": {status: _failure(text) for status, text in FAILURES.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "A scoped token."}},
        },
        "security": [{"token": []}],
    }


def scopes_of(route: Route) -> tuple[str, ...]:
    """Return the scopes that may use a route, admin last; empty where no token is needed."""
    if route.scopes is None:
        return ()
    return (*(scope.value for scope in route.scopes), Scope.ADMIN.value)


def _operation(route: Route) -> tuple[Schema, list[type]]:
    answer = json_codec.codec_of(route.answer)
    uses = list(answer.uses)
    said = f" Scopes: {', '.join(scopes_of(route))}." if route.scopes is not None else " Needs no token."
    operation: Schema = {
        "operationId": route.name,
        "description": route.doc + said,
        "parameters": [*_path_parameters(route), *_query_parameters(route.query), *([ONCE] if route.once else [])],
        "responses": {"200": {"description": "Done.", "content": {"application/json": {"schema": answer.schema}}}},
    }
    if route.body is not None:
        body = json_codec.codec_of(route.body)
        uses += body.uses
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body.schema}}}
    for status in _statuses(route):
        operation["responses"][status] = {"$ref": f"#/components/responses/{status}"}
    if route.scopes is None:
        operation["security"] = []
    return operation, uses


def _statuses(route: Route) -> Sequence[str]:
    if route.scopes is None:
        return ("400", "429", "503")
    return [status for status in FAILURES if route.body is not None or status != "413"]


def _path_parameters(route: Route) -> list[Schema]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": json_codec.codec_of(int).schema if name == "attempt" else {"type": "string", "minLength": 1},
        }
        for name in re.findall(r"{(\w+)}", route.path)
    ]


def _query_parameters(query: type) -> list[Schema]:
    hints = get_type_hints(query)
    found = []
    for name, item in parameters(query).items():
        schema = _plain(json_codec.codec_of(hints[name]).schema) | {
            key: item.metadata[key] for key in ("minimum", "maximum") if key in item.metadata
        }
        if item.default is not None:
            schema["default"] = item.default
        found.append({"name": name, "in": "query", "description": item.metadata["doc"], "schema": schema})
    return found


def _plain(schema: Schema) -> Schema:
    """Return the schema of a query parameter, from that of its type: null is dropped (the parameter is left out instead), and
    so are the names for NaN and infinities."""
    first: Schema = schema["anyOf"][0] if "anyOf" in schema else schema
    return dict(first)


def _schemas(used: Sequence[type]) -> Schema:
    found: Schema = {}
    waiting = list(used)
    while waiting:
        cls = waiting.pop()
        if cls.__name__ not in found:
            found[cls.__name__], more = json_codec.describe(cls)
            waiting += more
    return dict(sorted(found.items()))


def _failure(text: str) -> Schema:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"{json_codec.REF}{Failure.__name__}"}}},
    }
