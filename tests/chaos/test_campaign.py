"""A short campaign: what `make chaos` does at length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.store.memory import MemoryStore
from lightning.trainer.runs import describe_algorithm
from lightning.types import Caller, Outcome, Rollout, Run, Task, Transition, logprobs, token_ids

from tests.chaos.campaign import recovery, run_campaign
from tests.chaos.journal import Line
from tests.chaos.verdict import Verdict, judge

log = logging.getLogger(__name__)


async def judged(*lines: Line, reward: float = 1.0, calls: Sequence[Transition] = ()) -> Verdict:
    """The verdict over one rollout that was kept with this reward and these calls."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run", {"algorithm": describe_algorithm(LightningRL())}))
    await store.create_rollouts([Rollout("a", "run", Task("?"), "g")])
    await store.lease("run", "worker")
    await store.append(calls)
    await store.complete("a", 1, Outcome(reward=reward))
    try:
        return await judge(store, "run", lines, 1)
    finally:
        await store.close()


async def test_a_verdict_finds_what_was_lost_and_what_was_invented() -> None:
    returned = Line(0.0, "r", "u", "a", 1, reward=1.0)
    assert (await judged(returned)).ok
    lost = await judged(returned, Line(0.0, "r", "u", "a", 1, reply="chatcmpl-1"))
    assert (lost.lost_replies, lost.ok) == (1, False)
    call = Transition("a", 1, 0, "chatcmpl-1", token_ids([1]), token_ids([2]), logprobs([0.0]), Caller("agent"))
    reply = Line(0.0, "r", "u", "a", 1, reply="chatcmpl-1")
    bare = await judged(returned, reply, calls=[call])
    assert (bare.lost_replies, bare.lost_texts, bare.ok) == (0, 1, False)
    assert (await judged(returned, reply, calls=[replace(call, extras={"texts": b"x"})])).lost_texts == 0
    assert (await judged()).phantom_rewards == 1, "nobody returned it"
    assert (await judged(returned, reward=0.5)).phantom_rewards == 1
    assert (await judged(Line(0.0, "r", "u", "a", 2, reward=1.0))).phantom_rewards == 1, "another attempt did"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_invented_or_done_twice_whatever_is_killed(tmp_path: Path, interruptible: None) -> None:
    verdict, kills = run_campaign("postgres", 6, 120, 3, tmp_path, log.info)
    assert verdict.ok, verdict
    assert verdict.steps > 0
    assert verdict.replies > 0
    assert len({kill.target for kill in kills}) > 1, recovery(kills)
