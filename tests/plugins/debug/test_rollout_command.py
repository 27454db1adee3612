"""`lightning rollout` says of each call of a rollout what became of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import lightning as lightning_
import pytest
from lightning.cli.output import with_store
from lightning.errors import ConfigError, StoreError
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
    VersionRun,
    logprobs,
    token_ids,
)
from lightning_branching import find_rollout
from lightning_branching.recorded import read_rollout
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
    for wrong in (f"run/{2**64}/0/1", "run/zzzzzzzzz"):
        ran = lightning("rollout", wrong, "--runs", str(folder))
        assert (ran.code, f"there is no rollout {wrong!r} in {folder}: `" in ran.err) == (2, True)
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
        ({}, {}, {"rollouts": ()}, "step 4 left its rollout out (it left out 3 groups: all rollouts that were compared"),
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


def test_a_call_that_a_later_step_reused_is_trained() -> None:
    both = Epoch(1, 0, {"config": {"trainer": {"max_staleness": 1}}})
    later = replace(RECORD, step=5)
    steps = [(replace(RECORD, context={"resting": ["b"]}), both), (later, both)]
    other = replace(CALL, versions=(VersionRun(0, 3, "b"),))
    assert why_untrained(other, ROLLOUT, steps, newest=2) == {
        4: "its policy b rested in step 4",
        5: "",
    }
    assert why_untrained(CALL, ROLLOUT, steps, newest=2) == {4: "", 5: ""}


async def twice(task: Task, llm: LLM) -> float:
    """Ask for two choices, three times at once for the same, and once with a body that is none."""
    async with httpx.AsyncClient(base_url=llm.base_url, headers={"authorization": f"Bearer {llm.api_key}"}) as client:

        async def ask(text: str, **more: Any) -> None:
            body = {"model": llm.model, "messages": [{"role": "user", "content": text}], **more}
            (await client.post("/chat/completions", json=body)).raise_for_status()

        await ask("choose", n=2)
        await client.post("/chat/completions", content=b"{")
        await asyncio.gather(*(ask("beside") for _ in range(3)))
        await asyncio.gather(ask("beside"))  # by the same caller
    return 1.0


def test_numbers_are_those_of_a_replay_and_an_earlier_attempt_has_no_outcome(
    lightning: Callable[..., Ran], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    beside = Reply("ok", delay=0.05)  # equal calls run at the same time
    asyncio.run(trained(folder, twice, script=lambda _: beside))
    rollout = "run/1/0/0"
    assert "; left out by step 1\n" in lightning("rollout", rollout, "--runs", str(folder)).out
    with closing(sqlite3.connect(folder / "lightning.db")) as database:
        database.execute("UPDATE rollouts SET attempt = 2 WHERE id = ?", (rollout,))
        database.commit()
    calls = shown(lightning, folder, rollout, "--attempt", "1")
    recorded = asyncio.run(
        with_store(sqlite_url(folder / "lightning.db"), lambda store: read_rollout(store, rollout, 1))
    )
    assert [(call["number"], call["choice"], call["tries_again"]) for call in calls] == [
        (1, 0, None), (1, 1, None), (None, 0, None), (2, 0, None), (3, 0, None), (4, 0, None), (5, 0, 4),
    ]  # fmt: skip
    assert [(call["number"], call["seq"]) for call in calls if call["number"] and not call["choice"]] == [
        (call.number, call.transition.seq) for call in recorded.calls
    ]
    first = json.loads(lightning("rollout", rollout, "--runs", str(folder), "--json", "--attempt", "1").out)
    assert (first["steps"], first["empty"], first["attempts"]) == ([], "", 2)
    assert [first["rollout"][name] for name in ("attempt", "status", "reward", "trained_at_step")] == [
        1,
        None,
        None,
        None,
    ]
    ran = lightning("rollout", rollout, "--runs", str(folder), "--attempt", "1")
    assert "attempt 1 of 2: its outcome is not kept\n" in ran.out
    assert "0 calls of 6 trained" in ran.out
    assert f"MODULE:AGENT --runs {folder} --attempt 1" in ran.err
    ran = lightning("rollout", rollout, "--runs", str(folder))
    assert "Next" not in ran.err, "attempt 2 has no call"


def test_a_store_that_fails_later_gives_no_hint_and_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "postgresql://u:secret@127.0.0.1:1/db"

    async def fail(*_: object) -> list[str]:
        raise StoreError("it does not answer any more")

    monkeypatch.setattr(find_rollout, "answers", lambda *_: iter([(where, None)]))
    monkeypatch.setattr(find_rollout, "with_store", fail)
    with pytest.raises(ConfigError) as raised:
        find_rollout.ask_of_rollout(where, "run/1", lambda *_: pytest.fail("no store has it"))
    place = "postgresql://***@127.0.0.1:1/db"
    assert str(raised.value) == (
        f"there is no rollout 'run/1' in {place}: `lightning runs --runs '{place}' show RUN` lists those of a run"
    )
