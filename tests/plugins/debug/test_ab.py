"""`lightning ab`: the better of two variants is found, early where the difference is plain, and may be promoted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.cli.output import with_store
from lightning.config import Config
from lightning.plugins import plugins
from lightning.store.places import existing_store
from lightning.store.protocol import Store
from lightning.testing import rollout
from lightning.testing.fake_vllm import Reply
from lightning.trainer.agents import HowToCall
from lightning.types import Outcome, Rollout, Run, Task
from lightning_branching.policies import EvaluatedModel
from lightning_debug import eval_commands
from lightning_debug.ab import divergent_call
from lightning_debug.evaluate import LOOK_SECONDS
from lightning_debug.transcript import with_numbered_ids
from lightning_resources.nouns import Resource
from lightning_resources.reference import find, parse_reference

from tests.plugins.branching.conftest import AGENT

from .evaluating import FIXED, ScriptedVLLM, asked, said, write_tasks
from .evaluating import vllm as vllm

AB = ["ab", "asking:agent", "--tasks", "tasks.jsonl", "--out", "runs/ab", *FIXED]
SELDOM = """
async def seldom(task, llm):
    return await agent(task, llm) if task.id.endswith("11") else await deaf(task, llm)
"""
PROMPTS = ["--model", "one", "--prompt", "writer=a.txt,b.txt"]


@pytest.fixture(autouse=True)
def prompts(vllm: ScriptedVLLM) -> None:
    """Sixty tasks; under the prompt B all are solved, under A every fourth one."""
    write_tasks(Path("tasks.jsonl"), 60)
    Path("a.txt").write_text("Say {question}")
    Path("b.txt").write_text("Please say {question}")
    vllm.answer = by_prompt


def by_prompt(body: Mapping[str, Any], model: Path) -> str:
    return "yes" if asked(body).startswith("Please") or int(asked(body).split()[-1]) % 4 == 0 else "no"


def compared(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = said([*AB, *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def read(place: str, name: str) -> Resource:
    async def get(store: Store) -> Resource:
        return await find(store, parse_reference(name))

    return asyncio.run(with_store(existing_store(place), get))


def test_the_better_prompt_is_found_early_and_promoted(vllm: ScriptedVLLM, capsys: Any) -> None:
    code, found = compared(capsys, *PROMPTS, "--promote", "production", "--batch", "4")
    shown = found["comparison"]
    assert (code, shown["better"]) == (0, "B")
    assert shown["rollouts"] == 2 * shown["tasks"] == len(vllm.bodies)
    assert shown["rollouts"] < shown["planned"] / 2 == 60
    assert 0 < shown["interval"][0] <= shown["difference"] <= shown["interval"][1]
    assert read("runs/ab", "writer@production").content == "Please say {question}"
    assert "writer@production is version 2 in" in found["promoted"]
    assert len(vllm.models) == 1, "one vLLM for both"
    served, bodies = len(vllm.models), len(vllm.bodies)
    assert compared(capsys, *PROMPTS, "--promote", "production", "--batch", "4", "--resume") == (0, found)
    assert (len(vllm.models), len(vllm.bodies)) == (served, bodies), "it is read from the record"
    for run, reward in (("ab.a", "0."), ("ab.b", "1.000")):
        assert said(["runs", "show", run, "--runs", "runs/ab"]) == 0
        assert f"held-out after 0 steps: {reward}" in capsys.readouterr().out


def test_pairs_have_the_same_tasks_and_seeds_and_replays_would_have_them_too(vllm: ScriptedVLLM, capsys: Any) -> None:
    compared(capsys, *PROMPTS, "-n", "2", "--batch", "2")

    async def seeds(store: Store) -> list[list[tuple[str, int | None]]]:
        found = []
        for run in ("ab.a", "ab.b"):
            how = await HowToCall.of_run(store, run)
            page = await store.list_rollouts(run)
            found.append([(each.task.id, how.agent_seed(each)) for each in page.items])
        return found

    a, b = asyncio.run(with_store(existing_store("runs/ab"), seeds))
    assert a == b
    assert len({seed for _, seed in a}) == len(a), "and every place has its own"


def test_the_worse_one_is_told_with_its_regressions_and_the_call_that_differs(vllm: ScriptedVLLM, capsys: Any) -> None:
    assert said([*AB, "--model", "one", "--prompt", "writer=b.txt,a.txt", "--promote", "live", "--limit", "2"]) == 4
    shown = capsys.readouterr().out
    assert "A is better" in shown
    assert shown.count("call 1 (writer) is the first that differs, in messages[0].content") == 2
    assert "A: 'Please say question" in shown
    assert "B: 'Say question" in shown
    assert "writer@live is version 1" in " ".join(shown.split()), "the winner is A, whose prompt was put first"


def test_two_that_are_alike_are_not_told_apart_and_nothing_is_promoted(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "yes" if int(asked(body).split()[-1]) % 4 else "no"
    code, found = compared(capsys, *PROMPTS, "--promote", "production", "--max-rollouts", "41")
    assert (code, found["comparison"]["better"], found["comparison"]["rollouts"]) == (3, "", 40)
    assert found["promoted"] == "nothing is promoted, since the variants were not told apart"
    low, high = found["comparison"]["interval"]
    assert low < 0 < high


def test_two_models_are_served_in_turns_and_the_better_ones_weights_promoted(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "yes" if model.name == "other" else "no"
    assert said([*AB, "--model", "one,other", "--promote", "best", "--store", "runs/ab"]) == 2
    assert "there is no database at 'runs/ab'" in capsys.readouterr().err
    code, found = compared(capsys, "--model", "one,other", "--promote", "best")
    assert (code, found["comparison"]["better"]) == (0, "B")
    assert [each.name for each in vllm.models] == ["one", "other"], "the first quarter shows it"
    weights = read("runs/ab", "policy/weights@best").content
    assert isinstance(weights, Mapping)
    assert weights["path"] == str(Path("other").resolve())


def test_two_models_that_are_alike_are_started_once_more_often_than_there_are_looks(
    vllm: ScriptedVLLM, capsys: Any
) -> None:
    write_tasks(Path("tasks.jsonl"), 9)
    vllm.answer = lambda body, model: "yes"
    code, found = compared(capsys, "--model", "one,other", "--batch", "3")
    assert (code, found["comparison"]["rollouts"]) == (3, 18)
    assert [each.name for each in vllm.models] == ["one", "other", "one", "other"]


def test_temperatures_are_compared_on_one_vllm(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "yes" if body["temperature"] < 0.5 else "no"
    code, found = compared(capsys, "--model", "one", "--temperature", "0.2,1.0")
    assert (code, found["comparison"]["a"], found["comparison"]["b"]) == (4, "temperature 0.2", "temperature 1")
    assert {body["temperature"] for body in vllm.bodies} == {0.2, 1.0}
    assert len(vllm.models) == 1


@pytest.mark.parametrize("at", [2, 6])
def test_a_vllm_that_dies_and_comes_back_elsewhere_serves_both_on(vllm: ScriptedVLLM, capsys: Any, at: int) -> None:
    """It dies while A runs, or while B does, whose gateway does not look after it. Without its weights it is asked nothing."""

    def answer(body: Mapping[str, Any], model: Path) -> str:
        if len(vllm.bodies) == at:
            vllm.die()
        return by_prompt(body, model)

    vllm.answer, vllm.loading = answer, 1.5 * LOOK_SECONDS
    code, found = compared(capsys, *PROMPTS, "--batch", "4", "--set", "runner.concurrency=1")
    assert (code, vllm.restarts, len(vllm.models), vllm.untrained) == (0, 1, 1, 0)
    assert found["comparison"]["lost_pairs"] <= 1


def test_a_prompt_that_breaks_the_agent_loses_and_what_the_infrastructure_lost_is_no_difference(
    vllm: ScriptedVLLM, capsys: Any
) -> None:
    vllm.answer = lambda body, model: "yes"
    Path("b.txt").write_text("Please say {something}")
    code, found = compared(capsys, *PROMPTS)
    shown = found["comparison"]
    assert (code, shown["better"], shown["lost_pairs"]) == (4, "A", 0)
    assert shown["failed"]["A"] == {}
    assert shown["failed"]["B"] == {"agent": shown["tasks"]}
    assert shown["regressions"][0][1]["where"] == "calls", "B made no call"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "one"], "differ in one thing, and these differ in 0"),
        (["--model", "one,other", "--temperature", "0,1"], "differ in one thing, and these differ in 2"),
        (["--model", "one,one"], "both are the same model"),
        (["--model", "one", "--temperature", "1,1.0"], "both temperatures are the same"),
        (["--model", "one", "--temperature", "1,hot"], "give numbers from 0 up"),
        (["--model", "one", "--temperature", "0,1", "--promote", "x"], "A and B differ only in temperature"),
        (["--model", "one", "--prompt", "a.txt,b.txt"], "write NAME=A.txt,B.txt"),
        (["--model", "one", "--prompt", "writer=a.txt,a.txt"], "are the same"),
        (["--model", "one", "--prompt", "writer=a.txt,none.txt"], "cannot read the prompt"),
        (["--model", "one", "--prompt", "reader=a.txt,b.txt"], "no request differs by the prompt 'reader'"),
        ([*PROMPTS, "--max-rollouts", "1"], "less than one task takes"),
        ([*PROMPTS, "--store", "runs/ab"], "give --promote ALIAS, too"),
        (["--model", "one,runs/none@4"], "there is no run at runs/none"),
        ([*PROMPTS, "--tasks", "empty.jsonl"], "empty.jsonl has no task in it"),
        ([*PROMPTS, "--bounds", "0,0.5"], "outside 0 to 0.5"),
    ],
)
def test_bad_input_is_named_with_its_cure(vllm: ScriptedVLLM, capsys: Any, arguments: list[str], words: str) -> None:
    Path("empty.jsonl").write_text("")
    assert said([*AB, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_agent_that_never_asks_is_told_of_at_once_and_is_an_error_at_the_end(
    vllm: ScriptedVLLM, capsys: Any
) -> None:
    arguments = [*AB, *PROMPTS, "--batch", "2", "--max-rollouts", "12"]
    arguments[1] = "asking:deaf"
    assert said(arguments) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert told.index("so far no request differs") < told.index("after 2 tasks") < told.index("Is there a component")
    assert len(vllm.bodies) == 12


def test_an_agent_that_asks_on_some_tasks_alone_is_compared(vllm: ScriptedVLLM, capsys: Any) -> None:
    with Path("asking.py").open("a") as module:
        module.write(SELDOM)
    arguments = [*AB, *PROMPTS, "--batch", "2", "--json"]
    arguments[1] = "asking:seldom"
    assert said(arguments) == 3
    assert json.loads(capsys.readouterr().out)["comparison"]["tasks"] == 60


def test_an_agent_that_always_fails_ends_with_the_first_batch(vllm: ScriptedVLLM, capsys: Any) -> None:
    arguments = [*AB, *PROMPTS, "--batch", "2"]
    arguments[1] = "asking:broken"
    assert said(arguments) == 2
    assert "all 4 rollouts failed" in " ".join(capsys.readouterr().err.split())
    assert not vllm.bodies


def test_equal_rewards_whose_mean_is_beyond_a_bound_by_rounding_are_compared(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "0.1" if asked(body).startswith("Please") else "0"
    arguments = [*AB, *PROMPTS, "-n", "3", "--bounds", "0,0.1"]
    arguments[1] = "asking:graded"
    assert said(arguments) == 0


def test_two_models_of_one_name_have_labels_of_their_own(vllm: ScriptedVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(what: str, *_: Any, together: bool) -> EvaluatedModel:
        return EvaluatedModel("first@3", Path(what).resolve(), f"exp-{what}")

    monkeypatch.setattr(eval_commands, "find_model", found)
    a, b = eval_commands.variants(Path("runs/ab"), "one,other", "", "", Config(), Path("runs"))
    assert (a.label, b.label) == ("first@3 of exp-one", "first@3 of exp-other")


def test_the_first_divergent_call_is_matched_by_its_caller() -> None:
    names: dict[str, Any] = {}
    exec(AGENT, names)
    ask = names["ask"]

    def one(task: Task, llm: Any) -> float:
        for who in ("left", "right"):
            with lightning.component(who):
                ask(llm, f"{who} {task.input}")
        return 1.0

    def other(task: Task, llm: Any) -> float:
        for who in ("right", "left", "right"):
            with lightning.component(who):
                ask(llm, f"{who} {task.input}")
        return 1.0

    async def divergence(first: Any, second: Any) -> Any:
        store = plugins().store("memory://")
        await store.open()
        for run, record in (("a", first), ("b", second)):
            await store.put_run(Run(run, run))
            await store.create_rollouts([Rollout(run, run, Task("x"), "g")])
            await store.lease(run, "worker")
            await store.append([replace(call, rollout=run) for call in record.transitions])
            await store.complete(run, 1, Outcome(reward=1.0))
        found = await divergent_call(store, "a", "b")
        await store.close()
        return found

    same = [Reply("s")] * 3
    first, second = rollout(one, Task("x"), same), rollout(other, Task("x"), same)
    found = asyncio.run(divergence(first, second))
    assert (found.number, found.where, found.caller) == (3, "calls", "right")
    changed = rollout(one, Task("x"), ["s", "other"])
    found = asyncio.run(divergence(first, changed))
    assert (found.number, found.where, found.caller, found.b) == (2, "answer", "right", "'other'")
    assert asyncio.run(divergence(first, rollout(one, Task("x"), same))) is None


def test_ids_that_are_made_up_for_each_rollout_are_no_difference() -> None:
    def request(made_up: str, arguments: str) -> Any:
        asked = {"id": made_up, "type": "function", "function": {"name": "look", "arguments": arguments}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [asked]}]
        return {"messages": [*turns, {"role": "tool", "tool_call_id": made_up, "content": made_up}]}

    one, other = with_numbered_ids(request("call_a", "{}"), {}), with_numbered_ids(request("call_b", "{}"), {})
    assert one["messages"][0] == other["messages"][0]
    assert one["messages"][1]["tool_call_id"] == other["messages"][1]["tool_call_id"] == "id 1"
    assert one["messages"][1]["content"] != other["messages"][1]["content"], "what a tool said stays"
    assert with_numbered_ids(request("call_a", "{1}"), {})["messages"][0] != one["messages"][0]
