"""Which server an attempt goes to: siblings together, the load even, a slow server less."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.gateway.upstream import Pool, Slot, Upstream
from lightning.types import Rollout, Task
from lightning_replicas.placement import Placement


def servers(count: int) -> list[Slot]:
    return Pool([Upstream(f"http://127.0.0.1:{number + 1}", "m") for number in range(count)]).slots


def rollout(number: int, group: str = "g", step: int = 1) -> Rollout:
    return Rollout(f"run/{step}/{number}", "run", Task("q"), group, step=step)


def test_siblings_go_together_until_their_server_has_its_share() -> None:
    stage, slots = Placement(32, 60.0), servers(4)
    placed = {number: stage.placed(rollout(number, f"group {number // 8}"), slots) for number in range(32)}
    assert [Counter(placed[number] for number in range(first, first + 8)) for first in range(0, 32, 8)] == [
        {server: 8} for server in range(4)
    ]


def test_a_large_group_is_divided_over_as_few_servers_as_hold_it() -> None:
    stage, slots = Placement(32, 60.0), servers(4)
    placed = [stage.placed(rollout(number), slots) for number in range(24)]
    assert Counter(placed) == {0: 8, 1: 8, 2: 8}


def test_as_many_are_expected_as_ran_at_once_before() -> None:
    stage, slots = Placement(32, 60.0), servers(2)
    for step in (1, 2):
        wave = [rollout(number, step=step) for number in range(8)]
        placed = Counter(stage.placed(each, slots) for each in wave)
        assert placed == ({0: 8} if step == 1 else {0: 4, 1: 4})
        for each in wave:
            stage.over(each)


def test_the_late_end_of_an_earlier_attempt_does_not_end_the_present_one() -> None:
    stage, slots = Placement(4, 60.0), servers(2)
    first = rollout(0)
    stage.placed(first, slots)
    again = stage.placed(replace(first, attempt=first.attempt + 1), slots)
    stage.over(first)
    assert stage.placed(rollout(1, "other"), slots) != again
    stage.over(replace(first, attempt=first.attempt + 1))
    assert stage.placed(rollout(2, "third"), slots) == again


def test_one_server_is_no_choice_and_a_sick_one_is_none() -> None:
    stage, slots = Placement(8, 60.0), servers(3)
    assert stage.placed(rollout(0), slots[:1]) is None
    slots[0].healthy = slots[1].healthy = False
    assert [stage.placed(rollout(number), slots) for number in range(9)] == [2] * 9


def test_another_attempt_at_a_rollout_ends_the_one_before_and_an_old_one_ends_by_itself() -> None:
    stage, slots = Placement(2, 60.0), servers(2)
    again = [stage.placed(rollout(0), slots) for _ in range(4)][-1]
    assert {again, stage.placed(rollout(1), slots)} == {0, 1}
    gone = Placement(2, 0.0)
    assert [gone.placed(rollout(number), slots) for number in range(4)] == [0, 0, 0, 0]


@settings(max_examples=12)
@given(seed=st.integers(0, 2**16), count=st.integers(2, 5), group=st.integers(1, 16))
def test_rollouts_are_even_and_a_slow_server_gets_less(seed: int, count: int, group: int) -> None:
    """Forty rollouts run at once, in simulated time; the last server takes three times as long where `slow`."""
    for slow in (1.0, 3.0):
        stage, slots, rng = Placement(40, 1e9), servers(count), random.Random(seed)
        running: list[tuple[float, int, Rollout]] = []
        counts, now = Counter[Any](), 0.0
        for number in range(800):
            if len(running) == 40:
                running.sort(key=lambda item: item[0])
                now, _, done = running.pop(0)
                stage.over(done)
            each = rollout(number, f"group {number // group}")
            server = stage.placed(each, slots)
            assert server is not None
            counts[server] += 1
            running.append((now + rng.uniform(0.8, 1.2) * (slow if server == count - 1 else 1.0), server, each))
            loads = Counter(place for _, place, _ in running)
            assert max(loads.values()) <= -(-40 // count)
        even = 800 / count
        others = [counts[number] for number in range(count - 1)]
        if slow == 1.0:
            assert max(abs(number - even) for number in counts.values()) <= 0.1 * even
        else:
            assert counts[count - 1] < 0.6 * min(others)
