"""`lightning serve`: a model for agents that run somewhere else, and a record of what they asked."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import openai
import pytest
from lightning.config import load_config
from lightning.errors import ConfigError, OptimizerError
from lightning.plugins import plugins
from lightning.store.url import sqlite_url
from lightning.trainer.training_data import all_rollouts
from lightning.types import LLM
from lightning_examples.raw_python import MODEL
from lightning_examples.raw_python.agent import agent
from lightning_examples.word_problems import val_tasks
from lightning_prompts.chat_model import ChatClient
from lightning_prompts.loop import optimizer_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def recorded(folder: Path) -> list[tuple[str, int]]:
    """Name of each run and the number of its calls."""
    store = plugins().store(sqlite_url(folder / "lightning.db"))
    await store.open()
    try:
        found = []
        for run in await store.list_runs():
            rollouts = await all_rollouts(store, run.id)
            calls = await store.transitions_of([(rollout.id, rollout.attempt) for rollout in rollouts])
            found.append((run.name, sum(call.status.answered for made in calls for call in made)))
        return found
    finally:
        await store.close()


@dataclass
class Served:
    """A `lightning serve` of the raw demo's base model, the variables that it printed, and what it writes."""

    folder: Path
    given: Mapping[str, str]
    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, interruptible: None) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("serve")
    folder, log = root / "serve", root / "output.txt"
    command = [sys.executable, "-m", "lightning", "serve", str(MODEL), "--out", str(folder)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            deadline = time.monotonic() + 400
            while not re.search(r"^model: policy$", log.read_text(), re.MULTILINE):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            given = dict(re.findall(r"^export (OPENAI_\w+)=(\S+)$", log.read_text(), re.MULTILINE))
            yield Served(folder, given, process, log)
        finally:
            process.terminate()


def test_the_base_model_is_right_now_and_then(served: Served) -> None:
    """What the raw demo starts from: good enough to be rewarded, with much to learn."""
    llm = LLM(served.given["OPENAI_BASE_URL"], served.given["OPENAI_API_KEY"], "policy")
    held_out = val_tasks(240)
    with ThreadPoolExecutor(16) as pool:
        rewards = list(pool.map(agent, held_out, repeat(llm)))
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.5


def test_only_the_key_s_holder_is_answered_and_every_call_is_recorded(served: Served) -> None:
    (before,) = asyncio.run(recorded(served.folder)) or [("shell", 0)]
    base_url, api_key = served.given["OPENAI_BASE_URL"], served.given["OPENAI_API_KEY"]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": "Ann has 20 pens. Ann gives away 5. How many pens now?"}]
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)  # type: ignore[arg-type]
        assert reply.choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
    assert asyncio.run(recorded(served.folder)) == [("shell", before[1] + 1)]


async def test_it_is_an_endpoint_for_an_optimiser_model(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the settings of APO name may be any OpenAI-compatible server: here vLLM, behind a gateway that wants a key."""
    settings = ["model=policy", f"base_url={served.given['OPENAI_BASE_URL']}", "api_key_env=WRITER_KEY", "attempts=1"]
    named = optimizer_in(load_config(overrides=[f"optimizer_model.{setting}" for setting in settings]))
    assert named is not None
    ask = [{"role": "user", "content": "Ann has 20 pens. Ann gives away 5. How many pens now?"}]
    monkeypatch.setenv("WRITER_KEY", served.given["OPENAI_API_KEY"])
    assert await ChatClient(named).ask(ask)
    with pytest.raises(OptimizerError, match="'policy' refused a request"):
        await ChatClient(named).ask([{"role": "user", "content": "pens " * 5000}])
    monkeypatch.setenv("WRITER_KEY", "wrong")
    with pytest.raises(ConfigError, match=r"status 401: .* the environment variable WRITER_KEY"):
        await ChatClient(named).ask(ask)


def test_ctrl_c_stops_it(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(180) == 0, served.log.read_text()
    assert "stopped" in served.log.read_text()
