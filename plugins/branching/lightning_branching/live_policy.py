"""The policy that the trainer of a run serves, for agents that run beside the training: whether it answers, and the gateway and
the runner before it.

The invariant: no vLLM is started and the trainer is not disturbed. A policy that does not answer is refused with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from lightning.cli.output import with_store
from lightning.config import Config, recorded_config
from lightning.errors import ConfigError
from lightning.gateway.gateway import Gateway
from lightning.gateway.identity import gateway_secret
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import shares_gpu
from lightning.runner.protocol import Runner
from lightning.store.protocol import Store
from lightning.trainer.agents import Agents, HowToCall, of_project
from lightning.trainer.run_stages import Prompts
from lightning.trainer.runs import is_claimed
from lightning.types import LLM, Lease, Rollout, Run

from lightning_branching.branch_parent import INSTEAD, Parent
from lightning_branching.policies import EvaluatedModel


@dataclass(frozen=True, slots=True)
class LiveAgents:
    """Runs the agents of branches against the policy that the parent's run serves. Make one with `open_live`."""

    store: Store
    agents: Agents
    prompts: Prompts

    async def execute(self, rollouts: Sequence[Rollout], told: Callable[[Rollout], None]) -> None:
        """Create the rollouts and run each to its end."""
        await self.agents.create(await self.prompts.stamp(self.store, rollouts))
        await self.agents.work(told)


async def join_gateway(resources: AsyncExitStack, store: Store, config: Config) -> Gateway:
    """A gateway without a policy server of its own, started: keys of a run are answered by those that its trainer serves.
    `resources` closes it. Raises `PluginError` where no plugin finds them."""
    plugins().fleet("a gateway before the policies that trainers serve")
    gateway = Gateway(store, (), config.gateway, secret=await gateway_secret(store))
    resources.push_async_callback(gateway.close)
    await gateway.start()
    return gateway


async def why_not_served(store: Store, run: str, version: int, config: Config) -> str:
    """Why the trainer of a run with these settings does not serve this version of its policy to others; empty where it says
    that it does. One that was killed has said nothing: whether its servers answer is for `Gateway.served` to say."""
    if shares_gpu(config) and not config.trainer.max_staleness:
        return f"the vLLM of run {run} gives its GPU to the trainer in each step, and answers nobody else meanwhile"
    wanted = f"the policy of run {run}, which its trainer serves,"
    if not plugins().names("fleets"):
        return plugins().missing("fleets", wanted)
    served = await plugins().fleet(wanted)().served_version(store, run)
    if served is None:
        return f"nobody serves the policy of run {run} now"
    return "" if served == version else f"the policy of run {run} has version {served} now, not version {version}"


async def open_live(
    resources: AsyncExitStack, store: Store, run: Run, parent: Run, config: Config, runner: Runner, prompts: Prompts
) -> LiveAgents:
    """Start a gateway in front of the policy server of the run `parent`, and the runner; `resources` closes them. Raises
    `ConfigError` if no server of that policy answers."""
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
        return how.llm(gateway, lease, prompts.of(lease.rollout), parent.id)

    seen = of_project(store, run.project)
    return LiveAgents(seen, Agents(seen, run.id, runner, config.runner, llm_for, gateway.parts.line), prompts)


def served_policy(parent: Parent) -> EvaluatedModel:
    """Return the policy that the trainer of the parent's run serves. Raises `ConfigError` if the trainer serves none, or serves
    another version than the one that answered the call."""
    base, _ = recorded_config(parent.found.settings)
    # The database alone may be a copy, which still says that the policy is served.
    if parent.folder is not None and not is_claimed(parent.folder):
        raise ConfigError(f"no process trains or serves the run in {parent.folder} now: {INSTEAD}")
    asked = with_store(parent.url, lambda store: why_not_served(store, parent.run.id, parent.version, base))
    if why := asyncio.run(asked):
        raise ConfigError(f"{why}: {INSTEAD}")
    model = Path(str(parent.run.config.get("model", "")))
    return EvaluatedModel(f"{parent.run.id}@{parent.version}", model, "the policy that its trainer serves")
