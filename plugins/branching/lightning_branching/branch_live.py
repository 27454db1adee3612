"""Branches whose calls the policy of the parent's own run answers, which that run's trainer serves now: no vLLM is started.

The invariant: one version answers, that which answered the parent. A branch that another one answers is void: its gateway is a
member of the run's fleet, and so knows of every update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from lightning.config import Config
from lightning.errors import ConfigError
from lightning.runner.protocol import Runner
from lightning.store.protocol import Store
from lightning.trainer.agents import Agents
from lightning.trainer.how_to_call import HowToCall
from lightning.trainer.run_server import of_project
from lightning.trainer.run_stages import Prompts
from lightning.trainer.stack import join_gateway
from lightning.types import LLM, Lease, Rollout, Run

from lightning_branching.branch_parent import INSTEAD


@dataclass(frozen=True, slots=True)
class LiveAgents:
    """Runs the agents of a run's branches. Make one with `open_live`."""

    store: Store
    agents: Agents
    prompts: Prompts

    async def execute(self, rollouts: Sequence[Rollout], told: Callable[[Rollout], None]) -> None:
        """Create the rollouts and run each to its end."""
        stamped = await self.prompts.stamp(self.store, rollouts)
        self.agents.expect(stamped)
        await self.store.create_rollouts(stamped)
        await self.agents.work(told)


async def open_live(
    resources: AsyncExitStack, store: Store, run: Run, parent: Run, config: Config, runner: Runner, prompts: Prompts
) -> LiveAgents:
    """Start a gateway of its own before the policy of the run `parent`, and the runner; `resources` closes them. Raises
    `ConfigError` where no server of that policy answers."""
    gateway = await join_gateway(resources, store, config)
    if not await gateway.served(parent.id):
        raise ConfigError(
            f"no server of the policy of run {parent.id} answers here: its trainer was killed, updates the policy now, or is "
            f"on another machine: {INSTEAD}"
        )
    resources.push_async_callback(runner.close)
    await runner.start()
    how = HowToCall(seed=config.trainer.seed if config.runner.seed_agents else None)

    def llm_for(lease: Lease) -> LLM:
        llm = gateway.llm(lease, run=parent.id)
        return replace(llm, prompts=prompts.of(lease.rollout), seed=how.agent_seed(lease.rollout))

    seen = of_project(store, run.project)
    return LiveAgents(seen, Agents(seen, run.id, runner, config.runner, llm_for, gateway.parts.line), prompts)
