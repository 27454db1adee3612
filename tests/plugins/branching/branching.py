"""An agent's rollout, and branches of it: the real gateway, store and runner's code before a policy server with a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.asyncio_utils import outside_of_loops
from lightning.instrument import emit, install_tap
from lightning.plugins import plugins
from lightning.plugins.stages import NamedStage
from lightning.runner.stages import AttemptLine
from lightning.runner.worker import run_agent
from lightning.store.protocol import Attempt
from lightning.testing.contract_house import House
from lightning.testing.fake_vllm import FakeVLLM, Reply, Script
from lightning.types import Json, Rollout, Task, Transition
from lightning_branching.recorded import RecordedRollout, read_whole
from lightning_branching.tools import BRANCHES, BranchToolsStage

LINE = AttemptLine([NamedStage(BRANCHES, BranchToolsStage())])


@dataclass(frozen=True)
class Recorded:
    rollout: Rollout
    calls: Sequence[Transition]
    attempt: Attempt

    def key(self, number: int) -> tuple[str, int, int]:
        """The key of a call, counted from 1."""
        return self.calls[number - 1].key


@dataclass
class Brancher:
    house: House

    def run(
        self,
        agent: Callable[..., Any],
        *,
        parent: tuple[str, int, int] | None = None,
        config: Mapping[str, Json] | None = None,
        task: str = "tides",
    ) -> Recorded:
        lease, llm = self.house.lease(Task(task), parent=parent, config=config)
        with asyncio.Runner() as loop:
            outcome = outside_of_loops(lambda: run_agent(agent, lease.rollout.task, llm, loop, LINE))
        return Recorded(*self.house.end(lease, outcome))

    def whole(self, rollout: str) -> RecordedRollout:
        """What the agent of a rollout saw, with what a branch inherits."""
        return self.house.do(read_whole(self.house.store, rollout))

    @property
    def sampled(self) -> int:
        """How many calls have reached the policy server."""
        return len([each for each in self.house.fake.requests if each.path.endswith("/completions")])


@contextlib.contextmanager
def brancher(script: Script, adapters: Sequence[str] | None = ("raw",)) -> Iterator[Brancher]:
    house = House(FakeVLLM(script=script))
    with contextlib.ExitStack() as closing:
        house.start()
        closing.callback(house.close)
        closing.callback(install_tap())
        closing.callback(plugins().install_adapters(emit, adapters))
        yield Brancher(house)


def numbered() -> Script:
    """A model that says another thing each time."""
    count = iter(range(1, 10_000))
    return lambda body: Reply(f"said {next(count)}")
