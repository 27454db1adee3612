"""What the course of a run says is wrong, and that noise is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.config import Config, with_settings
from lightning.engines.logprob_gap import bound_for
from lightning.engines.protocol import StepResult
from lightning.plugins import plugins
from lightning.testing.trajectories import make_group
from lightning.trainer.metrics import step_metrics
from lightning.trainer.summary import Evaluation
from lightning_debug.diagnosis import Course, Diagnosis, lengths_of, turns_of
from lightning_debug.rules import diagnose

STEPS = 40
Values = Callable[[int], float]


def course(seed: int = 0, steps: int = STEPS, evaluations: Sequence[Evaluation] = (), **changed: Values) -> Course:
    """A run that learns, with the noise of 128 rollouts; `changed` are other metrics, by name, as functions of the step."""
    rng = np.random.default_rng(seed)

    def metrics(step: int) -> dict[str, float]:
        solved = 0.3 + 0.4 * step / STEPS
        reward = rng.binomial(128, solved) / 128
        values = {
            "reward": reward,
            "reward_with_failures": reward,
            "reward_std": float(np.sqrt(reward * (1 - reward))),
            "rollouts": 128.0,
            "failed": 0.0,
            "groups": 16.0,
            "groups_used": float(rng.binomial(16, 0.6)),
            "tokens": float(rng.normal(2000, 200)),
            "entropy": float(0.08 * np.exp(-0.02 * step) * rng.lognormal(0, 0.15)),
            "clip_fraction": 0.0,
            "masked_share": 0.0,
            "truncated": 0.02,
            "mean_logprob_gap": float(3e-8 * rng.lognormal(0, 0.3)),
            "max_logprob_gap": 1e-7,
            "tokens_compared": 2000.0,
            "grad_norm": float(0.2 * rng.lognormal(0, 0.3)),
        }
        values |= {name.replace("__", "/"): value(step) for name, value in changed.items()}
        used = values["groups_used"] / values["groups"]
        values["tokens"] *= used
        values["rollouts_trained"] = used * values["rollouts"]
        return values

    return Course([metrics(step) for step in range(steps)], evaluations)


def alarms(made: Course) -> list[Diagnosis]:
    """What is found after any of the steps, in the order in which it is found, each cause once."""
    found: dict[str, Diagnosis] = {}
    for step in range(1, len(made.steps) + 1):
        for each in diagnose(
            course=Course(
                made.steps[:step], [one for one in made.evaluations if one.step <= step], made.gap, made.order
            )
        ):
            found.setdefault(each.cause, each)
    return [each for each in found.values() if not each.minor]


def ramp(before: float, after: float, begin: int = 15, length: int = 10, noise: float = 0.0) -> Values:
    rng = np.random.default_rng(1)
    return lambda step: float(before + (after - before) * np.clip((step - begin) / length, 0, 1) + noise * rng.normal())


@pytest.mark.parametrize("seed", range(40))
def test_a_run_that_learns_raises_no_alarm_however_often_it_is_looked_at(seed: int) -> None:
    assert alarms(course(seed)) == []


EVALUATIONS = [
    Evaluation(step, reward, 200, 0, deviation=0.48)
    for step, reward in ((0, 0.3), (10, 0.6), (20, 0.5), (30, 0.35), (40, 0.3))
]
RISING = {"reward": ramp(0.3, 0.8, noise=0.02), "reward_with_failures": ramp(0.3, 0.8, noise=0.02)}
SICK = {
    "collapsed": course(reward_with_failures=ramp(0.7, 0.1, noise=0.03)),
    "flat": course(
        **{name: ramp(0.4, 0.4, noise=0.03) for name in ("reward", "reward_with_failures")},
        reward_std=lambda step: 0.49,
    ),
    "entropy": course(entropy=ramp(0.5, 0.02, noise=0.01)),
    "equal groups": course(groups_used=ramp(9, 1), reward_with_failures=ramp(0.3, 0.36, 0, 40, noise=0.01)),
    "gap": course(mean_logprob_gap=ramp(1e-5, 0.01, noise=1e-6)),
    "clipped": course(clip_fraction=ramp(0.0, 0.5)),
    "masked": course(masked_share=ramp(0.0, 0.3)),
    "truncated": course(truncated=ramp(0.0, 0.5)),
    "failures": course(failed=ramp(2, 60)),
    "policy faults": course(failed=ramp(2, 60), policy_fault__max_turns=ramp(2, 60)),
    "length": course(tokens=ramp(1000, 4000, noise=100)),
    "second measure/reward/right": course(**RISING, reward__right=ramp(0.5, 0.2, noise=0.02)),
    "held-out falls": course(evaluations=EVALUATIONS, **RISING),
    "held-out stays": course(
        evaluations=[Evaluation(step, 0.2, 200, 0, deviation=0.4) for step in range(0, 41, 10)], **RISING
    ),
    "not finite": course(skipped_nonfinite=lambda step: float(step == 33)),
    "drift": course(drift_tokens=lambda step: 3.0 * (step == 12)),
}


@pytest.mark.parametrize("cause", SICK)
def test_each_sickness_is_the_first_alarm_of_its_run(cause: str) -> None:
    found = alarms(SICK[cause])
    assert found[0].cause == cause
    assert found[0].steps, "it says on which steps it rests"
    assert all(0 <= step <= STEPS for step in found[0].steps)


def test_what_is_solved_is_no_alarm() -> None:
    solved: dict[str, Values] = {
        "reward": ramp(0.5, 0.99, 5, 10),
        "reward_with_failures": ramp(0.5, 0.99, 5, 10),
        "reward_std": ramp(0.5, 0.05, 5, 10),
        "groups_used": ramp(12, 1, 5, 10),
        "entropy": ramp(0.3, 0.01, 5, 10),
    }
    assert alarms(course(**solved)) == []
    (word,) = diagnose(course=course(**solved))
    assert word.minor
    assert "Give harder ones" in word.text


def test_faults_that_training_mends_are_no_alarm() -> None:
    assert alarms(course(failed=ramp(70, 5, 0, 20), policy_fault__max_turns=ramp(70, 5, 0, 20))) == []


def test_a_collapse_says_what_else_changed_and_where_to_begin_again() -> None:
    (found, *_) = alarms(
        course(reward_with_failures=ramp(0.7, 0.1), grad_norm=ramp(0.2, 9.0), entropy=ramp(0.08, 0.07))
    )
    assert "gradient's norm 0.2 to " in found.text
    assert "--from RUN@" in found.text
    assert found.serious


def test_tokens_that_are_older_than_the_weights_are_no_gap() -> None:
    assert alarms(course(mean_logprob_gap=lambda step: 0.1, staleness_max=lambda step: 1.0)) == []


@pytest.mark.parametrize(("tokens", "found"), [(16.0, []), (16000.0, ["gap"])], ids=["few tokens", "many tokens"])
def test_the_gap_of_few_tokens_may_be_that_of_many_by_chance(tokens: float, found: list[str]) -> None:
    step = {"mean_logprob_gap": 0.06, "max_logprob_gap": 0.3, "p999_logprob_gap": 0.2, "tokens_compared": tokens}
    diagnosed = diagnose(course=Course([step] * 6, gap=bound_for("bfloat16")))
    assert [each.cause for each in diagnosed] == found
    assert all("differ by 0.06 nats in the mean of 16000 tokens, more than 0.0512" in each.text for each in diagnosed)


@pytest.mark.parametrize("held_out", [(0.2, 0.5), (0.75, 0.76)], ids=["follows", "solved from the beginning"])
def test_held_out_tasks_that_follow_or_were_solved_are_no_alarm(held_out: tuple[float, float]) -> None:
    results = [Evaluation(step, held_out[step > 15], 200, 0, deviation=0.4) for step in range(0, 41, 10)]
    assert alarms(course(evaluations=results, **RISING)) == []


def test_a_policy_that_says_always_the_same_after_one_step_is_told_from_tasks_that_teach_nothing() -> None:
    once = alarms(course(groups_used=lambda step: 12.0 * (step < 5)))
    assert once[0].cause == "equal groups"
    assert "after 5 steps: the last of them made the policy say always the same. Lower engine.lr" in once[0].text
    assert "engine.lr" not in alarms(course(groups_used=ramp(12, 1)))[0].text


def test_both_rewards_falling_is_a_collapse_and_no_overfitting() -> None:
    falls = {name: ramp(0.7, 0.2, noise=0.02) for name in ("reward", "reward_with_failures")}
    assert "held-out falls" not in [each.cause for each in alarms(course(evaluations=EVALUATIONS, **falls))]


@pytest.mark.parametrize("scale", [1.0, 10.0, 0.01])
def test_the_noise_of_held_out_tasks_is_no_finding_whatever_rewards_are_worth(scale: float) -> None:
    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rewards = rng.binomial(100, 0.6, 11) / 100
        results = [
            Evaluation(4 * step, float(scale * reward), 100, 0, deviation=scale * float(np.sqrt(reward * (1 - reward))))
            for step, reward in enumerate(rewards)
        ]
        made = course(seed, evaluations=results)
        found += any(each.cause == "held-out falls" for each in diagnose(course=made))
    assert found <= 2


@pytest.mark.parametrize("order", ["learnable", "given"])
def test_a_choice_of_tasks_that_moves_the_reward_is_no_collapse(order: str) -> None:
    falls = {name: ramp(0.7, 0.3, noise=0.02) for name in ("reward", "reward_with_failures")}
    made = course(**falls)
    assert "collapsed" in [each.cause for each in alarms(made)]
    assert alarms(replace(made, order=order)) == []


def test_failures_never_make_an_evaluation_better() -> None:
    fine, failing = Evaluation(1, -0.4, 100, 0, deviation=0.3, lowest=-1.0), Evaluation(2, -0.5, 100, 60, lowest=-1.0)
    assert failing.reward_with_failures > fine.reward_with_failures
    assert failing.score == pytest.approx(-0.8)
    assert fine.score == pytest.approx(-0.4)
    assert failing.error == pytest.approx(np.sqrt(0.24 * 0.25 / 99))


NOISY: dict[str, Values] = {name: ramp(0.3, 0.3, noise=0.12) for name in ("reward", "reward_with_failures")}
"""The training reward of so few rollouts says nothing of a rise of a third."""


@pytest.mark.parametrize("order", ["shuffled", "learnable"])
@pytest.mark.parametrize("tasks", [20, 200])
def test_a_run_whose_held_out_reward_has_not_moved_is_flat(tasks: int, order: str) -> None:
    results = [Evaluation(step, 0.3, tasks, 0, deviation=0.46) for step in (0, 42)]
    made = course(steps=42, **NOISY, reward_std=lambda step: 0.46)
    assert "flat" not in [each.cause for each in alarms(made)], "the training rewards alone do not show it"
    (found,) = alarms(replace(made, evaluations=results, order=order))
    assert (found.cause, found.serious, found.steps) == ("flat", True, (0, 42))
    assert "the held-out reward has not moved: 0.300 after 0 steps and 0.300 after 42" in found.text
    assert "--lr" in found.text


@pytest.mark.parametrize("reward", [0.5, 0.0])
@pytest.mark.parametrize(("tasks", "flat"), [(2, False), (8, False), (20, True)])
def test_of_a_few_held_out_rollouts_nobody_knows_whether_the_reward_moved(
    tasks: int, flat: bool, reward: float
) -> None:
    results = [Evaluation(step, reward, tasks, 0, deviation=reward) for step in (0, 20)]
    made = course(steps=20, evaluations=results, **NOISY, reward_std=lambda step: 0.46)
    assert ("flat" in [each.cause for each in alarms(made)]) is flat


@pytest.mark.parametrize(
    "after", [[(10, 0.3)], [(42, 0.6)], [(21, 0.55), (42, 0.31)], [(42, 0.1)]], ids=["early", "rose", "moved", "fell"]
)
def test_a_held_out_reward_that_moved_is_not_flat(after: list[tuple[int, float]]) -> None:
    results = [Evaluation(step, reward, 200, 0, deviation=0.46) for step, reward in [(0, 0.3), *after]]
    made = course(steps=42, evaluations=results, **NOISY, reward_std=lambda step: 0.46)
    assert "flat" not in [each.cause for each in alarms(made)]


def test_trainer_and_sampler_that_were_never_compared_are_no_good_news() -> None:
    (found,) = alarms(course(tokens_compared=lambda step: 0.0))
    assert found.cause == "not compared"
    assert not found.serious
    assert found.text.startswith("the sampler's and the trainer's probabilities could not be compared in the last ")
    (first,) = alarms(course(steps=1, tokens_compared=lambda step: 0.0))
    assert "could not be compared in the last step, because" in first.text
    assert alarms(course(tokens_compared=lambda step: float(step % 4 == 0))) == []


def test_steps_without_a_reward_are_left_out_and_do_not_shift_the_others() -> None:
    """Every other step has old rollouts alone: it has no reward, which is none of 0."""
    made = course(steps=40, reward_with_failures=ramp(0.7, 0.1, begin=20, length=4, noise=0.01))
    steps = [
        {name: value for name, value in metrics.items() if place % 2 == 0 or not name.startswith("reward")}
        for place, metrics in enumerate(made.steps)
    ]
    (found,) = [each for each in diagnose(course=Course(steps)) if each.cause == "collapsed"]
    best, last = found.steps
    assert 1 <= best <= 11, "the best steps are told by their numbers in the run"
    assert last == 40
    assert "it was 0.7" in found.text
    assert f"after {best + 8} steps" in found.text


def test_held_out_tasks_fall_also_where_no_training_reward_is_known() -> None:
    made = course(evaluations=EVALUATIONS)
    bare = [{name: value for name, value in step.items() if not name.startswith("reward")} for step in made.steps]
    found = next(each for each in alarms(replace(made, steps=bare)) if each.cause == "held-out falls")
    assert "training tasks went" not in found.text
    assert "nan" not in found.text


@pytest.mark.parametrize("kl", [0.0, 1e-3], ids=["left out", "trained for their KL"])
def test_answers_are_as_long_whether_groups_that_are_equal_are_trained_or_not(kl: float) -> None:
    calls = [((1, 2), tuple(range(10)))]
    groups = [
        make_group([float(group == 0 and one == 0) for one in range(4)], group=f"{group}", calls=calls)
        for group in range(8)
    ]
    batch = LightningRL(kl_coefficient=kl).batch(groups)
    rollouts = [member.rollout for group in groups for member in group.trajectories]
    tokens = float(sum((row.weights != 0).sum() for row in batch.samples))
    metrics = step_metrics(rollouts, groups, batch, StepResult({"tokens": tokens}, {}))
    assert tokens == (320.0 if kl else 40.0)
    assert lengths_of(Course([metrics])) == [10.0]


@pytest.mark.parametrize(
    ("turns", "editor", "found"),
    [
        ("", 0, True),
        ("", 4, True),
        ("", 6, False),
        ("writer:1,editor:1", 0, True),
        ("writer:8,editor:2", 0, False),  # it has had two turns
    ],
)
def test_a_policy_that_is_never_trained_is_named(turns: str, editor: int, found: bool) -> None:
    """`editor` is the last step of ten that trained the editor; 0 is none."""
    said = {"policies.writer.agents": ["writer"], "policies.editor.agents": ["editor"], "engine.lora": {"rank": 1}}
    policies = plugins().policy_set(with_settings(Config(), {**said, "trainer.policy_turns": turns}))
    steps = [{"policy/writer/tokens": 9.0, "stepped": 1.0} for _ in range(10)]
    for step in steps[:editor]:
        step["policy/editor/tokens"] = 9.0

    def told(steps: list[dict[str, float]]) -> list[Diagnosis]:
        found = diagnose(course=Course(steps, turns=turns_of(policies, 1, len(steps))))
        return [each for each in found if each.cause.startswith("untrained policy")]

    assert [each.cause for each in told(steps)] == ["untrained policy/editor"] * found
    assert all("policies.editor.agents" in each.text for each in told(steps))
    assert told([{"stepped": 0.0} for _ in steps]) == [], "steps that trained no policy have another alarm"
