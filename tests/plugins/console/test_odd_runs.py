"""One odd run among others: its row says what is wrong with it, and hides nobody else."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import UnavailableError
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.trainer.plan import val_rollouts
from lightning.types import Fault, Outcome, Rollout, Run, Task, ToolEvent
from lightning_console import places
from lightning_console.answers import answer
from lightning_console.places import Places, group_of
from lightning_console.queries import steps
from lightning_console.queries.curves import gain_of, read_curves
from lightning_console.queries.runs import line_of
from lightning_console.router import show
from lightning_console.web.chat import Chat
from lightning_console.web.desk import Desk
from lightning_console.web.gate import VISITOR, Visitor

from tests.plugins.console.made_folder import in_store, plot
from tests.plugins.console.made_rollouts import call, train
from tests.plugins.debug.made_runs import Maker

ODD = {
    "state": "UPDATE state SET value = '{oh' WHERE run = 'odd'",
    "end": "UPDATE state SET value = '[[' WHERE run = 'odd' AND name = 'over'",
    "epochs": "INSERT OR REPLACE INTO state (run, name, value) VALUES ('odd', 'epochs', '[{\"first\": 1}]')",
    "config": "UPDATE runs SET config = 'no json' WHERE id = 'odd'",
    "algorithm": 'UPDATE runs SET config = \'{"algorithm": {"name": 3, "arguments": []}, "tasks": 7}\' WHERE id = \'odd\'',
    "setting": "UPDATE runs SET config = json_set(config, '$.config.trainer', json('[]')) WHERE id = 'odd'",
    "status": "UPDATE rollouts SET status = 'dreaming' WHERE run = 'odd'",
    "metrics": "UPDATE steps SET metrics = '{\"reward\": \"high\"}' WHERE run = 'odd' AND step = 3",
    "no metrics": "UPDATE steps SET metrics = '[1' WHERE run = 'odd'",
    "time": "UPDATE steps SET at = 'noon' WHERE run = 'odd'; DELETE FROM state WHERE run = 'odd' AND name = 'over'",
}
"""Ways in which a run is odd. Each is written into the database beneath the store."""
SHOWN = {"setting", "algorithm"}
"""Those that can be read all the same."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one store: one that is as it should be, and one that will not be."""
    import asyncio

    folder = tmp_path_factory.mktemp("odd")

    async def both(store: Store) -> None:
        for name in ("good", "odd"):
            await Maker(store, plot(name, 1)).write()

    asyncio.run(in_store(folder, both))
    return folder / "lightning.db"


async def rows_of(places: Places) -> dict[str, dict[str, Any]]:
    page = json.loads(json.dumps((await show(places, "runs")).to_json(), allow_nan=False))
    (found,) = [block["value"] for block in page["blocks"] if block["component"] == "Table"]
    names = [column["name"] for column in found["columns"]]
    return {row[0]["text"]: dict(zip(names, row, strict=True)) for row in found["rows"]}


@pytest.mark.parametrize("how", ODD)
async def test_an_odd_run_says_what_is_wrong_and_the_others_are_shown(database: Path, tmp_path: Path, how: str) -> None:
    copy = tmp_path / "lightning.db"
    with sqlite3.connect(database) as made, sqlite3.connect(copy) as own:
        made.backup(own)
        own.executescript(ODD[how])
    places = Places(str(copy))
    rows = await rows_of(places)
    assert set(rows) == {"good", "odd"}
    assert rows["good"]["state"]["text"] == "finished"
    assert "→" in rows["good"]["held-out"]["text"]
    assert rows["good"]["alarms"]["tone"] != "bad"
    said = rows["odd"]["alarms"]
    assert (said["tone"] == "bad") == (how not in SHOWN)
    assert said["text"].startswith("cannot be read: ") or how in SHOWN
    page = await show(places, "run/odd")
    assert "fault of the console" not in json.dumps(page.to_json())
    if how not in SHOWN:
        assert any(word in json.dumps(page.to_json()) for word in ("cannot be read", "is corrupt"))
    assert (await show(places, "run/good")).title == "good"
    assert "cannot be shown" not in json.dumps((await show(places, "versions")).to_json()), "others can be compared"
    await places.close()


async def test_what_can_be_read_of_an_odd_run_is_in_its_row(database: Path, tmp_path: Path) -> None:
    copy = tmp_path / "lightning.db"
    with sqlite3.connect(database) as made, sqlite3.connect(copy) as own:
        made.backup(own)
        own.execute(ODD["no metrics"])
    places = Places(str(copy))
    row = (await rows_of(places))["odd"]
    assert row["rollouts"]["text"] == (await rows_of(places))["good"]["rollouts"]["text"]
    assert row["model"]["text"]
    await places.close()


async def test_a_store_that_does_not_answer_is_no_odd_run(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.put_run(run := Run("a", "a"))

    async def gone(run: str) -> None:
        raise UnavailableError("the server went away")

    monkeypatch.setattr(store, "last_step", gone)
    with pytest.raises(UnavailableError, match="went away"):
        await line_of(store, run, "db")
    page = json.dumps((await show(Places("db", stores={"db": store}), "runs")).to_json())
    assert "db cannot be read" in page
    assert "the server went away" in page


HALF = "\ud83d"
"""Half of a smiley, with which what a model wrote may end."""


async def test_half_a_character_hides_no_page(store: MemoryStore) -> None:
    """An agent's texts are shown with it written out, on pages and to programs; so is an address."""
    VISITOR.set(Visitor("s", "", None, changes=True))
    places = Places("db", stores={"db": store})
    await store.put_run(Run("odd", "odd", {"model": f"mine{HALF}"}, 2.0))
    await store.create_rollouts([Rollout("odd/0", "odd", Task({f"key{HALF}": f"{HALF} why?"}), "odd")])
    (lease,) = await store.lease("odd", "worker")
    await store.append([call(lease.rollout, 0, "solver", [1, 2], (3,))])
    run = ToolEvent(f"tool{HALF}", "ok", arguments={"text": HALF}, output=f"an emoji {HALF}")
    await store.complete("odd/0", lease.attempt, Outcome(fault=Fault.AGENT, error=f"no {HALF}", tool_events=(run,)))
    desk = Desk(lambda _: places, Chat(None))
    for address in ("runs", "run/odd", "rollout/odd/odd%2F0", f"run/{HALF}"):
        said = json.dumps((await desk.show({"address": address}))["page"], ensure_ascii=False)
        assert "A fault of the console" not in said
        assert "\\ud83d" in said
        assert json.dumps(await answer(places, address), ensure_ascii=False).encode()


# evaluations that say nothing ----------------------------------------------------------------------------------------------
async def evaluated(store: Store, step: int, outcome: Outcome) -> None:
    await store.create_rollouts(val_rollouts("a", step, [Task("q"), Task("r")], 1))
    for lease in await store.lease("a", "w", limit=2):
        await store.complete(lease.rollout.id, lease.attempt, outcome)


async def test_an_evaluation_without_one_score_is_in_no_figure(tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        await store.put_run(Run("a", "a", {"model": "m"}, time.time()))
        for step, reward in enumerate((0.0, 0.2, 0.2, 0.3, 0.3, 0.9, 0.9, 1.0, 0.0)):
            await evaluated(store, step, Outcome(reward=reward))

    await in_store(tmp_path, write)
    with sqlite3.connect(
        tmp_path / "lightning.db"
    ) as own:  # no store of this release takes an outcome without a reward
        own.execute("UPDATE rollouts SET reward = NULL WHERE step IN (0, 8)")
    places = Places(str(tmp_path / "lightning.db"))
    found = await places.find("a")
    line, curves = await line_of(found.store, found.run, found.url), await read_curves(found.store, found.run)
    await places.close()
    assert line.before is not None
    assert line.after is not None
    assert (line.before.step, line.after.step) == (1, 7)
    assert [each.step for each in curves.evaluations] == [1, 2, 3, 4, 5, 6, 7]
    gain = gain_of(curves)
    assert gain is not None
    assert (gain.before, gain.steps) == (0.2, 5), "0.9 is the first that has 80 % of the way from 0.2 to 1"


async def test_an_evaluation_in_which_all_failed_is_0(store: MemoryStore) -> None:
    await store.put_run(run := Run("a", "a", {"model": "m"}, time.time()))
    await evaluated(store, 0, Outcome(fault=Fault.AGENT, error="it broke"))
    line = await line_of(store, run, "db")
    assert line.before is not None
    assert line.before.score == 0.0


# what takes long is done once ----------------------------------------------------------------------------------------------
async def test_a_step_is_derived_once_for_all_of_its_rollouts(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(store)
    monkeypatch.setattr("lightning_console.queries.memo.SHARE", 1e9)  # as if deriving it had taken long
    derived = []
    derive = steps._derived
    monkeypatch.setattr(steps, "_derived", lambda *given: derived.append(given) or derive(*given))
    places = Places("db", stores={"db": store})
    for number in range(3):
        assert (await show(places, f"rollout/run/run%2F1%2F0%2F{number}")).title.startswith("question 0")
    await show(places, "group/run/run%2F1%2F1")
    assert len(derived) == 1
    monkeypatch.setattr(steps, "FRESH", 0.001)
    await show(places, "group/run/run%2F1%2F1")
    assert len(derived) == 1, "many times what deriving it took are not over"


async def test_siblings_of_a_known_rollout_are_read_from_its_step_alone(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put_run(Run("a", "a"))
    await store.create_rollouts(
        [
            Rollout(f"task-{step}-{n}", "a", Task("q"), f"odd-{step}", step=step, index=n)
            for step in range(9)
            for n in (0, 1)
        ]
    )
    located = await Places("db", stores={"db": store}).find("a")
    member = await store.get_rollout("task-7-1")
    assert member is not None
    asked = []
    listed = store.list_rollouts

    async def list_rollouts(run: str, **options: Any) -> Any:
        asked.append(options.get("step"))
        return await listed(run, **options)

    monkeypatch.setattr(store, "list_rollouts", list_rollouts)
    assert [each.id for each in await group_of(located, "odd-7", member)] == ["task-7-0", "task-7-1"]
    assert asked == [7]
    assert len(await group_of(located, "odd-8")) == 2
    monkeypatch.setattr(places, "LOOKED", 5)
    with pytest.raises(Exception, match="not among the first 5 rollouts"):
        await group_of(located, "odd-8")
