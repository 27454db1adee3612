"""Run branches of a recorded rollout: the agent's code runs again, several times, and is sampled anew from one of its calls on.

The invariant: a branch that does not begin as its parent did has no reward and enters no statistic. The branches are a run of
their own in their parent's store, so that the parent's run does not change. The weights are those that answered the parent;
if other weights are used, a warning names them. The weights are served by a vLLM that is started for the branches, or by the
vLLM of the parent's run while that run is trained.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, Final

from lightning.asyncio_utils import outside_of_loops, run_to_end
from lightning.cli.output import load_agent, name_of, with_store
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.runner.protocol import Agent, Runner
from lightning.store.places import store_in
from lightning.store.protocol import Store
from lightning.store.url import parse
from lightning.trainer.agents import hidden_from_agents
from lightning.trainer.context import mark_over
from lightning.trainer.model import with_dtypes
from lightning.trainer.run_stages import Prompts
from lightning.trainer.runs import claim_folder
from lightning.trainer.stack import Stack, open_stack
from lightning.trainer.summary import Reporter
from lightning.trainer.training_data import all_rollouts
from lightning.types import Json, Rollout, Run
from lightning_record import exchanges

from lightning_branching.branch_parent import (
    Parent,
    config_of,
    file_at,
    find_parent,
    remarks,
    unused,
)
from lightning_branching.live_policy import LiveAgents, open_live, served_policy
from lightning_branching.policies import EvaluatedModel, find_model, model_of_run
from lightning_branching.prompt_texts import longest_literal, texts_in
from lightning_branching.recorded import CHANGES, edited, is_void, live_tools


def runner_here(name: str, agent: Agent, config: Config, out: Path, url: str) -> Runner:
    """Make the runner of this name, which runs the agent on this machine and hides the run's folder and store from it. Raises
    `ConfigError` for a runner whose agents run elsewhere."""
    runner = plugins().runner(name)(agent, hidden_from_agents(config, out, url))
    if runner.concurrency == 0:
        raise ConfigError(f"runner {name!r} runs no agents here, and this needs that: use process or inline")
    return runner


SPLIT: Final = "branch"
"""The split of branches: they are not trained on, and are no held-out evaluation."""


@dataclass(frozen=True, slots=True)
class BranchOutcome:
    """How a branch ended. `calls` counts its own answered calls, without those from the record. `state` is `valid` for a branch
    with a `reward`, `void` for a branch that did not begin as its parent did, else `failed`; `why` is the reason if there is no
    reward."""

    id: str
    calls: int
    reward: float | None
    state: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class BranchReport:
    """The results of the branches at one call. `mean` is the mean reward of the valid branches, `error` the standard error of
    the mean (None for fewer than two valid branches). The mean estimates the value of the state before the call, or with an
    `edit` the value of the edited answer. `warnings` name everything that differs from the user's options or from the parent's
    run."""

    run: str
    parent: str
    parent_reward: float | None
    at: int
    calls: int
    caller: str
    model: str
    edit: str | None
    branches: tuple[BranchOutcome, ...]
    mean: float | None
    error: float | None
    warnings: tuple[str, ...] = ()

    @property
    def valid(self) -> int:
        """The number of branches with a reward."""
        return sum(each.state == "valid" for each in self.branches)

    @property
    def advantage(self) -> float | None:
        """The parent's reward minus the mean reward of the branches; None if either is unknown."""
        return None if self.mean is None or self.parent_reward is None else self.parent_reward - self.mean


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything that is needed to run the branches: the checked options, and the weights that were found."""

    parent: Parent
    agent: Agent
    agent_name: str
    n: int
    config: Config
    model: EvaluatedModel
    edit: str | None
    prompts: Mapping[str, str]
    runner: str
    out: Path
    warnings: tuple[str, ...]
    live: bool


def branch(
    rollout: str,
    agent: Agent | str,
    *,
    at: int,
    n: int = 8,
    runs: str | Path = "runs",
    attempt: int | None = None,
    edit: str | None = None,
    prompts: Mapping[str, str] | None = None,
    sampling: Mapping[str, float | int] | None = None,
    weights: str = "",
    live: bool = False,
    settings: Mapping[str, object] | Callable[[Config], Config] | None = None,
    run_tools: bool = False,
    runner: str = "process",
    out: str | Path | None = None,
    progress: bool = False,
) -> BranchReport:
    """Run an agent `n` times more from call number `at` of a recorded rollout on; return when all branches have ended.

    Calls before that call are answered from the record. The other calls are sampled by a vLLM that is started with the weights
    that answered the call, or with `weights` (as for `lightning eval`). With `live` no vLLM is started: the policy of the
    rollout's run answers, as long as its trainer serves the version that answered the call. With `edit`, the call gets that
    text as its answer. `prompts` are other prompts by component, `sampling` parameters of the new calls
    (`{"temperature": 0.7}`), `settings` changes of the run's settings by dotted names, or a function that changes them; all
    else is as in the parent's run. `runs` is the place of the rollout: a folder of runs, a run's folder, a database, a URL. The
    agent is a function, or `MODULE:FUNCTION`. `run_tools` must be true if tools run again. `out` is a folder for vLLM's log and
    for weights that are computed again.

    Raises `ConfigError` or `DataError` for a rollout that cannot be branched with these options; a branch that fails is in the
    report.
    """
    if n < 1:
        raise ConfigError(f"n = {n}: give the number of branches, 1 or more")
    if live and weights:
        raise ConfigError(
            "--weights and --live exclude each other: with --live the run's trainer serves the policy, with its own weights. "
            "Leave one of the two out"
        )
    named = agent if isinstance(agent, str) else name_of(agent)
    function = load_agent(agent) if isinstance(agent, str) else agent

    def run() -> BranchReport:
        place, configure = str(runs), settings if callable(settings) else _with(settings or {})
        parent = find_parent(place, rollout, attempt, at)
        if edit is not None:
            edited(parent.at, edit)  # raises where the answer cannot be another text
        _check_tools(parent, n, run_tools=run_tools)
        config, said = config_of(parent, sampling or {}, configure, one_policy=bool(weights))
        if isinstance(settings, Mapping):
            said += filter(None, [unused(settings, live=live)])
        folder = _folder(parent) if out is None else Path(out)
        model, remark = (
            (served_policy(parent), "") if live else _model(parent, weights, place, folder / "models", config)
        )
        said += [*filter(None, [remark]), *remarks(parent, n, config.gateway.override_sampling)]
        plan = _Plan(
            parent, function, named, n, config, model, edit, prompts or {}, runner, folder.resolve(), tuple(said), live
        )
        with Reporter(enabled=progress) as reporter:
            for line in said:  # before the minutes that it takes
                reporter.say(line)
            return run_to_end(_branched(plan, reporter))

    return outside_of_loops(run)


def _with(settings: Mapping[str, object]) -> Callable[[Config], Config]:
    """Return a function that applies the environment's settings and then these to a configuration."""
    return lambda base: with_settings(load_config(base=base), settings)


def _check_tools(parent: Parent, n: int, *, run_tools: bool) -> None:
    """Raise `ConfigError` if tools of the rollout would run again and `run_tools` is false, because a tool may change
    something outside."""
    if (live := live_tools(parent.found.recorded, parent.prefix)) and not run_tools:
        raise ConfigError(
            f"these tools of the rollout run again in {n} branches: {', '.join(live)}. If that does no harm, say --yes "
            "(run_tools=True). From the call on all tools run. Before the call, tools of frameworks run, and tools of "
            "@lightning.tool are answered from the record"
        )


def _folder(parent: Parent) -> Path:
    """Return the default folder for vLLM's log and for weights that are computed again."""
    where = parse(parent.url)
    if parent.folder is not None:
        return parent.folder / "branches"
    return (Path(where.path).parent if where.scheme == "sqlite" else Path("runs")) / "branches"


def _model(parent: Parent, weights: str, runs: str, into: Path, config: Config) -> tuple[EvaluatedModel, str]:
    """Find the weights for the branches; return them with a warning about them, which is empty if they are the right ones."""
    if weights:
        return find_model(weights, _folder_of_runs(runs), into, config), ""
    return asyncio.run(
        with_store(
            parent.url,
            lambda store: model_of_run(store, parent.run, parent.folder, parent.version, into.resolve(), config),
        )
    )


def _folder_of_runs(place: str) -> Path:
    """Return the folder in which other runs are looked up by name, given the place of one run."""
    file = file_at(place)
    if file is None and "://" in place:
        return Path("runs")
    path = Path(place) if file is None else file.resolve().parent
    return path.resolve().parent if store_in(path) else path


@dataclass(frozen=True, slots=True)
class Answering:
    """What answers the agents of branches, and how they are run. `url` is the URL of the store. `model` has the weights of
    `version`, which answered the parents. `folder` gets vLLM's log and is held while the branches run. With `live_of` no vLLM
    is started: the policy of that run answers."""

    url: str
    config: Config
    model: EvaluatedModel
    version: int
    agent: Agent
    runner: str
    prompts: Mapping[str, str]
    folder: Path
    live_of: Run | None = None


async def run_branches(store: Store, run: Run, rollouts: Sequence[Rollout], how: Answering, reporter: Reporter) -> None:
    """Create a run and its rollouts, which are branches, and run each to its end. The run is marked as ended afterwards.

    Raises `ConfigError` if another process has begun the same run, or if no server answers."""
    async with AsyncExitStack() as resources:
        resources.enter_context(claim_folder(how.folder))
        runner = runner_here(how.runner, how.agent, how.config, how.folder, how.url)
        prompts = Prompts(dict(how.prompts))
        agents: Stack | LiveAgents
        if how.live_of is not None:
            agents = await open_live(resources, store, run, how.live_of, how.config, runner, prompts)
        else:
            reporter.phase(f"starting the policy server with {how.model.name}")
            agents = await open_stack(
                resources,
                run=run,
                config=with_dtypes(how.config, how.model.folder, "torch"),
                folder=how.folder,
                model=how.model.folder,
                store=store,
                runner=runner,
                prompts=prompts,
                restores=False,
            )
        if (stored := await store.put_run(run)).created_at != run.created_at:
            raise ConfigError(f"another process has begun {stored.id} in this moment: run the command again")
        try:
            if isinstance(agents, Stack):
                if how.model.trained is not None:
                    await agents.update(how.model.trained, how.version)
                await agents.tell_how_to_call()
            reporter.phase(run.id, len(rollouts))
            await agents.execute(list(rollouts), reporter.rollout)
        finally:
            await mark_over(store, run.id, True)


async def _branched(plan: _Plan, reporter: Reporter) -> BranchReport:
    parent = plan.parent
    async with plugins().opened_store(parent.url, make=False) as store:
        run, number = await _new_run(store, plan)
        how = Answering(
            parent.url,
            plan.config,
            plan.model,
            parent.version,
            plan.agent,
            plan.runner,
            {**parent.found.prompts, **plan.prompts},
            plan.out / run.id,
            parent.run if plan.live else None,
        )
        await run_branches(store, run, _rollouts(plan, run.id, number), how, reporter)
        return await _report(store, plan, run)


def _rollouts(plan: _Plan, run: str, number: int) -> list[Rollout]:
    """Return the rollouts of the branches. Their ids contain the number of the run, so that a second run of branches at the
    same call draws other seeds."""
    return [
        Rollout(
            id=f"{run}/{number}/{index}",
            run=run,
            task=plan.parent.rollout.task,
            group=f"{run}/{number}",
            split=SPLIT,
            index=index,
            max_attempts=plan.config.runner.max_attempts,
            parent=plan.parent.at.transition.key,
        )
        for index in range(plan.n)
    ]


async def _new_run(store: Store, plan: _Plan) -> tuple[Run, int]:
    """Return a new run for the branches, and its number among the runs of branches at this call, from 0."""
    parent = plan.parent
    base = base_name(parent.rollout.id, parent.at.number)
    known = {run.id for run in await store.list_runs(brief=True)}
    number = next(number for number in itertools.count() if _named(base, number) not in known)
    changes: dict[str, Json] = {
        "rollout": parent.rollout.id,
        "attempt": parent.rollout.attempt,
        "at": parent.at.number,
        "weights": plan.model.name,
    }
    if plan.live:
        changes["live"] = parent.version
    if plan.edit is not None:
        changes["edit"] = plan.edit
    if plan.prompts:
        changes |= {"prompts": True, "components": sorted(plan.prompts)}
    described: dict[str, Json] = {
        CHANGES: changes,
        "model": str(plan.model.folder),
        "evaluates": plan.model.name,
        "agent": plan.agent_name,
        "samples": plan.n,
        "seed": plan.config.trainer.seed,
        "config": plan.config.model_dump(mode="json"),
        "tasks": {"train": [], "val": []},
    }
    name = _named(base, number)
    return Run(name, name, described, time.time(), parent.run.project), number


def base_name(rollout: str, at: int) -> str:
    """Return the prefix of the ids of all runs of branches at call `at` of a rollout."""
    return f"{rollout.replace('/', '.')}-call{at}"


def _named(base: str, number: int) -> str:
    return f"{base}-{number + 1}" if number else base


async def _report(store: Store, plan: _Plan, run: Run) -> BranchReport:
    ended = sorted(await all_rollouts(store, run.id), key=lambda rollout: rollout.index)
    outcomes, used = [], not plan.prompts
    for rollout, beginning in zip(ended, await exchanges.parents_of(store, ended), strict=True):
        calls = await store.transitions(rollout.id)
        state = "valid" if rollout.reward is not None else "void" if is_void(rollout) else "failed"
        made = len({call.seq for call in calls if call.status.answered})
        outcomes.append(BranchOutcome(rollout.id, made, rollout.reward, state, rollout.error))
        asked = [exchange.request for exchange in exchanges.read(calls, beginning) if exchange is not None]
        used = used or state == "void" or _has_prompt(plan.prompts, asked)
    rewards = [each.reward for each in outcomes if each.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    parent, warnings = plan.parent, [*plan.warnings, *_hints(plan, outcomes)]
    if not used:
        names = ", ".join(sorted(plan.prompts))
        warnings.append(
            f"no call of a branch has the text that was given for {names}: the agent does not read this prompt"
        )
    return BranchReport(
        run.id,
        parent.rollout.id,
        parent.rollout.reward if parent.found.recorded.has_outcome else None,
        parent.at.number,
        len(parent.found.recorded.calls),
        parent.at.caller,
        plan.model.title,
        plan.edit,
        tuple(outcomes),
        mean,
        stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else None,
        tuple(warnings),
    )


def _hints(plan: _Plan, outcomes: list[BranchOutcome]) -> Iterator[str]:
    """Yield the reason why branches are void, for each changed prompt that is used by a call before the one to branch at."""
    if all(each.state != "void" for each in outcomes):
        return
    last = plan.parent.at.number if plan.edit is not None else plan.parent.at.number - 1
    calls = plan.parent.found.recorded.calls
    for component in sorted(plan.prompts):
        first = next((call for call in calls if component in call.caller.split("/")), None)
        if first is not None and first.number <= last:
            yield (
                f"a prompt holds from the beginning on, and {component} makes call {first.number} already, which must stay as "
                f"it was recorded: branch at call {first.number} (--at {first.number})"
            )


def _has_prompt(prompts: Mapping[str, str], requests: list[Any]) -> bool:
    """Whether a request contains one of the prompts, by the longest part of it that is no field."""
    literals = [longest_literal(text) for text in prompts.values()]
    return any(literal in text for request in requests for text in texts_in(request) for literal in literals if literal)
