"""`lightning eval`: what a model earns, with what failed told apart; a stopped one goes on; wrong names are explained."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.cli.output import locate, with_store
from lightning.config import Config
from lightning.errors import ConfigError
from lightning.store.url import sqlite_url
from lightning.testing.fake_vllm import Reply
from lightning_branching.policies import find_model

from tests.core.trainer.test_tiny_run import equal, model, state
from tests.core.trainer.test_tiny_run import train as train

from .evaluating import FIXED, ScriptedVLLM, asked, said
from .evaluating import vllm as vllm

EVAL = ["eval", "one", "asking:agent", "--tasks", "tasks.jsonl", "-n", "2", *FIXED]


def report(capsys: Any, *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert said([*EVAL, *more, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["report"]
    return found


def measures(found: dict[str, Any], which: str) -> dict[str, float]:
    return {each["name"]: each[which]["value"] for each in found["measures"] if each[which]}


def test_half_of_the_tasks_are_solved(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "yes" if int(asked(body).split()[-1]) % 2 else "no"
    found = report(capsys, "--out", "runs/half")
    assert measures(found, "scored") == {"avg@2": 0.5, "pass@1": 0.5, "pass@2": 0.5}
    assert (found["tasks"], found["rollouts"], found["scored"], found["faults"]) == (12, 24, 24, {})
    low, high = found["measures"][0]["scored"]["interval"]
    assert 0.15 < low < 0.3, "twelve tasks, not 24 rollouts"
    assert high == pytest.approx(1 - low)
    assert said(["runs", "show", "half", "--runs", "runs/half"]) == 0
    assert "held-out after 0 steps: 0.500 over 24 tasks" in capsys.readouterr().out
    assert said(["runs"]) == 0
    assert "half" in capsys.readouterr().out


def test_failures_are_told_apart_and_never_a_silent_zero(vllm: ScriptedVLLM, capsys: Any) -> None:
    """Task 3 gets no number, which the agent's own code stumbles over; task 4 is answered with an error each time."""

    def answer(body: Any, model: Path) -> Reply | str:
        number = asked(body).split()[-1]
        return Reply(status=400, message="too long") if number == "4" else "nothing" if number == "3" else "0.5"

    vllm.answer = answer
    EVAL[2] = "asking:graded"
    try:
        assert said([*EVAL, "--out", "runs/failing", "--success", "0.5"]) == 0
    finally:
        EVAL[2] = "asking:agent"
    shown = " ".join(capsys.readouterr().out.split())
    assert "12 tasks x 2 rollouts, 20 of 24 have a reward" in shown
    assert "avg@2 0.500" in shown
    assert "0.417" in shown, "20 of 24 times 0.5"
    assert "1.000 (10 tasks)" in shown, "two tasks have no reward"
    assert "leaves out tasks with too few rewards" in shown
    assert "4 rollouts failed, by fault of: agent 4" in shown
    assert "2 x ValueError: could not convert string to float: 'nothing'" in shown


def test_a_stopped_one_goes_on_and_a_finished_one_asks_nothing(vllm: ScriptedVLLM, capsys: Any) -> None:
    stopped: list[bool] = []

    def stops(body: Any, model: Path) -> str:
        if len(vllm.bodies) >= 10 and not stopped:  # of two that come at once neither may see exactly ten
            stopped.append(True)
            signal.raise_signal(signal.SIGINT)
        if stopped:  # or the rest would be answered before a busy machine's main thread hears of the signal
            time.sleep(0.1)
        return "yes"

    vllm.answer = stops
    assert said([*EVAL, "--out", "runs/stopped", "--set", "runner.concurrency=2"]) == 130
    assert "the same command with --out runs/stopped --resume" in " ".join(capsys.readouterr().err.split())
    asked_before = len(vllm.bodies)
    assert asked_before < 24
    vllm.answer = lambda body, model: "yes"
    found = report(capsys, "--out", "runs/stopped", "--resume")
    assert found["scored"] == 24
    assert len(vllm.bodies) < asked_before + 24, "what had ended is not run again"
    served, bodies = len(vllm.models), len(vllm.bodies)
    assert report(capsys, "--out", "runs/stopped", "--resume") == found
    assert (len(vllm.models), len(vllm.bodies)) == (served, bodies), "no vLLM for nothing"
    assert said([*EVAL, "--out", "runs/stopped"]) == 2
    assert "--resume to go on" in capsys.readouterr().err
    assert said([*EVAL, "--out", "runs/stopped", "--resume", "--temperature", "0.5"]) == 2
    assert "begun with another trainer.eval_temperature" in " ".join(capsys.readouterr().err.split())
    for setting in ("runner.timeout=5", "runner.max_attempts=1", "gateway.seed_calls=true", "policy_server.dtype=auto"):
        assert said([*EVAL, "--out", "runs/stopped", "--resume", "--set", setting]) == 2
        assert f"begun with another {setting.partition('=')[0]}" in " ".join(capsys.readouterr().err.split())
    assert said([*EVAL, "--out", "runs/stopped", "--resume", "--set", "runner.drain=7"]) == 0
    assert (
        "goes on with another runner.concurrency (2 before, 32 now), runner.drain (30.0 before, 7.0 now)"
        in " ".join(capsys.readouterr().err.split())
    )
    Path("elsewhere").mkdir()
    Path("one").rename("elsewhere/one")
    Path("one").symlink_to("other")
    assert said([*EVAL, "--out", "runs/stopped", "--resume"]) == 2
    assert "begun with another model" in " ".join(capsys.readouterr().err.split()), "though it is named alike"


def test_the_temperature_is_what_is_asked_for(vllm: ScriptedVLLM, capsys: Any) -> None:
    found = report(capsys, "--out", "runs/cold", "--temperature", "0")
    assert {body["temperature"] for body in vllm.bodies} == {0.0}
    assert "at temperature 0 the rollouts of a task are mostly alike" in found["warnings"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "empty.jsonl"], "empty.jsonl has no task in it"),
        (["eval", "mine@3"], "there is no run at mine or runs/mine"),
        (["eval", "policy/weights@best"], "no store in runs has a resource 'policy/weights'"),
        (["eval", "nowhere#policy/weights@best"], "there is no database at 'nowhere'"),
        (["eval", "./nothing"], "the model folder ./nothing does not exist; and there is no run at nothing"),
        (["eval", "begun"], "has no run begun: its training ended before the run began"),
        (["eval", "one", "asking:nobody"], "the module 'asking' has no 'nobody'"),
        (
            ["eval", "one", "asking:broken"],
            "all 24 rollouts failed, so that there is nothing to measure: 24 x ValueError",
        ),
        (["--bounds", "1,0"], "the lowest reward must be below the highest"),
        (["--bounds", "0,inf"], "give two numbers, the lowest and the highest reward"),
        (["--runner", "remote"], "runner 'remote' runs no agents here"),
        (["--set", "policy_server.attach=http://localhost:1"], "an evaluation starts a vLLM of its own"),
    ],
)
def test_bad_input_is_named_with_its_cure(vllm: ScriptedVLLM, capsys: Any, arguments: list[str], words: str) -> None:
    Path("empty.jsonl").write_text("\n")
    Path("begun").mkdir()
    asyncio.run(with_store(sqlite_url(Path("begun", "lightning.db")), lambda store: store.list_runs(), make=True))
    given = [*EVAL, "--out", "runs/bad"]
    given[: len(arguments)] = arguments if arguments[0] == "eval" else given[: len(arguments)]
    assert said(given if arguments[0] == "eval" else [*given, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_failure_is_the_lowest_reward_that_there_can_be(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "nothing" if int(asked(body).split()[-1]) % 2 else "1"
    arguments = [*EVAL, "--out", "runs/low", "--bounds=-1,1"]
    arguments[2] = "asking:graded"
    assert said(arguments) == 0
    captured = capsys.readouterr()
    shown = " ".join(captured.out.split())
    assert "with the failed as -1  95 % interval" in captured.out, "the header, in one line, since this is no terminal"
    assert "avg@2 1.000 (6 tasks)" in shown
    assert "0.000 -0.536 to 0.536" in shown, "half of them 1, half of them -1"


def test_rewards_beyond_the_bounds_and_below_success_are_warned_of(vllm: ScriptedVLLM, capsys: Any) -> None:
    vllm.answer = lambda body, model: "7"
    EVAL[2] = "asking:graded"
    try:
        found = report(capsys, "--out", "runs/seven", "--success", "10")
        assert found["measures"][0]["scored"]["interval"] is None
        assert "outside the bounds 0 to 1" in found["warnings"][0]
        assert "no reward reaches 10, the highest is 7" in found["warnings"][1]
        assert report(capsys, "--out", "runs/seven", "--resume", "--bounds", "0,10")["measures"][0]["scored"][
            "interval"
        ]
    finally:
        EVAL[2] = "asking:agent"


def test_a_run_a_step_and_an_alias_are_found_with_their_very_weights(train: Any, tmp_path: Path) -> None:
    folder = train("runs/mine", 2, trainer__keep_checkpoints=1)
    runs, into = tmp_path / "runs", tmp_path / "made"
    last = find_model("mine", runs, into, Config())
    assert (last.name, last.folder) == ("mine@2", (folder / "model").resolve())
    first = find_model(f"{folder}@1", runs, into, Config())
    assert first.name == "mine@1"
    assert not equal(model(first.folder), model(folder / "model"))
    again = train("runs/again", 1)
    assert equal(model(first.folder), model(again / "model")), "trained alike up to there"
    assert find_model("mine@0", runs, into, Config()).folder == (tmp_path / "folder").resolve()
    with pytest.raises(ConfigError, match="run mine has 2 committed steps: there is no mine@3"):
        find_model("mine@3", runs, into, Config())
    with pytest.raises(ConfigError, match="names no step of a run: write RUN@STEP"):
        find_model("mine@best", runs, into, Config())
    weights = find_model("runs/mine#policy/weights@1".replace("runs", str(runs)), runs, into, Config())
    assert (weights.name, weights.folder) == ("policy/weights@1", (folder / "model").resolve())
    with pytest.raises(ConfigError, match=r"2 runs in .* have 'policy/weights': write PLACE#policy/weights@latest"):
        find_model("policy/weights@latest", runs, into, Config())
    assert state(folder / "checkpoints" / "step-00000002"), "nothing of the run was touched"
    assert locate(str(folder), runs)
    (folder / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="are not those of policy/weights@1 any more"):
        find_model(f"{folder}#policy/weights", runs, into, Config())


@pytest.mark.parametrize("name", ["tiny@2", "a#b", "a@b#c"])
@pytest.mark.parametrize("place", ["models", "runs"])
def test_a_folder_that_exists_is_meant_whatever_its_name_looks_like(tmp_path: Path, name: str, place: str) -> None:
    folder = tmp_path / place / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    found = find_model(str(folder), tmp_path / "runs", tmp_path / "made", Config())
    assert (found.name, found.folder) == (str(folder), folder.resolve())


def test_the_model_of_the_best_evaluation_is_named_by_its_step(train: Any, tmp_path: Path) -> None:
    """The best evaluation of a run of two steps was that after one, whose model its `model` is then."""
    folder, runs, into = train("runs/mine", 2), tmp_path / "runs", tmp_path / "made"
    last, first = find_model("mine@2", runs, into, Config()), find_model("mine@1", runs, into, Config())
    assert last.folder == (folder / "model").resolve()
    kept = folder / "best" / "step-00000001"
    shutil.copytree(first.folder, kept)
    shutil.rmtree(into)
    weights = model(last.folder)
    shutil.rmtree(folder / "model")
    shutil.copytree(kept, folder / "model")
    with sqlite3.connect(folder / "lightning.db") as database:
        changed = database.execute(
            "UPDATE runs SET config = json_set(config, '$.config.trainer.keep', 'best') WHERE id = 'mine'"
        )
        assert changed.rowcount == 1
    best = find_model("mine", runs, into, Config())
    assert (best.name, best.folder) == ("mine@1", (folder / "model").resolve())
    assert find_model("mine@1", runs, into, Config()) == best
    explicit = find_model("mine@2", runs, into, Config())
    assert explicit.folder.is_relative_to(into)
    assert equal(model(explicit.folder), weights)


def test_runs_of_one_name_are_told_apart_and_a_fork_begins_with_what_it_forked(train: Any, tmp_path: Path) -> None:
    settings = {"trainer__checkpoint_every": 1}
    first = train("runs/first", 2)
    other = train("others/first", 2, engine__lr=5e-3, **settings)
    into = tmp_path / "made"
    found = [find_model(f"{folder}@1", tmp_path / "runs", into, Config()) for folder in (first, other)]
    assert found[0].name == found[1].name
    assert found[0].title != found[1].title
    assert not equal(model(found[0].folder), model(found[1].folder))
    forked = train("runs/forked", 2, from_run=f"{first}@2")
    shutil.rmtree(forked / "checkpoints" / "step-00000000")
    with pytest.raises(
        ConfigError, match=r"forked began with the weights of first@2, which it has not kept.* name first@2"
    ):
        find_model("forked@0", tmp_path / "runs", into, Config())
    assert find_model("forked@1", tmp_path / "runs", into, Config()).name == "forked@1", "from its checkpoint"
