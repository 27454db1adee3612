"""A whole run on folders that hold more than the text model: first update, resume, the model that is left; vLLM is scripted."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.config import Config, with_settings
from lightning.engines.export import contents
from lightning.policy_server.model_folder import check_weights, read_header
from lightning.policy_server.protocol import Probe, Update, Usage
from lightning.testing import vllm_replies
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.trainer import Trainer, stack
from lightning.types import LLM, Task
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_families import VOCAB, Family, make_tiny_family


class Served:
    """A scripted vLLM; what it is sent is held against the folder, as our own server does."""

    version = 0
    models, claim = (), ""

    def __init__(self, folder: Path) -> None:
        words = itertools.cycle(["yes", "no"])
        self.fake = FakeVLLM(script=lambda body: Reply(next(words)))
        self.folder = folder
        self.sent: list[set[str]] = []

    @property
    def url(self) -> str:
        return self.fake.url

    @property
    def model(self) -> str:
        return self.fake.model

    alias = model

    async def start(self) -> None:
        await self.fake.start()

    async def update(self, weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
        if weights is not None:
            check_weights(weights, self.folder)
            self.sent.append(set(read_header(weights)))
        self.version = version
        return Update(version)

    async def usage(self) -> Usage:
        return Usage()

    async def wait_died(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        await self.fake.close()


def agent(task: Task, llm: LLM) -> float:
    body = {"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}]}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        said: Mapping[str, Any] = json.load(reply)
    return float("yes" in said["choices"][0]["message"]["content"])


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_run_updates_resumes_and_leaves_a_model_with_all_that_the_folder_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    monkeypatch.setattr(vllm_replies, "VOCABULARY", VOCAB)
    folder = make_tiny_family(tmp_path / "folder", family)
    servers: list[Served] = []
    monkeypatch.setattr(stack, "make_policy_server", lambda *_, **__: servers.append(Served(folder)) or servers[-1])
    config = with_settings(Config(), {"runner.concurrency": 4, "engine.lr": 1e-3})
    for steps in (1, 2):
        summary = Trainer(
            folder,
            "grpo:group_size=4,correction.kind=none",  # the script makes logprobs up
            runner="inline",
            config=config,
            steps=steps,
            tasks_per_step=2,
            out=tmp_path / "run",
            resume=steps > 1,
            progress=False,
        ).fit(agent, ["one", "two"])
        assert summary.steps == steps
    known = contents(folder)
    assert len(servers) == 2
    assert all(sent == set(known.trained) for server in servers for sent in server.sent)
    assert [len(server.sent) for server in servers] == [1, 2], "the second was given what was saved, too"
    before = load_file(folder / "model.safetensors")
    left = {k: v for file in (tmp_path / "run" / "model").glob("*.safetensors") for k, v in load_file(file).items()}
    assert left.keys() == before.keys()
    assert all(torch.equal(left[name], before[name]) for name in known.carried)
    assert any(not torch.equal(left[name], before[name]) for name in known.trained)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not report["missing_keys"]
