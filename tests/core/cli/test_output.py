"""What commands print for programs, and for people: texts of others are shown, never obeyed."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from pathlib import Path

import pytest
from lightning.cli.app import main
from lightning.cli.output import fail, next_steps, print_json, print_table, say, warn
from lightning.plugins import plugins
from lightning.safe_text import PrintableFormatter
from lightning.store.url import sqlite_url
from lightning.terminal import Terminal
from lightning.trainer.summary import Evaluation, Reporter
from lightning.types import Fault, Outcome, Rollout, Run, Status, StepRecord, Task

STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal would obey; lines end with line ends."""
EVIL = "[/x][red]\x1b[2J\x1b]52;c;cm0gLXJm\x07\x9b2J\x7f\r:cat:"
"""Clears a screen, writes into a clipboard, returns to the beginning of a line; to rich it closes what was not opened."""
SHOWN = r"[/x][red]\x1b[2J\x1b]52;c;cm0gLXJm"


@pytest.mark.parametrize("odd", [2**70, "lone \ud800"])
def test_json_is_the_same_whoever_writes_it(odd: object, capsys: pytest.CaptureFixture[str]) -> None:
    """orjson writes neither long integers nor lone surrogates, and the standard library writes NaN, which is no JSON."""
    step = StepRecord("run", 1, 1, (("r", 1),), ("a", "b"), "c", metrics={"loss": float("nan")})
    values = {"steps": [step], "seen": {2, 1}, "status": Status.FAILED, "none": float("inf"), "at": Path("a/b")}
    print_json(values)
    usual = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert usual["steps"][0]["metrics"] == {"loss": None}
    print_json({**values, "odd": odd})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {**usual, "odd": odd}


def test_json_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": EVIL})
    out = capsys.readouterr().out
    assert (json.loads(out), STEERS.search(out)) == ({"name": EVIL}, None)


def test_whatever_is_printed_is_shown_and_not_obeyed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    text = EVIL.removeprefix("[/x][red]") + "\ud800"
    print_table(["name", text], [[text, f"[red]{text}"]], title=text)
    say(f"[bold]{text}")
    fail(text)
    warn(text)
    printed = "".join(capsys.readouterr())
    ours = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert printed != ours, "lightning's own colours are there"
    assert STEERS.search(ours) is None
    assert ours.count(r"\x1b]52;c;cm0gLXJm") == 7
    assert ours.count(r"\ud800") == 7
    assert ":cat:" in ours


def test_a_pipe_gets_each_row_in_one_line_with_whole_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ids = [f"demo-calculator-20261129-201003/{number}/0" for number in range(2)]
    print_table(["rollout", "why"], [[one, "a reason of\nmany words " * 4] for one in ids], title="rollouts")
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert (title, header.split()) == ("rollouts", ["rollout", "why"])
    assert [row.split()[0] for row in rows] == ids
    assert all(row.count("many words") == 4 for row in rows)


@pytest.mark.parametrize("columns", [30, 60])
def test_a_terminal_gets_whole_ids_and_wrapped_words(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    one = "demo-calculator-20261129-201003/1/0"
    print_table(["rollout", "why"], [[one, "many words " * 9]])
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert one in lines[1].split()
    assert len(lines) > 3
    assert max(map(len, lines)) <= max(columns, len(one) + len("  words")) + 2


def test_the_next_commands_are_on_standard_error_as_a_shell_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    next_steps(("see it", ["runs", Path("a b/$c")]), ("do what no plugin brings", ["no-such-command"]))
    assert capsys.readouterr() == ("", "Next: see it: lightning runs 'a b/$c'\n")


def test_logs_are_shown_and_not_obeyed() -> None:
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s\n\tat", (EVIL,), None)
    assert PrintableFormatter("%(message)s").format(record).startswith(f"{SHOWN}\\x07\\x9b2J\\x7f\\r:cat:\n\tat")


def test_the_lines_of_a_run_show_names_that_agents_chose() -> None:
    """To rich, a reward's name could close what nobody opened, which ended the training."""
    console = Terminal(file=io.StringIO(), width=400)
    metrics = dict.fromkeys(("reward", "rollouts", "reward_with_failures", "failed", "groups_used", "groups"), 0.0)
    metrics |= {"tokens_per_second": 1.0, "max_logprob_gap": 0.0, f"reward/{EVIL}": 1.0}
    with Reporter(console=console) as reporter:
        reporter.begin(0, 10)
        reporter.step(1, metrics, 1.0)
        reporter.evaluated(Evaluation(0, 1.0, 1, 0, {EVIL: 1.0}))
        reporter.say(EVIL)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert STEERS.search(shown) is None
    assert shown.count(SHOWN) == 3


@pytest.fixture
def evil(tmp_path: Path) -> str:
    """The database of a run in which every text that somebody else chooses would steer a terminal."""
    url = sqlite_url(tmp_path / "lightning.db")

    async def fill() -> None:
        store = plugins().store(url)
        await store.open()
        await store.put_run(Run("r", "r", {"model": EVIL, "forked_from": EVIL}, 1000.0))
        await store.create_rollouts([Rollout(id=f"r/{EVIL}", run="r", task=Task(EVIL), group=EVIL)])
        await store.create_rollouts([Rollout(id=f"r/{EVIL}2", run="r", task=Task(EVIL), group=EVIL, index=1)])
        failed, right = await store.lease("r", EVIL, limit=2)
        await store.complete(failed.rollout.id, failed.attempt, Outcome(fault=Fault.AGENT, error=EVIL))
        await store.complete(right.rollout.id, right.attempt, Outcome(reward=1.0, rewards={EVIL: 1.0}))
        ids = ((right.rollout.id, right.attempt),)
        await store.commit_step(StepRecord("r", 1, 1, ids, ("a", EVIL), EVIL, metrics={"reward": 1.0, EVIL: 1.0}))
        await store.close()

    asyncio.run(fill())
    return str(tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "runs --runs HERE",
        "runs --runs HERE show r",
        "runs --runs HERE show r --json",
        "audit HERE",
        "advise HERE",
        "profile HERE",
        "plan HERE",
        "db status HERE",
    ],
)
def test_no_command_lets_a_store_steer_the_terminal(
    evil: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(command.replace("HERE", evil).split())
    printed = "".join(capsys.readouterr())
    assert printed.strip()
    assert STEERS.search(printed) is None
    assert "Usage" not in printed
