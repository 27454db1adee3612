"""Pacing keeps the bound on staleness, whatever finishes when, and never gets stuck or throws a group away."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_samplers.pacing import OpenGroup, Pacer


class World:
    """A run in which anything may happen next: groups begin and end in any order, and the process is killed anywhere."""

    def __init__(self, size: int, bound: int, steps: int, waves: int, seed: int) -> None:
        self.size, self.bound, self.steps, self.limit = size, bound, steps, (waves - 1) * size
        self.rng = random.Random(seed)
        self.patience = self.rng.random()
        self.pacer = Pacer(size, bound, steps)
        self.begun: dict[str, int] = {}
        self.finished: set[str] = set()
        self.useless: set[str] = set()
        self.taken: dict[str, int] = {}
        self.dropped: list[str] = []

    def run(self) -> None:
        while self.pacer.step <= self.steps:
            self.something_happens()
            if self.rng.random() < self.patience:
                self.train()
            for group in self.pacer.open_groups:
                assert group.step + self.bound >= self.pacer.step, "its deadline has passed"

    def something_happens(self) -> None:
        running = [group.id for group in self.pacer.open_groups if not group.finished]
        if not self.pacer.room and not running:
            assert self.train(), "everything has begun and ended, and still the step waits"
        elif self.rng.random() < 0.05:
            self.restart()
        elif self.pacer.room and (not running or self.rng.random() < 0.5):
            self.begin()
        else:
            # The newest first, often: what is old is then late as well.
            group = running[-1] if self.rng.random() < 0.7 else self.rng.choice(running)
            self.pacer.finish(group)
            self.finished.add(group)

    def begin(self) -> None:
        name = f"g{len(self.begun)}"
        self.begun[name] = self.pacer.begin(name)
        assert self.begun[name] == self.pacer.step
        if self.limit and self.rng.random() < 0.4:
            self.useless.add(name)

    def restart(self) -> None:
        """What another process knows: which groups had begun, which have ended, which committed steps took them."""
        left = [
            OpenGroup(group, step, group in self.finished)
            for group, step in self.begun.items()
            if group not in self.taken
        ]
        self.dropped = []
        self.pacer = Pacer(self.size, self.bound, self.steps, step=self.pacer.step, open_groups=left)

    def train(self) -> bool:
        """Take the step, if it need not wait."""
        for group in self.pacer.open_groups:
            if group.finished and group.id in self.useless and len(self.dropped) < self.limit:
                self.pacer.drop(group.id)
                self.dropped.append(group.id)
        picked = self.pacer.pick()
        if picked is None:
            return bool(self.pacer.room)
        assert len(picked) == self.size
        while self.pacer.room and self.rng.random() < 0.6:
            self.begin()
        if self.rng.random() < 0.1:
            self.restart()
            return True
        step = self.pacer.step
        for group in (*picked, *self.dropped):
            assert group not in self.taken
            assert 0 <= step - self.begun[group] <= self.bound
            self.taken[group] = step
        self.dropped = []
        self.pacer.advance(step)
        return True


@settings(max_examples=100)
@given(
    size=st.integers(1, 4),
    bound=st.integers(0, 5),
    steps=st.integers(1, 12),
    waves=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_the_bound_holds_and_every_group_is_taken_once(
    size: int, bound: int, steps: int, waves: int, seed: int
) -> None:
    world = World(size, bound, steps, waves, seed)
    world.run()
    assert not world.pacer.open_groups, "nothing is left behind"
    assert world.taken.keys() == world.begun.keys()


@given(size=st.integers(1, 3), bound=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_the_same_events_give_the_same_picks(size: int, bound: int, seed: int) -> None:
    first, second = World(size, bound, 8, 2, seed), World(size, bound, 8, 2, seed)
    first.run()
    second.run()
    assert (first.begun, first.taken) == (second.begun, second.taken)


def test_a_bound_of_0_is_sampling_and_training_in_turns() -> None:
    pacer = Pacer(2, 0, 3)
    for step in range(1, 4):
        assert pacer.room == 2
        for name in (f"{step}a", f"{step}b"):
            pacer.begin(name)
        assert pacer.room == 0
        pacer.finish(f"{step}b")
        assert pacer.pick() is None
        pacer.finish(f"{step}a")
        assert pacer.pick() == [f"{step}a", f"{step}b"]
        assert pacer.room == 0, "what begins now would be too old for the next step"
        pacer.advance(step)


def test_a_slow_group_is_carried_over_until_its_deadline() -> None:
    pacer = Pacer(1, 2, 10)
    pacer.begin("slow")
    for step in (1, 2):
        pacer.begin(f"quick {step}")
        pacer.finish(f"quick {step}")
        assert pacer.pick() == [f"quick {step}"]
        assert pacer.carried() == (step > 1)
        pacer.advance(step)
    pacer.begin("quick 3")
    pacer.finish("quick 3")
    assert pacer.pick() is None, "step 3 is the last that may train on a token of version 0"
    pacer.finish("slow")
    assert pacer.pick() == ["slow"]


def test_a_step_waits_before_it_is_too_late_for_two() -> None:
    pacer = Pacer(1, 1, 10)
    for name in ("a", "b"):
        pacer.begin(name)
    pacer.finish("b")
    assert pacer.pick() == ["b"]
    pacer = Pacer(1, 2, 10, open_groups=[OpenGroup(name, 1, name == "new") for name in ("a", "b", "c")])
    pacer.advance(1)
    pacer._open["new"] = OpenGroup("new", 2, True)
    assert pacer.pick() is None, "three groups of version 0 cannot be taken in steps 2 and 3 if another goes first"


def test_the_oldest_finished_groups_go_first() -> None:
    pacer = Pacer(2, 3, 10)
    for name in "abcd":
        pacer.begin(name)
    for name in "dbc":
        pacer.finish(name)
    assert pacer.pick() == ["b", "c"]


def test_nothing_begins_that_no_step_would_take() -> None:
    pacer = Pacer(2, 5, 2)
    assert pacer.room == 4
    for name in "abcd":
        pacer.begin(name)
        pacer.finish(name)
    assert pacer.pick() == ["a", "b"]
    pacer.advance(1)
    assert (pacer.room, len(pacer)) == (0, 2)
    pacer.drop("c")
    assert pacer.room == 1, "what is dropped is replaced"
