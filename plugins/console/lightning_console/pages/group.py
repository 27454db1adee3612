"""The page of a group: sibling rollouts and their branches as one prefix tree of calls, and at a split the texts that differ.

The invariant: two calls are the same action exactly when both have the same agent and the same token ids in prompt and answer,
with nothing changed by a branch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning.errors import DataError
from lightning.store.protocol import Attempt
from lightning.trainer.summary import reason
from lightning.types import Rollout, Transition
from lightning_branching.recorded import is_void
from lightning_debug.rollout_calls import why_no_calls
from lightning_record.exchanges import parents_of

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
from lightning_console.pages.words import (
    NONE,
    count,
    counted,
    differing,
    ending_of,
    located,
    mean_of,
    number,
    seconds,
    step_links,
    task_text,
    title_of,
    to,
    tone_of,
    trail,
)
from lightning_console.places import Located, Places, group_of, may_change, neighbours
from lightning_console.queries.branches import (
    Branch,
    branches_of,
    changes_of,
    inherited,
    key_beside,
    own_calls,
)
from lightning_console.queries.conversation import Said, Vocabulary, cut, one_line, said_by, vocabulary_of
from lightning_console.queries.steps import MemberCredit, StepProof, prove
from lightning_console.queries.tree import Action, Line, TreeNode, make_tree
from lightning_console.router import Address

MOST_NODES: Final = 1_500
"""Most calls of a tree that are shown: those nearest to the root."""
MOST_MEMBERS: Final = 512
LONGEST_ACTION: Final = 2_000
"""Most characters of an action's text that are compared with those of other rollouts."""
SHOWN: Final = 200
"""Most characters of an action or an answer that are shown."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a branch begins. Its first `start` calls are those of its parent, whose index among the members is `parent` (-1 if
    it is not among them). `at` is the number of the parent's call at which it begins; 0 if not known, and `why` says why."""

    parent: int
    start: int
    at: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group, a branch of one, or a `guest`: a rollout of another group that has branches in this group. `total`
    is its return (None if it has none), `advantage` the mean over its trained calls, `key` the key of its run."""

    rollout: Rollout
    key: str
    branch: Branch | None = None
    guest: bool = False
    calls: tuple[Transition, ...] = ()
    total: float | None = None
    advantage: float | None = None
    origin: Origin | None = None

    @property
    def error(self) -> str:
        """Why the rollout failed; empty if it did not."""
        return str(reason(self.rollout.error)) if self.rollout.error else ""

    @property
    def tokens(self) -> int:
        """The number of tokens sampled in the member's calls."""
        return sum(len(call.response_ids) for call in self.calls)

    @property
    def void(self) -> bool:
        """Whether the branch is void: it did not repeat its parent's calls."""
        return is_void(self.rollout)

    @property
    def changed(self) -> str:
        """The changes that the branch makes to its parent, in words; empty for none."""
        return self.branch.changed if self.branch else ""

    @property
    def edit(self) -> str | None:
        """The text that replaces the answer of the parent's call; None if that call is sampled anew."""
        return self.branch.edit if self.branch else None


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group with its members: its own rollouts, then guests, then branches. `left_out` counts the calls without a node,
    `more` the rollouts that are not among `members`. `before` and `after` are the ids of the neighbouring groups, empty if
    there is none. `empty` says why there is no call, `texts` why answers are shown as tokens."""

    id: str
    members: tuple[Member, ...]
    nodes: tuple[TreeNode, ...]
    proof: StepProof
    left_out: int = 0
    more: int = 0
    before: str = ""
    after: str = ""
    live: bool = False
    empty: str = ""
    texts: str = ""
    _said: Mapping[int, Sequence[Said]] = field(default_factory=dict, repr=False)

    @property
    def own(self) -> list[Member]:
        """The group's own rollouts, without guests and branches."""
        return [each for each in self.members if each.branch is None and not each.guest]

    @property
    def branches(self) -> list[Member]:
        """The members that are branches."""
        return [each for each in self.members if each.branch is not None]

    def last_answer(self, place: int) -> str:
        """The beginning of the last answer in the rollout of the member with this index; empty if it is not known."""
        said = self._said.get(place, ())
        return one_line(said[-1].answer, LONGEST_ACTION) if said else ""

    def continuation(self, node: int) -> tuple[str, Member, int]:
        """Return the text from a node on of the best rollout that went through it, that rollout, and the number of its call at
        the node (0 for an edited answer)."""
        place = max(self.nodes[node].members, key=lambda each: (_or_least(self.members[each].total), -each))
        member = self.members[place]
        parts = [] if member.edit is None else [f"[edited]\n{member.edit}"]
        for call, said in zip(own_calls(member.calls), self._said[place], strict=True):
            parts.append(f"[{call.caller.name}]\n{said.answer}")
        first = max(0, self.nodes[node].depth - (member.origin.start if member.origin else 0))
        text = "\n\n".join(parts[first:])
        return cut(text), member, first + (member.edit is None)


async def group_view(located: Located, group: str, *, patience: float | None = None) -> GroupView:
    """Read a group of a run with its tree. Other runs with branches of it are searched for at most `patience` seconds (None:
    without limit). Raises `DataError` if the run has no such group."""
    everyone = await group_of(located, group)
    rollouts = everyone[:MOST_MEMBERS]
    store = located.store
    listed, grows = await _with_branches(located, rollouts, patience)
    names = [(each.rollout.id, each.rollout.attempt) for each in listed]
    calls, ended = await store.transitions_of(names), await store.attempts_of(names)
    looked_at = next((each for each in rollouts if each.trained_at_step is not None), rollouts[0])
    proof = await prove(store, located.run, looked_at)
    known = {each.rollout.id: (place, own) for place, (each, own) in enumerate(zip(listed, calls, strict=True))}
    members = [_member(each, own, end, proof, known) for each, own, end in zip(listed, calls, ended, strict=True)]
    vocabulary = vocabulary_of(located)
    parents = await parents_of(store, [each.rollout for each in listed], dict(zip(names, calls, strict=True)))
    said = {
        place: said_by(own_calls(member.calls), vocabulary, parent)
        for place, (member, parent) in enumerate(zip(members, parents, strict=True))
    }
    lines = [_line(member, said[place], ended[place], proof) for place, member in enumerate(members)]
    nodes, left_out = make_tree(lines, MOST_NODES)
    beside, _ = await neighbours(located, rollouts[0], proof.record)
    here = beside.index(group) if group in beside else -1
    return GroupView(
        group,
        tuple(members),
        nodes,
        proof,
        left_out,
        len(everyone) - len(rollouts),
        beside[here - 1] if here > 0 else "",
        beside[here + 1] if 0 <= here < len(beside) - 1 else "",
        grows or await may_change(store, everyone),
        "" if any(calls) else await why_no_calls(store, rollouts[0]),
        _why_no_texts(said, vocabulary),
        said,
    )


async def _with_branches(
    located: Located, rollouts: Sequence[Rollout], patience: float | None
) -> tuple[list[Member], bool]:
    """Return the members of a group, without their calls: its rollouts, the parents of its branches from other groups, and its
    branches, also those in other runs; and whether there may be more branches."""
    changed, edit = await changes_of(located.store, located.run)
    own = [Member(each, located.key) for each in rollouts if each.parent is None]
    mine = [Branch(each, located.key, changed, edit) for each in rollouts if each.parent is not None]
    ids = {each.id for each in rollouts}
    for parent in dict.fromkeys(each.rollout.parent[0] for each in mine if each.rollout.parent):
        found = None if parent in ids else await located.store.get_rollout(parent)
        if found is not None:
            own.append(Member(found, key_beside(located, found.run), guest=True))
    trunks = [each.rollout.id for each in own if not each.guest]
    elsewhere, grows = await branches_of(located, trunks, patience=patience)
    branches = [*mine, *(each for each in elsewhere if each.rollout.id not in ids)]
    return [*own, *(Member(each.rollout, each.key, each) for each in branches)], grows


def _why_no_texts(said: Mapping[int, Sequence[Said]], vocabulary: Vocabulary) -> str:
    missing = next((each.missing for calls in said.values() for each in calls if not each.reply and each.missing), "")
    return f"{missing}; {vocabulary.missing}" if missing and vocabulary.missing else missing


def _member(
    listed: Member,
    calls: Sequence[Transition],
    ended: Attempt,
    proof: StepProof,
    known: Mapping[str, tuple[int, Sequence[Transition]]],
) -> Member:
    rollout = listed.rollout
    credit = proof.members.get(rollout.id)
    if credit is not None:
        total: float | None = credit.total
    else:
        total = None if rollout.reward is None else rollout.reward + sum(each.value for each in ended.step_rewards)
    values = [each.advantage for each in credit.calls.values()] if credit else []
    origin = _origin(rollout.parent, known) if rollout.parent is not None else None
    return replace(listed, calls=tuple(calls), total=total, advantage=mean_of(values), origin=origin)


def _origin(key: tuple[str, int, int], known: Mapping[str, tuple[int, Sequence[Transition]]]) -> Origin:
    parent, attempt, seq = key
    place, calls = known.get(parent, (-1, ()))
    if place < 0:
        return Origin(-1, 0, 0, f"its parent {parent} is not in this store")
    if not calls or calls[0].attempt != attempt:
        return Origin(-1, 0, 0, f"the calls of attempt {attempt} of {parent} are not shown here")
    before = inherited(calls, seq)
    if before.at is None:
        return Origin(-1, 0, 0, f"the rollout {parent} has no such call")
    return Origin(place, before.shared, before.at + 1)


def _line(member: Member, said: Sequence[Said], ended: Attempt, proof: StepProof) -> Line:
    """Return the line of a member in the tree. A branch's changes are part of each action, so that it shares no node with a
    rollout that did not make them."""
    credit = proof.members.get(member.rollout.id)
    actions = []
    if member.edit is not None:
        actions.append(Action((member.changed, member.edit), "", one_line(member.edit, LONGEST_ACTION), 0))
    numbers = {call.seq: number for number, call in enumerate(member.calls, 1)}
    for call, one in zip(own_calls(member.calls), said, strict=True):
        same = member.changed, call.caller.name, call.prompt_ids.tobytes(), call.response_ids.tobytes()
        text = one_line(one.answer, LONGEST_ACTION) or f"({call.finish_reason or call.status})"
        actions.append(
            Action(same, call.caller.name, text, numbers[call.seq], _advantage(credit, call), _tools(call, ended))
        )
    origin = member.origin
    if origin is None:
        return Line(actions, member.total)
    counts = not member.changed and not origin.why
    return Line(actions, member.total, True, origin.parent, origin.start, counts)


def _advantage(credit: MemberCredit | None, call: Transition) -> float | None:
    found = credit.calls.get(call.seq) if credit is not None else None
    return found.advantage if found is not None else None


def _tools(call: Transition, ended: Attempt) -> tuple[tuple[str, str], ...]:
    """Return the tools that a call's answer asked for, as `(name, result or error)`. A `lightning.tool` that a framework runs
    reports two events, of which one is kept."""
    events = [
        each
        for each in ended.tool_events
        if (each.call_id in call.tool_calls if each.call_id else each.response_id == call.id)
    ]
    told = {each.name for each in events if not each.call_id}
    return tuple(
        (each.name, one_line(each.error or each.result or each.output or f"({each.status})", LONGEST_ACTION))
        for each in events
        if not each.call_id or each.name not in told
    )


def split_of(view: GroupView, node: int) -> tuple[int, ...]:
    """Return the children of a node by their value, the best first. Raises `DataError` for a node with fewer than two."""
    children = view.nodes[node].children if 0 <= node < len(view.nodes) else ()
    if len(children) < 2:
        raise DataError(f"nothing parts at node {node} of this group")
    return tuple(sorted(children, key=lambda each: (-_or_least(view.nodes[each].value), each)))


def _or_least(value: float | None) -> float:
    return -math.inf if value is None else value


async def page(places: Places, address: Address) -> Page:
    """Make the page `group/RUN/GROUP`."""
    found = await located(places, address)
    if len(address.about) < 2:
        raise DataError("the address of a group is group/RUN/GROUP")
    view = await group_view(found, address.about[1], patience=places.patience)
    blocks: list[Block] = [_facts(view), *_words(view)]
    if len(view.nodes) > 1:
        blocks.append(_tree(found, view))
    if address.option("split"):
        blocks += _split(found, view, address)
    blocks.append(_members(view))
    if view.branches:
        blocks.append(_branches(view))
    return Page(
        str(address),
        title_of(view.members[0].rollout),
        blocks,
        trail(found, *step_links(found, view.proof.record)),
        live=view.live,
        previous=to("group", found.key, view.before) if view.before else "",
        next=to("group", found.key, view.after) if view.after else "",
        name=view.id,
    )


def _tree(found: Located, view: GroupView) -> GroupTree:
    values = [node.value for node in view.nodes if node.value is not None]
    labels = [""] * len(view.nodes)
    for node in view.nodes:
        texts = differing([view.nodes[child].action for child in node.children], SHOWN)
        for child, text in zip(node.children, texts, strict=True):
            labels[child] = text
    return GroupTree(
        [_node(found, view, place, node, labels[place]) for place, node in enumerate(view.nodes)],
        min(values, default=0.0),
        max(values, default=0.0),
        title="The calls of all rollouts, as a tree",
        note="Rollouts that gave the same answers share a line until they part. A box shows the mean return of the rollouts "
        "that came through it." + (" A branch counts from its first own call on." if view.branches else ""),
    )


def _facts(view: GroupView) -> Facts:
    first, proof = view.members[0].rollout, view.proof
    facts = []
    if first.task.expected is not None:
        facts.append(Fact("expected", one_line(task_text(first.task.expected), 60), "given to the grader"))
    if spread := proof.groups.get(view.id):
        facts.append(
            Fact(
                "mean return", number(spread[0]), f"deviation {number(spread[1])} over {counted(spread[2], 'rollout')}"
            )
        )
    failed = sum(1 for each in view.own if each.rollout.status == "failed")
    facts.append(Fact("rollouts", count(len(view.own)), f"{failed} failed", "warn" if failed else ""))
    if view.branches:
        void = sum(each.void for each in view.branches)
        said = f"{void} void" if void else "they begin at calls of rollouts"
        facts.append(Fact("branches", count(len(view.branches)), said, "warn" if void else ""))
    facts.append(
        Fact("calls", count(sum(len(each.calls) for each in view.members)), f"{len(view.nodes) - 1} different ones")
    )
    facts.append(_proof_fact(view))
    return Facts(facts)


def _proof_fact(view: GroupView) -> Fact:
    proof = view.proof
    if proof.proved is None:
        return Fact("advantages", "not derived", proof.why, "muted")
    if proof.proved:
        return Fact("advantages", "proved", "computed again, and equal to the recorded ones", "good")
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
        said.append(Notice(f"{counted(view.left_out, 'call further down is', 'calls further down are')} not shown"))
    if view.more:
        said.append(Notice(f"{counted(view.more, 'rollout of this group is', 'rollouts of this group are')} not shown"))
    return [Notices(said)] if said else []


def _node(found: Located, view: GroupView, place: int, node: TreeNode, label: str) -> Node:
    members = [view.members[each] for each in node.members]
    branch = ""
    if place and all(each.branch is not None for each in members):
        branch = members[0].changed or "branch"
    there = _to(members[0], call=node.call) if node.call else ""
    return Node(
        node.parent,
        one_line(node.action, SHOWN),
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
        "" if label == node.action else label,
    )


def _label(member: Member) -> str:
    """Return the name of a rollout or a branch on the page of its group."""
    if member.branch is None:
        return member.rollout.id if member.guest else f"rollout {member.rollout.index}"
    name = f"branch {member.rollout.index}"
    return f"{name}: void" if member.void else f"{name}, {member.changed}" if member.changed else name


def _to(member: Member, **options: int) -> str:
    return to("rollout", member.key, member.rollout.id, **options)


def _split(found: Located, view: GroupView, address: Address) -> list[Block]:
    ways = split_of(view, address.number("split", 0))
    left, right = address.number("left", ways[-1]), address.number("right", ways[0])
    if left not in ways or right not in ways:
        raise DataError(f"the ways that part here are {', '.join(map(str, ways))}, not {left} and {right}")
    here = view.nodes[address.number("split", 0)]
    came = len(here.members) + len(here.branches)
    names = {way: f"return {number(view.nodes[way].value)}, {len(view.nodes[way].members)} of {came}" for way in ways}
    (before, one, first), (after, other, second) = view.continuation(left), view.continuation(right)
    blocks: list[Block] = []
    if len(ways) > 2:
        labels = differing([view.nodes[way].action for way in ways], 60)
        choices = [(str(way), f"{names[way]}: {label}") for way, label in zip(ways, labels, strict=True)]
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
            note="The best rollout of each way. The way with the lowest mean return is on the left (orange), the one with the "
            "highest on the right (blue).",
        )
    )
    return blocks


NUMBERS: Final = ("reward", "return", "advantage", "calls", "tokens", "seconds")
EARNED: Final = (
    Column("how it ended"),
    *(Column(name, "number") for name in NUMBERS),
    Column("last answer"),
    Column("why"),
)
"""The columns of a member's results, in the order of the cells of `_earned`."""


def _members(view: GroupView) -> Table:
    columns = [Column("rollout"), *EARNED]
    rows = []
    answers = _last_answers(view)
    for place, each in enumerate(view.members):
        if each.branch is None:
            name = f"{each.rollout.index}" if not each.guest else each.rollout.id
            first = Cell(
                name, _to(each), hint="of another group: it has the branches of this one" if each.guest else ""
            )
            rows.append([first, *_earned(view, place, answers[place])])
    return Table(columns, rows, title="Rollouts", note="▲ did better than the group, ▼ worse")


def _last_answers(view: GroupView) -> list[str]:
    return differing([view.last_answer(place) for place in range(len(view.members))], SHOWN)


def _branches(view: GroupView) -> Table:
    """Return the table of branches, in the order of the calls at which they begin."""
    columns = [
        Column("branch"),
        Column("of"),
        Column("at call", "number"),
        Column("changed", hint="the difference to its parent; a branch without one is a sample of the same policy"),
        *EARNED,
    ]
    placed = [(place, each) for place, each in enumerate(view.members) if each.branch is not None]
    answers = _last_answers(view)
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
                *_earned(view, place, answers[place]),
            ]
        )
    note = "The calls before a branch are its parent's, and are not counted here."
    return Table(columns, rows, title="Branches", note=note)


def _begins(member: Member) -> tuple[int, int, str, int]:
    origin = member.origin
    at = (origin.parent, origin.at) if origin is not None else (-1, 0)
    return *at, member.key, member.rollout.index


def _earned(view: GroupView, place: int, answer: str) -> list[Cell]:
    """Return the cells of a member's results: how it ended, reward, counts, last answer, and why it failed."""
    each = view.members[place]
    rollout, (ending, tone) = each.rollout, ending_of(each.rollout)
    return [
        Cell(ending, tone=tone),
        Cell(number(rollout.reward)),
        Cell(number(each.total)),
        Cell(number(each.advantage), tone=tone_of(each.advantage)),
        Cell(count(len(own_calls(each.calls)))),
        Cell(count(each.tokens)),
        Cell(seconds(rollout.seconds) if rollout.status.ended else NONE),
        Cell(answer, hint=view.last_answer(place) if answer != view.last_answer(place) else ""),
        Cell(each.error, tone="bad" if each.error else ""),
    ]
