"""The page of tools: how often each tool failed, for which agent, with which arguments, and tool calls that could not run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Final

from lightning.types import by_key

from lightning_console.blocks import (
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Fact,
    Facts,
    Link,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)
from lightning_console.pages.words import (
    NONE,
    count,
    counted,
    in_short,
    inside,
    located,
    number,
    page_links,
    share,
    to,
    trail,
    written,
)
from lightning_console.places import Located, Places
from lightning_console.queries.runs import line_of
from lightning_console.queries.scan import LONGEST, MOST_BYTES, MOST_KEPT, OddCall, Scan, Scanned, scan_of
from lightning_console.queries.tool_stats import (
    Arguments,
    RewardBeside,
    ToolLine,
    Used,
    as_text,
    failing_arguments,
    reward_beside,
    tool_lines,
    uses_of,
)
from lightning_console.router import Address

EACH: Final = 50
"""Most failed tool runs, and most odd tool calls, that one page shows."""
MOST_TOOLS: Final = 40
NAMED_KINDS: Final = 5
"""Most kinds that a sentence lists."""
CURVES: Final = 5
SPLITS: Final = (("", "all rollouts"), ("train", "training rollouts"), ("val", "held-out rollouts"))
TROUBLES: Final = {
    "tool": "a tool that was not offered",
    "argument": "an argument that the tool does not have",
    "as text": "a tool call inside the text of the answer",
    "never run": "a tool call without a result",
}


async def page(places: Places, address: Address) -> Page:
    """Make the page `tools/RUN?step=&rollout=&split=&tool=&agent=`, about the tool runs of a run, of the rollouts of a step,
    or of one rollout; of one tool, or of all."""
    found = await located(places, address)
    step = address.number("step", 0) if address.option("step") else None
    scan = await scan_of(found, step=step, rollout=address.option("rollout"), patience=places.patience)
    split = address.option("split")
    rollouts = [
        each
        for each in list(scan.rollouts.values())
        if split in ("", each.split) and step in (None, each.step) and address.option("rollout") in ("", each.id)
    ]
    blocks: list[Block] = scan_notices(scan)
    if not address.option("rollout"):
        blocks.append(_controls(address))
    blocks += await asyncio.to_thread(_blocks, found, address, rollouts)
    more = _trail(found, address)
    goes_on = (await line_of(found.store, found.run, found.url)).state.name == "running"
    title, above, missing = _title(found, address), trail(found, *more), not scan.whole
    return Page(str(address), title, blocks, above, live=missing or goes_on, partial=missing)


def scan_notices(scan: Scan) -> list[Block]:
    """Say what of a run was not read, or not kept."""
    notices = []
    of = f" of {count(scan.total)}" if scan.total else ""
    if not scan.whole:
        detail = "everything below is about these; the rest is being read, and the page completes itself"
        notices.append(Notice(f"{count(len(scan.rollouts))}{of} rollouts were read so far", "warn", detail))
    elif scan.full:
        detail = (
            f"the console keeps at most {MOST_KEPT >> 20} MB of rollouts and tool runs: everything below is about these"
        )
        notices.append(Notice(f"only {count(len(scan.rollouts))}{of} rollouts were read", "warn", detail))
    elif (newer := scan.total - len(scan.rollouts)) > 0:
        notices.append(Notice(f"{count(newer)} newer rollouts are not read yet", "muted", "the page adds them later"))
    if scan.left_out:
        detail = f"the console keeps at most {MOST_BYTES >> 20} MB of texts: these are not searched; tools are counted"
        notices.append(Notice(f"{counted(scan.left_out, 'text is', 'texts are')} left out", "warn", detail))
    if scan.cut:
        notices.append(
            Notice(f"of {counted(scan.cut, 'text')} only the first {count(LONGEST)} characters are searched", "muted")
        )
    return [Notices(notices)] if notices else []


def more_links(found: Located, **of: str | int) -> Notices:
    """Return links from the page of a run, a step (`step=`) or a rollout (`rollout=`) to its tools and to the search. Those of
    a step are about its training rollouts: held-out rollouts of an evaluation after the step have its number, too."""
    of |= {"split": "train"} if "step" in of else {}
    links = [Link("tools: which failed, and with which arguments", to("tools", found.key, **of))]
    if "rollout" not in of:
        links.append(Link("search texts, cut-off answers, calls that could not run", to("search", found.key, **of)))
    return Notices([Notice("Tool runs and texts of these rollouts:", links=links)], title="Tools and texts")


def _title(found: Located, address: Address) -> str:
    if tool := address.option("tool"):
        return f"Tool {tool}, called by {address.option('agent')}" if address.option("agent") else f"Tool {tool}"
    if rollout := address.option("rollout"):
        return f"Tools of rollout {inside(found, rollout)}"
    return f"Tools of step {address.option('step')}" if address.option("step") else "Tools"


def _trail(found: Located, address: Address) -> list[Link]:
    links = []
    if step := address.option("step"):
        links.append(Link(f"step {step}", to("step", found.key, step)))
    if rollout := address.option("rollout"):
        links.append(Link(inside(found, rollout), to("rollout", found.key, rollout)))
    if address.option("tool"):
        links.append(Link("tools", str(address.having(tool=None, agent=None, cursor=None))))
    return links


def _controls(address: Address) -> Controls:
    return Controls(
        str(address.having(cursor=None)),
        [
            Control("split", "rollouts", address.option("split"), SPLITS),
            Control("step", "of the step", address.option("step")),
        ],
    )


def _blocks(found: Located, address: Address, rollouts: Sequence[Scanned]) -> list[Block]:
    tool, agent = address.option("tool"), address.option("agent")
    used = [(rollout, run) for rollout, run in uses_of(rollouts) if tool in ("", run.tool) and agent in ("", run.agent)]
    if not used and not any(each.odd for each in rollouts):
        return [_nothing(rollouts, tool)]
    lines = tool_lines(used)
    arguments = [failing_arguments(line.used) for line in lines[:MOST_TOOLS]]
    beside = reward_beside(rollouts, {rollout.id for rollout, run in used if run.failed})
    blocks: list[Block] = [
        *in_short(_answers(found, address, lines, arguments, rollouts)),
        _facts(address, rollouts, lines, arguments, beside),
        _table(address, lines, arguments),
        *_words(lines, rollouts),
    ]
    if tool:
        blocks += [_errors(lines), _arguments(lines, arguments)]
    if not address.option("rollout"):
        blocks.append(_rewards(rollouts, lines, beside))
        if not address.option("step"):
            blocks.append(_course(address, lines))
    return [*blocks, _failed_runs(found, address, used), _odd(found, rollouts, tool)]


def _nothing(rollouts: Sequence[Scanned], tool: str) -> Notices:
    """Say why there are no tool runs."""
    calls = sum(each.calls for each in rollouts)
    if tool:
        return Notices([Notice(f"no rollout here ran the tool {tool}", "muted")])
    if any(each.offers for each in rollouts):
        text = "tools were offered to the model, and it called none of them"
    else:
        text = "no tool run is recorded"
    detail = (
        f"{counted(len(rollouts), 'rollout')} with {counted(calls, 'call')} were read. A tool run is recorded where "
        "the framework's "
        "adapter reports it, or where @lightning.tool stands on the tool's function"
    )
    return Notices([Notice(text, "muted", detail)])


def _answers(
    found: Located,
    address: Address,
    lines: Sequence[ToolLine],
    arguments: Sequence[Arguments],
    rollouts: Sequence[Scanned],
) -> list[Notice]:
    notices = []
    if lines and lines[0].failed:
        notices.append(_worst(address, lines[0], arguments[0]))
    if not address.option("tool"):
        notices += _never_ran(found, address, rollouts)
    return notices


def _words(lines: Sequence[ToolLine], rollouts: Sequence[Scanned]) -> list[Block]:
    notices = []
    unreported = sum(line.unreported for line in lines)
    if unreported:
        notices.append(
            Notice(
                f"{counted(unreported, 'tool run was', 'tool runs were')} not reported: only the results in later "
                "requests are known",
                "warn",
                "whether they failed is not known. Install the framework's adapter, or put @lightning.tool on the functions",
            )
        )
    texts = sum(sum(each.missing.values()) for each in rollouts)
    if texts:
        detail = "tools that the model invented, and tool calls that never ran, are not found in these"
        notices.append(Notice(f"the texts of {counted(texts, 'call')} are not recorded whole", "muted", detail))
    return [Notices(notices)] if notices else []


def _worst(address: Address, line: ToolLine, said: Arguments) -> Notice:
    """Say in one sentence which tool failed most, for whom, and with which arguments."""
    sure = f", 95 %: {interval_text(line.interval)}" if line.interval else ""
    text = (
        f"The tool {line.tool} failed most, run by the agent {line.agent}: {count(line.failed)} of its {count(line.known)} "
        f"runs ({share(line.share)}{sure})"
    )
    (often, error), *others = line.errors
    detail = ""
    if said.telling:
        first = said.telling[0]
        ran = (
            "every such run"
            if first.failed == first.runs
            else f"{first.failed} of {first.runs} different runs like this"
        )
        detail = f"{count(first.times)} of {count(line.failed)}: {written(first.text, 80)}; {ran} failed. "
    detail += f"The error: {written(error, 80)!r} ({count(often)} of {count(line.failed)})"
    if line.failed - often == 1:
        other = next(run for _, run in line.used if run.failed and run.error == others[0][1])
        given = f" with {written(as_text(other.arguments), 80)}" if other.arguments is not None else ""
        detail += f"; the other{given}: {written(other.error, 80)!r}"
    return Notice(
        text,
        "bad",
        detail,
        [] if address.option("tool") else [Link(f"{line.tool}, by {line.agent}", _to(address, line))],
    )


def _never_ran(found: Located, address: Address, rollouts: Sequence[Scanned]) -> list[Notice]:
    """Say in one sentence how many tool calls could not run as they were written, and what was wrong."""
    odd = [(rollout.id, each) for rollout in rollouts for each in rollout.odd]
    if not odd:
        return []
    kinds = Counter(each.why or TROUBLES[each.trouble] for _, each in odd)
    invented = any(each.trouble in ("tool", "argument") for _, each in odd)
    where = {name: address.option(name) for name in ("split", "step") if address.option(name)}
    text = f"{counted(len(odd), 'tool call')} in {counted(len({rollout for rollout, _ in odd}), 'rollout')} could not run: "
    why = ", ".join(f"{kind} ({times})" for kind, times in kinds.most_common(NAMED_KINDS))
    names = Counter(f"{each.name or 'no tool'} by {each.agent}" for _, each in odd)
    detail = "" if invented else "The model invented no tool and no argument. "
    detail += "Called: " + ", ".join(f"{name} ({times})" for name, times in names.most_common(NAMED_KINDS))
    link = Link("these rollouts, with the texts of the calls", to("search", found.key, odd="yes", **where))
    return [Notice(text + why, "warn", detail, [link])]


def _facts(
    address: Address,
    rollouts: Sequence[Scanned],
    lines: Sequence[ToolLine],
    arguments: Sequence[Arguments],
    beside: RewardBeside,
) -> Facts:
    runs, failed, known = (sum(getattr(line, name) for line in lines) for name in ("runs", "failed", "known"))
    worst = next(iter(lines), None)
    tools, agents = len({line.tool for line in lines}), len({line.agent for line in lines})
    facts = [Fact("tool runs", count(runs), f"of {counted(tools, 'tool')} by {counted(agents, 'agent')}")]
    facts.append(
        Fact(
            "failed",
            count(failed) if known else NONE,
            f"{share(failed / known)} of those that are known to have ended" if known else "not known",
            "bad" if failed else "",
        )
    )
    if worst is not None and worst.failed:
        facts.append(
            Fact(
                "failed most",
                worst.tool,
                f"called by {worst.agent}: {count(worst.failed)} of {count(worst.known)}; {argument_text(arguments[0])}",
                "bad",
                to=_to(address, worst),
            )
        )
    if not address.option("rollout"):
        facts += [_reward_fact(beside), Fact("rollouts", count(len(rollouts)), split_text(rollouts))]
    return Facts(facts)


def split_text(rollouts: Sequence[Scanned]) -> str:
    """Say how many of some rollouts are training rollouts, held-out ones or of another kind."""
    names = {"train": "training", "val": "held-out"}
    kinds = Counter(names.get(each.split, each.split) for each in rollouts)
    return ", ".join(f"{count(number)} {kind}" for kind, number in kinds.most_common())


def _reward_fact(beside: RewardBeside) -> Fact:
    name = "reward with a failed tool minus without"
    if not beside.with_:
        return Fact(name, NONE, "no rollout with a reward has a failed tool", "muted")
    return Fact(
        name,
        difference_of(beside),
        difference_text(beside),
        "bad" if beside.told_apart and (beside.difference or 0) < 0 else "",
    )


def difference_of(beside: RewardBeside) -> str:
    """Format a difference of rewards."""
    return NONE if beside.difference is None else f"{beside.difference:+.3f}"


def difference_text(beside: RewardBeside) -> str:
    """Say how sure a difference of rewards is."""
    if beside.equal:
        return "all rewards are equal, so that nothing can be told"
    if beside.difference is None:
        return "no group has rollouts of both kinds: other tasks or versions may explain a difference"
    if beside.interval is None:
        return "one task has groups with both kinds: no interval"
    low, high = beside.interval
    said = f"{low:+.3f} to {high:+.3f} (95 %, over {counted(beside.tasks, 'task')} with both)"
    return said if beside.told_apart else f"{said}: not told apart from chance"


def argument_text(found: Arguments, longest: int = 80) -> str:
    """Say in one line which arguments a tool fails with."""
    if found.telling:
        first = found.telling[0]
        return written(f"{first.text}: {first.failed} of {first.runs} different runs failed", longest)
    if found.frequent:
        text, failed = found.frequent[0]
        return written(f"most often {text} ({failed}×)", longest)
    return found.said


def _to(address: Address, line: ToolLine) -> str:
    return str(address.having(tool=line.tool, agent=line.agent, cursor=None))


def _table(address: Address, lines: Sequence[ToolLine], arguments: Sequence[Arguments]) -> Table:
    rows = [
        [
            Cell(line.tool, _to(address, line)),
            Cell(line.agent),
            Cell(count(line.runs)),
            Cell(count(line.failed) if line.known else NONE, tone="bad" if line.failed else ""),
            Cell(share(line.share), hint=f"of {counted(line.known, 'run')} that are known to have ended well or not"),
            Cell(interval_text(line.interval)),
            Cell(written(line.errors[0][1], 80) if line.errors else "", hint=f"{len(line.errors)} kinds of errors"),
            Cell(argument_text(said) if line.failed else "", _to(address, line) if line.failed else ""),
            Cell(count(line.rollouts)),
            Cell(count(line.blocked) if line.blocked else ""),
        ]
        for line, said in zip(lines, arguments, strict=False)
    ]
    columns = [
        Column("tool"),
        Column("called by"),
        Column("runs", "number"),
        Column("failed", "number"),
        Column("share", "number", "failed runs among those known to have ended well or not"),
        Column("95 %", "number", "tasks are the independent draws; none for fewer than two tasks"),
        Column("most frequent error"),
        Column("arguments that fail"),
        Column("rollouts with a failed run", "number"),
        Column("blocked", "number", "a guardrail or a person refused the run"),
    ]
    more = f"the first {MOST_TOOLS} of {len(lines)}" if len(lines) > MOST_TOOLS else ""
    return Table(columns, rows, title="Tools, the most failed runs first", note=more, empty="no tool run is recorded")


def interval_text(found: tuple[float, float] | None) -> str:
    """Format an interval of a share."""
    return NONE if found is None else f"{share(found[0])} to {share(found[1])}"


def _errors(lines: Sequence[ToolLine]) -> Table:
    rows = [
        [Cell(count(failed)), Cell(line.agent), Cell(written(why, 300))]
        for line in lines
        for failed, why in line.errors[:EACH]
    ]
    columns = [Column("failed runs", "number"), Column("called by"), Column("error")]
    note = "errors that differ only in numbers are one"
    return Table(columns, rows, title="Errors", note=note, empty="no run of this tool failed")


def _arguments(lines: Sequence[ToolLine], arguments: Sequence[Arguments]) -> Table:
    rows = []
    for line, said in zip(lines, arguments, strict=False):
        for feature in said.telling:
            more = f" ({feature.times} with repeats)" if feature.times > feature.failed else ""
            failed_of = Cell(f"{feature.failed} of {feature.runs}{more}")
            tells = [Cell("tells failed runs from the others", tone="bad"), failed_of]
            rows.append([Cell(line.agent), Cell(written(feature.text, 200)), *tells])
        for text, failed in said.frequent:
            rows.append(
                [Cell(line.agent), Cell(written(text, 200)), Cell("frequent"), Cell(counted(failed, "failed run"))]
            )
        if said.unknown:
            rows.append(
                [
                    Cell(line.agent),
                    Cell(NONE),
                    Cell("not recorded", tone="muted"),
                    Cell(counted(said.unknown, "failed run")),
                ]
            )
        if said.said:
            rows.append([Cell(line.agent), Cell(NONE), Cell(said.said, tone="muted"), Cell("")])
    columns = [Column("called by"), Column("arguments"), Column("finding"), Column("failed", "number")]
    note = (
        "runs of one task with the same arguments and end count once; a value tells failed runs from the others if chance "
        "alone would name any value in less than 5 % of such tables"
    )
    return Table(columns, rows, title="Arguments of failed runs", note=note)


def _rewards(rollouts: Sequence[Scanned], lines: Sequence[ToolLine], every: RewardBeside) -> Table:
    rows = [_reward_row("any of these", "", every)]
    for line in [line for line in lines if line.failed][:CURVES]:
        failed = {rollout.id for rollout, run in line.used if run.failed}
        rows.append(_reward_row(line.tool, line.agent, reward_beside(rollouts, failed)))
    columns = [
        Column("failed tool"),
        Column("called by"),
        Column("rollouts with it", "number"),
        Column("reward with it", "number"),
        Column("rollouts without", "number"),
        Column("reward without", "number"),
        Column(
            "difference",
            "number",
            "within groups, which have one task and one version of the policy; the mean over tasks",
        ),
        Column("how sure"),
    ]
    note = (
        "failed rollouts count as 0; branches, and rollouts that were lost to the infrastructure, are left out. This does not "
        "prove what a failed tool costs: the same mistake may cause both"
    )
    return Table(columns, rows, title="Reward with and without a failed tool", note=note)


def _reward_row(tool: str, agent: str, beside: RewardBeside) -> list[Cell]:
    return [
        Cell(tool),
        Cell(agent),
        Cell(count(beside.with_)),
        Cell(number(beside.mean_with)),
        Cell(count(beside.without)),
        Cell(number(beside.mean_without)),
        Cell(difference_of(beside), tone="bad" if beside.told_apart and (beside.difference or 0.0) < 0 else ""),
        Cell(
            difference_text(beside) if beside.with_ else "no rollout with a reward has one",
            tone="" if beside.told_apart else "muted",
        ),
    ]


def _course(address: Address, lines: Sequence[ToolLine]) -> Chart:
    """Chart the share of failed runs over steps, of the tools with the most failed runs."""
    series = []
    for line in [line for line in lines if line.failed][:CURVES]:
        steps = by_key(
            [each for each in line.used if each[1].known and each[0].split == "train"], lambda each: each[0].step
        )
        points = [(step, sum(run.failed for _, run in own) / len(own), len(own)) for step, own in sorted(steps.items())]
        series.append(
            Series(
                f"{line.tool}, called by {line.agent}",
                [(step, value) for step, value, _ in points],
                to=[str(address.having(step=step, split="train", cursor=None)) for step, _, _ in points],
                hints=[counted(runs, "run") for _, _, runs in points],
            )
        )
    return Chart(
        [each for each in series if each.points],
        "step",
        "share of failed runs",
        bounds=(0.0, 1.0),
        whole=True,
        title="Failed tool runs over steps",
        note="training rollouts, by the step that they were sampled for",
        empty="no tool run of a training rollout failed",
    )


def _failed_runs(found: Located, address: Address, used: Sequence[Used]) -> Table:
    failed = sorted(
        (each for each in used if each[1].failed), key=lambda each: (each[0].score is None, each[0].score or 0.0)
    )
    first = max(0, address.number("cursor", 0))
    rows = []
    for rollout, run in failed[first : first + EACH]:
        given = as_text(run.arguments) if run.arguments is not None else ""
        rows.append(
            [
                Cell(
                    inside(found, rollout.id),
                    to("rollout", found.key, rollout.id, **({"call": run.call} if run.call else {})),
                ),
                Cell(written(rollout.input, 60)),
                Cell(run.tool),
                Cell(run.agent),
                Cell(
                    written(
                        given or (f"not recorded; the answer was: {run.said}" if run.said else "not recorded"), 120
                    ),
                    tone="" if given else "muted",
                ),
                Cell(written(run.error, 120), tone="bad"),
                Cell(number(rollout.reward)),
            ]
        )
    columns = [
        Column("rollout"),
        Column("task"),
        Column("tool"),
        Column("called by"),
        Column("arguments"),
        Column("error"),
        Column("reward", "number"),
    ]
    title = f"Failed tool runs ({count(len(failed))}), the lowest reward first"
    return Table(
        columns,
        rows,
        title=title,
        empty="no tool run failed, as far as it is known",
        pages=page_links(address, len(failed), EACH)[:40],
    )


def _odd(found: Located, rollouts: Sequence[Scanned], tool: str) -> Table:
    every = [(rollout, odd) for rollout in rollouts for odd in rollout.odd if tool in ("", odd.name)]
    kinds = by_key(every, lambda each: (each[1].trouble, each[1].name, each[1].agent))
    rows = []
    for (trouble, name, agent), own in sorted(kinds.items(), key=lambda each: -len(each[1]))[:EACH]:
        commonest = Counter(odd.detail for _, odd in own).most_common(1)[0][0]
        rollout, odd = own[0]
        why = Counter(odd.why for _, odd in own if odd.why)
        rows.append(
            [
                Cell(TROUBLES[trouble], tone="bad" if trouble != "never run" else ""),
                Cell(name or NONE),
                Cell(agent),
                Cell(count(len(own))),
                Cell(count(len({each.id for each, _ in own}))),
                Cell(", ".join(f"{each} ({times})" for each, times in why.most_common())),
                Cell(written(commonest, 120)),
                Cell(inside(found, rollout.id), _odd_to(found, rollout, odd)),
            ]
        )
    columns = [
        Column("trouble"),
        Column("tool"),
        Column("called by"),
        Column("times", "number"),
        Column("rollouts", "number"),
        Column("what is wrong", hint="of a tool call inside the text of an answer"),
        Column("most often"),
        Column("one of them"),
    ]
    return Table(
        columns,
        rows,
        title="Invented tools, and tool calls that never ran",
        note="from recorded requests and answers; a framework may use a tool call as the final answer, which then never runs",
        empty=_no_odd(rollouts, tool),
    )


def _no_odd(rollouts: Sequence[Scanned], tool: str) -> str:
    if any(each.missing for each in rollouts):
        return "none is found in the requests and answers that are recorded whole"
    if not any(each.offers for each in rollouts):
        return "no request offered a tool, and no answer has a tool call"
    if tool:
        others = sum(len(each.odd) for each in rollouts)
        rest = f"; {counted(others, 'other tool call')} could not run, see the page of all tools" if others else ""
        return f"each call of {tool} had arguments that were offered, and has a result{rest}"
    return (
        "in these rollouts the model called only tools and arguments that were offered, and each tool call has a result"
    )


def _odd_to(found: Located, rollout: Scanned, odd: OddCall) -> str:
    return to("rollout", found.key, rollout.id, **({"call": odd.call} if odd.call else {}))
