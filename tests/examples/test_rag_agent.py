"""The retrieval agent on the real OpenAI Agents SDK, through the gateway, against a scripted policy server; its base model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import set_tracing_disabled
from lightning.algorithms.protocol import Algorithm
from lightning.config import Config, with_settings
from lightning.config.sections import GatewayConfig, PolicyServerConfig
from lightning.gateway import Gateway, Upstream
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.types import Rollout, Run, Task, Transition
from lightning_examples.rag_openai_agents import MODEL
from lightning_examples.rag_openai_agents.agent import INSTRUCTIONS, MAX_CALLS, MAX_TOKENS, SHIPPED, Library, agent
from lightning_examples.rag_openai_agents.demo import demo
from lightning_examples.rag_openai_agents.make_model import NOISY, TOOL, demonstrate
from lightning_examples.rag_openai_agents.retriever import Bm25, Document
from lightning_examples.rag_openai_agents.tasks import shipped_world, val_tasks
from lightning_examples.recipe.chatml import chat_template, encode
from lightning_examples.recipe.pretrain import batch_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCUMENTS = [Document("Kira Holt", "Kira Holt works at Bolt."), Document("Bolt", "Bolt makes lamps.")]
LIBRARY = Library(Bm25(DOCUMENTS))
TASK = Task(input="What does the employer of Kira Holt make?", expected=["lamps"])


class House:
    """The gateway between a fake vLLM and a memory store."""

    def __init__(self, store: MemoryStore, fake: FakeVLLM, gateway: Gateway) -> None:
        self.store, self.fake, self.gateway = store, fake, gateway

    async def play(self, *replies: Reply, library: Library = LIBRARY) -> float:
        """Run the agent on TASK with scripted replies; its reward."""
        self.fake.queue(*replies)
        await self.store.create_rollouts([Rollout(id="rollout", run="run", task=TASK, group="group")])
        (lease,) = await self.store.lease("run", "worker")
        return await agent(TASK, self.gateway.llm(lease), library)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [dict(request.body) for request in self.fake.requests]

    async def transitions(self) -> list[Transition]:
        return await self.store.transitions("rollout")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """No adapter replaces the SDK's exporter here."""
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        store = MemoryStore()
        await store.open()
        stack.push_async_callback(store.close)
        await store.put_run(Run("run", "run"))
        fake = await stack.enter_async_context(FakeVLLM())
        gateway = Gateway(
            store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"a secret long enough for it"
        )
        await gateway.start()
        stack.push_async_callback(gateway.close)
        yield House(store, fake, gateway)


def searches(query: str, call_id: str) -> Reply:
    return Reply("", tool_calls=[ToolCall("search", json.dumps({"query": query}), call_id)])


async def test_it_searches_reads_searches_again_and_answers(house: House) -> None:
    assert await house.play(searches("Kira Holt", "a"), searches("Bolt", "b"), Reply("Answer: lamps")) == 1.0
    first, _, last = house.bodies
    assert first["max_completion_tokens"] == MAX_TOKENS
    assert "temperature" not in first
    assert [(message["role"], message["content"]) for message in first["messages"]] == [
        ("system", INSTRUCTIONS),
        ("user", TASK.input),
    ]
    (tool,) = first["tools"]
    assert tool["function"]["name"] == "search"
    results = [message["content"] for message in last["messages"] if message["role"] == "tool"]
    assert results == ["Kira Holt works at Bolt.", "Bolt makes lamps."]
    calls = await house.transitions()
    assert len(calls) == 3
    assert not any(
        call.constrained for call in calls
    )  # else nothing holds the sampler's logprobs against the trainer's


async def test_what_it_sends_is_rendered_as_its_demonstrations_are(house: House) -> None:
    # The base model was taught on `TOOL` and messages built by hand; the SDK's own must give the same prompt.
    await house.play(searches("Kira Holt", "a"), Reply("Answer: lamps"))
    taught = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": TASK.input},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"query": "Kira Holt"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Kira Holt works at Bolt."},
    ]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    assert render(house.bodies[1]["messages"], tools=house.bodies[1]["tools"]) == render(taught, tools=[TOOL])


async def test_a_wrong_answer_in_form_earns_the_form(house: House) -> None:
    assert await house.play(Reply("Answer: boats")) == pytest.approx(0.1)


async def test_it_gives_up_after_so_many_calls(house: House) -> None:
    assert await house.play(*[searches("Bolt", str(i)) for i in range(MAX_CALLS + 1)]) == 0.0
    assert len(house.bodies) == MAX_CALLS


async def test_a_tool_that_does_not_exist_is_the_model_s_fault_and_scored(house: House) -> None:
    assert await house.play(Reply("", tool_calls=[ToolCall("google", '{"query": "Bolt"}', "a")])) == 0.0


@pytest.mark.parametrize("arguments", ["{}", '"Bolt"', '{"query": 5}'])
async def test_bad_arguments_are_answered_with_an_error_the_model_can_read(house: House, arguments: str) -> None:
    bad = Reply("", tool_calls=[ToolCall("search", arguments, "a")])
    assert await house.play(bad, Reply("Answer: lamps")) == 1.0
    assert "error" in house.bodies[1]["messages"][-1]["content"]


async def test_what_matches_nothing_is_said(house: House) -> None:
    await house.play(searches("Narva", "a"), Reply("Answer: lamps"))
    assert house.bodies[1]["messages"][-1]["content"] == "no results"


async def test_any_retriever_will_do(house: House) -> None:
    class Both:
        def search(self, query: str, k: int) -> list[Document]:
            return DOCUMENTS[:k]

    await house.play(searches("x", "a"), Reply("Answer: lamps"), library=Library(Both(), k=2))
    assert house.bodies[1]["messages"][-1]["content"] == "Kira Holt works at Bolt.\nBolt makes lamps."


# --- the base model ---------------------------------------------------------------------------------------------------


def test_the_folder_is_small_and_has_a_model_card() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(files.values()) < 1024 * 1024
    assert "license: mit" in (MODEL / "README.md").read_text(encoding="utf-8")
    assert AutoTokenizer.from_pretrained(MODEL).chat_template.strip() == chat_template().strip()


def test_it_knows_the_demonstrations() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    rng = random.Random(3)
    rows = [encode(tokenizer, demonstrate(task, shipped_world(), SHIPPED, NOISY, rng)) for task in val_tasks(32)]
    with torch.no_grad():
        assert float(batch_loss(model, rows)) < 0.6


def test_a_name_is_one_token_wherever_it_stands() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for text in (" Kira", '"Kira"', "Kira,", "Kira.", "Kira<|im_end|>"):
        assert tokenizer.encode("Kira", add_special_tokens=False)[0] in tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer.encode("Kira", add_special_tokens=False)) == 1


def test_the_demo_s_settings_are_settings() -> None:
    rag = demo()
    algorithm: Algorithm = rag.algorithm()
    assert algorithm.group_size == 8
    assert with_settings(Config(), rag.settings).trainer.steps <= 40
    assert rag.source is not None
    assert rag.source.is_file()


@pytest.mark.slow
@pytest.mark.long
async def test_on_a_real_vllm_it_is_right_now_and_then(tmp_path: Path, house: House) -> None:
    server = OwnedVLLM(MODEL, PolicyServerConfig(max_model_len=1024), log=tmp_path / "vllm.log")
    await server.start()
    gateway = Gateway(
        house.store, [Upstream(server.url, server.model)], GatewayConfig(), secret=b"long enough a secret"
    )
    await gateway.start()
    try:
        questions = val_tasks(200)
        rollouts = [Rollout(id=task.id, run="run", task=task, group=task.id) for task in questions]
        await house.store.create_rollouts(rollouts)
        leases = await house.store.lease("run", "worker", limit=len(rollouts))
        slots = asyncio.Semaphore(32)

        async def answer(lease: Any) -> float:
            async with slots:
                return await agent(lease.rollout.task, gateway.llm(lease))

        rewards = await asyncio.gather(*map(answer, leases))
    finally:
        await gateway.close()
        await server.close()
    assert 0.2 <= sum(rewards) / len(rewards) <= 0.55
