"""`lightning db`: shows the content of a database, copies it, removes unneeded data, and exports it to files.

The invariant: nothing is overwritten, and nothing is removed unless it was asked for: `prune` without `--apply` only shows what
it would remove.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from lightning.errors import ConfigError, StoreError
from lightning.safe_text import counted
from lightning.store.places import existing_store
from lightning.store.protocol import Store
from lightning.store.url import parse, sqlite_url
from rich.filesize import decimal

from lightning_db.export import TABLES, ExportScope, chosen_runs, read_table
from lightning_db.export_files import Format, write_lines, write_table
from lightning_db.keeper import SERVERS, DatabaseStatus, keeper_of, look
from lightning_db.prune import PruneRequest, RunPlan, carry_out, plan

app = typer.Typer(no_args_is_help=True)

Place = Annotated[str, typer.Argument(help="A run's folder, a database file, or a store's URL.")]
RunNames = Annotated[list[str] | None, typer.Option("--run", metavar="RUN", help="Only this run; may be repeated.")]


@app.command("status")
def status(place: Place, as_json: AsJson = False) -> None:
    """Show a database's schema, runs, rollouts, calls, size and age."""
    url = existing_store(place)
    found = asyncio.run(_status(url))
    if as_json:
        print_json(found)
    else:
        print_table(["", escape(found.store)], [[name, escape(value)] for name, value in _lines(found)])
        next_steps(
            ("list its runs", ["runs", "--runs", place]),
            ("see what could be removed", ["db", "prune", place]),
        )


@app.command("backup")
def backup(
    place: Place,
    target: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
) -> None:
    """Write a consistent copy of a database into an SQLite file. Runs may continue writing meanwhile.

    The file is a normal store: every command reads it, and `lightning db restore` fills a new database from it.
    """
    asyncio.run(keeper_of(existing_store(place)).backup(target))
    say(f"{escape(str(target))}: {decimal(target.stat().st_size)}")
    next_steps(("list the runs of the copy", ["runs", "--runs", target]))


@app.command("restore")
def restore(
    source: Annotated[Path, typer.Argument(help="A backup, or the database file of any run.")],
    place: Annotated[
        str, typer.Argument(help="A database file that does not exist yet, or the URL of an empty database.")
    ],
) -> None:
    """Fill a new database from a backup. This also moves a run from SQLite to PostgreSQL or Redis."""
    if parse(existing_store(str(source))).scheme != "sqlite":
        raise ConfigError(f"{source} is not a file: make one with `lightning db backup` first")
    url = place if "://" in place else sqlite_url(Path(place).resolve())
    asyncio.run(keeper_of(url).restore(source))
    found = asyncio.run(keeper_of(url).status())
    calls = "an unknown number of calls" if found.calls is None else counted(found.calls, "call")
    rollouts = counted(sum(found.rollouts.values()), "rollout")
    say(f"{escape(found.store)}: {counted(found.runs, 'run')}, {rollouts}, {calls}")
    next_steps(("list its runs", ["runs", "--runs", place]))


@app.command("prune")
def prune(
    place: Place,
    run: RunNames = None,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="Only runs without an attempt for this time: 30d, 12h, 2w."),
    ] = "",
    whole: Annotated[bool, typer.Option("--whole", help="Remove whole runs, not only calls and spans.")] = False,
    trained: Annotated[
        bool,
        typer.Option(
            "--trained", help="Also remove calls that were trained; `lightning audit` can then no longer check them."
        ),
    ] = False,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also remove what a run needs for --resume.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Remove it; without this option, only show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove calls and spans that are no longer needed, or whole runs. Without --apply, only show what would be removed.

    Rewards, steps and metrics stay, except with --whole. What was trained and what a resumed run needs stay, except with
    --trained and --unfinished.
    """
    if whole and not run and not older_than:
        raise ConfigError("--whole removes runs: say which with --run or --older-than")
    choice = PruneRequest(
        tuple(run or ()), seconds_of(older_than, "age") if older_than else None, whole, trained, unfinished
    )
    plans = asyncio.run(_prune(existing_store(place), choice, apply=apply))
    if as_json:
        print_json({"applied": apply, "runs": plans})
    else:
        _show_plans(plans, apply=apply)


@app.command("export")
def export(
    place: Place,
    out: Annotated[
        str, typer.Argument(help="A folder, which gets one file per table; - writes one table to standard output.")
    ],
    table: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="TABLE", help=f"Only this table, one of {', '.join(TABLES)}; may be repeated."),
    ] = None,
    run: RunNames = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Only rollouts of this split, for example train.")
    ] = None,
    kind: Annotated[Format, typer.Option("--format", help="JSON lines, or Parquet (extra `parquet`).")] = Format.JSONL,
    attempts: Annotated[
        bool, typer.Option("--attempts", help="Also export lost attempts, not only the one that counts.")
    ] = False,
) -> None:
    """Export a store to files: rollouts, calls with their token ids, tool events, rewards, spans, steps, metrics."""
    tables = table or list(TABLES)
    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"{name!r} is no table of an export: choose of {', '.join(TABLES)}")
    if out == "-" and (len(tables) != 1 or kind is not Format.JSONL):
        raise ConfigError("standard output takes one table as JSON lines: give one --table, or a folder")
    scope = ExportScope(tuple(run or ()), split, attempts)
    for name, count, file in asyncio.run(_export(existing_store(place), out, tables, kind, scope)):
        say(f"{name}: {counted(count, 'row')}, {escape(str(file))}")


async def _status(url: str) -> DatabaseStatus:
    if parse(url).scheme not in SERVERS:
        return await keeper_of(url).status()
    return await with_store(url, lambda store: look(store, url))


async def _prune(url: str, choice: PruneRequest, *, apply: bool) -> list[RunPlan]:
    keeper = keeper_of(url)

    async def use(store: Store) -> list[RunPlan]:
        plans = await plan(store, keeper, choice)
        if apply:
            await carry_out(store, keeper, plans)
        return plans

    plans = await with_store(url, use)
    if apply and (left := await keeper.vacuum()):
        sys.stderr.write(f"{left}\n")
    return plans


async def _export(
    url: str, out: str, tables: Sequence[str], kind: Format, scope: ExportScope
) -> list[tuple[str, int, Path]]:
    async def use(store: Store) -> list[tuple[str, int, Path]]:
        runs = await chosen_runs(store, scope.runs)
        if out == "-":
            await write_lines(read_table(store, tables[0], runs, scope), sys.stdout.buffer)
            return []
        files = [(name, Path(out) / f"{name}.{kind.value}") for name in tables]
        for _, file in files:
            if file.exists():
                raise StoreError(f"{file} exists already: name another folder, nothing is written over")
        return [
            (name, await write_table(read_table(store, name, runs, scope), TABLES[name].columns, kind, file), file)
            for name, file in files
        ]

    return await with_store(url, use)


def _lines(found: DatabaseStatus) -> list[tuple[str, str]]:
    return [
        ("schema", "-" if found.schema is None else str(found.schema)),
        ("size", "-" if found.bytes is None else decimal(found.bytes)),
        ("runs", str(found.runs)),
        ("rollouts", _counts(found.rollouts)),
        ("calls", "-" if found.calls is None else str(found.calls)),
        ("spans", "-" if found.spans is None else str(found.spans)),
        ("steps", str(found.steps)),
        ("resources", counted(found.resources, "version")),
        ("tokens", "-" if found.tokens is None else _counts(found.tokens)),
        ("first run", local_time(found.oldest)),
        ("last attempt", local_time(found.newest)),
    ]


def _show_plans(plans: Sequence[RunPlan], *, apply: bool) -> None:
    print_table(
        ["run", "rollouts", "calls", "spans", "stored tokens", ""],
        [
            [
                escape(item.run),
                str(item.rollouts),
                str(item.weight.calls),
                str(item.weight.spans),
                decimal(item.weight.bytes),
                escape(item.kept or _what(item)),
            ]
            for item in plans
        ],
        title=("removed" if apply else "would be removed with --apply") if plans else "no run was chosen",
    )


def _what(item: RunPlan) -> str:
    what = "the whole run" if item.whole else "calls and spans"
    return (
        f"{what}; branches in other runs that lose what they sent and got: {item.branches}" if item.branches else what
    )


def _counts(counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)
    return f"{sum(counts.values())} ({parts})" if parts else "0"
