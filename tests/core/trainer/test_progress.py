"""The line of a step says what a person wants to know of it, and more where rollouts go on while the engine trains."""

from __future__ import annotations

import io
import threading

from lightning.terminal import Terminal
from lightning.trainer.summary import Reporter
from lightning.types import Rollout, Status, Task

METRICS = {
    "reward": 0.5,
    "rollouts": 16.0,
    "reward_with_failures": 0.46875,
    "failed": 1.0,
    "groups_used": 3.0,
    "groups": 4.0,
    "tokens_per_second": 120.0,
    "max_logprob_gap": 0.25,
    "staleness_mean": 0.9,
    "staleness_max": 2.0,
    "seconds/rollout": 0.4,
}


def rollout(status: Status) -> Rollout:
    return Rollout("run/1/0", "run", Task("q"), "g", status=status)


def line(metrics: dict[str, float]) -> str:
    console = Terminal(file=io.StringIO(), width=200)
    with Reporter(console=console) as reporter:
        reporter.begin(0, 10)
        reporter.step(3, metrics, 3.0)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    return next(text for text in shown.splitlines() if text.startswith("step "))


def test_the_line_of_a_step_in_turns() -> None:
    assert line(METRICS) == (
        "step    3/10  reward 0.500 (0.469 if failures count as 0)  training rollouts 16 (1 failed)  mixed groups 3/4  "
        "120 tok/s  gap 2.5e-01  3.0 s, 0:21 left"
    )
    assert "  reward 0.500  training rollouts 16 (0 failed)  " in line({**METRICS, "failed": 0.0})
    assert "(1 failed, by the policy: max_turns 1)" in line({**METRICS, "policy_fault/max_turns": 1.0})


def test_the_line_of_a_step_of_a_pipeline_says_how_old_its_tokens_were() -> None:
    shown = line({**METRICS, "pipeline/groups_carried": 3.0})
    assert "  stale 0.9 (max 2)  carried 3  waited 0.4 s  3.0 s, 0:21 left" in shown


def test_what_was_not_measured_is_no_number() -> None:
    of_old_rollouts = {name: METRICS[name] for name in ("rollouts", "groups_used", "groups", "tokens_per_second")}
    shown = line({**of_old_rollouts, "failed": 0.0, "pipeline/groups_carried": 3.0, "seconds/rollout": 0.4})
    assert "reward -  training rollouts 16" in shown
    assert "gap -  stale - (max -)  carried 3" in shown
    failed = {name: value for name, value in METRICS.items() if name != "reward"} | {"reward_with_failures": 0.0}
    assert "reward - (0.000 if failures count as 0)" in line(failed)


def test_a_pipe_has_a_line_at_least_every_ten_seconds() -> None:
    """Where there are no live bars; also while the loop is blocked, since a thread waits for what is due."""
    now = [100.0]
    console = Terminal(file=io.StringIO(), width=200)
    reporter = Reporter(console=console, clock=lambda: now[0])

    def lines() -> list[str]:
        return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]

    reporter.phase("starting the policy server")
    assert (reporter.pulse(), lines()) == (10.0, [])
    now[0] += 9.0
    assert (reporter.pulse(), lines()) == (1.0, [])
    now[0] += 1.0
    assert reporter.pulse() == 10.0
    assert lines() == ["starting the policy server, for 0:10 so far"]
    reporter.phase("held-out tasks after 0 steps", 200)
    for failed in (False, True):
        reporter.rollout(rollout(Status.FAILED if failed else Status.SUCCEEDED))
    now[0] += 70.0
    assert reporter.pulse() == 10.0
    assert lines()[1:] == ["held-out tasks after 0 steps: 2 of 200 rollouts, 1 failed, for 1:10 so far"]
    now[0] += 8.0
    reporter.begin(0, 10)
    reporter.step(1, METRICS, 3.0)
    now[0] += 8.0
    assert (reporter.pulse(), len(lines())) == (2.0, 3), "a line of a step counts"
    reporter.phase("training")
    now[0] += 10.0
    reporter.pulse()
    assert lines()[-1] == "training, for 0:10 so far", "a phase that waits for no rollouts counts none"


def test_lines_of_progress_end_with_the_reporter_and_are_for_pipes_alone() -> None:
    def threads() -> int:
        return sum(thread.name == "lightning-progress" for thread in threading.enumerate())

    now = [0.0, *([10.0] * 9)]
    console = Terminal(file=io.StringIO(), width=200)
    with Reporter(console=console, clock=lambda: now.pop(0) if len(now) > 1 else now[0]):
        assert threads() == 1
    assert threads() == 0
    terminal = Terminal(file=io.StringIO(), width=200)
    terminal._force_terminal = True
    for quiet in (Reporter(console=terminal), Reporter(enabled=False)):
        with quiet:
            assert threads() == 0
