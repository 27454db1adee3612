"""A group as a tree of calls; at a split, how the continuations differ."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.errors import DataError

from lightning_console.blocks import (
    Block,
    Cell,
    Column,
    Control,
    Controls,
    Diff,
    Fact,
    Facts,
    GroupTree,
    Link,
    Node,
    Notice,
    Notices,
    Page,
    Table,
)
from lightning_console.pages.words import NONE, count, located, number, seconds, to, tone_of, trail, written
from lightning_console.places import Located, Places
from lightning_console.queries.branches import own_calls
from lightning_console.queries.groups import GroupView, Member, TreeNode, group_view, split_of
from lightning_console.router import Address


async def page(places: Places, address: Address) -> Page:
    """The page of a group."""
    found = await located(places, address)
    if len(address.about) < 2:
        raise DataError("the address of a group is group/RUN/GROUP")
    view = await group_view(found, address.about[1], patience=places.patience)
    blocks: list[Block] = [_facts(view), *_words(view)]
    if len(view.nodes) > 1:
        values = [node.value for node in view.nodes if node.value is not None]
        blocks.append(
            GroupTree(
                [_node(found, view, place, node) for place, node in enumerate(view.nodes)],
                min(values, default=0.0),
                max(values, default=0.0),
                title="Calls that siblings share",
                note="a node is a call: its value is the mean return below it, its width how many came by"
                + ("; a branch counts from the call on behind which it begins" if view.branches else ""),
            )
        )
    if address.option("split"):
        blocks += _split(found, view, address)
    blocks.append(_members(view))
    if view.branches:
        blocks.append(_branches(view))
    above = []
    if view.proof.record is not None:
        above.append(Link(f"step {view.proof.record.step}", to("step", found.key, view.proof.record.step)))
    return Page(
        str(address),
        f"Group {view.id}",
        blocks,
        trail(found, *above),
        live=view.live,
        previous=to("group", found.key, view.before) if view.before else "",
        next=to("group", found.key, view.after) if view.after else "",
    )


def _facts(view: GroupView) -> Facts:
    first, proof = view.members[0].rollout, view.proof
    facts = [Fact("task", first.task.id, written(first.task.input))]
    if first.task.expected is not None:
        facts.append(Fact("expected", written(first.task.expected, 60), "what the grader is given"))
    if spread := proof.groups.get(view.id):
        facts.append(Fact("mean return", number(spread[0]), f"deviation {number(spread[1])} over {spread[2]} rollouts"))
    failed = sum(1 for each in view.own if each.rollout.status == "failed")
    facts.append(Fact("rollouts", count(len(view.own)), f"{failed} failed", "warn" if failed else ""))
    if view.branches:
        void = sum(each.void for each in view.branches)
        said = f"{void} void" if void else "they begin at calls of rollouts"
        facts.append(Fact("branches", count(len(view.branches)), said, "warn" if void else ""))
    facts.append(Fact("calls", count(sum(len(each.calls) for each in view.members)), f"{len(view.nodes) - 1} nodes"))
    facts.append(_proof_fact(view))
    return Facts(facts)


def _proof_fact(view: GroupView) -> Fact:
    proof = view.proof
    if proof.proved is None:
        return Fact("advantages", "not derived", proof.why, "muted")
    if proof.proved:
        return Fact("advantages", "proved", "derived again; the step's digest is the same", "good")
    return Fact("advantages", "not proved", proof.why, "bad")


def _words(view: GroupView) -> Sequence[Block]:
    said = []
    if why := view.proof.skipped.get(view.id):
        said.append(Notice(f"this group taught nothing: {why.replace('_', ' ')}", "warn"))
    if view.empty:
        said.append(Notice(f"there is no tree: {view.empty}", "muted"))
    if view.texts:
        said.append(Notice(f"answers are shown as tokens: {view.texts}", "muted"))
    if view.left_out:
        said.append(Notice(f"{count(view.left_out)} calls further down are not shown"))
    if view.more:
        said.append(Notice(f"{count(view.more)} rollouts of this group are not shown"))
    return [Notices(said)] if said else []


def _node(found: Located, view: GroupView, place: int, node: TreeNode) -> Node:
    members = [view.members[each] for each in node.members]
    branch = ""
    if place and all(each.branch is not None for each in members):
        branch = members[0].changed or "branch"
    there = _to(members[0], call=node.call) if node.call else ""
    return Node(
        node.parent,
        node.action,
        len(node.members),
        node.value,
        node.advantage,
        node.caller,
        there,
        [Link(_label(view.members[each]), _to(view.members[each])) for each in node.ends],
        to("group", found.key, view.id, split=place) if len(node.children) > 1 else "",
        branch,
        len(node.branches),
        node.tools,
    )


def _label(member: Member) -> str:
    """What a rollout is called among its siblings."""
    if member.branch is None:
        return member.rollout.id if member.guest else f"rollout {member.rollout.index}"
    name = f"branch {member.rollout.index}"
    return f"{name}: void" if member.void else f"{name}, {member.changed}" if member.changed else name


def _to(member: Member, **options: int) -> str:
    return to("rollout", member.key, member.rollout.id, **options)


def _split(found: Located, view: GroupView, address: Address) -> list[Block]:
    ways = split_of(view, address.number("split", 0))
    left, right = address.number("left", ways[0]), address.number("right", ways[-1])
    if left not in ways or right not in ways:
        raise DataError(f"of what parts here there are {', '.join(map(str, ways))}, not {left} and {right}")
    here = view.nodes[address.number("split", 0)]
    came = len(here.members) + len(here.branches)
    names = {way: f"return {number(view.nodes[way].value)}, {len(view.nodes[way].members)} of {came}" for way in ways}
    (before, one, first), (after, other, second) = view.continuation(left), view.continuation(right)
    blocks: list[Block] = []
    if len(ways) > 2:
        choices = [(str(way), f"{names[way]}: {view.nodes[way].action[:60]}") for way in ways]
        blocks.append(
            Controls(
                str(address),
                [Control("left", "left", str(left), choices), Control("right", "right", str(right), choices)],
            )
        )
    depth = view.nodes[left].depth
    blocks.append(
        Diff(
            names[left],
            names[right],
            before,
            after,
            _to(one, call=first) if first else _to(one),
            _to(other, call=second) if second else _to(other),
            title=f"Where they part, before call {depth + 1}",
            note="the best rollout of each way; the way with the highest mean return is on the left",
        )
    )
    return blocks


def _members(view: GroupView) -> Table:
    columns = [Column("rollout"), *_earned_columns(), Column("last answer"), Column("why")]
    rows = []
    for place, each in enumerate(view.members):
        if each.branch is None:
            name = f"{each.rollout.index}" if not each.guest else each.rollout.id
            first = Cell(
                name, _to(each), hint="of another group: it has the branches of this one" if each.guest else ""
            )
            rows.append([first, *_earned(view, place)])
    return Table(columns, rows, title="Rollouts")


def _branches(view: GroupView) -> Table:
    """Branches, in the order of the calls at which they begin."""
    columns = [
        Column("branch"),
        Column("of"),
        Column("at call", "number"),
        Column(
            "changed", hint="what is another than in its parent; where nothing is, it is a sample of the same policy"
        ),
        *_earned_columns(),
        Column("last answer"),
        Column("why"),
    ]
    placed = [(place, each) for place, each in enumerate(view.members) if each.branch is not None]
    rows = []
    for place, each in sorted(placed, key=lambda pair: _begins(pair[1])):
        origin = each.origin
        parent = view.members[origin.parent] if origin is not None and origin.parent >= 0 else None
        at = Cell(str(origin.at) if origin is not None and origin.at else NONE, hint=origin.why if origin else "")
        if parent is not None and origin is not None:
            at = Cell(str(origin.at), _to(parent, call=origin.at))
        rows.append(
            [
                Cell(str(each.rollout.index), _to(each), hint=each.rollout.id),
                Cell(NONE if parent is None else parent.rollout.id if parent.guest else str(parent.rollout.index)),
                at,
                Cell(each.changed or NONE),
                *_earned(view, place),
            ]
        )
    note = "the calls before it are its parent's, and are not counted here"
    return Table(columns, rows, title="Branches", note=note)


def _begins(member: Member) -> tuple[int, int, str, int]:
    origin = member.origin
    at = (origin.parent, origin.at) if origin is not None else (-1, 0)
    return *at, member.key, member.rollout.index


def _earned_columns() -> list[Column]:
    numbers = ("reward", "return", "advantage", "calls", "tokens", "seconds")
    return [Column("status"), *(Column(name, "number") for name in numbers)]


def _earned(view: GroupView, place: int) -> list[Cell]:
    """What came of a rollout, its last answer, and why it failed."""
    each = view.members[place]
    rollout, bad = each.rollout, each.rollout.status == "failed"
    status = "void" if each.void else str(rollout.status) + (f" ({rollout.fault})" if rollout.fault else "")
    return [
        Cell(status, tone="bad" if bad else ""),
        Cell(number(rollout.reward)),
        Cell(number(each.total)),
        Cell(number(each.advantage), tone=tone_of(each.advantage)),
        Cell(count(len(own_calls(each.calls)))),
        Cell(count(each.tokens)),
        Cell(seconds(rollout.seconds) if rollout.status.ended else NONE),
        Cell(view.last_answer(place)),
        Cell(each.error, tone="bad" if each.error else ""),
    ]
