"""A real vLLM on a CPU with the adapters of two policies, held against peft in float32."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from lightning.config import LoraConfig
from lightning.config.sections import PolicyServerConfig
from lightning.engines.export import write_adapters
from lightning.engines.loading import add_adapters
from lightning.errors import PolicyServerError
from lightning.policy_server.model_folder import ADAPTERS, POLICIES
from lightning.policy_server.protocol import Probe
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.policy_server.weights import FromDisk
from lightning.testing.tiny_models import make_tiny_model
from lightning_policies.transfer import PolicyAdapters
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.slow

GAP = 1e-3
"""Largest difference (nats) that counts as the same policy."""
OTHER = 0.5
"""Smallest difference somewhere in a text that two adapters show."""
PROMPT = [(7 * i + 3) % 320 for i in range(200)]
LORAS = {"writer": LoraConfig(rank=4), "editor": LoraConfig(rank=8, alpha=8.0, target_modules=("q_proj", "down_proj"))}
UNTRAINED = "judge"


def trained(folder: Path, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """The model with adapters that change it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    add_adapters(model, lora)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model


def combined(folder: Path, models: Mapping[str, PreTrainedModel], file: Path) -> Path:
    """One file with the adapters of all policies, as the engine of several policies writes it."""
    tensors: dict[str, torch.Tensor] = {}
    told: dict[str, Any] = {}
    for name, model in models.items():
        own = write_adapters(folder, model, torch.float32, file.with_suffix(f".{name}"))
        assert own is not None
        with safe_open(own, framework="pt") as found:
            tensors |= {f"{name}|{key}": found.get_tensor(key) for key in found.keys()}  # noqa: SIM118 — no mapping
            told[name] = json.loads(found.metadata()[ADAPTERS])
    save_file(tensors, file, metadata={POLICIES: json.dumps(told)})
    return file


def forward(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    with torch.no_grad():
        logprobs = model(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
    return [0.0, *logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


def probes(models: Mapping[str, PreTrainedModel]) -> list[Probe]:
    return [Probe(PROMPT, forward(model, PROMPT), name) for name, model in models.items()]


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


async def check_together(server: OwnedVLLM, models: Mapping[str, PreTrainedModel]) -> None:
    """Calls of all policies that vLLM computes together each have their own adapter, also where prefixes are cached."""
    asked = [(policy, first) for first in range(3) for policy in models]
    for _ in range(2):
        answers = await asyncio.gather(*(sample(server, policy, first) for policy, first in asked))
        for (policy, _), (prompt, ids, told) in zip(asked, answers, strict=True):
            own = forward(models[policy], prompt + ids)[len(prompt) :]
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
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = await control.served_logprobs(server.alias, PROMPT)
    for policy in LORAS:
        assert await control.served_logprobs(dict(server.models)[policy], PROMPT) == before, "they begin as the model"
    models: dict[str, PreTrainedModel] = {}
    for version in (1, 2, 3):
        seeds = {"writer": version, "editor": 10 if version > 1 else 9}  # the editor stays as it is in the last step
        models = {name: trained(folder, lora, seeds[name]) for name, lora in LORAS.items()}
        asked = probes(models)
        update = await server.update(combined(folder, models, tmp_path / f"{version}"), version, asked)
        assert all(max(probe.gaps(served)) <= GAP for probe, served in zip(asked, update.served, strict=True))
        assert all(max(probe.gaps(served)) > OTHER for probe, served in zip(asked, update.served[::-1], strict=True))
        assert await control.served_logprobs(server.alias, PROMPT) == before, "bit for bit"
        await check_together(server, models | {UNTRAINED: base})

    wrong = dict(LORAS, editor=LoraConfig(rank=8, target_modules=("q_proj", "lm_head")))
    bad = combined(folder, {name: trained(folder, lora, 5) for name, lora in wrong.items()}, tmp_path / "wrong")
    with pytest.raises(
        PolicyServerError, match=r"adds no adapter to lm_head, and the policy 'editor'.*without lm_head"
    ):
        await server.update(bad, 4)
    assert (server.version, await control.attach()) == (3, 3)
    whole = tmp_path / "whole.safetensors"
    shutil.copy(folder / "model.safetensors", whole)
    with pytest.raises(PolicyServerError, match="other weights would change the base model"):
        await server.update(whole, 4)
    await check_together(server, models | {UNTRAINED: base})

    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await server.wait_died()
    await server.restart(tmp_path / "3", 3)
    await check_together(server, models | {UNTRAINED: base})
    assert await server._running().served_logprobs(server.alias, PROMPT) == before
