"""Runs one rollout of an agent against a model that plays a script, and returns what training would see of it.

The invariant: the rollout takes the same way as in training (tap, adapters, stages, gateway, store, judged outcome), in this
process and without another server, so that a debugger and a test's patches reach the agent.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from lightning.asyncio_utils import outside_of_loops
from lightning.config import RunnerConfig
from lightning.errors import DataError
from lightning.runner.inline import run_here
from lightning.runner.protocol import Agent
from lightning.testing.contract_house import House
from lightning.testing.fake_vllm import FakeVLLM, Reply, Script, ToolCall
from lightning.types import LLM, Json, Outcome, Rollout, StepReward, StepState, Task, ToolEvent, Transition, as_texts

_loop, _free = asyncio.Runner(loop_factory=asyncio.new_event_loop), threading.Lock()
atexit.register(_loop.close)


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """What the store has of a rollout. `rollout` has its reward and the named parts of it, or its fault and error."""

    rollout: Rollout
    transitions: tuple[Transition, ...]
    tool_events: tuple[ToolEvent, ...]
    step_rewards: tuple[StepReward, ...]
    step_states: tuple[StepState, ...]

    @property
    def rewards_of_calls(self) -> Mapping[str, Mapping[str, float]]:
        """The sum of the step rewards of each name, by the id of the call that they are for ("" if the call is unknown)."""
        found: dict[str, dict[str, float]] = {}
        for step in self.step_rewards:
            named = found.setdefault(step.response_id, {})
            named[step.name] = named.get(step.name, 0.0) + step.value
        return found


def rollout(
    agent: Agent,
    task: Task | Json,
    script: Script | Sequence[Reply | ToolCall | str],
    *,
    adapters: Sequence[str] | None = None,
) -> RolloutRecord:
    """Run an agent once on a task and return what was recorded.

    `script` is what the model says: a function from a chat request's body to a `Reply`, or the replies in order, where a text
    or a `ToolCall` is short for a reply. A call after the last is refused (400). `adapters` names the adapters to install; None
    installs all that are found. An error of the agent is in `rollout.error`. The agent runs in this thread, or in another one
    while an event loop runs here; async agents run on one loop for all rollouts of this process. Random numbers are not seeded.
    """
    asked = task if isinstance(task, Task) else Task(task)
    house = House(FakeVLLM(script=script if callable(script) else _in_order(script)))
    with ExitStack() as closing:
        house.start()
        closing.callback(house.close)
        lease, llm = house.lease(asked)
        config = RunnerConfig(adapters=None if adapters is None else as_texts(adapters, "adapters"))
        outcome = outside_of_loops(lambda: _run(agent, asked, llm, config))
        ended, calls, attempt = house.end(lease, outcome)
    return RolloutRecord(
        ended,
        tuple(calls),
        attempt.tool_events,
        attempt.step_rewards,
        attempt.step_states,
    )


def _run(agent: Agent, task: Task, llm: LLM, config: RunnerConfig) -> Outcome:
    """Run the agent on one loop for all rollouts, as in a worker: clients that it keeps belong to the loop they began in."""
    if not _free.acquire(blocking=False):  # a rollout inside another one, or in a thread beside it
        with asyncio.Runner() as loop:
            return run_here(agent, task, llm, loop, config)
    try:
        return run_here(agent, task, llm, _loop, config)
    finally:
        _free.release()


def _in_order(replies: Sequence[Reply | ToolCall | str]) -> Script:
    if isinstance(replies, str):
        raise DataError(f"script is the text {replies!r:.200}, not a list of replies: write script=[...]")
    left = list(replies)

    def script(body: Mapping[str, object]) -> Reply:
        if not left:
            return Reply(status=400, message=f"the script has {len(replies)} replies, and the agent asks once more")
        said = left.pop(0)
        if isinstance(said, str):
            return Reply(said)
        return Reply("", tool_calls=[said]) if isinstance(said, ToolCall) else said

    return script
