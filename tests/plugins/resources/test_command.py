"""`lightning resources` on stores as prompt optimisation leaves them."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.cli import output
from lightning.cli.app import main
from lightning.plugins import plugins
from lightning.safe_text import printable
from lightning.store import Store
from lightning.store.url import sqlite_url
from lightning.types import Outcome, Rollout, Run, Task
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import get_resource, put_resource, set_alias

from tests.core.cli.test_output import EVIL, STEERS

Command = Callable[..., Any]


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A folder `runs` with one run `tuned`, in which version 2 of a prompt earned more than version 1."""
    folder = tmp_path / "runs" / "tuned"
    folder.mkdir(parents=True)

    async def fill(store: Store) -> None:
        await store.put_run(Run("tuned", "tuned"))
        await put_resource(store, Resource("writer", "Write.\nOn {topic}."))
        await put_resource(
            store, Resource("writer", "Rhyme.\nOn {topic}.", metadata={"parent": 1, "criticism": "[dull]"})
        )
        await set_alias(store, "writer", "production", 1)
        planned = [Rollout(f"r{n}", "tuned", Task(n), "g", resources={"writer": n % 2 + 1}) for n in range(4)]
        await store.create_rollouts(planned)
        for lease in await store.lease("tuned", "w", limit=4):
            version = lease.rollout.resources["writer"]
            await store.complete(lease.rollout.id, 1, Outcome(reward=version - 1.0))

    on(folder, fill)
    return folder.parent


def on(folder: Path, act: Callable[[Store], Any]) -> Any:
    async def main() -> Any:
        store = plugins().store(sqlite_url(folder / "lightning.db"))
        await store.open()
        try:
            return await act(store)
        finally:
            await store.close()

    return asyncio.run(main())


def test_list(lightning: Command, tuned: Path) -> None:
    (row,) = json.loads(lightning("resources", "ls", str(tuned), "--json").out)
    assert (row["name"], row["kind"], row["versions"]) == ("writer", "prompt", 2)
    assert row["aliases"] == {"latest": 2, "production": 1}
    assert "latest = 2, production = 1" in lightning("resources", "ls", str(tuned)).out


def test_show(lightning: Command, tuned: Path) -> None:
    shown = lightning("resources", "show", "writer", "--runs", str(tuned)).out
    for part in ("writer@2, prompt", "parent: 1", "criticism: [dull]", "production: 1", "Rhyme."):
        assert part in shown
    assert (
        lightning("resources", "show", f"{tuned / 'tuned'}#writer@production", "--content").out == "Write.\nOn {topic}."
    )
    found = json.loads(lightning("resources", "show", "writer@2", "--runs", str(tuned), "--json").out)
    assert (found["resource"]["metadata"]["parent"], [move[0] for move in found["aliases"]["production"]]) == (1, [1])


def test_diff(lightning: Command, tuned: Path) -> None:
    shown = lightning("resources", "diff", "writer", "production", "latest", "--runs", str(tuned)).out
    for part in ("--- writer@1", "+++ writer@2", "-Write.", "+Rhyme.", " On {topic}."):
        assert part in shown
    found = json.loads(lightning("resources", "diff", "writer", "1", "2", "--runs", str(tuned), "--json").out)
    assert [(use["version"], use["run"], use["rollouts"], use["reward"]) for use in found["uses"]] == [
        (1, "tuned", 2, 0.0),
        (2, "tuned", 2, 1.0),
    ]


def test_compare(lightning: Command, tuned: Path) -> None:
    shown = lightning("resources", "compare", "writer", "--runs", str(tuned)).out
    first, second = shown.splitlines()[-2:]
    assert first.split()[-3:] == ["production", "2", "0.000"]
    assert second.split()[-3:] == ["latest", "2", "1.000"]
    both = ["--served", str(tuned / "tuned"), "--runs", str(tuned)]
    assert lightning("resources", "compare", "writer", *both).out.split()[-2:] == ["4", "1.000"]
    found = json.loads(lightning("resources", "compare", "writer", "--runs", str(tuned), "--json").out)
    assert [version["version"] for version in found["versions"]] == [1, 2]


def test_each_command_ends_with_the_next_one_named_as_the_resource_was(lightning: Command, tuned: Path) -> None:
    place, where = str(tuned / "tuned"), ["--runs", str(tuned)]
    named = shlex.join(["writer", *where])
    listed = lightning("resources", "ls", str(tuned)).err
    assert listed == f"Next: compare the versions of writer: lightning resources compare {named}\n"
    for words in (["show", "writer@1", *where], ["promote", "writer@2", *where], ["rollback", "writer", *where]):
        assert lightning("resources", *words).err.endswith(f": lightning resources compare {named}\n")
    said = lightning("resources", "diff", f"{place}#writer", "1", "2").err
    assert said.endswith(f": lightning resources promote {shlex.quote(f'{place}#writer@2')}\n")


def test_prune_says_what_goes_and_deletes_when_told(lightning: Command, tuned: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"model{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([number]) * 2_000_000)
        lightning("resources", "put", f"{tuned / 'tuned'}#policy/weights", str(folder), "--kind", "weights")
    asked = ["resources", "prune", "policy/weights", "--keep", "1", "--runs", str(tuned)]
    said = lightning(*asked).out
    assert "policy/weights@1: 2.0 MB in" in said
    assert "nothing was deleted: add --apply" in said
    assert (tmp_path / "model1").exists()
    assert "deleted" in lightning(*asked, "--apply").out
    assert [(tmp_path / f"model{number}").exists() for number in (1, 2)] == [False, True]
    assert "keeps them" in lightning(*asked).out


def test_promote_and_roll_back(lightning: Command, tuned: Path) -> None:
    place = ("--runs", str(tuned))
    assert "writer@production is version 2 (it was 1)" in lightning("resources", "promote", "writer@2", *place).out
    assert (
        "writer@canary is version 1 (new)"
        in lightning("resources", "promote", "writer@1", "--alias", "canary", *place).out
    )
    assert "writer@production is version 1 (it was 2)" in lightning("resources", "rollback", "writer", *place).out
    ran = lightning("resources", "rollback", "writer", *place)
    assert (ran.code, "nothing to return to" in ran.err) == (2, True)
    ran = lightning("resources", "promote", "writer@9", *place)
    assert (ran.code, "there is no resource writer@9; there are: versions 1, 2" in ran.err) == (2, True)


def test_put(lightning: Command, tuned: Path, tmp_path: Path) -> None:
    place = f"{tuned / 'tuned'}#"
    (tmp_path / "p.txt").write_text("Sing of {topic}.")
    (tmp_path / "c.json").write_text('{"k": 3}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.safetensors").write_bytes(b"weights")
    assert "writer@3 (prompt" in lightning("resources", "put", f"{place}writer", str(tmp_path / "p.txt")).out
    assert "writer@3 (prompt" in lightning("resources", "put", f"{place}writer", str(tmp_path / "p.txt")).out
    lightning("resources", "put", f"{place}limits", str(tmp_path / "c.json"), "--kind", "config")
    lightning("resources", "put", f"{place}policy", str(tmp_path / "model"), "--kind", "weights")
    content = on(tuned / "tuned", lambda store: get_resource(store, "policy")).content
    assert content["path"] == str(tmp_path / "model")
    assert content["files"]["w.safetensors"].startswith("9a129038")
    assert on(tuned / "tuned", lambda store: get_resource(store, "limits")).content == {"k": 3}
    ran = lightning("resources", "put", "writer", str(tmp_path / "p.txt"))
    assert (ran.code, "does not say in which store" in ran.err) == (2, True)
    ran = lightning("resources", "put", f"{place}limits", str(tmp_path / "p.txt"), "--kind", "config")
    assert (ran.code, "p.txt cannot be read as a config" in ran.err) == (2, True)
    ran = lightning("resources", "put", f"{place}writer@1", str(tmp_path / "p.txt"))
    assert (ran.code, "versions never change: leave @1 out" in ran.err) == (2, True)
    ran = lightning("resources", "put", f"{tmp_path / 'nowhere'}#writer", str(tmp_path / "p.txt"))
    assert (ran.code, "there is no database at" in ran.err) == (2, True)
    assert not (tmp_path / "nowhere").exists()


def test_a_corrupt_database_does_not_hide_the_others(lightning: Command, tuned: Path) -> None:
    (tuned / "bad").mkdir()
    (tuned / "bad" / "lightning.db").write_bytes(b"not a database" * 100)
    for command, said in ((("ls", str(tuned)), "writer"), (("show", "writer", "--runs", str(tuned)), "Rhyme.")):
        ran = lightning("resources", *command)
        assert (ran.code, "bad/lightning.db" in ran.err, said in ran.out) == (0, True, True)


def test_no_alias_moves_while_the_database_that_may_be_meant_cannot_be_read(lightning: Command, tuned: Path) -> None:
    (tuned / "bad").mkdir()
    (tuned / "bad" / "lightning.db").write_bytes(b"not a database" * 100)
    for command in (("promote", "writer@2"), ("rollback", "writer")):
        ran = lightning("resources", *command, "--runs", str(tuned))
        assert (ran.code, "bad/lightning.db" in ran.err, ran.out) == (2, True, "")
    (row,) = json.loads(lightning("resources", "ls", str(tuned), "--json").out)
    assert row["aliases"]["production"] == 1


def test_a_name_that_several_stores_have_needs_its_place(lightning: Command, tuned: Path) -> None:
    (tuned / "other").mkdir()
    on(tuned / "other", lambda store: put_resource(store, Resource("writer", "Other.")))
    ran = lightning("resources", "show", "writer", "--runs", str(tuned))
    assert (ran.code, "2 stores in" in ran.err, "PLACE#writer" in ran.err) == (2, True, True)
    assert lightning("resources", "show", f"{tuned / 'other'}#writer", "--content").out == "Other."
    ran = lightning("resources", "show", "nobody", "--runs", str(tuned))
    assert (ran.code, "has a resource 'nobody'" in ran.err) == (2, True)
    ran = lightning("resources", "show", "writer@", "--runs", str(tuned))
    assert (ran.code, "names no resource" in ran.err) == (2, True)


@pytest.fixture
def evil(tmp_path: Path) -> str:
    """The database of a resource in which every text that somebody else chooses would steer a terminal."""

    async def fill(store: Store) -> None:
        for text in ("was", EVIL):
            await put_resource(store, Resource("w", text, ResourceKind.PROMPT, {EVIL: EVIL}))
        await set_alias(store, "w", "live", 2)

    on(tmp_path, fill)
    return str(tmp_path)


@pytest.mark.parametrize(
    "command", ["ls HERE", "show HERE#w", "show HERE#w --json", "diff HERE#w 1 2", "compare HERE#w"]
)
def test_no_command_lets_a_store_steer_the_terminal(
    evil: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["resources", *command.replace("HERE", evil).split()])
    printed = "".join(capsys.readouterr())
    assert printed.strip()
    assert STEERS.search(printed) is None
    assert "Usage" not in printed


@pytest.mark.parametrize("terminal", [True, False])
def test_a_file_gets_a_content_as_it_is_and_a_terminal_does_not(
    evil: str, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with pytest.raises(SystemExit):
        main(["resources", "show", f"{evil}#w", "--content"])
    assert capsys.readouterr().out == (printable(EVIL) if terminal else EVIL)


def test_no_command_shows_the_password_of_a_store(
    lightning: Command, tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known:
        def opened_store(self, url: str, *, make: bool) -> Any:
            return plugins().opened_store(sqlite_url(tuned / "tuned" / "lightning.db"), make=make)

    monkeypatch.setattr(output, "plugins", Known)
    url, shown = "postgresql://me:hunter2@db/l", "postgresql://***@db/l"
    typo = "postgresql:/me:hunter2@db/l"
    prompt = tuned.parent / "prompt.txt"
    prompt.write_text("Write.")
    for command, named in (
        (("resources", "ls", url), True),
        (("resources", "put", f"{url}#writer", str(prompt)), False),
        (("resources", "put", f"{url}#writer@1", str(prompt)), False),
        (("resources", "ls", url), True),
        (("resources", "ls", url, "--json"), True),
        (("resources", "show", "nobody", "--runs", url), True),
        (("resources", "show", f"{url}#writer@9"), True),
        (("resources", "show", url), True),
        (("resources", "show", "writer", "--runs", typo), False),
        (("resources", "show", f"{typo}#writer"), False),
    ):
        ran = lightning(*command)
        assert "hunter2" not in ran.out + ran.err, command
        assert (shown in ran.out + ran.err) is named, (command, ran)
