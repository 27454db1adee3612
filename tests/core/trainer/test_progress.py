"""The line of a step says what a person wants to know of it, and more where rollouts go on while the engine trains."""

from __future__ import annotations

import io

from lightning.terminal import Terminal
from lightning.trainer.summary import Reporter

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
