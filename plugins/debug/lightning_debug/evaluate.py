"""Run an agent on tasks against given models, without training, for `lightning eval` and `lightning ab`.

The invariant: each variant's rollouts are a run of their own in a store, with ids that follow from the tasks. So a stopped
evaluation can be resumed, and two runs of the same tasks give the same seeds to the same rollouts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lightning.asyncio_utils import cancel
from lightning.config import Config
from lightning.errors import ConfigError, RunnerError
from lightning.plugins import plugins
from lightning.runner.protocol import Agent
from lightning.store.places import DATABASE
from lightning.store.protocol import Store
from lightning.store.url import sqlite_url
from lightning.trainer.agents import of_project, project_of
from lightning.trainer.context import is_over, mark_over
from lightning.trainer.model import with_dtypes
from lightning.trainer.plan import VAL, generation, newest_generation, train_rollouts
from lightning.trainer.run_stages import Prompts, run_line
from lightning.trainer.runs import claim_folder, differences
from lightning.trainer.stack import Stack, open_gateway, open_stack
from lightning.trainer.summary import Reporter, grouped
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Json, Rollout, Run, Status, Task, by_key
from lightning_branching.branching import runner_here
from lightning_branching.policies import EvaluatedModel
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource
from lightning_resources.prompts import bindable

from lightning_debug.statistics import Estimate, avg_at_k, ks_of, pass_at_k

FIXED: Final = (
    "agent",
    "evaluates",
    "gateway.override_sampling",
    "gateway.seed_calls",
    "model",
    "policies",
    "policy_server.dtype",
    "policy_server.max_model_len",
    "prompt",
    "runner.max_attempts",
    "runner.prompts",
    "runner.seed_agents",
    "runner.timeout",
    "samples",
    "seed",
    "tasks",
    "trainer.eval_temperature",
)
"""Settings that a resumed evaluation may not change, since its rollouts would be of two kinds. A change of any other setting is
reported."""
MOST_REASONS: Final = 5
TRAINED: Final = 1
"""The version of the trained policies of a run, of which version 0 is the model that each began as."""
LOOK_SECONDS: Final = 0.5
"""Seconds between two checks whether vLLM was restarted at another address."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant to evaluate, as the run named `run`: a model, settings, and a prompt as (component, text), None for the
    agent's own. `label` is its name in reports."""

    run: str
    model: EvaluatedModel
    config: Config
    prompt: tuple[str, str] | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """The part of an evaluation that all variants share. `agent_name` is the agent as MODULE:FUNCTION, `n` the number of
    rollouts of each task."""

    agent: Agent
    agent_name: str
    tasks: Sequence[Task]
    n: int
    runner: str
    folder: Path
    resume: bool = False


@asynccontextmanager
async def evaluating(setup: Setup, variants: Sequence[Variant], reporter: Reporter) -> AsyncIterator[Evaluator]:
    """Open the folder's store and yield an evaluator for the variants. Their runs are marked as ended at exit, unless an error
    was raised.

    Raises `ConfigError` for a folder with another run, for a resume with changed settings, and for a runner that does not run
    agents on this machine.
    """
    if variants[0].config.policy_server.attach:
        raise ConfigError(
            "policy_server.attach: an evaluation starts a vLLM of its own with the weights that are named; leave it out"
        )
    async with AsyncExitStack() as resources:
        resources.enter_context(claim_folder(setup.folder))
        url = sqlite_url((setup.folder / DATABASE).resolve())
        store = await resources.enter_async_context(plugins().opened_store(url))
        known = {run.id: run for run in await store.list_runs()}
        serving = await resources.enter_async_context(AsyncExitStack())
        evaluator = Evaluator(setup, variants, reporter, url, store, known, serving)
        yield evaluator
        await evaluator.close_runs()


class Evaluator:
    """Runs variants; it is made by `evaluating`. One model is served at a time, started when a rollout needs it. `known` are
    the runs that the open store already has; `serving` is the exit stack that stops the servers."""

    def __init__(
        self,
        setup: Setup,
        variants: Sequence[Variant],
        reporter: Reporter,
        url: str,
        store: Store,
        known: Mapping[str, Run],
        serving: AsyncExitStack,
    ) -> None:
        self.setup, self.variants, self.reporter = setup, variants, reporter
        self._url, self._store, self._serving = url, store, serving
        self.store = of_project(store, project_of(variants[0].config))
        """The open store, restricted to the project of the runs."""
        self._stacks: dict[str, Stack] = {}
        self._served: EvaluatedModel | None = None
        self._runs = {variant.run: self._run_of(variant, known) for variant in variants}

    def _run_of(self, variant: Variant, known: Mapping[str, Run]) -> Run:
        described = self._described(variant)
        if variant.run not in known:
            if known and not {each.run for each in self.variants} & known.keys():
                raise ConfigError(f"{self.setup.folder} holds the run {', '.join(known)}: give another --out")
            return Run(variant.run, variant.run, described, time.time(), project_of(variant.config))
        if not self.setup.resume:
            raise ConfigError(
                f"{self.setup.folder} holds this evaluation already: give --resume to go on with it, or another --out"
            )
        changed = differences(known[variant.run].config, described)
        if other := [name for name in changed if any(name == each or name.startswith(f"{each}.") for each in FIXED)]:
            raise ConfigError(
                f"{variant.run} was begun with another {', '.join(other)}: resume it with the same, or give another --out"
            )
        if changed:
            said = ", ".join(f"{name} ({before} before, {now} now)" for name, (before, now) in changed.items())
            self.reporter.say(f"{variant.run} goes on with another {said}")
        return known[variant.run]

    def _described(self, variant: Variant) -> dict[str, Json]:
        return {
            "model": str(variant.model.folder),
            "evaluates": variant.model.name,
            "agent": self.setup.agent_name,
            "samples": self.setup.n,
            "seed": variant.config.trainer.seed,
            "prompt": list(variant.prompt) if variant.prompt else None,
            "config": variant.config.model_dump(mode="json"),
            "tasks": {"train": [], "val": [task.id for task in self.setup.tasks]},
        }

    async def run(self, variant: Variant, first: int, count: int) -> list[Rollout]:
        """Return the ended rollouts of `count` tasks from index `first` on, in the order of tasks. Rollouts that have not ended
        yet are run first."""
        tasks = self.setup.tasks[first : first + count]
        store, attempts = self.store, variant.config.runner.max_attempts

        async def recorded() -> list[Rollout]:
            every = await all_rollouts(store, variant.run, split=VAL, step=0)
            return [each for each in every if first <= int(each.group.rpartition("/")[2]) < first + count]

        def planned(number: int) -> list[Rollout]:
            made = train_rollouts(variant.run, 0, tasks, self.setup.n, attempts, generation=number, first=first)
            return [replace(rollout, split=VAL) for rollout in made]

        known = await recorded()
        over = bool(known) and await is_over(store, variant.run)
        wanted = planned(newest_generation(known) if over else generation(known, planned(0)))
        ended = {rollout.id for rollout in known if rollout.status.ended}
        if any(rollout.id not in ended for rollout in wanted):
            stack = await self._stack(variant)
            self.reporter.phase(variant.run, len(wanted))
            following = asyncio.create_task(self._follow(variant.run))
            try:
                await stack.execute(wanted, self.reporter.rollout)
            finally:
                await cancel(following)
            known = await recorded()
        by_id = {rollout.id: rollout for rollout in known}
        return [by_id[rollout.id] for rollout in wanted]

    async def close_runs(self) -> None:
        """Mark the variants' runs as ended in the store."""
        for run in self._runs:
            if await self.store.get_run(run) is not None:
                await mark_over(self.store, run, True)

    async def _stack(self, variant: Variant) -> Stack:
        """Return the stack that serves the variant; open it if needed, and stop the server of another model first."""
        if self._served is not None and not self._served.serves_as(variant.model):
            self._stacks.clear()
            await self._serving.aclose()
        self._served = variant.model
        if variant.run not in self._stacks:
            self._stacks[variant.run] = await self._opened(variant)
        self._moved(variant.run)
        return self._stacks[variant.run]

    async def _follow(self, run: str) -> None:
        while True:
            self._moved(run)
            await asyncio.sleep(LOOK_SECONDS)

    def _moved(self, run: str) -> None:
        """Tell the gateway of a run which vLLM is started again, and its address once it has its weights, unless the gateway
        follows restarts itself."""
        stack, lead = self._stacks[run], self._supervised
        if lead is None or stack is lead:
            return
        pool = stack.gateway.own.pool
        for slot, now in zip(pool.slots, lead.there(), strict=True):
            if now is None:
                slot.vacate()
            elif slot.vacant or slot.upstream != now:
                pool.replace(slot.upstream, now)

    @property
    def _supervised(self) -> Stack | None:
        """The stack that started vLLM, whose gateway follows a restart by itself; None if none is open."""
        return next(iter(self._stacks.values()), None)

    async def _opened(self, variant: Variant) -> Stack:
        store, config = self._store, with_dtypes(variant.config, variant.model.folder, "torch")
        run = await store.put_run(self._runs[variant.run])
        await mark_over(store, run.id, False)
        prompts: Prompts = await run_line(config).prompts(store, run, config.runner.prompts)
        if variant.prompt:
            component, text = variant.prompt
            prompts = bindable(prompts)
            prompts.bind(component, await put_resource(self.store, Resource(component, text)))
        await prompts.keep(self.store, run.id)
        folder = self.setup.folder
        if first := self._supervised:
            gateway = await open_gateway(self._serving, store, first.servers, config, run.id)
            stack = Stack(
                run, config, folder, self.store, first.servers, gateway, first.runner, first.weights_folder, prompts
            )
        else:
            self.reporter.phase(f"starting the policy server with {variant.model.name}")
            stack = await open_stack(
                self._serving,
                run=run,
                config=config,
                folder=folder,
                model=variant.model.folder,
                store=store,
                runner=runner_here(self.setup.runner, self.setup.agent, config, folder, self._url),
                prompts=prompts,
                restores=variant.model.trained is not None,
            )
            if variant.model.trained is not None:
                await stack.update(variant.model.trained, TRAINED)
        await stack.tell_how_to_call()
        return stack


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of an evaluation: `scored` over the rollouts with a reward, `with_failures` with failed rollouts as the lowest
    reward. None if there are too few rollouts."""

    name: str
    scored: Estimate | None
    with_failures: Estimate | None


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of an evaluation. `faults` counts the rollouts without a reward by fault, `reasons` by reason. `lowest` is the
    reward that they count as, `success` the least reward of a success, `place` where the model comes from (a run or a store);
    empty for a folder."""

    run: str
    model: str
    tasks: int
    n: int
    rollouts: int
    scored: int
    success: float
    measures: tuple[Measure, ...]
    faults: Mapping[str, int]
    reasons: tuple[tuple[int, str], ...]
    warnings: tuple[str, ...] = field(default=())
    lowest: float = 0.0
    place: str = ""


def failures(rollouts: Sequence[Rollout]) -> tuple[tuple[int, str], ...]:
    """Return `(count, reason)` for each reason why rollouts failed."""
    return tuple(
        (count, str(why)) for count, why in grouped(each.error for each in rollouts if each.status is Status.FAILED)
    )


def faults_of(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Count the rollouts without a reward, by fault ("unknown" if none is recorded)."""
    found = Counter(str(rollout.fault or "unknown") for rollout in rollouts if rollout.reward is None)
    return dict(sorted(found.items()))


def check_any_scored(run: str, rollouts: Sequence[Rollout]) -> None:
    """Raise `RunnerError` if nothing can be measured: no rollout has a reward, and none failed by the policy's own fault."""
    if any(each.reward is not None or each.fault is Fault.POLICY for each in rollouts):
        return
    said = "; ".join(f"{count} x {why}" for count, why in failures(rollouts)[:MOST_REASONS])
    raise RunnerError(f"{run}: all {len(rollouts)} rollouts failed, so that there is nothing to measure: {said}")


def report_of(
    variant: Variant, rollouts: Sequence[Rollout], n: int, success: float, bounds: tuple[float, float]
) -> EvalReport:
    """Compute the report of an evaluation. A rollout succeeds with a reward of at least `success`. Raises `RunnerError` if
    nothing can be measured (`check_any_scored`)."""
    check_any_scored(variant.run, rollouts)
    groups = [[each.reward for each in own] for own in by_key(rollouts, lambda rollout: rollout.group).values()]
    scored = [[reward for reward in task if reward is not None] for task in groups]
    counted = [[bounds[0] if reward is None else reward for reward in task] for task in groups]

    def passed(tasks: Sequence[Sequence[float | None]]) -> list[tuple[int, int]]:
        return [(sum(each is not None and each >= success for each in task), len(task)) for task in tasks]

    measures = [Measure(f"avg@{n}", avg_at_k(scored, bounds), avg_at_k(counted, bounds))]
    alone, together = passed(scored), passed(groups)
    measures += [Measure(f"pass@{k}", pass_at_k(alone, k), pass_at_k(together, k)) for k in ks_of(n)]
    given = [reward for task in scored for reward in task]
    return EvalReport(
        variant.run,
        variant.model.name,
        len(groups),
        n,
        len(rollouts),
        len(given),
        success,
        tuple(measures),
        faults_of(rollouts),
        failures(rollouts),
        tuple(_warnings(variant.config, given, n, success, bounds)),
        bounds[0],
        variant.model.place,
    )


def _warnings(config: Config, given: Sequence[float], n: int, success: float, bounds: tuple[float, float]) -> list[str]:
    found = []
    if given and (min(given) < bounds[0] or max(given) > bounds[1]):
        found.append(
            f"rewards lie from {min(given):g} to {max(given):g}, outside the bounds {bounds[0]:g} to {bounds[1]:g}, so that "
            f"avg@{n} has no interval: say what rewards can be (--bounds LOW,HIGH; with --resume nothing runs again)"
        )
    if given and max(given) < success and not math.isclose(max(given), 0.0):
        found.append(
            f"no reward reaches {success:g}, the highest is {max(given):g}: say from which on a rollout succeeds (--success)"
        )
    if n > 1 and config.trainer.eval_temperature == 0.0:
        found.append("at temperature 0 the rollouts of a task are mostly alike, so that pass@k says little")
    return found
