"""A real vLLM on a CPU with the adapters of two policies, held against the engine that trains them, in float32."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import aiohttp
import numpy as np
import pytest
import torch
from lightning.batch.sample import Sample
from lightning.config import Config, LoraConfig
from lightning.config.sections import EngineConfig, PolicyServerConfig
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import PolicyServerError
from lightning.policy_server.model_folder import checkpoint_files
from lightning.policy_server.protocol import Probe
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.policy_server.weights import FromDisk
from lightning.testing.tiny_models import make_tiny_model
from lightning_policies.engine import PolicyEngine, TrainedPolicy
from lightning_policies.transfer import PolicyAdapters
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

GAP = 1e-3
"""Largest difference (nats) that counts as the same policy."""
OTHER = 0.5
"""Smallest difference somewhere in a text that two adapters show."""
PROMPT = [(7 * i + 3) % 320 for i in range(200)]
LORAS = {"writer": LoraConfig(rank=4), "editor": LoraConfig(rank=8, alpha=8.0, target_modules=("q_proj", "down_proj"))}
UNTRAINED = "judge"


class Trainer:
    """The trainer's side: the engine of the policies, and the model that no policy trains."""

    def __init__(self, folder: Path, loras: Mapping[str, LoraConfig]) -> None:
        config = Config(engine=EngineConfig(device="cpu", dtype="float32"))
        self.engine = PolicyEngine({name: TrainedPolicy(lora) for name, lora in loras.items()}, torch_engine, config)
        self.engine.open(folder, OptimizerConfig(), seed=0)
        self._base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def written(self, file: Path, **seeds: int) -> Path:
        """A file with the adapters of all policies, which are those of the seeds from now on."""
        for name, seed in seeds.items():
            random = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in cast("TorchEngine", self.engine._engines[name])._parameters.values():
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
        return self.engine.adapters(file)

    def logprobs(self, policy: str, ids: Sequence[int]) -> list[float]:
        """The logprob of each id but the first, given those before it."""
        row, zeros = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
        if policy != UNTRAINED:
            sample = Sample(row, zeros, zeros, zeros, np.zeros(len(ids), np.int32), (), policy=policy)
            found: list[float] = self.engine.logprobs([sample])[0][1:].tolist()
            return found
        with torch.no_grad():
            logprobs = self._base(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        own: list[float] = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return own

    def probes(self) -> list[Probe]:
        return [Probe(PROMPT, [0.0, *self.logprobs(name, PROMPT)], name) for name in LORAS]


async def sample(server: OwnedVLLM, policy: str, first: int) -> tuple[list[int], list[int], list[float]]:
    """A prompt, the answer to it, and the logprobs of the answer."""
    prompt = [first, *PROMPT]
    body = {"model": dict(server.models)[policy], "prompt": prompt, "max_tokens": 24, "logprobs": 0, "seed": 1}
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.post("/v1/completions", json=body | {"return_token_ids": True, "ignore_eos": True}) as reply,
    ):
        answer = await reply.json()
        assert reply.status == 200, answer
    choice = answer["choices"][0]
    return prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def check_together(server: OwnedVLLM, trainer: Trainer) -> None:
    """Calls of all policies that vLLM computes together each have their own adapter, also where prefixes are cached."""
    asked = [(policy, first) for first in range(3) for policy in (*LORAS, UNTRAINED)]
    for _ in range(2):
        answers = await asyncio.gather(*(sample(server, policy, first) for policy, first in asked))
        for (policy, _), (prompt, ids, told) in zip(asked, answers, strict=True):
            own = trainer.logprobs(policy, prompt + ids)[len(prompt) - 1 :]
            assert max(abs(a - b) for a, b in zip(own, told, strict=True)) <= GAP, policy


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[OwnedVLLM]:
    folder = make_tiny_model(tmp_path / "tiny")
    transfer = PolicyAdapters(FromDisk(), folder, LORAS, [UNTRAINED])
    made = OwnedVLLM(folder, PolicyServerConfig(device="cpu"), transfer, log=tmp_path / "vllm.log")
    await made.start()
    yield made
    await made.close()


async def test_policies_change_alone_and_the_untrained_one_never(server: OwnedVLLM, tmp_path: Path) -> None:
    folder, control = tmp_path / "tiny", server._running()
    trainer = Trainer(folder, LORAS)
    before = await control.served_logprobs(server.alias, PROMPT)
    for policy in LORAS:
        assert await control.served_logprobs(dict(server.models)[policy], PROMPT) == before, "they begin as the model"
    for version in (1, 2, 3):
        editor = 10 if version > 1 else 9  # it stays as it is in the last step
        file = trainer.written(tmp_path / f"{version}", writer=version, editor=editor)
        asked = trainer.probes()
        update = await server.update(file, version, asked)
        assert all(max(probe.gaps(served)) <= GAP for probe, served in zip(asked, update.served, strict=True))
        assert all(max(probe.gaps(served)) > OTHER for probe, served in zip(asked, update.served[::-1], strict=True))
        assert await control.served_logprobs(server.alias, PROMPT) == before, "bit for bit"
        await check_together(server, trainer)

    wrong = Trainer(folder, dict(LORAS, editor=LoraConfig(rank=8, target_modules=("q_proj", "lm_head"))))
    with pytest.raises(
        PolicyServerError, match=r"adds no adapter to lm_head, and the policy 'editor'.*without lm_head"
    ):
        await server.update(wrong.written(tmp_path / "wrong"), 4)
    assert (server.version, await control.attach()) == (3, 3)
    whole = tmp_path / "whole.safetensors"
    shutil.copy(folder / "model.safetensors", whole)
    with pytest.raises(PolicyServerError, match="other weights would change the base model"):
        await server.update(whole, 4)
    await check_together(server, trainer)

    await server._transfer.load(control, checkpoint_files(folder))  # as where the first update fails
    for policy in LORAS:
        assert await control.served_logprobs(dict(server.models)[policy], PROMPT) == before, (
            "they are as at the beginning"
        )

    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await server.wait_died()
    await server.restart(tmp_path / "3", 3)
    await check_together(server, trainer)
    assert await server._running().served_logprobs(server.alias, PROMPT) == before
