"""What trackers of other systems are told here: a run with a step, an alarm, and a rollout whose calls have their texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.config import Config, with_settings
from lightning.store.memory import MemoryStore
from lightning.tracking import trackers
from lightning.tracking.trackers import Trackers
from lightning.types import Caller, Json, Outcome, Rollout, Run, Task, ToolEvent, Transition, logprobs, token_ids
from lightning_record.exchanges import TEXTS, pack

SECRET = "sk-" + "a1B2" * 10
ALARM: dict[str, Json] = {"run": "run", "step": 3, "cause": "collapsed", "text": "the reward collapsed", "steps": [3]}
METRICS = {"reward": 0.5, "reward/f1": 0.75, "loss": float("nan")}

Tell = Callable[..., None]


def exchanged() -> bytes:
    question = {"role": "user", "content": "2 + 2?"}
    answer = {"choices": [{"message": {"role": "assistant", "content": "It is 4."}}]}
    return pack("/chat/completions", 200, json.dumps({"messages": [question]}).encode(), json.dumps(answer).encode())


@pytest.fixture
async def ended() -> tuple[MemoryStore, Rollout]:
    """A rollout with a call whose texts are recorded and a tool, and its store."""
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("2 + 2?", id="task-1"), "g", step=3)])
    await store.lease("run", "w")
    tokens = {"prompt_ids": token_ids([1, 2, 3]), "response_ids": token_ids([4, 5]), "logprobs": logprobs([-1, -1])}
    times = {"started_at": 1_700_000_000.0, "ended_at": 1_700_000_000.5, "finish_reason": "stop"}
    call = Transition("r", 1, 0, "chat-0", **tokens, caller=Caller("writer"), **times, extras={TEXTS: exchanged()})
    silent = replace(call, seq=1, id="chat-1", extras={})
    await store.append([call, silent])
    tool = ToolEvent("add", "ok", "call-1", {"a": 2}, "4", caller=Caller("writer"), at=1_700_000_001.0)
    return store, await store.complete("r", 1, Outcome(reward=0.5, rewards={"f1": 0.75}, tool_events=(tool,)))


@pytest.fixture
def tell(ended: tuple[MemoryStore, Rollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Begin a run with a tracker, tell it all there is of a step, and end it."""
    store, rollout = ended
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 120.0)

    def told(name: str, *, step: int = 3, steps: int = 8) -> None:
        config = with_settings(Config(), {"trainer.steps": steps, "runner.k8s.env": {"PLACE": SECRET}})
        about: dict[str, Json] = {"model": "tiny", "algorithm": {"name": "grpo"}}
        with Trackers([name], config, run="run", folder=tmp_path / "run", store=store, about=about) as held:
            held.finished(rollout)
            held.alert(ALARM)
            held.log(step, METRICS)

    return told
