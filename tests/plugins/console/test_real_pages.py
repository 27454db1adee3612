"""Real pages in a real browser: all of an exported run, a run that goes on, the keyboard, and the login of a server."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from lightning.config import Config
from lightning.store.url import sqlite_url
from lightning.types import Outcome, Rollout, Run, Scope, Task
from lightning_console.export import export_pages
from lightning_console.places import Places
from lightning_server.auth import issue_token
from lightning_server.serving import serve_store
from lightning_server.tokens import put_token

from tests.plugins.branching.test_branch import recorded
from tests.plugins.branching.test_branch import runs as runs
from tests.plugins.branching.test_branch_live import trained
from tests.plugins.console.made_folder import goes_on, in_store, plot
from tests.plugins.console.reading import to
from tests.plugins.console.test_forks import PARENT
from tests.plugins.debug.evaluating import vllm as vllm
from tests.plugins.debug.made_runs import Maker

if TYPE_CHECKING:
    from lightning.store.protocol import Store
    from playwright.sync_api import Page

    from tests.plugins.console.conftest import OpenPage, Watched
    from tests.plugins.debug.evaluating import ScriptedVLLM

pytestmark = pytest.mark.slow
ODD = re.compile(r"\b(undefined|NaN|\[object Object\]|null)\b")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run and one that goes on. Written by asyncio before Playwright's loop is there."""
    folder = tmp_path_factory.mktemp("runs")
    in_thread(lambda: in_store(folder / "one", lambda store: Maker(store, plot("one", 1)).write()))
    in_thread(lambda: in_store(folder / "on", goes_on))
    return folder


def in_thread(work: Callable[[], object]) -> None:
    """Run a coroutine to its end, also where Playwright's loop counts as running."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(work())  # type: ignore[arg-type]
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@contextmanager
def console(place: Path) -> Iterator[str]:
    """`lightning console` in a process of its own; gives the address that it prints."""
    command = [sys.executable, "-m", "lightning", "console", str(place), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/console/\?token=[^ ]+", said)):
            line = process.stdout.readline()
            assert line, said
            said += line
        yield found.group(0)
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.fixture(scope="module")
def opened(place: Path) -> Iterator[str]:
    """The console of the folder."""
    with console(place) as url:
        yield url


def test_every_page_of_an_exported_run_is_drawn(page: Page, place: Path, tmp_path: Path) -> None:
    """Each has its own title, no value that JavaScript made up, and links that lead to other pages of the folder."""
    out = tmp_path / "out"
    in_thread(lambda: export_pages(str(place / "one"), "run/one", out, rollouts=4))
    index = (out / "data" / "index.js").read_text()
    files: dict[str, str] = json.loads(index[index.index("exported(") + 9 : -4])["files"]
    assert {address.partition("/")[0] for address in files} >= {"run", "step", "group", "rollout", "resources"}
    page.goto((out / "index.html").as_uri())
    for address, file in files.items():
        written = json.loads((out / "data" / file).read_text()[len("lightning.page(") : -3])
        page.evaluate("address => { location.hash = '#' + encodeURIComponent(address) }", address)
        here = "address => document.querySelector('[data-address]')?.getAttribute('data-address') === address"
        page.wait_for_function(here, arg=address)
        page.wait_for_selector("#host:not([aria-busy])")
        assert page.locator("h1").text_content() == written["title"]
        text = page.locator("body").inner_text()
        assert len(text) > 80, address
        assert not ODD.search(text), (address, ODD.findall(text))
        for link in page.eval_on_selector_all("a[href^='#']", "found => found.map(a => a.getAttribute('href'))"):
            to = page.evaluate("text => decodeURIComponent(text)", link[1:])
            assert not to or to in files, (address, to)


def test_a_run_that_goes_on_is_watched(page: Page, place: Path, opened: str) -> None:
    """What is recorded while one looks appears by itself, and what one has scrolled to stays where it is."""
    page.goto(opened + "&page=run%2Fon")
    page.wait_for_selector("h1:has-text('on')")
    assert "running" in page.locator("body").inner_text()
    first = page.locator("body").inner_text()

    async def one_more(store: Store) -> None:
        (lease,) = await store.lease("on", "w2", limit=1)
        await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=0.75))

    in_thread(lambda: in_store(place / "on", one_more))
    page.wait_for_function("before => document.body.innerText !== before", arg=first)
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1, "the page was not loaded again"
    waits = "document.querySelector('[data-opening]') !== null"
    assert page.evaluate(f"(document.querySelector('main a[data-to]').click(), {waits})"), "a click is answered at once"
    page.wait_for_function(f"!({waits})")


def test_branches_appear_in_their_parents_group_while_one_looks(page: Page, place: Path, opened: str) -> None:
    parent = "on/1/0/0"

    async def begin(store: Store) -> None:
        changes = {"branch": {"rollout": parent, "at": 1, "edit": "look again"}}
        await store.put_run(Run("again", "again", changes, time.time()))
        await store.create_rollouts(
            [Rollout("again/0", "again", Task("q"), "again", split="branch", parent=(parent, 1, 0))]
        )

    async def end(store: Store) -> None:
        await store.lease("again", "w3")
        await store.complete("again/0", 1, Outcome(reward=0.625))

    page.goto(opened + "&page=group%2Fon%2Fon%252F1%252F0")
    page.wait_for_selector(".id:has-text('on/1/0')")
    assert page.locator("h2:has-text('Branches')").count() == 0
    in_thread(lambda: in_store(place / "on", begin))
    page.wait_for_selector("tr:has-text('edit: look again'):has-text('pending')")
    in_thread(lambda: in_store(place / "on", end))
    page.wait_for_selector("tr:has-text('edit: look again'):has-text('0.625')")
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1, "the page was not loaded again"


def test_the_keyboard_goes_through_pages_and_tokens(page: Page, opened: str) -> None:
    page.goto(opened + "&page=step%2Fone%2F1")
    page.wait_for_selector("h1")
    title = page.locator("h1").inner_text()
    page.keyboard.press("]")
    page.wait_for_function("title => document.querySelector('h1').textContent !== title", arg=title)
    assert page.url.endswith("step%2Fone%2F2")
    page.keyboard.press("[")
    page.wait_for_function("title => document.querySelector('h1').textContent === title", arg=title)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open], [role=dialog]")
    page.keyboard.press("Escape")
    page.go_back()
    page.wait_for_function("title => document.querySelector('h1').textContent !== title", arg=title)


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """A server with a run of each of two teams, and their viewers' tokens."""
    tokens = {}
    async with serve_store(sqlite_url(folder / "lightning.db"), Config(), folder) as running:
        for name in ("team-a", "team-b"):
            await running.store.put_run(Run(f"run-{name}", f"of {name}", {}, 1.0, name))
            token, tokens[name] = issue_token(Scope.VIEWER, name)
            await put_token(running.store, token)
        yield f"{running.url}/console", tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """That server in a thread of its own."""
    folder, found, up, over = tmp_path_factory.mktemp("served"), list[tuple[str, dict[str, str]]](), Event(), Event()

    async def serve() -> None:
        async with server(folder) as made:
            found.append(made)
            up.set()
            await asyncio.to_thread(over.wait)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(60)
    yield found[0]
    over.set()
    thread.join(30)


def test_a_viewer_logs_in_sees_its_own_project_and_leaves(
    open_page: OpenPage, watched: Watched, served: tuple[str, dict[str, str]]
) -> None:
    url, tokens = served
    page = open_page(viewport={"width": 1000, "height": 800})
    page.goto(f"{url}/?page=run%2Frun-team-b")
    page.fill("input[name=token]", "lt_wrong")
    page.click("button")
    page.wait_for_selector("[role=alert]")
    page.fill("input[name=token]", tokens["team-a"])
    page.click("button")
    page.wait_for_selector("h1")
    assert "there is no run" in page.locator("body").inner_text(), "another project's run"
    page.click("nav a:has-text('Runs')")
    page.wait_for_selector("td:has-text('run-team-a')")
    assert "team-b" not in page.locator("main, .shell-page").first.inner_text()
    assert page.locator("button:has-text('Leave a note')").count() == 0, "a viewer changes nothing"
    page.click("button:has-text('Log out')")
    page.wait_for_selector("input[name=token]")
    # The browser says in its console that a token was refused, and that the server, whose root is the API's, has no icon.
    watched.errors[:] = [said for said in watched.errors if "401" not in said and "favicon.ico" not in said]


@contextmanager
def trained_in_thread() -> Iterator[None]:
    """The run's trainer serves its policy in a loop of its own: the browser's is another one."""
    ready, done = Event(), Event()

    async def serve() -> None:
        places = Places(str(Path("runs").resolve()))
        async with trained(next(iter((await places.stores()).values()))):
            ready.set()
            await asyncio.to_thread(done.wait)
        await places.close()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_somebody_forks_in_the_browser(runs: ScriptedVLLM, page: Page) -> None:
    in_thread(lambda: asyncio.to_thread(recorded, "looks_after"))
    with trained_in_thread(), console(Path("runs").resolve()) as url:
        page.goto(f"{url}&page={quote(to('rollout', 'first', PARENT, call=1))}")
        page.get_by_role("button", name="Fork here: 8 branches").click()
        form = page.get_by_role("form", name="Fork here: 8 branches")
        assert "These tools run again in each: look." in form.inner_text()
        form.get_by_role("button").first.click()
        page.get_by_text("8 branches have begun").wait_for(timeout=60_000)
        page.wait_for_function(
            "() => [...document.querySelectorAll('td')].filter(td => td.textContent === 'no error').length === 8",
            timeout=60_000,
        )
