"""`lightning rollout` says of each call of a rollout what became of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import lightning as lightning_
import pytest
from lightning.cli.output import with_store
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.testing.fake_vllm import Reply
from lightning.trainer.context import Epoch
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import (
    LLM,
    Caller,
    CallStatus,
    Fault,
    Rollout,
    Status,
    StepRecord,
    Task,
    Transition,
    logprobs,
    token_ids,
)
from lightning_debug.rollout_calls import read_calls, why_untrained

from tests.core.cli.conftest import Ran, lightning
from tests.core.trainer.conftest import ALGORITHM, TASKS, open_bench

__all__ = ["lightning"]
SUMMARIZE = "Your task is to create a detailed summary of the conversation so far."
LONG = "the numbers one two three four five six seven eight nine ten were all added and only zero is left"


@lightning_.tool
def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


async def compacting(task: Task, llm: LLM) -> float:
    """Name the task, use a tool, throw the first summary away, and go on with the second by a call that fails once."""
    async with httpx.AsyncClient(base_url=llm.base_url, headers={"authorization": f"Bearer {llm.api_key}"}) as client:

        async def ask(*texts: str) -> str:
            messages = [{"role": "user", "content": f"{text} {task.id}"} for text in texts]
            while True:
                reply = await client.post("/chat/completions", json={"model": llm.model, "messages": messages})
                if reply.status_code < 500:
                    return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])

        with lightning_.untrained("title"):
            await ask("name it")
        await ask("begin")
        add(1, 2)
        lightning_.reward(0.5, name="sum")
        while "zero" not in (summary := await ask("begin", SUMMARIZE)):
            pass
        return float(len(await ask(f"So far: {summary}", "end")))


def scripted() -> Callable[[Any], Reply]:
    asked, lengths = Counter[str](), itertools.count(1)

    def script(body: Any) -> Reply:
        said = body["messages"][-1]["content"]
        asked[said] += 1
        first = asked[said] % 2
        if said.startswith(SUMMARIZE):
            return Reply(LONG.replace("zero", "nought") if first else LONG)
        if said.startswith("end"):
            return Reply(status=500) if first else Reply("x" * next(lengths))
        return Reply("ok")

    return script


ASK = (
    'curl -s "$OPENAI_BASE_URL/chat/completions" -H "content-type: application/json" -H "authorization: Bearer '
    '$OPENAI_API_KEY" -d \'{{"model": "policy", "messages": [{{"role": "user", "content": "%s"}}]}}\''
)
CURL = f"""
{ASK % "name"} -H "x-lightning-untrained: title" > /dev/null
id=$({ASK % "sum"} | sed 's/.*"id": *"\\([^"]*\\)".*/\\1/')
{ASK % "sum"} -H "x-lightning-rejected: $id summary, rejected" > /dev/null
"""


async def trained(folder: Path, agent: Any, **more: Any) -> None:
    one_at_a_time: dict[str, Any] = {"trainer__steps": 1, "trainer__eval_every": 9, "runner__concurrency": 1}
    async with open_bench(folder, agent, train=TASKS[:1], trainer__tasks_per_step=1, **one_at_a_time, **more) as made:
        await made.loop.run({})


def shown(lightning: Callable[..., Ran], folder: Path, rollout: str, *more: str) -> list[dict[str, Any]]:
    ran = lightning("rollout", rollout, "--runs", str(folder), "--json", *more)
    assert ran.code == 0, ran.err
    calls: list[dict[str, Any]] = json.loads(ran.out)["calls"]
    return calls


def test_an_agent_that_compacts_and_a_client_that_tries_again(lightning: Callable[..., Ran], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    asyncio.run(trained(folder, compacting, script=scripted()))
    calls = shown(lightning, folder, "run/1/0/1")
    assert [(call["trained_in"], call["untrained"], call["tries_again"], call["judged"]) for call in calls] == [
        ([], "title", None, ""),
        ([1], "", None, ""),
        ([], "compaction, rejected", None, "compaction, rejected"),
        ([1], "", 3, "compaction, accepted"),
        ([], "", None, ""),  # failed at the policy server, so no prompt of it is known: its request tells
        ([1], "", 5, ""),
    ]
    assert [(each["name"], each["status"]) for each in calls[1]["tool_events"]] == [("add", "ok")]
    assert [(each["name"], each["value"]) for each in calls[1]["step_rewards"]] == [("sum", 0.5)]
    asyncio.run(with_store(sqlite_url(folder / "lightning.db"), trained_is_what_the_rows_have))
    table = lightning("rollout", "run/1/0/1", "--runs", str(folder)).out
    assert "attempt 1 of 1: succeeded" in table
    assert "no: it is recorded and not trained: compaction, rejected" in table
    assert "tries call 3 again; compaction, accepted" in table
    ran = lightning("rollout", "run/1/0/1", "--runs", str(folder), "--attempt", "2")
    assert (ran.code, "has 1 attempt, so there is no attempt 2" in ran.err) == (2, True)
    for wrong in ("run/1/0/9", "1/0/1", "rum/1/0/1"):
        ran = lightning("rollout", wrong, "--runs", str(folder))
        assert ran.code == 2
        assert f"there is no rollout {wrong!r} in {folder}; did you mean " in ran.err
        assert "'run/1/0/1'" in ran.err
    assert lightning("runs", "show", "run", "--runs", str(folder)).err.count("lightning rollout run/val/0/0") == 1


async def trained_is_what_the_rows_have(store: Store) -> None:
    rollouts = await all_rollouts(store, "run", split="train", step=1)
    batch = ALGORITHM.batch(await load_groups(store, rollouts, ()))
    rows = {(span.rollout, span.seq) for row in batch.samples for span in row.spans}
    read = [await read_calls(store, each) for each in rollouts]
    told = {
        (call.transition.rollout, call.transition.seq) for each in read for call in each.calls if not call.untrained
    }
    assert rows
    assert told == rows


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_a_command_that_says_it_by_header(lightning: Callable[..., Ran], tmp_path: Path) -> None:
    asyncio.run(trained(tmp_path / "run", lightning_.command(["sh", "-c", CURL])))
    calls = shown(lightning, tmp_path / "run", "run/1/0/0")
    assert [(call["untrained"], call["tries_again"], call["rejected_by"]) for call in calls] == [
        ("title", None, None),
        ("summary, rejected", None, 3),
        ("", 2, None),
    ]


ROLLOUT = Rollout("r", "run", Task("?"), "g", status=Status.SUCCEEDED, attempt=2)
CALL = Transition("r", 2, 0, "c", token_ids([1, 2]), token_ids([3]), logprobs([-1.0]), caller=Caller("solver"))
RECORD = StepRecord("run", 4, 4, (("r", 2),), ("d",), "d", metrics={"skipped/all_rewards_equal": 3.0}, groups=("g",))
EPOCH = Epoch(1, 0, {"train_agents": ["solver"], "config": {"trainer": {"policy_fault": "mask"}}})
FAILED = {"status": Status.FAILED, "fault": Fault.POLICY}


@pytest.mark.parametrize(
    ("call", "rollout", "record", "said"),
    [
        ({}, {}, {}, ""),
        ({"untrained": "title"}, {}, {}, "it is recorded and not trained: title"),
        ({"status": CallStatus.REFUSED, "finish_reason": "too_long"}, {}, {}, "it gave nothing to train on: refused, too_long"),
        ({"status": CallStatus.ABORTED}, {}, {}, "it gave nothing to train on: aborted"),
        ({"response_ids": token_ids()}, {}, {}, "it gave nothing to train on: ok"),
        ({"status": CallStatus.MEDIA}, {}, {}, "its prompt has an image"),
        ({"caller": Caller("judge")}, {}, {}, "its agent is not trained in step 4"),
        ({}, {}, {"context": {"resting": ["policy"]}}, "its policy rested in step 4"),
        ({}, {"attempt": 1}, {}, "attempt 2 took its place"),
        ({}, {"status": Status.RUNNING}, {}, "its rollout has not ended: running"),
        ({}, {**FAILED, "fault": Fault.AGENT}, {}, "its rollout is in no group: failed, fault: agent"),
        ({}, FAILED, {}, "its rollout is masked"),
        ({}, {}, {"rollouts": ()}, "step 4 left its rollout out (it left out 3 groups: all rollouts that were compared earned the same)"),
        ({}, {"status": Status.CANCELLED, "fault": Fault.CANCELLED}, {}, "its rollout is in no group: cancelled"),
        ({}, {"split": "val"}, None, "held-out rollouts are never trained on"),
        ({}, {}, None, "no training step has looked at it"),
    ],
)  # fmt: skip
def test_each_reason_is_told(call: Any, rollout: Any, record: Any, said: str) -> None:
    steps = [] if record is None else [(replace(RECORD, **record), EPOCH)]
    (told,) = why_untrained(replace(CALL, **call), replace(ROLLOUT, **rollout), steps, newest=2).values()
    assert told.startswith(said)
    assert "cancelled, fault" not in told
    assert bool(told) == bool(said)
