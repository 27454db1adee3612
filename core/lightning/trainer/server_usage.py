"""What a step's requests needed of the policy server: metrics, and a warning where its KV cache is too small.

The invariant: a server that does not count, or was started again meanwhile, gives no wrong number: the metrics are then absent,
or of what came since.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning.batch.trajectory import Group
from lightning.policy_server.protocol import PolicyServer, Usage

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
