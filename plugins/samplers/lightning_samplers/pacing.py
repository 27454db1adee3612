"""How far sampling may run ahead of training: which groups may begin, and which a step takes.

The invariant: a group that begins while the policy server has version a is taken by a step s with a <= s <= a + K, where K
is the bound on staleness; and no group is ever thrown away to keep it.

Every group has a deadline, the step a + K. Let R(t) be the open groups (begun, not taken) whose deadline is t or earlier,
and B the groups that a step takes. What is open before step s can meet its deadlines if and only if |R(t)| <= (t - s + 1) B
for every t >= s. Two rules keep this true. No more than (K + 1) B groups are open before a step and K B after its pick, so
the newest, whose deadline is s + K, always fit. And a step takes its B oldest finished groups, but waits for slow ones as
long as more than (t - s) B of some R(t) would be left. Deadlines do not fall in the order in which groups begin, so the
oldest finished ones are in every R(t) as many as any choice could have: when they do not suffice, nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class OpenGroup:
    """A group that has begun and that no step has taken. `step` is the one that was next when it began."""

    id: str
    step: int
    finished: bool = False


class Pacer:
    """The open groups of a run, in the order they began. No clock and no randomness: the same events give the same picks.

    `tasks_per_step` is B, `max_staleness` is K, `steps` where training ends (nothing begins that no step would take). `step`
    is the next step to take, by the weights that are served, `open_groups` what an interrupted run had begun.
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
        """How many groups may begin now."""
        steps_ahead = min(self._staleness + 1, self._steps + 1 - self.step) - self._picked
        return max(0, steps_ahead * self._size - len(self._open))

    def begin(self, group: str) -> int:
        """A group begins; returns its step. Only while there is `room`."""
        assert self.room > 0, "the bound would be broken"
        self._open[group] = OpenGroup(group, self.step)
        return self.step

    def finish(self, group: str) -> None:
        """Every rollout of an open group has ended."""
        self._open[group].finished = True

    def drop(self, group: str) -> None:
        """An open group is taken by the present step without counting for it, because it teaches nothing."""
        del self._open[group]

    def pick(self) -> list[str] | None:
        """The groups that the present step takes, oldest first; None as long as it has to wait."""
        finished = [group for group in self._open.values() if group.finished][: self._size]
        if len(finished) < self._size or not self._keeps_deadlines(finished):
            return None
        for group in finished:
            del self._open[group.id]
        self._picked = True
        return [group.id for group in finished]

    def advance(self, version: int) -> None:
        """The policy server has the weights of `version`: from now on groups begin for the step after it."""
        self.step, self._picked = version + 1, False

    def carried(self) -> int:
        """Open groups that began before the present step: what it leaves to later ones."""
        return sum(group.step < self.step for group in self._open.values())

    def _keeps_deadlines(self, taken: list[OpenGroup]) -> bool:
        """Whether what is left can be taken in time."""
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
