"""The page of all runs at a place, with their states, rewards and alarms."""

from __future__ import annotations

from typing import Final

from lightning.store.url import redacted
from lightning.trainer.gains import margin

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
    Tone,
)
from lightning_console.pages.words import (
    NONE,
    change,
    count,
    counted,
    name_of,
    number,
    page_links,
    plus_or_minus,
    share,
    to,
    when,
    written,
)
from lightning_console.places import Places
from lightning_console.queries.advice import look_at
from lightning_console.queries.runs import STATES, Name, RunLine, RunList, list_runs
from lightning_console.router import Address

ROWS: Final = 100
"""Number of runs on a page."""
COLUMNS: Final = (
    ("run", "text", "run", "its id; a click opens it"),
    ("state", "text", "state", "running only where something says so; a finished run has recorded its end"),
    ("alarms", "text", "alarms", "those at the top of the run's page; earlier: no more after the last step"),
    ("reward", "number", "reward", "mean of the last step, failed rollouts as 0"),
    ("course", "text", "", "the reward of each step, failed rollouts as 0"),
    ("held-out", "number", "held-out", "the first evaluation and the last, failed rollouts as 0"),
    ("step", "number", "steps", "the last committed step"),
    ("rollouts", "number", "rollouts", "all of them, evaluations included"),
    ("failed", "number", "failed", "rollouts that failed"),
    ("model", "text", "", "the model's folder, and the algorithm"),
    ("started", "text", "started", "when the run began"),
)
TONES: Final[dict[Name, Tone]] = {
    "running": "",
    "finished": "",
    "stopped": "warn",
    "failed": "bad",
    "session": "muted",
    "unread": "muted",
}


async def page(places: Places, address: Address) -> Page:
    """Make the page `runs?q=&state=&sort=&cursor=&runs=KEY,KEY`. `sort` is one of `queries.runs.ORDERS`, `-` before it for
    descending order; `q` filters by words; `runs` are the keys of the marked runs."""
    sort = address.option("sort", "-started")

    async def listed() -> RunList:
        return await list_runs(
            places,
            text=address.option("q"),
            state=address.option("state"),
            sort=sort.removeprefix("-"),
            descending=sort.startswith("-"),
            first=max(0, address.number("cursor", 0)),
            limit=ROWS,
        )

    found = await listed()
    if (looked := await look_at(places, found.lines)) is not False:
        found = await listed()
    marked = [key for key in address.option("runs").split(",") if key]
    blocks: list[Block] = [*_unreadable(found), _controls(address, found)]
    blocks += _marked(marked, address)
    blocks.append(_table(address, found, marked, sort, places))
    if found.total:
        blocks.insert(len(blocks) - 1, _facts(found))
    before, after = _neighbours(address, found)
    waits = looked is None
    live = found.reading or waits or bool(found.states.get("running"))
    return Page(str(address), "Runs", blocks, live=live, previous=before, next=after, partial=waits)


def _unreadable(found: RunList) -> list[Block]:
    notices = [Notice(f"{url} cannot be read", "bad", detail=why) for url, why in found.unreadable.items()]
    notices += [
        Notice(f"{url} has more runs than are listed", "warn", detail="only the newest of it are here")
        for url in found.left_out
    ]
    return [Notices(notices)] if notices else []


def _facts(found: RunList) -> Facts:
    return Facts(
        [
            Fact(
                name,
                count(found.states.get(name, 0)),
                tone=TONES[name] if found.states.get(name) else "",
                to=to("runs", state=name),
            )
            for name in STATES
        ]
    )


def _controls(address: Address, found: RunList) -> Controls:
    states = [("", f"all {found.total}"), *((name, f"{name} {found.states.get(name, 0)}") for name in STATES)]
    return Controls(
        str(address.having(cursor=None)),
        [
            Control("q", "name, model or algorithm", address.option("q")),
            Control("state", "state", address.option("state"), states),
        ],
    )


def _marked(marked: list[str], address: Address) -> list[Block]:
    if not marked:
        return []
    keys = ",".join(marked)
    text = f"{counted(len(marked), 'run is', 'runs are')} marked"
    links = [Link("compare them" if len(marked) > 1 else "open it in compare", to("compare", runs=keys))]
    return [Notices([Notice(text, links=[*links, Link("mark none", str(address.having(runs=None)))])])]


def _table(address: Address, found: RunList, marked: list[str], sort: str, places: Places) -> Table:
    if found.total:
        empty = "no run is like this: change the filters"
    else:
        empty = f"no runs in {redacted(places.where) or 'this store'} yet; `lightning demo` makes one"
    return Table(
        [
            Column(name, "number" if kind == "number" else "text", hint, _sorted_by(address, by, sort) if by else "")
            for name, kind, by, hint in COLUMNS
        ],
        [_row(line) for line in found.lines],
        empty=empty,
        keys=[line.key for line in found.lines],
        select="runs",
        selected=marked,
        pages=page_links(address, found.matched, ROWS),
        note=f"sorted by {sort.removeprefix('-')}, {'the largest first' if sort.startswith('-') else 'the least first'}; "
        "mark rows to compare runs"
        if found.lines
        else "",
    )


def _sorted_by(address: Address, by: str, now: str) -> str:
    return str(address.having(sort=by if now == f"-{by}" else f"-{by}", cursor=None))


def _row(line: RunLine) -> list[Cell]:
    here = to("run", line.key)
    first, last = line.before, line.after
    newest = last or first
    return [
        Cell(
            name_of(line.id, line.store, "~" in line.key),
            here,
            hint=line.unread or line.store,
            tone="warn" if line.unread else "",
        ),
        Cell(line.state.name + (", pruned" if line.pruned else ""), tone=TONES[line.state.name], hint=line.state.why),
        _alarms(line),
        Cell(number(line.reward_with_failures), hint=f"without failures {number(line.reward)}" if line.failed else ""),
        Cell("", here if line.rewards else "", spark=line.rewards),
        Cell(
            change(first.score, last.score if last else None)
            if first
            else "no held-out tasks"
            if not line.about.held_out and line.state.name != "unread"
            else NONE,
            tone="" if first else "muted",
            hint=f"after {counted(newest.step, 'step')}, {plus_or_minus(margin(newest))} (95 %)" if newest else "",
        ),
        Cell(
            NONE if line.last is None else str(line.last),
            to("step", line.key, line.last) if line.last is not None else "",
        ),
        Cell(count(line.rollouts)),
        Cell(
            count(line.failed),
            tone="warn" if (line.failed_share or 0.0) > 0.1 else "",
            hint=f"{share(line.failed_share)} of the last step",
        ),
        Cell(line.about.model or NONE, hint=line.about.algorithm),
        Cell(when(line.created_at)),
    ]


def _alarms(line: RunLine) -> Cell:
    """Return the cell with a run's alarms, or with the reason if the run cannot be read whole."""
    here = to("run", line.key)
    if line.unread:
        return Cell(f"cannot be read: {written(line.unread, 100)}", here, "bad", line.unread)
    now = [each for each in line.alarms if each.still]
    earlier = len(line.alarms) - len(now)
    if not line.alarms:
        none = "no step yet" if not line.steps else "none" if line.looked else "being read …"
        none = NONE if line.state.name == "unread" else none
        return Cell(none, tone="muted")
    counts = [f"{count(len(now))} now"] if now else []
    counts += [f"{count(earlier)} earlier"] if earlier else []
    names = [each.found.cause.partition("/")[0] for each in now or line.alarms]
    said = f"{', '.join(counts)}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    serious = any(each.found.serious for each in now)
    told = "\n".join(f"{each.found.text} ({each.when})" for each in line.alarms)
    return Cell(said, here, "bad" if serious else "warn" if now else "", told)


def _neighbours(address: Address, found: RunList) -> tuple[str, str]:
    before = str(address.having(cursor=max(0, found.first - ROWS) or None)) if found.first else ""
    after = str(address.having(cursor=found.first + ROWS)) if found.first + ROWS < found.matched else ""
    return before, after
