"""The prefix tree of a group's calls, and the value of each of its nodes.

The invariant: two calls are one node exactly when the calls before them are one node, too, and both are the same action. A
branch counts only from the node at which it leaves its parent, so that branches below a state never raise its value.
(`lightning.batch.radix` has a tree of tokens, whose nodes end inside answers, and states of credit functions can meet again
after they parted: neither has calls as nodes.)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning.types import by_key

from lightning_console.pages.words import mean_of


@dataclass(frozen=True, slots=True)
class Action:
    """A call and its answer. Actions with equal `same` after the same actions are one node. `number` is the call's number in
    its rollout, from 1; 0 for an edited answer, which is no call. `tools` are the tools that the answer called, as
    `(name, result or error)`."""

    same: Hashable
    caller: str
    text: str
    number: int
    advantage: float | None = None
    tools: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """The actions of a rollout, and its return `total`. A branch follows the first `start` actions of its parent, then its own;
    `parent` is the parent's index among the lines, -1 to begin at the root. `counts` is false for a branch whose return is no
    estimate for its starting state, because it changed something or its start is not known."""

    actions: Sequence[Action]
    total: float | None
    branch: bool = False
    parent: int = -1
    start: int = 0
    counts: bool = True


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A call that `members` (indices of lines) made; the root, before any call, has `depth` -1. `branches` are the lines that
    begin after it. `value` is the mean return of both, `advantage` the mean over the trained members. `call` is the call's
    number in the first member's rollout. `ends` are the members whose last call this is."""

    parent: int
    depth: int
    members: tuple[int, ...]
    value: float | None
    advantage: float | None = None
    caller: str = ""
    action: str = ""
    call: int = 0
    tools: tuple[tuple[str, str], ...] = ()
    branches: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


def make_tree(lines: Sequence[Line], most: int) -> tuple[tuple[TreeNode, ...], int]:
    """Build the prefix tree of the lines, level by level, up to `most` nodes; return it with the number of calls left out."""
    return _Tree(lines, most).grown()


class _Tree:
    def __init__(self, lines: Sequence[Line], most: int) -> None:
        self._lines, self._most = lines, most
        trunks = tuple(place for place, line in enumerate(lines) if not line.branch)
        self._nodes = [TreeNode(-1, -1, trunks, None)]
        self._ways: dict[int, list[int]] = {place: [0] for place in trunks}
        """For each line that has begun, the index of its node at each depth; nodes that are left out are missing at the end."""
        self._left_out = 0

    def grown(self) -> tuple[tuple[TreeNode, ...], int]:
        depth = 0
        while True:
            self._begin(depth)
            going = [
                place
                for place, line in enumerate(self._lines)
                if len(self._ways.get(place, ())) == depth + 1 and depth < line.start + len(line.actions)
            ]
            if not going and not any(line.start > depth for line in self._lines):
                break
            self._level(depth, going)
            depth += 1
        return self._whole(), self._left_out

    def _begin(self, depth: int) -> None:
        """Add the branches that leave their parents after `depth` actions to the nodes at which they begin."""
        for place, line in enumerate(self._lines):
            if not line.branch or line.start != depth:
                continue
            before = self._ways.get(line.parent, [0] if line.parent < 0 else [])[: depth + 1]
            if len(before) <= depth:  # the parent's node there is left out
                self._left_out += len(line.actions)
                continue
            self._ways[place] = list(before)
            here = self._nodes[before[-1]]
            self._nodes[before[-1]] = replace(here, branches=(*here.branches, place))

    def _level(self, depth: int, going: Sequence[int]) -> None:
        found = by_key(going, lambda place: (self._ways[place][-1], self._action(place, depth).same))
        for (parent, _), visitors in found.items():
            if len(self._nodes) >= self._most:
                self._left_out += sum(self._length(place) - depth for place in visitors)
                continue
            first = self._action(visitors[0], depth)
            advantage = mean_of([self._action(place, depth).advantage for place in visitors])
            for place in visitors:
                self._ways[place].append(len(self._nodes))
            self._nodes.append(
                TreeNode(
                    parent, depth, tuple(visitors), None, advantage, first.caller, first.text, first.number, first.tools
                )
            )

    def _action(self, place: int, depth: int) -> Action:
        line = self._lines[place]
        return line.actions[depth - line.start]

    def _length(self, place: int) -> int:
        return self._lines[place].start + len(self._lines[place].actions)

    def _whole(self) -> tuple[TreeNode, ...]:
        """Return the nodes with their values, their children, and the lines that end at them."""
        children = by_key(range(1, len(self._nodes)), lambda index: self._nodes[index].parent)
        whole = [place for place, way in self._ways.items() if len(way) == self._length(place) + 1]
        ends = by_key(whole, lambda place: self._ways[place][-1])
        return tuple(self._with(index, node, children, ends) for index, node in enumerate(self._nodes))

    def _with(
        self, index: int, node: TreeNode, children: Mapping[int, list[int]], ends: Mapping[int, list[int]]
    ) -> TreeNode:
        begun = [place for place in node.branches if self._lines[place].counts]
        value = mean_of([self._lines[place].total for place in (*node.members, *begun)])
        return replace(
            node, value=value, children=tuple(children.get(index, ())), ends=tuple(sorted(ends.get(index, ())))
        )
