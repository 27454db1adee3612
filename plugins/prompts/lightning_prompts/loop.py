"""The loop of prompt algorithms, with the agent, runner, gateway, rewards and store of a training but without an engine.

The invariant: rollouts, candidates and the optimiser model's answers are stored before the algorithm gets them, under names
that follow from its requests. So a run that was killed at any point repeats its states without running or asking anything
twice. The best prompt goes live by moving one alias.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.config import Config
from lightning.errors import ConfigError, DataError, PolicyServerError, RunnerError
from lightning.instrument.components import declared_prompts
from lightning.tracking.trackers import Trackers
from lightning.trainer.plan import VAL
from lightning.trainer.stack import Stack
from lightning.trainer.summary import Reporter, reason
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Json, Rollout, Task
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource, set_alias
from lightning_resources.prompts import bindable
from lightning_resources.reference import find, parse_reference

from lightning_prompts.chat_model import ChatClient, Messages
from lightning_prompts.config import OptimizerModelConfig
from lightning_prompts.protocol import (
    BudgetSpentError,
    OptimizerModel,
    Trial,
)
from lightning_prompts.transcripts import Transcripts

if TYPE_CHECKING:
    from lightning_prompts.algorithm import PromptAlgorithm

logger = logging.getLogger(__name__)

FINAL = "final"
"""The key of the trial that measures the chosen prompt once more, on new rollouts."""


def optimizer_in(config: Config) -> OptimizerModel | None:
    """Return the optimiser model of the settings; None if they name none. Raises `ConfigError` for settings that are not
    valid."""
    section = OptimizerModelConfig.of(config)
    section.check()
    return None if section == OptimizerModelConfig() else OptimizerModel(**section.model_dump())


async def tune(
    stack: Stack,
    algorithm: PromptAlgorithm,
    train: Sequence[Task],
    val: Sequence[Task],
    reporter: Reporter,
    trackers: Trackers,
    began: float,
) -> Resource:
    """Run the algorithm to its end (a resumed run continues where it stopped), point its alias to the best prompt, and return
    that.

    `began` is the `time.monotonic` at which the run's start began. Raises `PolicyServerError` for an attached server that was
    left in the middle of an update, `ConfigError` if the budget ends before the algorithm has a prompt.
    """
    for lost in (server.url for server in stack.servers if server.version < 0):  # no update comes that ends its waiting
        raise PolicyServerError(
            f"the policy server at {lost} was left in the middle of an update and serves nothing: start it anew,"
            " or resume the training that was updating it"
        )
    component = component_of(algorithm)
    start = await _starting_prompt(stack, algorithm, component)
    stack.prompts = prompts = bindable(stack.prompts)
    prompts.bind(component, start)
    await prompts.load(stack.store)
    await stack.tell_how_to_call()
    made = len(await all_rollouts(stack.store, stack.run.id))
    told = {point.step: point.values for point in await stack.store.metrics(stack.run.id)}
    bench = PromptBench(stack, algorithm, start, train, val, reporter, trackers, made, told)
    await stack.store.log_metrics(stack.run.id, 0, {"seconds/start": time.monotonic() - began})
    try:
        best = await algorithm.tune(bench)
    except BudgetSpentError as spent:
        raise ConfigError(
            f"{algorithm.name} ended without a prompt: {spent}. Resume with a larger max_rollouts, or catch BudgetSpentError"
            " in tune() and return the best so far"
        ) from spent
    await bench.measure(best)
    if (
        await bench.recall("live") != best.version
    ):  # equal after the resume of a finished run, whose alias somebody may have moved
        await set_alias(stack.store, best.name, algorithm.alias, best.version)
        await bench.remember("live", best.version)
    file = await asyncio.to_thread(_write, stack.folder, component, str(best.content))
    reporter.say(f"{best.name}@{algorithm.alias} is version {best.version} now: {file}")
    return best


def component_of(algorithm: PromptAlgorithm) -> str:
    """Return the name of the component to tune. Raises `ConfigError` if the algorithm names none and the agent's module does
    not make exactly one component with a prompt."""
    known = sorted(declared_prompts())
    if algorithm.component:
        if known and algorithm.component not in known:  # it may be made inside the agent, which has not run yet
            logger.warning(
                "%s tunes the component %r, and the agent's module makes %s: check the name unless the agent makes it later",
                algorithm.name,
                algorithm.component,
                ", ".join(map(repr, known)),
            )
        return algorithm.component
    if len(known) != 1:
        raise ConfigError(
            f"which prompt is to be tuned? {algorithm.name} has no component, and the agent's module makes "
            f"{'components ' + ', '.join(map(repr, known)) if known else 'no component(..., prompt=...)'}: give component=..."
        )
    return known[0]


async def _starting_prompt(stack: Stack, algorithm: PromptAlgorithm, component: str) -> Resource:
    name = stack.prompts.bound.get(component, component)
    key = f"{algorithm.name}/start"
    kept = await stack.store.get_state(stack.run.id, key)
    if isinstance(kept, int):
        return await find(stack.store, parse_reference(f"{name}@{kept}"))
    text = algorithm.prompt
    if text is None and name in stack.prompts.versions:
        start = await find(stack.store, parse_reference(f"{name}@{stack.prompts.versions[name]}"))
    else:
        if text is None:
            text = stack.prompts.own.get(component, declared_prompts().get(component))
        if text is None:
            raise ConfigError(
                f"the prompt of component {component!r} is not known: make the component at the top of the agent's module, "
                f"as {component} = lightning.component({component!r}, prompt=...), or give prompt=... to {algorithm.name}"
            )
        start = await put_resource(
            stack.store, Resource(name, text, metadata={"made_by": "start", "run": stack.run.id})
        )
    await stack.store.put_state(stack.run.id, key, start.version)
    return start


def _write(folder: Path, component: str, text: str) -> Path:
    file = inside(folder / "prompts", f"{component}.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(file)


def inside(root: Path, name: str) -> Path:
    """Return the path `root/name`. Raises `DataError` for a name that is empty or absolute, has `..`, a NUL or a backslash, or
    leads through a symbolic link below the root."""
    parts = Path(name).parts
    climbs = not parts or ".." in parts or Path(name).is_absolute() or "\0" in name or "\\" in name
    if climbs:
        raise DataError(f"{name!r} cannot name a file below {root}: use a plain name, without .. and no absolute path")
    file = root
    for part in parts:
        file /= part
        if file.is_symlink():
            raise DataError(f"{name!r} leads out of {root}: {file} is a symbolic link; remove it")
    return file


class PromptBench:
    """The bench of one run. `made` counts the rollouts that the run has in the store, `told` has its stored metrics by step.

    A resumed run first repeats its earlier requests, whose results are stored. Until the first new rollout or question,
    nothing is timed, and no stored metric is logged again.
    """

    def __init__(
        self,
        stack: Stack,
        algorithm: PromptAlgorithm,
        start: Resource,
        train: Sequence[Task],
        val: Sequence[Task],
        reporter: Reporter,
        trackers: Trackers,
        made: int,
        told: Mapping[int, Mapping[str, float]],
    ) -> None:
        self._stack, self._algorithm = stack, algorithm
        self.seed, self.start, self.train, self.val = stack.config.trainer.seed, start, train, val
        self._reporter, self._trackers, self._made = reporter, trackers, made
        server = stack.servers[0]
        policy = OptimizerModel(server.model, f"{server.url}/v1", api_key_env="")
        self._client = ChatClient(algorithm.optimizer_model or optimizer_in(stack.config) or policy)
        self._transcripts = Transcripts(stack.store, server)
        self._told = dict(told)
        self._again = True
        self._seconds: dict[str, float] = {}
        self._last_step = 0

    async def run(self, trials: Sequence[Trial], *, reserve: int = 0) -> list[list[Rollout]]:
        """Run the trials, and return the finished rollouts of each. Raises `BudgetSpentError` as `Bench.run` does, and
        `RunnerError` if infrastructure lost every rollout."""
        if not trials:
            return []
        return await self._run(trials, reserved=len(self.val) + reserve)

    async def _run(self, trials: Sequence[Trial], *, reserved: int) -> list[list[Rollout]]:
        planned = [await self._planned(trial) for trial in trials]
        wanted = [rollout for rollouts in planned for rollout in rollouts]
        known = [await self._stack.store.get_rollout(rollout.id) for rollout in wanted]
        new = [rollout for rollout, kept in zip(wanted, known, strict=True) if kept is None]
        limit = self._algorithm.max_rollouts
        if limit is not None and new and self._made + len(new) + reserved > limit:
            raise BudgetSpentError(f"{len(new)} more rollouts do not fit into max_rollouts={limit}")
        what = "held-out tasks" if trials[0].tasks == self.val else "rollouts"
        self._reporter.phase(f"{what} of {len(trials)} prompts", len(wanted))
        self._again = self._again and all(kept is not None and kept.status.ended for kept in known)
        began = time.monotonic()
        await self._stack.execute(wanted, self._finished)
        self._made += len(new)
        if not self._again:
            phase = "eval" if what == "held-out tasks" else "rollout"
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began
        found = [[await self._ended(rollout) for rollout in rollouts] for rollouts in planned]
        ended = [rollout for rollouts in found for rollout in rollouts]
        if ended and all(rollout.fault is Fault.INFRASTRUCTURE for rollout in ended):
            raise RunnerError(
                f"all {len(ended)} rollouts were lost to the infrastructure; the first: {reason(ended[0].error)} "
                f"(resume the run when it is repaired; lightning runs show {self._stack.run.id} --failed)"
            )
        return found

    async def _planned(self, trial: Trial) -> list[Rollout]:
        """Return the rollouts of a trial, with new ids if all earlier ones were lost to the infrastructure."""
        generation = 0
        while True:
            rollouts = self._rollouts(trial, generation)
            known = [await self._stack.store.get_rollout(rollout.id) for rollout in rollouts]
            if not known or not all(item is not None and item.fault is Fault.INFRASTRUCTURE for item in known):
                return rollouts
            generation += 1

    def _rollouts(self, trial: Trial, generation: int) -> list[Rollout]:
        run = self._stack.run.id
        prefix = f"{run}/{trial.key}/v{trial.version}" + (f"~{generation}" if generation else "")
        return [
            Rollout(
                id=f"{prefix}/{place}",
                run=run,
                task=task,
                group=f"{prefix}/{place}",
                step=trial.step,
                split=trial.split,
                max_attempts=self._stack.config.runner.max_attempts,
                resources={self.start.name: trial.version},
            )
            for place, task in enumerate(trial.tasks)
        ]

    async def _ended(self, rollout: Rollout) -> Rollout:
        found = await self._stack.store.get_rollout(rollout.id)
        assert found is not None, "it was created before it was run"
        assert found.status.ended, "execute returns when every rollout has ended"
        return found

    def _finished(self, rollout: Rollout) -> None:
        self._reporter.rollout(rollout)
        self._trackers.finished(rollout)

    async def ask(self, key: str, messages: Messages) -> str:
        """Return the optimiser model's answer to a question, or the stored one if this `key` was asked before."""
        known = await self.recall(f"ask/{key}")
        if isinstance(known, str):
            return known
        self._again = False
        answer = await self._client.ask(messages)
        await self.remember(f"ask/{key}", answer)
        return answer

    async def keep(self, text: str, metadata: Mapping[str, Json]) -> Resource:
        """Store a text as a version of the prompt, and return that version."""
        made: dict[str, Json] = {"made_by": self._algorithm.name, "run": self._stack.run.id, **metadata}
        return await put_resource(self._stack.store, Resource(self.start.name, text, metadata=made))

    async def get(self, version: int) -> Resource:
        """Return a stored version of the prompt."""
        return await find(self._stack.store, parse_reference(f"{self.start.name}@{version}"))

    async def transcript(self, rollout: Rollout) -> str:
        """Return the model calls and tool runs of a rollout as text."""
        return await self._transcripts.of(rollout)

    async def recall(self, key: str) -> Json:
        """Return the value that was remembered under a key; None if there is none."""
        return await self._stack.store.get_state(self._stack.run.id, f"{self._algorithm.name}/{key}")

    async def remember(self, key: str, value: Json) -> None:
        """Keep a small value with the run, under a key."""
        await self._stack.store.put_state(self._stack.run.id, f"{self._algorithm.name}/{key}", value)

    async def report(self, step: int, metrics: Mapping[str, float], line: str) -> None:
        """Log the metrics of a step with the seconds spent on it, and print a line. Metrics that are stored already are not
        logged again."""
        self._last_step = max(self._last_step, step)
        self._stack.advanced()
        told = self._told.get(step, {})
        if not self._again or not metrics.keys() <= told.keys():  # the latter: killed before it was reported
            spent = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
            # A step may be reported again: when the best prompt is measured, and when a run continues with a larger budget.
            values = {**metrics, **{name: told.get(name, 0.0) + seconds for name, seconds in spent.items()}}
            self._seconds, self._told[step] = {}, {**told, **values}
            await self._stack.store.log_metrics(self._stack.run.id, step, values)
            self._trackers.log(step, values)
        self._reporter.say(line)

    async def measure(self, best: Resource) -> None:
        """Run the chosen prompt on the held-out tasks once more and report that, because the reward that it was chosen by is
        the highest of several and thus too optimistic."""
        trial = Trial(best.version, self.val, FINAL, VAL, max(self._last_step, 1))
        try:
            ((*rollouts,),) = await self._run([trial], reserved=0)
        except BudgetSpentError as spent:  # its reserve was used for rollouts that infrastructure lost
            self._reporter.say(f"version {best.version} is not measured again: {spent}")
            return
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        reward = sum(rewards) / len(rewards) if rewards else None
        values = {"eval/failed": float(len(rollouts) - len(rewards))} | (
            {} if reward is None else {"eval/reward": reward}
        )
        shown = "-" if reward is None else f"{reward:.3f}"
        await self.report(trial.step, values, f"held-out reward of version {best.version}, measured again: {shown}")
