"""Access control of a console: check each request's session, its origin and its target before a page answers.

A console opens to whoever has the address that `lightning console` printed, or to the holder of a server's token.

The invariant: without a session only the login page is answered. Requests from another site's page do nothing, and the
browser lets a page ask this server only. Questions of pages are answered here, so that Gradio sees no text of a visitor. A
cookie holds only a session's name. A server keeps only the digest of a session, which ends with the token that opened it and
is refused once that is revoked (`lightning_server.auth` says how soon).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, quote, urlsplit

from lightning.bounded import Bounded
from lightning.errors import ConfigError, LightningError
from lightning.gateway.http import ClientGoneError, RefusalError, read_body
from lightning.types import Scope
from lightning_server.auth import Authenticator
from lightning_server.errors import ApiError
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Connection

SESSIONS: Final = 10_000
"""Most sessions of one server; the oldest is dropped first."""
SESSIONS_EACH: Final = 100
"""Most sessions of one token, which a team may share. Too many logins with a token drop only sessions of that token."""
READERS: Final = (Scope.VIEWER, Scope.TRAINER)
"""Scopes that open the console; that of an admin does, too. All but `VIEWER` may also do actions."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The sender of a request. They see only runs of `project` (None: all runs); `changes` says whether they may do actions."""

    session: str
    name: str
    project: str | None
    changes: bool


VISITOR: ContextVar[Visitor] = ContextVar("visitor")
"""The sender of the request that is being answered."""


def digest_of(text: str) -> str:
    """Return the SHA-256 of a secret with 256 random bits, which is kept in its place."""
    return hashlib.sha256(text.encode()).hexdigest()


class Door(Protocol):
    """Opens sessions for holders of a token. With `form`, visitors enter the token on a page, else it is in the address."""

    form: bool

    async def enter(self, token: str) -> str:
        """Return a session for the holder of a token. Raises `ApiError` if the token is not valid here."""

    async def find(self, session: str) -> Visitor | None:
        """Return the visitor of a session; None if it is unknown or has ended. Raises `LightningError` if that cannot be
        checked."""

    def leave(self, session: str) -> None:
        """End a session."""


class OwnDoor:
    """The door of a console on a person's own machine, as in Jupyter: the printed address has a token, which other users of the
    machine and other pages in the browser do not know."""

    form = False

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._session, self._once = secrets.token_urlsafe(32), ""

    def once(self) -> str:
        """Return a new token that works once, and make the previous one invalid."""
        self._once = secrets.token_urlsafe(32)
        return self._once

    async def enter(self, token: str) -> str:
        """Return the console's only session for its token, or for the token that works once. Raises `ApiError` for any other
        token."""
        if self._once and hmac.compare_digest(digest_of(token), digest_of(self._once)):
            self._once = ""
            return self._session
        if not hmac.compare_digest(digest_of(token), digest_of(self.token)):
            raise ApiError(
                401, "invalid_token", "Open the address that `lightning console` has printed: it has a token."
            )
        return self._session

    async def find(self, session: str) -> Visitor | None:
        """Return the user of this machine for the console's session; None for any other session."""
        known = hmac.compare_digest(digest_of(session), digest_of(self._session))
        return Visitor("own", "", None, changes=True) if known else None

    def leave(self, session: str) -> None:
        """Do nothing: the session of this machine's user lasts as long as the process."""


class TokenDoor:
    """The door of a server's console, which opens for a token of scope viewer, trainer or admin."""

    form = True

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._sessions = Bounded[str, str](SESSIONS)

    async def enter(self, token: str) -> str:
        """Check a server's token, and return a new session for its holder. Raises `ApiError` for a token that is not valid or
        may not open the console."""
        principal = await self._authenticator.principal(f"Bearer {token.strip()}")
        principal.require(*READERS)
        session = secrets.token_urlsafe(32)
        mine = [key for key, owner in self._sessions.items() if owner == principal.id]
        if len(mine) >= SESSIONS_EACH:
            del self._sessions[mine[0]]
        self._sessions.keep(digest_of(session), principal.id)
        return session

    async def find(self, session: str) -> Visitor | None:
        """Return the visitor of a session, with the project and the scope of its token; None if it is unknown or its token was
        revoked."""
        key = digest_of(session)
        identity = self._sessions.get(key)
        if identity is None:
            return None
        try:
            principal = await self._authenticator.still(identity)
        except ApiError:
            self._sessions.pop(key, None)
            return None
        changes = principal.scope in (Scope.TRAINER, Scope.ADMIN)
        return Visitor(key, principal.name or principal.id, principal.project, changes)

    def leave(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(digest_of(session), None)


def need_changes(who: Visitor) -> None:
    """Raise `ConfigError` for a visitor who may not do actions (one with a viewer's token)."""
    if not who.changes:
        raise ConfigError(
            "a viewer's token changes nothing: log in with one of scope trainer or admin (lightning token create trainer)"
        )


logger = logging.getLogger(__name__)
Asked = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""A function that answers a page's question: JSON object in, JSON object out."""
STATIC: Final = Path(__file__).parent.parent / "static"
LONGEST_FORM: Final = 4_096
"""Most bytes of a login form."""
LONGEST_QUESTION: Final = 1 << 20
"""Most bytes of a page's question."""
FILES: Final = "lightning"
"""The path below which the console's own scripts and styles are served."""
PAGES: Final = frozenset({"", "assets", "static", "svelte", "theme.css", "config", "manifest.json", "favicon.ico"})
CALLS: Final = frozenset({"component_server", "info", "startup-events", "heartbeat", "app_id"})
"""The routes of Gradio that are allowed: not uploads, files, proxies, queues or monitoring, which no page here uses."""
ASKED: Final = "component_server"
"""The route of a page's questions, to which Gradio's script sends JSON. The gate answers it, because Gradio itself would also
take a form and keep its files on disk, keep a session for any name that a visitor sends, and fail at malformed requests."""
FUNCTIONS: Final = ("show", "act")
"""The functions that a page may call."""
HEADERS: Final = {
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; "
    "worker-src 'self' blob:; frame-ancestors 'none'; base-uri 'self'; form-action 'self'; object-src 'none'",
    "referrer-policy": "same-origin",  # without one, a browser sends a form with the origin `null`
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
LOGIN: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Log in · lightning</title>
<link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui,sans-serif;max-width:30rem;margin:15vh auto;
padding:0 1rem}}input,button{{font:inherit;padding:.5rem;width:100%;box-sizing:border-box;margin:.4rem 0}}.bad{{color:#c62828}}
</style></head><body>
<h1>lightning</h1><p>Give a token of this server. A viewer's lets you look; a trainer's or an admin's also promotes, rolls back
and takes notes.</p>{said}<form method="post" action="{path}/login"><input type="hidden" name="next" value="{next}">
<label>Token<input name="token" type="password" placeholder="lt_..." autocomplete="off" autofocus required></label>
<button>Log in</button></form><p>Whoever runs the server makes one: <code>lightning token create viewer --store PLACE</code></p>
</body></html>"""
OUTSIDE: Final = (
    "This console is not open to you. Open the address that `lightning console` has printed: it has a token."
)


class Gate:
    """An ASGI application that guards another one: `inside` returns it when it is first needed. It answers below `path`.
    `asked` has the functions that pages may call, by the names in `FUNCTIONS`; `secure` marks cookies for HTTPS only."""

    def __init__(
        self,
        door: Door,
        path: str,
        inside: Callable[[], Awaitable[ASGIApp]],
        asked: Mapping[str, Asked],
        *,
        secure: bool = False,
    ) -> None:
        self._asked = asked
        self._door, self._path, self._inside, self._secure = door, path, inside, secure
        self._serving: set[asyncio.Task[object]] = set()
        self._closed = False

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serve one request, or answer why it is refused."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        except ApiError as error:
            answer = self._login(request, error.message, error.status)
        except LightningError:
            logger.exception("the console cannot be opened")  # strangers must not see the store's error
            answer = PlainTextResponse("The console cannot be opened now; the server's log says why.", 503)
        safe = _with_headers(send)
        if isinstance(answer, Response):
            await answer(scope, receive, safe)
            return
        VISITOR.set(answer)
        scope = {**scope, "query_string": b""}  # Gradio has a `page` of its own
        try:
            inside = self._ask if self._call(request) == ASKED else await self._inside()
        except LightningError as error:
            await PlainTextResponse(f"The console cannot be opened: {error}", 503)(scope, receive, safe)
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await inside(scope, receive, safe)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._serving.discard(task)

    def close(self) -> None:
        """Cut off the open requests, since Gradio's pages keep one open as long as they are shown. Idempotent."""
        self._closed = True
        for task in list(self._serving):
            task.cancel()

    async def _answer(self, request: Request) -> Response | Visitor:
        """Return the gate's own answer to a request, or the visitor if the request is allowed to go on."""
        path = request.url.path
        if path == "/favicon.ico":
            return Response(status_code=204)
        if path in ("/", self._path):
            return RedirectResponse(f"{self._path}/" + (f"?{request.url.query}" if request.url.query else ""), 307)
        if not path.startswith(f"{self._path}/"):
            return PlainTextResponse("There is nothing here.", 404)
        if not _is_from_here(request):
            return PlainTextResponse("This request came from another site's page, and does nothing here.", 403)
        rest = path[len(self._path) + 1 :]
        if rest == "login" and self._door.form:
            return await self._enter(request) if request.method == "POST" else self._login(request)
        token = request.query_params.get("token", "") if rest == "" and not self._door.form else ""
        if token:
            return self._admitted(request, await self._door.enter(token), request.query_params.get("page", ""))
        session = request.cookies.get(_cookie(request), "")
        visitor = await self._door.find(session) if session else None
        if rest == "logout" and request.method == "POST":
            return self._leave(request, session)
        if visitor is None:
            return self._outside(request, rest)
        if rest.startswith(f"{FILES}/"):
            return _file(rest.partition("/")[2])
        first, call = rest.partition("/")[0], self._call(request)
        if (
            call == ASKED
            and request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
        ):
            return PlainTextResponse("A page asks in JSON (content-type: application/json).", 415)
        if first in PAGES or call in CALLS:
            return visitor
        return PlainTextResponse("There is nothing here.", 404)

    def _call(self, request: Request) -> str:
        """Return the name of the Gradio route that is asked for; empty if the path is none."""
        first, _, second = request.url.path.removeprefix(f"{self._path}/").partition("/")
        return second.partition("/")[0] if first == "gradio_api" else ""

    async def _ask(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Answer a page's question, the JSON `{"fn_name": one of FUNCTIONS, "data": {...}}`."""
        try:
            body = await _body(Request(scope, receive), LONGEST_QUESTION)
            asked = json.loads(body)
        except ClientDisconnect:
            return
        except ApiError as error:
            await PlainTextResponse(error.message, error.status)(scope, receive, send)
            return
        except (ValueError, RecursionError):
            asked = None
        function = self._asked.get(str(asked.get("fn_name"))) if isinstance(asked, dict) else None
        given = asked.get("data") if isinstance(asked, dict) else None
        if scope["method"] != "POST" or function is None or not isinstance(given, dict):
            said = f'A page asks by POST, {{"fn_name": {" or ".join(map(json.dumps, FUNCTIONS))}, "data": {{...}}}}.'
            await PlainTextResponse(said, 400)(scope, receive, send)
            return
        await Response(json.dumps(await function(given)), media_type="application/json")(scope, receive, send)

    def _outside(self, request: Request, rest: str) -> Response:
        """Return the answer to a request without a session: a redirect to the login page, or status 401."""
        if not self._door.form:
            return PlainTextResponse(OUTSIDE, 401)
        if rest == "" and request.method == "GET":
            page = request.query_params.get("page", "")
            return RedirectResponse(f"{self._path}/login" + (f"?next={quote(page)}" if page else ""), 303)
        return PlainTextResponse("Log in first.", 401)

    async def _enter(self, request: Request) -> Response:
        given = await _form(request)
        page = given.get("next", "")
        try:
            return self._admitted(request, await self._door.enter(given.get("token", "")), page)
        except ApiError as error:
            return self._login(request, error.message, error.status, page)

    def _admitted(self, request: Request, session: str, page: str) -> Response:
        there = f"{self._path}/" + (f"?page={quote(page, safe='')}" if page else "")
        answer: Response = RedirectResponse(there, 303)
        if (
            request.headers.get("sec-fetch-site") == "cross-site"
        ):  # from a file, for example: the cookie would not be sent after a redirect
            answer = HTMLResponse(f'<meta http-equiv="refresh" content="0; url={html.escape(there, quote=True)}">')
        answer.set_cookie(
            _cookie(request), session, path=self._path, httponly=True, samesite="strict", secure=self._secure
        )
        return answer

    def _leave(self, request: Request, session: str) -> Response:
        if session:
            self._door.leave(session)
        answer = RedirectResponse(f"{self._path}/", 303)
        answer.delete_cookie(_cookie(request), path=self._path, httponly=True, samesite="strict", secure=self._secure)
        return answer

    def _login(self, request: Request, said: str = "", status: int = 200, page: str = "") -> Response:
        if not self._door.form:
            return PlainTextResponse(said, status)
        said = f'<p class="bad" role="alert">{html.escape(said)}</p>' if said else ""
        page = html.escape(page or request.query_params.get("next", ""), quote=True)
        return HTMLResponse(LOGIN.format(said=said, path=html.escape(self._path), next=page), status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(HEADERS)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sending


def _is_from_here(request: Request) -> bool:
    """Return whether a request can come from a page of this server, or from a person who followed a link to it.

    Cookies count another port of the same machine as the same site, so that their `SameSite` alone is not enough.
    """
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host", ""):
        return False
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate"
    return True


def _cookie(request: Request) -> str:
    """Return the name of the session's cookie. It has the port, because browsers share cookies between the ports of a host."""
    return f"lightning-console-{request.url.port or 0}"


async def _form(request: Request) -> dict[str, str]:
    given = parse_qs((await _body(request, LONGEST_FORM)).decode("latin-1"))
    return {name: values[0] for name, values in given.items()}


async def _body(request: Request, longest: int) -> bytes:
    """Read a request's body. Raises `ApiError` (413 for more than `longest` bytes), and `ClientDisconnect`."""
    try:
        return await read_body(request.scope, request.receive, longest)
    except ClientGoneError:
        raise ClientDisconnect from None
    except RefusalError as refusal:
        if refusal.code != "body_too_large":
            raise ApiError(refusal.status, refusal.code, str(refusal)) from refusal
        raise ApiError(413, "too_large", f"More than {longest} bytes were sent: no page sends so many.") from refusal


def _file(name: str) -> Response:
    """Return one of the console's own scripts or styles; 404 for any other name."""
    path = STATIC / name
    if "/" in name or path.suffix not in (".js", ".css") or not path.is_file():
        return PlainTextResponse("There is no such file.", 404)
    return FileResponse(path, headers={"cache-control": "no-cache"})
