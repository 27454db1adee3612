"""The two consoles that are served: one on a person's own machine, on loopback, and one on a Lightning Server's port.

Their pages are drawn in a Gradio application with one empty element, which `static/shell.js` fills.

The invariant: the first listens on this machine only, opens to whoever has its address, and never delays the training that
started it; the second opens to holders of the server's tokens. No text of a run goes through Gradio's own components, which
would render it as markup, and Gradio sends no analytics.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Never

from lightning.config import LimitsConfig
from lightning.errors import MissingExtraError
from lightning.gateway.connections import Serving, bind
from lightning.store.url import redacted
from lightning_server.projects import Projects
from lightning_server.protocol import Host
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_console.places import SERVER, WAITS, Places
from lightning_console.web.chat import Chat
from lightning_console.web.desk import Desk
from lightning_console.web.forks import Forks
from lightning_console.web.gate import FILES, FUNCTIONS, STATIC, Gate, OwnDoor, TokenDoor, Visitor

BOOT = """
const add = (kind, attributes) => new Promise((done, failed) => {
  const part = Object.assign(document.createElement(kind), attributes);
  part.onload = done;
  part.onerror = () => failed(new Error(`${attributes.src || attributes.href} was not loaded`));
  document.head.append(part);
});
(async () => {
  const {scripts, styles, base} = props.value;
  await Promise.all([...styles.map((name) => add("link", {rel: "stylesheet", href: base + name})),
    ...scripts.map((name) => add("script", {src: base + name, async: false}))]);
  window.lightning.start(element.querySelector(".lightning-host"), window.lightning.served(server));
})();
"""


def scripts() -> list[str]:
    """The file names of the console's scripts; `shell.js` is the last."""
    names = sorted(file.name for file in STATIC.glob("*.js"))
    return sorted(names, key=lambda name: name == "shell.js")


def styles() -> list[str]:
    """The names of the console's style sheets."""
    return sorted(file.name for file in STATIC.glob("*.css"))


def build(path: str) -> Starlette:
    """Build the Gradio application below `path`; importing Gradio takes seconds. It declares `FUNCTIONS` to the page, but the
    gate answers them before they reach Gradio.

    Raises `MissingExtraError` if Gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ModuleNotFoundError as error:
        raise MissingExtraError("console", str(error.name)) from error

    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]  # names alone: a web font would be asked of another host
    theme = gradio.themes.Default(font=fonts, font_mono=["ui-monospace", "Consolas", "monospace"])
    with gradio.Blocks(title="lightning", analytics_enabled=False, fill_width=True) as blocks:
        gradio.HTML(
            {"scripts": scripts(), "styles": styles(), "base": f"{path}/{FILES}/"},
            html_template='<div class="lightning-host"></div>',
            js_on_load=BOOT,
            apply_default_css=False,
            server_functions=[_answered_before(name) for name in FUNCTIONS],
            elem_id="console-host",
        )
    app: Any = Starlette()
    gradio.mount_gradio_app(
        app,
        blocks,
        path=path,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        show_error=False,
        theme=theme,
        head='<link rel="icon" href="data:,">',
        css="#console-host, #console-host .html-container, .gradio-container, .gradio-container main, .gradio-container .main "
        "{padding: 0 !important; max-width: none !important}",
    )
    return app  # type: ignore[no-any-return]


def _answered_before(name: str) -> Any:
    async def asked(given: object) -> Never:
        raise AssertionError(f"{name} is answered by the gate")

    asked.__name__ = name
    return asked


class Shell:
    """The Gradio application below `path`: built in a thread when it is first needed, then run until `close`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._making = asyncio.Lock()
        self._app: Starlette | None = None
        self._running: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def app(self) -> ASGIApp:
        """Return the running application; build and start it first if needed. Raises `MissingExtraError` without Gradio."""
        async with self._making:
            if self._app is None:
                app = await asyncio.to_thread(self._make)
                started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._running = asyncio.create_task(self._run(app, started))
                await started
                self._app = app
        return self._app

    def _make(self) -> Starlette:
        """Import Gradio and build the application, inside a running event loop: without one, Gradio opens loops of its own and
        leaves them open. This takes seconds, so it is called in a thread."""

        async def made() -> Starlette:
            return build(self._path)

        return asyncio.run(made())

    async def _run(self, app: Starlette, started: asyncio.Future[None]) -> None:
        """Start Gradio, set `started`, and end Gradio after `close`. Both must happen in one task."""
        try:
            async with app.router.lifespan_context(app):
                started.set_result(None)
                await self._end.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def close(self) -> None:
        """Stop the application. Idempotent."""
        self._end.set()
        if self._running is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._running


HOST = "127.0.0.1"
PATH = "/console"


@dataclass(frozen=True, slots=True)
class LocalConsole:
    """A running console on this machine. `url` opens it and has a secret token; `once` is such an address that works once."""

    url: str
    once: str
    ready: asyncio.Task[object]
    """Ends when Gradio has been imported; raises `MissingExtraError` where it is not installed."""


@asynccontextmanager
async def local_console(places: Places, *, port: int = 0, start: str = "runs") -> AsyncIterator[LocalConsole]:
    """Serve the console of the places on loopback until the context ends, and close the places then. Port 0 takes a free port.
    Raises `GatewayError` for a port that is taken."""
    door, forks = OwnDoor(), Forks()
    desk = Desk(lambda _: places, Chat(None), forks=forks, start=start, where=redacted(places.where))
    shell = Shell(PATH)
    gate = Gate(door, PATH, shell.app, desk.functions)
    serving = Serving(gate, bind(HOST, port), LimitsConfig())
    await serving.start()
    ready: asyncio.Task[object] = asyncio.create_task(shell.app())
    try:
        address = f"{serving.url}{PATH}/?token="
        yield LocalConsole(address + door.token, address + door.once(), ready)
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        gate.close()
        await forks.close()
        await shell.close()
        await serving.stop()
        await places.close()


class ConsoleApp:
    """The console on a Lightning Server's port, a `WebApp`. Gradio is imported only when the first visitor has logged in."""

    def __init__(self, host: Host) -> None:
        self._projects = Projects(host.store)
        self._places: dict[str | None, Places] = {}
        desk = Desk(self._places_of, Chat(host), where=host.url or SERVER, has_login=True)
        self._shell = Shell(host.path)
        secure = host.url.startswith("https://")
        self._gate = Gate(TokenDoor(host.authenticator), host.path, self._shell.app, desk.functions, secure=secure)

    def _places_of(self, who: Visitor) -> Places:
        if who.project not in self._places:
            seen = self._projects.of(who.project)
            self._places[who.project] = Places(SERVER, stores={SERVER: seen}, project=who.project, patience=WAITS)
        return self._places[who.project]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of the server below `/console`."""
        await self._gate(scope, receive, send)

    async def close(self) -> None:
        """Cut off open requests and stop the Gradio application."""
        self._gate.close()
        await self._shell.close()
