"""The pages that put versions side by side: of weights on held-out tasks, of an A/B's variants, and of prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.trainer.plan import val_rollouts
from lightning.types import Fault, Outcome, Rollout, Run, Task
from lightning_console.places import Places
from lightning_console.router import Address, show
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource, set_alias

from tests.plugins.console.made_rollouts import call

TASKS = [Task(f"question {number}", id=f"t{number}") for number in range(6)]
MARKUP = "<script>alert(1)</script>"


async def evaluated(store: Store, run: str, step: int, rewards: Mapping[str, float | Fault], **config: str) -> None:
    """An evaluation in which each task is answered by two calls; what is not 1 is answered otherwise in the second."""
    await store.put_run(Run(run, run, config))
    tasks = [task for task in TASKS if task.id in rewards]
    await store.create_rollouts(val_rollouts(run, step, tasks, 1))
    for lease in await store.lease(run, "worker", limit=len(tasks)):
        made, given = lease.rollout, rewards[lease.rollout.task.id]
        answer = (7,) if given == 1.0 else (8,)
        await store.append([call(made, 0, "solver", [1], (5,)), call(made, 1, "solver", [1, 5], answer)])
        ended = Outcome(fault=given, error="it broke") if isinstance(given, Fault) else Outcome(reward=given)
        await store.complete(made.id, lease.attempt, ended)


def of(one: str, other: str, **options: str) -> str:
    return str(Address("versions", (), {"of": f"{one},{other}", **options}))


async def shown(store: Store, address: str, *others: Store) -> dict[str, Any]:
    """The blocks of a page by title, else by component."""
    stores = {f"memory://{number}": each for number, each in enumerate((store, *others))}
    page = (await show(Places(stores=stores), address)).to_json()
    made = json.loads(json.dumps(page, allow_nan=False))
    return {block["title"] or block["component"]: block["value"] for block in made["blocks"]}


def facts(blocks: Mapping[str, Any]) -> dict[str, str]:
    return {fact["name"]: fact["value"] for fact in blocks["Facts"]["facts"]}


def detail(blocks: Mapping[str, Any], name: str) -> str:
    return next(str(fact["detail"]) for fact in blocks["Facts"]["facts"] if fact["name"] == name)


async def test_two_versions_win_lose_and_tie(store: MemoryStore) -> None:
    await evaluated(store, "run", 0, {"t0": 1.0, "t1": 0.0, "t2": 0.0, "t3": 1.0, "t4": 1.0})
    await evaluated(store, "run", 4, {"t0": 1.0, "t1": 1.0, "t2": 1.0, "t3": 0.5, "t4": Fault.AGENT, "t5": 1.0})
    blocks = await shown(store, of("run@0", "run@4"))
    found = facts(blocks)
    assert (found["wins"], found["losses"], found["ties"]) == ("2", "2", "1")
    assert found["B − A"] == "+0.100"  # (1 + 1 - 0.5 - 1) / 5: what failed is 0
    assert detail(blocks, "B − A").endswith("(95 %)")
    said = json.dumps(blocks["Notices"])
    assert "not told apart" in said
    assert "0 tasks were given to A alone and 1 to B alone" in said
    rows = blocks["Worst regressions (2 of 2)"]["rows"]
    assert [row[0]["text"] for row in rows] == ["question 4", "question 3"]
    assert [row[3]["text"] for row in rows] == ["-1.000", "-0.500"]
    # The first call that differs is the second; the page of it under A opens.
    assert rows[1][4]["text"] == "call 2 (solver), in answer"
    assert rows[1][4]["to"] == str(Address("rollout", ("run", "run/val/0/3"), {"call": "2"}))
    assert "Tokens of call 2, by solver" in await shown(store, rows[1][4]["to"])
    every = blocks["Every task, the largest difference first"]["rows"]
    assert [(row[0]["text"], row[0]["hint"], row[3]["text"]) for row in every][:2] == [
        ("question 4", "t4", "-1.000"),
        ("question 1", "t1", "+1.000"),
    ]
    assert len(every) == 5


async def test_a_small_gain_on_every_task_is_not_called_chance(store: MemoryStore) -> None:
    await evaluated(store, "run", 0, {f"t{number}": 0.5 for number in range(6)})
    await evaluated(store, "run", 4, {f"t{number}": 0.6 for number in range(6)})
    said = json.dumps((await shown(store, of("run@0", "run@4")))["Notices"])
    assert "On these tasks B is better, and chance alone hardly explains it" in said
    assert "in 31 of 1000 cases" in said, "two of the 64 ways to flip six signs"
    verdict, new = (await shown(store, of("run@0", "run@4")))["Notices"]["notices"]
    assert (verdict["tone"], new["tone"]) == ("good", "muted")
    assert new["text"].startswith("On new tasks of this kind it is not sure")
    assert "solved" not in json.dumps(await shown(store, of("run@0", "run@4"))).casefold(), (
        "no task is, which says nothing"
    )
    tile = next(each for each in (await shown(store, "run/run"))["Figures"]["facts"] if each["name"] == "held-out")[
        "detail"
    ]
    assert re.fullmatch(r"beyond chance on these tasks \(.*\); on new tasks not sure \(-0.* to \+0.*\)", tile)
    assert "On new tasks of this kind it is not sure which is better: -0." in said, (
        "the other statement is about new tasks"
    )
    assert "not told apart" not in said


async def test_two_runs_are_compared_task_by_task_on_the_page_that_compares_them(store: MemoryStore) -> None:
    await evaluated(store, "one", 0, {"t0": 0.0, "t1": 0.0})
    await evaluated(store, "one", 4, {"t0": 1.0, "t1": 0.0, "t2": 0.0, "t3": 1.0})
    await evaluated(store, "two", 9, {"t0": 1.0, "t1": 0.5, "t2": 1.0, "t3": 0.0, "t5": 1.0})
    blocks = await shown(store, "compare?runs=one,two")
    solved = blocks["Solved by one alone (A 1, B 1)"]
    assert [[cell["text"] for cell in row] for row in solved["rows"]] == [
        ["question 3", "A alone", "1.000", "0.000", "-1.000", "#7", "#8"],
        ["question 2", "B alone", "0.000", "1.000", "+1.000", "#8", "#7"],
    ]
    assert "A alone solves 1 task, B alone 1; both 1, neither 1" in json.dumps(blocks["Notices"])
    one = await shown(store, "compare?runs=one,two&task=QUESTION%203")
    assert len(one["Solved by one alone (A 1, B 1)"]["rows"]) == 1, "the title counts all tasks, the filter shows one"
    assert len(one["Every task, the largest difference first"]["rows"]) == 1
    every = blocks["Every task, the largest difference first"]["rows"]
    assert [row[0]["text"] for row in every] == ["question 3", "question 2", "question 1", "question 0"]
    assert solved["rows"][0][2]["to"] == str(Address("rollout", ("one", "one/val/4/3")))
    assert solved["rows"][0][3]["to"] == str(Address("rollout", ("two", "two/val/9/3")))
    said = json.dumps(blocks["Notices"])
    assert "A is one after 4 steps, B is two after 9 steps" in json.dumps(blocks)
    assert "not told apart from chance" in said
    assert "0 tasks were given to A alone and 1 to B alone" in said
    half = await shown(store, "compare?runs=one,two&success=0.5")
    assert "Solved by one alone (A 1, B 2)" in half
    other = await shown(store, str(Address("compare", (), {"runs": "one,two", "a": "one@0", "b": "one@4"})))
    assert "Solved by one alone (A 0, B 1)" in other
    assert "Solved by one alone (A 0, B 1)" in await shown(store, "compare?runs=one"), (
        "its first and its last evaluation"
    )


async def test_runs_that_cannot_be_compared_task_by_task_say_why(store: MemoryStore) -> None:
    await evaluated(store, "one", 0, {"t0": 1.0})
    await evaluated(store, "other", 0, {"t1": 1.0})
    await store.put_run(Run("bare", "bare"))
    assert "not given one common task" in json.dumps(await shown(store, "compare?runs=one,other"))
    bare = json.dumps(await shown(store, "compare?runs=one,bare"))
    assert "no held-out evaluation of bare: its tasks cannot be compared one by one" in bare
    assert "Every task" not in bare
    assert "is no number" in json.dumps(await shown(store, "compare?runs=one,other&a=one@0&b=one@0&success=x"))
    assert "names no evaluation" in json.dumps(await shown(store, "compare?runs=one,other&a=moon"))


async def test_the_variants_of_an_ab_have_an_interval_that_holds_at_any_time(store: MemoryStore) -> None:
    await evaluated(store, "ab.a", 0, {task.id: 0.0 for task in TASKS}, evaluates="model")
    await evaluated(store, "ab.b", 0, {task.id: 1.0 for task in TASKS}, evaluates="model")
    choices = await shown(store, "versions")
    assert {"text": "ab.a@0 and ab.b@0", "to": of("ab.a@0", "ab.b@0")} in choices["Notices"]["notices"][0]["links"]
    assert choices["Held-out evaluations"]["select"] == "of"
    assert sorted(choices["Held-out evaluations"]["keys"]) == ["ab.a@0", "ab.b@0"]
    assert "holds at any time" in detail(await shown(store, of("ab.a@0", "ab.b@0")), "B − A")


async def test_two_runs_of_two_stores_are_compared(store: MemoryStore) -> None:
    other = MemoryStore()
    await other.open()
    await evaluated(store, "one", 0, {"t0": 1.0, "t1": 1.0})
    await evaluated(other, "two", 3, {"t0": 0.0, "t1": 1.0})
    blocks = await shown(store, of("one@0", "two@3"), other)
    ((task, *_, call_, _, _),) = blocks["Worst regressions (1 of 1)"]["rows"]
    assert (task["text"], call_["text"]) == ("question 0", "call 2 (solver), in answer")
    await other.close()


async def test_rewards_outside_the_bounds_have_no_interval(store: MemoryStore) -> None:
    await evaluated(store, "run", 0, {"t0": 2.0, "t1": 0.0})
    await evaluated(store, "run", 1, {"t0": 3.0, "t1": 1.0})
    blocks = await shown(store, of("run@0", "run@1"))
    assert detail(blocks, "B − A") == "no interval"
    assert "&bounds=LOW,HIGH" in json.dumps(blocks)
    assert "95 %" in detail(await shown(store, of("run@0", "run@1", bounds="0,4")), "B − A")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (of("run@0", "run@9"), "no held-out rollouts after 9 steps"),
        (of("run@0", "other"), "names no evaluation"),
        (of("run@0", "nobody@0"), "there is no run 'nobody'"),
        (of("run@0", "run@0,run@0"), "the address names 3"),
        (of("run@0", "run@1", bounds="1,0"), "no reward lies from 1 to 0"),
        (of("run@0", "run@1", bounds="x"), "are two numbers"),
        (of("run@0", "run@1"), "not given one common task"),
    ],
)
async def test_what_cannot_be_compared_says_why(store: MemoryStore, address: str, said: str) -> None:
    await evaluated(store, "run", 0, {"t0": 1.0})
    await evaluated(store, "run", 1, {"t1": 1.0})
    assert said in json.dumps(await shown(store, address))


async def test_nothing_to_compare_says_what_to_do(store: MemoryStore) -> None:
    assert "lightning eval" in (await shown(store, "versions"))["Held-out evaluations"]["empty"]


@pytest.fixture
async def prompts(store: MemoryStore) -> MemoryStore:
    """Three versions of a prompt; production went from 1 to 2, and a rollout ran with 2."""
    for text in ("Answer.", "Answer briefly.", MARKUP):
        await put_resource(store, Resource("writer", text, metadata={"made_by": "test"}))
    await set_alias(store, "writer", "production", 1)
    await set_alias(store, "writer", "production", 2)
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("t"), "g", resources={"writer": 2})])
    (lease,) = await store.lease("run", "worker")
    await store.complete("r", lease.attempt, Outcome(reward=0.75))
    return store


async def test_a_prompt_shows_its_versions_and_what_they_earned(prompts: MemoryStore) -> None:
    ((name, kind, versions, aliases, *_),) = (await shown(prompts, "resources"))["Table"]["rows"]
    assert [cell["text"] for cell in (name, kind, versions, aliases)] == ["writer", "prompt", "3", "production = 2"]
    blocks = await shown(prompts, name["to"])
    rows = [[cell["text"] for cell in row] for row in blocks["Versions"]["rows"]]
    assert [row[:2] for row in rows] == [["3", "latest"], ["2", "production"], ["1", "–"]]
    assert [row[3:5] for row in rows] == [["0", "–"], ["1", "0.750"], ["0", "–"]]
    assert [row[0]["text"] for row in blocks["Reward of each version"]["rows"]] == ["2"]
    diff = blocks["What is different"]
    assert (diff["before"], diff["after"]) == ("Answer briefly.", MARKUP)
    first = (await shown(prompts, "resources/writer?from=1&to=2"))["What is different"]
    assert (first["before"], first["after"]) == ("Answer.", "Answer briefly.")
    assert [row[1]["text"] for row in blocks["Where aliases pointed"]["rows"]] == ["2", "1"]


async def test_actions_are_for_the_version_that_is_shown(prompts: MemoryStore) -> None:
    made = (await shown(prompts, "resources/writer"))["Version 3"]["actions"]
    assert [action["name"] for action in made] == ["promote", "roll_back", "promote"]
    promote = {"store": "memory://0", "name": "writer", "alias": "production", "version": 3}
    assert made[0]["arguments"] == promote
    assert made[1]["arguments"] == {**promote, "version": 2}
    assert made[2]["fields"] == [["alias", "alias"]]
    same = (await shown(prompts, "resources/writer?to=2"))["Version 2"]["actions"]
    assert [action["name"] for action in same] == ["roll_back", "promote"]


async def test_the_same_name_in_two_stores_is_told_apart(prompts: MemoryStore) -> None:
    other = MemoryStore()
    await other.open()
    await put_resource(other, Resource("writer", "Another."))
    lines = (await shown(prompts, "resources", other))["Table"]["rows"]
    assert len({line[0]["to"] for line in lines}) == 2
    contents = [await shown(prompts, line[0]["to"], other) for line in lines]
    assert sorted(len(each["Versions"]["rows"]) for each in contents) == [1, 3]
    assert all("Controls" in each for each in contents)
    await other.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("resources/nobody", "there is no resource 'nobody'"),
        ("resources/writer?to=9", "has no version 9"),
        ("resources/writer?to=x", "is no whole number"),
        ("resources/writer?store=beef", "there is no resource"),
    ],
)
async def test_a_version_that_is_not_there_is_said(prompts: MemoryStore, address: str, said: str) -> None:
    assert said in json.dumps(await shown(prompts, address))
