"""The pages of runs: what each says of a folder as people have one, with runs that are whole, half written and broken."""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.trainer.context import Epoch, keep_epochs, mark_over
from lightning.types import Run
from lightning_console.pages import rewards
from lightning_console.pages import run as run_page
from lightning_console.pages.runs import _alarms
from lightning_console.pages.words import NONE, part_text
from lightning_console.places import Places, key_of
from lightning_console.queries.curves import Curves
from lightning_console.queries.runs import chosen_settings, list_runs, settings_and_tasks
from lightning_console.router import Address, show
from lightning_db.keeper import keeper_of
from lightning_db.prune import PruneRequest, carry_out, plan
from lightning_debug.advise import Advice, Alarm
from lightning_debug.diagnosis import Diagnosis
from lightning_debug.rules import FOLLOWS_LENGTH

from tests.plugins.console.made_folder import MARKUP, STEPS, in_store, make_folder, plot
from tests.plugins.debug.made_runs import Maker, Plot, State


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("runs"))


@pytest.fixture
async def places(folder: Path) -> AsyncIterator[Places]:
    made = Places(str(folder))
    yield made
    await made.close()


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A folder of its own with the run `one`."""
    shutil.copytree(folder / "one", tmp_path / "runs" / "one")
    return tmp_path / "runs"


async def blocks(places: Places, address: str) -> list[dict[str, Any]]:
    page = (await show(places, address)).to_json()
    json.dumps(page, allow_nan=False)
    return page["blocks"]  # type: ignore[no-any-return]


async def shown(places: Places, address: str) -> str:
    """All texts of a page, in order."""
    return json.dumps((await show(places, address)).to_json(), ensure_ascii=False)


async def table(places: Places, address: str, title: str = "") -> list[dict[str, dict[str, Any]]]:
    """The rows of a page's table, by the names of its columns."""
    (found,) = [
        block for block in await blocks(places, address) if block["component"] == "Table" and block["title"] == title
    ]
    names = [column["name"] for column in found["value"]["columns"]]
    return [dict(zip(names, row, strict=True)) for row in found["value"]["rows"]]


async def chart(places: Places, address: str, title: str) -> dict[str, Any]:
    (found,) = [block for block in await blocks(places, address) if block["title"] == title]
    return found["value"]  # type: ignore[no-any-return]


async def fact(places: Places, address: str, name: str) -> dict[str, Any]:
    facts = [
        each
        for block in await blocks(places, address)
        if block["component"] == "Facts"
        for each in block["value"]["facts"]
    ]
    return next(each for each in facts if each["name"] == name)


# runs --------------------------------------------------------------------------------------------------------------------
async def test_every_run_is_listed_with_its_state_and_the_stores_that_cannot_be_read_with_their_reason(
    places: Places,
) -> None:
    rows = {row["run"]["text"]: row for row in await table(places, "runs")}
    assert {name: row["state"]["text"] for name, row in rows.items()} == {
        "one": "finished", "two": "finished", "searched": "finished", "half": "stopped", "broke": "failed", "on": "running",
        f"{MARKUP},~%": "stopped",
    }  # fmt: skip
    assert "all 3 rollouts of step 1 failed" in rows["broke"]["state"]["hint"]
    assert rows["one"]["run"]["to"] == "run/one"
    assert len(rows["one"]["course"]["spark"]) == STEPS
    assert rows["one"]["step"]["to"] == f"step/one/{STEPS}"
    assert "→" in rows["one"]["held-out"]["text"]
    assert rows["half"]["held-out"]["text"] == "no held-out tasks"
    (bad, *_) = await blocks(places, "runs")
    said = {notice["text"]: notice["detail"] for notice in bad["value"]["notices"]}
    assert len(said) == 2
    assert any("old" in name and "has schema 1" in why for name, why in said.items())
    assert any("torn" in name and "corrupt" in why for name, why in said.items())
    assert (await show(places, "runs")).live, "one of them goes on"


async def test_filters_and_orders_of_the_list(places: Places) -> None:
    async def names(address: str) -> list[str]:
        return [row["run"]["text"] for row in await table(places, address)]

    assert set(await names("runs?state=finished")) == {"one", "two", "searched"}
    assert await names("runs?q=QWEN3+grpo&sort=run") == ["one", "two"]
    assert await names("runs?q=nothing+has+this") == []
    assert (await names("runs?sort=-failed"))[:2] in (["one", "two"], ["two", "one"])
    assert (await names("runs?sort=-reward"))[2:] == (await names("runs?sort=reward"))[2:], "what has none comes last"
    assert "change the filters" in await shown(places, "runs?q=nothing")
    assert "no whole number" in await shown(places, "runs?cursor=x")


async def test_a_long_list_has_pages(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_console.pages.runs.ROWS", 3)
    first = await show(places, "runs?sort=run")
    assert (first.previous, first.next) == ("", "runs?sort=run&cursor=3")
    second = await show(places, first.next)
    assert (second.previous, second.next) == ("runs?sort=run", "runs?sort=run&cursor=6")
    rows = [
        row["run"]["text"] for page in (first.address, first.next, second.next) for row in await table(places, page)
    ]
    assert len(rows) == len(set(rows)) == 7


async def test_marked_rows_open_compare(places: Places) -> None:
    found = [block for block in await blocks(places, "runs?runs=one,two") if block["component"] == "Table"]
    assert found[0]["value"]["selected"] == ["one", "two"]
    links = [
        link["to"]
        for block in await blocks(places, "runs?runs=one,two")
        if block["component"] == "Notices"
        for notice in block["value"]["notices"]
        for link in notice["links"]
    ]
    assert "compare?runs=one%2Ctwo" in links


async def test_a_name_with_markup_is_text_and_its_links_lead_to_it(places: Places) -> None:
    (row,) = [row for row in await table(places, "runs") if MARKUP in row["run"]["text"]]
    page = await show(places, row["run"]["to"])
    assert page.title == f"{MARKUP},~%"
    keys = [block["value"]["keys"] for block in await blocks(places, "runs") if block["component"] == "Table"]
    assert not any("," in key for key in keys[0])


async def test_runs_of_one_name_in_two_stores_are_told_apart(copied: Path) -> None:
    shutil.copytree(copied / "one", copied / "again")
    places = Places(str(copied))
    rows = await table(places, "runs")
    addresses = {row["run"]["to"] for row in rows}
    assert {row["run"]["text"] for row in rows} == {"one in one", "one in again"}
    assert len(addresses) == 2
    urls = {(await places.find(Address.parse(address).about[0])).url for address in addresses}
    assert len(urls) == 2
    await places.close()


async def test_an_empty_place_says_how_to_make_a_run(tmp_path: Path) -> None:
    places = Places(str(tmp_path))
    assert "lightning demo" in await shown(places, "runs")
    assert "neither a folder nor a database" in await shown(Places(str(tmp_path / "no")), "runs")


async def test_the_list_is_read_again_only_where_something_can_have_changed(copied: Path) -> None:
    places = Places(str(copied))
    first = await list_runs(places)
    (store,) = (await places.stores()).values()
    calls: list[str] = []
    for name in (
        "list_runs",
        "get_state",
        "steps",
        "get_run",
        "count_rollouts",
        "last_step",
        "list_rollouts",
        "metrics",
    ):
        real = getattr(store, name)

        def counted(*args: Any, _real: Any = real, _name: str = name, **named: Any) -> Any:
            calls.append(_name)
            return _real(*args, **named)

        setattr(store, name, counted)
    assert await list_runs(places) == first
    assert calls == []
    await mark_over(store, "one", False)  # it is resumed
    assert (await list_runs(places)).lines[0].state.name != "finished"
    await places.close()


@contextmanager
def held(run: Path) -> Iterator[None]:
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def test_a_run_is_running_while_a_trainer_holds_its_folder_and_stopped_when_it_does_not(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await in_store(copied / "one", lambda store: mark_over(store, "one", False))
    real = time.time()
    monkeypatch.setattr("lightning_console.queries.runs.time.time", lambda: real + 10_000)
    with held(copied / "one"):
        assert "a trainer holds its folder" in await shown(Places(str(copied)), "run/one")
    page = await show(Places(str(copied)), "run/one")
    text = await shown(Places(str(copied)), "run/one")
    assert "it stopped after step 4: it has written nothing for 2.8 h" in text
    assert "--resume" in text
    assert not page.live
    monkeypatch.setattr("lightning_console.queries.runs.time.time", lambda: real + 30)
    assert "running: it committed a step" in await shown(Places(str(copied)), "run/one")


async def test_a_store_that_goes_away_is_named_and_hides_no_other(folder: Path) -> None:
    opened = Places(str(folder))
    stores = {url.replace("sqlite", "postgresql"): store for url, store in (await opened.stores()).items()}
    stores = {url: store for url, store in stores.items() if "/one/" in url or "/two/" in url}
    places = Places(stores=stores)
    assert len((await list_runs(places)).lines) == 2
    await next(store for url, store in stores.items() if "/one/" in url).close()
    found = await list_runs(places)
    assert [line.id for line in found.lines] == ["two"]
    (why,) = found.unreadable.values()
    assert "not open" in why
    assert "not open" in await shown(places, "run/one")
    await opened.close()


async def test_a_list_that_takes_long_is_shown_as_far_as_it_is_read(copied: Path) -> None:
    places = Places(str(copied), patience=0.0)
    assert (await show(places, "runs")).live
    for _ in range(200):
        await asyncio.sleep(0.05)
        if not (await show(places, "runs")).live:
            break
    (row,) = await table(places, "runs")
    assert row["state"]["text"] == "finished"
    await places.close()


# one run -----------------------------------------------------------------------------------------------------------------
async def test_a_run_begins_with_what_is_wrong_and_its_points_lead_to_steps(places: Places) -> None:
    titles = [block["title"] for block in await blocks(places, "run/one")]
    assert titles[:4] == ["", "Alarms", "Advice", "Figures"]
    reward = await chart(places, "run/one", "Reward")
    assert [series["name"] for series in reward["series"]] == [
        "failed as 0",
        "those that succeeded",
        "brief",
        "correct",
    ]
    assert reward["series"][0]["to"] == [f"step/one/{step}" for step in range(1, STEPS + 1)]
    held_out = await chart(places, "run/one", "Held-out tasks")
    assert [point[0] for point in held_out["series"][0]["points"]] == [0, 2, 4]
    assert all(low < value < high for _, value, low, high in held_out["series"][0]["points"])
    assert (await fact(places, "run/one", "held-out"))["to"] == "versions?of=one%400%2Cone%404"
    assert (await fact(places, "run/one", "steps"))["value"] == str(STEPS)
    text = await shown(places, "run/one")
    assert "search texts, cut-off answers, calls that could not run" in text
    assert "open rollout (such as 2/4/7), then Enter" in text
    assert f"pushed/one/{STEPS}" in text
    assert "pushed/one/1" in text, "each step's strongest pushes are one click away"
    assert "Where time goes" in text
    for command in ("advise", "profile", "audit", "replay"):
        assert f"lightning {command} " in text
    page = await show(places, "run/one")
    assert (page.live, page.next) == (False, f"step/one/{STEPS}")


async def test_alarms_lead_to_their_evidence() -> None:
    store = plugins().store("memory://")
    await store.open()
    collapses = Plot(
        "bad", lambda step: State(skill=2.0 if step < 6 else -6.0), 3, steps=14, tasks=12, held_out=0, tasks_per_step=3,
        group_size=4, eval_every=99,
    )  # fmt: skip
    maker = Maker(store, collapses)

    async def nothing(step: int) -> None:
        """There are no held-out tasks."""

    maker.evaluate = nothing  # type: ignore[method-assign]
    await maker.write()
    places = Places(stores={"memory://": store})
    (alarms,) = [block for block in await blocks(places, "run/bad") if block["title"] == "Alarms"]
    first = alarms["value"]["notices"][0]
    assert first["tone"] == "bad"
    assert "collapsed" in first["text"]
    assert re.search(r"first seen after \d+ steps", first["detail"])
    pages = {link["to"].partition("/")[0] for link in first["links"]}
    assert pages == {"step", "rollout"}
    (row,) = await table(places, "runs")
    assert row["alarms"]["tone"] == "bad"
    assert re.match(r"\d+ now", row["alarms"]["text"])
    assert "collapsed" in row["alarms"]["text"]
    (line,) = (await list_runs(places)).lines
    over = _alarms(replace(line, alarms=(replace(line.alarms[0], still=False),)))
    assert (over.tone, over.text.partition(":")[0]) == ("", "1 earlier"), "an alarm that is over is listed, too"
    assert _alarms(replace(line, alarms=(), looked=False)).text == "being read …", (
        "no alarm is known, which is not none"
    )
    assert row["held-out"]["text"] == "no held-out tasks"
    assert "no held-out tasks" in (await fact(places, "run/bad", "held-out"))["detail"]
    assert (await chart(places, "run/bad", "Held-out tasks"))["empty"] == "this run has no held-out tasks"
    assert "not in the run's folder" in await shown(places, "run/bad")


async def test_a_run_says_what_it_lacks(places: Places) -> None:
    assert "no step is committed yet" in await shown(places, "run/half")
    assert "it trained nothing" in await shown(places, "run/searched")
    assert (await fact(places, "run/searched", "held-out"))["value"] == "0.500"
    assert "failed: all 3 rollouts" in await shown(places, "run/broke")
    assert (await show(places, "run/on")).live
    for address, words in {
        "run/nobody": "there is no run 'nobody'",
        "run/old": "has schema 1",
        "run": "names no run",
        "runs/x/y": "Runs",
        "step/one/99": "has the steps 1 to 4",
        "step/half/1": "has no step yet",
        "step/one/x": "names no step",
        "rewards/half": "no training rollout of this run has a reward",
        "compare?runs=one,nobody": "nobody is left out",
        "nothing": "there is no page",
    }.items():
        assert words in await shown(places, address), address


async def test_a_run_is_followed_while_it_goes_on() -> None:
    store = plugins().store("memory://")
    await store.open()
    maker = Maker(store, plot("live", 2))
    await store.put_run(Run("live", "live", {"model": "m", "tasks": {"train": [], "val": ["t"]}}, time.time()))
    places = Places(stores={"memory://": store})
    assert "no step is committed yet" in await shown(places, "run/live")
    for step in range(1, 4):
        await maker.step(step)
        for _ in range(100):  # an answer of just before may be shown for as long as twenty times what it took
            page = await show(places, "run/live")
            if page.next == f"step/live/{step}":
                break
            await asyncio.sleep(0.05)
        assert page.live
        assert (await fact(places, "run/live", "steps"))["value"] == str(step)
        assert len((await chart(places, "run/live", "Reward"))["series"][0]["points"]) == step
        assert (await table(places, "runs"))[0]["step"]["text"] == str(step)
    await mark_over(store, "live", True)
    assert not (await show(places, "run/live")).live
    assert (await table(places, "runs"))[0]["state"]["text"] == "finished"


def test_the_policy_servers_of_a_run_that_has_several() -> None:
    last = {"loss": 0.1, "server_0/version": 4.0, "server_0/requests": 12.0, "server_1/version": 3.0}
    last |= {"server_1/requests": 2.0, "server_1/prefix_hit_share": 0.75}

    def told(metrics: dict[str, float]) -> list[list[str]]:
        curves = Curves(*cast("Any", ({}, (1,), (metrics,), (), (), (), (), {}, {})))
        return [[cell.text for cell in row] for table in run_page._servers(curves) for row in table.rows]

    assert told(last) == [["0", "4", "12", NONE], ["1", "3", "2", "75 %"]]
    assert told({"loss": 0.1}) == []


async def test_settings_that_changed_are_marks_of_the_curves(copied: Path) -> None:
    async def change(store: Any) -> None:
        run = await store.get_run("one")
        config = json.loads(json.dumps(run.config))
        config["config"]["engine"]["lr"] = 5e-6
        await keep_epochs(store, run, [Epoch(0, 1, run.config), Epoch(1, 3, config, 5.0)])

    await in_store(copied / "one", change)
    reward = await chart(Places(str(copied)), "run/one", "Reward")
    ((at, text),) = reward["marks"]
    assert at == 3.0
    assert "engine.lr 1e-06 → 5e-06" in text


async def test_what_takes_long_is_not_waited_for_and_is_there_the_next_time(copied: Path) -> None:
    places = Places(str(copied), patience=0.0)
    page = await show(places, "run/one")
    assert page.live
    assert "the rules look at the run" in json.dumps(page.to_json(), ensure_ascii=False)
    for _ in range(200):
        await asyncio.sleep(0.05)
        page = await show(places, "run/one")
        if not page.live:
            break
    assert "no alarm" in json.dumps(page.to_json())
    await places.close()


async def test_a_pruned_run_says_so_and_shows_what_is_left(copied: Path) -> None:
    async def prune(store: Any) -> None:
        keeper = keeper_of(sqlite_url(copied / "one" / "lightning.db"))
        await carry_out(store, keeper, await plan(store, keeper, PruneRequest(trained=True, unfinished=True)))

    await in_store(copied / "one", prune)
    places = Places(str(copied))
    (row,) = await table(places, "runs")
    assert row["state"]["text"] == "finished, pruned"
    text = await shown(places, "run/one")
    assert "calls of" in text
    assert "were removed" in text
    assert "prune" in text
    step = await shown(places, "step/one/2")
    assert "its calls were removed" in step
    assert (await table(places, "step/one/2", "Groups"))[0]["rewards"]["text"]
    assert "are not in the store" in await shown(places, "rewards/one")


# compare -----------------------------------------------------------------------------------------------------------------
async def test_runs_side_by_side_and_the_setting_that_differs(places: Places) -> None:
    rows = await table(places, "compare?runs=one,two", "Settings that differ")
    assert [[cell["text"] for cell in row.values()] for row in rows] == [["engine.lr", "1e-06", "2e-06"]]
    for axis in ("step", "tokens", "time"):
        drawn = await chart(places, f"compare?runs=one,two&x={axis}", "Held-out tasks")
        xs = [point[0] for point in drawn["series"][0]["points"]]
        assert xs == sorted(xs)
        assert len(xs) == 3
    drawn = await chart(places, "compare?runs=one,two&measure=entropy", "entropy (nats)")
    assert [series["name"] for series in drawn["series"]] == ["one", "two"]
    assert "versions?of=one%404%2Ctwo%404" in await shown(places, "compare?runs=one,two")
    assert "no run is marked" in await shown(places, "compare")


async def test_runs_that_differ_in_their_seed_alone_are_one_group(copied: Path) -> None:
    shutil.copytree(copied / "one", copied / "seed")
    with sqlite3.connect(copied / "seed" / "lightning.db") as database:
        (text,) = database.execute("SELECT config FROM runs").fetchone()
        config = json.loads(text)
        config["seed"] = config["config"]["trainer"]["seed"] = 7
        database.execute("UPDATE runs SET id = 'seed', config = ?", (json.dumps(config),))
        for name in ("rollouts", "steps", "metrics", "state"):
            database.execute(f"UPDATE {name} SET run = 'seed' WHERE run = 'one'")
        database.execute("UPDATE metrics SET value = value + 0.5 WHERE name = 'reward_with_failures'")
    places = Places(str(copied))
    drawn = await chart(places, "compare?runs=one,seed", "reward, failed rollouts as 0")
    (group,) = drawn["series"]
    assert group["name"].startswith("1: 2 seeds")
    for _, mean, low, high in group["points"]:
        assert (mean - low, high - mean) == (pytest.approx(0.25), pytest.approx(0.25))
    (row,) = await table(places, "compare?runs=one,seed", "Settings that differ")
    assert row["setting"]["text"] == "seed"
    assert row["seed"]["text"] == "7"
    with sqlite3.connect(copied / "seed" / "lightning.db") as database:
        database.execute("UPDATE runs SET config = ?", (text,))
    await places.close()
    places = Places(str(copied))
    (again,) = (await chart(places, "compare?runs=one,seed", "reward, failed rollouts as 0"))["series"]
    assert again["name"].startswith("1: 2 runs like")
    await places.close()


# step and rewards --------------------------------------------------------------------------------------------------------
async def test_a_step_shows_its_groups_its_rollouts_and_what_failed(places: Places) -> None:
    rows = await table(places, "step/one/2", "Groups")
    assert len(rows) == 3
    assert rows[0]["task"]["to"].startswith("group/one/one%2F2%2F")
    spreads = [float(row["spread"]["text"]) for row in rows if row["taught"]["text"] == "yes"]
    assert spreads == sorted(spreads, reverse=True)
    for axis in ("tokens", "turns", "advantage", "seconds"):
        cloud = next(b for b in await blocks(places, f"step/one/2?x={axis}") if b["component"] == "Chart")["value"]
        points = [pair for series in cloud["series"] for pair in zip(series["points"], series["to"], strict=True)]
        assert points
        assert all(to.startswith("rollout/one/") for _, to in points)
    page = await show(places, "step/one/2")
    assert (page.previous, page.next) == ("step/one/1", "step/one/3")
    assert (await show(places, f"step/one/{STEPS}")).next == ""
    (failed,) = [block for block in await blocks(places, "step/one/2") if block["title"] == "Failed rollouts"]
    with sqlite3.connect(Path(places.where, "one", "lightning.db")) as database:
        asked = "SELECT COUNT(*) FROM rollouts WHERE run = 'one' AND id LIKE 'one/2/%' AND reward IS NULL"
        (count,) = database.execute(asked).fetchone()
    database.close()
    assert sum(int(notice["text"].split()[0]) for notice in failed["value"]["notices"]) == count > 0


async def test_advantages_of_a_step_are_those_that_were_trained(places: Places) -> None:
    cloud = next(b for b in await blocks(places, "step/one/2?x=advantage") if b["component"] == "Chart")["value"]
    of_group: dict[str, list[tuple[float, float]]] = {}
    for series in cloud["series"]:
        for (advantage, reward), to in zip(series["points"], series["to"], strict=True):
            of_group.setdefault(to.rpartition("%2F")[0], []).append((reward, advantage))
    for members in of_group.values():
        ordered = [advantage for _, advantage in sorted(members)]
        assert ordered == sorted(ordered), "who earned more is pushed more"
        assert min(ordered) <= 0 <= max(ordered)


async def test_groups_that_taught_nothing_are_named_with_the_reason(copied: Path) -> None:
    with sqlite3.connect(copied / "one" / "lightning.db") as database:
        database.execute(
            "UPDATE rollouts SET reward = 0.5, rewards = '{}' WHERE group_id = 'one/2/0' AND reward IS NOT NULL"
        )
        (rollouts,) = database.execute("SELECT rollouts FROM steps WHERE step = 2").fetchone()
        kept = [each for each in json.loads(rollouts) if not each[0].startswith("one/2/0/")]
        database.execute("UPDATE steps SET rollouts = ? WHERE step = 2", (json.dumps(kept),))
    places = Places(str(copied))
    (row,) = [row for row in await table(places, "step/one/2", "Groups") if row["task"]["to"].endswith("%2F0")]
    assert row["taught"]["text"] == "no"
    assert row["taught"]["hint"] == "all rollouts that were compared earned the same"
    text = await shown(places, "step/one/2")
    assert "1 of 3 groups taught nothing" in text
    assert "advantages are not known" in text, "the record was changed: it is not the batch that was trained"
    await places.close()


async def test_a_step_that_is_being_sampled_is_live(places: Places) -> None:
    page = await show(places, "step/on/1")
    assert page.live
    (row,) = await table(places, "step/on/1", "Groups")
    assert row["rewards"]["text"] == "0.25 … …"
    assert (await table(places, "step/broke/1", "Groups"))[0]["task"]["text"] == MARKUP
    assert MARKUP in await shown(places, "step/broke/1")


async def test_the_reward_lab_shows_parts_what_the_reward_follows_and_trials(copied: Path) -> None:
    places = Places(str(copied))
    over = await chart(places, "rewards/one", "Over the steps")
    assert [series["name"] for series in over["series"]] == ["reward", "brief", "correct"]
    rows = {row["quantity"]["text"]: row for row in await table(places, "rewards/one", "What the reward follows")}
    assert float(rows["the part correct"]["rank correlation"]["text"]) > 0.5
    assert rows["the length of the answers (tokens)"]["rank correlation"]["text"][0] in "+-"
    assert rows["the number of calls"]["rank correlation"]["text"] == "does not vary"
    for measure in ("reward", "correct"):
        bars = await chart(places, f"rewards/one?measure={measure}", f"How {measure} is spread")
        for series in bars["series"]:
            assert sum(share for _, share in series["points"]) == pytest.approx(1.0)
    assert "lightning reward try MODULE:FUNCTION" in await shown(places, "rewards/one")
    await places.close()


async def test_a_part_against_which_others_work_explains_more_than_all(copied: Path) -> None:
    with sqlite3.connect(copied / "one" / "lightning.db") as database:
        database.execute(
            "UPDATE rollouts SET reward = n % 2, rewards = json_object('gain', 2 * (n % 2), 'cost', -(n % 2)) "
            "WHERE reward IS NOT NULL"
        )
    places = Places(str(copied))
    rows = {row["quantity"]["text"]: row for row in await table(places, "rewards/one", "What the reward follows")}
    assert rows["the part gain"]["explains"]["text"] == "2.00"
    assert rows["the part cost"]["explains"]["text"] == "-1.00"
    found = await fact(places, "rewards/one", "the reward follows most")
    assert found["value"] == "gain"
    assert found["detail"] == "rank correlation +1.00"
    await places.close()


async def test_the_reward_lab_names_a_length_that_the_reward_follows_more_than_its_parts(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sqlite3.connect(copied / "one" / "lightning.db") as database:
        database.execute("UPDATE rollouts SET rewards = json_object('right', n % 2) WHERE reward IS NOT NULL")
        long = "(SELECT sum(length(tokens)) FROM transitions AS call WHERE call.rollout = rollouts.n)"
        database.execute(f"UPDATE rollouts SET reward = {long} WHERE reward IS NOT NULL")
    places = Places(str(copied))
    rows = {row["quantity"]["text"]: row for row in await table(places, "rewards/one", "What the reward follows")}
    assert rows["the part right"]["explains"]["text"] == "–", "the reward is not the sum of its parts"
    strongest = max(
        rows.values(), key=lambda row: abs(float(row["rank correlation"]["text"].replace("does not vary", "0")))
    )
    found = await fact(places, "rewards/one", "the reward follows most")
    assert found["value"] == strongest["quantity"]["text"] == "the length of the answers (tokens)"
    assert found["detail"] == f"rank correlation {strongest['rank correlation']['text']}"
    said = await shown(places, "rewards/one")
    assert "The reward follows the length of the answers (tokens) most: rank correlation +" in said
    assert "The highest reward is " in said
    alarm = Alarm(Diagnosis(FOLLOWS_LENGTH, "the reward follows length: of 91 pairs. From 80%"), None, still=True)

    async def advised(*_: object) -> Advice:
        return Advice("one", 4, (alarm,), (), (), 1, "")

    monkeypatch.setattr(rewards, "advice_of", advised)
    said = await shown(places, "rewards/one")
    assert "the reward follows length: of 91 pairs. Others: " in said, "the figures of the alarm stand here, too"
    assert part_text("correct", 0.0) == "answer wrong (correct 0.000)"
    assert part_text("brief", 0.0) == "brief 0.000"
    await places.close()


async def test_results_of_reward_try_stand_side_by_side(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_debug.regrade import try_grader
    from lightning_debug.run_commands import _trial_json

    places = Places(str(copied))
    found = await places.find("one")
    trial = await try_grader(found.store, "one", lambda seen: float(seen.tokens))
    (copied / "one" / "reward-length.json").write_text(json.dumps(_trial_json(trial)))
    (copied / "one" / "reward-broken.json").write_text("[]")
    rows = {row[""]["text"]: row for row in await table(places, "rewards/one", "Graders side by side")}
    assert rows["mean reward"].keys() == {"", "recorded", "length"}
    assert float(rows["mean reward"]["length"]["text"]) > 8
    assert "follows the length" in rows["warnings"]["length"]["text"]
    assert "reward-broken.json cannot be shown" in await shown(places, "rewards/one")
    graded = trial.rollouts[0]
    address = str(Address("rollout", ("one", graded.rollout)))
    row = next(
        row for row in await table(places, address, "Where the reward comes from") if row["name"]["text"] == "length"
    )
    assert (float(row["value"]["text"]), row["kind"]["text"]) == (graded.now, "tried")
    await places.close()


def test_a_key_names_a_run_whatever_its_id_has() -> None:
    assert key_of("demo-1") == "demo-1"
    assert key_of("run/1") == "run/1"
    assert key_of("a,b~c%") == "a%2Cb%7Ec%25"


def test_settings_that_were_chosen_stand_beside_their_defaults() -> None:
    usual = settings_and_tasks({"algorithm": {"name": "lightning_rl", "type": "LightningRL", "arguments": {}}})
    given = {
        **usual,
        "seed": 0,
        "engine.lr": 3e-2,
        "engine.warmup_steps": 0,
        "train_agents": ["solver"],
        "tasks.val.mark": "x",
    }
    assert chosen_settings(given) == {
        "seed": (0, None),
        "engine.lr": (3e-2, None),
        "train_agents": (["solver"], None),
    }
