"""The page of tools answers which tool failed, for whom and with which arguments, and says what is not known."""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.store.memory import MemoryStore
from lightning.store.sqlite import SqliteStore
from lightning.trainer.context import mark_over
from lightning.types import Json, Rollout, Run, Status, Task, ToolEvent
from lightning_console.answers import Tools
from lightning_console.export import links_of
from lightning_console.places import Places
from lightning_console.queries import scan
from lightning_console.queries.scan import Scanned, ToolRun
from lightning_console.queries.tool_stats import (
    by_chance,
    failing_arguments,
    reward_beside,
    share_interval,
    tool_lines,
)
from lightning_console.router import Address
from lightning_record.exchanges import Flag

from tests.plugins.console.made_tools import MARKUP, OFFERED, asked, one, write
from tests.plugins.console.reading import places_of, shown, texts, to

TOOLS = "Tools, the most failed runs first"
ODD = "Invented tools, and tool calls that never ran"
USER = {"role": "user", "content": "do it"}


def facts(blocks: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {fact["name"]: (fact["value"], fact["detail"]) for fact in blocks["Facts"]["facts"]}


def notices(blocks: dict[str, Any]) -> str:
    return json.dumps(blocks.get("Notices", {}))


async def test_a_run_says_which_tool_failed_most_by_whom_and_with_which_arguments(store: MemoryStore) -> None:
    await write(store)
    blocks = await shown(places_of(store), "tools/run")
    first, second = texts(blocks[TOOLS])
    assert (first["tool"], first["called by"], first["runs"], first["failed"]) == ("divide", "solver", "32", "16")
    assert first["share"] == "50 %"
    assert first["arguments that fail"] == "by is 0: 16 of 16 different runs failed"
    assert first["most frequent error"].startswith("ZeroDivisionError: division by zero")
    assert (second["tool"], second["failed"], second["arguments that fail"]) == ("look", "0", "")
    assert facts(blocks)["failed most"] == (
        "divide",
        "called by solver: 16 of 32; by is 0: 16 of 16 different runs failed",
    )
    assert facts(blocks)["reward with a failed tool minus without"][0] == "-0.750"
    of_all = texts(blocks["Reward with and without a failed tool"])[0]
    assert (of_all["reward with it"], of_all["reward without"], of_all["rollouts with it"]) == ("0.250", "1.000", "16")
    assert of_all["how sure"].endswith("(95 %, over 8 tasks with both): not told apart from chance")
    assert not texts(blocks[ODD])
    assert blocks[ODD]["empty"].startswith(
        "in these rollouts the model called only tools and arguments that were offered"
    )
    assert blocks["page"].live is False


async def test_a_tool_opens_its_arguments_errors_and_rollouts_and_a_step_its_own(store: MemoryStore) -> None:
    await write(store)
    places = places_of(store)
    link = (await shown(places, "tools/run"))[TOOLS]["rows"][0][0]["to"]
    assert link == to("tools", "run", tool="divide", agent="solver")
    tool = await shown(places, link)
    assert [row["failed runs"] for row in texts(tool["Errors"])] == ["16"]
    assert texts(tool["Arguments of failed runs"])[0] == {
        "called by": "solver",
        "arguments": "by is 0",
        "finding": "tells failed runs from the others",
        "failed": "16 of 16",
    }
    failed = tool["Failed tool runs (16), the lowest reward first"]
    assert failed["rows"][0][0]["to"] == to("rollout", "run", "run/1/0/0", call=1)
    (course,) = tool["Failed tool runs over steps"]["series"]
    assert course["points"] == [[1, 0.5], [2, 0.5]]
    assert course["to"][0] == to("tools", "run", tool="divide", agent="solver", step=1, split="train")
    step = await shown(places, to("tools", "run", step=1))
    assert facts(step)["tool runs"][0] == "32"
    rollout = await shown(places, to("tools", "run", rollout="run/1/0/0"))
    assert facts(rollout)["tool runs"][0] == "2"
    assert texts(rollout[TOOLS])[0]["95 %"] == "–"


async def test_the_pages_of_a_run_a_step_and_a_rollout_have_the_links(store: MemoryStore) -> None:
    await write(store)
    places = places_of(store)
    for address, found in (
        ("run/run", "tools/run"),
        ("step/run/1", to("tools", "run", step=1, split="train")),
        ("step/run/1", to("search", "run", step=1, split="train")),
        (to("rollout", "run", "run/1/0/0"), to("tools", "run", rollout="run/1/0/0")),
    ):
        assert f'"{found}"' in json.dumps((await shown(places, address))["page"].to_json()), address


async def test_a_step_is_not_mixed_with_the_evaluation_after_it(store: MemoryStore) -> None:
    await write(store, groups=2)
    held_out = Rollout("run/val/1/0", "run", Task("held out"), "run/val/1", split="val", step=1)
    await store.create_rollouts([held_out])
    places = places_of(store)
    links = [
        link for link in links_of((await shown(places, "step/run/1"))["page"].to_json()) if link.startswith("tools/")
    ]
    assert facts(await shown(places, links[0]))["rollouts"] == ("4", "4 training")
    assert facts(await shown(places, "tools/run"))["rollouts"] == ("9", "8 training, 1 held-out")
    told = await Tools(places).tools("run", step=1)
    assert Address.parse(told["address"]).option("split") == "train"


async def test_invented_tools_and_arguments_and_calls_that_never_ran_are_named(store: MemoryStore) -> None:
    ran = asked("divide", {"a": 1, "by": 2, "round": True}, "ran")
    result = {"role": "tool", "tool_call_id": "ran", "content": "0.5"}
    calls = [
        ([USER], {"content": "", "tool_calls": [ran]}, OFFERED),
        (
            [USER, result],
            {"content": "", "tool_calls": [asked("teleport", "{", "t"), asked("divide", {}, "d")]},
            OFFERED,
        ),
        ([USER], {"content": f'<tool_call>{{"name": {MARKUP}'}, OFFERED),
    ]
    await one(store, "odd", calls)
    blocks = await shown(places_of(store), "tools/odd")
    found = {(row["trouble"], row["tool"]): (row["times"], row["most often"]) for row in texts(blocks[ODD])}
    assert found == {
        ("an argument that the tool does not have", "divide"): ("1", "round"),
        ("a tool that was not offered", "teleport"): ("1", "teleport({)"),
        ("a tool call without a result", "teleport"): ("1", "teleport({)"),
        ("a tool call without a result", "divide"): ("1", "divide({})"),
        ("a tool call inside the text of the answer", "–"): ("1", f'<tool_call>{{"name": {MARKUP}'),
    }
    (row,) = texts(blocks[TOOLS])
    assert (row["tool"], row["runs"], row["failed"], row["share"]) == ("divide", "1", "–", "–")
    assert "1 tool run was not reported" in notices(blocks)
    assert "not known" in facts(blocks)["failed"][1]


async def test_the_page_begins_with_the_tool_that_failed_most_and_the_calls_that_never_ran(store: MemoryStore) -> None:
    await write(store)
    (worst,) = (await shown(places_of(store), "tools/run"))["In short"]["notices"]
    assert worst["text"].startswith(
        "The tool divide failed most, run by the agent solver: 16 of its 32 runs (50 %, 95 %: "
    )
    assert worst["detail"].startswith("16 of 16: by is 0; every such run failed. The error: ")
    assert worst["detail"].endswith(" (16 of 16)")
    texts_ = [
        '{"name": "look", "arguments": {"q": beads"}} </tool_call>',
        '{"name": "look", "arg',
        "no JSON",
        "{]</tool_call>",
    ]
    await one(store, "odd", [([USER], {"content": f"<tool_call>{text}"}, OFFERED) for text in texts_])
    blocks = await shown(places_of(store), "tools/odd")
    (never,) = blocks["In short"]["notices"]
    assert never["text"].startswith("4 tool calls in 1 rollout could not run: broken JSON (")
    assert never["detail"].startswith("The model invented no tool and no argument. Called: look by solver (2), no tool")
    assert never["links"][0]["to"] == "search/odd?odd=yes"


async def test_a_tool_that_the_agent_says_is_unknown_counts_without_texts(store: MemoryStore) -> None:
    event = ToolEvent("ghost", "error", error="no such tool", kind="unknown_tool")
    await one(store, "bare", [], [event])
    blocks = await shown(places_of(store), "tools/bare")
    assert [(row["trouble"], row["tool"]) for row in texts(blocks[ODD])] == [("a tool that was not offered", "ghost")]


async def test_a_run_without_tools_says_so(store: MemoryStore) -> None:
    await one(store, "plain", [([USER], {"content": "no"}, None)])
    await one(store, "offered", [([USER], {"content": "no"}, OFFERED)])
    assert "no tool run is recorded" in notices(await shown(places_of(store), "tools/plain"))
    assert "tools were offered to the model, and it called none" in notices(
        await shown(places_of(store), "tools/offered")
    )
    assert "no rollout here ran the tool x" in notices(await shown(places_of(store), "tools/plain?tool=x"))
    await store.put_run(Run("empty", "empty"))
    assert "0 rollouts with 0 calls were read" in notices(await shown(places_of(store), "tools/empty"))


async def test_what_is_redacted_is_said(store: MemoryStore) -> None:
    await write(store, groups=2, flags=Flag.TOO_LARGE)
    blocks = await shown(places_of(store), "tools/run")
    assert "the texts of 16 calls are not recorded whole" in notices(blocks)
    assert blocks[ODD]["empty"].startswith("none is found in the requests and answers that are recorded whole")
    assert texts(blocks[TOOLS])[0]["failed"] == "4", "the agent's own report is there"


async def test_a_run_that_is_being_written_is_read_again(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_console.queries.memo.SHARE", 0.0)
    await write(store, groups=1, size=2, over=False)
    places = places_of(store)
    assert facts(await shown(places, "tools/run"))["tool runs"][0] == "4"
    await write(store, "run", groups=3, size=2, over=False)
    assert facts(await shown(places, "tools/run"))["tool runs"][0] == "12"


async def test_rollouts_that_wait_or_run_are_counted_with_the_calls_that_they_have(store: MemoryStore) -> None:
    await one(store, "run", [([USER], {"content": "", "tool_calls": [asked("divide", {}, "x")]}, OFFERED)], ended=False)
    await store.create_rollouts([Rollout("run/1/0/1", "run", Task("two"), "run/1/0", step=1, index=1)])
    blocks = await shown(places_of(store), "tools/run")
    assert "tools were offered to the model" in notices(blocks), "a call whose tool may still run is no odd one"
    assert "2 rollouts with 1 call were read" in notices(blocks)


@pytest.mark.parametrize("named", [{"response_id": "run/1/0/0-0"}, {}])
async def test_two_runs_of_one_answer_belong_to_its_two_tool_calls(store: MemoryStore, named: dict[str, str]) -> None:
    both = [asked("divide", {"a": n, "by": 1}, f"id{n}") for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"id{n}", "content": str(n)} for n in range(2)]
    events = [ToolEvent("divide", "ok", output=str(n), **named) for n in range(2)]
    calls = [([USER], {"content": "", "tool_calls": both}, OFFERED), ([USER, *results], {"content": "ok"}, OFFERED)]
    await one(store, "run", calls, events)
    blocks = await shown(places_of(store), "tools/run")
    assert [(row["runs"], row["failed"]) for row in texts(blocks[TOOLS])] == [("2", "0")]
    assert not texts(blocks[ODD])
    assert "not reported" not in notices(blocks)


async def test_a_step_is_read_alone_until_the_run_is_read(store: MemoryStore) -> None:
    scan._scans.clear()
    await write(store)
    places = places_of(store)
    await shown(places, to("tools", "run", step=1))
    assert [(each.part, len(each.rollouts), len(each.texts)) for each in own_scans(store)] == [(True, 16, 0)]
    await shown(places, "tools/run")
    assert facts(await shown(places, to("tools", "run", step=2)))["tool runs"][0] == "32"
    assert [each.part for each in own_scans(store)] == [True, False], "the run's own scan has the step, too"
    forgotten = own_scans(store)[-1]
    scan._scans.remove(forgotten)
    assert forgotten.number_of("a text that is new") is None, "it keeps nothing that is not counted"


async def test_rollouts_and_tool_runs_are_bounded_and_the_page_says_so(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan._scans.clear()
    monkeypatch.setattr(scan, "MOST_KEPT", 30_000)
    await write(store)
    blocks = await shown(places_of(store), "tools/run")
    (made,) = own_scans(store)
    assert 0 < len(made.rollouts) < 32
    assert made.kept == sum(each.size for each in made.rollouts.values()) <= 30_000
    assert f"only {len(made.rollouts)} of 32 rollouts were read" in notices(blocks)
    assert not blocks["page"].live, "it does not try again for ever"


async def test_reading_rests_beside_a_run_that_goes_on_and_ends_once_it_is_forgotten(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan._scans.clear()
    monkeypatch.setattr("lightning_console.queries.memo.SHARE", 0.0)
    await write(store, groups=4, over=False)
    rests: list[float] = []
    kept = scan.Scan.extend

    async def seen(self: scan.Scan, *given: Any) -> None:
        rests.append(given[-1])
        await kept(self, *given)

    monkeypatch.setattr(scan.Scan, "extend", seen)
    places = places_of(store)
    places.patience = 60.0
    await shown(places, "tools/run")
    await mark_over(store, "run", True)
    await shown(places, "tools/run")
    assert rests == [scan.REST, 0.0]
    lost = scan.Scan(store, "forgotten")
    await kept(lost, await places.find("run"), None, "", 0.0)
    assert (lost.rollouts, lost.whole, lost.full) == ({}, False, False)


async def test_a_rollout_that_a_scan_does_not_have_is_read_by_itself(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_console.queries.memo.SHARE", 1e9)
    await write(store, groups=1, size=2, over=False)
    places = places_of(store)
    await shown(places, "tools/run")
    await write(store, groups=2, size=2, over=False)
    new = facts(await shown(places, to("tools", "run", rollout="run/2/1/0")))
    assert new["tool runs"][0] == "2", "it came after the run was read"
    assert "has no rollout 'nope'" in notices(await shown(places, to("tools", "run", rollout="nope")))


async def test_rollouts_that_came_after_the_last_reading_are_counted(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_console.queries.memo.SHARE", 1e9)
    await write(store, groups=1, size=2, over=False)
    places = places_of(store)
    await shown(places, "tools/run")
    await store.create_rollouts([Rollout("run/9/0/0", "run", Task("new"), "run/9/0", step=9)])
    assert "1 newer rollouts are not read yet" in notices(await shown(places, "tools/run"))


def own_scans(store: MemoryStore) -> list[scan.Scan]:
    return [each for each in scan._scans if each.store() is store]


async def test_looks_at_single_rollouts_do_not_push_out_what_was_read_of_a_run(store: MemoryStore) -> None:
    scan._scans.clear()
    await write(store, "first", groups=1)
    await write(store, "second", groups=4)
    await shown(places_of(store), "tools/first")
    for rollout in range(2 * scan.MOST_SCANS):
        await shown(places_of(store), to("tools", "second", rollout=f"second/1/{rollout // 4}/{rollout % 4}"))
    assert [each.part for each in own_scans(store)] == [False] + [True] * (scan.MOST_SCANS - 1)


async def test_hostile_names_and_values_stay_short(store: MemoryStore) -> None:
    long = "x" * 100_000 + MARKUP
    event = ToolEvent(
        long, "error", arguments={f"{long}{n}": long for n in range(40)}, error=f"{long}\nValueError: {long}"
    )
    await one(
        store, "run", [([USER], {"content": long, "tool_calls": [asked(long, {long: long}, "a")]}, OFFERED)], [event]
    )
    for address in ("tools/run", to("search", "run", q="x<img")):
        assert len(json.dumps((await shown(places_of(store), address))["page"].to_json())) < 40_000


async def test_a_database_of_another_schema_says_so(tmp_path: Path) -> None:
    made = SqliteStore(tmp_path / "lightning.db")
    await made.open()
    await write(made, groups=1, size=2)
    await made.close()
    with sqlite3.connect(tmp_path / "lightning.db") as database:
        database.execute("UPDATE schema_version SET version = 6")
    places = Places(str(tmp_path / "lightning.db"))
    for address in ("tools/run", "search/run?q=x"):
        assert "schema 6" in notices(await shown(places, address))
    await places.close()


async def test_bad_addresses_name_the_culprit(store: MemoryStore) -> None:
    await write(store, groups=1, size=2)
    assert "no whole number" in notices(await shown(places_of(store), "tools/run?step=x"))
    assert "has no rollout" in notices(await shown(places_of(store), "tools/run?rollout=run/9"))
    assert "names no run" in notices(await shown(places_of(store), "tools"))


# statistics -----------------------------------------------------------------------------------------------------------------
def rollout_with(task: str, arguments: Json, failed: bool, said: str = "") -> tuple[Scanned, ToolRun]:
    run = ToolRun("t", "a", "error" if failed else "ok", 1, arguments, "it broke" if failed else "", said)  # type: ignore[arg-type]
    made = Scanned(
        f"{task}/{arguments}/{said}", task, task, task, "train", 1, Status.SUCCEEDED, None, 0.0 if failed else 1.0, 1,
        (run,), (), False, scan.array("i"), {},
    )  # fmt: skip
    return made, run


def test_an_interval_of_a_share_covers_the_truth_when_rollouts_of_a_task_fail_alike() -> None:
    dice = random.Random(1)
    covered = naive = 0
    for _ in range(400):
        pairs = [(8 if dice.random() < 0.3 else 0, 8) for _ in range(30)]
        low, high = share_interval(pairs) or (1.0, 0.0)
        covered += low <= 0.3 <= high
        value = sum(failed for failed, _ in pairs) / 240
        naive += abs(value - 0.3) <= 1.96 * (value * (1 - value) / 240) ** 0.5
    assert covered >= 0.92 * 400
    assert naive <= 0.6 * 400, "the runs are not independent: counting each would not cover it"
    assert share_interval([(1, 8)]) is None
    assert share_interval([(0, 8)] * 5) == pytest.approx((0.0, 0.434), abs=1e-3)


def test_an_argument_is_named_only_if_chance_does_not_explain_it() -> None:
    dice = random.Random(2)
    by_dice = [rollout_with(f"t{n}", {"q": dice.choice("abcdefgh"), "n": n}, dice.random() < 0.5) for n in range(200)]
    assert failing_arguments(by_dice).telling == ()
    assert "no value of an argument tells" in failing_arguments(by_dice).said
    words = [rollout_with(f"t{n}", {"q": f"word{n} {'sqrt' if n % 3 == 0 else 'sum'}"}, n % 3 == 0) for n in range(60)]
    assert failing_arguments(words).telling[0].text == "q has 'sqrt'"
    missing = [rollout_with(f"t{n}", {"q": 1, **({"unit": "km"} if n % 2 else {})}, n % 2 == 0) for n in range(40)]
    assert "unit is missing" in [each.text for each in failing_arguments(missing).telling]


def test_the_limit_above_or_below_which_a_tool_fails_is_named() -> None:
    large = [rollout_with(f"t{n}", {"sum": f"{n} + {n % 7}"}, n > 40) for n in range(10, 80, 2)]
    assert [each.text for each in failing_arguments(large).telling] == ["sum has a number above 40"]
    small = [rollout_with(f"t{n}", {"at": n / 2, "huge": 10**400, "flag": True}, n < 5) for n in range(-30, 30)]
    assert [each.text for each in failing_arguments(small).telling][:1] == ["at is below 2.5"]
    dice = random.Random(3)
    by_dice = [rollout_with(f"t{n}", {"q": f"{dice.random()} m", "n": n}, dice.random() < 0.5) for n in range(200)]
    assert failing_arguments(by_dice).telling == ()


def test_runs_of_one_task_with_the_same_arguments_prove_nothing_more() -> None:
    same = [rollout_with("t", {"q": "a"}, True) for _ in range(50)] + [rollout_with("t", {"q": "b"}, False)] * 50
    found = failing_arguments(same)
    assert found.telling == ()
    assert found.frequent == (('{"q": "a"}', 50),)


def test_answers_stand_in_for_arguments_that_are_not_recorded() -> None:
    runs = [
        rollout_with(f"t{n}", None if n % 2 else {"q": n}, n % 2 == 1, f"{n} = {n}" if n % 2 else f"{n} + 1")
        for n in range(40)
    ]
    found = failing_arguments(runs)
    assert found.unknown == 20
    assert found.telling[0].text in ("the answer has '='", "the answer has '+'")
    assert (
        failing_arguments([rollout_with("t", None, True)]).said == "the arguments of its failed runs are not recorded"
    )
    assert failing_arguments([rollout_with("t", {"q": 1}, True)]).said.startswith(
        "every run with known arguments failed"
    )


def test_fishers_test_is_exact() -> None:
    assert by_chance(3, 3, 3, 6) == pytest.approx(1 / 20)
    assert by_chance(0, 3, 3, 6) == pytest.approx(1.0)


def test_rewards_are_compared_within_groups_alone() -> None:
    easy = [rollout_with("easy", {"n": n}, False)[0] for n in range(4)]
    hard = [rollout_with("hard", {"n": n}, True)[0] for n in range(4)]
    apart = reward_beside([*easy, *hard], {each.id for each in hard})
    assert (apart.mean_with, apart.mean_without, apart.difference, apart.interval) == (0.0, 1.0, None, None)
    assert not apart.told_apart
    branch = replace(rollout_with("easy", {}, True)[0], id="branch", is_branch=True)
    assert reward_beside([*easy, branch], {"branch"}).with_ == 0, "a branch begins where somebody chose"
    both = [rollout_with(f"t{n}", {"n": n}, bad)[0] for n in range(20) for bad in (True, False)]
    within = reward_beside(
        [replace(each, id=f"{each.group}/{each.score}") for each in both], {f"t{n}/0.0" for n in range(20)}
    )
    assert (within.tasks, within.difference, within.told_apart) == (20, -1.0, True)


def test_a_line_counts_blocked_runs_apart() -> None:
    made, run = rollout_with("t", {}, False)
    (line,) = tool_lines([(made, run), (made, ToolRun("t", "a", "blocked", 1, {}))])
    assert (line.runs, line.known, line.blocked, line.share) == (2, 1, 1, 0.0)
