"""A group as a tree of calls; at a split, how the continuations differ."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.errors import DataError

from lightning_console.address import Address
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
    Tone,
)
from lightning_console.pages.words import NONE, count, located, number, seconds, to, trail, written
from lightning_console.places import Located, Places
from lightning_console.queries.groups import GroupView, TreeNode, group_view, split_of


async def page(places: Places, address: Address) -> Page:
    """The page of a group."""
    found = await located(places, address)
    if len(address.about) < 2:
        raise DataError("the address of a group is group/RUN/GROUP")
    view = await group_view(found, address.about[1])
    blocks: list[Block] = [_facts(view), *_words(view)]
    if len(view.nodes) > 1:
        values = [node.value for node in view.nodes if node.value is not None]
        blocks.append(
            GroupTree(
                [_node(found, view, place, node) for place, node in enumerate(view.nodes)],
                min(values, default=0.0),
                max(values, default=0.0),
                title="Calls that siblings share",
                note="a node is a call: its value is the mean return below it, its width how many came by",
            )
        )
    if address.option("split"):
        blocks += _split(found, view, address)
    blocks.append(_members(found, view))
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
    failed = sum(1 for each in view.members if each.rollout.status == "failed")
    facts.append(Fact("rollouts", count(len(view.members)), f"{failed} failed", "warn" if failed else ""))
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
    first = view.members[node.members[0]]
    number_of_call = node.depth + 1
    return Node(
        node.parent,
        node.action,
        len(node.members),
        node.value,
        node.advantage,
        node.caller,
        to("rollout", found.key, first.rollout.id, call=number_of_call) if place else "",
        [
            Link(f"rollout {view.members[each].rollout.index}", to("rollout", found.key, view.members[each].rollout.id))
            for each in node.ends
        ],
        to("group", found.key, view.id, split=place) if len(node.children) > 1 else "",
    )


def _split(found: Located, view: GroupView, address: Address) -> list[Block]:
    ways = split_of(view, address.number("split", 0))
    left, right = address.number("left", ways[0]), address.number("right", ways[-1])
    if left not in ways or right not in ways:
        raise DataError(f"of what parts here there are {', '.join(map(str, ways))}, not {left} and {right}")
    names = {
        way: f"return {number(view.nodes[way].value)}, {len(view.nodes[way].members)} of "
        f"{len(view.nodes[address.number('split', 0)].members)}"
        for way in ways
    }
    (before, one), (after, other) = view.continuation(left), view.continuation(right)
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
            to("rollout", found.key, one.rollout.id, call=depth + 1),
            to("rollout", found.key, other.rollout.id, call=depth + 1),
            title=f"Where they part, before call {depth + 1}",
            note="the best rollout of each way; the way with the highest mean return is on the left",
        )
    )
    return blocks


def _members(found: Located, view: GroupView) -> Table:
    rows = []
    for place, each in enumerate(view.members):
        rollout = each.rollout
        bad = rollout.status == "failed"
        rows.append(
            [
                Cell(str(rollout.index), to("rollout", found.key, rollout.id), hint=rollout.id),
                Cell(str(rollout.status) + (f" ({rollout.fault})" if rollout.fault else ""), tone="bad" if bad else ""),
                Cell(number(rollout.reward)),
                Cell(number(each.total)),
                Cell(number(each.advantage), tone=_tone(each.advantage)),
                Cell(count(len(each.calls))),
                Cell(count(each.tokens)),
                Cell(seconds(rollout.seconds) if rollout.status.ended else NONE),
                Cell(view.last_answer(place)),
                Cell(each.error, tone="bad" if each.error else ""),
            ]
        )
    numbers = ("reward", "return", "advantage", "calls", "tokens", "seconds")
    columns = [Column("rollout"), Column("status"), *(Column(name, "number") for name in numbers)]
    return Table([*columns, Column("last answer"), Column("why")], rows, title="Rollouts")


def _tone(value: float | None) -> Tone:
    return "" if not value else "good" if value > 0 else "bad"
