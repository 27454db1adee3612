"""A step says how many of its rollouts cannot be run again."""

from __future__ import annotations

from lightning.algorithms.protocol import Batch
from lightning.batch import Group, Trajectory
from lightning.config import Config
from lightning.trainer.stages import CONTRACT, StepLine, StepTaken
from lightning.types import CallStatus, Rollout, Task, Transition, logprobs, token_ids
from lightning_record.exchanges import TEXTS, Flag, pack
from lightning_record.replayable import ReplayableStage


def member(packed: bytes | None) -> Trajectory:
    extras = {} if packed is None else {TEXTS: packed}
    ids, probabilities = token_ids([1]), logprobs([-1.0])
    call = Transition("r", 1, 0, "c", ids, ids, probabilities, status=CallStatus.OK, extras=extras)
    return Trajectory(Rollout("r", "run", Task("q"), "g"), (call,), (True,))


async def test_a_step_counts_what_cannot_be_replayed() -> None:
    whole, redacted = pack("/c", 200, b"{}", b"{}"), pack("/c", 200, b"{}", b"{}", flags=Flag.REDACTED)
    groups = [Group("g", (member(whole), member(redacted))), Group("h", (member(None),))]
    added = await ReplayableStage().taken(StepTaken(0, [], groups, Batch((), ()), {}))
    assert added.metrics == {"not_replayable": 2.0}


async def test_every_run_has_the_count() -> None:
    config = Config()
    line = StepLine(CONTRACT.made(config))
    added = await line.taken(StepTaken(0, [], [], Batch((), ()), {}))
    assert added.metrics["record/not_replayable"] == 0.0
