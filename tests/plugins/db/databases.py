"""Databases to look after: a run of two steps with siblings, a failure, an evaluation, and one rollout that runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.store.protocol import Store
from lightning.store.sqlite import SqliteStore
from lightning.types import (
    Caller,
    Conversation,
    Fault,
    Outcome,
    Rollout,
    Run,
    Scope,
    Span,
    StepRecord,
    StepReward,
    StepState,
    Task,
    ToolEvent,
    Transition,
    VersionRun,
    logprobs,
    token_ids,
)
from lightning_otel.traces.store import append_spans
from lightning_record import exchanges
from lightning_record.conversation import CONVERSATION, pack
from lightning_record.exchanges import TEXTS
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource, set_alias
from lightning_server.tokens import Token, put_token

SAID = Conversation(({"role": "user", "content": "q"},), "call", 1)
CONFIG = {"model": "tiny", "config": {"trainer": {"steps": 2, "max_staleness": 0}}}


def call_of(rollout: str, seq: int, prompt: list[int], *, attempt: int = 1, rng: random.Random) -> Transition:
    response = [rng.randrange(150_000) for _ in range(4)]
    return Transition(
        rollout=rollout,
        attempt=attempt,
        seq=seq,
        id=f"call-{rollout}-{seq}",
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(response),
        logprobs=logprobs([-rng.random() for _ in response]),
        caller=Caller("writer", ("root", "writer"), "s", "p", "raw"),
        versions=(VersionRun(0, 3), VersionRun(2, 4)),
        finish_reason="stop",
        temperature=0.7,
        started_at=1.25,
        ended_at=2.5,
        tool_calls=("t-1",),
        extras={
            TEXTS: exchanges.pack("/chat/completions", 200, exchanges.canonical({"n": seq}), b'{"id": "x"}'),
            "masks": bytes((seq, 0, 255)),
            **({CONVERSATION: pack(SAID)} if seq == 0 else {}),
        },
    )


async def fill(store: Store, run: str = "run") -> None:
    """Groups of two: step 1 has one that was trained and one that was not, step 2 likewise; a group of `val`, one failed,
    and with `-open` one rollout that is running."""
    rng = random.Random(run)
    await store.put_run(Run(run, run, CONFIG, 1000.0, "lab"))
    groups = [("1/0", 1, "train"), ("1/1", 1, "train"), ("2/0", 2, "train"), ("2/1", 2, "train"), ("val/0", 0, "val")]
    made = [
        Rollout(f"{run}/{name}/{index}", run, Task({"q": name}, ["a"], {"m": 1}), f"{run}/{name}", step, split, index)
        for name, step, split in groups
        for index in range(2)
    ]
    await store.create_rollouts(made)
    for lease in await store.lease(run, "w", limit=100, ttl=3600):
        rollout = lease.rollout
        start = [random.Random(rollout.group).randrange(150_000) for _ in range(60)]
        first = call_of(rollout.id, 0, start, rng=rng)
        await store.append([first, call_of(rollout.id, 1, [*start, *first.response_ids, 7], rng=rng)])
        await append_spans(store, [Span(rollout.id, 1, "0" * 32, "1" * 16, name="step", attributes={"k": [1]})])
        failed = rollout.id.endswith("/1/1/1")
        events = (ToolEvent("search", "ok", "t-1", {"x": 1}, "out", caller=Caller("writer"), at=2.0),)
        outcome = Outcome(fault=Fault.AGENT, error="no") if failed else Outcome(reward=0.5, rewards={"f1": 0.5})
        rewards = (StepReward(0.25, "fmt", first.id, 2.0),)
        outcome = Outcome(
            outcome.reward, outcome.rewards, outcome.fault, outcome.error, 3.0, events, rewards, {first.id: Caller("x")}
        )
        outcome = replace(outcome, step_states=(StepState({"k": 1}, "state", first.id, 2.0),), extras={"taint": b"\0t"})
        await store.complete(rollout.id, 1, outcome)
    for step in (1, 2):
        trained = tuple((f"{run}/{step}/0/{index}", 1) for index in range(2))
        record = StepRecord(
            run, step, step, trained, ("d", "e"), f"digest-{step}", f"step-{step:08d}", {"loss": 0.5}, 1001.0
        )
        record = replace(record, extras={"advice": b"\0a"})
        await store.commit_step(record)
        await store.log_metrics(run, step, {"reward": 0.5, "odd": float("nan")})
    await store.put_state(run, "note", "00ff")
    await store.put_state(run, "epochs", [{"first": 2, "at": 1001.0, "config": {"seed": 1}}])


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    """A closed SQLite file with the run `run`, a resource in two versions, and a token."""
    store = SqliteStore(tmp_path / "store.db")
    await store.open()
    await fill(store)
    await put_resource(store, Resource("writer", "Write."))
    await put_resource(store, Resource("writer", "Rhyme."))
    await set_alias(store, "writer", "production", 1)
    await put_token(store, Token("t1", Scope.RUNNER, "ab" * 32, "lab", "ci", 1000.0, 2000.0))
    await put_token(store, Token("t2", Scope.ADMIN, "cd" * 32, "*", "me"))
    await store.close()
    return tmp_path / "store.db"


@pytest.fixture
def filled() -> Callable[..., object]:
    return fill
