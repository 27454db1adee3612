"""The page of prompts and weights: their versions, the reward of each, their aliases, and the difference of two versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning.errors import DataError
from lightning.store.protocol import Store
from lightning.trainer.agents import of_project
from lightning.types import Json
from lightning_resources.nouns import LATEST, Alias, Resource, ResourceUse
from lightning_resources.operations import alias_history, list_aliases, list_resources, resource_uses

from lightning_console.blocks import (
    Action,
    Actions,
    Block,
    Cell,
    Column,
    Control,
    Controls,
    Diff,
    Fact,
    Facts,
    Link,
    Message,
    Messages,
    Page,
    Table,
)
from lightning_console.pages.words import NONE, cannot_read, count, number, to, when, written
from lightning_console.places import Places, key_of, mark_of
from lightning_console.queries.conversation import cut
from lightning_console.router import Address

MOST_VERSIONS: Final = 200
"""Most versions of a resource that are shown: the newest."""
MOST_MOVES: Final = 200
ORIGINS: Final = {
    "made_by": "made by {}",
    "parent": "from version {}",
    "run": "in the run {}",
    "steps": "after {} steps",
    "reward": "held-out reward {}",
    "difference": "{} better than the version before",
}
"""Words for the usual entries of a version's metadata, in their order in a sentence."""


@dataclass(frozen=True, slots=True)
class ResourceView:
    """A resource: its versions, newest first, the rewards of rollouts with them (`uses`), and the moves of each alias, the
    latest first. `elsewhere` has the other stores with a resource of this name, URL by mark; `left_out` counts older
    versions."""

    name: str
    store: str
    mark: str
    versions: tuple[Resource, ...]
    uses: tuple[ResourceUse, ...]
    aliases: tuple[Alias, ...]
    moves: Mapping[str, tuple[Alias, ...]]
    elsewhere: Mapping[str, str]
    left_out: int = 0

    def version(self, number: int) -> Resource:
        """Return the version with this number. Raises `DataError` if it is not among `versions`."""
        found = next((each for each in self.versions if each.version == number), None)
        if found is None:
            raise DataError(f"{self.name} has no version {number}, or one older than those that are told")
        return found


async def resource_view(places: Places, name: str, mark: str = "") -> ResourceView:
    """Read a resource by its name, from the store with this `mark` or, if empty, from the first that has it. Raises `DataError`
    if there is none."""

    async def read(store: Store) -> tuple[Store, list[Resource]]:
        seen = _seen(places, store)
        return seen, await list_resources(seen, name)

    found, _ = await places.ask(read)  # the list of resources names what cannot be read
    having = {mark_of(url): url for url, (_, versions) in found.items() if versions}
    if not having or (mark and mark not in having):
        raise DataError(f"there is no resource {name[:200]!r} here")
    chosen = mark or next(iter(having))
    url = having[chosen]
    store, versions = found[url]
    aliases = await list_aliases(store, name)
    moves = {
        alias.alias: tuple(reversed(await alias_history(store, name, alias.alias)))[:MOST_MOVES]
        for alias in aliases
        if alias.alias != LATEST
    }
    return ResourceView(
        name,
        url,
        chosen,
        tuple(reversed(versions))[:MOST_VERSIONS],
        tuple(await resource_uses(store, name)),
        tuple(aliases),
        moves,
        {other: place for other, place in having.items() if other != chosen},
        max(0, len(versions) - MOST_VERSIONS),
    )


def _seen(places: Places, store: Store) -> Store:
    """Restrict a store to the project of the places, if they have one."""
    return store if places.project is None else of_project(store, places.project)


ABOVE = (Link("Runs", "runs"), Link("Prompts and weights", "resources"))
LONGEST = 100_000
"""Most characters of a version's content that are shown."""


async def page(places: Places, address: Address) -> Page:
    """Make the page `resources` (the list) or `resources/NAME` (one resource)."""
    if not address.about:
        return await _list(places, address)
    view = await resource_view(places, address.about[0], address.option("store"))
    newest = view.versions[0].version
    after = view.version(address.number("to", newest))
    before = view.version(address.number("from", _before(view, after.version)))
    blocks: list[Block] = [_facts(view), _actions(view, after), _versions(view), _uses(view)]
    if view.elsewhere:
        marks = [(view.mark, view.store), *view.elsewhere.items()]
        own = Address(address.page, address.about)
        blocks.insert(0, Controls(str(own), [Control("store", "store", view.mark, marks)]))
    blocks += _content(address, view, before, after)
    blocks += [*_record(after), _moves(view)]
    return Page(str(address), view.name, blocks, ABOVE)


def _before(view: ResourceView, version: int) -> int:
    """Return the version to compare a version with: its parent if that is known, else the next older one, else itself."""
    parent = view.version(version).metadata.get("parent")
    known = {each.version for each in view.versions}
    if isinstance(parent, int) and parent in known:
        return parent
    return max((each for each in known if each < version), default=version)


async def _by_name(store: Store) -> dict[str, tuple[list[Resource], dict[str, int]]]:
    """Return, by name, the versions of each resource of a store, the oldest first, and the version of each alias."""
    found: dict[str, tuple[list[Resource], dict[str, int]]] = {}
    for each in await list_resources(store):
        found.setdefault(each.name, ([], {}))[0].append(each)
    for alias in await list_aliases(store):
        if alias.alias != LATEST and alias.name in found:
            found[alias.name][1][alias.alias] = alias.version
    return found


async def _list(places: Places, address: Address) -> Page:
    found, unreadable = await places.ask(lambda store: _by_name(_seen(places, store)))
    lines = [(url, name, *known) for url, resources in found.items() for name, known in resources.items()]
    rows = [
        [
            Cell(name, to("resources", name, store=mark_of(url))),
            Cell(str(versions[-1].kind)),
            Cell(count(len(versions))),
            Cell(", ".join(f"{alias} = {version}" for alias, version in aliases.items()) or NONE),
            Cell(when(versions[-1].created_at)),
            Cell(url),
        ]
        for url, name, versions, aliases in sorted(lines, key=lambda line: (-line[2][-1].created_at, line[1]))
    ]
    columns = [
        Column("name"),
        Column("kind"),
        Column("versions", "number"),
        Column("aliases"),
        Column("newest"),
        Column("store"),
    ]
    empty = "no prompts or weights here: prompt optimisation makes them, and `lightning resources put`"
    blocks = [*cannot_read(unreadable), Table(columns, rows, empty=empty)]
    return Page(str(address), "Prompts and weights", blocks, ABOVE[:1])


def _facts(view: ResourceView) -> Facts:
    facts = [Fact("kind", str(view.versions[0].kind)), Fact("versions", count(len(view.versions) + view.left_out))]
    facts += [
        Fact(alias.alias, f"version {alias.version}", f"since {when(alias.at)}" if alias.at else "")
        for alias in view.aliases
    ]
    return Facts([*facts, Fact("store", view.store)])


def _versions(view: ResourceView) -> Table:
    rows = []
    for each in view.versions:
        named = [alias.alias for alias in view.aliases if alias.version == each.version]
        scored = [use for use in view.uses if use.version == each.version]
        rows.append(
            [
                Cell(str(each.version), _shown(view, each.version)),
                Cell(", ".join(named) or NONE),
                Cell(when(each.created_at)),
                Cell(count(sum(use.rollouts for use in scored))),
                Cell(number(_mean(scored))),
                Cell(_origin(each.metadata)),
                Cell(each.digest[:12], hint=each.digest),
            ]
        )
    columns = [
        Column("version", "number"),
        Column("aliases"),
        Column("made"),
        Column("rollouts", "number"),
        Column("mean reward", "number", "over all runs and splits"),
        Column("where it comes from"),
        Column("SHA-256"),
    ]
    note = f"{count(view.left_out)} older versions are not shown" if view.left_out else ""
    return Table(columns, rows, title="Versions", note=note)


def _origin(metadata: Mapping[str, Json]) -> str:
    """Return in words what is recorded about the making of a version. What is no short text or number is left out: all of it
    stands below, as JSON."""
    told = dict(metadata)
    parts = []
    for name, words in ORIGINS.items():
        value = told.pop(name, None)
        if isinstance(value, str | int | float):
            parts.append(words.format(number(value) if isinstance(value, float) else value))
    parts += [f"{name.replace('_', ' ')} {written(value, 60)}" for name, value in told.items() if _is_short(value)]
    return ", ".join(parts) or NONE


def _is_short(value: Json) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and 0 < len(value) <= 60)


def _record(chosen: Resource) -> list[Block]:
    if not chosen.metadata:
        return []
    text = json.dumps(dict(chosen.metadata), ensure_ascii=False)
    said = Message("record", "", f"version {chosen.version}", [("all that is recorded about its making", text)])
    return [Messages([said], title="Record")]


def _mean(uses: Sequence[ResourceUse]) -> float | None:
    scored = sum(use.scored for use in uses)
    return sum((use.reward or 0.0) * use.scored for use in uses) / scored if scored else None


def _shown(view: ResourceView, version: int) -> str:
    return to("resources", view.name, store=view.mark, to=version)


def _uses(view: ResourceView) -> Table:
    rows = [
        [
            Cell(str(use.version), _shown(view, use.version)),
            Cell(use.run, to("run", key_of(use.run, view.store))),
            Cell(use.split),
            Cell(count(use.rollouts)),
            Cell(count(use.failed), tone="bad" if use.failed else ""),
            Cell(number(use.reward)),
        ]
        for use in view.uses
    ]
    columns = [
        Column("version", "number"),
        Column("run"),
        Column("split"),
        Column("rollouts", "number"),
        Column("failed", "number"),
        Column("mean reward", "number"),
    ]
    return Table(columns, rows, title="Reward of each version", empty="no rollout has used it yet")


def _content(address: Address, view: ResourceView, before: Resource, after: Resource) -> list[Block]:
    if before.version == after.version:
        text = _text(after)
        role = "system" if isinstance(after.content, str) else "files"
        return [Messages([Message(role, text, f"version {after.version}")], title="Content")]
    choices = [(str(each.version), f"version {each.version}") for each in view.versions]
    return [
        Controls(
            str(address),
            [
                Control("from", "from", str(before.version), choices),
                Control("to", "to", str(after.version), choices),
            ],
        ),
        Diff(
            f"version {before.version}",
            f"version {after.version}",
            _text(before),
            _text(after),
            _shown(view, before.version),
            _shown(view, after.version),
            title="What is different",
        ),
    ]


def _text(resource: Resource) -> str:
    content = resource.content
    if isinstance(content, Mapping) and isinstance(files := content.get("files"), Mapping):
        lines = [f"{name}  SHA-256 {digest}" for name, digest in sorted(files.items())]
        return cut("\n".join([f"folder {content.get('path')}", *lines]), LONGEST)
    text = content if isinstance(content, str) else json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
    return cut(text, LONGEST)


def _actions(view: ResourceView, chosen: Resource) -> Actions:
    """Return the buttons for the shown version: point an alias to it, or move an alias back."""
    actions = []
    about = {"store": view.store, "name": view.name}
    for alias in view.aliases:
        if alias.alias == LATEST:
            continue
        if alias.version != chosen.version:
            actions.append(
                Action(
                    "promote",
                    f"point {alias.alias} to version {chosen.version}",
                    {**about, "alias": alias.alias, "version": chosen.version},
                    f"{alias.alias} points to version {alias.version} now. Point it to version {chosen.version}?",
                )
            )
        if len(view.moves[alias.alias]) > 1:
            actions.append(
                Action(
                    "roll_back",
                    f"roll {alias.alias} back",
                    {**about, "alias": alias.alias, "version": alias.version},
                    f"point {alias.alias} to where it pointed before version {alias.version}?",
                )
            )
    actions.append(
        Action(
            "promote",
            f"point another alias to version {chosen.version}",
            {**about, "version": chosen.version},
            f"point it to version {chosen.version}?",
            [("alias", "alias")],
        )
    )
    return Actions(actions, title=f"Version {chosen.version}")


def _moves(view: ResourceView) -> Table:
    moves = sorted((move for moves in view.moves.values() for move in moves), key=lambda each: -each.at)
    rows = [
        [Cell(move.alias), Cell(str(move.version), _shown(view, move.version)), Cell(when(move.at))] for move in moves
    ]
    columns = [Column("alias"), Column("version", "number"), Column("since")]
    return Table(
        columns,
        rows,
        title="Where aliases pointed",
        empty="there is no alias except latest, which always names the newest version",
    )
