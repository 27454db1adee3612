"""The pages of groups and rollouts: trees, tokens and their reasons, of runs that are whole, tampered with and torn."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
from lightning.plugins import plugins
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.testing import ToolCall, rollout
from lightning.trainer.context import EPOCHS
from lightning.trainer.training_data import all_rollouts, load_groups
from lightning.types import Fault, Outcome, Rollout, Run, Task, logprobs, token_ids
from lightning_console.blocks import Page, Table
from lightning_console.pages.rollout import _consent
from lightning_console.pages.words import differing, task_text
from lightning_console.places import SERVER, Places
from lightning_console.queries.conversation import one_line
from lightning_console.router import Address, show
from lightning_db.keeper import keeper_of
from lightning_db.prune import PruneRequest, carry_out, plan
from lightning_debug.judge import Opinion

from tests.plugins.console.made_rollouts import ALGORITHM, MARKUP, call, tokenizer, train

RUN = "runs/one"


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Store]:
    folder.mkdir(parents=True, exist_ok=True)
    store = plugins().store(sqlite_url(folder / "lightning.db"))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[Places]:
    """The training of `made_rollouts`, with the tokenizer of its model."""
    async with opened(tmp_path / RUN) as store:
        await train(store, str(tokenizer(tmp_path / "model")))
    found = Places(str(tmp_path / RUN))
    yield found
    await found.close()


def to(page: str, *about: str, **options: object) -> str:
    return str(Address(page, about, {name: str(value) for name, value in options.items()}))


async def shown(places: Places, address: str) -> dict[str, Any]:
    """The blocks of a page by component; the page must be JSON."""
    page = await show(places, address)
    made = json.loads(json.dumps(page.to_json(), allow_nan=False))
    return {block["component"]: block["value"] for block in made["blocks"]} | {"page": page}


async def text_of(places: Places, address: str) -> str:
    return json.dumps((await show(places, address)).to_json(), ensure_ascii=False)


def reasons(blocks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in blocks["TokenStrip"]["why"]}


async def test_siblings_are_one_tree_of_calls(places: Places) -> None:
    blocks = await shown(places, to("group", "run", "run/1/0"))
    nodes = blocks["GroupTree"]["nodes"]
    assert [(each["parent"], each["visits"], each["value"]) for each in nodes] == [
        (-1, 3, 0.5),
        (0, 2, 0.75),
        (0, 1, 0.0),
        (1, 1, 1.0),
        (1, 1, 0.5),
        (2, 1, 0.0),
    ]
    assert [each["caller"] for each in nodes[1:]] == ["solver", "solver", "critic", "critic", "critic"]
    assert nodes[1]["action"] == "word10 word11"
    # What training made of the action: the mean over those who did it; the critic is not trained.
    assert nodes[1]["advantage"] > 0 > nodes[2]["advantage"]
    assert nodes[3]["advantage"] is None
    assert nodes[0]["compare"] == to("group", "run", "run/1/0", split=0)
    assert nodes[2]["compare"] == ""
    assert [len(each["rollouts"]) for each in nodes] == [0, 0, 0, 1, 1, 1]
    page: Page = blocks["page"]
    assert (page.previous, page.next) == ("", to("group", "run", "run/1/1"))
    assert not page.live


async def test_a_rollout_is_opened_by_its_name_and_says_what_was_expected_and_answered(places: Places) -> None:
    blocks = await shown(places, to("rollout", "run", id="1/0/0"))
    assert blocks["page"].address == to("rollout", "run", "run/1/0/0")
    facts = {fact["name"]: fact["value"] for fact in blocks["Facts"]["facts"]}
    assert (facts["expected"], facts["answered"]) == ("0", "word20 word30")
    step = await show(places, to("step", "run", "1"))
    (groups,) = [block for block in step.blocks if isinstance(block, Table) and block.title == "Groups"]
    assert [row[0].text for row in groups.rows] == ["1/0", "1/1"]
    assert "has no rollout 'run/9/9/9'" in await text_of(places, to("rollout", "run", id="9/9/9"))


async def test_a_split_shows_how_the_best_and_the_worst_went_on(places: Places) -> None:
    diff = (await shown(places, to("group", "run", "run/1/0", split=0)))["Diff"]
    assert diff["after"] == "[solver]\nword10 word11\n\n[critic]\nword20 word30"
    assert diff["before"] == "[solver]\nword12 word13\n\n[critic]\nword22 word30"
    assert diff["to_left"] == to("rollout", "run", "run/1/0/2", call=1)
    later = (await shown(places, to("group", "run", "run/1/0", split=1)))["Diff"]
    assert (later["before"], later["after"]) == ("[critic]\nword21 word30", "[critic]\nword20 word30")
    for bad in ("2", "77", "-1", "x"):
        assert "This cannot be shown" in await text_of(places, to("group", "run", "run/1/0", split=bad))


async def test_a_group_that_taught_nothing_says_why(places: Places) -> None:
    said = await text_of(places, to("group", "run", "run/1/1"))
    assert "this group taught nothing: all rewards equal" in said
    assert "proved" in said


async def test_a_call_that_another_step_trained_says_so(places: Places) -> None:
    store = next(iter((await places.stores()).values()))
    (record,) = await store.steps("run")
    both = {"first": 2, "at": 0.0, "config": {"train_agents": [], "config": {"trainer": {"max_staleness": 1}}}}
    await store.put_state("run", EPOCHS, [both], once=None)
    again = {"reuse": {"limit": 1, "rollouts": [name for name, _ in record.rollouts]}}
    await store.commit_step(replace(record, step=2, policy_version=2, digest="other", context=again))
    said = await text_of(places, to("rollout", "run", record.rollouts[0][0]))
    assert "its agent is not trained in step 1; step 2 trained it, and step 1 is shown" in said


async def test_why_a_token_was_pushed_is_what_the_batch_has(places: Places) -> None:
    blocks = await shown(places, to("rollout", "run", "run/1/0/0"))
    found = reasons(blocks)
    store = next(iter((await places.stores()).values()))
    batch = ALGORITHM.batch(await load_groups(store, await all_rollouts(store, "run", split="train"), ["solver"]))
    sample = next(each for each in batch.samples if each.spans[0].rollout == "run/1/0/0")
    advantage, weight = float(sample.advantages[-1]), float(sample.weights[-1])
    assert found["reward"]["value"] == "1.0000"
    assert found["advantage"]["source"] == "grpo, credit identical"
    assert float(found["advantage"]["value"]) == pytest.approx(advantage, rel=1e-4)
    assert float(found["weight"]["value"]) == pytest.approx(weight, rel=1e-3)
    assert float(found["push"]["value"]) == pytest.approx(advantage * weight, rel=1e-3)
    assert all(found[name]["proved"] is True for name in ("reward", "group", "advantage", "weight", "push"))
    assert "is not stored; 2 % of the step's tokens were clipped" in found["clip"]["source"]
    assert found["clip"]["proved"] is found["mask"]["proved"] is None
    strip = blocks["TokenStrip"]
    assert strip["texts"] == ["word1", "word2", "word3", "word10", "word11"]
    assert strip["prompt"] == 3
    measures = {each["name"]: each for each in strip["measures"]}
    assert measures["advantage"]["values"][:3] == [None] * 3
    assert measures["advantage"]["values"][3:] == pytest.approx([advantage] * 2)
    assert measures["logprob"]["values"] == [None, None, None, -0.5, -0.5]
    assert measures["trained"]["values"] == [0, 0, 0, 1, 1]
    assert set(measures["entropy"]["values"]) == {None}
    assert "not recorded" in measures["entropy"]["missing"]
    assert "not recorded" in measures["sampler/trainer ratio"]["missing"]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rollouts SET reward = 0.9 WHERE id = 'run/1/0/0'",
        "UPDATE rollouts SET reward = 0.9 WHERE id = 'run/1/0/1'",  # a sibling: the advantage is another one as well
    ],
)
async def test_nothing_is_proved_after_a_stored_reward_was_changed(tmp_path: Path, places: Places, change: str) -> None:
    with sqlite3.connect(tmp_path / RUN / "lightning.db") as database:
        assert database.execute(change).rowcount == 1
    found = reasons(await shown(places, to("rollout", "run", "run/1/0/0")))
    assert found["advantage"]["proved"] is found["push"]["proved"] is False
    assert found["reward"]["proved"] is ("0/1'" in change)
    assert "advantages are not proved" in await text_of(places, to("rollout", "run", "run/1/0/0"))
    assert "not proved" in await text_of(places, to("group", "run", "run/1/0"))


async def test_what_is_not_trained_says_so(places: Places) -> None:
    critic = reasons(await shown(places, to("rollout", "run", "run/1/0/0", call=2)))
    assert critic["pushed"]["value"] == "no"
    assert "its agent is not trained" in critic["pushed"]["source"]
    equal = reasons(await shown(places, to("rollout", "run", "run/1/1/0", call=1)))
    assert "its group taught nothing: all rewards equal" in equal["pushed"]["source"]


async def test_an_algorithm_of_ones_own_is_not_proved(tmp_path: Path) -> None:
    async with opened(tmp_path / RUN) as store:
        await train(store, own_code=True)
    places = Places(str(tmp_path / RUN))
    found = reasons(await shown(places, to("rollout", "run", "run/1/0/0")))
    assert "only the user's own code" in found["pushed"]["source"]
    strip = (await shown(places, to("rollout", "run", "run/1/0/0")))["TokenStrip"]
    assert strip["texts"][-1] == "#11"  # there is no tokenizer
    await places.close()


async def test_keys_go_from_call_to_call(places: Places) -> None:
    address = to("rollout", "run", "run/1/0/0")
    first = await show(places, address)
    assert (first.previous, first.next) == ("", to("rollout", "run", "run/1/0/0", call=2))
    second = await show(places, first.next)
    assert (second.previous, second.next) == (to("rollout", "run", "run/1/0/0", call=1), "")
    timeline = (await shown(places, first.next))["Timeline"]
    assert timeline["lanes"] == ["solver", "critic"]
    assert [
        (each["lane"], each["name"], each["begin"], each["end"], each["selected"]) for each in timeline["spans"]
    ] == [
        (0, "call 1", 0.0, 2.0, False),
        (0, "form +0", 2.0, 2.0, False),  # the agent's clock is behind
        (1, "call 2", 2.0, 4.0, True),
        (1, "reward +1", 4.0, 4.0, False),
    ]


async def test_messages_are_those_that_were_sent(tmp_path: Path) -> None:
    @lightning.tool
    def search(query: str) -> dict[str, str]:
        return {"found": query.upper()}

    def agent(task: Task, llm: lightning.LLM) -> float:
        import openai

        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task.input}]
        lightning.state(left=2)
        made = client.chat.completions.create(model=llm.model, messages=messages).choices[0].message
        messages.append(made.model_dump(exclude_none=True))
        for asked in made.tool_calls or ():
            result = search(**json.loads(asked.function.arguments))
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": json.dumps(result)})
        lightning.reward(0.25, name="form")
        client.chat.completions.create(model=llm.model, messages=messages)
        return 0.5

    record = rollout(agent, Task(MARKUP), [ToolCall("search", '{"query": "cats"}'), "CATS"], adapters=("raw",))
    assert record.rollout.reward == 0.5, record.rollout.error
    store = await stored(record)
    places = Places(stores={"memory://": store})
    blocks = await shown(places, to("rollout", "run", record.rollout.id))
    messages = blocks["Messages"]["messages"]
    assert [(each["role"], each["made"]) for each in messages] == [
        ("state", False),
        ("system", False),
        ("user", False),
        ("assistant", True),
        ("reward", False),
        ("tool", False),
        ("assistant", True),
        ("reward", False),
    ]
    assert messages[0]["data"] == [["left", "2"]]
    assert messages[2]["text"] == MARKUP
    ((name, arguments),) = messages[3]["data"]
    assert (name, json.loads(arguments)) == ("search", {"query": "cats"})
    assert (messages[4]["text"], messages[4]["to"]) == ("+0.25: form", to("rollout", "run", record.rollout.id, call=1))
    assert (json.loads(messages[5]["text"]), messages[5]["tag"]) == ({"found": "CATS"}, "search")
    assert (messages[6]["text"], messages[6]["to"]) == ("CATS", to("rollout", "run", record.rollout.id, call=2))
    kinds = [each["kind"] for each in blocks["Timeline"]["spans"]]
    assert sorted(kinds) == ["call", "call", "reward", "reward", "state", "tool"]
    assert any(name.endswith("· tools") for name in blocks["Timeline"]["lanes"])
    said = await text_of(places, to("rollout", "run", record.rollout.id))
    assert "lightning.reward, for call 1" in said
    assert f"lightning replay {record.rollout.id}" in said
    commands = re.findall(r'"(lightning replay [^"]*)"', said)
    assert commands
    assert not any("--yes" in command for command in commands), "a @lightning.tool is answered from the record"
    # Without what was sent, as releases before have recorded it.
    bare = await stored(replace(record, transitions=tuple(replace(each, extras={}) for each in record.transitions)))
    old = Places(stores={"memory://": bare})
    blocks = await shown(old, to("rollout", "run", record.rollout.id))
    assert "not recorded" in blocks["Messages"]["messages"][1]["tag"]
    assert "some messages are not as they were sent" in await text_of(old, to("rollout", "run", record.rollout.id))


async def test_what_a_judge_said_stands_beside_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are those that were kept while training asked: the page asks nobody."""
    judge = lightning.Judge("Short is good.", model="judge-1", weight=0.5, cache=tmp_path / "judged.db")
    store = MemoryStore()
    await store.open()
    await train(store, algorithm=replace(ALGORITHM, credit=judge))
    opinion = Opinion(0.25, "Rollout 2 says it twice. <b>", 2, 3)
    monkeypatch.setattr(lightning.Judge, "opinions", lambda _, group: {"run/1/0/0": (opinion,)})
    places = Places(stores={"memory://": store})
    messages = (await shown(places, to("rollout", "run", "run/1/0/0")))["Messages"]["messages"]
    assert [each["role"] for each in messages[-2:]] == ["judge", "reward"]
    assert messages[-2]["text"] == opinion.text
    assert "judge-1: score 0.25 of 1, with weight 0.5; in this text the rollout is number 2 of 3" in messages[-2]["tag"]
    other = (await shown(places, to("rollout", "run", "run/1/0/1")))["Messages"]["messages"]
    assert "no answer of the judge is kept in" in other[-2]["text"]
    served = (await shown(Places(stores={SERVER: store}), to("rollout", "run", "run/1/0/0")))["Messages"]["messages"]
    assert served[-2]["text"] == "what the judge said is kept on the machine that trained the run"


async def test_what_a_grader_notes_stands_at_the_end(tmp_path: Path) -> None:
    def agent(task: Task, llm: lightning.LLM) -> float:
        import openai

        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task.input}])
        lightning.state(judge="the answer names no city", score=0.2)
        return 0.2

    record = rollout(agent, Task("Where?"), ["Here."])
    blocks = await shown(Places(stores={"memory://": await stored(record)}), to("rollout", "run", record.rollout.id))
    said = [(each["role"], each["text"], each["tag"]) for each in blocks["Messages"]["messages"]]
    assert said[2:] == [
        ("note", "judge: the answer names no city\nscore: 0.2", "after the last call"),
        ("reward", "0.500", "of the whole rollout"),
    ]


def test_texts_are_shortened_to_the_part_in_which_they_differ() -> None:
    same = "I look the invoices of March up, and then I "
    assert differing([f"{same}add them", f"{same}stop", "No."], 40) == ["… add them", "… stop", "No."]
    assert differing(["short a", "short b"], 40) == ["short a", "short b"]
    assert differing([same, same], 20) == [one_line(same, 20)] * 2
    assert differing(["x" * 100 + "1", "x" * 100 + "2"], 40) == ["… 1", "… 2"]


def test_a_task_is_told_without_json() -> None:
    assert task_text({"question": "What is it?"}) == "What is it?"
    assert task_text({"city": "Rome", "days": 3}) == "city: Rome; days: 3"
    assert (
        task_text([{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"text": "there"}]}]) == "Hi; there"
    )
    assert task_text("a\u202eb\x00 c\n\nd") == "a⟨202e⟩b⟨0⟩ c d"


@pytest.mark.parametrize(
    ("reward", "tone", "said"),
    [
        (0, "up", "its group has 0.000 to 1.000"),
        (1, "", "0.000 to 1.000"),
        (2, "down", "its group has 0.000 to 1.000"),
    ],
)
async def test_a_reward_is_seen_beside_those_of_its_group(places: Places, reward: int, tone: str, said: str) -> None:
    facts = (await shown(places, to("rollout", "run", f"run/1/0/{reward}")))["Facts"]["facts"]
    found = {each["name"]: each for each in facts}
    assert (found["reward"]["tone"], said in found["reward"]["detail"]) == (tone, True)
    assert (found["how it ended"]["value"], found["how it ended"]["tone"]) == ("no error", "")
    equal = (await shown(places, to("rollout", "run", "run/1/1/0")))["Facts"]["facts"][0]
    assert (equal["value"], equal["tone"], equal["detail"]) == ("0.250", "", "as all 3 rollouts of its group")


async def stored(record: Any) -> MemoryStore:
    store = MemoryStore()
    await store.open()
    made = record.rollout
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout(made.id, "run", made.task, "g")])
    await store.lease("run", "worker", limit=1)
    await store.append(record.transitions)
    outcome = Outcome(
        reward=0.5,
        tool_events=record.tool_events,
        step_rewards=record.step_rewards,
        step_states=record.step_states,
    )
    await store.complete(made.id, 1, outcome)
    return store


async def test_a_long_prompt_is_paged(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("t"), "g")])
    (lease,) = await store.lease("run", "worker", limit=1)
    made = call(lease.rollout, 0, "solver", list(range(19_000)), tuple(range(1_000)))
    await store.append([replace(made, logprobs=logprobs(np.linspace(-2, 0, 1_000).tolist()))])
    await store.complete("r", 1, Outcome(reward=1.0))
    places = Places(stores={"memory://": store})
    blocks = await shown(places, to("rollout", "run", "r"))
    strip = blocks["TokenStrip"]
    assert (strip["prompt"], strip["prompt_left_out"], len(strip["texts"])) == (512, 18_488, 1_512)
    whole = (await shown(places, to("rollout", "run", "r", prompt=19_000)))["TokenStrip"]
    assert (whole["prompt"], whole["prompt_left_out"], len(whole["texts"])) == (19_000, 0, 20_000)
    assert all(len(each["values"]) == 20_000 for each in whole["measures"])


async def test_what_is_not_whole_is_said(tmp_path: Path, places: Places) -> None:
    for address, said in {
        to("rollout", "run", "nobody"): "the run run has no rollout 'nobody'",
        to("rollout", "run"): "rollout/RUN/ROLLOUT",
        to("group", "run", "nobody"): "the run run has no group 'nobody'",
        to("rollout", "nowhere", "r"): "there is no run 'nowhere'",
        to("rollout", "run", "run/1/0/0", call=3): "has 2 calls, so there is no call 3",
        to("rollout", "run", "run/1/0/0", call=-1): "there is no call -1",
        to("rollout", "run", "run/1/0/0", attempt=2): "has 1 attempt, so there is no attempt 2",
        to("rollout", "run", "run/1/0/0", call="x"): "is no whole number",
    }.items():
        assert said in await text_of(places, address), address
    store = next(iter((await places.stores()).values()))
    await store.put_run(Run("going", "going"))
    await store.create_rollouts([Rollout(f"g/{index}", "going", Task("t"), "g", index=index) for index in range(3)])
    await store.lease("going", "worker", limit=2)
    await store.complete("g/1", 1, Outcome(fault=Fault.AGENT, error="ValueError: <b>no</b>"))
    waiting = await show(places, to("rollout", "going", "g/2"))
    assert waiting.live
    assert "it has not begun yet" in await text_of(places, to("rollout", "going", "g/2"))
    assert "it has made no call yet" in await text_of(places, to("rollout", "going", "g/0"))
    failed = await text_of(places, to("rollout", "going", "g/1"))
    assert "it failed: ValueError: <b>no</b>" in failed
    assert "it made no model call" in failed
    group = await shown(places, to("group", "going", "g"))
    assert "GroupTree" not in group
    assert group["page"].live


async def test_a_pruned_run_says_so(tmp_path: Path, places: Places) -> None:
    await places.close()
    url = sqlite_url(tmp_path / RUN / "lightning.db")
    async with opened(tmp_path / RUN) as store:
        keeper = keeper_of(url)
        request = PruneRequest(trained=True, unfinished=True)
        await carry_out(store, keeper, await plan(store, keeper, request))
    said = await text_of(places, to("rollout", "run", "run/1/0/0"))
    assert "`lightning db prune` removed them" in said
    assert "there is no tree" in await text_of(places, to("group", "run", "run/1/0"))


async def test_parallel_calls_and_tools_have_lanes_of_their_own(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("t"), "g")])
    (lease,) = await store.lease("run", "worker", limit=1)
    made = [call(lease.rollout, seq, "solver", [1], (2,)) for seq in range(3)]
    made = [
        replace(made[0], started_at=10.0, ended_at=20.0),
        replace(made[1], started_at=12.0, ended_at=15.0),
        replace(made[2], started_at=15.0, ended_at=18.0, response_ids=token_ids([3])),
    ]
    await store.append(made)
    await store.complete("r", 1, Outcome(reward=1.0))
    timeline = (await shown(Places(stores={"memory://": store}), to("rollout", "run", "r")))["Timeline"]
    assert timeline["lanes"] == ["solver", "solver (2)"]
    calls = [(each["name"], each["lane"]) for each in timeline["spans"] if each["kind"] == "call"]
    assert calls == [("call 1", 0), ("call 2", 1), ("call 3", 1)]
    assert timeline["seconds"] == 10.0


def test_a_command_lets_tools_run_again_and_names_them_where_it_could_not_run_otherwise() -> None:
    assert _consent([]) == ("", "")
    option, said = _consent(["search", "mail", "search"])
    assert (option, said.startswith("These tools run again: mail, search.")) == (" --yes", True)
