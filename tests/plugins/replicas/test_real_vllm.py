"""A training with two real vLLMs on the CPU, of which one is killed: it goes on, and the dead one comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from lightning.config import config_model, with_settings
from lightning.policy_server.vllm_server import OwnedVLLM, make_policy_server
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer import Trainer, stack
from lightning.types import LLM, CallStatus, Status, Task

from tests.plugins.replicas.test_training import read


def answer(task: Task, llm: LLM) -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}], "max_tokens": 24}
    answered = httpx.post(
        f"{llm.base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {llm.api_key}"}, timeout=60
    )
    return str(answered.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_of_two_real_servers_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, servers = make_tiny_model(tmp_path / "tiny"), make_policy_server, list[OwnedVLLM]()
    calls, killed, lock = [0], list[int](), threading.Lock()

    def make(*given: Any, **named: Any) -> Any:
        servers.append(cast("OwnedVLLM", made(*given, **named)))
        return servers[-1]

    def mortal(task: Task, llm: LLM) -> float:
        """The ninth agent kills a server; the last ones wait until it is back."""
        with lock:
            calls[0] += 1
            number = calls[0]
        if number == 9:
            killed.append(cast("int", servers[1].pid))
            os.kill(killed[0], signal.SIGKILL)
        deadline = time.monotonic() + 300
        while number > 40 and not (servers[1]._serving and servers[1].pid not in killed):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return float(hash(answer(task, llm)) % 3)

    monkeypatch.setattr(stack, "make_policy_server", make)
    settings = {
        "runner.concurrency": 8,
        "runner.max_attempts": 4,
        "policy_server.replicas": 2,
        "policy_server.device": "cpu",
        "policy_server.max_model_len": 256,
        "trainer.max_staleness": 1,
    }
    Trainer(
        model,
        "grpo:group_size=4",
        runner="inline",
        config=with_settings(config_model()(), settings),
        steps=4,
        tasks_per_step=4,
        out=tmp_path / "run",
        progress=False,
    ).fit(mortal, ["one", "two", "three", "four"])
    records, recorded, ended = asyncio.run(read(tmp_path / "run"))
    assert (len(records), ended, len(servers)) == (4, {Status.SUCCEEDED}, 2)
    assert all((tmp_path / "run" / f"vllm-{number}.log").stat().st_size for number in range(2))
    good = [call for call in recorded if call.status is CallStatus.OK]
    assert len(good) >= 64
    assert "probe_gap" in (tmp_path / "run" / "metrics.jsonl").read_text(), "no update was judged"
    requests = [sum(record.metrics.get(f"server_{number}/requests", 0.0) for record in records) for number in range(2)]
    assert min(requests) > 0
