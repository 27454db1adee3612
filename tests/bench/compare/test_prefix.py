"""What the bench of prefixes concludes from its data, on data made up here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

# The scripts import one another as scripts do: from their own folder.
sys.path.insert(0, str(Path(__file__).parent))

import prefix
from ablation_table import Result
from prefix import PREFIX, TASK, VARIANTS, reached
from variants import build


def a_result(variant: str, rewards: list[float], tokens: int) -> Result:
    return Result(
        demo="exam",
        variant=variant,
        says="",
        seed=0,
        algorithm={},
        settings={},
        held_out_tasks=10,
        before=rewards[0],
        after=rewards[-1],
        evaluations=list(enumerate(rewards)),
        rewards=rewards[1:],
        rollouts=16,
        failed=0,
        drift_tokens=0,
        max_logprob_gap=1e-5,
        tool_events={},
        seconds=100.0,
        cpu=360.0,
        load=1.0,
        sampled=[tokens] * (len(rewards) - 1),
        taught=[(1, 2)] * (len(rewards) - 1),
    )


def test_arms_are_compared_where_they_came_to_the_same_reward() -> None:
    task, prefixes = a_result(TASK, [0.0, 0.1, 0.2], 100), a_result(PREFIX, [0.0, 0.4, 0.4], 100)
    assert reached(task, 0.2) == (200.0, 100.0)
    assert reached(prefixes, 0.2) == (50.0, 25.0)
    assert reached(task, 0.3) is None
    text = prefix.table([task, prefixes])
    assert "| 0 | 0.20 | 200 | 50 | 4.00 | 4.00 | 0.00, 0.10, 0.20 | 0.00, 0.40, 0.40 |" in text
    assert "| untrained | 2 evaluations | 0.000 ± 0.000 |" in text
    assert "| 0 | 0.00 | 0 | 0 | - | - |" in prefix.table([replace(task, evaluations=[(0, 0.0), (2, 0.0)]), prefixes])


def test_both_arms_are_the_demonstration_s_algorithm() -> None:
    demo = prefix.demo()
    assert build(VARIANTS[TASK], demo) == build(VARIANTS[PREFIX], demo) == demo.algorithm()
    assert VARIANTS[PREFIX].settings == {"trainer.sampling": "prefix"}


@pytest.mark.parametrize("right", [0, prefix.QUESTIONS])
def test_an_exam_is_rewarded_only_without_a_mistake(monkeypatch: pytest.MonkeyPatch, right: int) -> None:
    answers = iter([1.0] * right + [0.0] * prefix.QUESTIONS)
    monkeypatch.setattr(prefix, "answer", lambda task, llm: next(answers))
    (task, *_) = prefix.demo().tasks(1, 0)
    assert prefix.exam(task, None)["reward"] == float(right == prefix.QUESTIONS)  # type: ignore[arg-type]
