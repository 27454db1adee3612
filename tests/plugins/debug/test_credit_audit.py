"""`lightning credit audit`: decisions are executed by branches, credit is compared with them, and what cannot be is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch import Group
from lightning.cli.output import with_store
from lightning.config import Config, with_settings
from lightning.credit import Decayed, GroupAdvantage
from lightning.errors import ConfigError, DataError
from lightning.store.sqlite import SqliteStore
from lightning.store.url import sqlite_url
from lightning.testing.chat_server import ChatServer
from lightning.testing.decisions import branch_of
from lightning.testing.trajectories import make_group, make_trajectory
from lightning.types import Fault, Rollout, Run, Status, Task, Transition, VersionRun
from lightning_branching.recorded import VOID
from lightning_console.places import Places
from lightning_debug.credit_audit import KEPT, CreditAudit, _given, credits_of, fates, kept_audit
from lightning_debug.credit_choice import Choice, Recorded, _in_turns, choose, read_recorded
from lightning_debug.credit_command import _model
from lightning_debug.judge import Judge

from tests.plugins.console.reading import shown, texts, to
from tests.plugins.debug.evaluating import FIXED, ScriptedVLLM, asked, said, write_tasks
from tests.plugins.debug.evaluating import vllm as vllm
from tests.plugins.debug.test_judge import scores

AGENT = """
import os
import time
import httpx
import lightning

def ask(llm, content):
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}]}
    headers = {"authorization": f"Bearer {llm.api_key}"}
    reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    if reply.is_error:
        raise RuntimeError(reply.json()["error"]["message"])
    return reply.json()["choices"][0]["message"]["content"]

judge = lightning.Judge("Go left.", model="judge-1", base_url=os.environ.get("JUDGE_URL", "http://127.0.0.1:1/v1"),
                        api_key_env="JUDGE_KEY", cache="judged.db")

def agent(task, llm):
    way = ask(llm, f"{task.input}: which way?")
    ask(llm, f"{way}, how fast?")
    seen = ask(llm, f"{way}, what is there?")
    return float(seen == "gold")

def once(task, llm):
    return float(ask(llm, "which way?") == "left")

def clocked(task, llm):
    way = ask(llm, f"{task.input}, at {time.time_ns()}: which way?")
    return float(ask(llm, f"{way}, what is there?") == "gold")
"""
INLINE = ["--runner", "inline"]


def answer() -> Any:
    """A policy that goes left each second time. There is gold on the left alone, however fast the agent goes."""
    ways, speeds = itertools.cycle(["left", "right"]), itertools.cycle(["slowly", "quickly"])

    def say(body: Mapping[str, Any], model: Path) -> str:
        question = asked(body)
        if "which way" in question:
            return next(ways)
        return next(speeds) if "how fast" in question else "gold" if question.startswith("left") else "stones"

    return say


@pytest.fixture
def runs(vllm: ScriptedVLLM, tmp_path: Path) -> Iterator[ScriptedVLLM]:
    (tmp_path / "deciding.py").write_text(AGENT)
    vllm.answer = answer()
    yield vllm
    sys.modules.pop("deciding", None)


def recorded(agent: str = "agent", *more: str) -> None:
    """An evaluation of two rollouts of each of two tasks, in `runs/first`."""
    write_tasks(Path("few.jsonl"), 2)
    command = ["eval", "one", f"deciding:{agent}", "--tasks", "few.jsonl", "-n", "2", "--out", "runs/first"]
    assert said([*command, *FIXED, *more]) == 0


def audit(*more: str, agent: str = "agent") -> int:
    return said(["credit", "audit", "first", f"deciding:{agent}", "--held-out", *INLINE, *more])


def in_store(ask: Any) -> Any:
    return asyncio.run(with_store(sqlite_url(Path("runs/first/lightning.db").resolve()), ask))


def test_decisions_are_executed_and_credit_is_compared_with_them(runs: ScriptedVLLM, capsys: Any) -> None:
    recorded()
    before, sampled = in_store(lambda store: store.get_run("first")), len(runs.bodies)
    capsys.readouterr()
    assert audit("--rollouts", "2", "-n", "12", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["step"], found["n"], found["audited"], found["states"]) == ("first", 0, 12, 2, 6)
    assert {call["task"] for call in found["calls"]} == {"t0", "t1"}
    assert (found["rollouts"], found["void"], found["failed"], found["faults"]) == (6 * 12, 0, 0, 0)
    # Three calls from the first state, two after it, one after that: nothing before a state is sampled again.
    assert len(runs.bodies) - sampled == 2 * 12 * (3 + 2 + 1)
    by_number = {number: [call for call in found["calls"] if call["number"] == number] for number in (1, 2, 3)}
    for call in by_number[1]:
        assert call["value"] == pytest.approx(0.5, abs=0.15)
        assert call["worth"] in (0.0, 1.0)
        assert call["mattered"]
    for call in (*by_number[2], *by_number[3]):
        assert (call["advantage"], call["mattered"]) == (0.0, False)
        assert call["interval"][0] < 0.0 < call["interval"][1] or call["last"]
    assert [(call["last"], call["answer"]) for call in by_number[3]] == [(True, 0)] * 2
    assert [(call["last"], call["answer"]) for call in by_number[1]] == [(False, 12)] * 2
    assert found["share"]["value"] == pytest.approx(1 / 3)
    agreements = found["agreements"]
    assert {"identical", "leave-one-out", "gigpo", "logprob"} <= agreements.keys()
    assert not {"critic", "branch", "judge"} & agreements.keys(), "they need what this run does not have"
    assert agreements["leave-one-out"]["calls"] == 6
    assert any("one sample" in warning for warning in found["warnings"])
    assert "the decisions are of 2 tasks: intervals over tasks are rough (--rollouts)" in found["warnings"]
    assert in_store(lambda store: store.get_run("first")) == before
    kept = in_store(lambda store: store.get_state("first-credit0", KEPT))
    assert kept_audit(kept) is not None
    assert kept_audit({"run": "first"}) is None, "of another release"


def test_decisions_of_another_version_are_left_out_and_counted(
    runs: ScriptedVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `trainer.max_staleness`, where a step has calls of several versions, and calls that two versions answered."""
    recorded()
    read, read_all = SqliteStore.transitions, SqliteStore.transitions_of

    def answered(call: Transition) -> Transition:
        later = {1: (VersionRun(0, 2), VersionRun(1, 3)), 2: (VersionRun(0, 3),)}.get(call.seq, (VersionRun(0, 2),))
        return replace(call, versions=later if call.rollout.endswith("/0") else (VersionRun(0, 2),))

    async def transitions(store: SqliteStore, rollout: str, attempt: int | None = None) -> list[Transition]:
        return [answered(call) for call in await read(store, rollout, attempt)]

    async def transitions_of(store: SqliteStore, attempts: Any) -> list[list[Transition]]:
        return [[answered(call) for call in calls] for calls in await read_all(store, attempts)]

    monkeypatch.setattr(SqliteStore, "transitions", transitions)
    monkeypatch.setattr(SqliteStore, "transitions_of", transitions_of)

    async def chosen(store: SqliteStore) -> Choice:
        run = await store.get_run("first")
        assert run is not None
        return await choose(store, await read_recorded(store, run, 0, held_out=True), 4, None, 0)

    found = in_store(chosen)
    assert found.version == 2
    assert Counter(decision.call.number for decision in found.decisions) == {1: 4, 2: 2, 3: 2}
    assert found.left_out == {"calls that were not answered by version 2 alone": 4}


def test_the_command_tells_it_and_the_console_shows_it(
    runs: ScriptedVLLM, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    with ChatServer(lambda call: scores(call, lambda number, answer: float(answer == "left"))) as server:
        monkeypatch.setenv("JUDGE_URL", server.llm().base_url)
        recorded()
        capsys.readouterr()
        options = ["--rollouts", "2", "--calls", "1", "-n", "4", "--credit", "identical", "--judge", "deciding:judge"]
        assert audit(*options, "--limit", "1") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "first, the evaluation after 0: 2 decisions of 2 rollouts, executed with first@0" in told
    assert "1 more, with smaller advantages (--limit)" in told
    assert "cost: " in told
    found = kept_audit(in_store(lambda store: store.get_state("first-credit0", KEPT)))
    assert found is not None
    assert set(found.agreements) == {"identical", "judge", "logprob"}
    for call in found.calls:
        assert call.credits["judge"] == pytest.approx(call.credits["identical"]), "it sees what the reward says, once"
    asyncio.run(_shown(found))


async def _shown(audit: CreditAudit) -> None:
    places = Places("runs")
    try:
        key = "first"
        page = await shown(places, to("run", key))
        table = texts(page["How each credit agrees with what was executed"])
        assert {row["credit"] for row in table} == {"identical", "judge", "logprob"}
        call = audit.calls[0]
        page = await shown(places, to("rollout", key, call.rollout))
        (row,) = texts(page["Decisions, executed"])
        assert (row["call"], row["executed advantage"]) == (str(call.number), f"{call.advantage:.3f}")
        assert "Branches" not in page, "an audit's branches are in its own run"
    finally:
        await places.close()


def test_branches_that_begin_otherwise_are_counted_and_refused_as_a_whole(runs: ScriptedVLLM, capsys: Any) -> None:
    recorded("clocked")
    capsys.readouterr()
    assert audit("--rollouts", "2", "-n", "2", "--calls", "1", "--seed", "2", agent="clocked") == 2
    told = capsys.readouterr().err
    assert "no decision could be executed" in told
    assert "are void" in told


def test_what_cannot_be_audited_is_refused(runs: ScriptedVLLM, capsys: Any) -> None:
    recorded()
    served = len(runs.models)
    capsys.readouterr()
    for arguments, told in (
        (["--step", "3"], "run first has 0 committed steps: there is no step 3 to audit"),
        (["--credit", "identical", "--credit", "indentical"], "indentical"),
        (["--credit", "critic"], "--credit critic: it needs the values of a critic"),
        (["--credit", "branch"], "--credit branch: these groups have no branches"),
        (["--credit", "judge"], "--credit judge: it has rewards of its own: give a judge with --judge MODULE:JUDGE"),
        (["--judge", "deciding:agent"], "--judge deciding:agent: a function is no lightning.Judge"),
        (["-n", "1"], "Input should be greater than or equal to 2"),
        (["--bounds", "-1,0.5"], "--bounds -1,0.5: there are returns from 0 to 1"),
        (["--bounds", "1,0"], "the lowest reward must be below the highest"),
    ):
        assert audit(*arguments) == 2, told
        assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert len(runs.models) == served, "nothing was started"


def test_an_audit_of_a_run_whose_weights_are_gone_is_refused(runs: ScriptedVLLM, capsys: Any) -> None:
    recorded()
    shutil.rmtree("one")
    served = len(runs.models)
    assert audit() == 2
    told = capsys.readouterr().err
    assert "the weights first@0, which made these decisions, are gone" in told
    assert len(runs.models) == served


@pytest.mark.parametrize(
    ("agent", "more", "told"),
    [
        ("once", [], "4 x rollouts of one call, whose credit has nothing to divide"),
        ("agent", ["--set", "gateway.record_requests=false"], "4 x "),
    ],
)
def test_a_run_without_decisions_to_execute_is_refused_with_the_reason(
    runs: ScriptedVLLM, capsys: Any, agent: str, more: list[str], told: str
) -> None:
    recorded(agent, *more)
    assert audit(agent=agent) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "no decision of step 0 of run first can be executed" in shown
    assert told in shown


def of_run(*groups: Group, **how: Any) -> Recorded:
    """Recorded groups of a run whose algorithm has these arguments."""
    return Recorded(Run("run", "run"), 1, groups, (), "exclude", LightningRL("grpo", **how))


def test_branches_are_as_long_as_the_rollouts_that_they_end() -> None:
    """With a rule on length a state is worth what whole rollouts through it are."""
    calls = [((1,), (2, 3, 4, 5)), ((1, 2, 3, 4, 5, 6), (7, 8))]
    parent = make_trajectory(calls, rollout="parent", reward=1.0)
    branch = branch_of(make_trajectory(calls, rollout="branch", group="audit/0", reward=1.0), parent, 1)
    recorded = of_run(Group("g", (parent,)), overlong_tokens=5, overlong_penalty=0.5)
    (found,) = recorded.rewarded_branches(Group("audit/0", (branch,))).trajectories
    assert (found.reward, found.rollout.id) == (0.5, "branch")


def test_the_credit_of_the_run_is_compared_with_its_own_settings_or_said_to_be_missing() -> None:
    group = make_group([1.0, 0.0])
    own = Decayed(0.5)
    found, warnings = credits_of(of_run(group, credit=own), ["identical"], None)
    assert (set(found), found["Decayed"], warnings) == ({"identical", "Decayed"}, own, ())
    found, warnings = credits_of(of_run(group, credit=Judge("Go left.", model="m", cache="")), ["identical"], None)
    assert set(found) == {"identical"}, "a model is asked only if the caller says so"
    assert warnings[0].startswith("the run's own credit, Judge, is not compared: it has rewards of its own")
    trunk, other = group.trajectories
    branch = replace(other, rollout=replace(other.rollout, parent=trunk.transitions[0].key))
    assert "branch" in credits_of(of_run(Group("g", (trunk, branch))), [], None)[0]
    assert "branch" not in credits_of(of_run(Group("g", (branch,))), [], None)[0], "behind a rollout of another group"
    unknown = replace(of_run(group), algorithm=None, described_credit={"function": "mine"})
    assert credits_of(unknown, ["identical"], None)[1] == (
        "the run's own credit, a function, is not compared: only your own code can make the run's algorithm again",
    )
    assert credits_of(replace(unknown, described_credit=None), ["identical"], None)[1] == ()


def test_branches_that_the_policy_failed_have_the_reward_of_training() -> None:
    parent, task = ("parent", 1, 1), Task("task")
    fine = Rollout("fine", "run", task, "g", status=Status.SUCCEEDED, reward=1.0, parent=parent)
    void, broken, fault = (
        replace(fine, id=why, status=Status.FAILED, reward=None, error=why, fault=whose)
        for why, whose in ((f"{VOID}: other", Fault.AGENT), ("broken", Fault.AGENT), ("turns", Fault.POLICY))
    )
    cancelled = replace(fine, id="cancelled", status=Status.CANCELLED, reward=None, fault=Fault.CANCELLED)
    ended = [fine, void, broken, fault, cancelled]
    assert fates(ended, "exclude") == ([void], [broken, fault], [])
    assert fates(ended, -1.0) == ([void], [broken], [fault])


def test_rollouts_are_taken_by_tasks_and_those_that_cannot_be_taken_are_counted() -> None:
    left_out: Counter[str] = Counter()
    groups = [
        make_group([1.0, 0.0], group=f"g{number}") for number in range(3)
    ]  # two groups of one task, one of another
    last = tuple(
        replace(member, rollout=replace(member.rollout, task=Task("b", id="b"))) for member in groups[2].trajectories
    )
    idle = make_trajectory(rollout="idle", trainable=[False])
    branch = replace(idle, rollout=replace(idle.rollout, parent=("g0/0", 1, 0)))
    found = _in_turns([*groups[:2], Group("g2", (*last, idle, branch))], Random(0), left_out)
    tasks = [member.rollout.task.id == "b" for _, member in found]
    assert sorted(tasks[:2]) == sorted(tasks[2:4]) == [False, True]
    assert len(tasks) == 6
    assert left_out == {"rollouts that are branches themselves": 1, "rollouts without a trained call": 1}


async def test_weights_that_an_audit_cannot_have_are_said_with_the_cure() -> None:
    several = with_settings(Config(), {"policies.writer.agents": ["writer"], "engine.lora.rank": 8})
    evaluated = Run("first", "first", {"evaluates": "crew@2", "config": several.model_dump(mode="json")})
    for run, told in (
        (evaluated, "first evaluated all policies of crew@2 together, .*: audit the run that trained them"),
        (Run("first", "first"), "the folder of the run first is not here, .* name the run by its folder"),
    ):
        parent = cast("Any", SimpleNamespace(run=run, folder=None))
        with pytest.raises(ConfigError, match=told):
            await _model(cast("Any", None), parent, 1, Path("models"), Config())


def test_a_credit_by_token_is_compared_by_its_mean() -> None:
    group = make_group([1.0, 0.0])
    calls = [call for member in group.trajectories for call in member.transitions]

    def by_token(group: Group, advantage: GroupAdvantage) -> list[Any]:
        return [[np.arange(len(call.response_ids)) for call in member.transitions] for member in group.trajectories]

    def endless(group: Group, advantage: GroupAdvantage) -> list[Any]:
        return [[np.full(len(call.response_ids), np.inf) for call in one.transitions] for one in group.trajectories]

    recorded = SimpleNamespace(groups=[group])
    decisions = SimpleNamespace(decisions=[SimpleNamespace(group=group.id)])
    plan: Any = SimpleNamespace(choice=decisions, recorded=recorded, credits={"mine": by_token})
    assert _given(plan)["mine"] == {call.key: (len(call.response_ids) - 1) / 2 for call in calls}
    plan.credits["mine"] = endless
    with pytest.raises(DataError, match=r"the credit 'mine' does not give one finite advantage for each call of group"):
        _given(plan)
