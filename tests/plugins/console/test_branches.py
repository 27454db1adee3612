"""Branches on the pages of groups and rollouts: where they begin, and what they are worth."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.store.memory import MemoryStore
from lightning.types import Json, Outcome, Rollout, Run, Task
from lightning_console.answers import answer
from lightning_console.export import export_pages
from lightning_console.places import SERVER, Places
from lightning_console.queries.tree import Action, Line, make_tree
from lightning_console.router import show
from lightning_record import exchanges
from lightning_record.exchanges import TEXTS
from lightning_server.projects import Projects

from tests.plugins.console.made_branches import EDIT, TRUNK, VOID, end, write
from tests.plugins.console.made_folder import in_store
from tests.plugins.console.made_rollouts import call
from tests.plugins.console.reading import places_of, shown, texts, to

GROUP = "group/run/run%2F1%2F0"


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    found = MemoryStore()
    await found.open()
    yield found
    await found.close()


async def test_branches_stand_where_they_leave_their_parents_line(store: MemoryStore) -> None:
    await write(store)
    blocks = await shown(places_of(store), GROUP)
    nodes = blocks["The calls of all rollouts, as a tree"]["nodes"]
    told = [(each["parent"], each["action"], each["visits"], each["value"], each["branch"]) for each in nodes]
    edited = "edit: look again <img src=x onerror=alert(1)>"
    assert told == [
        (-1, "", 2, 0.5, ""),  # a branch says nothing of what was before it
        (0, "#10", 2, 0.5, ""),  # (1 + 0 + 0.5) / 3: the void one has no return
        (1, "#20", 1, 1.0, ""),  # what was edited says nothing of the policy
        (1, "#21", 1, 0.0, ""),
        (1, "#22", 1, 0.5, "branch"),
        (2, "#30", 1, 1.0, ""),
        (4, "#31", 1, 0.5, "branch"),
        (2, EDIT, 2, 0.5, edited),
        (7, "#40", 1, 0.75, edited),
    ]
    ends = {
        number: [each["text"] for each in node["rollouts"]] for number, node in enumerate(nodes) if node["rollouts"]
    }
    assert ends == {
        1: ["branch 3: void"],
        3: ["rollout 1"],
        5: ["rollout 0"],
        6: ["branch 2"],
        7: [f"branch 0, {edited}"],
        8: [f"branch 1, {edited}"],
    }
    assert [node["branches"] for node in nodes] == [0, 2, 2, 0, 0, 0, 0, 0, 0]
    assert nodes[4]["to"] == to("rollout", "run", "run/1/0/2", call=1)
    assert nodes[7]["to"] == ""  # nobody sampled it
    assert nodes[8]["to"] == to("rollout", "again", "again/1", call=1)
    assert not blocks["page"].live
    split = await shown(places_of(store), to("group", "run", "run/1/0", split=2))
    diff = next(value for value in split.values() if isinstance(value, dict) and "before" in value)
    assert (diff["after"], diff["before"]) == ("[solver]\n#30", f"[edited]\n{EDIT}\n\n[solver]\n#40")
    assert (diff["to_right"], diff["to_left"]) == (
        to("rollout", "run", TRUNK, call=3),
        to("rollout", "again", "again/1"),
    )


async def test_a_group_lists_its_branches_apart_from_its_rollouts(store: MemoryStore) -> None:
    await write(store)
    blocks = await shown(places_of(store), GROUP)
    facts = {each["name"]: each for each in blocks["Facts"]["facts"]}
    assert (facts["rollouts"]["value"], facts["branches"]["value"], facts["branches"]["detail"]) == ("2", "4", "1 void")
    assert [row["rollout"] for row in texts(blocks["Rollouts"])] == ["0", "1"]
    rows = texts(blocks["Branches"])
    assert [(row["branch"], row["of"], row["at call"], row["how it ended"], row["calls"]) for row in rows] == [
        ("2", "0", "2", "no error", "2"),
        ("3", "0", "2", "void", "0"),
        ("0", "0", "3", "no error", "0"),
        ("1", "0", "3", "no error", "1"),
    ]
    assert rows[1]["why"] == VOID
    assert {row["changed"] for row in rows[:2]} == {"–"}
    assert all(row["changed"].startswith("edit: look again") for row in rows[2:])
    assert blocks["Branches"]["rows"][0][2]["to"] == to("rollout", "run", TRUNK, call=2)


async def test_a_rollout_shows_what_each_of_its_calls_is_worth(store: MemoryStore) -> None:
    await write(store)
    blocks = await shown(places_of(store), to("rollout", "run", TRUNK))
    assert [(row["call"], row["branches"], row["value"]) for row in texts(blocks["Calls"])] == [
        ("1", "–", "–"),
        ("2", "2", "0.500"),  # the void one has no reward
        ("3", "2", "–"),  # edited answers are not the policy's
    ]
    rows = texts(blocks["Branches"])
    assert [(row["at call"], row["branch"], row["how it ended"], row["reward"]) for row in rows] == [
        ("2", "run/1/0/2", "no error", "0.500"),
        ("2", "run/1/0/3", "void", "–"),
        ("3", "again/0", "no error", "0.250"),
        ("3", "again/1", "no error", "0.750"),
    ]
    assert blocks["Branches"]["rows"][2][1]["to"] == to("rollout", "again", "again/0")
    alone = await shown(places_of(store), to("rollout", "run", "run/1/0/1"))
    assert "Branches" not in alone
    assert "branches" not in texts(alone["Calls"])[0]


async def test_groups_that_begin_behind_a_rollout_are_listed_with_its_branches(store: MemoryStore) -> None:
    """Those of a later step of its run, and those of runs that borrow its rollouts, of which one is older and borrows since a
    resume."""
    await write(store)
    sampling: dict[str, Json] = {"config": {"trainer": {"sampling": "prefix"}}}
    borrowing: dict[str, Json] = {"config": {"trainer": {"sampling": "prefix", "prefix_run": "begun"}}}
    epoch: dict[str, Json] = {"first": 2, "at": 3.0, "config": borrowing}
    await store.put_run(Run("begun", "begun", sampling, 1.0))
    await store.put_run(Run("borrower", "borrower", borrowing, 2.0))
    await store.put_run(Run("older", "older", {}, 0.5))
    await store.put_state("older", "epochs", [epoch])
    trunk, behind = Rollout("begun/1/0/0", "begun", Task("q"), "begun/1/0", 1), ("begun/1/0/0", 1, 1)
    await store.create_rollouts([trunk])
    await store.lease("begun", "worker")
    await end(store, trunk.id, 1.0, [(0, 10), (1, 20)])
    for run, step in (("begun", 3), ("borrower", 1), ("older", 2)):
        later = [
            Rollout(f"{run}/{step}/1/{n}", run, Task("q"), f"{run}/{step}/1", step, index=n, parent=behind)
            for n in range(2)
        ]
        await store.create_rollouts(later)
        await store.lease(run, "worker", limit=2)
        await end(store, later[0].id, 0.5, [(1, 22)])
    blocks = await shown(places_of(store), to("rollout", "begun", trunk.id))
    told = [(row["at call"], row["branch"], row["changed"], row["reward"]) for row in texts(blocks["Branches"])]
    assert told == [
        ("2", "begun/3/1/0", "weights: begun@2", "0.500"),
        ("2", "begun/3/1/1", "weights: begun@2", "–"),
        ("2", "borrower/1/1/0", "weights: borrower@0", "0.500"),
        ("2", "borrower/1/1/1", "weights: borrower@0", "–"),
        ("2", "older/2/1/0", "weights: older@1", "0.500"),
        ("2", "older/2/1/1", "weights: older@1", "–"),
    ]
    assert [(row["branches"], row["value"]) for row in texts(blocks["Calls"])] == [("–", "–"), ("6", "–")]
    assert blocks["Branches"]["rows"][2][1]["to"] == to("rollout", "borrower", "borrower/1/1/0")
    group = await shown(places_of(store), to("group", "begun", "begun/1/0"))
    assert [row["how it ended"] for row in texts(group["Branches"])] == ["no error", "running"] * 3


async def test_a_branch_says_where_it_begins_and_what_is_its_parents(store: MemoryStore) -> None:
    await write(store)
    blocks = await shown(places_of(store), to("rollout", "run", "run/1/0/2"))
    facts = {each["name"]: each for each in blocks["Facts"]["facts"]}
    said = facts["branch of"]
    assert (said["value"], said["detail"]) == (TRUNK, "at call 2")
    assert said["to"] == to("rollout", "run", TRUNK, attempt=1, call=2)
    assert facts["tokens"]["value"] == "2"  # its own
    rows = texts(blocks["Calls"])
    assert [(row["call"], row["status"]) for row in rows] == [("parent's 1", "recorded"), ("1", "ok"), ("2", "ok")]
    assert {cell["tone"] for cell in blocks["Calls"]["rows"][0]} == {"muted"}
    assert blocks["Calls"]["rows"][0][0]["to"] == to("rollout", "run", TRUNK, attempt=1, call=1)
    edited = await shown(places_of(store), to("rollout", "again", "again/0"))
    assert [row["call"] for row in texts(edited["Calls"])] == ["parent's 1", "parent's 2", "parent's 3"]
    assert texts(edited["Calls"])[2]["status"].startswith("look again")
    changed = {each["name"]: each["value"] for each in edited["Facts"]["facts"]}["changed"]
    assert changed.startswith("edit: look again")


async def test_a_branch_is_replayed_with_its_parents_calls(store: MemoryStore) -> None:
    await write(store)
    for address, until in {
        to("rollout", "run", "run/1/0/2"): 1,
        to("rollout", "run", "run/1/0/2", call=2): 2,
        to("rollout", "again", "again/1"): 3,  # two recorded calls, and the edited one
        to("rollout", "run", TRUNK, call=3): 2,
    }.items():
        commands = (await shown(places_of(store), address))["Replay this rollout"]["notices"][0]["commands"]
        assert commands[1].endswith(f"--until {until}"), address


async def test_steps_and_runs_tell_of_branches(store: MemoryStore) -> None:
    await write(store)
    rows = texts((await shown(places_of(store), "step/run/1"))["Groups"])
    assert [row["rewards"] for row in rows] == ["1 0 | 0.5 ×"]
    page = json.dumps((await show(places_of(store), "run/again")).to_json())
    assert "it has branches of run/1/0/0" in page
    assert to("rollout", "run", TRUNK) in page
    assert "branches of" not in json.dumps((await show(places_of(store), "run/run")).to_json())


async def test_a_void_branch_says_why(store: MemoryStore) -> None:
    await write(store)
    notices = (await shown(places_of(store), to("rollout", "run", "run/1/0/3")))["Notices"]["notices"]
    assert (notices[0]["text"], notices[0]["tone"]) == (VOID, "bad")


async def test_branches_come_while_one_looks(store: MemoryStore) -> None:
    await write(store, ended=False)
    places = places_of(store)
    for address in (GROUP, to("rollout", "run", TRUNK)):
        assert (await show(places, address)).live, address
    assert texts((await shown(places, GROUP))["Branches"])[3]["how it ended"] == "running"
    await end(store, "again/1", 0.75, [(2, 40)])
    for address in (GROUP, to("rollout", "run", TRUNK)):
        assert not (await show(places, address)).live, address
    assert texts((await shown(places, GROUP))["Branches"])[3]["reward"] == "0.750"


async def test_runs_that_take_long_to_read_come_later(store: MemoryStore) -> None:
    """A page does not wait for the settings of many younger runs; it says that it may change."""
    await write(store)
    hasty = Places(stores={"memory://": store}, patience=0.0)
    page = await show(hasty, GROUP)
    assert page.live
    assert "again/0" not in json.dumps(page.to_json())
    await show(places_of(store), GROUP)
    page = await show(hasty, GROUP)  # what was read is known
    assert not page.live
    assert "again/0" in json.dumps(page.to_json())


async def test_a_run_that_cannot_be_read_hides_no_branches(tmp_path: Path) -> None:
    await in_store(tmp_path / "run", write)
    with sqlite3.connect(tmp_path / "run" / "lightning.db") as database:
        assert database.execute("UPDATE runs SET config = '{' WHERE id = 'other'").rowcount == 1
    places = Places(str(tmp_path / "run"))
    assert len((await shown(places, GROUP))["Branches"]["rows"]) == 4
    await places.close()


async def test_the_group_of_branches_has_their_parents_line(store: MemoryStore) -> None:
    await write(store)
    blocks = await shown(places_of(store), "group/again/again")
    nodes = blocks["The calls of all rollouts, as a tree"]["nodes"]
    assert [(each["parent"], each["action"]) for each in nodes] == [
        (-1, ""), (0, "#10"), (1, "#20"), (2, "#30"), (2, EDIT), (4, "#40"),
    ]  # fmt: skip
    assert nodes[3]["rollouts"] == [{"text": TRUNK, "to": to("rollout", "run", TRUNK)}]
    assert nodes[1]["to"] == to("rollout", "run", TRUNK, call=1)
    assert {each["name"]: each["value"] for each in blocks["Facts"]["facts"]}["rollouts"] == "0"


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (("gone/0", 1, 0), "is not in this store"),
        ((TRUNK, 2, 0), "the calls of attempt 2 of run/1/0/0 are not shown here"),
        ((TRUNK, 1, 9), "has no such call"),
    ],
)
async def test_a_branch_whose_beginning_is_not_known_is_shown_and_not_counted(
    store: MemoryStore, key: tuple[str, int, int], why: str
) -> None:
    await write(store)
    lost = Rollout("run/1/0/4", "run", Task("a question"), "run/1/0", 1, index=4, parent=key)
    await store.create_rollouts([lost])
    await store.lease("run", "worker")
    await end(store, lost.id, 0.125, [(0, 50)])
    blocks = await shown(places_of(store), GROUP)
    nodes = blocks["The calls of all rollouts, as a tree"]["nodes"]
    assert (nodes[0]["value"], nodes[0]["visits"], nodes[0]["branches"]) == (0.5, 2, 1)
    assert [(each["parent"], each["action"]) for each in nodes[1:3]] == [(0, "#10"), (0, "#50")]
    (row,) = [row for row in blocks["Branches"]["rows"] if row[0]["text"] == "4"]
    assert why in row[2]["hint"]
    assert (await show(places_of(store), to("rollout", "run", lost.id))).name == lost.id


async def test_what_a_branch_said_is_read_with_its_parents_calls(store: MemoryStore) -> None:
    """Where those were removed the page says so, and shows all else."""
    asked = exchanges.canonical({"messages": [{"role": "user", "content": "how deep?"}]})
    texts_of = [{"choices": [{"message": {"role": "assistant", "content": text}}]} for text in ("very", "as the sea")]
    first, second = (json.dumps(each).encode() for each in texts_of)
    parents = {"p": None, "b": ("p", 1, 0), "lost": ("gone", 1, 0)}
    await store.put_run(Run("run", "run", {}, 1.0))
    rollouts = [Rollout(name, "run", Task("q"), "g", parent=key) for name, key in parents.items()]
    await store.create_rollouts(rollouts)
    leases = await store.lease("run", "worker", limit=3)
    made = [call(lease.rollout, 0, "solver", [1], (2,)) for lease in leases]
    made[0] = replace(made[0], extras={TEXTS: exchanges.pack("/chat/completions", 200, asked, first)})
    own = exchanges.pack("/chat/completions", 200, asked, second, exchanges.said_in_parent(made[:1], [0])[0])
    for each in (made[0], *(replace(each, extras={TEXTS: own}) for each in made[1:])):
        await store.append([each])
        await store.complete(each.rollout, 1, Outcome(reward=1.0))
    pages = {name: str(await show(places_of(store), to("rollout", "run", name))) for name in parents}
    assert [name for name, page in pages.items() if "as the sea" in page] == ["b"]
    assert [name for name, page in pages.items() if "of its parent gone, whose calls are not in the store" in page] == [
        "lost"
    ]
    group = str(await show(places_of(store), to("group", "run", "g")))
    assert "very" in group
    assert "as the sea" in group


async def test_branches_of_another_project_are_not_seen(store: MemoryStore) -> None:
    await write(store)
    await store.put_run(Run("theirs", "theirs", {"branch": {"rollout": TRUNK, "at": 1, "weights": "5"}}, 3.0, "b"))
    await store.create_rollouts(
        [Rollout("theirs/0", "theirs", Task("q"), "theirs", split="branch", parent=(TRUNK, 1, 0))]
    )
    mine = Projects(store).of("default")
    blocks = await shown(places_of(mine, SERVER, "default"), GROUP)
    assert len(blocks["Branches"]["rows"]) == 4
    assert len((await shown(places_of(store), GROUP))["Branches"]["rows"]) == 4


@pytest.mark.parametrize(
    ("changes", "sampling", "said"),
    [
        ({"weights": "run@0", "at": 1, "attempt": 1}, {"top_p": 0.9, "temperature": 1.0}, "–"),  # as the parent had it
        ({"weights": "run@5", "at": 1}, {"top_p": 0.9, "temperature": 0.5}, "weights: run@5, temperature 0.5"),
        ({"weights": "other-model", "at": 99}, {"top_p": 0.9}, "weights: other-model"),
        ({"prompts": True, "components": ["writer"], "at": 1}, {"top_p": 0.9}, 'other prompts: ["writer"]'),
        ({"edit": "", "at": 1, "speed": 3}, {"top_p": 0.9}, "edit: , speed: 3"),
    ],
)
async def test_what_a_run_of_branches_changes_is_said(
    store: MemoryStore, changes: dict[str, Json], sampling: dict[str, Json], said: str
) -> None:
    """The weights and sampling parameters that are recorded are a change only where the parent's were others."""
    settings: Json = {"gateway": {"override_sampling": {"top_p": 0.9}}, "trainer": {"eval_temperature": 1.0}}
    await store.put_run(Run("run", "run", {"config": settings}, 1.0))
    await store.create_rollouts([Rollout("p", "run", Task("q"), "g", split="val")])
    (lease,) = await store.lease("run", "worker")
    await store.append([replace(call(lease.rollout, 0, "solver", [1], (2,)), extras={TEXTS: b"recorded"})])
    await store.complete("p", 1, Outcome(reward=1.0))
    own: Json = {"gateway": {"override_sampling": sampling}}
    await store.put_run(Run("more", "more", {"branch": {"rollout": "p", **changes}, "config": own}, 3.0))
    await store.create_rollouts([Rollout("more/0", "more", Task("q"), "more", split="branch", parent=("p", 1, 0))])
    rows = texts((await shown(places_of(store), "group/run/g"))["Branches"])
    assert rows[0]["changed"] == said


def line(*names: str, total: float | None = 0.0, **more: Any) -> Line:
    return Line([Action(name, "a", name, number) for number, name in enumerate(names, 1)], total, **more)


def test_calls_beyond_the_limit_are_counted_with_those_of_their_branches() -> None:
    lines = [
        line("a", "b", "c"),
        line("a", "d", "e"),
        line("x", branch=True, parent=0, start=1),
        line("y", "z", branch=True, parent=1, start=2),
    ]
    nodes, left_out = make_tree(lines, 4)
    assert [node.action for node in nodes] == ["", "a", "b", "d"]
    assert left_out == 1 + 1 + 1 + 2  # c, e, x, and y with z, though it begins behind d
    whole, none = make_tree(lines, 100)
    assert ([node.action for node in whole], none) == (["", "a", "b", "d", "x", "c", "e", "y", "z"], 0)
    assert [node.ends for node in whole][4:] == [(2,), (0,), (1,), (), (3,)]


def test_a_branch_that_is_answered_as_its_parent_was_is_the_same_node() -> None:
    lines = [line("a", "b", total=1.0), line("b", total=0.0, branch=True, parent=0, start=1)]
    nodes, _ = make_tree(lines, 100)
    assert [(node.action, node.members, node.value) for node in nodes] == [
        ("", (0,), 1.0),
        ("a", (0,), 0.5),
        ("b", (0, 1), 0.5),
    ]


async def test_a_coding_agent_is_told_of_branches(store: MemoryStore) -> None:
    await write(store)
    found = await answer(places_of(store), GROUP)
    tree = next(block for block in found["blocks"] if block["is"] == "GroupTree")
    assert [node.get("branch", "") for node in tree["nodes"]][4:6] == ["branch", ""]
    assert next(block for block in found["blocks"] if block.get("title") == "Branches")["rows"][1][4] == "void"


async def test_an_export_of_a_run_has_the_branches_that_other_runs_have_of_it(tmp_path: Path) -> None:
    await in_store(tmp_path / "run", write)
    await export_pages(str(tmp_path / "run"), "run/run", tmp_path / "out")
    index = (tmp_path / "out" / "data" / "index.js").read_text()
    files = json.loads(index[index.index("exported(") + 9 : -4])["files"]
    assert {GROUP, "rollout/again/again%2F0", "rollout/again/again%2F1", "run/again"} <= set(files)
    assert not any("other" in address for address in files)
