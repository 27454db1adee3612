"""Charts of any metric of a run, a user's own included: chosen ones on the run's page, and a page with all metrics.

The invariant: what is chosen is in the address, so that the same charts can be opened by somebody else.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, unquote

from lightning_console.blocks import Block, Cell, Chart, Column, Control, Controls, Notice, Notices, Page, Series, Table
from lightning_console.pages.words import NONE, count, located, to, trail
from lightning_console.places import Located, Places
from lightning_console.queries.curves import AXES, Axis, Curves, read_curves
from lightning_console.queries.runs import SPARK, line_of, points_of, thinned
from lightning_console.router import Address

MOST: Final = 12
"""Most charts that an address chooses."""
OPTION: Final = "chart"


def names_of(curves: Curves) -> list[str]:
    """Return the names of all metrics of a run, sorted; those that were logged before the first step, too."""
    return sorted({*curves.names, *curves.start})


def chosen(address: Address) -> list[str]:
    """Return the metrics whose charts an address chooses, in order, each once."""
    names = (unquote(part) for part in address.option(OPTION).split(",") if part)
    return list(dict.fromkeys(names))[:MOST]


def choosing(address: Address, names: Sequence[str]) -> Address:
    """Return the address with the charts of these metrics chosen."""
    return address.having(**{OPTION: ",".join(quote(name, safe="/") for name in names) or None})


def toggled(address: Address, name: str) -> Address:
    """Return the address with the chart of a metric added, or taken away if it is chosen."""
    now = chosen(address)
    return choosing(address, [each for each in now if each != name] if name in now else [*now, name])


def picker(address: Address, curves: Curves, *more: Control) -> list[Block]:
    """Return the control that adds charts and takes them away, behind the controls `more`; none for a run without a metric."""
    names, now = names_of(curves), chosen(address)
    if not names:
        return []
    choices = [
        (toggled(address, name).option(OPTION), f"take away {name}" if name in now else name)
        for name in [*now, *(name for name in names if name not in now)]
    ]
    current = choosing(address, now).option(OPTION)
    control = Control(OPTION, "charts of metrics", current, [(current, "add a metric …"), *choices])
    return [Controls(str(address), [*more, control])]


def charts_of(found: Located, curves: Curves, address: Address, axis: Axis = "step") -> list[Block]:
    """Return a chart for each metric that the address chooses, and a notice about names that no step has."""
    names, there = chosen(address), set(names_of(curves))
    missing = [name for name in names if name not in there]
    notices = [
        Notice(f"no step of this run has the metric {name!r}", "warn", detail=_near(name, there)) for name in missing
    ]
    blocks: list[Block] = [Notices(notices)] if notices else []
    marks = [
        (float(change.step), f"settings changed: {'; '.join(change.changes)[:200]}")
        for change in (curves.changes if axis == "step" else ())
    ]
    for name in names:
        if name in there:
            steps, xs, values = curves.course(name, axis)
            points, places = points_of(xs, values)
            opens = [to("step", found.key, steps[place]) if steps[place] else "" for place in places]
            series = Series(name, points, to=opens)
            lacks = sum(value is None for value in values)
            note = f"{count(lacks)} of {count(len(values))} steps have no finite value" if lacks else ""
            blocks.append(Chart([series], AXES[axis], "", marks=marks, whole=axis == "step", title=name, note=note))
    return blocks


def _near(name: str, there: set[str]) -> str:
    near = difflib.get_close_matches(name, there, 3, 0.5)
    return f"did you mean {' or '.join(near)}?" if near else "the page of all metrics lists those that it has"


async def page(places: Places, address: Address) -> Page:
    """Make the page `metrics/RUN?chart=NAME,NAME&over=step|tokens|time`."""
    found = await located(places, address)
    curves = await read_curves(found.store, found.run)
    asked = address.option("over", "step")
    axis: Axis = "tokens" if asked == "tokens" else "time" if asked == "time" else "step"
    over = Control("over", "over", axis, [(name, label) for name, label in AXES.items()])
    return Page(
        str(address),
        "Metrics",
        [*picker(address, curves, over), *charts_of(found, curves, address, axis), _table(address, curves)],
        trail(found),
        live=(await line_of(found.store, found.run, found.url)).state.name == "running",
    )


def _table(address: Address, curves: Curves) -> Table:
    """Return the table of all metrics with a small curve of each. A click adds or takes away its chart."""
    now = set(chosen(address))
    rows = []
    for name in names_of(curves):
        _, _, values = curves.course(name, "step")
        known = [value for value in values if value is not None]
        here = str(toggled(address, name))
        rows.append(
            [
                Cell(f"✓ {name}" if name in now else name, here),
                Cell(_short(known[0] if known else None)),
                Cell(_short(known[-1] if known else None)),
                Cell(_short(min(known, default=None))),
                Cell(_short(max(known, default=None))),
                Cell("", here, spark=thinned(values, SPARK)),
            ]
        )
    columns = [
        Column("metric"),
        *(Column(name, "number") for name in ("first", "last", "least", "most")),
        Column("course"),
    ]
    note = f"of {count(len(curves.steps))} steps, your own stages and losses included; in the console, a click adds a chart"
    return Table(columns, rows, title="All metrics", note=note if rows else "", empty="no step is committed yet")


def _short(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"
