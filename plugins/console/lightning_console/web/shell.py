"""The Gradio application that a console's pages are drawn in: one host, which `static/shell.js` fills.

The invariant: no text of a run goes through one of Gradio's own components, which make markup of it; and Gradio tells nobody
that it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any, Never

from lightning.errors import MissingExtraError
from starlette.applications import Starlette
from starlette.types import ASGIApp

from lightning_console.web.gate import FILES, FUNCTIONS, STATIC

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
    """The names of the console's scripts; `shell.js` is the last."""
    names = sorted(file.name for file in STATIC.glob("*.js"))
    return sorted(names, key=lambda name: name == "shell.js")


def styles() -> list[str]:
    """The names of its style sheets."""
    return sorted(file.name for file in STATIC.glob("*.css"))


def build(path: str) -> Starlette:
    """The application below `path`; importing Gradio takes seconds. A page learns from it that it may ask `FUNCTIONS`; the gate
    answers them.

    Raises `MissingExtraError` where Gradio is not installed.
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
    """The application, made when it is first asked for, beside the event loop, and run until it is closed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._making = asyncio.Lock()
        self._app: Starlette | None = None
        self._running: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def app(self) -> ASGIApp:
        """The running application. Raises `MissingExtraError` where Gradio is not installed."""
        async with self._making:
            if self._app is None:
                app = await asyncio.to_thread(self._make)
                started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._running = asyncio.create_task(self._run(app, started))
                await started
                self._app = app
        return self._app

    def _make(self) -> Starlette:
        """Import and build: seconds, so in a thread. Gradio leaves loops of its own open unless it finds one that runs."""

        async def made() -> Starlette:
            return build(self._path)

        return asyncio.run(made())

    async def _run(self, app: Starlette, started: asyncio.Future[None]) -> None:
        """Gradio's start and end, in one task, as what it opens wants it."""
        try:
            async with app.router.lifespan_context(app):
                started.set_result(None)
                await self._end.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def close(self) -> None:
        """End what Gradio has started. Idempotent."""
        self._end.set()
        if self._running is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
