"""`lightning token`: makes, lists and revokes the tokens for a server's control API.

The invariant: only `create` prints a token's plain text, once, alone on standard output; neither the store nor another command
has it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Annotated

import typer
from lightning.cli.output import (
    AsJson,
    escape,
    local_time,
    next_steps,
    print_json,
    print_table,
    say,
    seconds_of,
    with_store,
)
from lightning.store.places import existing_store
from lightning.types import DEFAULT_PROJECT, Scope

from lightning_server.auth import is_alive, issue_token
from lightning_server.tokens import Token, list_tokens, put_token, revoke_token

app = typer.Typer(no_args_is_help=True)

Place = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="PLACE",
        help="A run's folder, a database file, a store's URL, or a server's (with an admin's token in LIGHTNING_TOKEN).",
    ),
]


@app.command("create")
def create(
    scope: Annotated[
        Scope,
        typer.Argument(help="viewer may read; runner may run agents; trainer may train; admin may also make tokens."),
    ],
    place: Place,
    project: Annotated[
        str, typer.Option(help="The project that the token is valid for; * for an admin of all.")
    ] = DEFAULT_PROJECT,
    name: Annotated[str, typer.Option(help="A name for the token: its owner or purpose.")] = "",
    expires: Annotated[str, typer.Option(metavar="TIME", help="Lifetime: 90d, 12h, ...; empty: until revoked.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a token and print it. It cannot be shown again: only its digest is stored."""
    token, plain = issue_token(scope, project, name, seconds_of(expires.strip(), "time") if expires else None)
    url = place if "://" in place else existing_store(place)
    stored = asyncio.run(with_store(url, lambda store: put_token(store, token), make=True))
    if as_json:
        print_json({**_described(stored), "token": plain})
        return
    until = "until it is revoked" if stored.expires_at is None else f"until {local_time(stored.expires_at)}"
    what = f"{stored.scope.value} of {'all projects' if project == '*' else f'project {project}'}"
    sys.stderr.write(f"token {stored.id}: {what}, {until}. It cannot be shown again:\n")
    sys.stdout.write(plain + "\n")
    sys.stdout.flush()
    next_steps(("revoke it when it is no longer needed", ["token", "revoke", stored.id, "--store", place]))


@app.command("ls")
def ls(place: Place, as_json: AsJson = False) -> None:
    """List tokens, without their secrets, which are not stored."""
    tokens = asyncio.run(with_store(existing_store(place), list_tokens))
    if as_json:
        print_json([_described(token) for token in tokens])
    elif tokens:
        print_table(
            ["id", "scope", "project", "name", "made", "ends", ""],
            [
                [
                    token.id,
                    token.scope.value,
                    escape(token.project),
                    escape(token.name),
                    local_time(token.created_at),
                    local_time(token.expires_at),
                    _state(token),
                ]
                for token in tokens
            ],
        )
    else:
        say("there are no tokens")
        next_steps(("make one that may read", ["token", "create", "viewer", "--store", place]))


@app.command("revoke")
def revoke(
    token: Annotated[
        str, typer.Argument(help="The token's id, as `lightning token ls` lists it, or the token itself.")
    ],
    place: Place,
) -> None:
    """Revoke a token permanently. Every server refuses it within a second."""
    found = re.match(r"lt_([0-9a-f]+)_", token)
    identity = found.group(1) if found else token
    revoked = asyncio.run(with_store(existing_store(place), lambda store: revoke_token(store, identity)))
    say(
        f"revoked {revoked.id} ({revoked.scope.value}, project {escape(revoked.project)}) {escape(revoked.name)}".strip()
    )
    next_steps(("see which tokens are left", ["token", "ls", "--store", place]))


def _state(token: Token) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "valid" if is_alive(token) else "expired"


def _described(token: Token) -> dict[str, object]:
    """Return a token's fields as JSON, without its digest, and its state."""
    fields = ("id", "scope", "project", "name", "created_at", "expires_at", "revoked_at")
    return {**{field: getattr(token, field) for field in fields}, "state": _state(token)}
