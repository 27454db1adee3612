"""Answer the requests of a console's pages: show an address, or do an action (move an alias, leave a note, branch, chat).

The invariant: a visitor sees only the runs of their token's project. An answer is bounded in time, and an error is shown on the
page while the console goes on. Only the actions named here exist, and a viewer is refused all of them, whatever their page
sends. Each note has a number of its own and is written once, so that two people who write at the same time lose nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from lightning.errors import ConfigError, DataError, LightningError
from lightning.store.protocol import Store
from lightning.types import Json
from lightning_resources.operations import roll_back_alias, set_alias

from lightning_console import router
from lightning_console.blocks import Action, Actions, Block, Notice, Notices, Page, json_of, with_whole_characters
from lightning_console.pages.rollout import FORK
from lightning_console.pages.words import when
from lightning_console.places import Located, Places
from lightning_console.router import Address
from lightning_console.web.chat import Chat
from lightning_console.web.forks import Forks
from lightning_console.web.gate import VISITOR, Asked, Visitor, need_changes

MOST: Final = 100
"""Most notes of a run."""
LONGEST: Final = 4_000
"""Most characters of a note."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note that a person left at a run. `by` is the person's name, `at` the Unix time."""

    text: str
    by: str
    at: float


async def notes(located: Located) -> list[Note]:
    """Return the notes of a run, oldest first; an empty list if the store refuses to read its state (for a viewer's token)."""
    found: list[Note] = []
    try:
        for number in range(MOST):
            kept = await located.store.get_state(located.run.id, _key(number))
            if not isinstance(kept, dict):
                break
            found.append(_read_note(kept))
    except LightningError:
        return found
    return found


async def add_note(located: Located, text: str, by: str) -> Note:
    """Add a note to a run. Raises `DataError` if the text is empty or too long, or if the run has `MOST` notes."""
    text = text.strip()
    if not text or len(text) > LONGEST:
        raise DataError(f"a note has 1 to {LONGEST} characters, and this one has {len(text)}")
    mine: dict[str, Json] = {"text": text, "by": by, "at": time.time()}
    for number in range(MOST):
        if await located.store.keep_state(located.run.id, _key(number), mine) == mine:
            return _read_note(mine)
    raise DataError(f"the run {located.run.id!r} has {MOST} notes already, and takes no more")


def _key(number: int) -> str:
    return f"console_note_{number}"


def _read_note(kept: dict[str, Json]) -> Note:
    at = kept.get("at")
    return Note(str(kept.get("text", "")), str(kept.get("by", "")), float(at) if isinstance(at, (int, float)) else 0.0)


PRODUCTION: Final = "production"
Done = Callable[[Places, Visitor, Mapping[str, Any]], Awaitable[str]]


async def act(places: Places, who: Visitor, name: str, given: Mapping[str, Any]) -> str:
    """Do the action `name` with the arguments `given`, and return what was done. Raises `ConfigError` for a viewer, `DataError`
    for an unknown action or an argument that is not valid."""
    done = ACTIONS.get(name)
    if done is None:
        raise DataError(f"there is no action {name[:40]!r}: there are {', '.join(ACTIONS)}")
    need_changes(who)
    return await done(places, who, given)


async def _note(places: Places, who: Visitor, given: Mapping[str, Any]) -> str:
    located = await places.find(_text(given, "run"))
    await add_note(located, _text(given, "text"), who.name)
    return "the note is kept"


async def _promote(places: Places, who: Visitor, given: Mapping[str, Any]) -> str:
    store, name = await _store(places, _text(given, "store")), _text(given, "name")
    alias, version = _text(given, "alias").strip() or PRODUCTION, _text(given, "version").strip()
    if not version.isdecimal() or len(version) > 18:
        raise DataError(f"{version[:40]!r} is no version: give its number")
    moved = await set_alias(store, name, alias, int(version))
    return f"{moved.name}@{moved.alias} is version {moved.version}"


async def _roll_back(places: Places, who: Visitor, given: Mapping[str, Any]) -> str:
    store = await _store(places, _text(given, "store"))
    moved = await roll_back_alias(store, _text(given, "name"), _text(given, "alias"))
    return f"{moved.name}@{moved.alias} is version {moved.version} again"


ACTIONS: Final[Mapping[str, Done]] = {"note": _note, "promote": _promote, "roll_back": _roll_back}


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str | int):
        raise DataError(f"{name} is a text, not a {type(value).__name__}")
    return str(value)


async def _store(places: Places, url: str) -> Store:
    stores = await places.stores()
    if url not in stores:
        raise ConfigError(f"there is no store {url[:200]!r} here")
    return stores[url]


async def with_actions(places: Places, who: Visitor, page: Page, *, forks: bool = False) -> Page:
    """Return the page with the notes of its run and a button to add one. A viewer gets no buttons at all; the button for
    branches stays only if `forks` is true."""
    address = Address.parse(page.address)
    blocks: list[Block] = [block for block in page.blocks if _is_for(who, block, forks=forks)]
    if address.page == "run" and len(address.about) == 1:
        blocks += await _of_run(places, who, address.about[0])
    return replace(page, blocks=blocks)


def _is_for(who: Visitor, block: Block, *, forks: bool) -> bool:
    if not isinstance(block, Actions):
        return True
    return who.changes and (forks or all(action.name != FORK for action in block.actions))


async def _of_run(places: Places, who: Visitor, key: str) -> list[Block]:
    found = await notes(await places.find(key))
    blocks: list[Block] = []
    if found:
        said = [Notice(note.text, detail=f"{note.by or 'somebody'}, {when(note.at)}") for note in found]
        blocks.append(Notices(said, title="Notes"))
    if who.changes:
        blocks.append(Actions([Action("note", "Leave a note", {"run": key}, fields=[("text", "Note")])]))
    return blocks


logger = logging.getLogger(__name__)
SECONDS: Final = 60.0
"""Seconds after which making a page or doing an action is given up."""
TALKS: Final = ("say", "begin_again")


class Desk:
    """Answers the requests of all visitors' pages. `places_of` returns the places that a visitor sees; `start` is the address
    of the first page; without `forks`, no branches can be made."""

    def __init__(
        self,
        places_of: Callable[[Visitor], Places],
        chat: Chat,
        *,
        forks: Forks | None = None,
        start: str = "runs",
        where: str = "",
        has_login: bool = False,
    ) -> None:
        self._places_of, self._chat, self._forks = places_of, chat, forks
        self._start, self._where, self._has_login = start, where, has_login

    @property
    def functions(self) -> dict[str, Asked]:
        """The functions that pages may call, by the names in `gate.FUNCTIONS`."""
        return {"show": self.show, "act": self.act}

    async def show(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the page of `asked["address"]`, or `{"same": True}` if its digest is still `asked["seen"]`."""
        who = VISITOR.get()
        address = with_whole_characters(str(asked.get("address") or self._start))
        page = await router.shown(address, self._page(who, address), SECONDS)
        try:  # in a thread: a rollout's page has megabytes, which would delay other requests
            written, digest = await asyncio.to_thread(_written, page)
        except Exception as error:  # a number that JSON cannot express
            logger.exception("the page %r could not be made", address[:200])
            page = router.cannot_show(address, router.fault_of(error))
            written, digest = _written(page)
        changes = {"live": page.live, **({"partial": True} if page.partial else {})}
        if digest == asked.get("seen"):
            return {"same": True, **changes}
        where = f"{self._where} · {who.name}" if who.name else self._where
        said = {"digest": digest, **changes, "where": where, "leave": self._has_login}
        return {"page": written, **said}

    async def act(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do the action `asked["name"]`; return its result as `said`, or why it failed as `error`."""
        who, name = VISITOR.get(), str(asked.get("name"))
        given = asked.get("arguments")
        given = given if isinstance(given, dict) else {}
        try:
            places = self._places_of(who)
            if name in TALKS:
                return {"said": await self._chat.act(await self._store(places), who, name, given)}
            async with asyncio.timeout(SECONDS):
                if name == FORK and self._forks is not None:
                    need_changes(who)
                    return {"said": await self._forks.begin(places, given)}
                return {"said": await act(places, who, name, given)}
        except TimeoutError:
            return {"error": f"this took more than {SECONDS:g} s; look whether it was done before you try again"}
        except LightningError as error:
            return {"error": str(error)}
        except Exception as error:
            logger.exception("the action %r could not be done", name[:200])
            return {"error": router.fault_of(error)}

    async def _page(self, who: Visitor, text: str) -> Page:
        places = self._places_of(who)
        if text.partition("?")[0] == "chat":
            return await self._chat.page(await self._store(places), who, Address.parse(text))
        page = await router.show(places, text)
        return await with_actions(places, who, page, forks=self._forks is not None)

    async def _store(self, places: Places) -> Store | None:
        stores = await places.stores()
        return next(iter(stores.values()), None)


def _written(page: Page) -> tuple[Any, str]:
    """Return a page as a JSON value, and the SHA-256 of its encoding."""
    written = json_of(page.to_json())
    return orjson.loads(written), hashlib.sha256(written).hexdigest()
