"""The page of a search: the rollouts of a run in whose texts, tools or errors a text stands, with the place in its line."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Final

from lightning.errors import DataError

from lightning_console.blocks import (
    Block,
    Cell,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Notice,
    Notices,
    Page,
    Table,
)
from lightning_console.pages.tools import difference_of, difference_text, scan_notices
from lightning_console.pages.words import (
    count,
    counted,
    in_short,
    inside,
    located,
    number,
    page_links,
    to,
    trail,
    written,
)
from lightning_console.places import Located, Places
from lightning_console.queries.runs import line_of
from lightning_console.queries.scan import KINDS, Scan, scan_of
from lightning_console.queries.search import Match, Query, Results, search
from lightning_console.router import Address

EACH: Final = 25
"""Rollouts of one page."""
MOST_PAGES: Final = 20
MOST_PARTS: Final = 8
"""Most parts of the run that the sentence about the matches lists."""
SHARE: Final = 0.25
"""The share of a page's patience that a search waits for texts that are not read yet."""

FAILED: Final = [("", "any"), ("yes", "yes"), ("no", "no (cancelled ones left out)")]
EITHER: Final = [("", "any"), ("yes", "yes"), ("no", "no")]
"""The choices of a filter that takes rollouts with a property, or those without it."""


async def page(places: Places, address: Address) -> Page:
    """Make the page `search/RUN?q=&where=&above=&below=&failed=&cut=&odd=&step=&split=&cursor=`."""
    found = await located(places, address)
    query = query_of(address)
    patience = None if places.patience is None else SHARE * places.patience
    scan = await scan_of(found, patience=patience)
    first = max(0, address.number("cursor", 0))
    blocks: list[Block] = [_controls(address, query, scan), *scan_notices(scan)]
    following = ""
    goes_on = (await line_of(found.store, found.run, found.url)).state.name == "running"
    if query == Query():
        blocks.append(_beginning(scan))
    else:
        results = await asyncio.to_thread(search, scan, query, first, EACH)
        blocks += [
            *_whereabouts(address, results, scan),
            *_said(results, scan),
            *_facts(results),
            _table(found, address, query, results),
        ]
        following = str(address.having(cursor=first + EACH)) if first + EACH < results.matched else ""
    return Page(
        str(address),
        f"Search for {written(query.text, 60)}" if query.text else "Search",
        blocks,
        trail(found),
        live=not scan.whole or goes_on,
        partial=not scan.whole,
        previous=str(address.having(cursor=max(0, first - EACH) or None)) if first else "",
        next=following,
    )


def query_of(address: Address) -> Query:
    """Return the query of an address. Raises `DataError` for an option that has no such value."""
    where = address.option("where")
    if where not in ("", *KINDS):
        raise DataError(f"where={where[:40]!r} in the address is no place of texts: {', '.join(KINDS)}")
    return Query(
        address.option("q").strip(),
        where,
        _reward(address, "above"),
        _reward(address, "below"),
        _yes(address, "failed"),
        address.number("step", 0) if address.option("step") else None,
        address.option("split"),
        _yes(address, "cut"),
        _yes(address, "odd"),
    )


def _yes(address: Address, name: str) -> bool | None:
    value = address.option(name)
    if value not in ("", "yes", "no"):
        raise DataError(f"{name}={value[:40]!r} in the address is neither yes nor no")
    return value == "yes" if value else None


def _reward(address: Address, name: str) -> float | None:
    value = address.option(name)
    try:
        found = float(value) if value else None
    except ValueError:
        found = math.nan
    if found is not None and math.isnan(found):
        raise DataError(f"{name}={value[:40]!r} in the address is no number")
    return found


def _controls(address: Address, query: Query, scan: Scan) -> Controls:
    splits = sorted({each.split for each in list(scan.rollouts.values())} | ({query.split} if query.split else set()))
    named = {"train": "training rollouts", "val": "held-out rollouts"}
    return Controls(
        str(address.having(cursor=None)),
        [
            Control("q", "text, then Enter", query.text),
            Control("where", "found in", query.where, [("", "anywhere"), *((kind, kind) for kind in KINDS)]),
            Control("above", "reward at least", address.option("above")),
            Control("below", "reward at most", address.option("below")),
            Control("failed", "failed", address.option("failed"), FAILED),
            Control("cut", "an answer cut off", address.option("cut"), EITHER),
            Control("odd", "a tool call that could not run", address.option("odd"), EITHER),
            Control("step", "step", address.option("step")),
            Control(
                "split",
                "rollouts",
                query.split,
                [("", "all rollouts"), *((each, named.get(each, each)) for each in splits)],
            ),
        ],
    )


def _beginning(scan: Scan) -> Notices:
    text = f"{counted(len(scan.texts), 'different text')} of {counted(len(scan.rollouts), 'rollout')} can be searched"
    detail = (
        "type a text: it is found wherever it stands, in any script, without regard to case, in tasks, prompts, answers, "
        "arguments and results of tools, and errors. The filters work without a text, too"
    )
    return Notices([Notice(text, detail=detail)])


def _said(results: Results, scan: Scan) -> list[Block]:
    """Say what the search could not look at."""
    notices = []
    if results.looked < results.texts:
        done = f"{count(results.looked)} of {counted(results.texts, 'text')}"
        notices.append(
            Notice(f"the search stopped after {done}: it took too long", "warn", "a longer text is found faster")
        )
    why = Counter[str]()
    for each in list(scan.rollouts.values()):
        why.update(each.missing)
    for reason, calls in why.most_common(3):
        found = "" if results.matched else "this may be why nothing is found"
        notices.append(Notice(f"{counted(calls, 'call is', 'calls are')} not searched whole: {reason}", "muted", found))
    return [Notices(notices)] if notices else []


def _whereabouts(address: Address, results: Results, scan: Scan) -> list[Block]:
    """Say in one sentence in which parts of the run the matches are, and what they earned beside the others there. Each part
    has a link that shows its matches alone."""
    there = results.whereabouts
    if not results.matched:
        return []
    names = {"train": "in training step", "val": "held-out after step"}
    parts = [f"{count(many)} {names.get(split, f'{split}, step')} {step}" for split, step, many in there.parts]
    rest = f", and {counted(len(parts) - MOST_PARTS, 'more part')}" if len(parts) > MOST_PARTS else ""
    begun = "" if scan.whole else "So far "
    text = f"{begun}{counted(results.matched, 'rollout')}: {', '.join(parts[:MOST_PARTS])}{rest}"
    if there.earned is not None:
        beside = "" if there.others is None else f", the other rollouts of the same parts {number(there.others)}"
        text += f". They earned {number(there.earned)} on average{beside}"
    links = [
        Link(part, str(address.having(split=split, step=step, cursor=None)))
        for part, (split, step, _) in zip(parts[:MOST_PARTS], there.parts, strict=False)
    ]
    return in_short([Notice(text, links=links if len(parts) > 1 else ())])


def _facts(results: Results) -> list[Block]:
    beside = results.beside
    if beside is None:
        return []
    facts = [Fact("rollouts with it", count(results.matched), f"of {count(results.wanted)} that the filters take")]
    if beside.with_:
        facts.append(Fact("reward with it", number(beside.mean_with), f"of {counted(beside.with_, 'rollout')}"))
        facts.append(Fact("reward without it", number(beside.mean_without), f"of {counted(beside.without, 'rollout')}"))
        facts.append(Fact("difference within tasks", difference_of(beside), difference_text(beside)))
    return [Facts(facts)]


def _table(found: Located, address: Address, query: Query, results: Results) -> Table:
    rows = [row for match in results.matches for row in _rows(found, match)]
    around = [Column("text before"), Column("found"), Column("text behind")]
    if not query.text:
        around, rows = [Column("answer" if query.cut_off or query.odd else "text")], [row[:5] for row in rows]
    columns = [
        Column("rollout"),
        Column("step", "number"),
        Column("reward", "number"),
        Column("found in"),
        *around,
    ]
    last = results.first + len(results.matches)
    title = f"Rollouts {results.first + 1} to {last} of {count(results.matched)}" if results.matches else "Rollouts"
    pages = page_links(address, results.matched, EACH)[:MOST_PAGES]
    following = [Link("next", str(address.having(cursor=last)))] if last < results.matched else []
    empty = (
        "it stands in none of the texts that were searched"
        if results.beside is not None
        else "no rollout is as the filters say"
    )
    return Table(columns, rows, title=title, empty=empty, pages=[*following, *pages])


def _rows(found: Located, match: Match) -> list[list[Cell]]:
    rollout = match.rollout
    head = [
        Cell(inside(found, rollout.id), to("rollout", found.key, rollout.id), hint=rollout.input),
        Cell(str(rollout.step)),
        Cell(str(rollout.status) if rollout.reward is None else number(rollout.reward)),
    ]
    blank = [Cell(""), Cell(""), Cell("")]
    if not match.hits:
        return [[*head, Cell("task"), Cell(rollout.input), Cell(""), Cell("")]]
    rows = [
        [
            *(head if not place else blank),
            Cell(
                f"{hit.kind} of call {hit.call}" if hit.call else hit.kind,
                to("rollout", found.key, rollout.id, **_call(hit.call)),
            ),
            Cell(hit.before),
            Cell(hit.found),
            Cell(hit.after),
        ]
        for place, hit in enumerate(match.hits)
    ]
    if match.texts > len(match.hits):
        more = Cell(
            f"and in {counted(match.texts - len(match.hits), 'more text')} of it",
            to("rollout", found.key, rollout.id),
            "muted",
        )
        rows.append([*blank, more, Cell(""), Cell(""), Cell("")])
    return rows


def _call(call: int) -> dict[str, str | int]:
    return {"call": call} if call else {}
