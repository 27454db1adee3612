"""Rules that find what is wrong in a run from the metrics of its steps and its held-out evaluations.

The invariant: a rule sees only the steps up to now, so that a running trainer and a reader of the store find the same at the
same step. Ordinary noise gives no finding, even though the rules run after every step.

A rule compares windows of `WINDOW` steps. A difference counts if it is several standard errors wide and large enough to matter;
the noise of a step is estimated from the differences between neighbouring steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
from lightning.safe_text import counted
from lightning.trainer.summary import NAMED, Evaluation, is_idle

from lightning_debug.diagnosis import (
    FLAT_AFTER,
    LEAST,
    SMALL,
    WINDOW,
    Course,
    Diagnosis,
    change_of,
    failed_share,
    is_now,
    is_solved,
    known_of,
    last_steps,
    lengths_of,
    mean_around,
    mean_of,
    noise_of,
    policy_fault_causes,
    policy_fault_share,
    values_of,
)
from lightning_debug.garbled import garbled

LEAST_ROLLOUTS: Final = 12
"""Rollouts that an evaluation needs so that its spread of rewards is trusted, even if all are equal."""
SURE_PAIRS: Final = 3.5
"""The mean of the last two evaluations has fallen if it is this many standard errors of one below the best two's mean."""
SURE_TWO: Final = 2.5
"""Standard errors of one evaluation by which rewards must differ to count as moved."""
RISEN: Final = 0.3
"""A training reward that has risen by more than this share should show on the held-out tasks."""
FOLLOWED: Final = 0.25
"""The part of the gain in training that the held-out reward must reach to count as having followed."""


def held_out_falls(course: Course) -> Iterator[Diagnosis]:
    """Find a held-out reward that falls while that of the training tasks does not."""
    results = course.measured
    if len(results) < 4:
        return
    pairs = [(mean_of([one.score, other.score]), one, other) for one, other in pairwise(results)]
    top, one, other = max(pairs[:-2], key=lambda pair: pair[0])
    now_earned, _, last = pairs[-1]
    if top - now_earned < SURE_PAIRS * max(one.error, other.error, last.error):
        return
    best = max(one, other, key=lambda result: result.score)
    train = known_of(course, "reward_with_failures", "reward")
    then, now = mean_around(train, best.step), mean_of([reward for _, reward in train[-WINDOW:]])
    if course.order == "shuffled" and now < then - 0.02 * max(abs(then), 1.0):
        return  # both fall: that is a collapse
    yield Diagnosis(
        "held-out falls",
        f"held-out tasks earned {best.score:.3f} after {counted(best.step, 'step')} and {last.score:.3f} "
        f"after {last.step}"
        + (f", while the training tasks went from {then:.3f} to {now:.3f}" if train else "")
        + ": the policy learns its tasks by heart, or what the reward of them pays. Give more tasks, end earlier "
        "(trainer.patience) and keep the best (trainer.keep = 'best')",
        serious=True,
        steps=tuple(result.step for result in (best, last)),
    )


def held_out_flat(course: Course) -> tuple[Evaluation, Evaluation] | None:
    """Return the first and the last evaluation if the held-out reward has not moved between them. None if it has, if too few
    steps or rollouts say so, or if the training reward has surely risen, which is the finding of `held_out_stays`."""
    results = course.measured
    if len(results) < 2 or results[-1].step - results[0].step < FLAT_AFTER:
        return None
    first, last = results[0], results[-1]
    scale = max(abs(first.score), first.deviation)
    # If the reward had really moved by `scale`, its measured move would be below `SMALL` of that in one case of forty.
    told = 2 * math.hypot(first.error, last.error) <= (1 - SMALL) * scale
    if not told or min(first.rollouts, last.rollouts) < LEAST_ROLLOUTS:
        return None
    if any(
        abs(result.score - first.score) > SURE_TWO * math.hypot(result.error, first.error) for result in results[1:]
    ):
        return None
    now = mean_of([result.score for result in results[1:][-2:]])
    if abs(now - first.score) > SMALL * scale:
        return None
    change = change_of(values_of(course, "reward_with_failures", "reward"))
    risen = change is not None and change[1] > change[0] and change[2] >= SURE_TWO and course.order == "shuffled"
    return None if risen else (first, last)


def held_out_stays(course: Course) -> Iterator[Diagnosis]:
    """Find a held-out reward that stays where it was while the reward of the training tasks rises."""
    results = course.measured
    train = values_of(course, "reward_with_failures", "reward")
    if len(results) < 3 or len(train) < LEAST or course.order != "shuffled":
        return
    then, now = mean_of(train[:2]), mean_of(train[-WINDOW:])
    first, last = results[0].score, mean_of([result.score for result in results[-2:]])
    gained, error = now - then, max(result.error for result in (results[0], *results[-2:]))
    if gained <= RISEN * max(abs(now), abs(then)) or last - first + SURE_TWO * error >= FOLLOWED * gained:
        return
    if now - last > gained / 2:  # else the held-out tasks were solved from the beginning
        yield Diagnosis(
            "held-out stays",
            f"the training tasks went from {then:.3f} to {now:.3f}, and held-out tasks from {first:.3f} to {last:.3f}: what is "
            "learned does not carry over to them. Are they of another kind? Give training tasks of their kind, or more of them",
            serious=True,
            steps=(results[0].step, results[-1].step),
        )


SURE: Final = 4.0
"""Standard errors that a difference between two windows must exceed to count. It is high because rules run after every step."""
SURE_ONCE: Final = 2.5
"""The same bound for the spread of the means of several windows."""
LARGE: Final = 0.3
"""A reward has collapsed if it lost more than this part of its best."""
MANY_EQUAL: Final = 0.75
"""From this share of groups with equal rewards on, most of what is sampled is wasted."""
MANY_FAILED: Final = 0.2
"""From this share of failed rollouts on, the failures are no accident."""
MANY_CLIPPED: Final = 0.3
"""Above this share of clipped tokens, updates are too large for the algorithm."""
MANY_MASKED: Final = 0.1
"""Above this share of the trained weight, masked tokens are more than a few implausible ones."""
MANY_CUT_OFF: Final = 0.2
"""Above this share of the trained calls, answers that were cut off are more than a few long ones."""
MANY_STEPS: Final = 3
"""If this many of the last `WINDOW` steps exceed the bound between trainer and sampler, it is no accident."""
LONGER: Final = 1.5
"""Answers have grown if they are this many times as long as at first."""
GREEDIER: Final = 0.2
"""The entropy has collapsed if it is below this part of the first one."""
WILDER: Final = 3.0
"""The entropy has exploded if it is above this many times the first one."""
CURE_OF_MASKED: Final = (
    "the probabilities of trainer and sampler differ by more than the algorithm's correction allows, so these tokens teach "
    "nothing. Lower trainer.max_staleness or engine.lr where weights are old, give both the same dtype (engine.dtype, "
    "policy_server.dtype) where they are not, or widen the bounds (--algorithm NAME:correction.low=0.2,correction.high=10)"
)
CURE_OF_CUT_OFF: Final = (
    "each reached the agent's own max_tokens, or prompt and answer together policy_server.max_model_len. Raise whichever is in "
    "the way, unless answers are to be held short"
)
SLOWER: Final = "Lower engine.lr, or raise the algorithm's kl_coefficient"


def drifted(course: Course) -> Iterator[Diagnosis]:
    """Find trained tokens that are not those that were sampled."""
    steps = [step for step, metrics in enumerate(course.steps, 1) if metrics.get("drift_tokens")]
    if steps:
        tokens = sum(course.steps[step - 1]["drift_tokens"] for step in steps)
        yield Diagnosis(
            "drift",
            f"{tokens:.0f} trained tokens are not the ones that the policy server sampled: the store or the engine changed "
            "them. `lightning audit` says which",
            serious=True,
            steps=tuple(steps),
        )


def sampler_differs(course: Course) -> Iterator[Diagnosis]:
    """Find differences between the probabilities of sampler and trainer for the same tokens that exceed the bound of their
    dtypes, or that grow."""
    fresh = [
        (step, metrics)
        for step, metrics in enumerate(course.steps, 1)
        if "mean_logprob_gap" in metrics and not metrics.get("staleness_max")
    ]
    if not fresh or not is_now(course, fresh[-1][0]):
        return
    gaps = [metrics["mean_logprob_gap"] for _, metrics in fresh]
    late = gaps[-WINDOW:]
    problems = [problem for _, metrics in fresh[-WINDOW:] if (problem := course.gap.problem_of_step(metrics))]
    grown = len(fresh) >= LEAST and min(late) > 10 * max(gaps[:WINDOW]) > 0
    grown = grown and min(late) > 0.1 * course.gap.mean
    if len(problems) >= MANY_STEPS or grown:
        by = f"{mean_of(late):.2g} nats in the mean, {gaps[0]:.2g} at first" if grown else problems[-1]
        yield Diagnosis(
            "gap",
            f"trainer and sampler give the same tokens logprobs that differ by {by}: what is trained is not what was sampled. "
            "Give both the same dtype (engine.dtype, policy_server.dtype), and compare the versions of vLLM and transformers",
            serious=True,
            steps=tuple(step for step, _ in fresh[-WINDOW:]),
        )


def not_compared(course: Course) -> Iterator[Diagnosis]:
    """Find a run in which no token of the last steps could be compared between trainer and sampler."""
    trained = [step for step, metrics in enumerate(course.steps, 1) if metrics.get("tokens")]
    late = trained[-WINDOW:]
    if (
        late
        and is_now(course, late[-1])
        and not any(course.steps[step - 1].get("tokens_compared", 1.0) for step in late)
    ):
        where = "the last step" if len(late) == 1 else f"the last {len(late)} steps"
        yield Diagnosis(
            "not compared",
            f"the sampler's and the trainer's probabilities could not be compared in {where}, because no trained token has a "
            "logprob that says how likely it was among all tokens. Training goes on without that check. A grammar (strict "
            "tools have one), a forced tool, top_p or top_k, or temperature 0 constrains every call: let some of them be "
            "sampled without",
            steps=tuple(late),
        )


def not_finite(course: Course) -> Iterator[Diagnosis]:
    """Find steps that were skipped because their loss or gradient was not finite."""
    steps = [step for step, metrics in enumerate(course.steps, 1) if metrics.get("skipped_nonfinite")]
    if steps and is_now(course, steps[-1]):
        yield Diagnosis(
            "not finite",
            f"{len(steps)} of {len(course.steps)} steps were skipped, since their loss or gradient was not finite. "
            "Lower engine.lr or engine.max_grad_norm, or compute in float32 (engine.dtype)",
            serious=True,
            steps=tuple(steps),
        )


def failing(course: Course) -> Iterator[Diagnosis]:
    """Find many rollouts that failed because of the agent's code or the infrastructure."""
    shares = [(failed_share(metrics), policy_fault_share(metrics)) for metrics in course.steps[-WINDOW:]]
    late = [failed - policy for failed, policy in shares if failed is not None and policy is not None]
    if len(late) == WINDOW and mean_of(late) >= MANY_FAILED:
        yield Diagnosis(
            "failures",
            f"{mean_of(late):.0%} of the rollouts failed, and not by the policy: nothing is learned from these, and a reward "
            "without them says too much. `lightning runs show RUN --failed` says why",
            serious=True,
            steps=last_steps(course),
        )


def policy_faults(course: Course) -> Iterator[Diagnosis]:
    """Find many rollouts that failed by the policy's own fault and do not become fewer with training."""
    shares = [share for metrics in course.steps if (share := policy_fault_share(metrics)) is not None]
    change = change_of(shares)
    if change is None or change[1] < MANY_FAILED:
        return
    early, late, errors = change
    grows, falls = late > early and errors >= SURE, late < early and errors >= SURE / 2
    if grows or (len(shares) >= FLAT_AFTER and not falls):
        yield Diagnosis(
            "policy faults",
            f"{late:.0%} of the rollouts failed by the policy's own fault ({policy_fault_causes(course)}), {early:.0%} in "
            "the first steps. The algorithm learns from them by trainer.policy_fault. Where they grow, lower engine.lr; "
            "where they stay, allow more turns or tokens, or make the task easier at first",
            serious=True,
            steps=last_steps(course),
        )


def masked(course: Course) -> Iterator[Diagnosis]:
    """Find a last step in which the correction between sampler and trainer masked much of the trained weight."""
    share = course.last.get("masked_share")
    if share is not None and share > MANY_MASKED:
        text = f"{100 * share:.0f} % of what was to be trained is masked: {CURE_OF_MASKED}"
        yield Diagnosis("masked", text, serious=True, steps=last_steps(course, 1))


def clipped(course: Course) -> Iterator[Diagnosis]:
    """Find many clipped tokens in each of the last steps."""
    late = [metrics["clip_fraction"] for metrics in course.steps[-WINDOW:] if "clip_fraction" in metrics]
    if len(late) == WINDOW and min(late) > MANY_CLIPPED:
        yield Diagnosis(
            "clipped",
            f"{float(np.mean(late)):.0%} of the trained tokens are clipped, so that they teach nothing: updates are too large "
            f"for the algorithm's bounds. {SLOWER}, or take fewer updates or epochs from a batch",
            serious=True,
            steps=last_steps(course),
        )


def cut_off(course: Course) -> Iterator[Diagnosis]:
    """Find many answers of the last step that ended at the limit of tokens."""
    share = course.last.get("truncated")
    if share is not None and share > MANY_CUT_OFF:
        text = f"{100 * share:.0f} % of the trained calls were cut off (finish_reason length): {CURE_OF_CUT_OFF}"
        yield Diagnosis("truncated", text, steps=last_steps(course, 1))


def longer(course: Course) -> Iterator[Diagnosis]:
    """Find rollouts whose trained tokens have become many more."""
    lengths = lengths_of(course)
    change = change_of(lengths)
    if change is None:
        return
    early, late, errors = change
    if late >= LONGER * early and errors >= SURE:
        yield Diagnosis(
            "length",
            f"what a rollout says has grown from {early:.0f} to {late:.0f} trained tokens. Does the reward follow the length "
            "of the answers? `lightning reward try GRADER RUN` says; a reward for length, or none for being brief, is "
            "learned as readily as the task",
            serious=True,
            steps=last_steps(course),
        )


def second_measure(course: Course) -> Iterator[Diagnosis]:
    """Find a reward that rises while a named part of it, or another named measure, falls."""
    rise = change_of(values_of(course, "reward"))
    if rise is None or rise[1] <= rise[0] or rise[2] < SURE:
        return
    names = {name for metrics in course.steps for name in metrics if name.startswith(NAMED)}
    for name in sorted(names):
        change = change_of(values_of(course, name))
        if change is None or change[2] < SURE or change[1] >= change[0]:
            continue
        yield Diagnosis(
            f"second measure/{name}",
            f"the reward rose from {rise[0]:.3f} to {rise[1]:.3f}, while {name.removeprefix(NAMED)!r} fell from "
            f"{change[0]:.3f} to {change[1]:.3f}: the two disagree, and the policy earns its reward without the other. Is "
            "the reward what you mean? `lightning reward try GRADER RUN` shows what another would have paid",
            serious=True,
            steps=last_steps(course),
        )


def collapsed(course: Course) -> Iterator[Diagnosis]:
    """Find a reward that is far below its best."""
    known = known_of(course, "reward_with_failures", "reward")
    rewards = [reward for _, reward in known]
    if len(rewards) < LEAST or course.order != "shuffled":
        return
    means = np.convolve(rewards, np.full(WINDOW, 1 / WINDOW), "valid")
    place = int(np.argmax(means[:-WINDOW])) if len(means) > WINDOW else 0
    best, now = float(means[place]), float(means[-1])
    first, end = known[place][0], known[place + WINDOW - 1][0]
    apart = [metrics["reward_std"] for metrics in course.steps[first - 1 : end] if "reward_std" in metrics]
    scale = max([abs(best), *([mean_of(apart)] if apart else [])])
    error = noise_of(rewards) * math.sqrt(2 / WINDOW)
    if best - now > LARGE * scale and best - now > SURE * error:
        yield Diagnosis(
            "collapsed",
            f"the reward collapsed: it was {best:.3f} after {counted(end, 'step')}, and is {now:.3f} now"
            + _beside(course, first - 1)
            + f". {SLOWER}; a new run can begin before it: --from RUN@{end}",
            serious=True,
            steps=(first, len(course.steps)),
        )


def entropy_moves(course: Course) -> Iterator[Diagnosis]:
    """Find an entropy of the policy that has collapsed or exploded."""
    entropies = values_of(course, "entropy")
    change = change_of(entropies)
    if change is None or change[2] < SURE:
        return
    early, late, _ = change
    if late < GREEDIER * early and not is_solved(course):
        yield Diagnosis(
            "entropy",
            f"the entropy of the policy collapsed from {early:.3g} to {late:.3g} nats: it says the same again and again, so "
            "that groups differ ever less and there is little left to learn from. Raise the algorithm's entropy_coefficient "
            "or the sampling temperature, or lower engine.lr",
            serious=True,
            steps=last_steps(course),
        )
    elif late > WILDER * early and late > 0.5:
        yield Diagnosis(
            "entropy",
            f"the entropy of the policy rose from {early:.3g} to {late:.3g} nats: it says ever more at random. {SLOWER}, or "
            "lower entropy_coefficient",
            serious=True,
            steps=last_steps(course),
        )


def equal_groups(course: Course) -> Iterator[Diagnosis]:
    """Find that in most groups all rewards are equal; the finding is only minor if the tasks are solved."""
    shares = [
        1.0 - metrics["groups_used"] / metrics["groups"]
        for metrics in course.steps[-WINDOW:]
        if metrics.get("groups") and "groups_used" in metrics
    ]
    if len(shares) < WINDOW or mean_of(shares) < MANY_EQUAL:
        return
    solved = is_solved(course)
    since = None if solved else _all_at_once(course)
    yield Diagnosis(
        "equal groups",
        f"{mean_of(shares):.0%} of the groups teach nothing, since all of their rewards are equal (zero variance)"
        + (": the tasks are solved. Give harder ones" if solved else "")
        + (
            f", all at once after {counted(since, 'step')}: the last of them made the policy say always the same. "
            "Lower engine.lr"
            if since
            else ""
        )
        + ". Choose tasks that the policy solves now and then"
        + ("" if course.order == "learnable" else " (--set trainer.order=learnable)")
        + ", raise group_size, or give partial credit",
        serious=not solved,
        minor=solved,
        steps=last_steps(course),
    )


def _all_at_once(course: Course) -> int | None:
    """Return the number of steps after which no group was trained on any more; None unless at least half of the groups of the
    last step before were."""
    used = [(step, m["groups_used"] / m["groups"]) for step, m in enumerate(course.steps, 1) if m.get("groups")]
    last = max(((step, share) for step, share in used if share > 0), default=None)
    return last[0] if last is not None and last[1] >= 0.5 and last[0] < used[-1][0] else None


def untrained_policies(course: Course) -> Iterator[Diagnosis]:
    """Find policies without a trained token in their last `WINDOW` steps, while steps trained others."""
    for name, turns in course.turns.items():
        last = tuple(turns)
        if len(last) < WINDOW or any(f"policy/{name}/tokens" in course.steps[step - 1] for step in last):
            continue
        if not all(is_idle(metrics) for metrics in course.steps[last[0] - 1 :]):
            yield Diagnosis(
                f"untrained policy/{name}",
                f"the policy {name!r} got no gradient in the last {counted(WINDOW, 'step')} that were to train it: none of its "
                f"calls was trained on. Does the agent call its agents (policies.{name}.agents, policies.{name}.models), and "
                "does train_agents leave them in? The console's page of a rollout lists the policy of each call. If the policy "
                f"is not to learn, say policies.{name}.train = false",
                serious=True,
                steps=last,
            )


CURE_OF_FLAT: Final = (
    "Is engine.lr too small (--lr), or do few groups teach something? `lightning profile RUN` says what the tokens went into, "
    "`lightning reward try` what the reward follows"
)


def flat(course: Course) -> Iterator[Diagnosis]:
    """Find a reward that has not moved: that of held-out tasks, or else that of the training tasks."""
    rewards = values_of(course, "reward_with_failures", "reward")
    if is_solved(course):
        return
    if (pair := held_out_flat(course)) is not None:
        first, last = pair
        yield Diagnosis(
            "flat",
            f"the held-out reward has not moved: {first.score:.3f} after {counted(first.step, 'step')} and "
            f"{last.score:.3f} after "
            f"{last.step}, where {last.rollouts} rollouts tell it to ±{2 * last.error:.2g}. {CURE_OF_FLAT}",
            serious=True,
            steps=(first.step, last.step),
        )
        return
    if len(rewards) < FLAT_AFTER or course.order != "shuffled":
        return
    quarter, noise = max(WINDOW, len(rewards) // 4), noise_of(rewards)
    means = [mean_of(rewards[first : first + quarter]) for first in range(0, len(rewards) - quarter + 1, quarter)]
    change = abs(float(np.polyfit(np.arange(len(rewards)), rewards, 1)[0])) * len(rewards)
    most = change + 2 * noise * math.sqrt(12 / len(rewards))  # the largest rise that this noise may hide
    scale = max(abs(mean_of(rewards)), mean_of(values_of(course, "reward_std")), 1e-9)
    if most < SMALL * scale and max(means) - min(means) <= SURE_ONCE * noise * math.sqrt(2 / quarter) + 0.01 * scale:
        yield Diagnosis(
            "flat",
            f"the reward is flat: {means[0]:.3f} in the first {quarter} steps, {means[-1]:.3f} in the last. {CURE_OF_FLAT}",
            serious=True,
            steps=(1, len(course.steps)),
        )


def _beside(course: Course, place: int) -> str:
    """Name other metrics that changed much between the best steps and now, as possible causes; empty if none did."""
    said = []
    for name, what in (
        ("entropy", "entropy"),
        ("clip_fraction", "clipped tokens"),
        ("grad_norm", "gradient's norm"),
        ("truncated", "answers cut off"),
    ):
        values = values_of(course, name)
        if len(values) == len(course.steps):
            then, now = mean_of(values[place : place + WINDOW]), mean_of(values[-WINDOW:])
            if abs(now - then) > 0.5 * max(abs(then), abs(now), 1e-6) and max(abs(then), abs(now)) > 0.01:
                said.append(f"{what} {then:.2g} to {now:.2g}")
    return f" ({', '.join(said)})" if said else ""


COURSE_RULES: Final[tuple[Callable[[Course], Iterator[Diagnosis]], ...]] = (
    drifted,
    sampler_differs,
    not_compared,
    not_finite,
    failing,
    policy_faults,
    masked,
    clipped,
    garbled,
    longer,
    cut_off,
    second_measure,
    held_out_falls,
    held_out_stays,
    collapsed,
    entropy_moves,
    untrained_policies,
    equal_groups,
    flat,
)
"""All rules over a course; those for causes come before those for their consequences."""
