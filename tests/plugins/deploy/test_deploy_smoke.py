"""A deployment as processes: a real training by the generated commands, in which a client is killed and replaced."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from lightning.errors import DataError
from lightning.types import Status
from lightning_deploy.deploy_command import _smoke
from lightning_deploy.deploy_plan import Options, make_plan
from lightning_deploy.render import render, write
from lightning_deploy.smoke import smoke
from lightning_examples import raw_python, word_problems

AGENT = """
import random

import openai


def solve(task, llm):
    messages = [{"role": "user", "content": task.input}]
    reply = openai.OpenAI().chat.completions.create(model=llm.model, messages=messages, max_tokens=8)
    # Rollouts of one task draw other numbers, so that each group teaches something, whatever the untrained model says.
    return random.random() if reply.choices else 0.0
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an agent, twelve tasks and the tiny model."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "solver.py").write_text(AGENT)
    shutil.copytree(Path(raw_python.__file__).parent / "model", folder / "model")
    tasks = [json.dumps({"input": task.input, "expected": task.expected}) for task in word_problems.tasks(12, 0)]
    (folder / "train.jsonl").write_text("\n".join(tasks))
    monkeypatch.chdir(folder)
    return folder


def plan_of(project: Path, *more: str):
    arguments = ["solver:solve", "--model", "model", "--tasks", "train.jsonl", "--algorithm", "grpo:group_size=4"]
    return make_plan([*arguments, "--set", "trainer.tasks_per_step=4", *more], Options(), project)


@pytest.mark.slow
def test_a_step_is_trained_though_a_client_is_killed(small: Path, tmp_path: Path) -> None:
    plan, scripts, told = plan_of(small), tmp_path / "scripts", list[str]()
    files = render(plan, "docker", Path("deploy"), lambda *_: "")
    write({name: text for name, text in files.items() if name.startswith("scripts/")}, tmp_path)
    # On all addresses, as in a container: a server that has no token would refuse to start.
    found = smoke(plan, scripts, tmp_path / "smoke", told.append, host="0.0.0.0", seconds=280)
    assert found.report["steps"] == 1
    assert found.report["failed"] == 0
    assert found.under_way > 0
    assert found.trained > 0
    assert [text.partition(":")[0] for text in told] == ["tokens", "trainer and server", "client-1"]
    logs = {file.name: file.read_text() for file in found.folder.glob("*.log")}
    assert set(logs) == {f"{name}.log" for name in ("tokens", "trainer", "server", "client-1", "client-2", "client-3")}
    done = {name: int(last[1]) for name, text in logs.items() if (last := re.search(r"(\d+) succeeded", text))}
    assert done.keys() == {"client-2.log", "client-3.log"}  # the killed one had no last words
    assert sum(done.values()) == 16  # what it had under way was done by the others
    ended = {one.status for one in rollouts(found.folder).items}
    assert ended == {Status.SUCCEEDED}


def rollouts(folder: Path):
    import asyncio

    from lightning.cli.output import with_store
    from lightning.store.places import run_id_of
    from lightning.store.url import sqlite_url

    run = run_id_of(folder / "runs" / "solver")
    return asyncio.run(with_store(sqlite_url(folder / "store.db"), lambda store: store.list_rollouts(run)))


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_last_words(small: Path) -> None:
    (small / "train.jsonl").write_text("no JSON\n")
    plan = plan_of(small)
    with pytest.raises(DataError, match=r"trainer ended with exit code \d+: .*train.jsonl:1 is not JSON"):
        _smoke(plan, Path("deploy"), as_json=True)
