"""Trains some of the programs for three steps with a real vLLM and a tiny model that says noise: each agent's own tokens are
trained, the audit finds nothing, and no token drifted. With `--policies` each agent has a policy of its own, and answers by it.

The invariant: the tokens that are counted are those of the rows that the engine computed on, by the digest that each step
keeps. The workflows are the programs' own; what is set here is how long an answer may be, and that a tool has to be called.

    python -m tests.official.train [--policies] [NAME ...]
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import numpy as np
from lightning.config import Config
from lightning.plugins import plugins
from lightning.store.protocol import Store
from lightning.testing.tiny_models import make_tiny_model
from lightning.trainer.training_data import all_rollouts, batch_digest, load_groups
from lightning.types import LLM, POLICY, Task

from tests.official.listing import OURS

STEPS, GROUP, TASKS = 3, 4, 2
MAX_TOKENS = 400
ALGORITHM = lightning.LightningRL("grpo", group_size=GROUP)
TOPICS = ("the sea", "the moon", "a mill", "an owl")


def program(path: str) -> ModuleType:
    """A program, imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, OURS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(text: str) -> float:
    """The share of letters: something in which noise differs."""
    return sum(char.isalpha() for char in text) / max(1, len(text))


async def supervisor(task: Task, llm: LLM) -> float:
    """LangGraph's three `create_react_agent`s under a supervisor."""
    module = program("langgraph/supervisor_by_hand.py")
    module.model.max_tokens = MAX_TOKENS
    said = await module.graph.ainvoke({"messages": [("user", str(task.input))]})
    return score(" ".join(message.text for message in said["messages"][1:]))


async def claude(task: Task, llm: LLM) -> float:
    """The workflow on ChatAnthropic, which asks for as many tokens as Claude may say."""
    module = program("langchain/anthropic_workflow.py")
    return score(await module.workflow.ainvoke({"text": task.input}))


async def agents_as_tools(task: Task, llm: LLM) -> float:
    """The Agents SDK's agents as tools of an agent, which has to call one."""
    from agents import ItemHelpers, ModelSettings, Runner

    module = program("openai_agents/agents_as_tools.py")
    for agent in (module.spanish, module.french, module.synthesizer):
        agent.model_settings = ModelSettings(max_tokens=MAX_TOKENS)
    module.orchestrator.model_settings = ModelSettings(max_tokens=4 * MAX_TOKENS, tool_choice="required")
    first = await Runner.run(module.orchestrator, str(task.input))
    texts = [ItemHelpers.text_message_output(item) for item in first.new_items if item.type == "message_output_item"]
    return score((await Runner.run(module.synthesizer, "\n".join(texts) or "nothing")).final_output)


@dataclass(frozen=True)
class Training:
    """An agent function, and the names of the agents whose tokens have to be trained."""

    agent: Callable[[Task, LLM], Any]
    names: tuple[str, ...]


TRAININGS: Mapping[str, Training] = {
    "supervisor": Training(supervisor, ("supervisor", "researcher", "mathematician", "writer")),
    "claude": Training(claude, ("writer", "editor")),
    "agents_as_tools": Training(agents_as_tools, ("orchestrator", "spanish_agent", "french_agent", "synthesizer")),
}


async def trained_tokens(store: Store, run: str, *, policies: bool) -> Counter[str]:
    """Trained tokens by agent. Raises `AssertionError` where a step's rows are not the ones that the engine had, or where they
    are not of the policy that has the agent's name, with `policies`, or of the one policy."""
    found: Counter[str] = Counter()
    rollouts = await all_rollouts(store, run, split="train")
    for record in await store.steps(run):
        members = [rollout for rollout in rollouts if rollout.group in record.groups]
        batch = ALGORITHM.batch(await load_groups(store, members, (), Config().trainer.policy_fault))
        assert batch_digest(batch) == record.digest
        calls = await store.transitions_of([(name, attempt) for name, attempt in record.rollouts])
        agents = {call.key: call.caller.agent for several in calls for call in several}
        for sample in batch.samples:
            for span in sample.spans:
                weights = sample.weights[span.start : span.stop]
                agent = agents[span.rollout, span.attempt, span.seq]
                assert sample.policy == (agent if policies else POLICY)
                found[agent] += int(np.count_nonzero(weights))
    return found


def train(name: str, root: Path, *, policies: bool) -> str:
    """Train one, and say what came of it in a line. Raises `AssertionError` where something is not as it has to be."""
    training, out = TRAININGS[name], root / name
    settings = {f"policies.{agent}.agents": [agent] for agent in training.names} | {"engine.lora.rank": 4}
    trainer = lightning.Trainer(
        make_tiny_model(root / f"{name}-model"),
        ALGORITHM,
        out=out,
        steps=STEPS,
        tasks_per_step=TASKS,
        lr=1e-4,
        concurrency=8,
        progress=False,
        config=settings if policies else None,
    )
    summary = trainer.fit(training.agent, [Task(topic) for topic in TOPICS])
    tokens = asyncio.run(_tokens(out, policies=policies))
    audited = subprocess.run([sys.executable, "-m", "lightning", "audit", str(out)], capture_output=True, text=True)
    assert audited.returncode == 0, audited.stdout
    assert summary.drift_tokens == 0
    assert summary.steps == STEPS
    assert all(tokens[agent] > 0 for agent in training.names), tokens
    named = ", ".join(f"{agent} {tokens[agent]}" for agent in training.names)
    return (
        f"{name}: {summary.steps} steps, {summary.rollouts} rollouts ({summary.failed} failed), drift {summary.drift_tokens}, "
        f"audit: {' '.join(audited.stdout.split())}; trained tokens: {named}"
    )


async def _tokens(out: Path, *, policies: bool) -> Counter[str]:
    store = plugins().store(f"sqlite:///{out / 'lightning.db'}")
    await store.open()
    try:
        return await trained_tokens(store, out.name, policies=policies)
    finally:
        await store.close()


def main(given: Sequence[str]) -> None:
    """Train those with these names, or all."""
    policies, names = "--policies" in given, [name for name in given if name != "--policies"]
    with tempfile.TemporaryDirectory(prefix="official-train-") as root:
        for name in names or TRAININGS:
            sys.stdout.write(train(name, Path(root), policies=policies) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
