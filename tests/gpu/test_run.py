"""The driver of `make gpu`, without a GPU: the order, resuming, limits, results, parts that fail in each way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import run, sleep_and_wake
from tests.gpu.run import PARTS, Part, Place

PLACE = Place("abc", "NVIDIA Test", "580.1", {"torch": "2.13.0", "vllm": None})
SCRIPTS = {
    "good": "import pathlib, sys; pathlib.Path(sys.argv[1], 'f.json').write_text('{\"seconds\": 1.5}')",
    "fails": "raise SystemExit('the GPU is on fire')",
    "dies": "import os; os.kill(os.getpid(), 9)",
    "hangs": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
    "silent": "pass",
}


def part(name: str, seconds: float = 60.0) -> Part:
    return Part(name, "it shows", seconds, ("{python}", "-c", SCRIPTS[name], "{work}"), "f.json")


def result(out: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((out / f"gpu-{name}.json").read_text()))


def test_each_part_leaves_its_result_and_none_costs_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "GRACE", 0.1)
    absent = Part("absent", "it shows", 60.0, ("/nowhere/lightning",))
    parts = [part("fails"), part("dies"), part("hangs", 0.5), absent, part("silent"), part("good")]
    assert run.run_parts(parts, PLACE, tmp_path) == 1
    found = {each.name: result(tmp_path, each.name) for each in parts}
    assert {name: (one["outcome"], one["exit_code"]) for name, one in found.items()} == {
        "fails": ("failed", 1), "dies": ("failed", -9), "hangs": ("timeout", None), "absent": ("failed", None),
        "silent": ("failed", 0), "good": ("passed", 0),
    }  # fmt: skip
    assert "the GPU is on fire" in found["fails"]["error"]
    assert "cannot be started" in found["absent"]["error"]
    assert "it left no figures" in found["silent"]["error"]
    assert (found["good"]["figures"], found["good"]["error"]) == ({"seconds": 1.5}, "")
    for one in found.values():
        assert (one["commit"], one["gpu"], one["driver"]) == ("abc", "NVIDIA Test", "580.1")
        assert one["versions"] == {"torch": "2.13.0", "vllm": None}
        assert one["seconds"] >= 0
    begun = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "at most" in line]
    assert begun == [each.name for each in parts]


def test_nothing_of_a_part_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that a part leaves holds a pipe open, whose end is the event."""
    monkeypatch.setattr(run, "GRACE", 0.1)
    child = "import time; print(1, flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], stdout=open(sys.argv[1], 'w'))"
    pipe = tmp_path / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.DEVNULL)
    one = Part("leaves", "it shows", 60.0, ("{python}", "-c", code, str(pipe)))
    assert run.run_parts([one], PLACE, tmp_path) == 0
    assert reader.wait() == 0


def counting(tmp_path: Path) -> tuple[Part, Callable[[], int]]:
    """A part, and how often it was run."""
    log = tmp_path / "runs"
    return Part(
        "one", "it shows", 60.0, ("{python}", "-c", f"open({str(log)!r}, 'a').write('.')")
    ), lambda: len(log.read_text()) if log.exists() else 0


@pytest.mark.parametrize(
    ("other", "again", "times"),
    [
        (PLACE, False, 1),
        (PLACE, True, 2),
        (replace(PLACE, commit="def"), False, 2),
        (replace(PLACE, gpu="NVIDIA Other"), False, 2),
        (replace(PLACE, driver="590.1"), False, 2),
        (replace(PLACE, versions={"torch": "2.13.0", "vllm": "0.20"}), False, 2),
    ],
    ids=["known", "again", "another commit", "another GPU", "another driver", "other packages"],
)
def test_it_goes_on_with_what_has_no_result_yet(tmp_path: Path, other: Place, again: bool, times: int) -> None:
    one, runs = counting(tmp_path)
    assert run.run_parts([one], PLACE, tmp_path) == 0
    assert run.run_parts([one], other, tmp_path, again=again) == 0
    assert runs() == times


def test_a_known_failure_is_a_result_and_still_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run.run_parts([part("fails")], PLACE, tmp_path) == 1
    assert capsys.readouterr().out.count("at most") == 1


@pytest.mark.parametrize("left", ["", "[]", '{"commit": "abc"}'])
def test_half_a_result_is_none(tmp_path: Path, left: str) -> None:
    one, runs = counting(tmp_path)
    (tmp_path / "gpu-one.json").write_text(left)
    assert run.run_parts([one], PLACE, tmp_path) == 0
    assert (runs(), result(tmp_path, "one")["outcome"]) == (1, "passed")


def test_when_the_minutes_are_over_the_rest_waits_for_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that is cut off sooner than it may take has come to nothing."""
    one, runs = counting(tmp_path)
    assert run.run_parts([one], PLACE, tmp_path, minutes=0.9) == 1
    assert (runs(), (tmp_path / "gpu-one.json").exists()) == (0, False)
    assert "not begun, it may take 60 s and of 0.9 minutes 54 s are left" in capsys.readouterr().out
    assert run.run_parts([one], PLACE, tmp_path) == 0


def test_a_machine_without_a_gpu_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.main(["--out", str(tmp_path)], [part("good")]) == 2
    said = capsys.readouterr().out
    assert (said.count("."), "(nvidia-smi is not installed)" in said) == (1, True)
    smi(tmp_path, "echo 'No devices were found'; exit 6")
    assert run.main(["--look"]) == 2
    assert "(nvidia-smi finds none)" in capsys.readouterr().out
    assert list(tmp_path.glob("*.json")) == []


def smi(folder: Path, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_parts_are_chosen_by_name_and_the_code_must_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(tmp_path, "echo 'NVIDIA H200, 580.159.03'")
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert run.main(["--out", str(tmp_path)], [part("good")]) == 3
    assert "--commit NAME" in capsys.readouterr().out
    given = ["--commit", "mine", "--only", "good", "--out", str(tmp_path)]
    assert run.main(given, [part("fails"), part("good")]) == 0
    found = result(tmp_path, "good")
    assert (found["commit"], found["gpu"], found["driver"]) == ("mine", "NVIDIA H200", "580.159.03")
    assert not (tmp_path / "gpu-fails.json").exists()


def test_results_do_not_change_the_commit_and_other_changes_do(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@example.org", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert run.current_commit(tmp_path) == ""
    git("init", "-q")
    (tmp_path / "docs" / "data").mkdir(parents=True)
    (tmp_path / "docs" / "data" / "gpu-one.json").write_text("{}")
    (tmp_path / "code.py").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    (tmp_path / "docs" / "data" / "gpu-one.json").write_text('{"outcome": "passed"}')
    assert run.current_commit(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert run.current_commit(tmp_path).startswith(f"{head}+")


def test_all_parts_together_fit_into_the_time() -> None:
    assert [each.name for each in PARTS] == ["demo", "tests", "sleep", "tree", "verl", "long", "replicas"]
    assert sum(each.seconds for each in PARTS) <= 60 * run.MINUTES


# the real parts' commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "verl"])
def test_the_command_line_of_a_demonstration_is_taken(name: str) -> None:
    import typer
    from lightning.cli.app import build
    from lightning.config import load_config

    words = next(each.command for each in PARTS if each.name == name)
    command = typer.main.get_command(build("demo"))
    given = command.commands[words[1]].make_context("demo", list(words[2:])).params  # type: ignore[attr-defined]
    load_config(overrides=given["set_"])


@pytest.mark.parametrize("module", ["sleep_and_wake", "tree_and_rows", "verl_rows_and_adapters", "two_replicas"])
def test_what_measures_says_how_it_is_called(module: str) -> None:
    command = [sys.executable, "-m", f"tests.gpu.{module}", "--help"]
    ran = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True, check=True)
    assert f"python -m tests.gpu.{module} FIGURES.json" in ran.stdout
    (part,) = [each for each in PARTS if f"tests.gpu.{module}" in each.command]
    assert part.command[1:] == ("-m", f"tests.gpu.{module}", "{work}/figures.json")


def test_the_tests_for_a_gpu_are_there() -> None:
    (part,) = [each for each in PARTS if each.name == "tests"]
    assert all((run.ROOT / word).is_file() for word in part.command if word.startswith("tests/"))


class Server:
    """Takes 10 GiB, and gives 8 of them back when it sleeps, as long as it is told to."""

    gives_back, drifts, taken = True, 0.0, 2.0

    def __init__(self, *_: object, **__: object) -> None:
        self.model, self._weights = "policy", -1.0

    async def start(self) -> None:
        Server.taken = 12.0

    async def sleep(self) -> None:
        Server.taken = 4.0 if self.gives_back else 12.0

    async def wake(self) -> None:
        Server.taken = 12.0
        self._weights += self.drifts

    async def update(self, weights: Path, _: int) -> None:
        self._weights = -1.0 if "first" in str(weights) else -2.0

    async def close(self) -> None:
        Server.taken = 2.0

    def _running(self) -> Server:
        return self

    async def served_logprobs(self, _: str, ids: list[int]) -> list[float]:
        return [self._weights for _ in ids[1:]]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    monkeypatch.setattr("lightning.policy_server.vllm_server.OwnedVLLM", Server)
    monkeypatch.setattr("lightning.testing.tiny_models.make_tiny_model", lambda folder, **_: folder)
    monkeypatch.setattr(sleep_and_wake, "used", lambda: Server.taken)
    return Server


async def test_sleep_is_measured(server: type[Server], tmp_path: Path) -> None:
    found = await sleep_and_wake.measure(tmp_path)
    assert (found["before"], found["after"], found["new_weights_differ_by"]) == (2.0, 2.0, 1.0)
    assert [(each["awake"], each["asleep"]) for each in found["rounds"]] == [(12.0, 4.0)] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "value"), [("gives_back", False), ("drifts", 0.5)])
async def test_a_server_that_keeps_its_memory_or_wakes_as_another_fails(
    server: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(server, name, value)
    with pytest.raises(AssertionError):
        await sleep_and_wake.measure(tmp_path)
    assert Server.taken == 2.0
