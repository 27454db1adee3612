"""A real vLLM on a CPU, held against a float32 forward of transformers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import torch
from lightning.config import LoraConfig
from lightning.config.sections import PolicyServerConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.errors import PolicyServerError
from lightning.gateway.upstream import Found, Pool, Upstream
from lightning.policy_server import vllm_server
from lightning.policy_server.launch import COPIED
from lightning.policy_server.protocol import Probe
from lightning.policy_server.vllm_server import OwnedVLLM, VLLMServer
from lightning.testing.tiny_models import make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.slow

GAP = 1e-3
"""Largest difference (nats) that counts as the same policy."""
OTHER = 0.5
"""Smallest difference somewhere in a text that two seeds of the tiny model show."""
CHAT = [{"role": "user", "content": "Write a very long story about the number 42."}]
PROMPT = [(7 * i + 3) % 320 for i in range(600)]
OTHER_PROMPT = [(11 * i + 5) % 320 for i in range(64)]
"""A probe with it leaves nothing of `PROMPT` in the prefix cache."""


def forward(folder: Path, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    """Logprob of every id given those before it; the first one's is 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, :-1]
    logprobs = (logits / temperature).log_softmax(-1)
    return [0.0, *logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


async def gap_of(server: VLLMServer, folder: Path) -> float:
    """The largest difference to a folder's model."""
    asked = probe(folder)
    return max(asked.gaps(await server._running().served_logprobs(server.model, asked.ids)))


def probe(folder: Path, ids: Sequence[int] = PROMPT[:64]) -> Probe:
    return Probe(ids, forward(folder, ids))


def gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


async def call(server: VLLMServer, route: str, request_id: str = "", **body: Any) -> dict[str, Any]:
    headers = {"x-request-id": request_id} if request_id else {}
    body = {"model": server.model, "logprobs": 0, "return_token_ids": True, "seed": 1} | body
    url = f"{server.url}/v1/{route}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return answer


async def stream(server: OwnedVLLM, request_id: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
    body = {"model": server.model, "stream": True, "return_token_ids": True} | body
    url, headers = f"{server.url}/v1/chat/completions", {"x-request-id": request_id}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def test_it_serves(served: Any) -> None:
    assert await served.vllm.healthy()
    assert served.vllm.url.startswith("http://127.0.0.1:")
    assert served.vllm.model == "policy"
    assert "Application startup complete" in served.log.read_text()
    with pytest.raises(PolicyServerError, match="runs already"):
        await served.vllm.start()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/collective_rpc", {"method": "lightning_load", "args": ["", "/tmp/x"]}),
        ("/collective_rpc", {"method": "lightning_claim", "args": ["thief"]}),
        ("/pause?mode=keep", None),
        ("/reset_prefix_cache", None),
        ("/server_info", None),
    ],
)
async def test_its_control_routes_answer_its_owner_alone(served: Any, route: str, body: Any) -> None:
    async with aiohttp.ClientSession(served.vllm.url) as session:
        verb = "GET" if route == "/server_info" else "POST"
        async with session.request(verb, route, json=body) as reply:
            assert (reply.status, "LIGHTNING_VLLM_SECRET" in await reply.text()) == (403, True)
    assert not await served.vllm._running().is_paused()


def adapters_of(folder: Path, place: Path) -> tuple[Path, Path]:
    """A file with adapters of a folder's model alone, and a folder with the model that they make."""
    engine = TorchEngine(lora=LoraConfig(rank=4), dtype="float32")
    engine.open(folder, OptimizerConfig(), seed=1)
    with torch.no_grad():
        for parameter in engine._parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    file = engine.adapters(place / "adapters.safetensors")
    assert file is not None
    return file, engine.export(place / "merged")


async def test_adapters_alone_are_merged_in_the_worker(served: Any, tmp_path: Path) -> None:
    """vLLM computes with the trainer's merged model, and with whole weights after that."""
    file, merged = adapters_of(served.first, tmp_path)
    update = await served.vllm.update(file, served.vllm.version + 1, [probe(merged)])
    assert max(probe(merged).gaps(update.served[0])) <= GAP
    assert max(probe(served.first).gaps(update.served[0])) > OTHER
    await served.use(served.second)
    assert await gap_of(served.vllm, served.second) <= GAP


async def test_it_serves_a_name_of_this_start_alone_and_answers_under_the_other(served: Any) -> None:
    told = await call(served.vllm, "completions", model=served.vllm.alias, prompt=[1, 2, 3], max_tokens=1)
    assert told["model"] == "policy"
    async with aiohttp.ClientSession() as session:
        body = {"model": "policy-of-another", "prompt": [1, 2, 3]}
        async with session.post(f"{served.vllm.url}/v1/completions", json=body) as refused:
            assert refused.status == 404
        upstream = Upstream(served.vllm.url, served.vllm.alias)
        another = replace(upstream, model="policy-of-another")
        for named, found in ((upstream, Found.WELL), (another, Found.OUT)):
            pool = Pool([named])
            assert await pool.check(pool.slots[0], session) is found


async def test_what_requests_need_is_counted(served: Any) -> None:
    before = await served.vllm.usage()
    for _ in range(2):
        await call(served.vllm, "completions", prompt=PROMPT, max_tokens=1)
    requests, tokens, cached, preemptions = (
        now - then for now, then in zip(await served.vllm.usage(), before, strict=True)
    )
    assert (requests, tokens, preemptions) == (2, 2 * len(PROMPT), 0)
    assert cached == len(PROMPT) // 32 * 32, "the second finds all whole blocks of the first"


async def test_ids_and_logprobs_are_those_of_the_model(served: Any) -> None:
    answer = await call(served.vllm, "chat/completions", messages=CHAT, max_tokens=64, logprobs=True, ignore_eos=True)
    choice = answer["choices"][0]
    prompt, response = answer["prompt_token_ids"], choice["token_ids"]
    assert len(response) == 64
    told = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert gap(told, forward(served.first, prompt + response)[len(prompt) :]) <= GAP


async def test_a_seed_samples_the_same_however_the_prompt_was_cut(served: Any) -> None:
    async def ask(first: int) -> list[int]:
        prompt = [first, *PROMPT]
        found = await call(served.vllm, "completions", prompt=prompt, max_tokens=4, seed=first, temperature=1.0)
        return list(found["choices"][0]["token_ids"])

    # Together they are more tokens than vLLM computes at one time, so that prompts are cut into parts.
    together = await asyncio.gather(*(ask(first) for first in range(24)))
    assert await served.vllm.healthy()
    alone = [await ask(first) for first in range(24)]
    assert together == alone


async def test_new_weights_serve_and_the_prefix_cache_is_not_stale(served: Any) -> None:

    async def ask(folder: Path) -> tuple[int, float]:
        answer = await call(served.vllm, "completions", prompt=PROMPT, max_tokens=24, temperature=0.7, ignore_eos=True)
        choice = answer["choices"][0]
        own = forward(folder, PROMPT + choice["token_ids"], temperature=0.7)[len(PROMPT) :]
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return int(cached), gap(choice["logprobs"]["token_logprobs"], own)

    await ask(served.first)
    cached, first = await ask(served.first)
    assert cached > 0
    assert first <= GAP
    update = await served.vllm.update(
        served.second / "model.safetensors", served.vllm.version + 1, [probe(served.second, OTHER_PROMPT)]
    )
    assert max(probe(served.second, OTHER_PROMPT).gaps(update.served[0])) <= GAP
    cached, second = await ask(served.second)
    assert cached == 0
    assert second <= GAP


async def test_the_probe_sees_another_policy(served: Any) -> None:
    update = await served.vllm.update(
        served.second / "model.safetensors", served.vllm.version + 1, [probe(served.first)]
    )
    assert max(probe(served.first).gaps(update.served[0])) > OTHER


async def test_an_update_in_the_middle_of_calls_splits_them_exactly(served: Any) -> None:
    vllm, length = served.vllm, 1200
    sampling: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "temperature": 1.0}
    before = await call(vllm, "chat/completions", "before", messages=CHAT, max_tokens=5, logprobs=True, ignore_eos=True)
    assert len(before["choices"][0]["token_ids"]) == 5
    chat = asyncio.create_task(
        call(vllm, "chat/completions", "plain-0123abcd", messages=CHAT, n=2, logprobs=True, **sampling)
    )
    text = asyncio.create_task(call(vllm, "completions", "text", prompt=PROMPT[:40], **sampling))
    updating: asyncio.Task[Any] | None = None
    prompt: list[int] = []
    ids: list[int] = []
    told: list[float] = []
    async for chunk in stream(vllm, "run/1/2", messages=CHAT, logprobs=True, **sampling):
        prompt = prompt or chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
            told += [token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or []]
        if len(ids) > 60 and updating is None:
            updating = asyncio.create_task(vllm.update(served.second / "model.safetensors", vllm.version + 1))
    assert updating is not None
    update, plain, completion = await asyncio.gather(updating, chat, text)

    calls = {"run/1/2": (prompt, ids, told)}
    for choice in plain["choices"]:
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        calls[f"{choice['index']}_plain-0123abcd"] = (plain["prompt_token_ids"], choice["token_ids"], logprobs)
    choice = completion["choices"][0]
    calls["text"] = (PROMPT[:40], choice["token_ids"], choice["logprobs"]["token_logprobs"])

    assert {**update.in_flight, "before": 5} == update.in_flight
    assert {key for key, tokens in update.in_flight.items() if tokens < length and tokens != 5} == set(calls)
    sharp = 0
    for key, (asked, sampled, logprobs) in calls.items():
        split = update.in_flight[key]
        assert len(sampled) == len(logprobs) == length
        assert 0 < split < length
        old = forward(served.first, asked + sampled)[len(asked) :]
        new = forward(served.second, asked + sampled)[len(asked) :]
        assert gap(logprobs[:split], old[:split]) <= GAP
        assert gap(logprobs[split:], new[split:]) <= GAP
        sharp += abs(logprobs[split - 1] - new[split - 1]) > GAP and abs(logprobs[split] - old[split]) > GAP
    # One token further the other policy is found: the split is exact, not merely near. By chance the two may agree once.
    assert sharp >= len(calls) - 1


async def test_weights_that_do_not_fit_leave_the_server_as_it_was(
    served: Any, alter: Callable[[Path, Callable[[dict[str, Any]], object]], Path], tmp_path: Path
) -> None:
    version = served.vllm.version
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((served.second / "model.safetensors").read_bytes()[:-100])
    misshaped = alter(served.second, lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    for weights in (broken, misshaped, tmp_path / "missing.safetensors"):
        with pytest.raises(PolicyServerError, match=weights.name):
            await served.vllm.update(weights, version + 1)
    assert served.vllm.version == version
    assert await gap_of(served.vllm, served.first) <= GAP


async def test_a_load_that_fails_half_way_is_undone(
    served: Any,
    monkeypatch: pytest.MonkeyPatch,
    alter: Callable[[Path, Callable[[dict[str, Any]], object]], Path],
) -> None:
    version = served.vllm.version
    monkeypatch.setattr(vllm_server, "check_weights", lambda weights, folder: None)
    half = alter(served.second, lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(PolicyServerError, match=rf"version {version} goes on.*no weights for .*down_proj"):
        await served.vllm.update(half, version + 1)
    assert await gap_of(served.vllm, served.first) <= GAP
    await served.use(served.second)
    assert await gap_of(served.vllm, served.second) <= GAP


async def test_attaching_to_a_vllm_without_the_extension_names_the_cure(served: Any) -> None:
    control = served.vllm._running()
    with pytest.raises(PolicyServerError, match=r"collective_rpc was answered 500"):
        await control.rpc("no_such_method")
    assert await served.vllm.healthy()


async def test_a_killed_server_is_noticed_leaves_nothing_and_comes_back_with_given_weights(served: Any) -> None:
    assert served.vllm.pid is not None
    url, version, engines = served.vllm.url, served.vllm.version + 5, descendants(served.vllm.pid)
    assert engines
    os.kill(served.vllm.pid, signal.SIGKILL)
    await asyncio.wait_for(served.vllm.wait_died(), 60)
    for engine in engines:  # before anybody cleans up
        if "EngineCore" in engine.name():
            await asyncio.to_thread(wait_for, lambda pid=engine.pid: gone(pid))
    await served.vllm.restart(served.second / "model.safetensors", version)
    assert all(gone(engine.pid) for engine in engines)
    assert (served.vllm.url, served.vllm.version) == (url, version)
    assert await gap_of(served.vllm, served.second) <= GAP
    assert await served.vllm._running().attach() == version


async def test_a_killed_engine_is_noticed_and_nothing_is_left(served: Any) -> None:
    assert served.vllm.pid is not None
    pid, children = served.vllm.pid, descendants(served.vllm.pid)
    (engine,) = [child for child in children if "EngineCore" in child.name()]
    assert COPIED in served.log.read_text()
    assert not [each for each in engine.net_connections("inet") if each.laddr.port == urlsplit(served.vllm.url).port]
    engine.kill()
    await asyncio.wait_for(served.vllm.wait_died(), 60)
    await served.vllm.close()
    for each in (pid, *(child.pid for child in children)):  # killed, though the kernel may take a moment
        await asyncio.to_thread(wait_for, lambda each=each: gone(each))
    assert served.vllm.pid is None


async def test_a_vllm_that_dies_at_its_start_shows_why(model: Path, tmp_path: Path) -> None:
    config = PolicyServerConfig(device="cpu", max_model_len=1_000_000)
    server = OwnedVLLM(model, config, log=tmp_path / "vllm.log")
    with pytest.raises(PolicyServerError, match=r"(?s)ended at its start with code 1\..*Error.*max_model_len.*\n  \| "):
        await server.start()
    assert server.pid is None


def make_experts(folder: Path, seed: int) -> Path:
    """A tiny Qwen3 with experts, in float32, whose chat template makes it reason."""
    make_tiny_model(folder, vocab=512)
    tokenizer = (folder / "tokenizer.json").read_text()
    for spare, token in (("<|spare_0|>", "<think>"), ("<|spare_1|>", "</think>")):
        assert spare in tokenizer
        tokenizer = tokenizer.replace(spare, token)
    (folder / "tokenizer.json").write_text(tokenizer)
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("{{- '<think>\\n' if add_generation_prompt -}}")
    tiny = AutoConfig.from_pretrained(folder)
    shape = {name: getattr(tiny, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.15}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts)).save_pretrained(folder)
    return folder


async def test_experts_get_new_weights_and_a_model_that_reasons_takes_a_budget_for_it(tmp_path: Path) -> None:
    """vLLM packs experts for a CPU, and tells of their weights by other names than their parameters have. The parser of the
    model's family is switched on by itself; without one vLLM refuses the budget that Anthropic's `thinking` becomes."""
    first, second = (make_experts(tmp_path / str(seed), seed) for seed in range(2))
    server = OwnedVLLM(first, PolicyServerConfig(device="cpu"), log=tmp_path / "vllm.log")
    await server.start()
    try:
        for version, folder in enumerate((second, first), 1):
            update = await server.update(folder / "model.safetensors", version, [probe(folder)])
            assert max(probe(folder).gaps(update.served[0])) <= GAP
        asked = {"messages": CHAT, "max_tokens": 8, "thinking_token_budget": 2, "reasoning_effort": "low"}
        (choice,) = (await call(server, "chat/completions", **asked))["choices"]
        assert choice["message"]["reasoning"]
    finally:
        await server.close()
