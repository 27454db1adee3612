"""What can be changed in a console: aliases of prompts and weights, and notes of a run; and the buttons for that.

The invariant: an action is named here or does not exist, and who may only look is refused whatever their page sends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from lightning.errors import ConfigError, DataError
from lightning.store.protocol import Store
from lightning_resources import roll_back_alias, set_alias

from lightning_console.address import Address
from lightning_console.blocks import Action, Actions, Block, Notice, Notices, Page
from lightning_console.pages.branches import FORK
from lightning_console.places import Places
from lightning_console.queries.notes import add_note, notes
from lightning_console.web.visitors import Visitor, need_changes

PRODUCTION: Final = "production"
Done = Callable[[Places, Visitor, Mapping[str, Any]], Awaitable[str]]


async def act(places: Places, who: Visitor, name: str, given: Mapping[str, Any]) -> str:
    """Do an action; returns what was done. Raises `ConfigError` for a viewer, `DataError` for what cannot be meant."""
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
    """A page with the notes of its run and a button for another one; without any button for who may only look, and with that
    for branches where `forks` says that they can be made."""
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
        said = [Notice(note.text, detail=f"{note.by or 'somebody'}, {_time(note.at)}") for note in found]
        blocks.append(Notices(said, title="Notes"))
    if who.changes:
        blocks.append(Actions([Action("note", "Leave a note", {"run": key}, fields=[("text", "Note")])]))
    return blocks


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M}"
