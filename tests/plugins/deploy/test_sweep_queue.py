"""The queue of a sweep: real processes that only pretend to train, and once a real training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning_deploy import sweep as sweeping
from lightning_deploy.sweep import BEGUN, LOG, REPORT, PlannedRun, Slot, alone, check_begun, slots, summed, work
from lightning_examples import raw_python, word_problems

PRETENDS = """#!{python}
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
given = sys.argv[4:]
out = pathlib.Path(given[given.index("--out") + 1])
seed = int(next(a for a in given if a.startswith("trainer.seed="))[13:])
with (out.parent / "said").open("a") as said:
    said.write(json.dumps({{"name": out.name, "resume": "--resume" in given, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ["OMP_NUM_THREADS"]}}) + "\\n")
(out / "lightning.db").touch()
if (out.parent / "together").exists():
    until = time.monotonic() + 30
    while len((out.parent / "said").read_text().splitlines()) < 2:
        assert time.monotonic() < until, "the other one waits until this one has ended"
        time.sleep(0.02)
if (out.parent / "slow").exists():
    print("training", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (out / "saved").touch()
        sys.exit(130)
if seed == 13:
    print("error: no luck with 13")
    sys.exit(2)
time.sleep(0.3)
held_out = [{{"reward_with_failures": 0.1}}, {{"reward_with_failures": 0.5 + seed / 10}}]
(out / "report.json").write_text(json.dumps({{"evaluations": held_out, "failed": seed}}))
"""


@pytest.fixture
def pretending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sweep whose runs are this script."""
    script = tmp_path / "python"
    script.write_text(PRETENDS.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sweeping.sys, "executable", str(script))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = tmp_path / "sweep"
    folder.mkdir()
    return folder


def planned(*seeds: int, variant: str = "run") -> list[PlannedRun]:
    return [PlannedRun(f"{variant}-seed{n}", variant, n, ("a:b", "--set", f"trainer.seed={n}")) for n in seeds]


def begun(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "said").read_text().splitlines()]


def test_runs_go_in_turn_and_a_failed_one_stops_no_other(pretending: Path) -> None:
    told: list[str] = []
    ended = work(planned(0, 13, 2), pretending, [Slot(2)], told.append)
    assert [one.report is not None for one in ended] == [True, False, True]
    assert ended[1].why == "failed with exit code 2: error: no luck with 13"
    assert [one["name"] for one in begun(pretending)] == ["run-seed0", "run-seed13", "run-seed2"]
    assert "no luck" in (pretending / "run-seed13" / LOG).read_text()
    assert [one["threads"] for one in begun(pretending)] == ["2", "2", "2"]
    found = summed("run", ended)
    assert (found["done"], found["before"], found["after"]) == (2, 0.1, pytest.approx(0.6))
    assert found["spread"] == pytest.approx(0.1414, abs=1e-3)
    assert found["failed"] == ["run-seed13 failed with exit code 2: error: no luck with 13"]
    assert found["failed_rollouts"] == 2


def test_what_is_done_is_not_run_again_and_what_was_begun_goes_on(pretending: Path) -> None:
    work(planned(0, 13), pretending, [Slot(1)], lambda _: None)
    told: list[str] = []
    work(planned(0, 13, 2), pretending, [Slot(1)], told.append)
    again = begun(pretending)[2:]
    assert [(one["name"], one["resume"]) for one in again] == [("run-seed13", True), ("run-seed2", False)]
    assert told[0] == "1 of 3 runs are done already"


def test_a_report_that_a_kill_tore_is_none(pretending: Path) -> None:
    work(planned(0), pretending, [Slot(1)], lambda _: None)
    (pretending / "run-seed0" / REPORT).write_text('{"evalua')
    (ended,) = work(planned(0), pretending, [Slot(1)], lambda _: None)
    assert ended.report is not None
    assert [one["resume"] for one in begun(pretending)] == [False, True]


def test_some_run_at_the_same_time_each_with_gpus_of_its_own(pretending: Path) -> None:
    (pretending / "together").touch()  # the first one goes on when the second one has begun
    ended = work(planned(0, 1, 2, 3), pretending, [Slot(1, "0,1"), Slot(1, "2,3")], lambda _: None)
    assert [one.why for one in ended] == [""] * 4
    one, other, *_ = begun(pretending)
    assert {one["gpus"], other["gpus"]} == {"0,1", "2,3"}


def test_a_machine_is_cut_into_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert slots(0, 2) == [Slot(8, "4,5"), Slot(8, "6,7")]
    assert slots(0, 0) == [Slot(16)]
    assert slots(4, 1)[3] == Slot(4, "7")
    with pytest.raises(ConfigError, match="more than the 4"):
        slots(3, 2)
    with pytest.raises(ConfigError, match="there are 4"):
        slots(1, 5)


def test_a_run_that_was_begun_otherwise_is_refused(pretending: Path) -> None:
    work(planned(0), pretending, [Slot(1)], lambda _: None)
    changed = [PlannedRun("run-seed0", "run", 0, ("a:b", "--set", "engine.lr=1", "--set", "trainer.seed=0"))]
    with pytest.raises(ConfigError, match="begun with other arguments"):
        check_begun(changed, pretending)
    check_begun(planned(0, 1), pretending)
    assert json.loads((pretending / "run-seed0" / BEGUN).read_text())[0] == "a:b"


def test_one_sweep_at_a_time_in_a_folder(pretending: Path) -> None:
    with alone(pretending), pytest.raises(ConfigError, match="another `lightning sweep`"), alone(pretending):
        pass


def test_an_interruption_lets_runs_save_what_they_have(pretending: Path) -> None:
    (pretending / "slow").touch()

    def interrupt(text: str) -> None:
        deadline = time.monotonic() + 20
        while (
            not (pretending / "run-seed0" / LOG).exists()
            or "training" not in (pretending / "run-seed0" / LOG).read_text()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(planned(0, 1), pretending, [Slot(1)], interrupt)
    assert (pretending / "run-seed0" / "saved").exists()
    assert not (pretending / "run-seed1").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_of_real_trainings_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """By its command: two seeds of the tiny model's agent, the sweep stopped while the first one trains."""
    tasks = "".join(
        json.dumps({"input": task.input, "expected": task.expected}) + "\n" for task in word_problems.tasks(12, 0)
    )
    (tmp_path / "tasks.jsonl").write_text(tasks)
    model = Path(raw_python.__file__).parent / "model"
    train = [
        "lightning_examples.raw_python.agent:agent",
        "--model",
        str(model),
        "--tasks",
        str(tmp_path / "tasks.jsonl"),
    ]
    train += ["--val", str(tmp_path / "tasks.jsonl"), "--set", "trainer.steps=2", "--set", "trainer.tasks_per_step=4"]
    (tmp_path / "sweep.toml").write_text(f"train = {json.dumps(train)}\nseeds = [0, 1]\n")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "lightning", "sweep", str(tmp_path / "sweep.toml"), "--out", str(out)]
    first = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (out / "run-seed0" / LOG).exists() or "step    1/2" not in (out / "run-seed0" / LOG).read_text():
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)  # a worker of pytest-xdist, and what it starts, ignores Ctrl-C
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 130, said
    assert "Go on with: the same command" in said
    assert not (out / "run-seed1").exists()
    ran = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    assert found["variants"][0]["done"] == 2
    assert [one["report"]["steps"] for one in found["runs"]] == [2, 2]
    assert len({one["report"]["seed"] for one in found["runs"]}) == 2
    assert (out / "run-seed1" / REPORT).exists()


KILLED = """
import os, pathlib, signal, sys
from lightning_deploy.processes import start
command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
child = start(command, pathlib.Path(sys.argv[1]), os.environ)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's death on Linux alone")
def test_a_run_ends_when_its_sweep_was_killed(tmp_path: Path) -> None:
    sweep = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / LOG)], stdout=subprocess.PIPE, text=True)
    assert sweep.stdout is not None
    with sweep.stdout:
        child = int(sweep.stdout.readline())
    until = time.monotonic() + 30
    while not (tmp_path / LOG).read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    sweep.kill()
    sweep.wait()
    while Path(f"/proc/{child}").exists() and "\nState:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < until, "the run goes on without its sweep"
        time.sleep(0.01)
