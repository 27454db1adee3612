"""The numbers of a step, besides its times: what was sampled and trained, and what its requests needed of the policy server.

The invariant: a server that does not count, or was started again meanwhile, gives no wrong number: the metrics are then absent,
or of what came since.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from lightning.algorithms.protocol import Batch
from lightning.batch.flaws import is_trained
from lightning.batch.trajectory import Group
from lightning.engines.protocol import StepResult
from lightning.gateway.http import CURE_OF_LENGTH
from lightning.policy_server.protocol import PolicyServer, Usage
from lightning.trainer.summary import NAMED, mean_parts
from lightning.types import CallStatus, Rollout, Status, Transition

logger = logging.getLogger(__name__)


LONG_PROMPT = 256
"""Mean tokens of prompts of which something would be found again, also in vLLM's largest usual blocks of 128."""
CURE = (
    "give vLLM more room (policy_server.kv_cache_bytes; on CUDA policy_server.gpu_memory_utilization), or run fewer agents "
    "at once (runner.concurrency)"
)


class UsageMeter:
    """Reads the counters once a step; calls of evaluations between two steps are counted with the later one, and what a server
    that ran before was asked by others with the first."""

    def __init__(self, policy: PolicyServer) -> None:
        self._policy = policy
        self._before = Usage()
        self._said: set[str] = set()

    async def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """`prefix_hit_share` (of the prompts' tokens, those found in the cache) and `preemptions` since the last time."""
        now = await self._policy.usage()
        if now is None:
            return {}
        again = any(count < before for count, before in zip(now, self._before, strict=True))
        since = now if again else Usage(*(count - before for count, before in zip(now, self._before, strict=True)))
        self._before = now
        if since.preemptions and self._first("preempted"):
            logger.warning(
                "vLLM put %d requests back for want of KV cache, and computes them again: %s", since.preemptions, CURE
            )
        if self._nothing_found(since, groups) and self._first("prefixes"):
            logger.warning(
                "vLLM found no beginning of a prompt in its prefix cache, in %d requests of %.0f tokens on average, though "
                "rollouts of one task begin alike: %s; or take --no-enable-prefix-caching out of its arguments",
                since.requests,
                since.prompt_tokens / since.requests,
                CURE,
            )
        share = since.cached_tokens / since.prompt_tokens if since.prompt_tokens else 0.0
        return {"prefix_hit_share": share, "preemptions": float(since.preemptions)}

    def _nothing_found(self, since: Usage, groups: Sequence[Group]) -> bool:
        alike = any(len(group.trajectories) > 1 for group in groups)
        return alike and not since.cached_tokens and since.prompt_tokens >= LONG_PROMPT * since.requests > 0

    def _first(self, what: str) -> bool:
        first = what not in self._said
        self._said.add(what)
        return first


def step_metrics(
    rollouts: Sequence[Rollout], groups: Sequence[Group], batch: Batch, result: StepResult
) -> dict[str, float]:
    """What was sampled, what was left out and why, and what the engine says."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    calls = [len(member.transitions) for group in groups for member in group.trajectories]
    trained = trained_calls(groups)
    skipped = sum(batch.skipped.values())
    return {
        **result.metrics,
        **{f"skipped/{reason}": float(count) for reason, count in batch.skipped.items()},
        **{f"dropped/{reason}": float(count) for reason, count in batch.dropped.items()},
        **{f"{NAMED}{name}": value for name, value in mean_parts(rollouts).items()},
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "rollouts": float(len(rollouts)),
        "failed": float(sum(rollout.status is Status.FAILED for rollout in rollouts)),
        "groups": float(len(groups)),
        "groups_used": float(len(groups) - skipped),
        "rows": float(len(batch.samples)),
        "calls_per_rollout": float(np.mean(calls)) if calls else 0.0,
        **({"too_long": float(refused)} if (refused := count_too_long(rollouts, groups)) else {}),
        **({"dropped/media": float(media)} if (media := len(media_calls(groups))) else {}),
        "truncated": count_truncated(trained) / len(trained) if trained else 0.0,
    }


def trained_calls(groups: Sequence[Group]) -> list[Transition]:
    """The calls of the groups that belong to the component of interest and have tokens to train on."""
    return [
        call
        for group in groups
        for member in group.trajectories
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if is_trained(call, trainable)
    ]


def media_calls(groups: Sequence[Group]) -> list[Transition]:
    """The calls of the groups that would be trained, had their prompts no images, audio, video or files."""
    return [
        call
        for group in groups
        for member in group.trajectories
        for call, trainable in zip(member.transitions, member.trainable, strict=True)
        if trainable and call.status is CallStatus.MEDIA
    ]


def count_too_long(rollouts: Sequence[Rollout], groups: Sequence[Group]) -> int:
    """How many calls were refused because prompt and answer did not fit, and rollouts that failed by such a refusal."""
    failed = sum(rollout.status is Status.FAILED and CURE_OF_LENGTH in rollout.error for rollout in rollouts)
    return failed + sum(member.too_long for group in groups for member in group.trajectories)


def count_truncated(calls: Iterable[Transition]) -> int:
    """How many calls ended because their tokens were used up, and not because the model was done."""
    return sum(call.finish_reason == "length" for call in calls)


def staleness(step: int, batch: Batch) -> dict[str, float]:
    """How many optimizer steps older than `step` the policy was that sampled the trained tokens: mean and maximum over
    those whose version is known, 0 when there are none."""
    versions = [sample.versions[(sample.weights != 0) & (sample.versions >= 0)] for sample in batch.samples]
    known = np.concatenate(versions) if versions else np.empty(0, dtype=np.int32)
    if not len(known):
        return {"staleness_mean": 0.0, "staleness_max": 0.0}
    return {"staleness_mean": float(step - known.mean()), "staleness_max": float(step - known.min())}


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Response tokens of the groups' calls."""
    return sum(
        len(call.response_ids) for group in groups for member in group.trajectories for call in member.transitions
    )
