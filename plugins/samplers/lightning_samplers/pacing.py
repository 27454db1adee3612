"""Decide how far sampling may run ahead of training: which groups may begin, and which groups a step takes.

The invariant: a group that begins while step a is next is taken by a step s with a <= s <= a + K, where K is the bound on
staleness; and no group is ever thrown away to keep this bound.

Every group has a deadline, the step a + K. Let R(t) be the open groups (begun, not taken) whose deadline is t or earlier,
and B the number of groups that a step takes. The groups that are open before step s can meet their deadlines if and only if
|R(t)| <= (t - s + 1) B for every t >= s. Two rules keep this true. At most (K + 1) B groups are open before a step and K B
after its pick, so that the newest groups, whose deadline is s + K, always fit. And a step takes its B oldest finished groups,
but waits for slow groups as long as more than (t - s) B groups of some R(t) would be left. Deadlines never decrease in the
order in which groups begin, so that no other choice of B groups has more groups in any R(t): if these do not suffice, none do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class OpenGroup:
    """A group that has begun and that no step has taken. `step` is the step that was next when it began."""

    id: str
    step: int
    finished: bool = False


class Pacer:
    """The open groups of a run, in the order they began. There is no clock and no randomness: the same events give the same
    picks.

    `tasks_per_step` is B, `max_staleness` is K, `steps` the number of steps of the run (no group begins that no step would
    take). `step` is the next step, which the served weights sample; `open_groups` are those of an interrupted run.
    """

    def __init__(
        self,
        tasks_per_step: int,
        max_staleness: int,
        steps: int,
        *,
        step: int = 1,
        open_groups: Iterable[OpenGroup] = (),
    ) -> None:
        self._size, self._staleness, self._steps = tasks_per_step, max_staleness, steps
        self._open = {group.id: group for group in open_groups}
        self._picked = False
        self.step = step

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_groups(self) -> tuple[OpenGroup, ...]:
        """The open groups, oldest first."""
        return tuple(self._open.values())

    @property
    def room(self) -> int:
        """How many groups may begin now without breaking the bound on staleness."""
        steps_ahead = min(self._staleness + 1, self._steps + 1 - self.step) - self._picked
        return max(0, steps_ahead * self._size - len(self._open))

    def begin(self, group: str) -> int:
        """Add a group that begins, and return its step. There must be `room`."""
        assert self.room > 0, "the bound would be broken"
        self._open[group] = OpenGroup(group, self.step)
        return self.step

    def finish(self, group: str) -> None:
        """Note that every rollout of an open group has ended."""
        self._open[group].finished = True

    def drop(self, group: str) -> None:
        """Remove an open group that teaches nothing: the present step takes it, but not as one of its B groups."""
        del self._open[group]

    def pick(self) -> list[str] | None:
        """Remove and return the groups that the present step takes, oldest first; None while it must wait."""
        finished = [group for group in self._open.values() if group.finished][: self._size]
        if len(finished) < self._size or not self._keeps_deadlines(finished):
            return None
        for group in finished:
            del self._open[group.id]
        self._picked = True
        return [group.id for group in finished]

    def advance(self, version: int) -> None:
        """Note that the policy server has the weights of `version`: the step after it is next, and groups now begin for it."""
        self.step, self._picked = version + 1, False

    def carried(self) -> int:
        """Count the open groups that began before the present step was next."""
        return sum(group.step < self.step for group in self._open.values())

    def _keeps_deadlines(self, taken: list[OpenGroup]) -> bool:
        """Return whether the groups that are left after these are `taken` can all be taken by their deadlines."""
        left: dict[int, int] = {}
        for group in self._open.values():
            deadline = group.step + self._staleness
            left[deadline] = left.get(deadline, 0) + 1
        for group in taken:
            left[group.step + self._staleness] -= 1
        due = 0
        for deadline in sorted(left):
            due += left[deadline]
            if due > (deadline - self.step) * self._size:
                return False
        return True
