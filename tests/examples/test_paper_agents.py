"""The agents of the recipes for several GPUs, against a scripted policy server; how they are put together for a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import lightning
import pytest
from agents import set_tracing_disabled
from lightning.config.sections import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply, ToolCall
from lightning.types import LLM, Rollout, Run, Task
from lightning_examples.math_autogen import agent as math_autogen
from lightning_examples.paper.calcx.agent import MAX_CALLS, grade
from lightning_examples.paper.calcx.agent import agent as mathematician
from lightning_examples.paper.experiments import EXPERIMENTS, Options, recipe_of, set_up
from lightning_examples.paper.fetch import write_tasks
from lightning_examples.paper.musique import agent as musique
from lightning_examples.paper.recipe import CLUSTERS, TRAIN, VAL
from lightning_examples.paper.spider import agent as spider
from lightning_examples.rag_openai_agents.agent import Library
from lightning_examples.rag_openai_agents.retriever import Document, save_corpus
from lightning_examples.sql_langchain import DATABASES

QUESTION = Task(
    {
        "question": "How many workers older than 30?",
        "schema": "staff(name, team, city, age, pay)",
        "database": str(DATABASES / "company" / "company.sqlite"),
    },
    "SELECT COUNT(name) FROM staff WHERE age > 30",
)
RIGHT, WRONG = "SELECT COUNT(*) FROM staff WHERE age > 30", "SELECT COUNT(*) FROM workers"
PROBLEM = Task("What is 16 % of 50, divided by 12?", "2/3")
HOPS = Task("What does the employer of Kira Holt make?", ["lamps"])
DOCUMENTS = [Document("Kira Holt", "Kira Holt works at Bolt."), Document("Bolt", "Bolt makes lamps.")]


@pytest.fixture(autouse=True)
async def _alone() -> AsyncIterator[None]:
    """No adapter replaces the SDK's exporter here; connections belong to an event loop, and each test has its own."""
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(False)
    await math_autogen._http().aclose()
    math_autogen._http.cache_clear()


def call(tool: str, **arguments: str) -> Reply:
    return Reply("", tool_calls=[ToolCall(tool, json.dumps(arguments), "call")])


# --- Spider -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replies", "reward", "calls"),
    [
        ([RIGHT, "CORRECT"], 1.0, 2),
        ([WRONG, "WRONG", WRONG, "WRONG", f"```sql\n{RIGHT}\n```", "WRONG"], 1.0, 6),
        ([WRONG, "WRONG", WRONG, "WRONG", WRONG, "WRONG", RIGHT], 0.0, 6),
    ],
)
async def test_the_sql_agent_rewrites_twice(replies: list[str], reward: float, calls: int) -> None:
    async with FakeVLLM() as fake:
        fake.queue(*map(Reply, replies))
        assert await asyncio.to_thread(spider.agent, QUESTION, LLM(f"{fake.url}/v1", "key", fake.model)) == reward
        assert [request.body["max_completion_tokens"] for request in fake.requests] == [spider.MAX_TOKENS] * calls


# --- Calc-X -----------------------------------------------------------------------------------------------------------


async def solve(*replies: Reply) -> tuple[float, list[dict[str, Any]]]:
    async with FakeVLLM(model="policy") as fake:  # AutoGen warns when an answer names another model than was asked
        fake.queue(*replies)
        reward = await mathematician(PROBLEM, LLM(f"{fake.url}/v1", "key", fake.model))
        return reward, [dict(request.body) for request in fake.requests]


async def test_the_mathematician_calculates_exactly() -> None:
    reward, bodies = await solve(
        call("calculator", expression="16% * 50"), call("calculator", expression="8 / 12"), Reply("The answer is 2/3.")
    )
    assert reward == 1.0
    results = [message["content"] for message in bodies[-1]["messages"] if message["role"] == "tool"]
    assert results == ["8", "2/3 = about 0.6666666667"]


async def test_the_mathematician_ends() -> None:
    reward, bodies = await solve(*[call("calculator", expression="1 / 0")] * (MAX_CALLS + 1))
    assert (reward, len(bodies)) == (0.0, MAX_CALLS)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("So the answer is 0.667.", 1.0),
        ("The answer is 2/3", 1.0),
        ("The answer is 0.68.", 0.0),
        ("The answer is 2/3 kg.", 0.0),
        ("2/3", 0.0),
        ("The answer is 1/0.", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_within_a_hundredth_is_right(reply: str, reward: float) -> None:
    assert grade(reply, PROBLEM) == reward


# --- MuSiQue ----------------------------------------------------------------------------------------------------------


async def research(folder: Path, *replies: Reply) -> tuple[float, list[dict[str, Any]]]:
    """One rollout of the agent that the recipe makes for a folder, through the gateway."""
    save_corpus(DOCUMENTS, folder / "corpus.jsonl")
    agent: Any = recipe_of(EXPERIMENTS["musique"]).agent(folder)
    assert isinstance(agent.keywords["library"], Library)
    async with AsyncExitStack() as stack:
        store = MemoryStore()
        await store.open()
        stack.push_async_callback(store.close)
        await store.put_run(Run("run", "run"))
        fake = await stack.enter_async_context(FakeVLLM())
        fake.queue(*replies)
        gateway = Gateway(
            store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"a secret long enough for it"
        )
        await gateway.start()
        stack.push_async_callback(gateway.close)
        await store.create_rollouts([Rollout("rollout", "run", HOPS, "group")])
        (lease,) = await store.lease("run", "worker")
        reward = await agent(HOPS, gateway.llm(lease))
        return reward, [dict(request.body) for request in fake.requests]


async def test_the_researcher_sees_several_paragraphs(tmp_path: Path) -> None:
    reward, bodies = await research(tmp_path, call("search", query="Bolt Kira Holt"), Reply("Answer: the lamps"))
    assert reward == pytest.approx(1.0)
    (found,) = [message["content"] for message in bodies[1]["messages"] if message["role"] == "tool"]
    assert sorted(found.split("\n")) == sorted(document.text for document in DOCUMENTS)
    assert bodies[0]["messages"][0]["content"] == musique.INSTRUCTIONS
    assert bodies[0]["max_completion_tokens"] == musique.MAX_TOKENS


async def test_the_researcher_ends(tmp_path: Path) -> None:
    reward, bodies = await research(tmp_path, *[call("search", query="Bolt")] * (musique.MAX_TURNS + 1))
    assert (reward, len(bodies)) == (0.0, musique.MAX_TURNS)


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_recipe_s_parts_are_put_together(name: str, cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    save_corpus(DOCUMENTS, folder / "corpus.jsonl")
    for file in (TRAIN, VAL):
        write_tasks([Task(file)], folder / file)
    made = set_up(EXPERIMENTS[name], Options(cluster=cluster, data=str(tmp_path), set=("trainer.steps=3",)), seed=2)
    assert made.model == "Qwen/Qwen3-4B"
    assert made.engine == ("torch" if cluster == "1x1" else "verl")
    assert (made.config.trainer.steps, made.config.trainer.seed) == (3, 2)
    assert made.config.trainer.max_staleness == (0 if cluster == "1x1" else 1)
    if made.engine == "verl":
        assert made.config.engine.verl.world_size == {"1x8": 4, "2x8": 8}[cluster]
    assert made.config.runner.preload == (f"lightning_examples.paper.{name}.agent",)
    assert made.train_agents == (("write", "rewrite") if name == "spider" else ())
    assert isinstance(made.algorithm, lightning.LightningRL)
    assert (made.algorithm.group_size, made.algorithm.clip_high, made.algorithm.kl_coefficient) == (8, 0.3, 0.0)
    assert callable(made.agent)
    assert [task.input for task in (*made.train, *made.val)] == [TRAIN, VAL]
