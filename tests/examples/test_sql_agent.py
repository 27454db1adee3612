"""The LangGraph agent against a scripted policy server: what it asks, what is recorded of it, and what of that is trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.algorithms.lightning_rl import LightningRL
from lightning.batch.trajectory import Group, Trajectory
from lightning.config.sections import GatewayConfig, RunnerConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.gateway import Gateway, Upstream
from lightning.runner.inline import InlineRunner
from lightning.runner.lease_loop import work
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.plan import train_rollouts
from lightning.trainer.training_data import load_groups
from lightning.types import LLM, Rollout, Run, Task, Transition, token_ids
from lightning_examples.sql_langchain import DATABASES
from lightning_examples.sql_langchain.agent import CHECK, MAX_REWRITES, MAX_TOKENS, REWRITE, WRITE, agent, query_in
from lightning_examples.sql_langchain.demo import demo

TASK = Task(
    {
        "question": "How many workers older than 30?",
        "schema": "staff(name, team, city, age, pay)",
        "database": str(DATABASES / "company" / "company.sqlite"),
    },
    "SELECT COUNT(name) FROM staff WHERE age > 30",
)
RIGHT, WRONG = "SELECT COUNT(*) FROM staff WHERE age > 30", "SELECT COUNT(*) FROM workers"
VOCABULARY = 320
# What the fake samples has logprobs of its own making: the correction would mask it.
GRPO = LightningRL("grpo", group_size=4, normalization="token-mean", correction="none")


async def play(*replies: str) -> tuple[float, list[list[str]]]:
    """Run the agent on TASK with scripted replies; its reward and (system, user) of each request."""
    async with FakeVLLM() as fake:
        fake.queue(*map(Reply, replies))
        reward = await asyncio.to_thread(agent, TASK, LLM(f"{fake.url}/v1", "the-key", fake.model))
        for request in fake.requests:
            assert request.headers["authorization"] == "Bearer the-key"
            assert request.body["max_completion_tokens"] == MAX_TOKENS
            assert "temperature" not in request.body
            assert [message["role"] for message in request.body["messages"]] == ["system", "user"]
        return reward, [[message["content"] for message in request.body["messages"]] for request in fake.requests]


async def test_a_query_that_is_found_correct_is_the_answer() -> None:
    reward, asked = await play(RIGHT, "CORRECT")
    assert reward == 1.0
    first = f"{TASK.input['schema']}\nQuestion: {TASK.input['question']}"
    (count,) = {text.split("Result: ")[1] for _, text in asked[1:]}
    assert asked == [[WRITE, first], [CHECK, f"{first}\nQuery: {RIGHT}\nResult: {count}"]]
    assert count.isdigit()


async def test_a_wrong_query_is_written_again_with_its_error_in_sight() -> None:
    reward, asked = await play(WRONG, "WRONG", f"Here it is:\n```sql\n{RIGHT}\n```", "CORRECT")
    assert reward == 1.0
    assert [system for system, _ in asked] == [WRITE, CHECK, REWRITE, CHECK]
    assert asked[1][1] == asked[2][1]
    assert asked[2][1].endswith(f"Query: {WRONG}\nResult: error: no such table: workers")
    assert f"Query: {RIGHT}\n" in asked[3][1]


async def test_it_gives_up_after_so_many_rewrites() -> None:
    reward, asked = await play(WRONG, *["INCORRECT", WRONG] * MAX_REWRITES, "WRONG")
    assert reward == 0.0
    assert [system for system, _ in asked] == [WRITE, CHECK, *[REWRITE, CHECK] * MAX_REWRITES]


@pytest.mark.parametrize("query", ["", "I do not know", "DROP TABLE staff", "SELECT 1; SELECT 2"])
async def test_no_query_at_all_earns_nothing(query: str) -> None:
    reward, _ = await play(query, "CORRECT")
    assert reward == 0.0


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        (" SELECT 1\n", "SELECT 1"),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("Sure.\n```SQLite\nSELECT\n  1;\n```\nThat is all: ```SELECT 2```", "SELECT\n  1;"),
        ("```\nSELECT 1```", "SELECT 1"),
        ("```sql\nSELECT 1", "```sql\nSELECT 1"),
        ("", ""),
    ],
)
def test_the_query_of_a_reply(reply: str, query: str) -> None:
    assert query_in(reply) == query


# --- what is recorded, and what of it is trained ----------------------------------------------------------------------


def scripted() -> Any:
    """Rollouts that take turns: right at once; wrong, then right; wrong to the end."""
    written = 0

    def script(body: Mapping[str, Any]) -> Reply:
        nonlocal written
        system, prompt = (message["content"] for message in body["messages"])
        if system == CHECK:
            return Reply("CORRECT" if RIGHT in prompt else "WRONG")
        written += system == WRITE
        return Reply(RIGHT if (written % 3 == 1) or (system == REWRITE and written % 3 == 2) else WRONG)

    return script


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    """A store in which a step of two groups of four rollouts of the agent was recorded, as a run records it."""
    async with AsyncExitStack() as stack:
        opened = MemoryStore()
        await opened.open()
        stack.push_async_callback(opened.close)
        await opened.put_run(Run("run", "run"))
        fake = await stack.enter_async_context(FakeVLLM(script=scripted()))
        config = RunnerConfig(concurrency=1, adapters=("langchain",))
        gateway = Gateway(
            opened, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"a secret of the test, long"
        )
        await gateway.start()
        stack.push_async_callback(gateway.close)
        runner = InlineRunner(agent, config)
        await runner.start()
        stack.push_async_callback(runner.close)
        await opened.create_rollouts(train_rollouts("run", 0, [TASK, replace(TASK, id="again")], 4, 1))
        await work(opened, runner, "run", gateway.llm, worker="test", config=config, line=gateway.parts.line)
        yield opened


async def recorded(store: MemoryStore) -> list[Rollout]:
    return (await store.list_rollouts("run", step=0)).items


async def agents_trained(store: MemoryStore, train_agents: list[str]) -> tuple[set[str], int]:
    """Who made the calls that have a span in the training rows; and how many calls those are."""
    rollouts = await recorded(store)
    batch = GRPO.batch(await load_groups(store, rollouts, train_agents))
    calls = {call.key: call.caller.agent for one in rollouts for call in await store.transitions(one.id)}
    spans = [calls[span.rollout, span.attempt, span.seq] for row in batch.samples for span in row.spans]
    # Outside the spans nothing has weight.
    for row in batch.samples:
        inside = sum((row.weights[span.start : span.stop] != 0).sum() for span in row.spans)
        assert inside == (row.weights != 0).sum() == sum(span.stop - span.start for span in row.spans)
    return set(spans), len(spans)


async def test_every_call_is_recorded_under_its_node(store: MemoryStore) -> None:
    rollouts = await recorded(store)
    assert [one.reward for one in rollouts] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    seen = [[call.caller.agent for call in await store.transitions(one.id)] for one in rollouts[:3]]
    assert seen[0] == ["write", "check"]
    assert seen[1] == ["write", "check", "rewrite", "check"]
    assert seen[2] == ["write", "check", *["rewrite", "check"] * MAX_REWRITES]
    for call in await store.transitions(rollouts[2].id):
        assert call.caller.framework == "langchain"
        assert call.caller.path[-1] == call.caller.agent


async def test_the_checker_is_recorded_but_never_trained(store: MemoryStore) -> None:
    trained, count = await agents_trained(store, list(demo().train_agents))
    assert trained == {"write", "rewrite"}
    every = [call.caller.agent for one in await recorded(store) for call in await store.transitions(one.id)]
    assert count == len(every) - every.count("check")
    assert (await agents_trained(store, []))[0] == {"write", "rewrite", "check"}
    assert (await agents_trained(store, ["rewrite"]))[0] == {"rewrite"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab=VOCABULARY)


def gradient(model: Path, groups: list[Group]) -> dict[str, torch.Tensor]:
    """What the torch engine computes for these groups, before it takes the step."""
    engine = TorchEngine(device="cpu", dtype="float64")
    engine.open(model, OptimizerConfig(), seed=0)
    try:
        engine.forward_backward(GRPO.batch(groups).samples, GRPO.loss)
        return {name: weight.grad.clone() for name, weight in engine._parameters.items() if weight.grad is not None}
    finally:
        engine.close()


def calls_changed(groups: list[Group], change: Any) -> list[Group]:
    """`change(call, trainable)` for every call: another call, or None to leave it out. A rollout without a trained call
    stays as it is: one without any call is in no baseline."""

    def changed(one: Trajectory) -> Trajectory:
        if not any(one.trainable):
            return one
        pairs = [(change(call, flag), flag) for call, flag in zip(one.transitions, one.trainable, strict=True)]
        kept = [(call, flag) for call, flag in pairs if call is not None]
        return replace(one, transitions=tuple(call for call, _ in kept), trainable=tuple(flag for _, flag in kept))

    return [replace(group, trajectories=tuple(map(changed, group.trajectories))) for group in groups]


def fitting(call: Transition, _: bool) -> Transition:
    """The call with ids of the tiny model's vocabulary."""
    prompt, response = ([i % VOCABULARY for i in ids] for ids in (call.prompt_ids, call.response_ids))
    return replace(call, prompt_ids=token_ids(prompt), response_ids=token_ids(response))


def other_words(call: Transition, trained: bool) -> Transition:
    """The same call, had the model said something else; unless it is trained."""
    if trained:
        return call
    return replace(call, response_ids=token_ids([(i + 1) % VOCABULARY for i in call.response_ids]))


async def test_training_rewrite_alone_leaves_no_gradient_of_the_others(store: MemoryStore, model: Path) -> None:
    rollouts = await recorded(store)
    alone = calls_changed(await load_groups(store, rollouts, ["rewrite"]), fitting)
    expected = gradient(model, alone)
    assert any(values.any() for values in expected.values())
    for others in (
        calls_changed(alone, lambda call, trained: call if trained else None),
        calls_changed(alone, other_words),
    ):
        found = gradient(model, others)
        assert all(torch.equal(found[name], values) for name, values in expected.items())
    # Where write is trained too, its calls do count.
    both = calls_changed(await load_groups(store, rollouts, ["write", "rewrite"]), fitting)
    assert any(not torch.equal(values, expected[name]) for name, values in gradient(model, both).items())
