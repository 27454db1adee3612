"""Work is conserved, whatever becomes of its speed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_planner.simulation import Kernel

rates = st.lists(st.tuples(st.floats(0.01, 5.0), st.floats(0.1, 3.0)), max_size=8)


@settings(max_examples=30, deadline=None)
@given(changes=rates, jobs=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=5))
def test_a_job_ends_when_its_clock_has_run_so_far(changes: list[tuple[float, float]], jobs: list[float]) -> None:
    kernel = Kernel()
    clock = kernel.clock()
    clock.rate, worked, ended = 1.0, [0.0], {}

    def count(seconds: float) -> None:
        worked[0] += seconds * clock.rate

    kernel.before = count
    for number, job in enumerate(jobs):
        clock.begin(job, lambda number=number: ended.__setitem__(number, worked[0]))  # type: ignore[misc]
    at = 0.0
    for wait, rate in changes:
        at += wait
        kernel.after(at, lambda rate=rate: setattr(clock, "rate", rate))  # type: ignore[misc]
    while kernel.step():
        pass
    assert len(ended) == len(jobs)
    for number, job in enumerate(jobs):
        assert abs(ended[number] - job) < 1e-9
    assert not len(clock)


def test_a_clock_that_stands_still_holds_its_jobs() -> None:
    kernel, ended = Kernel(), []
    clock = kernel.clock()
    clock.begin(1.0, lambda: ended.append(kernel.now))
    assert not kernel.step(), "nothing happens at rate 0"
    kernel.after(3.0, lambda: setattr(clock, "rate", 2.0))
    while kernel.step():
        pass
    assert ended == [3.5]
