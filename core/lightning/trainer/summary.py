"""What a run achieved, read from its store alone, so that it can be told of any run at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning.store.protocol import Store
from lightning.trainer.collect import all_rollouts
from lightning.trainer.plan import TRAIN, VAL, newest_generation, of_generation
from lightning.types import Json, Rollout, Status

PHASES = ("start", "rollout", "train", "update", "checkpoint", "eval")
"""Where wall time goes; metrics are named `seconds/<phase>`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out result with the policy after `step` optimizer steps, or with a version of a prompt after `step` rounds.

    `reward` is the mean over scored rollouts (the success rate where rewards are 0 or 1), None when none was scored; `failed`
    rollouts have no reward and are not in it.
    """

    step: int
    reward: float | None
    rollouts: int
    failed: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. `rewards[i]` is the mean training reward of step i; times are wall seconds by phase. `evaluations` are
    in the order in which they were begun; `before` is the reward of the first and `after` that of the last.

    `max_logprob_gap` is over the steps without stale tokens, whose logprobs differ by what was learned since; None when
    there is no other step.
    """

    run: str
    seed: int
    steps: int
    rollouts: int
    failed: int
    trained_tokens: int
    drift_tokens: int
    max_logprob_gap: float | None
    max_probe_gap: float
    before: float | None
    after: float | None
    evaluations: tuple[Evaluation, ...]
    rewards: tuple[float, ...]
    time: dict[str, float]

    def to_json(self) -> dict[str, Json]:
        """The report's content, ready for `json.dumps`."""
        return asdict(self)


def evaluate_rollouts(step: int, rollouts: Sequence[Rollout]) -> Evaluation:
    """Sum up one evaluation."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    failed = sum(rollout.status is Status.FAILED for rollout in rollouts)
    return Evaluation(step, sum(rewards) / len(rewards) if rewards else None, len(rollouts), failed)


async def summarize(store: Store, run: str) -> Summary:
    """Read a run's summary. Raises `StoreError` when the store does."""
    steps = await store.list_steps(run)
    points = await store.metrics(run)
    rollouts = await all_rollouts(store, run)
    evaluations = _evaluations(rollouts)
    time = dict.fromkeys(PHASES, 0.0)
    for point in points:
        for phase in PHASES:
            time[phase] += point.values.get(f"seconds/{phase}", 0.0)
    stored = await store.get_run(run)
    seed = stored.config.get("seed", 0) if stored else 0
    return Summary(
        run=run,
        seed=seed if isinstance(seed, int) else 0,
        steps=len(steps),
        rollouts=sum(rollout.split == TRAIN for rollout in rollouts),
        failed=sum(rollout.split == TRAIN and rollout.status is Status.FAILED for rollout in rollouts),
        trained_tokens=int(sum(record.metrics.get("tokens", 0.0) for record in steps)),
        drift_tokens=int(sum(record.metrics.get("drift_tokens", 0.0) for record in steps)),
        max_logprob_gap=max(
            (
                record.metrics.get("max_logprob_gap", 0.0)
                for record in steps
                if not record.metrics.get("staleness_max", 0.0)
            ),
            default=None,
        ),
        max_probe_gap=max((point.values.get("probe_gap", 0.0) for point in points), default=0.0),
        before=evaluations[0].reward if evaluations else None,
        after=evaluations[-1].reward if len(evaluations) > 1 else None,
        evaluations=evaluations,
        rewards=tuple(record.metrics.get("reward", 0.0) for record in steps),
        time={phase: round(seconds, 3) for phase, seconds in time.items()},
    )


def _evaluations(rollouts: Sequence[Rollout]) -> tuple[Evaluation, ...]:
    """Those that have ended. `rollouts` are in the order of their creation.

    A search that had ended and is given more measures another version of its prompt, maybe in the same round.
    """
    evaluated: dict[tuple[int, tuple[tuple[str, int], ...]], list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.split == VAL:
            evaluated.setdefault((rollout.step, tuple(sorted(rollout.resources.items()))), []).append(rollout)
    tries = [(step, of_generation(made, newest_generation(made))) for (step, _), made in evaluated.items()]
    return tuple(
        evaluate_rollouts(step, members) for step, members in tries if all(member.status.ended for member in members)
    )
