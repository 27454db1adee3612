"""`lightning resources`: lists, compares and promotes versions of prompts, weights and settings.

The invariant: versions are only added and aliases only moved, so that `rollback` can undo every change. `prune` deletes files
of old weights, not versions.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.output import (
    AsJson,
    answers,
    escape,
    local_time,
    next_steps,
    print_json,
    print_table,
    say,
    with_store,
)
from lightning.errors import ConfigError, DataError
from lightning.safe_text import printable, read_text
from lightning.store.places import existing_store
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.types import Json, by_key

from lightning_resources.nouns import LATEST, Alias, Resource, ResourceKind, ResourceUse
from lightning_resources.operations import (
    alias_history,
    get_resource,
    list_aliases,
    list_resources,
    put_resource,
    resource_uses,
    roll_back_alias,
    set_alias,
)
from lightning_resources.reference import ResourceReference, find, parse_reference
from lightning_resources.weights import superseded, weights_content

app = typer.Typer(no_args_is_help=True)

Runs = Annotated[
    str,
    typer.Option("--runs", metavar="PLACE", help="Where to look for names without PLACE#, as for `lightning runs`."),
]
Named = Annotated[
    str, typer.Argument(help="NAME@VERSION or NAME@ALIAS; prefix PLACE# to choose one of several stores.")
]
AliasName = Annotated[str, typer.Option("--alias", help="The alias to move.")]


@dataclass(frozen=True, slots=True)
class Listed:
    """One resource of one store."""

    store: str
    name: str
    kind: str
    versions: int
    aliases: dict[str, int]
    created_at: float


@app.command("ls")
def ls(
    place: Annotated[str, typer.Argument(help="A folder of runs, a run's folder, a database file, or a URL.")] = "runs",
    as_json: AsJson = False,
) -> None:
    """List resources with their number of versions and their aliases."""
    rows = [row for _, found in answers(place, _list) for row in found]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["name", "kind", "versions", "aliases", "newest", "store"],
            [
                [
                    escape(row.name),
                    row.kind,
                    str(row.versions),
                    escape(", ".join(f"{alias} = {version}" for alias, version in row.aliases.items())),
                    local_time(row.created_at),
                    escape(row.store),
                ]
                for row in rows
            ],
        )
        most = max(rows, key=lambda row: row.versions).name
        if sum(row.name == most for row in rows) == 1:
            named = _words(ResourceReference(most), place)
            next_steps((f"compare the versions of {most}", ["resources", "compare", *named]))
    else:
        say(f"no resources in {escape(redacted(place))}: prompt optimisation makes them, and `lightning resources put`")


@app.command("show")
def show(
    named: Named,
    content: Annotated[bool, typer.Option("--content", help="Print the content and nothing else.")] = False,
    where: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Show one version: its content, its origin, and the history of its aliases."""
    url, reference = locate(named, where)

    async def read(store: Store) -> tuple[Resource, list[list[Alias]]]:
        resource = await find(store, reference)
        names = [alias.alias for alias in await list_aliases(store, reference.name) if alias.alias != "latest"]
        return resource, [await alias_history(store, reference.name, name) for name in names]

    resource, histories = asyncio.run(with_store(url, read))
    if content:
        text = _text(resource)
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    elif as_json:
        moves = {history[0].alias: [[move.version, move.at] for move in history] for history in histories}
        print_json({"resource": resource, "digest": resource.digest, "aliases": moves})
    else:
        say(
            f"[bold]{escape(resource.name)}@{resource.version}[/bold], {resource.kind.value}, {local_time(resource.created_at)}"
        )
        say(f"sha256 {resource.digest}")
        for key, value in resource.metadata.items():
            say(f"{escape(key)}: {escape(value if isinstance(value, str) else json.dumps(value))}")
        for history in histories:
            say(f"{escape(history[0].alias)}: " + " → ".join(str(move.version) for move in history))
        say("")
        say(escape(_text(resource)))
        named_again = _words(reference, where)
        next_steps(("compare it with the other versions", ["resources", "compare", *named_again]))


@app.command("diff")
def diff(
    name: Annotated[str, typer.Argument(help="The resource; prefix PLACE# to choose one of several stores.")],
    old: Annotated[str, typer.Argument(help="A version or an alias.")],
    new: Annotated[str, typer.Argument(help="A version or an alias to compare with.")],
    where: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Compare two versions: what changed, and the rollouts and rewards under each."""
    url, reference = locate(name, where)

    async def read(store: Store) -> tuple[Resource, Resource, list[ResourceUse]]:
        one = await find(store, parse_reference(f"{reference.name}@{old}"))
        other = await find(store, parse_reference(f"{reference.name}@{new}"))
        return one, other, await resource_uses(store, reference.name)

    one, other, used = asyncio.run(with_store(url, read))
    uses = [use for version in (one.version, other.version) for use in used if use.version == version]
    lines = list(
        difflib.unified_diff(
            _text(one).splitlines(),
            _text(other).splitlines(),
            f"{one.name}@{one.version}",
            f"{other.name}@{other.version}",
            lineterm="",
        )
    )
    if as_json:
        print_json({"old": one, "new": other, "diff": lines, "uses": uses})
        return
    for line in lines:
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "default")
        say(f"[{colour}]{escape(line)}[/{colour}]")
    _show_uses(uses)
    named = _words(reference, where, other.version)
    next_steps((f"use version {other.version} from the next start on", ["resources", "promote", *named]))


@app.command("compare")
def compare(
    name: Annotated[str, typer.Argument(help="The resource; prefix PLACE# to choose one of several stores.")],
    served: Annotated[
        list[str] | None,
        typer.Option(
            "--served", metavar="PLACE", help="Count the rollouts of this store, too: a `lightning serve` has its own."
        ),
    ] = None,
    where: Runs = "runs",
    as_json: AsJson = False,
) -> None:
    """Compare all versions: how each was made, its aliases, and what its rollouts and served conversations earned."""
    url, reference = locate(name, where)

    async def read(store: Store) -> tuple[list[Resource], list[Alias], list[ResourceUse]]:
        versions, aliases = await list_resources(store, reference.name), await list_aliases(store, reference.name)
        return versions, aliases, await resource_uses(store, reference.name)

    versions, aliases, uses = asyncio.run(with_store(url, read))
    for place in served or ():
        uses += asyncio.run(with_store(existing_store(place), lambda store: resource_uses(store, reference.name)))
    if as_json:
        print_json({"versions": versions, "aliases": aliases, "uses": uses})
        return
    print_table(
        ["version", "made", "run", "held-out reward", "aliases", "rollouts", "mean reward"],
        [
            [
                str(version.version),
                local_time(version.created_at),
                escape(str(version.metadata.get("run", version.metadata.get("made_by", "-")))),
                _reward(version.metadata.get("reward")),
                escape(", ".join(alias.alias for alias in aliases if alias.version == version.version)),
                str(sum(use.rollouts for use in uses if use.version == version.version)),
                _reward(_mean([use for use in uses if use.version == version.version])),
            ]
            for version in versions
        ],
    )
    named = _words(reference, where, "VERSION")
    next_steps(("use a version from the next start on", ["resources", "promote", *named]))


@app.command("promote")
def promote(named: Named, alias: AliasName = "production", where: Runs = "runs") -> None:
    """Point an alias to a version. Runs that refer to the alias use that version from their next start."""

    async def point(store: Store, reference: ResourceReference) -> Alias:
        resource = await find(store, reference)
        return await set_alias(store, reference.name, alias, resource.version)

    _move(named, alias, where, point)


@app.command("rollback")
def rollback(
    name: Annotated[str, typer.Argument(help="The resource; prefix PLACE# to choose one of several stores.")],
    alias: AliasName = "production",
    where: Runs = "runs",
) -> None:
    """Point an alias back to its previous version."""
    _move(name, alias, where, lambda store, reference: roll_back_alias(store, reference.name, alias))


@app.command("put")
def put(
    name: Annotated[
        str, typer.Argument(help="PLACE#NAME: a run's folder, a database file or a URL, and the resource's name.")
    ],
    source: Annotated[Path, typer.Argument(help="A text file; a JSON file for `config`; a folder for `weights`.")],
    kind: Annotated[ResourceKind, typer.Option(help="The kind of the resource.")] = ResourceKind.PROMPT,
) -> None:
    """Add a version by hand. Content that a version already has adds no new version."""
    reference = parse_reference(name)
    if not reference.place:
        raise ConfigError(
            f"{name!r} does not say in which store: write PLACE#{reference.name}, for example runs/a#{name}"
        )
    if reference.which != LATEST:
        raise ConfigError(
            f"'{reference.name}@{reference.which}' names a version that is there, and versions never change: leave "
            f"@{reference.which} out"
        )
    resource = Resource(reference.name, read_content(source, kind), kind, {"made_by": "hand", "source": str(source)})
    stored = asyncio.run(with_store(existing_store(reference.place), lambda store: put_resource(store, resource)))
    say(f"{escape(stored.name)}@{stored.version} ({stored.kind.value}, sha256 {stored.digest[:12]})")
    named = _words(reference, "", stored.version)
    next_steps(("use it from the next start on", ["resources", "promote", *named]))


@app.command("prune")
def prune(
    name: Annotated[str, typer.Argument(help="The weights; prefix PLACE# to choose one of several stores.")],
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest versions keep their files.")] = 3,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete the files; without this option, only show what would be deleted.")
    ] = False,
    where: Runs = "runs",
) -> None:
    """Delete the files of old versions of weights, but not of those that an alias points to, or would after a rollback."""
    url, reference = locate(name, where, to_change=True)
    old = asyncio.run(with_store(url, lambda store: superseded(store, reference.name, keep)))
    for version in old:
        size = version.delete() if apply else version.size
        done = "deleted" if apply else "would be deleted"
        say(f"{escape(reference.name)}@{version.number}: {size / 1e6:.1f} MB in {escape(str(version.folder))} {done}")
    if not old:
        say(f"every version of {escape(reference.name)} that has files keeps them")
    elif not apply:
        say("nothing was deleted: add --apply")


def read_content(source: Path, kind: ResourceKind) -> Json:
    """Read the content of a resource from disk. Raises `DataError` that names the file."""
    try:
        if kind is ResourceKind.WEIGHTS:
            return weights_content(source)
        text = read_text(source, DataError)
        content: Json = json.loads(text) if kind is ResourceKind.CONFIG else text
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be read as a {kind.value}: {error}") from error
    return content


async def _list(url: str, store: Store) -> list[Listed]:
    versions = by_key(await list_resources(store), lambda resource: resource.name)
    aliases = await list_aliases(store)
    return [
        Listed(
            redacted(url),
            name,
            found[-1].kind.value,
            len(found),
            {alias.alias: alias.version for alias in aliases if alias.name == name},
            found[-1].created_at,
        )
        for name, found in versions.items()
    ]


def locate(text: str, where: str, *, to_change: bool = False) -> tuple[str, ResourceReference]:
    """Return the URL of the store that has a resource, and the parsed reference. Raises `ConfigError` when no store in `where`
    has it, or several have. With `to_change`, an error of opening any of the stores is raised, since that store may be the one
    meant."""
    reference = parse_reference(text)
    if reference.place:
        return existing_store(reference.place), reference
    asked = answers(where, lambda _, store: list_resources(store, reference.name), all_of_them=to_change)
    having = [url for url, found in asked if found]
    if len(having) == 1:
        return having[0], reference
    if having:
        raise ConfigError(
            f"{len(having)} stores in {where} have a resource {reference.name!r}: write PLACE#{text} with one of "
            f"{', '.join(redacted(url) for url in having)}"
        )
    raise ConfigError(
        f"no store in {redacted(where)} has a resource {reference.name!r}: `lightning resources ls` lists them"
    )


def _show_uses(uses: Sequence[ResourceUse]) -> None:
    print_table(
        ["version", "run", "split", "rollouts", "failed", "mean reward", "failed as 0"],
        [
            [
                str(use.version),
                escape(use.run),
                escape(use.split),
                str(use.rollouts),
                str(use.failed),
                "-" if use.reward is None else f"{use.reward:.3f}",
                f"{(use.reward or 0.0) * use.scored / ended:.3f}" if (ended := use.scored + use.failed) else "-",
            ]
            for use in uses
        ],
        title="rollouts" if uses else "no rollout has run with either",
    )


def _mean(uses: Sequence[ResourceUse]) -> float | None:
    """Return the mean reward over all scored rollouts of these uses; None without any."""
    scored = sum(use.scored for use in uses)
    return sum((use.reward or 0.0) * use.scored for use in uses) / scored if scored else None


def _reward(value: Json) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _move(written: str, alias: str, where: str, move: Callable[[Store, ResourceReference], Awaitable[Alias]]) -> None:
    """Move an alias, and print its version before and after."""
    url, reference = locate(written, where, to_change=True)

    async def moved_in(store: Store) -> tuple[Resource | None, Alias]:
        before = await get_resource(store, reference.name, alias)
        return before, await move(store, reference)

    before, moved = asyncio.run(with_store(url, moved_in))
    was = "new" if before is None else f"it was {before.version}"
    say(f"{escape(moved.name)}@{escape(moved.alias)} is version {moved.version} ({was})")
    named = _words(reference, where)
    next_steps(("compare what its versions earned", ["resources", "compare", *named]))


def _words(reference: ResourceReference, where: str, which: int | str = "") -> list[str]:
    """Return the words of a command line that name a resource as the user did, and the version or alias `which` of it."""
    name = f"{reference.name}@{which}" if which else reference.name
    if reference.place:
        return [f"{reference.place}#{name}"]
    return [name] if where == "runs" else [name, "--runs", where]


def _text(resource: Resource) -> str:
    if isinstance(resource.content, str):
        return resource.content
    return json.dumps(resource.content, indent=2, sort_keys=True, ensure_ascii=False)
