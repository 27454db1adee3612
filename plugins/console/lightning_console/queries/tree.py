"""A prefix tree of calls: the lines of several rollouts, which part where they were answered otherwise.

The invariant: two actions are one node exactly when the actions before them are, and both are the same. A branch is counted
from the node on at which it leaves its parent's line, so that no state above is worth more because somebody looked below it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Action:
    """A call and its answer. What is equal by `same` after the same actions is one node. `number` is that of the call in its
    own rollout, from 1; 0 where it is none of that rollout's. `tools` are what ran because of it, and what came of it."""

    same: Hashable
    caller: str
    text: str
    number: int
    advantage: float | None = None
    tools: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """The actions of a rollout, and its return. A branch follows the first `start` actions of the line of `parent` (a place
    among the lines), from the root where `parent` is -1, then its own. `counts` is false for one whose return says nothing of
    the policy where it begins: something was changed, or where it begins is not known."""

    actions: Sequence[Action]
    total: float | None
    branch: bool = False
    parent: int = -1
    start: int = 0
    counts: bool = True


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A call, at which `members` (places of lines) were; the root, before any call, has `depth` -1. `branches` are those that
    begin behind it. `value` is the mean return of both, `advantage` the mean over those that were trained. `call` is the number
    of the call in the rollout of the first of `members`. `ends` are the members that end here."""

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
    """At most so many nodes, level by level, and how many calls are left out."""
    return _Tree(lines, most).grown()


class _Tree:
    def __init__(self, lines: Sequence[Line], most: int) -> None:
        self._lines, self._most = lines, most
        trunks = tuple(place for place, line in enumerate(lines) if not line.branch)
        self._nodes = [TreeNode(-1, -1, trunks, None)]
        self._ways: dict[int, list[int]] = {place: [0] for place in trunks}
        """The nodes of each line that has begun, one for each depth; without the last ones where these are left out."""
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
        """Let the branches begin that leave their parents' lines after so many actions."""
        for place, line in enumerate(self._lines):
            if not line.branch or line.start != depth:
                continue
            before = self._ways.get(line.parent, [0] if line.parent < 0 else [])[: depth + 1]
            if len(before) <= depth:  # what its parent did there is left out
                self._left_out += len(line.actions)
                continue
            self._ways[place] = list(before)
            here = self._nodes[before[-1]]
            self._nodes[before[-1]] = replace(here, branches=(*here.branches, place))

    def _level(self, depth: int, going: Sequence[int]) -> None:
        found: dict[tuple[int, Hashable], list[int]] = {}
        for place in going:
            found.setdefault((self._ways[place][-1], self._action(place, depth).same), []).append(place)
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
        """The nodes with their values, their children, and what ends at them."""
        children: dict[int, list[int]] = {}
        for number, node in enumerate(self._nodes[1:], 1):
            children.setdefault(node.parent, []).append(number)
        ends: dict[int, list[int]] = {}
        for place, way in self._ways.items():
            if len(way) == self._length(place) + 1:
                ends.setdefault(way[-1], []).append(place)
        return tuple(self._with(number, node, children, ends) for number, node in enumerate(self._nodes))

    def _with(
        self, number: int, node: TreeNode, children: Mapping[int, list[int]], ends: Mapping[int, list[int]]
    ) -> TreeNode:
        begun = [place for place in node.branches if self._lines[place].counts]
        value = mean_of([self._lines[place].total for place in (*node.members, *begun)])
        return replace(
            node, value=value, children=tuple(children.get(number, ())), ends=tuple(sorted(ends.get(number, ())))
        )


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
