"""`Trainer`: from an agent and its tasks to a better model, in one call.

The invariant: one folder (`out`) holds everything a run is: database, checkpoints, logs, metrics, final model. The same call
with `resume=True` goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path

from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
from lightning.asyncio_utils import run_to_end
from lightning.config import Config, load_config, with_settings
from lightning.engines.protocol import ChecksModel, Engine, SendsWeights
from lightning.errors import ConfigError, DataError
from lightning.gateway.providers import read_providers
from lightning.plugins import plugins
from lightning.policy_server.profiles import shares_gpu
from lightning.policy_server.weight_transfer import Sender
from lightning.runner.protocol import Agent, Runner
from lightning.server.control import project_of
from lightning.server.projects import of_project
from lightning.store.epochs import Epoch, keep_epochs, mark_over
from lightning.store.protocol import Store
from lightning.store.resource_ref import DATABASE, run_id_of
from lightning.store.url import parse, redacted, sqlite_url
from lightning.tracking.alerts import read_alerts
from lightning.tracking.trackers import Trackers
from lightning.trainer.agents import hidden_from_agents
from lightning.trainer.algorithm import AlgorithmSchedule, resolve_schedule
from lightning.trainer.beginning import Beginning
from lightning.trainer.checkpoints import PROBE, Checkpoints, check_disk, keep_weights
from lightning.trainer.context import base_digest
from lightning.trainer.dev import DevReport, dry_run
from lightning.trainer.held_out import check_held_out
from lightning.trainer.loop import Loop
from lightning.trainer.model import resolve_model, with_dtypes
from lightning.trainer.plan import as_tasks
from lightning.trainer.prompts import Prompts, resolve_prompts
from lightning.trainer.recorded import RECORDED, Record, check_record, record_of, steps_of_pass
from lightning.trainer.replay import optimizer_of
from lightning.trainer.runs import check_run, claim_folder, describe_algorithm, name_folder
from lightning.trainer.stack import Stack, one_by_one, open_stack, together
from lightning.trainer.summary import Reporter, Summary, summarize
from lightning.types import Json, Run, Task

logger = logging.getLogger(__name__)


class Trainer:
    """Makes the model behind an agent better by reinforcement learning.

    `model` is a folder with a `transformers` causal LM, or the name of one on a model hub. `algorithm` is an object or the
    name of a registered one, alone or with arguments (`"grpo:group_size=4"`), or several in turn with the steps of each
    (`"sft:2,grpo:20"`; `trainer.steps` is then their sum unless it is set). `adapters` names the adapters to install in the
    agents' processes (default: all found), `train_agents` the agents to train, as globs on the caller path (default: all);
    `model:GLOB` is matched with the model that a call asked for, and a glob after `!` takes out what it matches.
    `engine`, `runner` and the scheme of `store` are names of plugins. `config` is a `lightning.config.Config` or a TOML file;
    the keyword arguments after it are shortcuts for its commonest fields and win over it. `out` is the run's folder; its name
    at the first start is the run's id. `from_run` is a run whose weights and optimizer a new one begins with: `"RUN@STEP"`, by
    its folder or its name beside `out`, or `"RUN"` for its last step. `recorded` is a run's folder, a database or its URL (with
    `#RUN`: of that run alone) whose scored rollouts are trained on in place of new ones; the agent then runs for `val` alone,
    and `trainer.steps` is one pass over the record unless it is set.

    Raises `ConfigError` for impossible settings and for what is no algorithm, and `PluginError` for unknown names, before
    anything is started.
    """

    def __init__(
        self,
        model: str | Path,
        algorithm: Algorithm | SearchAlgorithm | str = "grpo",
        *,
        adapters: Sequence[str] | None = None,
        train_agents: Sequence[str] = (),
        engine: str = "torch",
        runner: str = "process",
        store: str | None = None,
        policy_server: str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        from_run: str | None = None,
        recorded: str | None = None,
        config: Config | str | Path | None = None,
        steps: int | None = None,
        tasks_per_step: int | None = None,
        lr: float | None = None,
        seed: int | None = None,
        concurrency: int | None = None,
        progress: bool = True,
    ) -> None:
        base = config if isinstance(config, Config) else load_config(Path(config) if config else None)
        shortcuts: dict[str, object] = {
            "trainer.steps": steps,
            "trainer.tasks_per_step": tasks_per_step,
            "trainer.seed": seed,
            "engine.lr": lr,
            "runner.concurrency": concurrency,
            "runner.adapters": tuple(adapters) if adapters is not None else None,
            "policy_server.attach": policy_server,
        }
        schedule = resolve_schedule(algorithm)
        if isinstance(schedule, AlgorithmSchedule) and "steps" not in base.trainer.model_fields_set and steps is None:
            shortcuts["trainer.steps"] = schedule.steps
        given = {key: value for key, value in shortcuts.items() if value is not None}
        self.config = with_settings(base, given)
        _check_lifetimes(self.config)
        self._project = project_of(self.config)
        self.config.optimizer_model.check()  # settings are kept with the run: none that hold a password get that far
        read_providers(self.config.gateway.providers)
        if resume and out is None:
            raise ConfigError("resume needs the run to go on with: give its folder as `out` (--out runs/NAME)")
        self.model = self._base = resolve_model(model)
        self.algorithm = schedule.at(0) if isinstance(schedule, AlgorithmSchedule) else schedule
        self.schedule = schedule
        self.from_run, self.recorded = from_run, recorded
        if recorded is not None and isinstance(schedule, SearchAlgorithm):
            raise ConfigError("a search for prompts runs its agents: it cannot learn from what was recorded")
        if recorded is not None and self.config.trainer.order == "learnable":
            raise ConfigError("a record has no tasks to choose from: set trainer.order to 'shuffled' or 'given'")
        self._steps_set = "steps" in base.trainer.model_fields_set or "trainer.steps" in given
        self.train_agents = tuple(train_agents)
        self.engine = engine
        self._make_engine, self._make_runner = plugins().engine(engine), plugins().runner(runner)
        for tracker in self.config.trainer.trackers:
            plugins().tracker(tracker)
        read_alerts(self.config.trainer.alerts)
        if store is not None and store.partition("://")[0] in ("http", "https"):
            raise ConfigError(
                f"{redacted(store)} is a server: a trainer needs the database itself, as postgresql://, redis:// or sqlite:///"
            )
        self._store_url = store
        self.out = (
            Path(out) if out is not None else Path("runs") / datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        )
        self.resume, self.progress = resume, progress

    @property
    def run_id(self) -> str:
        """The run's id: the name its folder had when the run was started."""
        return run_id_of(self.out)

    def fit(self, agent: Agent | None, train: Sequence[Task | Json], val: Sequence[Task | Json] = ()) -> Summary:
        """Train until `trainer.steps`, evaluating on `val`; returns what was achieved.

        `agent(task, llm)` is called in worker processes with a `Task` and an `LLM`; it returns its reward. With
        `runner="remote"` clients call theirs, and `agent` may be None. Interrupting
        (Ctrl-C, SIGTERM) stops cleanly; call again with `resume=True` to go on. Raises `DataError` for an empty task list,
        `ConfigError` when the folder holds another run, and what the rooms raise (`PolicyServerError`, `EngineError`, ...).
        """
        return run_to_end(self._fit(agent, as_tasks(train, "train"), as_tasks(val, "val")))

    def dev(self, agent: Agent | None, tasks: Sequence[Task | Json], *, count: int = 4) -> DevReport:
        """Run the agent on a few tasks against the untrained model, without training, and report what was recorded.

        Use it to see that calls arrive, which agents they come from, and what the reward says, before a long run. An algorithm,
        a credit function or a loss of your own is tried on what was recorded; the first task is then run twice, so that there
        are rollouts to compare. What was recorded, and vLLM's log, stays in `out`/dev: each dry run is a run of its own in the
        store there, which `lightning runs` reads.
        """
        if not tasks:
            raise DataError("the list of tasks is empty: give dev() at least one")
        if self.from_run is not None:
            logger.warning("a dry run asks the model as it is in %s, not the weights of %s", self.model, self.from_run)
        return run_to_end(self._dev(agent, as_tasks(tasks, "tasks")[:count]))

    def summary(self) -> Summary:
        """What the run in `out` has achieved so far."""
        return run_to_end(self._summary())

    async def _fit(self, agent: Agent | None, train: list[Task], val: list[Task]) -> Summary:
        if not train and self.recorded is None:
            raise DataError("the list of training tasks is empty: give fit() at least one task in `train`")
        if train and self.recorded is not None:
            raise DataError("tasks to train on were given, and a record, which has its own: give one of both")
        if isinstance(self.algorithm, SearchAlgorithm):
            self.algorithm.check(val)
            _say_unused(self.config)
        else:
            check_held_out(self.config, val)
        runner = self._runner_of(agent, needed=bool(val) or self.recorded is None)
        began = time.monotonic()
        async with AsyncExitStack() as resources:
            resources.enter_context(claim_folder(self.out))
            reporter = resources.enter_context(Reporter(enabled=self.progress))
            store = self.open_store()
            await store.open()
            resources.push_async_callback(store.close)
            record = await self._open_record(resources, store, reporter)
            train = train if record is None else record.tasks
            described = self._described(train, val)
            if record is not None:
                described[RECORDED] = record.described()
            run = await check_run(
                store,
                self.run_id,
                described,
                resume=self.resume,
                project=self._project,
                searches=isinstance(self.schedule, SearchAlgorithm),
            )
            if not isinstance(self.algorithm, SearchAlgorithm):
                check_disk(self.out, self.model, self.config)
            computed = with_dtypes(self.config, self.model, self.engine)
            beginning = Beginning(
                store, self.out, self.model, self.schedule, computed, self._make_engine, self._store_url or "", reporter
            )
            run, epochs, self._base = await beginning.prepare(run, described, self.from_run)
            seen = of_project(store, run.project)
            prompts = await resolve_prompts(seen, run.id, self.config.runner.prompts, project=run.project)
            reporter.phase("starting the policy server and loading the model")
            if isinstance(self.schedule, SearchAlgorithm):
                stack = await self._open_stack(resources, self.out, run, store, runner, prompts)
                trackers = await self._begin(resources, stack, epochs)
                _say_how_to_join(stack, reporter)
                await self.schedule.search(stack, train, val, reporter, trackers, began)
                await mark_over(store, run.id, True)
                return await summarize(store, run.id)
            engine = self._make_engine(computed)
            resources.callback(engine.close)
            await _check_model(engine, self.model, reporter)
            critic = bool(epochs[-1].config.get("critic"))
            stack, base = await self._open_both(resources, run, store, runner, prompts, engine, critic=critic)
            trackers = await self._begin(resources, stack, epochs)
            await stack.tell_how_to_call()
            _say_how_to_join(stack, reporter)
            started = {"seconds/start": time.monotonic() - began}
            loop = Loop(
                stack, engine, self.schedule, train, val, self.train_agents, reporter, trackers, epochs, base, record
            )
            kept = await loop.run(started)
            await mark_over(store, run.id, True)
            summary = await summarize(store, run.id)
            steps, reward = (kept.step, kept.reward) if kept else (summary.steps, summary.after)
            made: dict[str, Json] = {"run": run.id, "steps": steps, "reward": reward}
            if kept is None and (probe := await asyncio.to_thread(loop.publisher.prober.probe)) is not None:
                made[PROBE] = {
                    "ids": [*probe.ids],
                    "logprobs": [0.0, *probe.logprobs[1:]],
                    "dtype": computed.engine.dtype,
                }
            await keep_weights(seen, self.out / "model", made)
            return summary

    async def _open_record(self, resources: AsyncExitStack, store: Store, reporter: Reporter) -> Record | None:
        """What the run is trained on, where that is a record; steps that were not set are one pass over it."""
        known = await store.get_run(self.run_id)
        record = await record_of(resources, self.recorded, known, self.out, self._project)
        if record is None or not isinstance(self.schedule, AlgorithmSchedule):
            return None
        if not self._steps_set:
            units = len(record.groups(self.schedule.at(0).group_size))
            steps = steps_of_pass(units, self.config.trainer.tasks_per_step)
            self.config = with_settings(self.config, {"trainer.steps": steps})
        await check_record(record, self.schedule, self.train_agents, self.config.trainer.policy_fault)
        unrated = f"; {record.unrated} conversations without feedback are left out" if record.unrated else ""
        reporter.say(
            f"{len(record.rollouts)} recorded rollouts of {len(record.tasks)} tasks in {record.place}{unrated}"
        )
        return record

    async def _open_both(
        self,
        resources: AsyncExitStack,
        run: Run,
        store: Store,
        runner: Runner,
        prompts: Prompts,
        engine: Engine,
        *,
        critic: bool,
    ) -> tuple[Stack, str]:
        """What samples and what trains, opened; and the digest of the model's folder."""
        # A server of our own has the weights of a run without steps; everything else is given its weights by the loop.
        restores = bool(
            self.config.policy_server.attach or await store.last_step(run.id) or self._checkpoints.newest(0) == 0
        )
        sender = engine.sender() if isinstance(engine, SendsWeights) else None
        # On one GPU vLLM measures what is free while it starts: nothing may be loaded there meanwhile.
        open_in_order = one_by_one if shares_gpu(self.config) else together
        return await open_in_order(
            self._open_stack(resources, self.out, run, store, runner, prompts, restores=restores, sender=sender),
            asyncio.to_thread(self._open_engine, engine, critic=critic),
        )

    async def _open_stack(
        self,
        resources: AsyncExitStack,
        folder: Path,
        run: Run,
        store: Store,
        runner: Runner,
        prompts: Prompts,
        *,
        restores: bool = False,
        sender: Sender | None = None,
    ) -> Stack:
        return await open_stack(
            resources,
            run=run,
            config=with_dtypes(self.config, self.model, self.engine),
            folder=folder,
            model=self._base,
            store=store,
            runner=runner,
            prompts=prompts,
            restores=restores,
            sender=sender,
        )

    def _runner_of(self, agent: Agent | None, *, needed: bool = True) -> Runner:
        """The runner. Raises `ConfigError` when it runs agents in this process and there is none, where one is `needed`."""

        def nobody(task: object, llm: object) -> float:
            raise DataError("there is no agent in this process")

        runner = self._make_runner(agent or nobody, hidden_from_agents(self.config, self.out, self._url()))
        if agent is None and runner.concurrency and needed:
            raise ConfigError("there is no agent: give one, or runner='remote' and start `lightning runner` elsewhere")
        return runner

    def _open_engine(self, engine: Engine, *, critic: bool) -> str:
        """Open it, and return the digest of the model's folder, which is read while the policy server starts."""
        engine.open(self._base, optimizer_of(self.config), seed=self.config.trainer.seed, critic=critic)
        return base_digest(self._base, self.out / "base.json")

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.out / "checkpoints", self.config.trainer.keep_checkpoints)

    async def _begin(self, resources: AsyncExitStack, stack: Stack, epochs: Sequence[Epoch]) -> Trackers:
        """Make it a run. Not before everything stands: a failed start leaves none that a corrected one would stumble over.

        Servers are not told yet how its agents call: a search for prompts knows its component later, and clients may lease
        what waits of a resumed run already, by what they were told before.
        """
        name_folder(self.out, stack.run.id, self._elsewhere())
        await stack.store.put_run(stack.run)
        await keep_epochs(stack.store, stack.run, epochs)
        await mark_over(stack.store, stack.run.id, False)
        await stack.prompts.keep(stack.store, stack.run.id)
        described = self._described((), ())
        trackers = Trackers(
            self.config.trainer.trackers,
            self.config,
            run=stack.run.id,
            folder=self.out,
            store=stack.store,
            about={name: described[name] for name in ("model", "algorithm", "train_agents")},
        )
        return resources.enter_context(trackers)

    async def _dev(self, agent: Agent | None, tasks: list[Task]) -> DevReport:
        runner = self._runner_of(agent)
        async with AsyncExitStack() as resources:
            folder = self.out / "dev"
            resources.enter_context(claim_folder(folder))
            reporter = resources.enter_context(Reporter(enabled=self.progress))
            store = plugins().store(sqlite_url(folder / DATABASE))
            await store.open()
            resources.push_async_callback(store.close)
            numbers = [int(run.id.removeprefix("dev-")) for run in await store.list_runs(brief=True)]
            name = f"dev-{max(numbers, default=0) + 1}"
            run = await store.put_run(Run(name, name, self._described(tasks, []), project=self._project))
            seen, given = of_project(store, run.project), self.config.runner.prompts
            prompts = await resolve_prompts(seen, run.id, given, home=self._url(), project=run.project)
            if not isinstance(self.algorithm, SearchAlgorithm):
                await _check_model(self._make_engine(self.config), self.model, reporter)
            reporter.phase("starting the policy server")
            stack = await self._open_stack(resources, folder, run, store, runner, prompts)
            await stack.tell_how_to_call()
            _say_how_to_join(stack, reporter)
            report = await dry_run(stack, tasks, self.train_agents, self.algorithm, reporter)
            said = f"what was recorded: `lightning runs show {run.id} --runs {folder}`"
            reporter.console.print(said, markup=False, highlight=False, soft_wrap=True)
            return report

    async def _summary(self) -> Summary:
        store = self.open_store()
        await store.open()
        try:
            return await summarize(store, self.run_id)
        finally:
            await store.close()

    def open_store(self) -> Store:
        """The run's store, not yet opened."""
        return plugins().store(self._url())

    def _url(self) -> str:
        return self._store_url or sqlite_url((self.out / "lightning.db").resolve())

    def _elsewhere(self) -> str:
        """The URL of a store outside the run's folder, as it is understood from any folder; empty when there is none."""
        if self._store_url is None:
            return ""
        where = parse(self._store_url)
        if where.scheme != "sqlite":
            return self._store_url
        return sqlite_url(Path(where.path).resolve(), sync=where.options.get("sync", ""))

    def _described(self, train: Sequence[Task], val: Sequence[Task]) -> dict[str, Json]:
        critic = isinstance(self.schedule, AlgorithmSchedule) and self.schedule.needs_critic
        return {
            "model": str(self.model),
            "algorithm": describe_algorithm(self.algorithm),
            "train_agents": list(self.train_agents),
            "engine": self.engine,
            "critic": self.config.engine.critic_trunk if critic else "",
            "seed": self.config.trainer.seed,
            "config": self.config.model_dump(mode="json"),
            "tasks": {"train": [task.id for task in train], "val": [task.id for task in val]},
        }


async def _check_model(engine: Engine, model: Path, reporter: Reporter) -> None:
    """Refuse a model folder that cannot be trained, or say what of it may not be expected, while nothing is started."""
    if isinstance(engine, ChecksModel) and (remark := await asyncio.to_thread(engine.check, model)):
        reporter.say(f"{model}: {remark}")


def _say_how_to_join(stack: Stack, reporter: Reporter) -> None:
    if stack.agents.elsewhere and stack.agents.how_to_join:
        reporter.say(f"agents run in clients; start one where they are to run: {stack.agents.how_to_join}")


def _say_unused(config: Config) -> None:
    """A search for prompts trains no weights and has its own order of tasks."""
    plain, asked = Config().trainer, config.trainer
    names = [name for name in ("keep", "patience", "order", "alerts") if getattr(asked, name) != getattr(plain, name)]
    if names:
        logger.warning("a search for prompts does not use trainer.%s: leave it away", ", trainer.".join(names))


def _check_lifetimes(config: Config) -> None:
    if config.gateway.token_ttl < config.runner.timeout:
        raise ConfigError(
            f"gateway.token_ttl ({config.gateway.token_ttl:g} s) is shorter than runner.timeout "
            f"({config.runner.timeout:g} s): an agent's key would expire under it. Raise gateway.token_ttl"
        )
